"""Rows of the fault table, and what a study shows, stores and leaves while things are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlflow
import optuna
import psutil
import pytest

Record = Callable[[str, int, float], None]
DMLSTUDY = [sys.executable, "-m", "dmlstudy"]


@pytest.fixture
def record_fault(record_property: Callable[[str, object], None]) -> Record:
    """Note a fault, the trials lost to it, and the seconds until the study went on: a row of the fault table."""
    return lambda fault, num_lost, seconds: record_property("fault", (fault, num_lost, seconds))


def seconds_until_training(
    study_folder: Path, *, than: int | None = None, since: float | None = None, timeout: float = 300
) -> float:
    """Seconds until the study's driver shows an epoch that is news: of a trial whose number is above ``than``, or by
    default any that it did not show a second after this was called. Counted from ``since``, by default from now.
    """
    since = time.monotonic() if since is None else since
    known: set[tuple[str, int]] = set()
    if than is None:
        time.sleep(1)  # the driver shows what it knew before the fault up to half a second later
        known = {(trial["label"], trial["step"]) for trial in shown(study_folder)}
    end = time.monotonic() + timeout
    while not any(
        trial["step"] >= 1
        and (trial["label"], trial["step"]) not in known
        and (trial["number"] is None or trial["number"] > (-1 if than is None else than))
        for trial in shown(study_folder)
    ):
        assert time.monotonic() < end, shown(study_folder)
        time.sleep(0.05)
    return time.monotonic() - since


def shown(study_folder: Path) -> list[dict[str, Any]]:
    """The trials that the study's driver shows as running."""
    path = study_folder / "running.json"
    return list(json.loads(path.read_text())) if path.exists() else []


def marked(mark: str, name: str = "") -> list[psutil.Process]:
    """The processes that inherited the mark in their environment, with this in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("DMLSTUDY_TEST") == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE and name in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def left(mark: str, within: float = 30) -> list[psutil.Process]:
    """The processes that still carry the mark after so many seconds; a study's end does not wait for Ray's last."""
    end = time.monotonic() + within
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def trials_of(store: Path, study: str) -> list[optuna.trial.FrozenTrial]:
    """The study's trials as Optuna's storage has them."""
    return optuna.load_study(study_name=study, storage=f"sqlite:///{store / 'optuna.db'}").trials


def runs_left_open(store: Path, study: str) -> list[str]:
    """Names of the study's runs that are RUNNING in the store's MLflow."""
    client = mlflow.MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(study)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "attributes.status = 'RUNNING'")
    return [run.info.run_name for run in runs]


def board_of(store: Path, study: str) -> dict[str, Any]:
    """What ``dmlstudy leaderboard --json`` says of the study."""
    command = [*DMLSTUDY, "leaderboard", study, "--json", "--store", store]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


class Driver:
    """A ``dmlstudy`` that drives a study, in a process group of its own, and all that it starts."""

    def __init__(
        self,
        log: Path,
        *arguments: str | Path,
        environment: Mapping[str, str] = {},
        folder: Path | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.log = log
        self._file = open(log, "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*DMLSTUDY, *map(str, arguments)],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=os.environ | environment | {"DMLSTUDY_TEST": self.mark},
            start_new_session=True,
            cwd=folder,
        )

    def wait_until(self, what: Callable[[], object], timeout: float = 400, every: float = 0.05) -> None:
        """Wait for something to be true while the driver lives."""
        end = time.monotonic() + timeout
        while not what():
            assert self.process.poll() is None, f"it ended early: {self.log.read_text()}"
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(every)

    def said(self, pattern: str) -> Callable[[], object]:
        return lambda: re.search(pattern, self.log.read_text(), re.MULTILINE)

    def kill(self) -> None:
        """SIGKILL for the driver and its process group; Ray's processes are left to themselves."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def left(self, within: float = 30) -> list[psutil.Process]:
        """What still runs after so many seconds of all that inherited the driver's mark; Ray's last ones take some."""
        return left(self.mark, within)

    def end(self) -> None:
        """Leave nothing behind."""
        for process in marked(self.mark):
            process.kill()
        self.process.wait()
        self._file.close()
