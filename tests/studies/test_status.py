"""Status, logs, stop and resume without Ray: storages and a folder as a study leaves them, and a played Tune."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from dmlstudy import store as stores
from dmlstudy.engine.stop_requests import Desk, request_stop, requested_stops, running_trials, tune_ids
from dmlstudy.records import (
    BatchConfig,
    DataConfig,
    EmbedderConfig,
    LossConfig,
    TrainingConfig,
    TrialConfig,
)
from dmlstudy.registry import connection, tracking
from dmlstudy.registry.runs import RunKind
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.search.study_search import Assignment, StudySearch
from dmlstudy.spec import study_file
from dmlstudy.spec.epochs import place
from dmlstudy.spec.pace import Trials, Work, seconds_left
from dmlstudy.spec.space import Fixed
from dmlstudy.spec.study_file import SpecError
from dmlstudy.store import Store, StoreError, seconds_spent, sole_driver
from dmlstudy.studies import run, stop
from dmlstudy.studies.logs import trial_log
from dmlstudy.studies.resume import resume as resumed
from dmlstudy.studies.status import planned_of, status_lines, status_row, statuses, study_status
from dmlstudy.studies.stop import stop_trial

optuna.logging.set_verbosity(optuna.logging.WARNING)

RAW: dict[str, Any] = {
    "name": "s",
    "data": {"name": "digits"},
    "training": {"epochs": 4, "head_lr_mult": 1},
    "batch": {"classes": "all", "images_per_class": 4},
    "families": {"red": {"space": "contrastive"}, "blue": {"space": "contrastive"}},
    "search": {"trials_per_family": 3},
    "protocol": {"num_folds": 1, "verdict_seeds": 1},
}


def config(family: str = "red", **more: Any) -> TrialConfig:
    parts = {
        "data": DataConfig(name="digits"),
        "embedder": EmbedderConfig(),
        "batch": BatchConfig(),
        "training": TrainingConfig(),
        "loss": LossConfig(name="contrastive"),
    }
    return TrialConfig(family=family, **parts | more)


class Tune:
    """What a scheduler sees of Tune's loop: live trials, and that one can be stopped."""

    def __init__(self, **statuses: str) -> None:
        self.live = [SimpleNamespace(trial_id=name, status=status) for name, status in statuses.items()]
        self.stopped: list[str] = []

    def get_live_trials(self) -> list[Any]:
        return self.live

    def stop_trial(self, trial: Any) -> None:
        self.stopped.append(trial.trial_id)
        self.live.remove(trial)


@pytest.fixture(autouse=True)
def _every_step_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmlstudy.engine.stop_requests.POLL_S", 0.0)


# The desk


def test_a_full_disk_costs_what_is_shown_and_not_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        patched.setattr("builtins.open", full)
        desk.note("a", Assignment("red #0", config(), 0))
        desk.serve(Tune(a="RUNNING"), {"a": Assignment("red #0", config(), 0)})
    assert running_trials(tmp_path) == []
    desk.serve(Tune(b="RUNNING"), {"b": Assignment("blue #1", config("blue"), 1)})
    assert [trial.number for trial in running_trials(tmp_path)] == [1]
    told: list[str] = []
    with run._kept(Path("/dev/full"), told.append) as tell:
        tell("1/9")
    assert told == ["1/9"]


def test_the_desk_shows_what_runs(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert running_trials(tmp_path) == []
    assignments = {
        "a": Assignment(
            "red #0", config(), 0, metrics={"map_at_r": 0.5}, curve=[{"step": 1.0}, {"step": 2.0}]
        ),
        "b": Assignment("blue #1", config("blue"), 1),
        "c": Assignment("red verdict seed 1", config(phase="verdict", seed=1)),
    }
    desk.serve(Tune(a="RUNNING", b="PENDING", c="RUNNING"), assignments)
    first, last = running_trials(tmp_path)
    assert (first.number, first.label, first.epoch, first.score) == (0, "red #0", 2, 0.5)
    assert (last.number, last.phase, last.epoch, last.score) == (None, "verdict", 0, None)
    assert (first.place, last.place) == ("epoch 2 of 20", "no epoch yet")
    desk.serve(Tune(a="RUNNING"), assignments)
    assert running_trials(tmp_path) == [first], "its start is kept"


def test_a_request_ends_a_running_trial_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assignments = {
        "a": Assignment("red #0", config(), 0, curve=[{"step": 1.0}]),
        "b": Assignment("x", config(), 1),
    }
    tune = Tune(a="RUNNING", b="PENDING")
    request_stop(tmp_path, 0)
    request_stop(tmp_path, 1)
    request_stop(tmp_path, 5)
    assert requested_stops(tmp_path) == [0, 1, 5]
    desk.serve(tune, assignments)
    assert tune.stopped == ["a"]
    assert (assignments["a"].status, assignments["a"].reason) == (
        "pruned",
        "stopped by hand after epoch 1 of 20",
    )
    assert requested_stops(tmp_path) == [1], "one that waits for its workers is ended when it starts"
    tune.live[0].status = "RUNNING"
    desk.serve(tune, assignments)
    assert tune.stopped == ["a", "b"]
    assert requested_stops(tmp_path) == []
    assert assignments["b"].reason == "stopped by hand before its first epoch ended"


def test_a_new_session_forgets_unanswered_requests_and_what_ran(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.serve(Tune(a="RUNNING"), {"a": Assignment("red #0", config(), 0)})
    request_stop(tmp_path, 0)
    Desk(tmp_path)
    assert requested_stops(tmp_path) == []
    assert running_trials(tmp_path) == []


def test_what_an_earlier_driver_showed_is_not_shown_while_the_next_one_starts(ran: Store) -> None:
    folder = ran.study_folder("s")
    with sole_driver(ran, "s"):
        Desk(folder).serve(Tune(a="RUNNING"), {"a": Assignment("red #0", config(), 0)})
        assert study_status(ran, "s").running != []
    time.sleep(0.02)
    with sole_driver(ran, "s"):
        status = study_status(ran, "s")
        assert (status.state, status.running) == ("running", [])
        Desk(folder)
        assert running_trials(folder) == []


def test_the_desk_is_not_asked_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmlstudy.engine.stop_requests.POLL_S", 60.0)
    desk = Desk(tmp_path)
    desk.serve(Tune(), {})
    request_stop(tmp_path, 0)
    desk.serve(Tune(), {})
    assert requested_stops(tmp_path) == [0]


def test_the_ids_of_a_trial_add_up_over_sessions(tmp_path: Path) -> None:
    assert tune_ids(tmp_path, 0) == []
    for trial_id in ("aa", "bb"):
        Desk(tmp_path).note(trial_id, Assignment("red #0", config(), 0))
    Desk(tmp_path).note("cc", Assignment("blue #1", config("blue"), 1))
    with open(tmp_path / "trials.jsonl", "a") as file:
        file.write('{"number": 0, "la')
    assert tune_ids(tmp_path, 0) == ["aa", "bb"]


def test_a_trial_stopped_by_hand_is_pruned_and_not_handed_out_again(tmp_path: Path) -> None:
    """With the real search: as Tune's ``stop_trial`` does, the searcher is told, then the callbacks commit."""
    storage = optuna.storages.InMemoryStorage()
    study = study_file.parse(RAW)
    search = StudySearch(study, storage, set())
    assert search.suggest("a") is not None
    search.observe("a", {"step": 1.0, "map_at_r": 0.4})
    desk, tune = Desk(tmp_path), Tune(a="RUNNING")

    def stop_trial(trial: Any) -> None:
        search.end(trial.trial_id)
        search.commit(trial.trial_id)
        tune.live.remove(trial)

    tune.stop_trial = stop_trial  # type: ignore[method-assign]
    request_stop(tmp_path, 0)
    desk.serve(tune, search.assignments)
    (frozen,) = search.study.get_trials(states=(TrialState.PRUNED,))
    assert frozen.user_attrs["reason"] == "stopped by hand after epoch 1 of 4"
    resumed = StudySearch(study, storage, set())
    resumed.suggest("b")
    assert resumed.assignments["b"].number != 0


# A store as a running study has it


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store whose MLflow database is made once, for that takes seconds."""
    made = Store(tmp_path_factory.mktemp("control") / "store")
    made.prepare()
    connection.connect(made, create=True)
    return made


@pytest.fixture(scope="module")
def ran(registry: Store) -> Store:
    """Study ``s``: red #0 finished, blue #1 stopped early, red #2 failed, blue #3 runs."""
    with sole_driver(registry, "s"):
        registry.write_state(
            "s",
            "running",
            started=time.time() - 100,
            spec=RAW,
            job="",
            num_search_trials=6,
            num_verdict_trials=3,
        )
    tracker = StudyTracker(registry, "s", {})
    study = optuna.create_study(storage=registry.optuna_url, study_name="s", direction="maximize")
    outcomes = ["finished", "pruned", "failed", "interrupted"]
    for number, outcome in enumerate(outcomes):
        family = ("red", "blue")[number % 2]
        study.enqueue_trial({}, user_attrs={"family": family})
        trial = study.ask()
        trial.suggest_float(f"{family}/loss.negative_margin", 0.1, 2.0)
        curve = [
            {"step": e, "map_at_r": 0.2 * e + 0.01 * number, "images_per_second": 100.0} for e in (1, 2, 3)
        ]
        for row in curve:
            trial.report(row["map_at_r"], int(row["step"]))
        run = tracker.start_trial(f"{family} #{number}", config(family), number)
        if outcome == "interrupted":
            continue
        reason = {"pruned": "not among the best", "failed": "loss is nan"}.get(outcome, "")
        tracker.end_trial(run, outcome, curve, curve[-1], reason)  # type: ignore[arg-type]
        trial.set_user_attr("reason", reason)
        states = {"pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        if outcome == "finished":
            study.tell(trial, curve[-1]["map_at_r"])
        else:
            study.tell(trial, state=states[outcome])
    return registry


@pytest.fixture
def running(ran: Store) -> Iterator[Desk]:
    """The desk of the study while its driver lives, with blue #3 at work."""
    with sole_driver(ran, "s"):
        desk = Desk(ran.study_folder("s"))
        assignment = Assignment(
            "blue #3", config("blue"), 3, metrics={"map_at_r": 0.63}, curve=[{"step": 3.0}]
        )
        desk.note("t3", assignment)
        desk.serve(Tune(t3="RUNNING"), {"t3": assignment})
        yield desk


def test_status_of_a_study_that_its_cluster_has_interrupted_says_why(ran: Store) -> None:
    known = json.loads((ran.study_folder("s") / "study.json").read_text())
    try:
        ran.write_state("s", "interrupted", reason="Ray on this machine has died")
        status = study_status(ran, "s")
        assert (status.state, status.reason) == ("interrupted", "Ray on this machine has died")
        assert status_row(status)[1] == "interrupted: Ray on this machine has died"
    finally:
        (ran.study_folder("s") / "study.json").write_text(json.dumps(known))


@pytest.mark.usefixtures("running")
def test_status_while_it_runs(ran: Store) -> None:
    status = study_status(ran, "s")
    assert (status.state, status.reason, status.notes, status.num_left) == ("running", "", [], 9 - 3)
    red, blue = status.families
    assert (red.num_finished, red.num_stopped, red.num_failed, red.num_judged) == (1, 0, 1, 0)
    assert (red.num_running, red.num_waiting) == (0, 1)
    assert (blue.num_finished, blue.num_stopped, blue.num_running, blue.num_waiting) == (0, 1, 1, 1)
    assert (red.best, red.best_trial, blue.best) == (pytest.approx(0.6), 0, None)
    (at_work,) = status.running
    assert (at_work.number, at_work.family, at_work.epoch, at_work.score) == (3, "blue", 3, 0.63)
    assert status.images_per_second == 100
    assert status.trials_per_hour is not None
    session = time.time() - ran.read_state("s")["started"]
    assert status.trials_per_hour == pytest.approx(3 * 3600 / session, rel=0.05), "start included"
    assert status.seconds_left is not None
    assert 100 <= status.seconds_spent < 400
    row = status_row(status)
    assert row[:7] == ["s", "running", "1 + 0 judged", "1", "1", "6", "0.6000 red"]
    lines = status_lines(status)
    assert lines[0].startswith("running: blue #3, epoch 3 of 20, 0.6300, for ")
    assert lines[1].endswith(" trials per hour, 100 images/s each")
    assert lines[2].startswith("estimated end: ")


@pytest.mark.usefixtures("running")
def test_where_seeds_may_be_added_what_is_left_is_a_bound_and_says_so(ran: Store) -> None:
    path = ran.study_folder("s") / "study.json"
    known = path.read_text()
    path.write_text(json.dumps(json.loads(known) | {"is_bound": True}))
    try:
        status = study_status(ran, "s")
    finally:
        path.write_text(known)
    assert status.is_bound
    assert status_row(status)[5] == "≤ 6"
    assert "at the latest" in status_lines(status)[2]


def test_a_crashed_study_says_how_to_go_on(ran: Store) -> None:
    status = study_status(ran, "s")
    assert status.state == "interrupted"
    assert status.notes == ["its process is gone; `dmlstudy resume s` goes on"]
    assert status.running == []
    assert status.families[1].num_waiting == 2, "what ran waits again"
    assert status.seconds_left is None
    with pytest.raises(StoreError, match=r"it is interrupted; its process is gone; `dmlstudy resume s`"):
        stop_trial(ran, "s", 3)


def test_status_in_the_verdict(ran: Store, running: Desk) -> None:
    """The search may have ended before its number of trials; then only the verdict is left."""
    desk_of_verdict = {"v": Assignment("red verdict seed 1", config(phase="verdict", seed=1))}
    running.serve(Tune(v="RUNNING"), desk_of_verdict)
    status = study_status(ran, "s")
    assert status.num_left == 3
    assert [family.num_waiting for family in status.families] == [0, 0]
    assert [family.num_running for family in status.families] == [1, 0]
    assert status_lines(status)[0].startswith("running: red verdict seed 1, no epoch yet, no score yet")


def test_status_without_mlflow_tells_of_the_search(ran: Store) -> None:
    status = study_status(Store(ran.root, "http://127.0.0.1:9"), "s")
    assert "of its verdict nothing is known: no MLflow server at http://127.0.0.1:9" in status.notes[-1]
    assert status.num("finished") == 1


@pytest.mark.usefixtures("running")
def test_logs_of_a_trial_that_runs(ran: Store) -> None:
    (ran.study_folder("s") / "engine.log").write_text("trial t3 started\nnothing\nworker of t3 says hello\n")
    lines = trial_log(ran, "s", 3)
    assert lines[0].startswith("trial 3 of s: running, epoch 3 of 20, for ")
    assert lines[-2:] == ["  trial t3 started", "  worker of t3 says hello"]
    assert "  loss: contrastive" in lines


def test_logs_of_ended_trials(ran: Store) -> None:
    failed = trial_log(ran, "s", 2)
    assert failed[0].startswith("trial 2 of s: failed")
    assert failed[1] == "reason: loss is nan"
    assert any(line.startswith("begun 20") and "failed after" in line for line in failed)
    curve = failed.index("learning curve")
    assert failed[curve + 1].split() == ["epoch", "objective", "images_per_second"]
    assert failed[curve + 4].split() == ["3/20", "0.62", "100"]
    assert trial_log(ran, "s", 1)[0].startswith("trial 1 of s: stopped early")
    with pytest.raises(StoreError, match=r"study 's' has no trial 4; it has #0 to #3 so far"):
        trial_log(ran, "s", 4)


def test_logs_of_a_trial_whose_folds_chose(ran: Store) -> None:
    assert "chosen" not in trial_log(ran, "s", 0)
    (run,) = tracking.runs_of(ran, "s").every(RunKind.SEARCH, number=0)
    for name, value in {"wise_ft": 0.5, "wise_ft_0.5_map_at_r": 0.7, "wise_ft_1.0_map_at_r": 0.6}.items():
        connection.connect(ran).log_metric(run.id, name, value)
    lines = trial_log(ran, "s", 0)
    assert lines[lines.index("chosen") + 1 :][:3] == [
        "  training.wise_ft: 0.5, chosen on the folds",
        "  wise_ft_0.5_map_at_r: 0.7",
        "  wise_ft_1.0_map_at_r: 0.6",
    ]


@pytest.mark.usefixtures("running")
def test_a_request_for_a_trial_that_does_not_run_is_refused_at_once(ran: Store) -> None:
    with pytest.raises(StoreError, match=r"trial 0 of 's' is not running; running are: blue #3 \("):
        stop_trial(ran, "s", 0)
    assert requested_stops(ran.study_folder("s")) == []


@pytest.mark.usefixtures("running")
def test_a_request_is_waited_for(ran: Store) -> None:
    folder = ran.study_folder("s")

    def driver() -> None:
        while not requested_stops(folder):
            time.sleep(0.01)
        storage = optuna.storages.RDBStorage(ran.optuna_url)
        trial = storage.get_all_trials(storage.get_study_id_from_name("s"))[3]
        storage.set_trial_user_attr(trial._trial_id, "reason", "stopped by hand after epoch 3")
        (folder / "wishes" / "3").unlink()

    thread = threading.Thread(target=driver)
    thread.start()
    assert stop_trial(ran, "s", 3) == "trial 3 of s is stopped by hand after epoch 3"
    thread.join()
    shown = stop_trial(ran, "s", 3, timeout_s=0.2)
    assert shown == "trial 3 of s was asked to stop, and ends when its study next looks"


HOLDER = """
import signal, sys, time
from pathlib import Path
from dmlstudy.store import Store, sole_driver
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs in the background ignore it
with sole_driver(Store(Path(sys.argv[1])), "s"):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("before", ["running", "failed"])
def test_stop_signals_the_holder_of_the_lock_alone(before: stores.State, tmp_path: Path) -> None:
    """The earlier driver's process number, which study.json still has, may be a stranger's by now."""
    store = Store(tmp_path)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    store.write_state("s", before, spec=RAW, job="", started=1.0)
    path = store.study_folder("s") / "study.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": stranger.pid}))
    assert stop.stop(store, "s").startswith("study s is not running: it is ")
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            assert (store.read_state("s")["pid"] == holder.pid) is (before == "running")
            assert stop.stop(store, "s") == "study s is stopped; `dmlstudy resume s` goes on with it"
            assert holder.wait(timeout=100) == -signal.SIGINT
            assert stranger.poll() is None
        finally:
            holder.kill()
            stranger.kill()
            stranger.wait()


def test_stop_where_no_signal_can_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.write_state("s", "running", spec=RAW, job="", started=1.0)
    with sole_driver(store, "s"):

        def gone(pid: int, number: int) -> None:
            assert (pid, number) == (os.getpid(), signal.SIGINT)
            raise ProcessLookupError(3, "No such process")

        monkeypatch.setattr(stop.os, "kill", gone)
        with pytest.raises(
            StoreError, match=r"its process \d+ takes no signal from here \(No such process\)"
        ):
            stop.stop(store, "s")
        lock = store.study_folder("s") / "lock"
        lock.write_text(json.dumps({"pid": 1, "host": "another"}))
        with pytest.raises(StoreError, match="study 's' runs on another; stop it there"):
            stop.stop(store, "s")
        lock.write_text("")
        with pytest.raises(StoreError, match="is only just starting"):
            stop.stop(store, "s")


def test_stop_waits_for_a_study_that_is_ending_and_does_not_disturb_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    monkeypatch.setattr(stop.os, "kill", lambda *_: pytest.fail("it was disturbed"))
    held = ExitStack()
    held.enter_context(sole_driver(store, "s"))
    store.write_state("s", "finished", spec=RAW, job="", started=1.0)
    monkeypatch.setattr(stop.time, "sleep", lambda _: held.close())
    assert stop.stop(store, "s") == "study s has come to its end by itself: it is finished"
    assert store.driver("s") is None


def test_looking_writes_nothing(ran: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmlstudy.search.storage.open_storage", lambda _: pytest.fail("opened to be written"))
    assert study_status(ran, "s").num("finished") == 1


def test_resume_reads_the_study_from_the_store(ran: Store) -> None:
    study, place = resumed(ran, "s")
    assert study.raw == RAW
    assert study.fingerprint() == study_file.parse(RAW).fingerprint()
    assert place == ran
    with sole_driver(ran, "s"), pytest.raises(StoreError, match="study 's' is running on"):
        resumed(ran, "s")


def test_resume_keeps_the_tracking_server(tmp_path: Path) -> None:
    Store(tmp_path, "http://host:5000").write_state("s", "interrupted", spec=RAW)
    assert resumed(Store(tmp_path), "s")[1].server == "http://host:5000"
    assert resumed(Store(tmp_path, "http://other:1"), "s")[1].server == "http://other:1"


@pytest.mark.parametrize("is_of_earlier_version", [False, True])
def test_resume_from_another_folder_finds_what_the_study_named(
    is_of_earlier_version: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = RAW | {"families": {"own": {"space": "own.yaml"}}}
    beside, store = tmp_path / "beside", Store(tmp_path / "store")
    beside.mkdir()
    (beside / "own.yaml").write_text("loss: {name: margin}\n")
    monkeypatch.chdir(beside)
    folders = {} if is_of_earlier_version else {"folders": [str(beside)]}
    store.write_state("s", "interrupted", spec=raw, **folders)
    monkeypatch.chdir(tmp_path)
    study, _ = resumed(store, "s")
    assert study.families["own"].space["loss.name"] == Fixed("margin")
    (beside / "own.yaml").unlink()
    with pytest.raises(SpecError, match=rf"{beside}/own\.yaml: no such file \(named by families\.own"):
        resumed(store, "s")


def test_epochs_are_counted_fold_by_fold(tmp_path: Path) -> None:
    more = {"num_folds": 3, "training": TrainingConfig(epochs=2)}
    assert [str(place(config(**more), step)) for step in (0, 1, 2, 3, 6)] == [
        "no epoch yet",
        "fold 1 of 3, epoch 1 of 2",
        "fold 1 of 3, epoch 2 of 2",
        "fold 2 of 3, epoch 1 of 2",
        "fold 3 of 3, epoch 2 of 2",
    ]
    verdict = config(phase="verdict", fold_models=True, **more)
    assert str(place(verdict, 7)) == "model 4 of 4, epoch 1 of 2"
    assert str(place(config(phase="verdict", **more), 2)) == "epoch 2 of 2"
    shown = Desk(tmp_path)
    shown.serve(Tune(a="RUNNING"), {"a": Assignment("red #0", config(**more), 0, curve=[{"step": 3.0}])})
    (trial,) = running_trials(tmp_path)
    assert (trial.step, trial.fold, trial.num_folds, trial.epoch, trial.num_epochs) == (3, 2, 3, 1, 2)
    assert trial.place == "fold 2 of 3, epoch 1 of 2"


def test_the_pace_leaves_out_the_burst_that_paid_for_the_start() -> None:
    def pace(moments: list[float], num_at_once: int) -> float | None:
        return seconds_left([(moment, 1.0) for moment in moments], num_at_once, Work(), Trials(search=1))

    assert pace([], 1) is None
    assert pace([100.0, 101.0], 2) is None, "two that ran at once say nothing"
    assert pace([100.0, 101.0, 160.0], 2) is None
    assert pace([100.0, 101.0, 160.0, 161.0], 2) == 30
    assert pace([100.0, 140.0], 1) == 40


def test_the_pace_is_of_work_and_an_untrained_trial_does_none() -> None:
    left = Trials(verdict=1)
    assert seconds_left([(100, 2), (105, 0)], 1, Work(), left) is None, "5 s say nothing of training"
    assert seconds_left([(100, 2), (105, 0), (145, 4)], 1, Work(), left) == 40 / 4
    four, one = Work.of(4, fold_models=True), Work.of(1, fold_models=False)
    assert (four.search, four.verdict) == (pytest.approx(3 + 1 / 3), 4)
    assert (one.search, one.verdict, one.of_all(Trials(3, 2, 7))) == (
        pytest.approx(2 / 3),
        1,
        pytest.approx(4),
    )


def test_untrained_trials_that_take_long_say_nothing_of_the_others_and_have_their_own_time() -> None:
    """As in a stream, whose untrained trials vote among neighbours: 100 of them, 25 s each, then two trained ones."""
    ends = [(25.0 * number, 0.0) for number in range(100)] + [(2490.0, 1.0), (2505.0, 1.0)]
    assert seconds_left(ends, 1, Work(), Trials(verdict=10)) == pytest.approx(150)
    assert seconds_left(ends[:100], 1, Work(), Trials(untrained=4)) == pytest.approx(100)
    assert seconds_left(ends[:100], 1, Work(), Trials(verdict=1, untrained=4)) is None
    assert seconds_left(ends, 1, Work(), Trials(verdict=2, untrained=2)) == pytest.approx(2 * 15 + 2 * 25)


def test_a_damaged_study_does_not_hide_the_others(ran: Store) -> None:
    folder = ran.study_folder("damaged")
    folder.mkdir(parents=True)
    try:
        for text, why in (
            ("", "it is empty"),
            ("{}", "it has no state"),
            ("[]", "it has no state"),
            ('{"state": "asleep"}', "it has no state"),
            ("{", "Expecting property name"),
        ):
            (folder / "study.json").write_text(text)
            damaged, whole = statuses(ran, None)
            assert (damaged.study, damaged.state, whole.study) == ("damaged", "unreadable", "s")
            (note,) = damaged.notes
            assert note.startswith(f"{folder / 'study.json'}: is damaged ({why}")
            assert note.endswith(
                "delete it and run the study file again: the databases keep what is finished, and"
                " the study goes on from there"
            )
            for ask in (study_status, resumed, stop.stop):
                with pytest.raises(StoreError, match="is damaged"):
                    ask(ran, "damaged")
            with pytest.raises(StoreError, match="is damaged"):
                ran.write_state("damaged", "running")
        (folder / "study.json").write_text('{"state": "finished"}')
        with pytest.raises(StoreError, match="does not hold the study file any more"):
            study_status(ran, "damaged")
    finally:
        shutil.rmtree(folder)


def test_a_study_that_was_asked_to_stop_has_not_crashed(ran: Store) -> None:
    mark = ran.study_folder("s") / stores.STOPPING
    mark.touch()
    try:
        state = ran.read_state("s")
        assert (state["state"], state["crashed"], state["stopped"]) == ("interrupted", False, True)
        assert study_status(ran, "s").notes == ["it was stopped on request; `dmlstudy resume s` goes on"]
    finally:
        mark.unlink()


def test_hints_carry_the_store_and_server_that_were_given(ran: Store) -> None:
    given = {"--store": "my store", "--tracking-uri": "http://host:1", "--address": "auto"}
    store = Store(ran.root, given=given)
    assert store == Store(ran.root)
    resume = "dmlstudy resume s --store 'my store' --tracking-uri http://host:1 --address auto"
    assert study_status(store, "s").notes == [f"its process is gone; `{resume}` goes on"]
    assert store.command("stop", "a b") == "dmlstudy stop 'a b' --store 'my store'"
    assert store.command("models") == "dmlstudy models --store 'my store' --tracking-uri http://host:1"
    assert Store(ran.root).command("models") == "dmlstudy models"


# Time over all sessions


def test_time_adds_up_over_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(stores.time, "time", lambda: now[0])
    store = Store(tmp_path)
    store.write_state("s", "running", started=now[0])
    now[0] += 60
    store.write_state("s", "interrupted")
    now[0] += 5000
    assert seconds_spent(store.read_state("s")) == 60
    store.write_state("s", "running", started=now[0])
    now[0] += 30
    store.write_state("s", "finished")
    assert seconds_spent(store.read_state("s")) == 90


def test_a_crashed_session_counts_to_its_last_sign_of_life(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_state("s", "running", started=time.time() - 40)
    assert seconds_spent(store.read_state("s")) == pytest.approx(40, abs=5)
    store.write_state("s", "running", started=time.time())
    store.write_state("s", "finished")
    assert seconds_spent(store.read_state("s")) == pytest.approx(40, abs=5)


def test_a_family_that_takes_anothers_best_waits_for_one_trial() -> None:
    state = {"num_search_trials": 13, "num_trials_of": {"taken": 1, "own": 6}}
    names = ["leader", "taken", "own"]
    assert [planned_of(name, state, names) for name in names] == [6, 1, 6]
    before = {"num_search_trials": 12}  # of an earlier version
    assert [planned_of(name, before, names) for name in names] == [4, 4, 4]
