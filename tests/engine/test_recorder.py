"""What is recorded of a trial, in which order, and what is left when it cannot be; without Ray, Tune is played."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import ray

from dmlstudy.data import state_file
from dmlstudy.data.state_file import FILE
from dmlstudy.engine import recorder as recorders
from dmlstudy.engine.cluster import ClusterError
from dmlstudy.engine.gang import checkpoint_name
from dmlstudy.engine.progress import ProgressLines
from dmlstudy.engine.recorder import Recorder, StudyEnds
from dmlstudy.engine.tune_adapter import TuneSearch
from dmlstudy.records import TrialConfig
from dmlstudy.registry.runs import raw_runs
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.search.ledger import commit_recorded
from dmlstudy.search.study_search import Assignment, StudySearch
from dmlstudy.spec import study_file
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


class Vault:
    """Answers as Ray's handle of the vault does, at once."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, bytes]] = {}
        self.files = SimpleNamespace(remote=lambda trial_id: self.held.get(trial_id, {}))
        self.drop = SimpleNamespace(remote=lambda trial_id: self.held.pop(trial_id, None))


class Sitting:
    """A search, a tracker and a recorder, with Tune's calls for one trial after another."""

    def __init__(self, store: Store, name: str, storage: optuna.storages.BaseStorage) -> None:
        self.storage = storage
        self.tracker = StudyTracker(store, name, {})
        self.search = StudySearch(
            study_file.parse({**RAW, "name": name}), storage, self.tracker.finished_verdicts()
        )
        self.vault = Vault()
        self.checkpoints = store.study_folder(name) / "checkpoints"
        self.told: list[str] = []
        progress = ProgressLines(self.told.append, "map_at_r", 0, 3, 20)
        self.recorder = Recorder(self.search, self.tracker, progress, self.vault, str(self.checkpoints))

    def begin(self, trial_id: str) -> TrialConfig:
        """Tune starts the next trial, and its workers keep a state."""
        assert self.search.suggest(trial_id)
        self.recorder.on_trial_start(0, [], SimpleNamespace(trial_id=trial_id))
        config = self.search.assignments[trial_id].config
        self.keep(config)
        if config.keep_embedder:
            self.vault.held[trial_id] = {"weights.safetensors": b"w", "embedder.json": b"{}"}
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
def sitting(store: Store, tmp_path: Path) -> Sitting:
    return Sitting(store, tmp_path.name, optuna.storages.InMemoryStorage())


def again(sitting: Sitting, store: Store) -> Sitting:
    """The study resumed after its driver has gone."""
    return Sitting(store, sitting.tracker.study, sitting.storage)


def to_the_shipped_verdict(sitting: Sitting) -> TrialConfig:
    """Play the search and begin the verdict whose embedder is kept, as trial ``v``."""
    sitting.begin("a")
    sitting.end("a")
    return sitting.begin("v")


def test_what_a_trial_has_left_goes_when_it_is_recorded(
    sitting: Sitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = to_the_shipped_verdict(sitting)
    assert config.keep_embedder
    there: list[bool] = []
    commit = sitting.search.commit

    def looking(trial_id: str) -> None:
        there.append((sitting.folder(config) / FILE).exists() and trial_id in sitting.vault.held)
        commit(trial_id)

    monkeypatch.setattr(sitting.search, "commit", looking)
    sitting.end("v")
    assert there == [True]
    assert sitting.vault.held == {}
    assert list(sitting.checkpoints.glob("*")) == []
    assert sitting.statuses() == ["finished", "finished"]
    run = sitting.tracker.verdict_run(config.family, config.seed)
    assert run is not None
    assert {file.path for file in sitting.tracker.client.list_artifacts(run.id, "embedder")} == {
        "embedder/weights.safetensors",
        "embedder/embedder.json",
    }


def test_what_failed_goes_too_and_what_was_interrupted_stays(sitting: Sitting, store: Store) -> None:
    config = sitting.begin("a")
    sitting.recorder.end_open_runs()
    assert sitting.recorder.failure is None
    assert sitting.folder(config).exists()
    resumed = again(sitting, store)
    assert resumed.begin("b") == config
    resumed.end("b", failure="the loss is nan")
    assert not resumed.folder(config).exists()
    assert resumed.statuses() == ["interrupted", "failed"]


def test_a_stopped_trial_may_keep_a_state_once_more(
    sitting: Sitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "STOPPED_KEPT", 1)
    config = sitting.begin("a")
    assignment = sitting.search.assignments["a"]
    assignment.status = "pruned"
    sitting.recorder._forget("a", assignment)
    sitting.keep(config)
    sitting.recorder._forget("a", Assignment("b", config.model_copy(update={"seed": 9}), status="pruned"))
    assert list(sitting.checkpoints.glob("*")) == []


def test_over_s3_the_state_of_one_trial_goes_and_others_stay(
    sitting: Sitting, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sitting.recorder._checkpoints = s3.uri("states/s")
    config = sitting.begin("a")
    name = checkpoint_name(config.model_dump(mode="json"))
    for folder in (f"states/s/{name}", f"states/s/{name}0", f"states/another/{name}"):
        state_file.at(s3.uri(folder)).write(b"state")
    sitting.end("a")
    assert s3.files("states") == [f"another/{name}/{FILE}", f"s/{name}0/{FILE}"]
    s3.stop()
    started, now = time.monotonic(), [0.0]
    sitting.recorder._forget("a", Assignment("a", config, status="finished"))
    once = time.monotonic() - started
    assert once > 1, "pyarrow tries for 6 seconds"
    tried: list[str] = []
    monkeypatch.setattr(
        recorders.state_file, "at", lambda folder: SimpleNamespace(remove=lambda: tried.append(folder))
    )
    monkeypatch.setattr(recorders.time, "monotonic", lambda: now[0])
    now[0] = started + 1.1 * once
    sitting.recorder._forget("a", Assignment("a", config, status="finished"))
    assert tried == [], "a further one is tried at once"
    now[0] = started + 25 * once
    sitting.recorder._remove("later")
    assert tried == ["later"]


@pytest.mark.parametrize("what", ["disk", "vault", "artifacts", "optuna", "lost"])
def test_what_cannot_be_recorded_ends_the_study_and_is_run_again(
    what: str, sitting: Sitting, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = to_the_shipped_verdict(sitting)
    error = OSError(28, "No space left on device\nin two lines")

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        if what == "disk":
            broken.setattr(Path, "write_bytes", fail)
        elif what == "vault":
            broken.setattr(recorders.ray, "get", fail)
        elif what == "artifacts":
            broken.setattr(sitting.tracker, "log_model", fail)
        elif what == "optuna":
            broken.setattr(sitting.search, "commit", fail)
        else:
            broken.setattr(recorders, "MOST_RETRAINED", 0)
            sitting.vault.held.clear()
        sitting.end("v")
        trial = SimpleNamespace(trial_id="v")
        sitting.recorder.on_trial_error(0, [], trial)  # as Tune does where a callback has raised
    failure = sitting.recorder.failure
    assert isinstance(failure, StoreError)
    kind = (
        "RuntimeError: its trained embedder is lost"
        if what == "lost"
        else f"OSError: {error}".splitlines()[0]
    )
    assert str(failure) == (
        f"{sitting.search.assignments['v'].label} could not be recorded ({kind});"
        " mend it and run the study again, it goes on from there"
    )
    with pytest.raises(StudyEnds):
        sitting.recorder.on_step_end(0, [])
    sitting.recorder.end_open_runs()
    assert (sitting.folder(config) / FILE).exists()
    assert ("v" in sitting.vault.held) is (what != "lost")
    runs = sitting.runs("tags.dmlstudy_kind = 'verdict'")
    assert len(runs) == 1, "no second run is opened"

    resumed = again(sitting, store)
    if what == "optuna":  # MLflow has all of a verdict, and Optuna none of it
        return
    assert resumed.begin("w") == config
    resumed.end("w")
    assert resumed.recorder.failure is None
    assert resumed.statuses() == ["finished", "interrupted", "finished"]


def test_a_run_that_cannot_be_opened_ends_the_study(
    sitting: Sitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise StoreError("no MLflow server")

    monkeypatch.setattr(sitting.tracker, "start_trial", fail)
    sitting.begin("a")
    with pytest.raises(StudyEnds):
        sitting.recorder.on_step_end(0, [])
    assert str(sitting.recorder.failure) == "no MLflow server"
    sitting.end("a")
    sitting.recorder.end_open_runs()
    assert not sitting.search.study.trials[0].state.is_finished()


KILLED = """
import os, signal, sys
from pathlib import Path
import optuna
sys.path.insert(0, sys.argv[1])
from test_recorder import Sitting, recorders, to_the_shipped_verdict
from dmlstudy.store import Store
recorders.ray.get = lambda answer, timeout: answer
sitting = Sitting(Store(Path(sys.argv[2])), sys.argv[4], optuna.storages.RDBStorage(sys.argv[3]))
if sys.argv[4] == "killed":
    to_the_shipped_verdict(sitting)
    sitting.tracker.end_trial = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    sitting.end("v")
else:
    sitting.search.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    sitting.begin("a")
    sitting.end("a")
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
    tracker = Sitting(
        store, "between", optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'other.db'}")
    ).tracker
    assert commit_recorded(storage, "between", tracker) == [0]
    resumed = Sitting(store, "between", storage)
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
    resumed = Sitting(store, "killed", optuna.storages.RDBStorage(url))
    (left,) = resumed.checkpoints.iterdir()
    assert resumed.tracker.finished_verdicts() == set()
    config = resumed.search.verdict_configs()[0]
    assert left == resumed.folder(config)
    assert resumed.begin("w") == config
    resumed.end("w")
    assert len(resumed.runs("tags.dmlstudy_kind = 'verdict' and tags.status = 'finished'")) == 1
    assert not left.exists()


def test_a_study_that_gets_no_room_ends_and_can_be_resumed(sitting: Sitting, store: Store) -> None:
    sitting.begin("a")
    sitting.end("a", failure="no room within resources.start_limit_s = 5; make room", unstarted=True)
    assert str(sitting.recorder.failure) == (
        "no room within resources.start_limit_s = 5; make room, and"
        f" `dmlstudy resume {sitting.tracker.study}` goes on"
    )
    assert sitting.statuses() == ["interrupted"]
    resumed = again(sitting, store)
    resumed.begin("b")
    assert resumed.search.assignments["b"].number == 0


def test_a_node_that_lacks_something_fails_no_configuration_and_ends_the_study(
    sitting: Sitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sitting.search, "has_progress", lambda: True)  # other trials may do well
    sitting.begin("a")
    sitting.end("a", failure="node 10.0.0.3 has no /data/birds", unstarted=True, unfit=True)
    study = sitting.tracker.study
    assert isinstance(sitting.recorder.failure, ClusterError)
    assert (
        str(sitting.recorder.failure)
        == f"node 10.0.0.3 has no /data/birds; `dmlstudy resume {study}` goes on"
    )
    with pytest.raises(StudyEnds):
        sitting.recorder.on_step_end(0, [])
    assert sitting.statuses() == ["interrupted"]
    assert not sitting.search.study.trials[0].state.is_finished()


def test_a_cluster_that_has_died_ends_the_study(sitting: Sitting) -> None:
    gone = ""
    sitting.recorder._watch = SimpleNamespace(why_gone=lambda: gone)  # type: ignore[assignment]
    sitting.recorder.on_step_end(0, [])
    gone = "Ray on this machine has died: its raylet is gone"
    with pytest.raises(StudyEnds):
        sitting.recorder.on_step_end(1, [])
    assert str(sitting.recorder.failure) == f"{gone}; `dmlstudy resume {sitting.tracker.study}` goes on"


@pytest.mark.parametrize("is_there_again", [True, False])
def test_a_verdict_whose_embedder_was_lost_with_the_vault_is_run_again(
    is_there_again: bool, sitting: Sitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = to_the_shipped_verdict(sitting)

    def dead(answer: object, timeout: float) -> object:
        raise ray.exceptions.ActorDiedError

    with monkeypatch.context() as killed:
        if is_there_again:
            sitting.vault.held.clear()
        else:
            killed.setattr(recorders.ray, "get", dead)
        sitting.end("v")
    assert sitting.recorder.failure is None
    assert (sitting.folder(config) / FILE).exists(), "its state was removed, and it would be trained again"
    assert "interrupted, goes on later: its trained embedder was lost with the vault" in sitting.told[-1]
    assert sitting.search.num_left
    assert sitting.begin("w") == config
    sitting.end("w")
    assert sitting.recorder.failure is None
    assert sitting.statuses() == ["finished", "interrupted", "finished"]
    assert sitting.tracker.verdict_run(config.family, config.seed) is not None


def test_a_lost_actor_is_not_counted_against_a_trial_that_makes_progress(sitting: Sitting) -> None:
    """``retries`` is 1: lost four times with an epoch in between each, it goes on; twice without one, it fails."""
    for number in range(4):
        sitting.begin(str(number))
        sitting.search.observe(str(number), {"step": number + 1.0, "map_at_r": 0.1})
        sitting.search.end(str(number), is_lost=True)
        assert sitting.search.assignments[str(number)].status == "interrupted"
        sitting.recorder.on_trial_error(0, [], SimpleNamespace(trial_id=str(number)))
    sitting.begin("again")
    sitting.search.end("again", is_lost=True)
    assert sitting.search.assignments["again"].status == "failed"


@pytest.mark.parametrize("is_dying", [True, False])
def test_a_trial_lost_with_the_whole_cluster_is_not_failed(
    is_dying: bool, sitting: Sitting, store: Store
) -> None:
    sitting.recorder._watch = SimpleNamespace(is_doubtful=lambda: is_dying)  # type: ignore[assignment]
    for trial_id in "abc"[: 3 if is_dying else 2]:
        sitting.begin(trial_id)
        sitting.search.end(trial_id, is_lost=True)
        sitting.recorder.on_trial_error(0, [], SimpleNamespace(trial_id=trial_id))
    trial = again(sitting, store).search.study.trials[0]
    assert trial.state.name == ("RUNNING" if is_dying else "FAIL")
