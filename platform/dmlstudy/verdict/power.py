"""The smallest difference that a verdict can see, told before a test image is read.

    V_S = s_seed^2 / S + s_both^2 p2 / S,   V_K = s_class^2 p2
    here = lambda(S - 1) sqrt(V_S)
    like = max(here, lambda(nu) sqrt(V_K), lambda(df) sqrt(V_S + V_K))

lambda(k) is the noncentrality at which a t-test on k degrees of freedom at the pair's level finds a difference with
80%; df is Satterthwaite's, nu and p2 are those of the test's units (``two_sources``). The level is ALPHA / m for m
pairs, times the weight of the last look where seeds are added.

The deviations are a pilot's: of an earlier verdict on the same data, of the folds of the search, or assumed.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv, ndtr, stdtrit

from dmlstudy.records import Compared, Grown, Unit
from dmlstudy.verdict.comparison import ALPHA, PLURALS, Comparison, UnitMeans
from dmlstudy.verdict.sequential import Plan
from dmlstudy.verdict.two_sources import FEWEST_UNITS, Weights, variance_over_units

POWER = 0.8
"""The chance with which a difference is seen that is told to be."""

QUANTILES = 400
"""Points at which a chi-squared distribution is taken."""


class Pilot(Grown):
    """Standard deviations of a paired seed, of a class and of their interaction, and where they come from."""

    LATER = ()

    of_seed: float
    of_class: float
    of_both: float
    source: str


ASSUMED = Pilot(of_seed=0.008, of_class=0.06, of_both=0.02, source="assumed")
"""Of MAP@R and Recall@1 alike, where nothing is known: a model on CUB differs by 0.57 points from seed to seed, so a
pair by 0.8; classes of Omniglot by 5 to 7."""


class Seen(NamedTuple):
    """The smallest differences seen with ``POWER``: on these units, and on units like these (None: no word on them)."""

    here: float
    like: float | None
    limit: str = ""
    """The source of most of the second: "seeds" or "classes"."""


@functools.cache
def noncentrality(df: float, level: float) -> float:
    """lambda at which |T| of ``df`` degrees of freedom passes the two-sided critical value with ``POWER``.

    With T = (Z + lambda) / sqrt(X / df) the chance is the mean over X of ndtr(lambda - c sqrt(X / df)), which rises
    with lambda, so it is bisected. The other tail is left out.
    """
    critical = float(stdtrit(df, 1 - level / 2))
    at = (np.arange(QUANTILES) + 0.5) / QUANTILES
    root_X = np.sqrt(2 * gammaincinv(df / 2, at) / df)
    low, high = 0.0, critical * float(root_X[-1]) + 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ndtr(middle - critical * root_X).mean() < POWER else (low, middle)
    return high


def smallest(
    pilot: Pilot, num_seeds: int, level: float, weights: Weights | None, overlap: float | None = None
) -> Seen:
    """The smallest difference of a pair that is seen at this level; ``weights`` are None where units are not known.

    A single seed sees none. With ``overlap`` each seed shuffles all rows (``two_sources.Shuffles``), and the deviation
    of a seed is that of a shuffle.
    """
    if num_seeds < 2:
        return Seen(math.inf, None if weights is None and overlap is None else math.inf, "seeds")
    if overlap is not None:
        one = noncentrality(num_seeds - 1, level) * pilot.of_seed
        limit = "classes" if overlap > 1 / num_seeds else "seeds"
        return Seen(one / math.sqrt(num_seeds), one * math.sqrt(1 / num_seeds + overlap), limit)
    p2 = 0.0 if weights is None else weights.p2
    of_seeds = (pilot.of_seed**2 + pilot.of_both**2 * p2) / num_seeds
    here = noncentrality(num_seeds - 1, level) * math.sqrt(of_seeds)
    if weights is None:
        return Seen(here, None, "seeds")
    of_units = pilot.of_class**2 * p2
    together = of_seeds + of_units
    if not of_seeds or not of_units:  # nothing varies from one of the two
        one = noncentrality(num_seeds - 1 if of_seeds else weights.nu, level) * math.sqrt(together)
        return Seen(here, one, "seeds" if of_seeds else "classes")
    df = together**2 / (of_seeds**2 / (num_seeds - 1) + of_units**2 / weights.nu)
    like = max(
        here,
        noncentrality(weights.nu, level) * math.sqrt(of_units),
        noncentrality(df, level) * math.sqrt(together),
    )
    return Seen(here, like, "classes" if of_units > of_seeds else "seeds")


class PlanPower(NamedTuple):
    """A plan's power on the units of a test: the numbers that ``told`` puts into words."""

    plan: Plan
    num_families: int
    unit: Unit
    counts: tuple[int, ...] | None
    """Queries of each unit of the test, or ones where each counts alike; None where the objective is no mean."""
    pilot: Pilot
    overlap: float | None = None
    """As of ``smallest``."""

    @classmethod
    def num_pairs_of(cls, compare: Compared, num_families: int) -> int:
        """Pairs among so many families, each with its own untrained embedder; at most."""
        if not isinstance(compare, str):
            return len(compare)
        if compare == "winner":
            return num_families
        return num_families * (num_families - 1) // 2 + num_families

    @property
    def num_pairs(self) -> int:
        """m of the plan."""
        return self.num_pairs_of(self.plan.compare, self.num_families)

    def seen(self, num_seeds: int, num_pairs: int) -> Seen:
        """The smallest difference with so many seeds at most, and so many pairs."""
        level = ALPHA * self.plan.weights[-1] / num_pairs
        return smallest(self.pilot, num_seeds, level, self._weights, self.overlap)

    @property
    def _weights(self) -> Weights | None:
        has_units = self.counts is not None and len(self.counts) >= FEWEST_UNITS
        return Weights.of(self.counts) if has_units and self.counts is not None else None

    @property
    def more_seeds(self) -> int:
        """Seeds of the alternative that is told beside the plan's."""
        return max(5, 2 * self.plan.most_seeds)

    @property
    def fewer_pairs(self) -> int | None:
        """Pairs with the winner alone; None where the plan has no more."""
        fewer = self.num_pairs_of("winner", self.num_families)
        return fewer if fewer < self.num_pairs else None

    def told(self) -> list[str]:
        """The line on what the plan sees, and what more seeds or fewer pairs would bring."""
        m, num_seeds, units = self.num_pairs, self.plan.most_seeds, PLURALS[self.unit]
        seen = self.seen(num_seeds, m)
        up_to = "up to " if self.plan.is_in_steps else ""
        of_units = f"{len(self.counts)} {units}, " if self.counts is not None else ""
        what = f"{up_to}{num_seeds} seed{'s' * (num_seeds > 1)}, {of_units}{m} pair{'s' * (m > 1)}"
        if math.isinf(seen.here):
            line = f"power: {what}: one seed sees no difference"
        else:
            line = f"power: {what}: sees {_points(seen.here)} points on these {units}" + (
                f", {_points(seen.like)} on {units} like these" if seen.like is not None else ""
            )
            line += f", with {POWER:.0%}"
        more = [f"{self.more_seeds} seeds: {_both(self.seen(self.more_seeds, m))}"]
        if self.fewer_pairs is not None and num_seeds > 1:
            fewer = self.fewer_pairs
            more.append(f"protocol.compare: winner ({fewer} pairs): {_both(self.seen(num_seeds, fewer))}")
        pilot = self.pilot
        scale = (
            f"deviations of a paired seed {_points(pilot.of_seed)}, of a {self.unit} {_points(pilot.of_class)}, of"
            f" their interaction {_points(pilot.of_both)}: {pilot.source}"
        )
        limit = f"; what limits: {seen.limit.replace('classes', units)}" if seen.like is not None else ""
        return [f"{line}; {'; '.join(more)}{limit} ({scale})"]

    def facts(self) -> dict[str, object]:
        """The same for programs."""
        seen = self.seen(self.plan.most_seeds, self.num_pairs)
        return {
            "num_seeds": list(self.plan.looks),
            "num_pairs": self.num_pairs,
            "num_units": None if self.counts is None else len(self.counts),
            "unit": self.unit,
            "sees_here": None if math.isinf(seen.here) else seen.here,
            "sees_like": None if seen.like is None or math.isinf(seen.like) else seen.like,
            "limit": seen.limit,
            "pilot": self.pilot.model_dump(),
        }


def _points(value: float) -> str:
    """A difference in points, hundredths of the metric."""
    return f"{100 * value:.2g}" if value < 0.0095 else f"{100 * value:.1f}"


def _both(seen: Seen) -> str:
    return _points(seen.here) + ("" if seen.like is None else f", {_points(seen.like)}")


def of_comparisons(
    comparisons: Sequence[Comparison], counts: Sequence[int] | None, source: str
) -> Pilot | None:
    """The pilot of an earlier verdict on the same data: the median of its pairs' deviations; None without such.

    A verdict's deviation of a seed holds the interaction, p2 s_both^2 of it, which is taken out.
    """
    found = [
        (each.seed_deviation, each.class_deviation, each.both_deviation)
        for each in comparisons
        if each.seed_deviation is not None
        and each.class_deviation is not None
        and each.both_deviation is not None
    ]
    if not found:
        return None
    of_seed, of_class, of_both = (statistics.median(each) for each in zip(*found, strict=True))
    p2 = 0.0 if counts is None else sum(n**2 for n in counts) / sum(counts) ** 2
    alone = math.sqrt(max(0.0, of_seed**2 - p2 * of_both**2))
    return Pilot(of_seed=alone, of_class=of_class, of_both=of_both, source=source)


def of_folds(
    folds: Mapping[str, Mapping[int, UnitMeans]], source: str = "this search's folds"
) -> Pilot | None:
    """The pilot of a search: each family's best on the classes that each fold held out, once each.

    The differences d_c of two families are of one model each. Their variance over the classes of a fold, pooled over
    folds by degrees of freedom, holds the interaction, so it is too large. The deviation of the folds' mean
    differences stands for a seed's, and is too large as well. None with fewer than two folds or families.
    """
    found = []
    for first, second in itertools.combinations(folds.values(), 2):
        common = [
            (first[fold], second[fold])
            for fold in sorted(first.keys() & second.keys())
            if first[fold].key == second[fold].key
        ]
        deviations = _of_pair(common)
        if deviations is not None:
            found.append(deviations)
    if not found:
        return None
    of_seed, of_class = (statistics.median(each) for each in zip(*found, strict=True))
    return Pilot(of_seed=of_seed, of_class=of_class, of_both=0.0, source=source)


def _of_pair(folds: Sequence[tuple[UnitMeans, UnitMeans]]) -> tuple[float, float] | None:
    """Deviations of two families' differences over the folds, and over classes within folds."""
    if len(folds) < 2:
        return None
    means, variances, num_free = [], [], []
    for a, b in folds:
        d_C: NDArray[np.float64] = a.mean_C - b.mean_C
        means.append(float(np.average(d_C, weights=a.counts)))
        if len(a.counts) > 1:
            weights = Weights.of(a.counts)
            variances.append(variance_over_units(d_C, weights) / weights.p2)
            num_free.append(weights.nu)
    if not variances or sum(len(a.counts) for a, _ in folds) < FEWEST_UNITS:
        return None
    return statistics.stdev(means), math.sqrt(np.average(variances, weights=num_free))
