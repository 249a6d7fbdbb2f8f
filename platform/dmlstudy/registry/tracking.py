"""Writing a study to MLflow: one experiment per study, a parent run, a nested run per trial.

Only the study's driver writes, so runs end properly whatever happens to a worker. A server that goes away
is waited for (``connection.Patience``); what it cannot take in the end is a StoreError of one line.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import mlflow
from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException

from dmlstudy import data, journal, model_folder
from dmlstudy.files import temporary_folder
from dmlstudy.metric_names import ENERGY_WH
from dmlstudy.packed import PackedRecords
from dmlstudy.records import PairCounts, RecordedEnd, TrialConfig, UnitScores
from dmlstudy.registry.connection import Patience, PatientClient, connect, count_rows, disconnect
from dmlstudy.registry.run_writer import writer_of
from dmlstudy.registry.runs import (
    KIND,
    NOTE,
    PARENT,
    PLAN_SHA256,
    REPLICATE_OF,
    SPANS,
    STORE,
    STUDY_RUN,
    THRESHOLDS,
    UNITS_SHA256,
    VALUES,
    VERDICT_SCORES,
    Run,
    RunKind,
    StudyRuns,
    begin,
    read,
)
from dmlstudy.search.verdict_trials import JudgedBefore
from dmlstudy.spec.study_file import replicate_name
from dmlstudy.store import Store, StoreError
from dmlstudy.training import lineage
from dmlstudy.training.shares import settled_of
from dmlstudy.training.tasks import task_of
from dmlstudy.trials import MLFLOW_STATUSES, Status
from dmlstudy.verdict.sealed_plan import PLAN_FILE, SealedPlan

SITTINGS = "sittings"
"""The tag of a study's run that counts its sessions."""
NOTE_EVERY_S = 1.0
MOST_IN_A_TAG = 5000
MODEL = "embedder"
"""The artifact of a verdict trial's run that is its model's folder."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Work:
    """Of a run that has not ended, its trial's number, and when it was at work: start, end, start, ..."""

    number: int | None
    times: list[float]

    @property
    def has_paused(self) -> bool:
        return len(self.times) % 2 == 0

    @property
    def spans(self) -> list[tuple[float, float | None]]:
        """(start, end) of each span; a last one without an end goes on."""
        return list(itertools.zip_longest(self.times[::2], self.times[1::2]))

    @property
    def seconds(self) -> float:
        now = time.time()
        return sum((now if end is None else end) - start for start, end in self.spans)


class StudyTracker:
    """The runs of one study; a new tracker finds those of an earlier session.

    ``description`` are texts kept once with the study's run, ``origin`` its tags: what it is computed from, and so
    the same in every session. ``environment`` is a text kept for each session, ``trial_tags`` are tags of each
    trial's run.

    ``left_at`` is when an earlier session was last heard of, the end of the runs that it left open.
    ``patiently`` is for calls of others to the same server; ``tell`` gets a line on what is waited for.

    Raises StoreError where there is a study of this name that belongs to another store or has another origin.
    """

    def __init__(
        self,
        store: Store,
        study: str,
        description: Mapping[str, str],
        tell: Callable[[str], object] = _log.warning,
        *,
        origin: Mapping[str, str] = {},
        environment: str = "{}",
        trial_tags: Mapping[str, str] = {},
        left_at: float | None = None,
    ) -> None:
        client = connect(store, create=True)
        if store.server is None:
            journal.of_writer(store.mlflow_file)
        self.store = store
        self.patiently = Patience(store, client, tell)
        self.client = cast(mlflow.MlflowClient, PatientClient(client, self.patiently))
        self._writer = writer_of(store, self.client)
        self.study = study
        self._run_ids: dict[int, str] = {}
        """By number, of the search trials of this session that have finished or are at work, and of the best."""
        self._work: dict[str, _Work] = {}
        """Of the runs of this session that are at work, and of paused ones that were taken up."""
        self._paused = PackedRecords()
        """By number, the run and the times of the other trials that have paused in this session."""
        self._noted: tuple[Mapping[str, Mapping[str, int]], Mapping[str, int]] | None = None
        self._note_written = -math.inf
        experiment = self.client.get_experiment_by_name(study)
        if experiment is None:
            location = f"{store.artifacts}/{study}" if store.artifacts else None
            self.experiment_id = self.client.create_experiment(study, artifact_location=location)
        else:
            self.experiment_id = experiment.experiment_id
        own = {STORE: store.identity(), **origin}
        parent = self._runs.first()
        if parent:
            known = parent.tags
            _check_same(study, store, known, own)
            self.parent_id = parent.id
            self.client.update_run(self.parent_id, status="RUNNING")
            self._end_leftovers(left_at)
        else:
            known = {KIND: RunKind.STUDY.value, "study": study, **own}
            self.parent_id = begin(self.client, self.experiment_id, study, known).id
        session = int(known.get(SITTINGS, 0)) + 1
        if session == 1:
            self.client.set_experiment_tag(self.experiment_id, STUDY_RUN, self.parent_id)
            for name, text in description.items():
                self.client.log_text(self.parent_id, text, name)
        name = "environment.json" if session == 1 else f"environment-{session}.json"
        self.client.log_text(self.parent_id, environment, name)
        self.client.set_tag(self.parent_id, SITTINGS, str(session))
        self.trial_tags = {"environment": name, **trial_tags}

    @property
    def study_tags(self) -> dict[str, str]:
        """The tags of the study's run, its origin among them."""
        return self._runs.get(self.parent_id).tags

    def start_trial(self, label: str, config: TrialConfig, number: int | None) -> str:
        """Open a nested run and log the trial's hyperparameters; returns the run's id."""
        tags = {
            PARENT: self.parent_id,
            KIND: config.phase,
            "study": self.study,
            "family": config.family,
            "status": Status.RUNNING.value,
            "seed": str(config.seed),
            "config_fingerprint": config.fingerprint(),
            **(lineage.tags(config) if "embedder" in task_of(config).sections else {}),
            **self.trial_tags,
        }
        if number is not None:
            tags["trial_number"] = str(number)
        params = {name: str(value) for name, value in task_of(config).logged_params(config).items()}
        run_id = self._writer.begin(self.experiment_id, label, tags, params)
        self._work[run_id] = _Work(number, [time.time()])
        if number is not None:
            self._run_ids[number] = run_id
        return run_id

    def end_trial(
        self,
        run_id: str,
        status: Status,
        curve: Sequence[Mapping[str, float]],
        metrics: Mapping[str, float],
        reason: str = "",
        values: Sequence[float] = (),
        *,
        already: int = 0,
        energy_wh: float | None = None,
    ) -> None:
        """Log the learning curve and the last scores, and end the run, which a paused trial's is opened again from.

        ``values`` are what the search takes it for; reports up to the step ``already`` are in the run. ``energy_wh`` is
        what the trial has used since then.
        """
        status = Status(status)
        now = int(time.time() * 1000)
        if energy_wh is not None and already:
            energy_wh += read(self.client, run_id).metrics.get(ENERGY_WH, 0.0)
        points = [
            Metric(name, value, now, int(row["step"]))
            for row in curve
            for name, value in row.items()
            if name != "step" and row["step"] > already
        ]
        last = len(curve)
        if status != Status.PAUSED:
            points += [Metric(name, value, now, last) for name, value in metrics.items() if name != "step"]
        if energy_wh is not None:
            points.append(Metric(ENERGY_WH, energy_wh, now, last))
        points = [point for point in points if math.isfinite(point.value)]
        tags = {
            "status": status.value,
            **({"reason": reason[:5000]} if reason else {}),
            **({VALUES: json.dumps(list(values))} if values else {}),
        }
        if status == Status.PAUSED:
            self._work[run_id].times.append(time.time())
            tags[SPANS] = json.dumps(self._work[run_id].spans)
        self._writer.change(run_id, status.in_mlflow, tags, points)
        work = self._work.pop(run_id, None)
        if work is not None and work.number is not None and status != Status.FINISHED:
            self._run_ids.pop(work.number, None)
            if status == Status.PAUSED:
                self._paused[work.number] = pickle.dumps((run_id, work.times))

    def seconds_at_work(self, run_id: str) -> float | None:
        """Seconds in which a run has been at work; None of one that has ended, or has paused before this session."""
        return self._work[run_id].seconds if run_id in self._work else None

    def take_up(self, number: int) -> str | None:
        """The run in which a search trial has paused, to be opened again or ended.

        None where there is none, as after a kill at that moment.
        """
        packed = self._paused.pop(number)
        if packed is not None:
            run_id, times = pickle.loads(packed)
            self._run_ids[number], self._work[run_id] = run_id, _Work(number, times)
        own = self._run_ids.get(number, "")
        if own in self._work and self._work[own].has_paused:
            return own
        runs = self._runs.every(RunKind.SEARCH, status=Status.PAUSED, number=number)
        return next((run.id for run in runs), None)

    def paused_numbers(self) -> set[int]:
        """Numbers of the search trials whose runs have paused."""
        runs = self._runs.every(RunKind.SEARCH, status=Status.PAUSED)
        return {run.number for run in runs if run.number is not None}

    def reopen(self, run_id: str) -> None:
        """Let the run of a paused trial go on."""
        if run_id not in self._work:
            run = read(self.client, run_id)
            self._work[run_id] = _Work(run.number, list(itertools.chain(*run.spans)))
            if run.number is not None:
                self._run_ids[run.number] = run_id
        work = self._work[run_id]
        work.times.append(time.time())
        tags = {SPANS: json.dumps(work.spans), "status": Status.RUNNING.value}
        self._writer.change(run_id, Status.RUNNING.in_mlflow, tags)

    def recorded_ends(self, number: int) -> list[RecordedEnd]:
        """Ends of a search trial's runs, oldest first, without interrupted ones."""
        return [
            RecordedEnd(run.id, run.status, run.reason, run.values, settled_of(run.metrics))
            for run in self._runs.every(RunKind.SEARCH, number=number)
            if run.status.has_ended
        ]

    def supersede(self, run_id: str) -> None:
        """Mark the run of a trial that is run again, so that it counts nowhere."""
        self.client.set_tag(run_id, "status", Status.SUPERSEDED.value)

    def note_search(self, counts: Mapping[str, Mapping[str, int]], best: Mapping[str, int]) -> None:
        """Keep with the study's run how many search trials of each family ended how, and which is the best.

        ``best`` are trial numbers. Written at most once a second while the study runs, and when it ends.
        """
        self._noted = (counts, best)
        if time.monotonic() - self._note_written >= NOTE_EVERY_S:
            self.write_note()

    def write_note(self) -> None:
        """Keep at once what ``note_search`` was told last, so that whoever reads now knows all of the search."""
        if self._noted is None:
            return
        counts, best = self._noted
        note = {
            family: {"counts": dict(own), "best": self._run_of(best[family]) if family in best else None}
            for family, own in counts.items()
        }
        text = json.dumps(note)
        self.client.set_tag(self.parent_id, NOTE, text if len(text) <= MOST_IN_A_TAG else "")
        self._noted, self._note_written = None, time.monotonic()
        count_rows(self.store)

    def _run_of(self, number: int) -> str | None:
        """The finished run of a search trial, of this session or an earlier one."""
        if number not in self._run_ids:
            runs = list(self._runs.every(RunKind.SEARCH, status=Status.FINISHED, number=number))
            if not runs:
                return None
            self._run_ids[number] = runs[-1].id
        return self._run_ids[number]

    def end_study(
        self, status: Literal["finished", "failed", "interrupted"], summary: Mapping[str, Any]
    ) -> None:
        """Log the study's own numbers and tags, and end its run, with what an outage has left open."""
        self.write_note()
        self._end_leftovers()
        now = int(time.time() * 1000)
        metrics = [Metric(k, v, now, 0) for k, v in summary.items() if isinstance(v, float)]
        tags = [RunTag(k, str(v)) for k, v in summary.items() if not isinstance(v, float)]
        self.client.log_batch(self.parent_id, metrics=metrics, tags=[*tags, RunTag("status", status)])
        self.client.set_terminated(self.parent_id, Status(status).in_mlflow)
        count_rows(self.store)
        self._writer.close()
        if self.store.server is None:
            disconnect(self.store)
            journal.at_rest(self.store.mlflow_file)

    def finished_verdicts(self) -> set[tuple[str, int]]:
        """(family, seed) of the verdict runs that are done."""
        return {(run.family, run.seed) for run in self._runs.every(RunKind.VERDICT, status=Status.FINISHED)}

    @property
    def may_seal(self) -> bool:
        """True if the study has no sealed plan, and no trial of its verdict has begun: one would come too late then."""
        return PLAN_SHA256 not in self.study_tags and next(self._runs.every(RunKind.VERDICT), None) is None

    def fold_scores(self, family: str) -> list[UnitScores]:
        """As ``StudyRuns.fold_scores``, of all that the search has noted so far."""
        self.write_note()
        return self._runs.fold_scores(family)

    def seal(self, plan: SealedPlan) -> None:
        """Keep the plan of the verdict with the study's run; its tag comes last, for then the plan is there."""
        self.client.log_text(self.parent_id, plan.text, PLAN_FILE)
        self.client.set_tag(self.parent_id, PLAN_SHA256, plan.digest)

    def judged(self) -> JudgedBefore:
        """The scores of the verdict trials that have ended, of whichever session."""
        runs = self._runs
        return JudgedBefore(runs.verdict_scores(), runs.study.resolution, runs.study.num_rows)

    def log_model(self, run_id: str, folder: str) -> None:
        """Keep a model's folder with the run that trained it."""
        self.client.log_artifacts(run_id, folder, MODEL)

    def log_unit_scores(self, run_id: str, file: Path) -> UnitScores | None:
        """Keep a verdict trial's scores by class (``data.read_unit_scores``) with its run, where it has any."""
        found = data.read_unit_scores(file)
        if found is not None:
            self.client.log_artifact(run_id, str(file))
            self.client.set_tag(run_id, UNITS_SHA256, found.digest())
        return found

    def log_fold_scores(self, run_id: str, file: Path) -> None:
        """Keep a search trial's scores by held-out class (``data.read_fold_scores``) with its run."""
        found = data.read_fold_scores(file)
        self.client.log_artifact(run_id, str(file))
        self.client.set_tag(run_id, UNITS_SHA256, _digest([each.digest() for each in found]))

    def log_verdict_scores(self) -> None:
        """Keep the scores by class of all verdict trials in one table with the study's run, if there are any.

        So whoever reads the leaderboard fetches one file. The tag is the digest of the classes and their queries;
        where seeds have other queries, as of shuffled rows, that of all digests.
        """
        runs = self._runs
        judged = [run for family in runs.families for run in runs.judged(family)]
        found = {(run.family, run.seed): own for run in judged if (own := runs.unit_scores(run)) is not None}
        if not found:
            return
        with temporary_folder() as folder:
            file = Path(folder) / VERDICT_SCORES
            file.write_bytes(data.verdict_scores_as_bytes(found))
            self.client.log_artifact(self.parent_id, str(file))
        digests = [own.digest() for own in found.values()]
        self.client.set_tag(self.parent_id, UNITS_SHA256, _digest(digests))

    def log_pair_counts(self, run_id: str, file: Path) -> None:
        """Keep what a verdict trial's thresholds do (``data.read_pair_counts``) with its run."""
        found = data.read_pair_counts(file)
        self.client.log_artifact(run_id, str(file))
        self.client.set_tag(run_id, THRESHOLDS, json.dumps(found.thresholds))

    def pair_counts(self, run: Run) -> PairCounts | None:
        """Pairs that a verdict trial's thresholds accept and reject; None of one that has none."""
        return self._runs.pair_counts(run)

    def verdict_run(self, family: str, seed: int) -> Run | None:
        """The finished verdict run of a family and seed, if there is one."""
        runs = list(self._runs.every(RunKind.VERDICT, status=Status.FINISHED, family=family, seed=seed))
        return runs[-1] if runs else None

    def fetch_model(self, run_id: str, to: Path) -> Path:
        """As the function of this name."""
        return fetch_model(self.client, run_id, to)

    def _end_leftovers(self, left_at: float | None = None) -> None:
        """End the trials' runs that are open in MLflow; one that had its scores stays what it was.

        ``left_at`` is when that was; by default now.
        """
        for run in list(self._runs.every(parent=self.parent_id, is_open=True)):
            if "status" not in run.tags:  # a row of the leaderboard that was not written yet
                continue
            status = run.status
            if status == Status.RUNNING:
                status = Status.INTERRUPTED
                self.client.set_tag(run.id, "status", status.value)
            if status in MLFLOW_STATUSES:
                ended = None if left_at is None else int(1000 * max(left_at, run.begun_last))
                self.client.set_terminated(run.id, status.in_mlflow, ended)

    @property
    def _runs(self) -> StudyRuns:
        """The study's runs as they are now."""
        return StudyRuns(self.client, self.experiment_id)


def _digest(digests: Sequence[str]) -> str:
    """The one digest that there is, or that of several."""
    different = sorted(set(digests))
    return different[0] if len(different) == 1 else hashlib.sha256(json.dumps(different).encode()).hexdigest()


def _check_same(study: str, store: Store, known: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise StoreError where a study's run is not the own one's, as its tags say."""
    differing = [name for name, value in own.items() if known.get(name, value) != value]
    if differing:
        whose = "another store's" if STORE in differing else f"with another {', '.join(differing)}"
        raise StoreError(
            f"{store.tracking_uri} has another study {study!r} already, {whose}; give this one another name (--name)"
        )


def runs_of(store: Store, study: str) -> StudyRuns:
    """A study's runs in MLflow; raises StoreError where there is no such study."""
    client = connect(store)
    return StudyRuns(client, experiment_of(client, store, study))


def replicates_of(store: Store, study: str) -> list[StudyRuns]:
    """The finished studies that did a study's search again, from number 2 to the first that is not there."""
    client = connect(store)
    found: list[StudyRuns] = []
    while True:
        experiment = client.get_experiment_by_name(replicate_name(study, len(found) + 2))
        if experiment is None:
            return found
        runs = StudyRuns(client, str(experiment.experiment_id))
        own = runs.first()
        if own is None or own.tags.get("status") != "finished" or own.tags.get(REPLICATE_OF) != study:
            return found
        found.append(runs)


def fetch_model(client: mlflow.MlflowClient, run_id: str, to: Path) -> Path:
    """A copy, under ``to``, of the model that a trial's run keeps: what its manifest lists.

    MLflow shows the files of a registered model among the run's own where both have one name, as they had in older
    studies; these are left out.
    """
    folder = Path(client.download_artifacts(run_id, MODEL, str(to)))
    listed = {model_folder.MANIFEST, *model_folder.read_json(folder / model_folder.MANIFEST)}
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in listed:
            path.unlink()
    return folder


def experiment_of(client: mlflow.MlflowClient, store: Store, study: str) -> str:
    """The id of the study's experiment; raises StoreError where there is none."""
    try:
        experiment = client.get_experiment_by_name(study)
    except MlflowException as error:
        raise StoreError(f"the MLflow store {store.tracking_uri}: {error.message}") from None
    if experiment is None:
        known = sorted(e.name for e in client.search_experiments() if e.name != "Default")
        there = f"there are: {', '.join(known)}" if known else "it is empty; start one with `dmlstudy run`"
        raise StoreError(f"no study {study!r} in the store {store.tracking_uri}; {there}")
    return str(experiment.experiment_id)
