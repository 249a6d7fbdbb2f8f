"""The sampler that ``search.sampler: auto`` stands for.

Measured on learning curves of real trials (``tests/benchmarks/search.py``), replayed by two stand-ins for what was not
recorded. A Gaussian process (GP) as the sampler loses far less than TPE where the stand-in is such a process too, and
no more where it is a forest of trees.

Until they have seen scores they draw at random. So where most of the trials are drawn at once they lose more than a
quasi-random sequence (QMC): TPE from half of them on, the process from three quarters on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

AUTO = "auto"

MOST_FOR_GP = 150
"""Trials up to which a draw of the process takes about a tenth of a second; its time grows with their cube."""


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
    name, most_blind = ("gp", 0.75) if num_trials <= MOST_FOR_GP else ("tpe", 0.5)
    many = math.ceil(most_blind * num_trials)
    if generation_size is None:
        return SamplerChoice(
            name,
            f"trials are drawn by the scores there are by then; where {many} or more run at once, set qmc",
        )
    num_blind = min(generation_size, num_trials)
    if num_blind >= many:
        return SamplerChoice("qmc", f"{num_blind} of {num_trials} trials are drawn before any has a score")
    too_many = "" if name == "gp" else ", and gp would be slow with so many"
    num_led = num_trials - num_blind
    return SamplerChoice(
        name, f"{num_led} of {num_trials} trials are drawn by the scores of others{too_many}"
    )
