"""The leaderboard of a study, read from MLflow: each family's best, with its scores and how sure they are."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scipy.special import stdtrit

from dmlstudy.records import OF_JUDGE, OF_STRUCTURE, Record, is_untrained
from dmlstudy.registry import tracking
from dmlstudy.registry.comparison import Comparison, compare
from dmlstudy.store import Store

SECOND_OBJECTIVES: dict[str, Callable[[Any], int | float]] = {
    "embedding_dim": lambda run: int(
        run.data.params.get("hashing.num_bits") or run.data.params["embedder.dim"]
    ),
    "latency_ms": lambda run: float(run.data.metrics.get("embed_ms_per_image", math.inf)),
}
"""What each is, of a trial's run; a trial that tells no latency counts as the slowest, as in its search."""

OF_FOLDS = ("test_separate_", "test_concatenated_")
"""How metrics of the folds' models begin."""

UNKNOWN_RESOLUTION = 1e-3
"""Of scores on test classes where nobody noted how many queries they have."""


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

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width

    def __str__(self) -> str:
        width = "" if self.half_width is None else f" ± {self.half_width:.3f}"
        return f"{self.mean:.4f}{width}"


class Row(Record):
    """One family: how its search went, its best configuration, and that configuration on the test classes.

    ``validation`` is the objective on the validation classes (mean over folds) with its standard error;
    ``test`` holds test metrics over the ``num_judged`` verdict seeds, the shipped model's before those of the folds'
    models. ``untrained`` is the row of its embedder before training. An untrained embedder has no search.
    """

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


class Leaderboard(Record):
    """Rows by validation objective, best first, untrained embedders last; never ordered by test scores.

    A row's best configuration is that of the highest validation objective, also where the study has a second one.
    """

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


def leaderboard(store: Store, study: str) -> Leaderboard:
    """Read a study's leaderboard; raises StoreError where there is no such study."""
    client = tracking.connect(store)
    experiment_id = tracking.experiment_of(client, store, study)
    parent = tracking.study_run(client, experiment_id)
    objective = parent.data.tags.get("objective", "map_at_r")
    second = parent.data.tags.get("second_objective")
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
    untrained = _untrained_of(families)
    rows = [
        _row(family, own, counts.get(family, {}), objective, untrained.get(family))
        for family, own in families.items()
    ]
    rows.sort(key=lambda row: -math.inf if row.validation is None else row.validation, reverse=True)
    scores = {row.family: _scores_by_seed(families[row.family], f"test_{objective}") for row in rows}
    return Leaderboard(
        study=study,
        objective=objective,
        second_objective=second,
        status=parent.data.tags.get("status", "running"),
        winner=parent.data.tags.get("winner"),
        model=parent.data.tags.get("model"),
        rows=rows,
        front=_front(client, experiment_id, objective, second) if second else [],
        comparisons=compare(
            scores,
            pairs=[
                (a.family, b.family)
                for a, b in itertools.combinations(rows, 2)
                if scores[a.family] and scores[b.family] and _are_comparable(a, b)
            ],
            resolution=_resolution(parent),
        ),
    )


class Judged(Record):
    """How a study's family did on the test classes: its objective by verdict seed, and on which data."""

    metric: str
    test_sha256: str
    score_by_seed: dict[int, float]
    resolution: float


def judged(store: Store, study: str, family: str) -> Judged:
    """The verdict of a family. Raises StoreError where there is no such study."""
    client = tracking.connect(store)
    experiment_id = tracking.experiment_of(client, store, study)
    parent = tracking.study_run(client, experiment_id)
    metric = f"test_{parent.data.tags.get('objective', 'map_at_r')}"
    runs = tracking.search_all(
        client, experiment_id, f"tags.dmlstudy_kind = 'verdict' and tags.family = '{family}'"
    )
    return Judged(
        metric=metric,
        test_sha256=parent.data.tags.get("test_sha256", ""),
        score_by_seed=_scores_by_seed(_last_of_each_trial(runs), metric),
        resolution=_resolution(parent),
    )


def _resolution(study_run: Any) -> float:
    """The smallest difference that a mean over the study's test queries can show."""
    num_queries = int(study_run.data.tags.get("num_test_images", 0))
    return 1 / num_queries if num_queries else UNKNOWN_RESOLUTION


def _are_comparable(a: Row, b: Row) -> bool:
    """Families with each other, and each with its own embedder untrained; another backbone is another question."""
    if is_untrained(a.family) or is_untrained(b.family):
        return b.family == a.untrained or a.family == b.untrained
    return True


def _untrained_of(families: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Family to the untrained row that was judged with the same embedder."""
    embedders = {family: _embedder(_judged(runs)[0]) for family, runs in families.items() if _judged(runs)}
    untrained = {embedder: name for name, embedder in embedders.items() if is_untrained(name)}
    return {
        family: untrained[embedder]
        for family, embedder in embedders.items()
        if not is_untrained(family) and embedder in untrained
    }


def _embedder(run: Any) -> frozenset[tuple[str, str]]:
    """What a run's model is before training (``TrialConfig.untrained_by``)."""
    params = run.data.params
    if "online.k" in params:
        own = ["loss", *(f"loss.{name}" for name in OF_STRUCTURE), *(f"online.{name}" for name in OF_JUDGE)]
        return frozenset((name, params[name]) for name in own if name in params)
    if "hashing.num_bits" in params:
        of_codes = ("loss", "hashing.num_bits", "hashing.features", "hashing.standardize")
        return frozenset((name, params[name]) for name in of_codes)
    return frozenset((name, value) for name, value in params.items() if name.startswith("embedder."))


def _front(client: Any, experiment_id: str, objective: str, second: str) -> list[FrontTrial]:
    """The finished trials that none beats, by size; of equal ones all."""
    runs = tracking.search_all(
        client, experiment_id, "tags.dmlstudy_kind = 'search' and tags.status = 'finished'"
    )
    trials = [
        FrontTrial(
            family=run.data.tags["family"],
            trial=int(run.data.tags["trial_number"]),
            validation=run.data.metrics[objective],
            size=SECOND_OBJECTIVES[second](run),
        )
        for run in _last_of_each_trial(runs)
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


def _last_of_each_trial(runs: Sequence[Any]) -> list[Any]:
    """The newest run of each trial: one that was begun twice, after a crash, counts once."""
    newest: dict[tuple[str, ...], Any] = {}
    for run in runs:
        tags = run.data.tags
        if tags["dmlstudy_kind"] in ("search", "verdict") and tags.get("status") != "interrupted":
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


def _row(
    family: str, runs: Sequence[Any], counts: Mapping[str, int], objective: str, untrained: str | None
) -> Row:
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
    names = dict.fromkeys(name for run in judged for name in run.data.metrics if name.startswith("test_"))
    names_in_order = sorted(
        names, key=lambda name: (name.startswith(OF_FOLDS), "_num_" in name)
    )  # else as they are
    return Row(
        family=family,
        num_finished=counts.get("finished", 0),
        num_pruned=counts.get("pruned", 0),
        num_failed=counts.get("failed", 0),
        num_judged=len(judged),
        validation=best.data.metrics[objective] if best else None,
        validation_stderr=best.data.metrics.get(f"{objective}_stderr") if best else None,
        params=dict(best.data.params) if best else {},
        untrained=untrained,
        test={
            name: Estimate.of([run.data.metrics[name] for run in judged if name in run.data.metrics])
            for name in names_in_order
        },
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
