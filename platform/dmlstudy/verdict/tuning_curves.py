"""Tuning curves: how good the best of k configurations is, with a band where one is valid.

**Random configurations** have one that holds for all k at once.

The scores of n independent configurations bound their distribution function F, whatever it is: F of the i-th
smallest lies in an interval of the Beta distribution. A bound on F is one on each of its quantiles, and the median of
the best of k is the quantile at 0.5^(1/k).

The lower end is the first score at which F may have reached that share, not the score before it. So that the band
still holds for all k at once, its own level is found by simulation, not that of the intervals of all scores. From 14
configurations on it is narrower than the latter's.

**Configurations that depend on one another**, as those of a sampler that learns or of trials that are stopped, have no
such band. Where the whole search was done three times or more, the mean of its best after k trials has a t-interval
over searches, at each k by itself.

Source of the band: Lourie, Cho and He, "Show Your Work with Confidence" (2023).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import betainc, betaincinv
from scipy.stats import t as student_t

CONFIDENCE = 0.95
NUM_DRAWS = 60_000
"""Samples of uniforms by which the level of one interval is found for which the band holds for all k at once."""
FEWEST = 5
"""Configurations below which a band would say nothing."""


FEWEST_SEARCHES = 3
"""Searches below which an interval over searches would say nothing: with two, t is 12.7."""


class TuningPoint(NamedTuple):
    """The best score of ``num_trials`` configurations, its median or its mean, with the ends of its band."""

    num_trials: int
    best: float
    low: float
    high: float


def tuning_curve(scores: Sequence[float], *, lowest: float = 0.0, highest: float = 1.0) -> list[TuningPoint]:
    """The curve for k = 1 to n from the scores of n independent configurations.

    Where the scores do not bound a quantile, the bound is that of all scores, ``lowest`` or ``highest``: the best of k
    takes about 10 k configurations until it is bounded from above. A configuration that failed counts as ``lowest``.

    Raises ValueError for fewer than ``FEWEST`` scores, and for one outside the bounds or not a number.
    """
    num = len(scores)
    if num < FEWEST:
        raise ValueError(f"{num} scores: a tuning curve needs {FEWEST}")
    if not all(lowest <= score <= highest for score in scores):
        raise ValueError(f"a score is not a number from {lowest:g} to {highest:g}")
    ordered = sorted(scores)
    low_N, high_N = _intervals(num)
    points = []
    for k in range(1, num + 1):
        share = 0.5 ** (1 / k)
        is_reached = np.flatnonzero(low_N >= share)
        may_be_reached = np.flatnonzero(high_N >= share)
        points.append(
            TuningPoint(
                k,
                ordered[math.ceil(num * share) - 1],
                ordered[may_be_reached[0]] if len(may_be_reached) else lowest,
                ordered[is_reached[0]] if len(is_reached) else highest,
            )
        )
    return points


def pointwise_curve(running: Sequence[Mapping[int, float]]) -> list[TuningPoint]:
    """Of R searches, each with its best score after k trials: the mean, and its 95% t-interval at each k by itself.

    mean_r y_rk +- t(0.975, R - 1) sqrt(variance_r y_rk / R), for the k that all searches have. It holds where scores
    of searches are about normal: of three with uniform scores 92% did.

    Raises ValueError for fewer than ``FEWEST_SEARCHES`` searches.
    """
    num = len(running)
    if num < FEWEST_SEARCHES:
        raise ValueError(f"{num} searches: an interval over them needs {FEWEST_SEARCHES}")
    factor = float(student_t.ppf((1 + CONFIDENCE) / 2, num - 1)) / math.sqrt(num)
    points = []
    for k in sorted(set.intersection(*(set(each) for each in running))):
        scores = [each[k] for each in running]
        mean, half = statistics.fmean(scores), factor * statistics.stdev(scores)
        points.append(TuningPoint(k, mean, mean - half, mean + half))
    return points


@lru_cache(maxsize=64)
def _intervals(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Low and high of F at each of ``num`` ordered scores, of which the band is made."""
    level = _level(num)
    place_N = np.arange(1, num + 1)
    return (
        betaincinv(place_N, num - place_N + 1, level / 2),
        betaincinv(place_N, num - place_N + 1, 1 - level / 2),
    )


def _level(num: int) -> float:
    """The level of each equal-tailed interval at which the band holds for all k at once with ``CONFIDENCE``.

    Of c scores at or below the quantile at share s the ends hold it where the level is below
    2 min(B, 1 - B), B = P(Beta(c, n - c + 1) <= s), which is 1 for c = 0.
    """
    rng = np.random.default_rng(0)
    place_N = np.arange(1, num + 1)
    share_K = 0.5 ** (1 / place_N)
    below_CK = np.vstack([np.ones(num), betainc(place_N[:, None], num - place_N[:, None] + 1, share_K)])
    least_CK = 2 * np.minimum(below_CK, 1 - below_CK)
    least = []
    for start in range(0, NUM_DRAWS, 2000):
        uniform_RN = np.sort(rng.random((min(2000, NUM_DRAWS - start), num)), axis=1)
        row_R1 = np.arange(len(uniform_RN))[:, None]  # one search through all rows, each one farther
        count_RK = np.searchsorted((uniform_RN + row_R1).ravel(), share_K + row_R1, "right") - num * row_R1
        least.append(least_CK[count_RK, place_N - 1].min(axis=1))
    return float(np.quantile(np.concatenate(least), 1 - CONFIDENCE, method="lower")) * (1 - 1e-9)
