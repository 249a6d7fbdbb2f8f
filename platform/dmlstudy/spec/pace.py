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
    ends = sorted(ends)
    if len(ends) < 2 * num_at_once:
        return None
    taken = [(end - before, done) for (before, _), (end, done) in pairwise(ends[num_at_once - 1 :])]
    trained = [(seconds, done) for seconds, done in taken if done > 0][-max(most, num_at_once) :]
    untrained = [seconds for seconds, done in taken if done == 0][-max(most, num_at_once) :]
    seconds, done = (sum(each) for each in zip(*trained, strict=True)) if trained else (0.0, 0.0)
    to_do = work.of_all(left)
    if to_do and not (seconds > 0 and done > 0):
        return None
    of_untrained = sum(untrained) / len(untrained) if untrained else 0.0
    return (seconds / done * to_do if to_do else 0.0) + of_untrained * left.untrained
