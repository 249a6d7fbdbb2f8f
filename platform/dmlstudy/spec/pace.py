"""The pace of a study and the time that it still takes, from the ends of its trials and the work of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

EMBEDDING = 1 / 3
"""Time of embedding an image, in that of training on it."""


class Trials(NamedTuple):
    """Numbers of trials by kind."""

    search: int = 0
    verdict: int = 0
    untrained: int = 0


class Work(NamedTuple):
    """Work of one trial of each kind in an epoch, in passes over the development data; an untrained one nothing."""

    search: float = 1.0
    verdict: float = 1.0
    untrained: float = 0.0

    @classmethod
    def of(cls, num_folds: int, *, fold_models: bool) -> Work:
        """The work of a study with so many folds; a search scores each fold's model after each epoch.

        In a verdict one model learns from all classes and, with ``fold_models``, one from those of each fold.
        """
        trained, held_out = (num_folds - 1, 1.0) if num_folds > 1 else (0.5, 0.5)
        return cls(trained + EMBEDDING * held_out, 1.0 + trained * fold_models)

    def of_all(self, trials: Trials) -> float:
        """The work of so many trials."""
        return sum(each * number for each, number in zip(self, trials, strict=True))


def seconds_per_work(ends: Sequence[tuple[float, float]], num_at_once: int, most: int = 30) -> float | None:
    """Seconds for a unit of work, from the last trials' moments of ending and work; None where there are too few.

    Trials that run at once begin at once, and end in a burst: the first of these bursts, which has paid for the start,
    does not count.
    """
    last = sorted(ends)[-max(most, 2 * num_at_once) :]
    if len(last) < 2 * num_at_once:
        return None
    seconds = last[-1][0] - last[num_at_once - 1][0]
    work = sum(each for _, each in last[num_at_once:])
    return seconds / work if seconds > 0 and work > 0 else None
