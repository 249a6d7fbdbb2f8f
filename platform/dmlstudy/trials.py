"""The status of a trial, and the order of a search's trials.

Everything that writes a status or asks for the best trial asks here, so a study's search, its runs in MLflow,
the leaderboard and the report never disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class Status(StrEnum):
    """The status of a trial; studies store the values.

    A pruned trial was stopped early, by the search or on request. A paused one waits to be promoted. An interrupted
    one runs again later. A superseded run is one whose trial was run again although it had ended.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    PRUNED = "pruned"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    SUPERSEDED = "superseded"

    @property
    def has_ended(self) -> bool:
        """True if the trial is over for good."""
        return self in ENDED

    @property
    def words(self) -> str:
        """The status in words for people."""
        return "stopped early" if self is Status.PRUNED else self.value

    @property
    def in_optuna(self) -> str:
        """The name of Optuna's state for a trial of this status, which is over for good."""
        return OPTUNA_STATES[self]

    @property
    def in_mlflow(self) -> str:
        """MLflow's own status of a run, which knows no pruned or paused runs."""
        return MLFLOW_STATUSES[self]

    @classmethod
    def of_optuna(cls, state: str) -> Status:
        """The status behind the name of an Optuna state.

        A trial that is RUNNING in Optuna may be at work, or waiting to be resumed: its study's folder says which.
        Here it is waiting.
        """
        return next((status for status, name in OPTUNA_STATES.items() if name == state), cls.WAITING)


ENDED = (Status.FINISHED, Status.PRUNED, Status.FAILED)

GOING_ON = (Status.INTERRUPTED, Status.PAUSED)
"""Of trials that are at rest and run again from their kept state."""

OPTUNA_STATES = {Status.FINISHED: "COMPLETE", Status.PRUNED: "PRUNED", Status.FAILED: "FAIL"}

MLFLOW_STATUSES = {
    Status.RUNNING: "RUNNING",
    Status.PAUSED: "SCHEDULED",
    Status.FINISHED: "FINISHED",
    Status.PRUNED: "FINISHED",
    Status.FAILED: "FAILED",
    Status.INTERRUPTED: "KILLED",
}


def rank(score: float, number: int | None) -> tuple[float, int]:
    """A key by which the better of two finished trials is the larger: the higher objective, of equals the first.

    Trials of old studies may have no ``number``; of equal ones without it none is larger.
    """
    return score, -(number or 0)


def best_ranked(trials: Iterable[T], standing: Callable[[T], tuple[float, int | None]]) -> T | None:
    """The best of finished trials by ``rank`` of their score and number; None of no trial."""
    return max(trials, key=lambda trial: rank(*standing(trial)), default=None)
