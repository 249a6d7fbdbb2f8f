"""The chance that further trials of a search raise its best score, from the upper tail of the scores so far.

Of n trials the k + 1 highest scores are y_1 >= ... >= y_(k+1) = u. The next trial exceeds u with a probability L
that is distributed as Beta(k + 1, n - k), whatever the scores' distribution.

Beyond u they are taken to follow a
generalised Pareto distribution, S(x) = (1 + xi x / sigma)^(-1 / xi), whose parameters are averaged over their
posterior and not set to one best fit:

    P(one of m trials exceeds y) = 1 - E[(1 - L S(y - u))^m]

The prior is flat in xi from -1 (a sharp end, as of a smooth top in two parameters) to 0.5 (heavy) and in log sigma.

The chance is the largest over k = 5, n / 4 and n / 2, at most 30, for no threshold is right for every tail.

It is 1, for nothing can be said, where fewer than 5 scores lie above the middle between the lowest and the highest:
then most trials have collapsed, and the few others are no sample of a tail.

**Assumption.** Trials are exchangeable: the next are drawn as these were. A better mode that none of n trials has met
is no part of any tail; one with a share of 5% is missed by 40 trials in one search of eight.

Source of the tail: Pickands, "Statistical inference using extreme order statistics" (1975); Coles, "An Introduction to
Statistical Modeling of Extreme Values" (2001), chapter 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv

FEWEST_ABOVE = 5
"""Scores beyond the threshold, below which nothing is said of a tail."""
MOST_ABOVE = 30
"""Scores beyond the threshold that are looked at; more would not be the tail."""

SHAPES = np.linspace(-1.0, 0.5, 16)
NUM_SCALES = 24
SHARES = (np.arange(16) + 0.5) / 16
"""Quantiles at which the distribution of L is taken."""


def chance_of_gain(
    scores: Sequence[float],
    num_trials: int,
    best: float,
    gain: float,
    num_left: int,
    *,
    highest: float = math.inf,
) -> float:
    """The probability that one of ``num_left`` further trials scores above ``best + gain``.

    ``scores`` are the finite ones of ``num_trials``; the rest had none, or were stopped below the best. ``best`` may
    come from another trial than these. No score lies above ``highest``.
    """
    if not num_left or best + gain >= highest:
        return 0.0
    falling = np.sort(np.asarray(scores, dtype=float))[::-1]
    if len(falling) <= FEWEST_ABOVE:
        return 1.0
    middle = (falling[0] + falling[-1]) / 2
    wanted = {min(MOST_ABOVE, max(FEWEST_ABOVE, num_trials // part)) for part in (num_trials, 4, 2)}
    found = []
    for num_above in sorted(wanted):
        # The threshold lies below each of the scores beyond it: of equal ones all are beyond it, or none.
        beyond = int(np.searchsorted(-falling, -falling[min(num_above, len(falling)) - 1], side="right"))
        if beyond < len(falling) and falling[beyond] >= middle:
            excess = falling[:beyond] - falling[beyond]
            found.append(_chance(excess, num_trials, best + gain - falling[beyond], gain, num_left))
    return max(found, default=1.0)


def _chance(excess: np.ndarray, num_trials: int, needed: float, gain: float, num_left: int) -> float:
    """The chance with one threshold, from the scores' heights above it, all above 0."""
    num = len(excess)
    widest = 20 * float(excess.mean())
    scale_S = np.geomspace(min(gain / 10, widest / 20), widest, NUM_SCALES)
    shape_X1 = SHAPES[:, None]
    # -log S of each height; infinite beyond the end of a tail.
    cumulated_XSK = _minus_log_survival(excess / scale_S[:, None], shape_X1[:, :, None])
    # log density = -log sigma - (1 + xi) (-log S)
    with np.errstate(invalid="ignore"):
        likelihood_XS = -num * np.log(scale_S) - (1 + shape_X1) * cumulated_XSK.sum(axis=2)
    is_outside = np.isinf(cumulated_XSK).any(axis=2)
    likelihood_XS = np.where(is_outside, -math.inf, likelihood_XS)
    weight_XS = np.exp(likelihood_XS - likelihood_XS.max())
    beyond_XS = np.exp(-_minus_log_survival(max(0.0, needed) / scale_S, shape_X1))
    share_L = betaincinv(num + 1, num_trials - num, SHARES)
    none_XS = np.mean((1 - share_L[:, None, None] * beyond_XS) ** num_left, axis=0)
    return float(1 - (weight_XS * none_XS).sum() / weight_XS.sum())


def _minus_log_survival(height: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """-log S at heights in units of sigma: log(1 + xi z) / xi, z for xi = 0, and infinity beyond the tail's end."""
    grown = 1 + shape * height
    is_inside = grown > 0
    is_exponential = np.abs(shape) < 1e-9
    logarithm = np.log(np.where(is_inside, grown, 1.0)) / np.where(is_exponential, 1.0, shape)
    return np.where(is_exponential, height, np.where(is_inside, logarithm, math.inf))
