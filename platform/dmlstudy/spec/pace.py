"""The pace of a study and the time that it still takes, from the ends of its trials and the work of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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


def seconds_left(
    ends: Sequence[tuple[float, float]], num_at_once: int, work: Work, left: Trials, most: int = 30
) -> float | None:
    """Seconds that the trials ``left`` take, from moments of ending and the work done; None where too few have ended.

    Trials that run at once begin at once, and end in a burst: the first of these bursts, which has paid for the start,
    does not count. The time up to an end is that trial's. So untrained ones, which do no work, have a pace of their
    own: beside streams, where they vote among neighbours, they are not short.
    """
    last = sorted(ends)[-max(most, 2 * num_at_once) :]
    if len(last) < 2 * num_at_once:
        return None
    taken = [(end - before, done) for (before, _), (end, done) in pairwise(last[num_at_once - 1 :])]
    untrained = [seconds for seconds, done in taken if done == 0]
    found = left.untrained * sum(untrained) / max(1, len(untrained))
    if to_do := work.of_all(left):
        seconds = sum(seconds for seconds, done in taken if done > 0)
        if seconds <= 0:
            return None
        found += to_do * seconds / sum(done for _, done in taken)
    return found
