"""Ctrl-C, SIGTERM and errors at any time of a study, without Ray: what its folder says of its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from mlflow.exceptions import MlflowException

from dmlstudy.engine.cluster import ClusterError
from dmlstudy.engine.interruption import Interruption, StudyInterrupted
from dmlstudy.patience import ServerPatience
from dmlstudy.registry.connection import Patience
from dmlstudy.spec import study_file
from dmlstudy.store import Store, StoreError
from dmlstudy.studies import run as studies

RAW: dict[str, Any] = {
    "name": "s",
    "data": {"name": "digits"},
    "training": {"epochs": 4, "head_lr_mult": 1},
    "batch": {"classes": "all", "images_per_class": 4},
    "families": {"red": {"space": "contrastive"}},
    "protocol": {"num_folds": 1, "verdict_seeds": 1},
}
SIGNALS = [signal.SIGINT, signal.SIGTERM]


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_request_is_noted_while_it_is_looked_at_and_interrupts_otherwise(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with Interruption() as interruption:
        with interruption.looked_at():
            send(number)
            assert interruption.is_requested()
            with pytest.raises(KeyboardInterrupt):
                send(number)
        with pytest.raises(KeyboardInterrupt):
            send(number)
    with Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            send(number)
        assert interruption.is_requested()
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_in_another_thread_nothing_is_heard() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def run() -> None:
        with Interruption():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


class Tracker:
    """Stands for MLflow, which takes what it is given, or nothing."""

    takes = True
    ended: list[str]

    def __init__(self, *_: object, **__: object) -> None:
        Tracker.ended = []
        self.patiently = Patience.__new__(Patience)
        self.patiently.server = ServerPatience("MLflow server", "", 0.0, lambda: True, print)

    def note_search(self, *_: object) -> None:
        pass

    def finished_verdicts(self) -> set[tuple[str, int]]:
        return set()

    def paused_numbers(self) -> set[int]:
        return set()

    def end_study(self, status: str, _: object) -> None:
        if not self.takes:
            raise StoreError("the MLflow store is away")
        Tracker.ended.append(status)


@contextmanager
def _nothing(*_: object) -> Iterator[None]:
    yield


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run a study whose parts are played, until this happens; what its folder says then."""

    def run(where: str, happens: Callable[..., Any], expected: type[BaseException]) -> dict[str, Any]:
        search = SimpleNamespace(counts=dict, best_numbers=dict, num_left=1, is_over=True)
        parts: dict[str, Any] = {
            "storage_of_driver": lambda *_: _nothing(),
            "commit_recorded": lambda *_: None,
            "StudySearch": lambda *_, **__: search,
            "run_trials": lambda *_: None,
            "conclude": lambda *_: None,
        }
        for name, part in (parts | {where: happens}).items():
            monkeypatch.setattr(studies, name, part)
        monkeypatch.setattr(studies.tracking, "StudyTracker", Tracker)
        monkeypatch.setattr(Patience, "__call__", lambda self, call: call())
        monkeypatch.setattr(studies, "connected", _nothing)
        monkeypatch.setattr(studies, "engine_noise_to", _nothing)
        store = Store(tmp_path / "store")
        with pytest.raises(expected):
            studies.run_study(study_file.parse(RAW), store, address=None, tell=lambda _: None)
        return store.read_state("s")

    return run


@pytest.mark.parametrize("where", ["storage_of_driver", "run_trials", "conclude"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_at_any_time_interrupts_the_study(
    where: str, number: signal.Signals, run: Callable[..., dict[str, Any]]
) -> None:
    state = run(where, lambda *_: send(number), StudyInterrupted)
    assert state["state"] == "interrupted"
    assert Tracker.ended == ["interrupted"]


@pytest.mark.parametrize("takes", [True, False])
def test_a_failure_is_noted_also_where_mlflow_takes_nothing(
    takes: bool, run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("the first reason")

    monkeypatch.setattr(Tracker, "takes", takes)
    state = run("run_trials", fail, StoreError)
    assert (state["state"], state["reason"]) == ("failed", "StoreError: the first reason")
    assert Tracker.ended == (["failed"] if takes else [])


def test_an_interruption_is_noted_also_where_mlflow_takes_nothing(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tracker, "takes", False)
    assert run("conclude", lambda *_: send(signal.SIGINT), StudyInterrupted)["state"] == "interrupted"


def test_a_server_that_is_away_is_not_waited_for_once_the_study_is_to_end(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = Store(tmp_path, f"http://127.0.0.1:{port}", patience_s=600.0)
    patiently = Patience(store, mlflow.MlflowClient(store.tracking_uri), lambda _: None)

    def away() -> None:
        raise MlflowException("API request failed")

    started = time.monotonic()
    with Interruption() as interruption, interruption.looked_at():
        patiently.server.gives_up = interruption.is_requested
        threading.Timer(0.5, send, [signal.SIGINT]).start()
        with pytest.raises(StoreError, match=r"no MLflow server at .* run the study again"):
            patiently(away)
    assert time.monotonic() - started < 300, "it has waited as long as it may"


def test_a_cluster_that_cannot_go_on_interrupts_the_study_and_the_reason_is_kept(
    run: Callable[..., dict[str, Any]],
) -> None:
    def dies(*_: object) -> None:
        raise ClusterError("Ray has died")

    state = run("run_trials", dies, ClusterError)
    assert (state["state"], state["reason"]) == ("interrupted", "Ray has died")
    assert Tracker.ended == ["interrupted"]
    by_hand = run("run_trials", lambda *_: send(signal.SIGINT), StudyInterrupted)
    assert (by_hand["state"], by_hand["reason"]) == ("interrupted", ""), "of the session before"


STUCK = """
import sys
from pathlib import Path
from types import SimpleNamespace
from dmlstudy.store import Store
from dmlstudy.studies import run as study
store = Store(Path(sys.argv[1]))
if sys.argv[2]:
    store.write_state("s", sys.argv[2])
try:
    asked = SimpleNamespace(is_requested=lambda: sys.argv[3] == "asked")
    tell = lambda line: print(line, flush=True)
    study._end_at_once(SimpleNamespace(name="s"), store, tell, asked, "Ray has died")
finally:
    print("the process goes on")
"""


@pytest.mark.parametrize(
    ("before", "after"), [("running", "interrupted"), ("finished", "finished"), ("", "")]
)
@pytest.mark.parametrize("why", ["asked", "died"])
def test_a_driver_that_waits_for_a_dead_ray_is_ended_with_one_line(
    tmp_path: Path, before: str, after: str, why: str
) -> None:
    """Nothing of it runs any more, for its main thread may be in a call that never returns."""
    command = [sys.executable, "-c", STUCK, str(tmp_path), before, why]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    again = "`dmlstudy resume s` goes on" if before else "run the same again"
    if why == "asked":
        goes_on = "`dmlstudy resume s`" if before else "the same command"
        wanted = 130, f"interrupted; what was finished is kept, {goes_on} goes on from there\n", ""
    else:
        wanted = 2, f"error: Ray has died; {again}\n", f"Ray has died; {again}"
    assert (ended.returncode, ended.stdout) == wanted[:2]
    if not before:  # a state without the study file would keep the name for ever
        assert not (tmp_path / "studies").exists()
        return
    state = json.loads((tmp_path / "studies" / "s" / "study.json").read_text())
    assert (state["state"], state.get("reason", wanted[2])) == (after, wanted[2])
