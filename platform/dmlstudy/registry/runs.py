"""Runs of studies as MLflow keeps them, typed: the one file that reads them.

``tracking`` writes what is read here. A study is one experiment: a run of the study itself, a run per trial of the
search and of the verdict, and, once it has ended, runs of folds and of the leaderboard's rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlflow
from mlflow.entities import ViewType

from dmlstudy import data, metric_names
from dmlstudy.files import temporary_folder
from dmlstudy.records import PairCounts, Record, UnitScores, present_key
from dmlstudy.training.tasks import task_of_params
from dmlstudy.trials import Status, best_ranked
from dmlstudy.verdict.comparison import UNKNOWN_RESOLUTION, UnitMeans
from dmlstudy.verdict.sealed_plan import PLAN_FILE, SealedPlan
from dmlstudy.verdict.sequential import FAILED, Plan, SeedScore

PARENT = "mlflow.parentRunId"
KIND = "dmlstudy_kind"
NOTE = "search"
"""The tag of a study's run with the counts of its search trials by end, so that no reader must visit each."""
STUDY_RUN = "study_run"
"""The tag of an experiment that names the study's run."""
STORE = "store_id"
"""The tag of a study's run that names the store it belongs to."""
VALUES = "objective_values"
"""The tag of a finished search trial's run with the exact values that Optuna gets."""
UNITS_SHA256 = "units_sha256"
"""The tag of a run that has scores by class: the SHA-256 of the classes and their queries.

Of a verdict trial, of a search trial (of the folds' held-out classes), or of the study, which then has all its verdict
trials' in one table.
"""
UNIT_SCORES = "classes.parquet"
"""The artifact of a verdict trial's run with these scores."""
FOLD_SCORES = "validation_classes.parquet"
"""The same of a search trial's run, by fold."""
VERDICT_SCORES = "verdict_classes.parquet"
"""The same of the study's run, by family and seed."""
REPLICATE_OF = "replicate_of"
"""The tag of the run of a search that was done again: the study it belongs to."""
ALIKE = "alike"
"""The tag of a study's run with what each family takes that is like another, in words, as JSON."""
PLAN = "verdict_plan"
"""The tag of a study's run with the rule of its verdict, where seeds are added or not all pairs are compared."""
PLAN_SHA256 = "verdict_plan_sha256"
"""The tag of a study's run with the digest of the plan that was sealed before its first test image was read."""
THRESHOLDS = "thresholds"
"""The tag of a verdict trial's run whose model has thresholds, by the rate they are set for, as JSON."""
SPANS = "spans"
"""The tag of a run that has paused: when it was at work, as JSON pairs of a start and an end in seconds since 1970.

The last end is null where it went on, and is then the run's.
"""
COST_PER_HOUR = "cost_per_hour"
"""The tag of what an hour of one of a trial's workers costs, where the study says that."""

PAIR_COUNTS = "pairs.parquet"
"""The artifact with what these do, class by class."""
PAGE = 1000

T = TypeVar("T")


class RunKind(StrEnum):
    """The kind of work that a run records."""

    STUDY = "study"
    SEARCH = "search"
    VERDICT = "verdict"
    FOLD = "fold"
    LEADERBOARD = "leaderboard"


TRIALS = (RunKind.SEARCH, RunKind.VERDICT)


class Run(Record):
    """One run; a trial that was begun twice has two. Times are in seconds since 1970, with no end while it runs.

    ``number`` is the search trial's, ``values`` what the search takes it for. ``tags`` are those that MLflow has not
    set itself.
    """

    id: str = ""
    name: str = ""
    kind: RunKind
    family: str
    number: int | None = None
    seed: int
    status: Status
    reason: str
    started: float
    ended: float | None
    workers: int
    device: str
    params: dict[str, str] = {}
    metrics: dict[str, float] = {}
    values: list[float] = []
    tags: dict[str, str] = {}
    experiment_id: str = ""
    models: list[str] = []
    """Ids of the models that were logged of it."""

    @classmethod
    def of(cls, raw: Any) -> Run:
        """The record of one of MLflow's runs."""
        tags = raw.data.tags
        # One that goes on keeps the time at which it had paused.
        has_ended = raw.info.end_time and raw.info.status != Status.RUNNING.in_mlflow
        return cls(
            id=raw.info.run_id,
            name=raw.info.run_name or "",
            kind=tags[KIND],
            family=tags.get("family", ""),
            number=int(tags["trial_number"]) if "trial_number" in tags else None,
            seed=int(tags.get("seed", 0)),
            status=tags.get("status", Status.RUNNING),
            reason=tags.get("reason", ""),
            started=raw.info.start_time / 1000,
            ended=raw.info.end_time / 1000 if has_ended else None,
            workers=int(tags.get("workers", 1)),
            device=tags.get("device", "cpu"),
            params={present_key(name): value for name, value in raw.data.params.items()},
            metrics=raw.data.metrics,
            values=json.loads(tags.get(VALUES, "[]")),
            tags={name: value for name, value in tags.items() if not name.startswith("mlflow.")},
            experiment_id=raw.info.experiment_id,
            models=[each.model_id for each in raw.outputs.model_outputs] if raw.outputs else [],
        )

    @property
    def worker_hours(self) -> float:
        """Hours of all its workers together, without those in which it had paused; 0 while it runs."""
        return self.seconds * self.workers / 3600

    @property
    def seconds(self) -> float:
        """Seconds in which it was at work; 0 while it runs."""
        return sum(end - start for start, end in self.spans)

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Starts and ends of its times at work, between which it had paused at rungs. Empty while it runs."""
        if self.ended is None:
            return []
        return [(start, self.ended if end is None else end) for start, end in self._begun]

    @property
    def begun_last(self) -> float:
        """The time when it began, or went on after its last pause."""
        return self._begun[-1][0]

    @property
    def _begun(self) -> list[tuple[float, float | None]]:
        return json.loads(self.tags[SPANS]) if SPANS in self.tags else [(self.started, None)]

    @property
    def money(self) -> float | None:
        """Cost of these hours, in the currency of ``resources.cost_per_hour``; None where it was not set."""
        return float(self.tags[COST_PER_HOUR]) * self.worker_hours if COST_PER_HOUR in self.tags else None

    @property
    def trial(self) -> tuple[RunKind, str, int | str]:
        """A key that tells the run's trial from the study's other trials; old search trials have no number."""
        if self.kind == RunKind.VERDICT:
            return self.kind, self.family, self.seed
        return self.kind, self.family, self.id if self.number is None else self.number


class SearchNote(NamedTuple):
    """Notes on a family's search: counts of trials by how they ended, and the id of the best one's run."""

    counts: dict[str, int]
    best: str | None


class StudyRun(NamedTuple):
    """The run of a study itself; ``noted`` is by family, None in a study that noted nothing of its search."""

    id: str
    status: str
    objective: str
    second_objective: str | None
    winner: str | None
    model: str | None
    num_test_images: int
    test_sha256: str
    noted: dict[str, SearchNote] | None
    tags: dict[str, str]

    @property
    def resolution(self) -> float:
        """The smallest difference that a mean over the study's test queries can show."""
        return 1 / self.num_test_images if self.num_test_images else UNKNOWN_RESOLUTION

    @property
    def num_rows(self) -> int:
        """Development and test images together; 0 of either where nobody noted it."""
        return int(self.tags.get("num_development_images", 0)) + self.num_test_images

    @property
    def plan(self) -> Plan | None:
        """The rule of its verdict where that is not the same for all pairs and a fixed number of seeds."""
        return Plan.model_validate_json(self.tags[PLAN]) if PLAN in self.tags else None

    @property
    def alike(self) -> dict[str, str]:
        """Of each family that is like another, what it takes from that."""
        return dict(json.loads(self.tags.get(ALIKE, "{}")))

    @classmethod
    def of(cls, run: Run) -> StudyRun:
        """The record of the study's run, with defaults for what older studies did not log."""
        tags = run.tags
        noted = json.loads(tags[NOTE]) if tags.get(NOTE) else None
        return cls(
            id=run.id,
            status=tags.get("status", "running"),
            objective=tags.get("objective", "map_at_r"),
            second_objective=tags.get("second_objective"),
            winner=tags.get("winner"),
            model=tags.get("model"),
            num_test_images=int(tags.get("num_test_images", 0)),
            test_sha256=tags.get("test_sha256", ""),
            noted=noted and {family: SearchNote(own["counts"], own["best"]) for family, own in noted.items()},
            tags=tags,
        )


class StudyRuns:
    """The runs of one study's experiment, oldest first.

    What ``study``, ``families``, ``best`` and ``judged`` say is read when first asked, and stays: make another to see
    what a running study has done since.
    """

    def __init__(self, client: mlflow.MlflowClient, experiment_id: str) -> None:
        self._client = client
        self.experiment_id = experiment_id

    def every(
        self,
        kind: RunKind | None = None,
        *,
        status: Status | None = None,
        family: str | None = None,
        seed: int | None = None,
        number: int | None = None,
        parent: str | None = None,
        is_open: bool = False,
    ) -> Iterator[Run]:
        """Every run of the study that is so, page by page; ``is_open`` selects runs that are open in MLflow."""
        asked = {
            f"tags.{KIND}": kind,
            "tags.status": status,
            "tags.family": family,
            "tags.seed": seed,
            "tags.trial_number": number,
            f"tags.`{PARENT}`": parent,
            "attributes.status": Status.RUNNING.in_mlflow if is_open else None,
        }
        wanted = " and ".join(f"{name} = '{value}'" for name, value in asked.items() if value is not None)
        for raw in raw_runs(self._client, self.experiment_id, wanted):
            # Others' runs in the experiment are none of the study's.
            if raw.data.tags.get(KIND) in set(RunKind):
                yield Run.of(raw)

    def get(self, run_id: str) -> Run:
        """The run of this id."""
        return read(self._client, run_id)

    def last_ended(self, num: int) -> list[Run]:
        """The trials' runs among those that ended last, newest first."""
        newest_first = ["attributes.end_time DESC"]
        found = self._client.search_runs([self.experiment_id], max_results=num, order_by=newest_first)
        return [Run.of(raw) for raw in found if raw.data.tags.get(KIND) in set(TRIALS)]

    def curve(self, run: Run, metric: str) -> dict[int, float]:
        """A run's values of a metric by step; empty for an unknown one."""
        if metric not in run.metrics:
            return {}
        return {point.step: point.value for point in self._client.get_metric_history(run.id, metric)}

    @cached_property
    def study(self) -> StudyRun:
        """The run of the study itself."""
        run_id = self._client.get_experiment(self.experiment_id).tags.get(STUDY_RUN)
        run = self.get(run_id) if run_id else self.first()
        assert run is not None
        return StudyRun.of(run)

    def first(self) -> Run | None:
        """The run of the study itself, looked for among all; None where it was not begun."""
        return next(self.every(RunKind.STUDY), None)

    @cached_property
    def families(self) -> list[str]:
        """Every family of which there is a trial, untrained embedders included."""
        noted = self.study.noted
        told = self._trials if noted is None else self.verdicts
        return list(dict.fromkeys([*(noted or {}), *(run.family for run in told)]))

    def counts(self, family: str) -> Mapping[str, int]:
        """Counts of a family's search trials by how they ended."""
        if self.study.noted is not None:
            return self.study.noted[family].counts if family in self.study.noted else {}
        own = [run.status for run in self._trials if run.kind == RunKind.SEARCH and run.family == family]
        return {status: own.count(status) for status in Status}

    @cached_property
    def finished(self) -> list[Run]:
        """The finished trials of the search."""
        if self.study.noted is None:
            return [r for r in self._trials if r.kind == RunKind.SEARCH and r.status == Status.FINISHED]
        return newest_of_each(self.every(RunKind.SEARCH, status=Status.FINISHED))

    def best(self, family: str) -> Run | None:
        """The best finished trial of a family's search; None where there is none.

        The search notes it while it runs. In older studies it is found among all trials, by the same rule.
        """
        if self.study.noted is None:
            return best_of((run for run in self.finished if run.family == family), self.study.objective)
        if family not in self._best:
            run_id = self.study.noted[family].best if family in self.study.noted else None
            self._best[family] = self.get(run_id) if run_id else None
        return self._best[family]

    @cached_property
    def _best(self) -> dict[str, Run | None]:
        return {}

    def judged(self, family: str) -> list[Run]:
        """The finished verdict trials of a family, one for each seed."""
        return [run for run in self.verdicts if run.family == family and run.status == Status.FINISHED]

    def unit_scores(self, run: Run) -> UnitScores | None:
        """A verdict trial's scores by class; None of one that kept none, as in older studies."""
        if UNITS_SHA256 not in run.tags:
            return None
        if run.id not in self._unit_scores:
            own = self._of_verdicts.get((run.family, run.seed))
            if own is None or own.digest() != run.tags[UNITS_SHA256]:
                own = self._read(run.id, UNIT_SCORES, data.read_unit_scores)
            self._unit_scores[run.id] = own
        return self._unit_scores[run.id]

    def text(self, name: str) -> str | None:
        """A text that is kept with the study's run; None where there is none of this name."""
        if name not in {each.path for each in self._client.list_artifacts(self.study.id)}:
            return None
        return self._read(self.study.id, name, lambda file: file.read_text(encoding="utf-8"))

    def sealed_plan(self) -> SealedPlan | None:
        """The plan of the verdict that was sealed; None before, and of older studies."""
        text = self.text(PLAN_FILE)
        return None if text is None else SealedPlan.model_validate_json(text)

    def verdict_scores(self) -> dict[tuple[str, int], SeedScore]:
        """The objective on the test data of each verdict trial that has ended, by family and seed."""
        return {
            (run.family, run.seed): self.seed_score(run)
            for run in self.verdicts
            if run.status in (Status.FINISHED, Status.FAILED)
        }

    def seed_score(self, run: Run) -> SeedScore:
        """The objective of a verdict trial on the test data; None of one that failed."""
        metric = metric_names.on_test(self.study.objective)
        if run.status != Status.FINISHED or metric not in run.metrics:
            return FAILED
        scores = self.unit_scores(run)
        return SeedScore(run.metrics[metric], None if scores is None else UnitMeans.of(scores, metric))

    def overlap(self) -> float | None:
        """Test rows over rows to learn from, where each verdict seed shuffles all rows (``Task.overlap``)."""
        run = next((run for run in self.verdicts if run.params), None)
        return None if run is None else task_of_params(run.params).overlap(run.params, self.study.num_rows)

    def fold_scores(self, family: str) -> list[UnitScores]:
        """Scores by held-out class of a family's best search trial, one for each fold, in their order.

        A class is held out once, so it stands in one fold alone. They are what is known of a family before a test image
        is read. Empty where none were kept: in older studies, of a task without units, with several values of
        ``training.wise_ft``, and where they were lost with the process that held them.
        """
        best = self.best(family)
        if best is None or UNITS_SHA256 not in best.tags:
            return []
        return self._read(best.id, FOLD_SCORES, data.read_fold_scores)

    def _read(self, run_id: str, name: str, reader: Callable[[Path], T]) -> T:
        """The content of a run's artifact."""
        with temporary_folder() as folder:
            return reader(Path(self._client.download_artifacts(run_id, name, folder)))

    def pair_counts(self, run: Run) -> PairCounts | None:
        """Pairs that a verdict trial's thresholds accept and reject; None of one that has none."""
        return self._read(run.id, PAIR_COUNTS, data.read_pair_counts) if THRESHOLDS in run.tags else None

    @cached_property
    def _unit_scores(self) -> dict[str, UnitScores | None]:
        return {}

    @cached_property
    def _of_verdicts(self) -> dict[tuple[str, int], UnitScores]:
        """The study's table of all its verdict trials' scores; empty while it has none."""
        if UNITS_SHA256 not in self.study.tags:
            return {}
        return self._read(self.study.id, VERDICT_SCORES, data.read_verdict_scores)

    @cached_property
    def _trials(self) -> list[Run]:
        """All trials of the search and the verdict, for which every run is read."""
        return newest_of_each(self.every())

    @cached_property
    def verdicts(self) -> list[Run]:
        """All trials of the verdict."""
        if "_trials" in self.__dict__:
            return [run for run in self._trials if run.kind == RunKind.VERDICT]
        return newest_of_each(self.every(RunKind.VERDICT))


def begin(client: mlflow.MlflowClient, experiment_id: str, name: str, tags: Mapping[str, str]) -> Run:
    """A new run; its tags say at least of which ``KIND`` it is."""
    return Run.of(client.create_run(experiment_id, run_name=name, tags=dict(tags)))


def read(client: mlflow.MlflowClient, run_id: str) -> Run:
    """The run of this id."""
    return Run.of(client.get_run(run_id))


def artifacts_of(database: Any, run_id: str) -> str:
    """The place of a run's artifacts, of a run in whatever state, which may be another program's."""
    return str(database.get_run(run_id).info.artifact_uri)


def best_of(trials: Iterable[Run], objective: str) -> Run | None:
    """The best of finished search trials, as the search itself ranks them (``trials.best_ranked``)."""
    scored = [run for run in trials if objective in run.metrics]
    return best_ranked(scored, lambda run: (run.metrics[objective], run.number))


def newest_of_each(runs: Iterable[Run]) -> list[Run]:
    """The newest uninterrupted run of each trial: a trial begun twice, after a crash, counts once."""
    newest = {run.trial: run for run in runs if run.kind in TRIALS and run.status != Status.INTERRUPTED}
    return list(newest.values())


class Kept(NamedTuple):
    """All that an experiment holds, deleted runs and others' included: ids, and the store of each study's own run."""

    run_ids: list[str]
    stores: list[str | None]


def kept(client: mlflow.MlflowClient, experiment_id: str) -> Kept:
    """Every run of an experiment, in whatever state, for its deletion."""
    found = list(raw_runs(client, experiment_id, view=ViewType.ALL))
    studies = [run.data.tags for run in found if run.data.tags.get(KIND) == RunKind.STUDY]
    return Kept([str(run.info.run_id) for run in found], [tags.get(STORE) for tags in studies])


def raw_runs(
    client: mlflow.MlflowClient, experiment_id: str, wanted: str = "", *, view: Any = ViewType.ACTIVE_ONLY
) -> Iterator[Any]:
    """MLflow's own runs of an experiment that the filter lets through, oldest first, page by page."""
    token = None
    while True:
        page = client.search_runs(
            [experiment_id],
            wanted,
            run_view_type=view,
            max_results=PAGE,
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
        yield from page
        token = page.token
        if not token:
            return
