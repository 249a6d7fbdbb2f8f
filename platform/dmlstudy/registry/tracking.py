"""Writing a study to MLflow: one experiment per study, a parent run, a nested run per trial.

Only the study's driver writes, so runs end properly whatever happens to a worker.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from dmlstudy.records import TrialConfig
from dmlstudy.registry.store import Store, StoreError, knock_at_server

PARENT = "mlflow.parentRunId"
RUN_STATUS = {"finished": "FINISHED", "pruned": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
BATCH = 1000


def connect(store: Store, *, create: bool = False) -> mlflow.MlflowClient:
    """A client of the store's MLflow; raises StoreError where it does not answer.

    The store's own database is made only if ``create`` says so.
    """
    if store.server is None and create is False and not (store.root / "mlflow.db").is_file():
        raise StoreError(
            f"no studies in the store {store.root}; start one with `dmlstudy run` or name --store"
        )
    if store.server:
        knock_at_server(store.server)
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    try:
        mlflow.set_tracking_uri(store.tracking_uri)
        client = mlflow.MlflowClient(store.tracking_uri)
        client.search_experiments(max_results=1)
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise StoreError(
            f"the MLflow store {store.tracking_uri} does not answer ({reason}); check --store or --tracking-uri"
        ) from None
    return client


class StudyTracker:
    """The runs of one study; made anew it finds the ones of an earlier sitting again."""

    def __init__(self, store: Store, study: str, description: Mapping[str, Any]) -> None:
        self.client = connect(store, create=True)
        self.study = study
        experiment = self.client.get_experiment_by_name(study)
        if experiment is None:
            location = f"{store.artifacts}/{study}" if store.artifacts else None
            self.experiment_id = self.client.create_experiment(study, artifact_location=location)
        else:
            self.experiment_id = experiment.experiment_id
        parents = self._search("tags.dmlstudy_kind = 'study'")
        if parents:
            self.parent_id = parents[0].info.run_id
            self.client.update_run(self.parent_id, status="RUNNING")
            self._end_leftovers()
        else:
            tags = {"dmlstudy_kind": "study", "study": study}
            run = self.client.create_run(self.experiment_id, run_name=study, tags=tags)
            self.parent_id = run.info.run_id
            for name, text in description.items():
                self.client.log_text(self.parent_id, text, name)

    def start_trial(self, label: str, config: TrialConfig, number: int | None) -> str:
        """Open a nested run and log the trial's hyperparameters; returns the run's id."""
        tags = {
            PARENT: self.parent_id,
            "dmlstudy_kind": config.phase,
            "study": self.study,
            "family": config.family,
            "status": "running",
            "seed": str(config.seed),
            "config_fingerprint": config.fingerprint(),
        }
        if number is not None:
            tags["trial_number"] = str(number)
        run = self.client.create_run(self.experiment_id, run_name=label, tags=tags)
        params = [Param(name, str(value)) for name, value in _flat_params(config).items()]
        self.client.log_batch(run.info.run_id, params=params)
        return str(run.info.run_id)

    def end_trial(
        self,
        run_id: str,
        status: Literal["finished", "pruned", "failed", "interrupted"],
        curve: Sequence[Mapping[str, float]],
        metrics: Mapping[str, float],
        reason: str = "",
    ) -> None:
        """Log the learning curve and the last scores, and end the run."""
        now = int(time.time() * 1000)
        points = [
            Metric(name, value, now, int(row["step"]))
            for row in curve
            for name, value in row.items()
            if name != "step"
        ]
        last = len(curve)
        points += [Metric(name, value, now, last) for name, value in metrics.items() if name != "step"]
        points = [point for point in points if math.isfinite(point.value)]
        tags = [RunTag("status", status)] + ([RunTag("reason", reason[:5000])] if reason else [])
        for start in range(0, max(len(points), 1), BATCH):
            self.client.log_batch(run_id, metrics=points[start : start + BATCH], tags=tags)
        self.client.set_terminated(run_id, RUN_STATUS[status])

    def end_study(
        self, status: Literal["finished", "failed", "interrupted"], summary: Mapping[str, Any]
    ) -> None:
        """Log the study's own numbers and tags, and end its run."""
        now = int(time.time() * 1000)
        metrics = [Metric(k, v, now, 0) for k, v in summary.items() if isinstance(v, float)]
        tags = [RunTag(k, str(v)) for k, v in summary.items() if not isinstance(v, float)]
        self.client.log_batch(self.parent_id, metrics=metrics, tags=[*tags, RunTag("status", status)])
        self.client.set_terminated(self.parent_id, RUN_STATUS[status])

    def finished_verdicts(self) -> set[tuple[str, int]]:
        """(family, seed) of the verdict runs that are done."""
        runs = self._search("tags.dmlstudy_kind = 'verdict' and tags.status = 'finished'")
        return {(run.data.tags["family"], int(run.data.tags["seed"])) for run in runs}

    def log_folder(self, run_id: str, folder: str, name: str) -> None:
        """Keep a folder as the run's artifact ``name``."""
        self.client.log_artifacts(run_id, folder, name)

    def verdict_run(self, family: str, seed: int) -> Any | None:
        """The finished verdict run of a family and seed, if there is one."""
        runs = self._search(
            f"tags.dmlstudy_kind = 'verdict' and tags.status = 'finished' and tags.family = '{family}'"
            f" and tags.seed = '{seed}'"
        )
        return runs[-1] if runs else None

    def fetch_folder(self, run_id: str, name: str, to: Path) -> Path:
        """A copy of the run's artifact folder ``name`` under ``to``."""
        return Path(self.client.download_artifacts(run_id, name, str(to)))

    def _end_leftovers(self) -> None:
        for run in self._search("attributes.status = 'RUNNING'"):
            if run.info.run_id != self.parent_id:
                self.client.set_tag(run.info.run_id, "status", "interrupted")
                self.client.set_terminated(run.info.run_id, "KILLED")

    def _search(self, filter_string: str) -> list[Any]:
        return search_all(self.client, self.experiment_id, filter_string)


def search_all(client: mlflow.MlflowClient, experiment_id: str, filter_string: str) -> list[Any]:
    """Every run of an experiment that the filter lets through, oldest first."""
    found: list[Any] = []
    token = None
    while True:
        page = client.search_runs(
            [experiment_id],
            filter_string,
            max_results=1000,
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
        found += page
        token = page.token
        if not token:
            return found


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


def _flat_params(config: TrialConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, part in (("loss", config.loss), ("regularizer", config.regularizer)):
        if part is not None:
            flat[section] = part.name
            flat |= {f"{section}.{name}": value for name, value in part.params.items()}
    for section in ("embedder", "batch", "training"):
        values = getattr(config, section).model_dump()
        flat |= {f"{section}.{name}": value for name, value in values.items() if value is not None}
    return flat | {"seed": config.seed, "num_folds": config.num_folds}
