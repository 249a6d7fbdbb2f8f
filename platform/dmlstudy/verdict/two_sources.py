"""The precision of a difference between two families, from two sources of chance: seeds and units.

A unit is a class of the test data with all its queries (a single query or row, where test and training share their
classes). Two populations are told apart. *These* units: other seeds, the same units. Units *like these*: other seeds
and other units of the same kind, as many of them.

The model is d_sc = mu + a_s + b_c + e_sc for seed s and unit c: a random effect of each and their interaction.
Variances are combined as in studies of several readers and many cases (Hillis 2007, 2014), with Satterthwaite's
degrees of freedom.

The interval for units like these is the widest of three, so it is never narrower than that for
these.

Where each seed shuffles the rows into halves, the shuffle is both sources at once (``Shuffles``).

Shapes: S seeds, C units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit

FEWEST_UNITS = 5
"""Of fewer units nothing is said on others like them."""
FEW_UNITS = 10
"""With fewer the interval for others is rough, mostly too wide."""

Values = NDArray[np.float64]


class Weights(NamedTuple):
    """The weights w_C of units, which sum to 1, and what their inequality does to a variance over units.

    With p_k = sum_c w_c^k and tr = p_2 - 2 p_3 + p_2^2: ``f`` = p_2 / tr, which is C / (C - 1) for equal weights.
    ``nu`` is the degrees of freedom, C - 1 for equal weights, fewer for unequal ones, never below 1.
    """

    w_C: Values
    p2: float
    f: float
    nu: float

    @classmethod
    def of(cls, counts: Sequence[int]) -> Weights:
        """Weights in proportion to the queries of each unit. Raises ValueError for fewer than two units.

        Computed in exact fractions: where one unit outweighs all others the terms cancel.
        """
        if len(counts) < 2 or min(counts) < 1:
            raise ValueError(f"{len(counts)} units: needs two or more, each with a query")
        counts = [int(n) for n in counts]  # numpy's would overflow
        total = sum(counts)
        p2, p3, p4, p5 = (Fraction(sum(n**k for n in counts), total**k) for k in (2, 3, 4, 5))
        trace = p2 - 2 * p3 + p2**2
        of_square = p4 * (1 + 2 * p2) - 4 * p5 + p2**4 + 2 * p2 * p4 - 4 * p2**2 * p3 + 2 * p3**2
        return cls(
            np.array([n / total for n in counts]),
            float(p2),
            float(p2 / trace),
            max(1.0, float(trace**2 / of_square)),
        )

    @property
    def are_rough(self) -> bool:
        """True where intervals for other units are rough: few units, or one with more than half of the weight."""
        return len(self.w_C) < FEW_UNITS or bool(self.w_C.max() > 0.5)


class TwoSources(NamedTuple):
    """The mean difference of two families over S seeds and C units, with its variance from either source."""

    effect: float
    num_seeds: int
    of_seeds: float
    """V_S, the variance of the effect over seeds: of other seeds on these units."""
    of_units: float
    """V_K, its variance over units, without the interaction, which V_S holds; with it where units are few."""
    of_both: float
    """V_SC, its variance from the interaction of seeds and units."""
    weights: Weights

    @classmethod
    def of(cls, d_SC: Values, weights: Weights, resolution: float) -> TwoSources:
        """From the paired differences of each seed and unit, each the mean over the unit's queries; S of 2 or more.

        ``resolution`` is the smallest difference that a score can show, the least deviation over seeds.
        """
        num_seeds = len(d_SC)
        of_seed_S = d_SC @ weights.w_C
        of_unit_C = d_SC.mean(axis=0)
        effect = float(of_seed_S.mean())
        pairs = num_seeds * (num_seeds - 1)
        of_seeds = max(float(((of_seed_S - effect) ** 2).sum()) / pairs, resolution**2 / num_seeds)
        of_all_units = variance_over_units(of_unit_C, weights)
        rest_SC = d_SC - of_seed_S[:, None] - of_unit_C + effect
        of_both = weights.f / pairs * float((weights.w_C**2 * rest_SC**2).sum())
        is_subtracted = len(weights.w_C) >= FEW_UNITS
        of_units = max(of_all_units - of_both, 0.0) if is_subtracted else of_all_units
        return cls(effect, num_seeds, of_seeds, of_units, of_both, weights)

    @property
    def is_rough(self) -> bool:
        """As of the weights."""
        return self.weights.are_rough

    @property
    def share_of_units(self) -> float:
        """V_K / (V_S + V_K): the part of the uncertainty that no further seed removes."""
        return self.of_units / (self.of_seeds + self.of_units)

    @property
    def deviations(self) -> tuple[float, float | None, float | None]:
        """Standard deviations of one paired seed, of one unit and of their interaction."""
        p2 = self.weights.p2
        return (
            math.sqrt(self.num_seeds * self.of_seeds),
            math.sqrt(self.of_units / p2),
            math.sqrt(self.num_seeds * self.of_both / p2),
        )

    def half_width_of_units(self, level: float) -> float:
        """The part of the half-width for units like these that no further seed removes."""
        return float(stdtrit(self.weights.nu, 1 - level / 2)) * math.sqrt(self.of_units)

    def half_width(self, level: float) -> float:
        """Half of the interval for units like these that misses with probability ``level``."""
        return max(
            float(stdtrit(df, 1 - level / 2)) * math.sqrt(variance)
            for variance, df in self._terms
            if variance
        )

    @property
    def p_value(self) -> float:
        """The two-sided p-value for units like these; 1 where there is no difference at all."""
        if self.effect == 0:
            return 1.0
        return max(
            float(2 * stdtr(df, -abs(self.effect) / math.sqrt(variance)))
            for variance, df in self._terms
            if variance
        )

    @property
    def _terms(self) -> list[tuple[float, float]]:
        """Each variance with its degrees of freedom: of seeds, of units, and of both together (Satterthwaite)."""
        of_seeds, of_units, num_free, nu = self.of_seeds, self.of_units, self.num_seeds - 1, self.weights.nu
        together = of_seeds + of_units
        df = together**2 / (of_seeds**2 / num_free + of_units**2 / nu)
        return [(of_seeds, num_free), (of_units, nu), (together, df)]


class Shuffles(NamedTuple):
    """The mean difference of two families over S shuffles of all rows into those to learn from and those of the test.

    The halves of one pool overlap from shuffle to shuffle, so their deviation s says too little of other rows:
    V = (1 / S + n_test / n_learn) s^2 with S - 1 degrees of freedom (Nadeau and Bengio 2003).
    """

    effect: float
    num_seeds: int
    deviation: float
    """s, of one paired shuffle."""
    overlap: float
    """n_test / n_learn."""

    @property
    def is_rough(self) -> bool:
        return False

    @property
    def share_of_units(self) -> float:
        """The part of the uncertainty that no further shuffle removes."""
        return self.overlap / (1 / self.num_seeds + self.overlap)

    @property
    def deviations(self) -> tuple[float, float | None, float | None]:
        """Standard deviation of one paired shuffle; rows are not told apart."""
        return self.deviation, None, None

    def half_width_of_units(self, level: float) -> float:
        """The part of the half-width for rows like these that no further shuffle removes."""
        return float(-ndtri(level / 2)) * math.sqrt(self.overlap) * self.deviation

    def half_width(self, level: float) -> float:
        """Half of the interval for rows like these that misses with probability ``level``."""
        return float(stdtrit(self.num_seeds - 1, 1 - level / 2)) * self._stderr

    @property
    def p_value(self) -> float:
        """The two-sided p-value for rows like these."""
        return float(2 * stdtr(self.num_seeds - 1, -abs(self.effect) / self._stderr))

    @property
    def _stderr(self) -> float:
        return math.sqrt(1 / self.num_seeds + self.overlap) * self.deviation


class OneSeed(NamedTuple):
    """The difference of two models, not of two families: each was trained once, so chance lies in the units alone."""

    effect: float
    variance: float
    weights: Weights

    @classmethod
    def of(cls, d_C: Values, weights: Weights) -> OneSeed:
        """From the difference on each unit, the mean over its queries."""
        return cls(float(d_C @ weights.w_C), variance_over_units(d_C, weights), weights)

    def half_width(self, level: float) -> float:
        """Half of the interval for units like these that misses with probability ``level``."""
        return float(stdtrit(self.weights.nu, 1 - level / 2)) * math.sqrt(self.variance)

    @property
    def p_value(self) -> float:
        """The two-sided p-value for units like these; 1 where there is no difference at all."""
        if self.effect == 0:
            return 1.0
        if self.variance == 0:
            return 0.0
        return float(2 * stdtr(self.weights.nu, -abs(self.effect) / math.sqrt(self.variance)))


def variance_over_units(d_C: Values, weights: Weights) -> float:
    """V_C = f sum_c w_c^2 (d_c - sum_c w_c d_c)^2, the variance of the weighted mean of independent units."""
    rest_C = d_C - float(d_C @ weights.w_C)
    return weights.f * float((weights.w_C**2 * rest_C**2).sum())
