"""The leaderboard of a study, read from MLflow: each family's best, with its scores and how sure they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dmlstudy import metric_names
from dmlstudy.records import Grown, Record, is_untrained
from dmlstudy.registry import retention, tracking
from dmlstudy.registry.estimates import Estimate
from dmlstudy.registry.retention import RetentionSet
from dmlstudy.registry.runs import Run, StudyRuns
from dmlstudy.registry.search_luck import SearchLuck, search_luck
from dmlstudy.registry.short_vectors import ShortVectors, short_vectors
from dmlstudy.registry.units import NamedMetric, units
from dmlstudy.store import Store
from dmlstudy.training.shares import params_settled
from dmlstudy.training.tasks import task_of_params
from dmlstudy.trials import Status, rank
from dmlstudy.verdict.comparison import NOT_KEPT, Comparison, UnitMeans, compare
from dmlstudy.verdict.sequential import Looks

SECOND_OBJECTIVES: dict[str, Callable[[Run], int | float]] = {
    "embedding_dim": lambda run: task_of_params(run.params).size(run.params),
    "latency_ms": lambda run: float(run.metrics.get(metric_names.LATENCY_MS, math.inf)),
}
"""Each objective of a trial's run; a trial without a latency counts as the slowest, as in its search."""

LEAST_DEVIATION = 0.01
"""Of structure embeddings that do anything: ``omega_deviation`` on the test items, the mean over seeds."""


class Row(Grown):
    """One family: how its search went, its best configuration, and that configuration on the test classes.

    ``validation`` is the objective on the validation classes (mean over folds) with its standard error;
    ``test`` holds test metrics over the ``num_judged`` verdict seeds, the shipped model's before those of the folds'
    models. ``untrained`` is the row of its embedder before training. An untrained embedder has no search.

    ``retention`` holds the same metrics on the retention data, where the study has such.
    """

    LATER = ("retention",)

    family: str
    num_finished: int
    num_pruned: int
    num_failed: int
    num_judged: int
    validation: float | None
    validation_stderr: float | None
    params: dict[str, str]
    untrained: str | None
    test: dict[str, Estimate]
    retention: dict[str, Estimate] = {}

    @property
    def untested(self) -> str | None:
        """A line where the family's structure embeddings are the same for all items; None where they are not."""
        found = self.test.get(metric_names.on_test(metric_names.OMEGA_DEVIATION))
        if found is None or is_untrained(self.family) or found.mean >= LEAST_DEVIATION:
            return None
        saturated = self.test.get(metric_names.on_test(metric_names.OMEGA_SATURATED))
        at_bounds = "" if saturated is None else f", {saturated.mean:.0%} of weights at a bound"
        return (
            f"the structure head of {self.family} did nothing, giving all items the same weights (omega_deviation"
            f" {found.mean:.4f} < {LEAST_DEVIATION}{at_bounds}): what structure embeddings bring is not tested"
        )

    @property
    def num_tried(self) -> int:
        """Trials of the family's search that have ended."""
        return self.num_finished + self.num_pruned + self.num_failed


class FrontTrial(Record):
    """A finished trial of the search that none beats in both objectives; ``size`` is the second, to be small."""

    family: str
    trial: int
    validation: float
    size: int | float


class Leaderboard(Grown):
    """Rows by validation objective, best first, untrained embedders last; never ordered by test scores.

    A row's best configuration is that of the highest validation objective, also where the study has a second one.
    """

    LATER = ("retention", "lost", "luck", "untested", "alike", "short")

    study: str
    objective: str
    second_objective: str | None
    status: str
    winner: str | None
    model: str | None
    rows: list[Row]
    front: list[FrontTrial]
    """With a second objective: what can be had at each size, smallest first."""
    comparisons: list[Comparison]
    """By the objective on the test classes: each pair of judged families, and each with its untrained embedder."""
    retention: RetentionSet | None = None
    lost: list[Comparison] = []
    """By the objective on the retention data: each judged family with its untrained embedder."""
    short: list[ShortVectors] = []
    """Judged families' embeddings in short forms, where the study scored such."""
    luck: SearchLuck | None = None
    """Of the families whose search was done again; None where none was."""
    alike: dict[str, str] = {}
    """Of each family that is ``like`` another, what it takes from that, in words."""
    untested: list[str] = []
    """Lines on families whose structure head did nothing, so that what it was to show is not tested."""

    @property
    def paired(self) -> str:
        """A line on the families that differ in nothing but a switch; empty where none is like another."""
        taken = ", ".join(f"{family} has {what}" for family, what in self.alike.items())
        return f"paired in the search too: {taken}" if taken else ""

    def lost_by(self, family: str) -> Comparison | None:
        """A family's comparison with its untrained embedder on the retention data, where there is one."""
        return next((each for each in self.lost if each.first == family), None)


def leaderboard(store: Store, study: str) -> Leaderboard:
    """Read a study's leaderboard; raises StoreError where there is no such study."""
    runs = tracking.runs_of(store, study)
    parent, objective = runs.study, runs.study.objective
    untrained = _untrained_of(runs)
    families = sorted(runs.families, key=lambda family: _rank(runs.best(family), objective), reverse=True)
    rows = [_row(runs, family, untrained.get(family)) for family in families]
    scores = {family: _scores_by_seed(runs, family, metric_names.on_test(objective)) for family in families}
    second = parent.second_objective
    elsewhere = RetentionSet.of(parent)
    return Leaderboard(
        study=study,
        objective=objective,
        second_objective=second,
        status=parent.status,
        winner=parent.winner,
        model=parent.model,
        rows=rows,
        front=_front(runs.finished, objective, second) if second else [],
        comparisons=_compared(runs, rows, scores),
        retention=elsewhere,
        lost=retention.lost(
            runs, {row.family: row.untrained for row in rows if row.untrained}, elsewhere, objective
        ),
        short=short_vectors(runs, [row.family for row in rows if not is_untrained(row.family)]),
        luck=_luck(store, study, runs),
        alike=parent.alike,
        untested=[line for row in rows if (line := row.untested)],
    )


def _luck(store: Store, study: str, runs: StudyRuns) -> SearchLuck | None:
    """The luck of the search, from the finished studies that did it again."""
    searches = [runs, *tracking.replicates_of(store, study)]
    if len(searches) < 2:
        return None
    metric = metric_names.on_test(runs.study.objective)
    families = sorted(set.intersection(*({*each.families} for each in searches)))
    return search_luck(
        [{family: _scores_by_seed(each, family, metric) for family in families} for each in searches],
        [_units(each, families, metric) for each in searches],
        resolution=runs.study.resolution,
        plan=runs.study.plan,
    )


def _compared(
    runs: StudyRuns, rows: Sequence[Row], scores: Mapping[str, Mapping[int, float]]
) -> list[Comparison]:
    """The comparisons of a study's rows by its plan, from each family's scores by seed."""
    plan, winner = runs.study.plan, rows[0].family if rows else None
    pairs = [(a.family, b.family) for a, b in itertools.combinations(rows, 2) if _are_comparable(a, b)]
    pairs = plan.chosen(pairs, winner) if plan else pairs
    by_unit = _units(runs, [row.family for row in rows], metric_names.on_test(runs.study.objective))
    if plan and plan.is_in_steps:
        sealed = runs.sealed_plan()
        if sealed is None:
            return []
        looks = Looks(
            plan, list(sealed.trials), sealed.pairs, runs.study.resolution, overlap=by_unit.get("overlap")
        )
        looks.take(runs.verdict_scores())
        return looks.comparisons(by_unit.get("unit", "class"), by_unit.get("unknown", NOT_KEPT))
    return compare(
        scores,
        pairs=[(a, b) for a, b in pairs if scores[a] and scores[b]],
        resolution=runs.study.resolution,
        **by_unit,
    )


class Judged(NamedTuple):
    """A family's result on the test classes: its objective by verdict seed, and the data."""

    metric: str
    test_sha256: str
    score_by_seed: dict[int, float]
    resolution: float
    units: dict[str, Any]
    """Arguments of ``compare``."""

    @property
    def by_seed(self) -> dict[int, UnitMeans]:
        """The objective by unit, of each seed that kept such scores."""
        return next(iter(self.units.get("by_unit", {}).values()), {})


def judged(store: Store, study: str, family: str) -> Judged:
    """The verdict of a family. Raises StoreError where there is no such study."""
    runs = tracking.runs_of(store, study)
    metric = metric_names.on_test(runs.study.objective)
    return Judged(
        metric=metric,
        test_sha256=runs.study.test_sha256,
        score_by_seed=_scores_by_seed(runs, family, metric),
        resolution=runs.study.resolution,
        units=_units(runs, [family], metric),
    )


def _rank(best: Run | None, objective: str) -> tuple[float, int]:
    """A family's place, by its best trial as the search ranks trials; one without any comes last."""
    return (-math.inf, 0) if best is None else rank(best.metrics[objective], best.number)


def _are_comparable(a: Row, b: Row) -> bool:
    """Families with each other, and each with its own embedder untrained; another backbone is another question."""
    if is_untrained(a.family) or is_untrained(b.family):
        return b.family == a.untrained or a.family == b.untrained
    return True


def _untrained_of(runs: StudyRuns) -> dict[str, str]:
    """Family to the untrained row that was judged with the same embedder."""
    first = {family: runs.judged(family)[:1] for family in runs.families}
    embedders = {family: _embedder(own[0]) for family, own in first.items() if own}
    untrained = {embedder: name for name, embedder in embedders.items() if is_untrained(name)}
    return {
        family: untrained[embedder]
        for family, embedder in embedders.items()
        if not is_untrained(family) and embedder in untrained
    }


def _embedder(run: Run) -> frozenset[tuple[str, str]]:
    """A run's model before training, as a key (``tasks.untrained_key``)."""
    return task_of_params(run.params).untrained_key(run.params)


def _front(finished: Sequence[Run], objective: str, second: str) -> list[FrontTrial]:
    """The finished trials that none beats, by size; of equal ones all."""
    trials = [
        FrontTrial(
            family=run.family,
            trial=run.number,
            validation=run.metrics[objective],
            size=SECOND_OBJECTIVES[second](run),
        )
        for run in finished
        if run.number is not None
    ]
    trials.sort(key=lambda trial: (trial.size, -trial.validation, trial.trial))
    front: list[FrontTrial] = []
    for trial in trials:
        best = front[-1] if front else None
        if best is None or trial.validation > best.validation or _are_equal(trial, best):
            front.append(trial)
    return front


def _are_equal(a: FrontTrial, b: FrontTrial) -> bool:
    return (a.validation, a.size) == (b.validation, b.size)


def _row(runs: StudyRuns, family: str, untrained: str | None) -> Row:
    counts, best, judged = runs.counts(family), runs.best(family), runs.judged(family)
    objective = runs.study.objective
    names = dict.fromkeys(name for run in judged for name in run.metrics if metric_names.is_on_test(name))
    names_in_order = sorted(  # else as they are
        names, key=lambda name: (metric_names.is_of_fold_models(name), metric_names.is_count(name))
    )
    return Row(
        family=family,
        num_finished=counts.get(Status.FINISHED, 0),
        num_pruned=counts.get(Status.PRUNED, 0),
        num_failed=counts.get(Status.FAILED, 0),
        num_judged=len(judged),
        validation=best.metrics[objective] if best else None,
        validation_stderr=best.metrics.get(metric_names.stderr(objective)) if best else None,
        params=params_settled(best.params, best.metrics) if best else {},
        untrained=untrained,
        test=_estimates(judged, names_in_order),
        retention=_estimates(judged, retention.names(judged)),
    )


def _estimates(judged: Sequence[Run], names: Sequence[str]) -> dict[str, Estimate]:
    return {name: Estimate.of([run.metrics[name] for run in judged if name in run.metrics]) for name in names}


def _units(runs: StudyRuns, families: Sequence[str], metric: str) -> dict[str, Any]:
    """Arguments of ``compare`` on units, by the metric of each family."""
    return units(
        runs, [NamedMetric(family, run, metric) for family in families for run in runs.judged(family)]
    )


def _scores_by_seed(runs: StudyRuns, family: str, metric: str) -> dict[int, float]:
    return {run.seed: run.metrics[metric] for run in runs.judged(family) if metric in run.metrics}
