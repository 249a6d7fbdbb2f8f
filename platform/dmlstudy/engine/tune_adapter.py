"""Adapters between Ray Tune and the study's search, which knows no Tune: what runs next, what is stopped early."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from dmlstudy.engine.stop_requests import Desk
from dmlstudy.search.study_search import StudySearch


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The trial's own metrics in a result of Tune, which is flat."""
    return {
        key.removeprefix("metrics/"): float(value)
        for key, value in result.items()
        if key.startswith("metrics/")
    }


class TuneSearch(Searcher):
    """The searcher from which Tune gets trials and to which it reports their ends."""

    def __init__(self, search: StudySearch) -> None:
        super().__init__(metric=search.metric, mode="max")
        self._search = search

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        config = self._search.suggest(trial_id)
        if config is None:
            return None if self._search.may_have_more() else str(Searcher.FINISHED)
        return {
            "trial": config.model_dump(mode="json"),
            "pause_after": self._search.assignments[trial_id].pause_after,
        }

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Do nothing: the scheduler, which sees each result first, passes it to ``observe``."""

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        result = result or {}
        is_paused = bool(result.get("paused"))
        self._search.end(
            trial_id,
            metrics_of(result) if result.get("done") and not is_paused else None,
            failure=str(result.get("failure") or ""),
            is_unstarted=bool(result.get("unstarted")),
            is_lost=error,
            is_paused=is_paused,
        )

    # Tune would pickle the searcher; the storage holds the search's state instead.

    def save(self, checkpoint_path: str) -> None:
        with open(checkpoint_path, "w", encoding="utf-8") as file:
            file.write("the state of this search is in its Optuna storage\n")

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a search is rebuilt from its Optuna storage")

    def __getstate__(self) -> dict[str, Any]:
        return {}


class StudyScheduler(FIFOScheduler):
    """Stops a trial as soon as ``StudySearch.observe`` says so, or a request for it is at the desk."""

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
