"""The leaderboard of a study, read from MLflow: each family's best, with its scores and how sure they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.special import stdtrit

from dmlstudy.records import Record
from dmlstudy.registry import tracking
from dmlstudy.registry.comparison import Comparison, compare
from dmlstudy.registry.store import Store


class Estimate(Record):
    """Mean over n values and the half-width of its 95% t-interval; none for a single value."""

    mean: float
    half_width: float | None
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        n = len(values)
        if n < 2:
            return cls(mean=values[0], half_width=None, num=n)
        quantile = float(stdtrit(n - 1, 0.975))
        half_width = quantile * statistics.stdev(values) / math.sqrt(n)
        return cls(mean=statistics.fmean(values), half_width=half_width, num=n)

    def __str__(self) -> str:
        width = "" if self.half_width is None else f" ± {self.half_width:.3f}"
        return f"{self.mean:.4f}{width}"


class Row(Record):
    """One family: how its search went, its best configuration, and that configuration on the test classes.

    ``validation`` is the objective on the validation classes (mean over folds) with its standard error;
    ``test`` holds test metrics over the ``num_judged``
    verdict seeds. The untrained embedder has no search.
    """

    family: str
    num_finished: int
    num_pruned: int
    num_failed: int
    num_judged: int
    validation: float | None
    validation_stderr: float | None
    params: dict[str, str]
    test: dict[str, Estimate]

    @property
    def num_tried(self) -> int:
        """Trials of the family's search that have ended."""
        return self.num_finished + self.num_pruned + self.num_failed


class Leaderboard(Record):
    """Rows by validation objective, best first, the untrained embedder last; never ordered by test scores."""

    study: str
    objective: str
    status: str
    winner: str | None
    model: str | None
    rows: list[Row]
    comparisons: list[Comparison]
    """Every pair of rows that was judged, by the objective on the test classes."""


def leaderboard(store: Store, study: str) -> Leaderboard:
    """Read a study's leaderboard; raises StoreError where there is no such study."""
    client = tracking.connect(store)
    experiment_id = tracking.experiment_of(client, store, study)
    parent = tracking.study_run(client, experiment_id)
    objective = parent.data.tags.get("objective", "map_at_r")
    noted = tracking.noted_search(parent)
    if noted is None:  # an older study, or one that has only begun: look at every run
        runs = _last_of_each_trial(tracking.search_all(client, experiment_id, ""))
        counts = _counted(runs)
    else:
        counts = {family: own["counts"] for family, own in noted.items()}
        best = [client.get_run(own["best"]) for own in noted.values() if own["best"]]
        judged = tracking.search_all(client, experiment_id, "tags.dmlstudy_kind = 'verdict'")
        runs = _last_of_each_trial([*best, *judged])
    families: dict[str, list[Any]] = {family: [] for family in counts}
    for run in runs:
        families.setdefault(run.data.tags["family"], []).append(run)
    rows = [_row(family, own, counts.get(family, {}), objective) for family, own in families.items()]
    rows.sort(key=lambda row: -math.inf if row.validation is None else row.validation, reverse=True)
    scores = {row.family: _scores_by_seed(families[row.family], f"test_{objective}") for row in rows}
    return Leaderboard(
        study=study,
        objective=objective,
        status=parent.data.tags.get("status", "running"),
        winner=parent.data.tags.get("winner"),
        model=parent.data.tags.get("model"),
        rows=rows,
        comparisons=compare({family: by_seed for family, by_seed in scores.items() if by_seed}),
    )


def _last_of_each_trial(runs: Sequence[Any]) -> list[Any]:
    """The newest run of each trial: one that was begun twice, after a crash, counts once."""
    newest: dict[tuple[str, ...], Any] = {}
    for run in runs:
        tags = run.data.tags
        if "family" in tags and tags.get("status") != "interrupted":
            is_search = tags["dmlstudy_kind"] == "search"
            number = tags.get("trial_number", run.info.run_id) if is_search else tags["seed"]
            newest[tags["dmlstudy_kind"], tags["family"], number] = run
    return list(newest.values())


def _counted(runs: Sequence[Any]) -> dict[str, dict[str, int]]:
    """Family to status to the number of its search trials."""
    counts: dict[str, dict[str, int]] = {}
    for run in runs:
        tags = run.data.tags
        own = counts.setdefault(tags["family"], {})
        if tags["dmlstudy_kind"] == "search":
            own[tags["status"]] = own.get(tags["status"], 0) + 1
    return counts


def _row(family: str, runs: Sequence[Any], counts: Mapping[str, int], objective: str) -> Row:
    """``runs`` are the family's verdicts, and those of its search trials among which the best is."""
    scored = [
        run
        for run in runs
        if run.data.tags["dmlstudy_kind"] == "search"
        and run.data.tags["status"] == "finished"
        and objective in run.data.metrics
    ]
    best = max(scored, key=lambda run: run.data.metrics[objective], default=None)
    judged = _judged(runs)
    names = [name for name in (judged[0].data.metrics if judged else {}) if name.startswith("test_")]
    return Row(
        family=family,
        num_finished=counts.get("finished", 0),
        num_pruned=counts.get("pruned", 0),
        num_failed=counts.get("failed", 0),
        num_judged=len(judged),
        validation=best.data.metrics[objective] if best else None,
        validation_stderr=best.data.metrics.get(f"{objective}_stderr") if best else None,
        params=dict(best.data.params) if best else {},
        test={name: Estimate.of([run.data.metrics[name] for run in judged]) for name in names},
    )


def _judged(runs: Sequence[Any]) -> list[Any]:
    return [
        run
        for run in runs
        if run.data.tags["dmlstudy_kind"] == "verdict" and run.data.tags["status"] == "finished"
    ]


def _scores_by_seed(runs: Sequence[Any], metric: str) -> dict[int, float]:
    return {
        int(run.data.tags["seed"]): run.data.metrics[metric]
        for run in _judged(runs)
        if metric in run.data.metrics
    }
