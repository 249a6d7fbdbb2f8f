"""Sensitivities: how far the objective moves over the values that were tried of a parameter, in its own units.

Of each parameter a linear regression by least squares on all scored trials: its own term is a parabola over the tried
range, or a level for each choice. The others stand beside it, as parabolas where the trials suffice, else as lines.

The effect is the largest less the smallest value of the fitted term.

The band is Scheffé's over all pairs of values, with q the coefficients of the term and ν = n - rank the degrees of
freedom: |dᵀβ| ± sqrt(q F(q, ν)) s_d, at level 0.05 over the number of parameters.

So a family's bands hold at once with 95%, and a band that begins above 0 is an F-test that found something.

Limits: interactions and edges sharper than a parabola count as noise; a sampler that has moved to one corner tells of
that corner; trials stopped early are taken at what they might have scored (``samplers.as_finished``).

Source: H. Scheffé, A method for judging all contrasts in the analysis of variance, Biometrika 40, 1953.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial
from scipy import stats

from dmlstudy.records import Record

LEVEL = 0.05
"""The chance, at most, that one of a family's bands misses."""

FEWEST_FREE = 5
"""Degrees of freedom of the noise, at least; with fewer a band says nothing."""

PLACES = 21
"""Values of a continuous parameter that are compared with each other."""

Matrix = NDArray[np.float64]


class Sensitivity(Record):
    """The change of the objective over a parameter's tried values, with its band, in the objective's units.

    ``change`` is less what noise alone would show, and 0 where it shows no more. ``untold`` says why there is no band;
    the numbers are 0 then.
    """

    change: float = 0.0
    low: float = 0.0
    high: float = 0.0
    untold: str = ""
    num_lacking: int = 0
    """Trials that a band would need beside those that there are; 0 where ``untold`` is of something else."""

    def __str__(self) -> str:
        return f"{self.change:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Influence(StrEnum):
    """The answer to whether a parameter matters."""

    MATTERS = "matters"
    """Its band begins above 0."""
    DOES_NOT = "does not"
    """Its band holds 0 and ends below half of what the strongest moves at least."""
    OPEN = "cannot be told"
    """Its band holds 0 and is wider than that."""
    TOO_FEW = "too few trials"
    """There is no band."""


def influences(known: Mapping[str, Sensitivity]) -> dict[str, Influence]:
    """The answer for each parameter of one family."""
    strongest = max((each.low for each in known.values()), default=0.0)

    def told(each: Sensitivity) -> Influence:
        if each.untold:
            return Influence.TOO_FEW
        if each.low > 0:
            return Influence.MATTERS
        return Influence.DOES_NOT if each.high < strongest / 2 else Influence.OPEN

    return {name: told(each) for name, each in known.items()}


class _Term(NamedTuple):
    """A parameter's columns of the design, and the rows of values that are compared."""

    curved: Matrix
    """(trials, q); zero where a trial does not have the parameter."""
    straight: Matrix
    values: Matrix
    """(values, q)."""
    untold: str = ""

    @property
    def contrasts(self) -> Matrix:
        """(pairs, q): the difference of each two values."""
        one, other = np.triu_indices(len(self.values), 1)
        found: Matrix = self.values[one] - self.values[other]
        return found


def sensitivities(
    trials: Sequence[FrozenTrial], distributions: Mapping[str, BaseDistribution]
) -> dict[str, Sensitivity]:
    """Each parameter's sensitivity; of no trial, or of equal scores, nothing.

    ``trials`` have a value, as those of ``samplers.as_finished``. A parameter need not be in every trial.
    """
    trials = [trial for trial in trials if math.isfinite(trial.values[0])]
    scores_N = np.array([trial.values[0] for trial in trials])
    if len(set(scores_N)) < 2:
        return {}
    terms = {name: _term(name, each, trials) for name, each in distributions.items()}
    open_terms = [name for name, term in terms.items() if not term.untold]
    return {
        name: Sensitivity(untold=term.untold)
        if term.untold
        else _sensitivity(
            scores_N,
            term,
            [terms[other] for other in open_terms if other != name],
            1 - LEVEL / len(open_terms),
        )
        for name, term in terms.items()
    }


def _term(name: str, distribution: BaseDistribution, trials: Sequence[FrozenTrial]) -> _Term:
    has_N = np.array([name in trial.params for trial in trials])
    drawn = [trial.params[name] for trial in trials if name in trial.params]
    if isinstance(distribution, CategoricalDistribution):
        placed = np.array([distribution.to_internal_repr(value) for value in drawn], dtype=float)
    else:
        placed = np.array(drawn, dtype=float)
        placed = np.log(placed) if _is_log(distribution) else placed
    values = np.unique(placed)
    if len(values) < 2:
        nothing = np.zeros((len(trials), 0))
        return _Term(nothing, nothing, nothing[:0], "one value was tried" if drawn else "no trial has it")
    if isinstance(distribution, CategoricalDistribution):
        levels = np.eye(len(values))[:, 1:]
        term = _spread(has_N, levels[np.searchsorted(values, placed)])
        return _Term(term, term, levels)
    low, high = values[0], values[-1]
    degree = min(2, len(values) - 1)
    compared = values if isinstance(distribution, IntDistribution) and len(values) <= PLACES else None
    if compared is None:
        compared = np.linspace(low, high, PLACES)
    powers = np.arange(1, degree + 1)
    curved, rows = ((2 * (x - low) / (high - low) - 1)[:, None] ** powers for x in (placed, compared))
    return _Term(_spread(has_N, curved), _spread(has_N, curved[:, :1]), rows)


def _is_log(distribution: Any) -> bool:
    return bool(distribution.log)


def _spread(has_N: NDArray[np.bool_], rows: Matrix) -> Matrix:
    """The rows in the places of those that have the parameter, zeros in the others'."""
    found = np.zeros((len(has_N), rows.shape[1]))
    found[has_N] = rows
    return found


def _sensitivity(scores_N: Matrix, term: _Term, others: Sequence[_Term], level: float) -> Sensitivity:
    """The sensitivity of one term beside others; without a band where the trials do not suffice."""
    beside = np.ones((len(scores_N), 1))
    design, rank = np.zeros((0, 0)), 0
    for form in ("curved", "straight"):
        design = np.concatenate([term.curved, beside, *(getattr(other, form) for other in others)], axis=1)
        rank = int(np.linalg.matrix_rank(design))
        if len(scores_N) - rank >= FEWEST_FREE:
            break
    free = len(scores_N) - rank
    if free < FEWEST_FREE:
        needed = rank + FEWEST_FREE
        return Sensitivity(
            untold=f"{len(scores_N)} of {needed} trials needed", num_lacking=needed - len(scores_N)
        )
    q = term.curved.shape[1]
    contrasts = np.pad(term.contrasts, ((0, 0), (0, design.shape[1] - q)))
    inverse = np.linalg.pinv(design)
    if np.abs(contrasts @ inverse @ design - contrasts).max() > 1e-6:
        return Sensitivity(untold="it was moved together with others")
    fitted = inverse @ scores_N
    variance = float(((scores_N - design @ fitted) ** 2).sum()) / free
    effects = np.abs(contrasts @ fitted)
    errors = np.sqrt(variance) * np.linalg.norm(contrasts @ inverse, axis=1)
    reach = math.sqrt(q * stats.f.ppf(level, q, free)) * errors
    return Sensitivity(
        change=float(np.sqrt(np.maximum(0.0, effects**2 - errors**2)).max()),
        low=float(np.maximum(0.0, effects - reach).max()),
        high=float((effects + reach).max()),
    )
