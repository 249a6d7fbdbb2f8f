"""What is recorded of a trial, in which order, and what is left when it cannot be; without Ray, Tune is played."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import ray

from dmlstudy.data import fold_scores_as_bytes, state_file, unit_scores_as_bytes
from dmlstudy.data.state_file import FILE
from dmlstudy.engine import recorder as recorders
from dmlstudy.engine.cluster import ClusterError
from dmlstudy.engine.gang import checkpoint_name
from dmlstudy.engine.mailbox import EMBEDDER, FOLD_SCORES, UNIT_SCORES
from dmlstudy.engine.progress import ProgressLines
from dmlstudy.engine.recorder import Recorder, StudyEnds
from dmlstudy.engine.tune_adapter import TuneSearch
from dmlstudy.records import TrialConfig, UnitScores
from dmlstudy.registry.runs import UNITS_SHA256, raw_runs
from dmlstudy.registry.tracking import StudyTracker, runs_of
from dmlstudy.search.ledger import commit_recorded
from dmlstudy.search.study_search import Assignment, StudySearch
from dmlstudy.spec import study_file
from dmlstudy.spec.pace import Trials, Work
from dmlstudy.store import Store, StoreError
from dmlstudy.training.checkpoint import Checkpoint

optuna.logging.set_verbosity(optuna.logging.WARNING)

RAW: dict[str, Any] = {
    "name": "s",
    "data": {"name": "digits"},
    "training": {"epochs": 4, "head_lr_mult": 1},
    "batch": {"classes": "all", "images_per_class": 4},
    "families": {"red": {"space": "contrastive"}},
    "search": {"trials_per_family": 1},
    "protocol": {"num_folds": 1, "verdict_seeds": 1},
}


CLASSES = UnitScores(units=[3, 5], counts=[2, 4], sums={"map_at_r": [0.5, 1.5]})


class Vault:
    """Answers as Ray's handle of the vault does, at once."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, bytes]] = {}
        self.files = SimpleNamespace(remote=lambda trial_id: self.held.get(trial_id, {}))
        self.drop = SimpleNamespace(remote=lambda trial_id: self.held.pop(trial_id, None))


class Session:
    """A search, a tracker and a recorder, with Tune's calls for one trial after another."""

    def __init__(
        self, store: Store, name: str, storage: optuna.storages.BaseStorage, **changes: object
    ) -> None:
        self.storage = storage
        self.tracker = StudyTracker(store, name, {})
        self.search = StudySearch(
            study_file.parse({**RAW, "name": name, **changes}),
            storage,
            self.tracker.finished_verdicts(),
            paused=self.tracker.paused_numbers(),
        )
        self.vault = Vault()
        self.checkpoints = store.study_folder(name) / "checkpoints"
        self.told: list[str] = []
        progress = ProgressLines(self.told.append, "map_at_r", Trials(2, 1), 3, 20, Work())
        self.recorder = Recorder(self.search, self.tracker, progress, self.vault, str(self.checkpoints))
        self.search.record_given_up = self.recorder.file_given_up

    def begin(self, trial_id: str) -> TrialConfig:
        """Tune starts the next trial, and its workers keep a state."""
        assert self.search.suggest(trial_id)
        self.recorder.on_trial_start(0, [], SimpleNamespace(trial_id=trial_id))
        config = self.search.assignments[trial_id].config
        self.keep(config)
        if config.phase == "verdict":
            self.vault.held[trial_id] = {UNIT_SCORES: unit_scores_as_bytes(CLASSES)}
            if config.keep_embedder:
                self.vault.held[trial_id] |= {
                    f"{EMBEDDER}/weights.safetensors": b"w",
                    f"{EMBEDDER}/embedder.json": b"{}",
                }
        else:
            self.vault.held[trial_id] = {FOLD_SCORES: fold_scores_as_bytes([CLASSES, CLASSES])}
        return config

    def keep(self, config: TrialConfig) -> None:
        Checkpoint(self.folder(config), config.fingerprint(), 0).offer(0, 1, [], dict)

    def folder(self, config: TrialConfig) -> Path:
        return self.checkpoints / checkpoint_name(config.model_dump(mode="json"))

    def end(self, trial_id: str, **more: object) -> None:
        """Tune has the trial's last result."""
        name = "map_at_r" if self.search.assignments[trial_id].number is not None else "test_map_at_r"
        result = {f"metrics/{name}": 0.5, "done": True, **more}
        TuneSearch(self.search).on_trial_complete(trial_id, result)
        self.recorder.on_trial_complete(0, [], SimpleNamespace(trial_id=trial_id, last_result=result))

    def uses(self, trial_id: str, energy_wh: float | None) -> None:
        """Tune has a report of a trial that has used so much so far."""
        result = {"energy_wh": energy_wh}
        self.recorder.on_trial_result(0, [], SimpleNamespace(trial_id=trial_id), result)

    def statuses(self) -> list[str]:
        return [run.data.tags["status"] for run in self.runs("tags.dmlstudy_kind != 'study'")]

    def runs(self, filter_string: str) -> list[Any]:
        return list(raw_runs(self.tracker.client, self.tracker.experiment_id, filter_string))


@pytest.fixture(autouse=True)
def _nothing_is_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders.ray, "get", lambda answer, timeout: answer)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store whose MLflow database is made once, for that takes seconds."""
    made = Store(tmp_path_factory.mktemp("recorder") / "store")
    made.prepare()
    return made


@pytest.fixture
def session(store: Store, tmp_path: Path) -> Session:
    return Session(store, tmp_path.name, optuna.storages.InMemoryStorage())


def again(session: Session, store: Store) -> Session:
    """The study resumed after its driver has gone."""
    return Session(store, session.tracker.study, session.storage)


def to_the_shipped_verdict(session: Session) -> TrialConfig:
    """Play the search and begin the verdict whose embedder is kept, as trial ``v``."""
    session.begin("a")
    session.end("a")
    return session.begin("v")


def test_what_a_trial_has_left_goes_when_it_is_recorded(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = to_the_shipped_verdict(session)
    assert config.keep_embedder
    there: list[bool] = []
    commit = session.search.commit

    def looking(trial_id: str) -> None:
        there.append((session.folder(config) / FILE).exists() and trial_id in session.vault.held)
        commit(trial_id)

    monkeypatch.setattr(session.search, "commit", looking)
    session.end("v")
    assert there == [True]
    assert session.vault.held == {}
    assert list(session.checkpoints.glob("*")) == []
    assert session.statuses() == ["finished", "finished"]
    run = session.tracker.verdict_run(config.family, config.seed)
    assert run is not None
    assert {file.path for file in session.tracker.client.list_artifacts(run.id, "embedder")} == {
        "embedder/weights.safetensors",
        "embedder/embedder.json",
    }


def test_what_failed_goes_too_and_what_was_interrupted_stays(session: Session, store: Store) -> None:
    config = session.begin("a")
    session.recorder.end_open_runs()
    assert session.recorder.failure is None
    assert session.folder(config).exists()
    resumed = again(session, store)
    assert resumed.begin("b") == config
    resumed.end("b", failure="the loss is nan")
    assert not resumed.folder(config).exists()
    assert resumed.statuses() == ["interrupted", "failed"]


def test_a_paused_trial_keeps_its_run_and_its_state_until_it_is_promoted_or_given_up(
    store: Store, tmp_path: Path
) -> None:
    """Two trials pause at step 2 of 4, and the driver dies; the better one goes on in its run, the other is over."""
    storage = optuna.storages.InMemoryStorage()
    asha = {"trials_per_family": 2, "scheduler": "asha", "reduction_factor": 2}

    def train(session: Session, trial_id: str, score: float, last: int) -> TrialConfig:
        config = session.begin(trial_id)
        for step in range(1, last + 1):  # also those from before, which are known
            session.search.observe(
                trial_id, {"step": float(step), "map_at_r": score, "train_loss": 1.0 / step}
            )
        return config

    session = Session(store, tmp_path.name, storage, search=asha)
    configs = []
    for trial_id, score in (("a", 0.3), ("b", 0.4)):
        configs.append(train(session, trial_id, score, 2))
        session.uses(trial_id, 1.5)
        session.end(trial_id, paused=True)
    assert session.statuses() == ["paused", "paused"]
    assert [run.info.status for run in session.runs("tags.status = 'paused'")] == ["SCHEDULED"] * 2
    assert all(session.folder(config).exists() for config in configs)
    assert any("paused, epoch 2 of 4" in line for line in session.told)

    session = Session(store, tmp_path.name, storage, search=asha)
    assert train(session, "c", 0.4, 4) == configs[1]
    assert sorted(session.statuses()) == ["paused", "running"]
    session.uses("c", 0.75)
    session.uses("c", 2.0)
    session.end("c")
    session.begin("v")
    assert sorted(session.statuses()) == ["finished", "pruned", "running"]
    assert not any(session.folder(config).exists() for config in configs)
    (best,) = session.runs("tags.status = 'finished'")
    history = session.tracker.client.get_metric_history(best.info.run_id, "train_loss")
    assert [point.step for point in history] == [1, 2, 3, 4]
    (other,) = session.runs("tags.status = 'pruned'")
    energies = [run.data.metrics["energy_wh"] for run in (best, other)]
    assert energies == [3.5, 1.5]  # reports tell sums since the session's begin, the run has what was before
    assert other.data.tags["reason"] == "stopped after epoch 2 of 4: not among its family's best 1/2 there"
    history = session.tracker.client.get_metric_history(other.info.run_id, "map_at_r")
    assert [(point.step, point.value) for point in history] == [(1, 0.3), (2, 0.3)]


@pytest.mark.parametrize(("scheduler", "fold_test"), [("halving", 0.0), ("asha", 0.5)])
def test_a_trial_whose_driver_died_before_it_was_stopped_has_a_run_that_says_so(
    store: Store, tmp_path: Path, scheduler: str, fold_test: float
) -> None:
    """With ``asha`` it has paused before, has gone on in its run, and is stopped by its first fold."""
    storage = optuna.storages.InMemoryStorage()
    changes: dict[str, Any] = {
        "search": {
            "trials_per_family": 24,
            "scheduler": scheduler,
            "reduction_factor": 2,
            "fold_test": fold_test,
        },
        "protocol": {"num_folds": 2, "verdict_seeds": 1},
    }
    session = Session(store, tmp_path.name, storage, **changes)

    def plays(trial_id: str) -> bool:
        """Train the next trial to its end or pause; False where it is to be stopped."""
        session.begin(trial_id)
        assignment = session.search.assignments[trial_id]
        score = random.Random(assignment.number).random()
        for step in range(1, 9):
            if session.search.observe(trial_id, {"step": float(step), "map_at_r": score, "train_loss": 1.0}):
                return False
            if step == assignment.pause_after:
                session.end(trial_id, paused=True)
                return True
        session.end(trial_id, **{"metrics/map_at_r": score})
        return True

    stopped = next(trial_id for trial_id in map(str, range(60)) if not plays(trial_id))
    assignment = session.search.assignments[stopped]
    assert assignment.continues_after == (2 if scheduler == "asha" else 0)
    session = Session(store, tmp_path.name, storage, **changes)
    assert not plays("again")
    session.end("again")
    runs = session.runs(f"tags.trial_number = '{assignment.number}'")
    assert sorted(run.data.tags["status"] for run in runs) == ["interrupted", "pruned"]
    (run,) = [run for run in runs if run.data.tags["status"] == "pruned"]
    assert run.data.tags["reason"] == assignment.reason
    assert run.info.status == "FINISHED"
    points = session.tracker.client.get_metric_history(run.info.run_id, "train_loss")
    assert {point.step for point in points} == {report["step"] for report in assignment.curve}
    assert not session.folder(assignment.config).exists()
    assert session.search.study.trials[assignment.number].state.name == "PRUNED"


def test_a_trial_whose_driver_died_before_its_pause_was_recorded_goes_there_again(
    store: Store, tmp_path: Path
) -> None:
    """So its run has all of its reports, whether it is promoted then or given up."""
    storage = optuna.storages.InMemoryStorage()
    asha = {"trials_per_family": 3, "scheduler": "asha", "reduction_factor": 2}
    for trial_id, statuses in (("a", ["running"]), ("b", ["interrupted", "running"])):
        session = Session(store, tmp_path.name, storage, search=asha)
        config = session.begin(trial_id)
        for step in (1.0, 2.0):
            session.search.observe(trial_id, {"step": step, "map_at_r": 0.3, "train_loss": 1.0})
        assert sorted(session.statuses()) == statuses
    session.end("b", paused=True)
    assert sorted(session.statuses()) == ["interrupted", "paused"]
    (run,) = session.runs("tags.status = 'paused'")
    points = session.tracker.client.get_metric_history(run.info.run_id, "train_loss")
    assert [point.step for point in points] == [1, 2]
    session = Session(store, tmp_path.name, storage, search=asha)
    assert session.begin("c") != config, "the next one, for this one rests"


def test_a_stopped_trial_may_keep_a_state_once_more(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "STOPPED_KEPT", 1)
    config = session.begin("a")
    assignment = session.search.assignments["a"]
    assignment.status = "pruned"
    session.recorder._forget("a", assignment)
    session.keep(config)
    session.recorder._forget("a", Assignment("b", config.model_copy(update={"seed": 9}), status="pruned"))
    assert list(session.checkpoints.glob("*")) == []


def test_over_s3_the_state_of_one_trial_goes_and_others_stay(
    session: Session, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.recorder._checkpoints = s3.uri("states/s")
    config = session.begin("a")
    name = checkpoint_name(config.model_dump(mode="json"))
    for folder in (f"states/s/{name}", f"states/s/{name}0", f"states/another/{name}"):
        state_file.at(s3.uri(folder)).write(b"state")
    session.end("a")
    assert s3.files("states") == [f"another/{name}/{FILE}", f"s/{name}0/{FILE}"]
    s3.stop()
    started, now = time.monotonic(), [0.0]
    session.recorder._forget("a", Assignment("a", config, status="finished"))
    once = time.monotonic() - started
    assert once > 1, "pyarrow tries for 6 seconds"
    tried: list[str] = []
    monkeypatch.setattr(
        recorders.state_file, "at", lambda folder: SimpleNamespace(remove=lambda: tried.append(folder))
    )
    monkeypatch.setattr(recorders.time, "monotonic", lambda: now[0])
    now[0] = started + 1.1 * once
    session.recorder._forget("a", Assignment("a", config, status="finished"))
    assert tried == [], "a further one is tried at once"
    now[0] = started + 25 * once
    session.recorder._remove("later")
    assert tried == ["later"]


@pytest.mark.parametrize("what", ["disk", "vault", "artifacts", "optuna", "lost"])
def test_what_cannot_be_recorded_ends_the_study_and_is_run_again(
    what: str, session: Session, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = to_the_shipped_verdict(session)
    error = OSError(28, "No space left on device\nin two lines")

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        if what == "disk":
            broken.setattr(Path, "write_bytes", fail)
        elif what == "vault":
            broken.setattr(recorders.ray, "get", fail)
        elif what == "artifacts":
            broken.setattr(session.tracker, "log_model", fail)
        elif what == "optuna":
            broken.setattr(session.search, "commit", fail)
        else:
            broken.setattr(recorders, "MOST_RETRAINED", 0)
            session.vault.held.clear()
        session.end("v")
        trial = SimpleNamespace(trial_id="v")
        session.recorder.on_trial_error(0, [], trial)  # as Tune does where a callback has raised
    failure = session.recorder.failure
    assert isinstance(failure, StoreError)
    kind = "RuntimeError: its results are lost" if what == "lost" else f"OSError: {error}".splitlines()[0]
    assert str(failure) == (
        f"{session.search.assignments['v'].label} could not be recorded ({kind});"
        " mend it and run the study again, it goes on from there"
    )
    with pytest.raises(StudyEnds):
        session.recorder.on_step_end(0, [])
    session.recorder.end_open_runs()
    assert (session.folder(config) / FILE).exists()
    assert ("v" in session.vault.held) is (what != "lost")
    runs = session.runs("tags.dmlstudy_kind = 'verdict'")
    assert len(runs) == 1, "no second run is opened"

    resumed = again(session, store)
    if what == "optuna":  # MLflow has all of a verdict, and Optuna none of it
        return
    assert resumed.begin("w") == config
    resumed.end("w")
    assert resumed.recorder.failure is None
    assert resumed.statuses() == ["finished", "interrupted", "finished"]


def test_a_run_that_cannot_be_opened_ends_the_study(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise StoreError("no MLflow server")

    monkeypatch.setattr(session.tracker, "start_trial", fail)
    session.begin("a")
    with pytest.raises(StudyEnds):
        session.recorder.on_step_end(0, [])
    assert str(session.recorder.failure) == "no MLflow server"
    session.end("a")
    session.recorder.end_open_runs()
    assert not session.search.study.trials[0].state.is_finished()


KILLED = """
import os, signal, sys
from pathlib import Path
import optuna
sys.path.insert(0, sys.argv[1])
from test_recorder import Session, recorders, to_the_shipped_verdict
from dmlstudy.store import Store
recorders.ray.get = lambda answer, timeout: answer
session = Session(Store(Path(sys.argv[2])), sys.argv[4], optuna.storages.RDBStorage(sys.argv[3]))
if sys.argv[4] == "killed":
    to_the_shipped_verdict(session)
    session.tracker.end_trial = lambda *_, **more: os.kill(os.getpid(), signal.SIGKILL)
    session.end("v")
else:
    session.search.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    session.begin("a")
    session.end("a")
"""


def test_a_driver_killed_between_a_trials_two_records_does_not_run_it_again(
    store: Store, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(store.root), url, "between"]
    assert subprocess.run(command, check=False, timeout=200).returncode == -9
    storage = optuna.storages.RDBStorage(url)
    (trial,) = storage.get_all_trials(storage.get_study_id_from_name("between"))
    assert not trial.state.is_finished()
    tracker = Session(
        store, "between", optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'other.db'}")
    ).tracker
    assert commit_recorded(storage, "between", tracker) == [0]
    resumed = Session(store, "between", storage)
    first = resumed.search.study.trials[0]
    (run,) = resumed.runs("tags.dmlstudy_kind = 'search'")
    assert (first.state.name, first.values) == ("COMPLETE", [run.data.metrics["map_at_r"]])
    resumed.begin("b")
    assert resumed.search.assignments["b"].number != 0
    assert commit_recorded(storage, "between", tracker) == []


def test_a_driver_killed_before_the_end_is_recorded_finds_the_state_again(
    store: Store, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(store.root), url, "killed"]
    assert subprocess.run(command, check=False, timeout=200).returncode == -9
    resumed = Session(store, "killed", optuna.storages.RDBStorage(url))
    (left,) = resumed.checkpoints.iterdir()
    assert resumed.tracker.finished_verdicts() == set()
    config = resumed.search.verdict_configs()[0]
    assert left == resumed.folder(config)
    assert resumed.begin("w") == config
    resumed.end("w")
    assert len(resumed.runs("tags.dmlstudy_kind = 'verdict' and tags.status = 'finished'")) == 1
    assert not left.exists()


def test_a_study_that_gets_no_room_ends_and_can_be_resumed(session: Session, store: Store) -> None:
    session.begin("a")
    session.end("a", failure="no room within resources.start_limit_s = 5; make room", unstarted=True)
    assert str(session.recorder.failure) == (
        "no room within resources.start_limit_s = 5; make room, and"
        f" `dmlstudy resume {session.tracker.study}` goes on"
    )
    assert session.statuses() == ["interrupted"]
    resumed = again(session, store)
    resumed.begin("b")
    assert resumed.search.assignments["b"].number == 0


def test_a_node_that_lacks_something_fails_no_configuration_and_ends_the_study(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.search, "has_progress", lambda: True)  # other trials may do well
    session.begin("a")
    session.end("a", failure="node 10.0.0.3 has no /data/birds", unstarted=True, unfit=True)
    study = session.tracker.study
    assert isinstance(session.recorder.failure, ClusterError)
    assert (
        str(session.recorder.failure)
        == f"node 10.0.0.3 has no /data/birds; `dmlstudy resume {study}` goes on"
    )
    with pytest.raises(StudyEnds):
        session.recorder.on_step_end(0, [])
    assert session.statuses() == ["interrupted"]
    assert not session.search.study.trials[0].state.is_finished()


def test_a_cluster_that_has_died_ends_the_study(session: Session) -> None:
    gone = ""
    session.recorder._watch = SimpleNamespace(why_gone=lambda: gone)  # type: ignore[assignment]
    session.recorder.on_step_end(0, [])
    gone = "Ray on this machine has died: its raylet is gone"
    with pytest.raises(StudyEnds):
        session.recorder.on_step_end(1, [])
    assert str(session.recorder.failure) == f"{gone}; `dmlstudy resume {session.tracker.study}` goes on"


def test_scores_by_class_are_kept_of_the_best_search_trial_and_of_the_verdict(
    session: Session, store: Store
) -> None:
    to_the_shipped_verdict(session)
    session.end("v")
    session.tracker.write_note()
    runs = runs_of(store, session.tracker.study)
    assert runs.fold_scores("red") == [CLASSES, CLASSES]
    (judged,) = runs.verdicts
    assert runs.unit_scores(judged) == CLASSES
    assert judged.tags[UNITS_SHA256] == CLASSES.digest()
    session.tracker.log_verdict_scores()
    again = runs_of(store, session.tracker.study)
    assert again.study.tags[UNITS_SHA256] == CLASSES.digest()
    assert again._of_verdicts == {(judged.family, 1): CLASSES}
    assert again.unit_scores(judged) == CLASSES


def test_a_search_trial_is_recorded_without_its_scores_by_class_where_the_vault_lost_them(
    session: Session, store: Store
) -> None:
    session.begin("a")
    session.vault.held.clear()
    session.end("a")
    assert session.recorder.failure is None
    session.tracker.write_note()
    assert runs_of(store, session.tracker.study).fold_scores("red") == []


@pytest.mark.parametrize("is_there_again", [True, False])
def test_a_verdict_whose_embedder_was_lost_with_the_vault_is_run_again(
    is_there_again: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = to_the_shipped_verdict(session)

    def dead(answer: object, timeout: float) -> object:
        raise ray.exceptions.ActorDiedError

    with monkeypatch.context() as killed:
        if is_there_again:
            session.vault.held.clear()
        else:
            killed.setattr(recorders.ray, "get", dead)
        session.end("v")
    assert session.recorder.failure is None
    assert (session.folder(config) / FILE).exists(), "its state was removed, and it would be trained again"
    assert "interrupted, goes on later: its results were lost with the vault" in session.told[-1]
    assert session.search.num_left
    assert session.begin("w") == config
    session.end("w")
    assert session.recorder.failure is None
    assert session.statuses() == ["finished", "interrupted", "finished"]
    assert session.tracker.verdict_run(config.family, config.seed) is not None


def test_a_lost_actor_is_not_counted_against_a_trial_that_makes_progress(session: Session) -> None:
    """``retries`` is 1: lost four times with an epoch in between each, it goes on; twice without one, it fails."""
    for number in range(4):
        session.begin(str(number))
        session.search.observe(str(number), {"step": number + 1.0, "map_at_r": 0.1})
        session.search.end(str(number), is_lost=True)
        assert session.search.assignments[str(number)].status == "interrupted"
        session.recorder.on_trial_error(0, [], SimpleNamespace(trial_id=str(number)))
    session.begin("again")
    session.search.end("again", is_lost=True)
    assert session.search.assignments["again"].status == "failed"


@pytest.mark.parametrize("is_dying", [True, False])
def test_a_trial_lost_with_the_whole_cluster_is_not_failed(
    is_dying: bool, session: Session, store: Store
) -> None:
    session.recorder._watch = SimpleNamespace(is_doubtful=lambda: is_dying)  # type: ignore[assignment]
    for trial_id in "abc"[: 3 if is_dying else 2]:
        session.begin(trial_id)
        session.search.end(trial_id, is_lost=True)
        session.recorder.on_trial_error(0, [], SimpleNamespace(trial_id=trial_id))
    trial = again(session, store).search.study.trials[0]
    assert trial.state.name == ("RUNNING" if is_dying else "FAIL")
