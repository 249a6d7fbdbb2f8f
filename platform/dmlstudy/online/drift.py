"""Drift: hear in the losses that a stream's world has changed, then let a fresh learner prove itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from river import drift

from dmlstudy.online.learner import Constraints, Floats, OnlineLearner, State

PREFIX = "challenger."
"""Before the names of a challenger's state."""


@runtime_checkable
class CanReopen(Protocol):
    """A learner that can begin anew."""

    def anew(self, number: int) -> OnlineLearner:
        """One of the same settings that has learned nothing, each ``number`` another."""


class Watch:
    """Hears when the mean of what it is told has risen: ADWIN (Bifet and Gavalda 2007; river's).

    ``sensitivity`` bounds, about, the probability that it has not. Raises ValueError unless it lies between 0 and 1.
    """

    def __init__(self, sensitivity: float) -> None:
        if not 0 < sensitivity < 1:
            raise ValueError(f"sensitivity={sensitivity} must lie between 0 and 1")
        self._detector = drift.ADWIN(delta=sensitivity)  # type: ignore[no-untyped-call]

    def update(self, losses: Floats) -> bool:
        """Add these losses; True if their mean has risen."""
        has_risen = False
        for loss in losses[~np.isnan(losses)].tolist():
            before = self._detector.estimation
            self._detector.update(loss)  # type: ignore[no-untyped-call]
            has_risen |= self._detector.drift_detected and self._detector.estimation > before
        return has_risen


class Score(NamedTuple):
    """The standing of a race: constraints seen, and the two sides' summed losses on those after the first half."""

    seen: int = 0
    old: float = 0.0
    new: float = 0.0


class Race:
    """A fresh learner beside the old one, on the same ``length`` constraints; the second half of these decides.

    To begin anew at once would throw away what still holds, of a learner that may find back by itself: with large
    steps it does. Each is judged by its loss on what it has not yet learned from.
    """

    def __init__(self, challenger: OnlineLearner, length: int, score: Score | None = None) -> None:
        self.challenger, self.score, self._length = challenger, score or Score(), length

    def follow(self, block: Constraints, losses: Floats) -> None:
        """The challenger learns from the block, on which the old learner had these losses."""
        seen, old, new = self.score
        own = self.challenger.partial_fit(block)
        counts = np.arange(seen, seen + len(own)) >= self._length // 2
        self.score = Score(
            seen + len(own), old + float(np.nansum(losses[counts])), new + float(np.nansum(own[counts]))
        )

    @property
    def is_over(self) -> bool:
        return self.score.seen >= self._length

    @property
    def is_won(self) -> bool:
        """True if the fresh learner did better."""
        return self.score.new < self.score.old

    def state(self) -> State:
        """The state that ``restore`` needs beside the score."""
        return {PREFIX + name: value for name, value in self.challenger.state().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of another kind of learner."""
        own = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
        self.challenger.restore(own)
