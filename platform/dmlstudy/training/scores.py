"""Scores of several folds as one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dmlstudy import metric_names


def mean(scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each score's mean over the folds."""
    return {name: statistics.fmean(score[name] for score in scores) for name in scores[0]}


def spread(scores: Sequence[dict[str, float]], objective: str) -> dict[str, float]:
    """The objective per fold and, with two folds or more, its standard error over them."""
    values = [score[objective] for score in scores]
    found = {metric_names.of_fold(fold, objective): value for fold, value in enumerate(values)}
    if len(values) > 1:
        found[metric_names.stderr(objective)] = statistics.stdev(values) / math.sqrt(len(values))
    return found
