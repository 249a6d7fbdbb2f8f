"""Which trials are stopped early: a Tune scheduler that does as the study's search says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from dmlstudy.engine.stop_requests import Desk
from dmlstudy.search.study_search import StudySearch, metrics_of


class StudyScheduler(FIFOScheduler):
    """Stops a trial as soon as ``StudySearch.observe`` says so, or someone wishes it at the desk."""

    def __init__(self, search: StudySearch, desk: Desk) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._search = search
        self._desk = desk

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        self._desk.note(trial.trial_id, self._search.assignments[trial.trial_id])

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        # Called in every step of Tune's loop, so that a trial which seldom reports is ended soon, too.
        self._search.pass_time()
        self._desk.serve(tune_controller, self._search.assignments)
        return super().choose_trial_to_run(tune_controller)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if self._search.observe(trial.trial_id, metrics_of(result)):
            return str(TrialScheduler.STOP)
        return str(TrialScheduler.CONTINUE)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        # Tune tells the searcher that a trial failed, but not why.
        self._search.assignments[trial.trial_id].reason = _reason(trial.error_file)

    def __getstate__(self) -> dict[str, Any]:
        return {}


def _reason(error_file: str | None) -> str:
    """The last line of the error that Tune wrote to a file."""
    if error_file is None or not Path(error_file).is_file():
        return "its actor could not be started or was lost"
    lines = Path(error_file).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip()
