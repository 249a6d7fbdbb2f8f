"""Scores of several folds as one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dmlstudy import metric_names
from dmlstudy.records import PairCounts, UnitScores


class Scored(NamedTuple):
    """Metrics, and their sums by unit where they are means over queries."""

    metrics: dict[str, float]
    unit_scores: UnitScores | None = None
    pair_counts: PairCounts | None = None
    """Pairs that the thresholds of the search's folds accept; of the model that is shipped alone."""


def mean(scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each score's mean over the folds; of a threshold, which a fold with few pairs has not, the median of all."""
    return {
        name: (statistics.median if metric_names.is_tau(name) else statistics.fmean)(
            [score[name] for score in scores]
        )
        for name in scores[0]
        if not metric_names.is_tau(name) or all(name in score for score in scores)
    }


def mean_scored(parts: Sequence[Scored]) -> Scored:
    """The mean over models that were scored on the same queries, of metrics and of sums."""
    metrics = mean([each.metrics for each in parts])
    of_units = [each.unit_scores for each in parts if each.unit_scores is not None]
    if len(of_units) < len(parts):
        return Scored(metrics)
    sums = {
        name: [
            statistics.fmean(values) for values in zip(*(each.sums[name] for each in of_units), strict=True)
        ]
        for name in of_units[0].sums
    }
    return Scored(metrics, of_units[0].model_copy(update={"sums": sums}))


def renamed(scored: Scored, name: Callable[[str], str]) -> Scored:
    """The same under other names."""
    metrics = {name(old): value for old, value in scored.metrics.items()}
    own = scored.unit_scores
    if own is not None:
        own = own.model_copy(update={"sums": {name(old): values for old, values in own.sums.items()}})
    return Scored(metrics, own)


def joined(parts: Sequence[Scored]) -> Scored:
    """All metrics and sums of scores of the same queries, whose names differ."""
    metrics: dict[str, float] = {}
    sums: dict[str, list[float]] = {}
    of_units = [each.unit_scores for each in parts if each.unit_scores is not None]
    for each in parts:
        metrics |= each.metrics
    for own in of_units:
        assert (own.units, own.counts) == (of_units[0].units, of_units[0].counts)
        sums |= own.sums
    pairs = next((each.pair_counts for each in parts if each.pair_counts is not None), None)
    return Scored(metrics, of_units[0].model_copy(update={"sums": sums}) if of_units else None, pairs)


def spread(scores: Sequence[dict[str, float]], objective: str) -> dict[str, float]:
    """The objective and thresholds per fold and, with two folds or more, the objective's standard error over them."""
    values = [score[objective] for score in scores]
    found = {
        metric_names.of_fold(fold, name): value
        for fold, score in enumerate(scores)
        for name, value in score.items()
        if name == objective or metric_names.is_tau(name)
    }
    if len(values) > 1:
        found[metric_names.stderr(objective)] = statistics.stdev(values) / math.sqrt(len(values))
    return found


def unit_scores(
    units: Sequence[int], counts: Sequence[int], sums: Mapping[str, Sequence[float]]
) -> UnitScores:
    """The record of such columns; numbers of any kind."""
    return UnitScores(
        units=[int(unit) for unit in units],
        counts=[int(count) for count in counts],
        sums={name: [float(value) for value in values] for name, values in sums.items()},
    )
