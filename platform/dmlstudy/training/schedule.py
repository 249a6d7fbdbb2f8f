"""Learning-rate schedules: the factor of every rate, a pure function of the batch's number and the planned length.

Nothing is saved, so that a resumed trial goes on as an unbroken one; stopping a trial early does not move it.
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

CONSTANT, STEP = "constant", "step"

STEP_AT = "step_at"

MOST_EPOCHS = 100_000
"""No training is longer (``training.epochs``)."""


class Schedule(NamedTuple):
    """The factor f(u) of every learning rate at batch u (from 0) of N = epochs x batches per epoch planned ones.

    With w batches of warm-up and v = (u - w) / (N - w)::

        f = (u + 1) / w                                  u < w
        f = 1                                            constant
        f = floor + (1 - floor) (1 + cos(pi v)) / 2      cosine
        f = 1 - (1 - floor) v                            linear
        f = step_factor ^ #{milestones <= epoch of u}    step
    """

    kind: str
    num_batches: int
    """N, the planned length."""
    per_epoch: int
    warmup: int = 0
    """w."""
    floor: float = 0.0
    milestones: tuple[int, ...] = ()
    """Epochs from 0, at whose beginning the rates fall by ``step_factor``."""
    step_factor: float = 0.1

    def factor(self, u: int) -> float:
        """f(u)."""
        if u < self.warmup:
            return (u + 1) / self.warmup
        if self.kind == CONSTANT:
            return 1.0
        if self.kind == STEP:
            return self.step_factor ** sum(epoch <= u // self.per_epoch for epoch in self.milestones)
        v = (u - self.warmup) / (self.num_batches - self.warmup)
        falling = (1 + math.cos(math.pi * v)) / 2 if self.kind == "cosine" else 1 - v
        return self.floor + (1 - self.floor) * falling


def planned(
    kind: str,
    num_epochs: int,
    per_epoch: int,
    *,
    warmup_epochs: float = 0.0,
    warmup_steps: int = 0,
    floor: float = 0.0,
    step_at: str = "",
    step_factor: float = 0.1,
) -> Schedule:
    """The schedule of a model that is planned to take ``num_epochs`` of ``per_epoch`` batches.

    A model that is not trained has one too, of which nothing is asked. Raises ValueError for a warm-up that is not
    shorter than the training, and as ``milestones``.
    """
    num_batches = num_epochs * per_epoch
    warmup = warmup_steps or math.floor(warmup_epochs * per_epoch + 0.5)
    if num_batches and warmup >= num_batches:
        if warmup_steps:
            given, whole = (
                f"warmup_steps: {warmup_steps}",
                f"the {num_batches} batches of {num_epochs} epochs",
            )
        else:
            given, whole = f"warmup_epochs: {warmup_epochs:g}", f"training.epochs: {num_epochs}"
        raise ValueError(f"training.{given} is not shorter than {whole}; lower it, or train longer")
    steps = milestones(step_at, num_epochs) if kind == STEP else ()
    return Schedule(kind, num_batches, per_epoch, warmup, floor, steps, step_factor)


def milestones(step_at: str, num_epochs: int) -> tuple[int, ...]:
    """Epochs, from 0, at whose beginning the rates fall, of a text of numbers such as '0.5 0.75' or '40 60 80'.

    A number below 1 is a share of the planned epochs, rounded down to whole epochs, and to 1 at least; one from 1 on
    counts epochs. Raises ValueError for other text.
    """
    found = []
    for word in step_at.replace(",", " ").split():
        try:
            number = Decimal(word)
        except InvalidOperation:
            number = Decimal("NaN")
        # Far beyond any training, a decimal has no remainder.
        is_in_range = number.is_finite() and 0 < number <= MOST_EPOCHS
        if not is_in_range or (number > 1 and number % 1):
            raise ValueError(
                f"training.{STEP_AT}: {word!r} is neither a share of the epochs between 0 and 1 nor a number of epochs;"
                " write as 0.5 0.75, or 40 60 80"
            )
        found.append(int(number) if number >= 1 else max(1, math.floor(number * num_epochs)))
    if not found:
        raise ValueError(f"training.{STEP_AT}: names no epoch; write as 0.5 0.75, or 40 60 80")
    return tuple(found)
