"""The luck of the search: what the best of a whole search scores when the search is done again from another seed.

The replicate is then the search, not the seed of training. With y_r the mean over its seeds of what search r ships, the
pairs of families are compared by the differences of y_r, exactly as else by those of seeds. So the intervals hold for
the procedure "search, then train", on these classes and on classes like these.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from dmlstudy.records import Record, is_untrained
from dmlstudy.verdict.comparison import ALPHA, NOT_KEPT, Comparison, UnitMeans, compare
from dmlstudy.verdict.sequential import Plan

if TYPE_CHECKING:
    from dmlstudy.registry.leaderboard import Leaderboard

FEWEST_TO_DECIDE = 3
"""Searches below which differences are described and hardly ever decided: with two, t is 12.7."""

MOST_ERRORS = 5.0
"""Standard errors; a reader expects that a difference of more is seen."""

SHUFFLED = "each search shuffled the rows anew"


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
        """The lines that people read."""
        lines = [
            f"the luck of the search: {self.num_searches} searches of each, the best of each judged with"
            f" {self.num_seeds} seeds; paired by search"
        ]
        lines += [f"  {each}" for each in self.comparisons]
        deviations = ", ".join(f"{each.family} {each.deviation:.4f}" for each in self.procedures)
        lines.append(f"deviation of one search beyond that of its seeds: {deviations}")
        return [*lines, *too_few(self.num_searches, len(self.comparisons))]


def errors_to_decide(num_searches: int, num_pairs: int) -> float:
    """Standard errors from which on a difference counts, t(searches - 1, 1 - alpha / (2 pairs)): Holm's first step."""
    return float(stdtrit(num_searches - 1, 1 - ALPHA / (2 * num_pairs)))


def too_few(num_searches: int, num_pairs: int) -> list[str]:
    """A line that so few searches decide little among so many pairs; none where there are enough."""
    if num_searches < FEWEST_TO_DECIDE:
        return [f"{num_searches} searches only describe: it takes {FEWEST_TO_DECIDE} or more to decide"]
    if not num_pairs:
        return []
    needed, with_more = (errors_to_decide(number, num_pairs) for number in (num_searches, 2 * num_searches))
    if needed < MOST_ERRORS:
        return []
    return [
        f"{num_searches} searches decide little among {num_pairs} differences at once: one counts from {needed:.1f}"
        f" standard errors on, with {2 * num_searches} searches from {with_more:.1f}"
    ]


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
    units: Sequence[Mapping[str, Any]],
    *,
    resolution: float,
    plan: Plan | None = None,
) -> SearchLuck | None:
    """From each search's scores by family and seed, and what ``compare`` is told of its units.

    The first search is the study's own. It may have more seeds than the others: its first ones are taken, as many as
    each search has of each family. None where that is fewer than two, or where no family was searched again.

    Pairs that the study's ``plan`` names are the only ones; else all pairs are compared.
    """
    families = [
        name for name in scores[0] if all(each.get(name) for each in scores) and not is_untrained(name)
    ]
    num_seeds = min((len(each[name]) for each in scores for name in families), default=0)
    if len(scores) < 2 or num_seeds < 2:
        return None
    seeds = {name: [sorted(each[name])[:num_seeds] for each in scores] for name in families}
    score_RS = {
        name: [[each[name][seed] for seed in own] for each, own in zip(scores, seeds[name], strict=True)]
        for name in families
    }
    pairs = list(itertools.combinations(families, 2))
    if plan is not None and not isinstance(plan.compare, str):
        pairs = plan.chosen(pairs, None)
    means = {
        name: {number: statistics.fmean(own) for number, own in enumerate(score_RS[name], 1)}
        for name in families
    }
    return SearchLuck(
        num_searches=len(scores),
        num_seeds=num_seeds,
        procedures=[
            Procedure(
                family=name, score_by_search=list(means[name].values()), deviation=_deviation(score_RS[name])
            )
            for name in families
        ],
        comparisons=compare(
            means,
            pairs=pairs,
            resolution=resolution,
            by_unit={name: _means_by_unit(units, name, seeds[name]) for name in families},
            unit=units[0].get("unit", "class"),
            unknown=SHUFFLED if "overlap" in units[0] else units[0].get("unknown", NOT_KEPT),
        ),
    )


def _deviation(score_RS: Sequence[Sequence[float]]) -> float:
    """The deviation of one search beyond that of its seeds."""
    over_searches = statistics.variance([statistics.fmean(own) for own in score_RS])
    of_seeds = statistics.fmean(statistics.variance(own) / len(own) for own in score_RS)
    return math.sqrt(max(0.0, over_searches - of_seeds))


def _means_by_unit(
    units: Sequence[Mapping[str, Any]], family: str, seeds: Sequence[Sequence[int]]
) -> dict[int, UnitMeans]:
    """Each search's mean over its seeds by test class; none of a search that lacks a seed's, or has other classes."""
    found = {}
    for number, (each, wanted) in enumerate(zip(units, seeds, strict=True), 1):
        of_seed = each.get("by_unit", {}).get(family, {})
        own = [of_seed[seed] for seed in wanted if seed in of_seed]
        if len(own) == len(wanted) and len({one.key for one in own}) == 1:
            mean_C = np.mean([one.mean_C for one in own], axis=0)
            found[number] = own[0]._replace(mean_C=mean_C)
    return found
