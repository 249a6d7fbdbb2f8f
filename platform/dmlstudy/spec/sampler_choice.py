"""The sampler that ``search.sampler: auto`` stands for.

Measured in searches of 19 trials, on learning curves of real ones (``tests/benchmarks/search.py``): one at a time, or
in generations of 5, TPE loses no more than a quasi-random sequence (QMC). In generations of 10, or all at once, it
loses more: until it has seen scores it draws at random.
"""

from __future__ import annotations

import math
from typing import NamedTuple

AUTO = "auto"


class SamplerChoice(NamedTuple):
    """A sampler's name, and why it is that one, after "as"."""

    name: str
    why: str


def of_budget(
    num_trials: int, generation_size: int | None, *, is_adaptive: bool, has_second_objective: bool
) -> SamplerChoice:
    """The sampler for so many trials of a family, of which so many are drawn together; None: as there is room."""
    if has_second_objective:
        return SamplerChoice("nsga2", "there is a second objective")
    if is_adaptive:
        return SamplerChoice("tpe", "families are adaptive")
    if num_trials == 1:
        return SamplerChoice("tpe", "there is one trial, the default")
    if generation_size is None:
        many = math.ceil(num_trials / 2)
        return SamplerChoice(
            "tpe",
            f"trials are drawn by the scores there are by then; where {many} or more run at once, set qmc",
        )
    num_blind = min(generation_size, num_trials)
    if num_trials <= 2 * num_blind:
        return SamplerChoice("qmc", f"{num_blind} of {num_trials} trials are drawn before any has a score")
    return SamplerChoice("tpe", f"most of the {num_trials} trials are drawn by the scores of others")
