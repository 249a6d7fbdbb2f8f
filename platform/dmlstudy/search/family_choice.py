"""The choice among families in an adaptive search: the one whose next trial may raise the best score most.

Of a family with n scores, mean m and standard deviation d, the next score is predicted by Student's t with n - 1
degrees of freedom, location m and the scale d sqrt(1 + 1/n). The expected improvement over the best score b of all
families is E[max(0, next - b)].

A family is drawn with a probability in proportion to it, and one draw in ten is among all families alike. So a family
with a bad mean and a wide spread is tried, where one with good scores that never change is not worth more trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

AT_LEAST = 4
"""Trials of a family, however they end, before it competes."""

FEWEST = 3
"""Scores from which a family's next one is predicted."""

ALIKE = 0.1
"""The share of draws in which all families are alike."""


def expected_improvement(scores: Sequence[float], best: float) -> float:
    """E[max(0, next - best)] of a family with these scores, n of them; not a number for fewer than 3.

    With T a t of k = n - 1 degrees of freedom, density f and distribution F, s the scale and u = (m - b) / s, it is
    s (f(u) (k + u^2) / (k - 1) + u F(u)).
    """
    n = len(scores)
    if n < FEWEST:
        return math.nan
    mean, scale = float(np.mean(scores)), float(np.std(scores, ddof=1)) * math.sqrt(1 + 1 / n)
    if scale == 0:
        return max(0.0, mean - best)
    degrees, u = n - 1, (mean - best) / scale
    density, below = stats.t.pdf(u, degrees), stats.t.cdf(u, degrees)
    return scale * float(density * (degrees + u * u) / (degrees - 1) + u * below)


def chances(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The probability with which each family is drawn.

    One with fewer scores than ``FEWEST``, whose trials run or fail, has its share of the draws in which all are alike.
    """
    best = max((score for own in scores.values() for score in own), default=0.0)
    gains = {family: expected_improvement(own, best) for family, own in scores.items()}
    gains = {family: gain for family, gain in gains.items() if gain > 0}
    total = sum(gains.values())
    if total == 0:
        return dict.fromkeys(scores, 1 / len(scores))
    return {family: ALIKE / len(scores) + (1 - ALIKE) * gains.get(family, 0.0) / total for family in scores}


def chosen(scores: Mapping[str, Sequence[float]], num_asked: Mapping[str, int], seed: int) -> str:
    """The family of the next trial; first each gets ``AT_LEAST`` trials, in turn."""
    fewest = min(scores, key=lambda family: num_asked[family])
    if num_asked[fewest] < AT_LEAST:
        return fewest
    drawn = chances(scores)
    rng = np.random.default_rng(seed)
    return str(rng.choice(list(drawn), p=np.array(list(drawn.values())) / sum(drawn.values())))
