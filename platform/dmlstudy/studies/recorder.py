"""The one place from which a running study writes: MLflow runs, trained embedders, progress lines."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune

from dmlstudy.registry.store import StoreError
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.studies.progress import Progress
from dmlstudy.studies.search import StudySearch


@ray.remote(num_cpus=0)
class Vault:
    """Holds trained embedders between the worker that trained one and the driver that files it."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, bytes]] = {}

    def put(self, trial_id: str, files: dict[str, bytes]) -> None:
        self._files[trial_id] = files

    def take(self, trial_id: str) -> dict[str, bytes]:
        return self._files.pop(trial_id, {})


class Recorder(tune.Callback):
    """Follows Tune's trials: opens an MLflow run for each, and ends it with its scores and reason."""

    def __init__(self, search: StudySearch, tracker: StudyTracker, progress: Progress, vault: Any) -> None:
        self._search = search
        self._tracker = tracker
        self._progress = progress
        self._vault = vault
        self._open: dict[str, tuple[str, float]] = {}
        self.failure: StoreError | None = None
        """Why nothing can be recorded any more. Tune swallows what a callback raises, so the study is stopped."""

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        assignment = self._search.assignments[trial.trial_id]
        run_id = self._tracker.start_trial(assignment.label, assignment.config, assignment.number)
        self._open[trial.trial_id] = (run_id, time.monotonic())

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if trial.trial_id not in self._open and not self.failure:  # it failed before it started
            self.on_trial_start(iteration, trials, trial)
        self._end(trial.trial_id)

    def end_open_runs(self) -> None:
        """End what an interruption has left open."""
        for trial_id in list(self._open):
            self._search.assignments[trial_id].status = "interrupted"
            self._end(trial_id)

    def _end(self, trial_id: str) -> None:
        if trial_id not in self._open or self.failure:
            return
        try:
            self._file(trial_id)
        except StoreError as error:
            self.failure = error
            self._search.assignments[
                trial_id
            ].status = "interrupted"  # it is run again when the store is mended
            os.kill(os.getpid(), signal.SIGINT)

    def _file(self, trial_id: str) -> None:
        run_id, started = self._open.pop(trial_id)
        assignment = self._search.assignments[trial_id]
        assert assignment.status != "running"
        files: dict[str, bytes] = {}
        if assignment.config.phase == "verdict" and assignment.status == "finished":
            files = ray.get(self._vault.take.remote(trial_id))
        if files:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    (Path(folder) / name).write_bytes(content)
                self._tracker.log_folder(run_id, folder, "embedder")
        self._tracker.end_trial(
            run_id, assignment.status, assignment.curve, assignment.metrics, assignment.reason
        )
        self._search.commit(trial_id)
        self._tracker.note_search(self._search.counts(), self._search.best_numbers())
        self._progress.ended(assignment, time.monotonic() - started, self._search.best())
        for line in self._search.take_notes():
            self._progress.tell(line)

    def __getstate__(self) -> dict[str, Any]:
        return {}
