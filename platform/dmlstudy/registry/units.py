"""Scores by unit (a class, an image, a stream) of a study's verdict, as its comparisons take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from dmlstudy import metric_names
from dmlstudy.registry.runs import Run, StudyRuns
from dmlstudy.training.tasks import task_of_params
from dmlstudy.verdict.comparison import NO_MEAN, NOT_KEPT, UnitMeans


class NamedMetric(NamedTuple):
    """A metric of a verdict's run, under the name by which it is compared."""

    name: str
    run: Run
    metric: str


def units(runs: StudyRuns, scored: Iterable[NamedMetric]) -> dict[str, Any]:
    """Arguments of ``compare`` on units: the kind of the study's task, and each metric by unit where it is known."""
    scored = list(scored)
    if not scored:
        return {}
    unit, unknown = task_of_params(scored[0].run.params).unit, NOT_KEPT
    overlap = runs.overlap()
    if overlap is not None:
        return {"unit": unit, "overlap": overlap}
    by_unit: dict[str, dict[int, UnitMeans]] = {}
    for name, run, metric in scored:
        scores = runs.unit_scores(run)
        means = None if scores is None else UnitMeans.of(scores, metric)
        if means is not None:
            by_unit.setdefault(name, {})[run.seed] = means
        elif scores is not None:
            unknown = NO_MEAN.format(metric=metric_names.metric_of(metric))
    return {"unit": unit, "by_unit": by_unit, "unknown": unknown}
