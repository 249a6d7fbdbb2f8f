"""The luck of the search: what the best of a whole search scores when the search is done again from another seed.

The replicate is then the search, not the seed of training. With y_r the mean over its seeds of what search r ships, the
pairs of families are compared by the differences of y_r, exactly as else by those of seeds. So the intervals hold for
the procedure "search, then train", on these classes and on classes like these.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dmlstudy.records import Record, Unit, is_untrained
from dmlstudy.verdict.comparison import Comparison, UnitMeans, compare

if TYPE_CHECKING:
    from dmlstudy.registry.leaderboard import Leaderboard

FEWEST_TO_DECIDE = 3
"""Searches below which differences are described and hardly ever decided: with two, t is 12.7."""


class Procedure(Record):
    """A family's searches: the test score of what each shipped, and how much of that is the search's luck."""

    family: str
    score_by_search: list[float]
    """Of each search, the first one first: the mean over the verdict seeds of its best."""
    deviation: float
    """sqrt(max(0, variance over searches - mean variance over seeds / seeds)): of one search, without that of seeds."""


class SearchLuck(Record):
    """The families whose search was done several times, and how they compare as procedures."""

    num_searches: int
    num_seeds: int
    """Verdict seeds of each search that all of them have."""
    procedures: list[Procedure]
    comparisons: list[Comparison]
    """By the objective on the test classes, paired by search; ``num_seeds`` of each counts its searches."""

    @property
    def lines(self) -> list[str]:
        """What people read of it."""
        lines = [
            f"the luck of the search: {self.num_searches} searches of each, the best of each judged with"
            f" {self.num_seeds} seeds; paired by search"
        ]
        lines += [f"  {each}" for each in self.comparisons]
        deviations = ", ".join(f"{each.family} {each.deviation:.4f}" for each in self.procedures)
        lines.append(f"deviation of one search beyond that of its seeds: {deviations}")
        if self.num_searches < FEWEST_TO_DECIDE:
            lines.append(
                f"{self.num_searches} searches only describe: it takes {FEWEST_TO_DECIDE} or more to decide"
            )
        return lines


def luck_lines(board: Leaderboard) -> list[str]:
    """Lines on the luck of the search; without searches that were done again, that it is not in the verdict."""
    if board.luck is not None:
        return board.luck.lines
    return [
        "of these configurations: each search was run once, and its luck is in no interval (protocol.searches)"
    ]


def leaders(board: Leaderboard, num: int) -> list[str]:
    """The best families on validation, which is known before a test image is read."""
    found = [row.family for row in board.rows if row.validation is not None and not is_untrained(row.family)]
    return found[:num]


def search_luck(
    scores: Sequence[Mapping[str, Mapping[int, float]]],
    by_unit: Sequence[Mapping[str, Mapping[int, UnitMeans]]],
    *,
    resolution: float,
    unit: Unit,
) -> SearchLuck | None:
    """From each search's scores, by family and seed, and the same by test class; the first search is the study's own.

    None where no family was searched twice, or where its searches have no two seeds in common.
    """
    families = [name for name in scores[0] if all(name in each for each in scores) and not is_untrained(name)]
    common = {name: sorted(set.intersection(*({*each[name]} for each in scores))) for name in families}
    families = [name for name in families if len(common[name]) > 1]
    if len(scores) < 2 or not families:
        return None
    means = {
        name: {
            number: statistics.fmean(each[name][seed] for seed in common[name])
            for number, each in enumerate(scores, 1)
        }
        for name in families
    }
    return SearchLuck(
        num_searches=len(scores),
        num_seeds=min(len(common[name]) for name in families),
        procedures=[
            Procedure(
                family=name,
                score_by_search=list(means[name].values()),
                deviation=_deviation(
                    [[each[name][seed] for seed in common[name]] for each in scores],
                ),
            )
            for name in families
        ],
        comparisons=compare(
            means,
            resolution=resolution,
            by_unit={name: _means_by_unit(by_unit, name, common[name]) for name in families},
            unit=unit,
        ),
    )


def _deviation(scores_RS: Sequence[Sequence[float]]) -> float:
    """The deviation of one search beyond that of its seeds."""
    over_searches = statistics.variance([statistics.fmean(own) for own in scores_RS])
    of_seeds = statistics.fmean(statistics.variance(own) / len(own) for own in scores_RS)
    return math.sqrt(max(0.0, over_searches - of_seeds))


def _means_by_unit(
    by_unit: Sequence[Mapping[str, Mapping[int, UnitMeans]]], family: str, seeds: Sequence[int]
) -> dict[int, UnitMeans]:
    """Each search's mean over seeds by test class; those that lack a seed's, or have other classes, are left out."""
    found = {}
    for number, each in enumerate(by_unit, 1):
        own = [each[family][seed] for seed in seeds if seed in each.get(family, {})]
        if len(own) == len(seeds) and len({one.key for one in own}) == 1:
            mean_C = np.mean([one.mean_C for one in own], axis=0)
            found[number] = own[0]._replace(mean_C=mean_C)
    return found
