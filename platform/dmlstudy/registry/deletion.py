"""Deleting what MLflow holds of a study, and what it was told to delete before.

A store's own database forgets runs for good. A server only marks them, under another name, so that the study's name is
free at once; its owner's ``mlflow gc`` frees the room.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

from mlflow.entities import ViewType

from dmlstudy.registry import connection, models, runs
from dmlstudy.registry.models import RegisteredVersion
from dmlstudy.store import Store, StoreError

DELETED = "-deleted-"
"""Between a study's name and the time in the name of its experiment while that is deleted."""


class Held(NamedTuple):
    """A study's experiments in MLflow (one, and those an earlier deletion has left), runs and versions."""

    experiment_ids: list[str]
    run_ids: list[str]
    versions: list[RegisteredVersion]


@connection.in_one_line
def held(store: Store, study: str) -> Held:
    """The study in MLflow; raises StoreError for one of this name that belongs to another store."""
    if store.server is None and not store.mlflow_file.is_file():
        return Held([], [], [])
    client = connection.connect(store)
    view = ViewType.ACTIVE_ONLY if store.server else ViewType.ALL
    experiments = [
        each
        for each in client.search_experiments(view_type=view)
        if each.name == study or each.name.startswith(f"{study}{DELETED}")
    ]
    run_ids: list[str] = []
    for experiment in experiments:
        kept = runs.kept(client, experiment.experiment_id)
        _check_own(store, study, kept.stores)
        run_ids += kept.run_ids
    known = set(run_ids)
    versions = [each for each in models.versions(store) if each.study == study and each.run_id in known]
    return Held([each.experiment_id for each in experiments], run_ids, versions)


def _check_own(store: Store, study: str, stores: list[str | None]) -> None:
    """Raise StoreError where a study's runs say that they are another store's; older ones say nothing."""
    foreign = [each for each in stores if each not in (None, store.identity())]
    if foreign or (store.server and not stores):
        raise StoreError(
            f"study {study!r} at {store.tracking_uri} is not of the store {store.root}; delete it from its own store"
        )


@connection.in_one_line
def delete(store: Store, study: str, found: Held) -> None:
    """Delete it; killed in between, the same again deletes the rest."""
    client = connection.connect(store)
    for name in {version.name for version in found.versions}:
        own = {str(version.version) for version in found.versions if version.name == name}
        if own.issuperset(str(each.version) for each in client.search_model_versions(f"name='{name}'")):
            # In one step, for without versions nobody would know whose it was.
            client.delete_registered_model(name)
            continue
        for number in own:
            client.delete_model_version(name, number)
    for experiment_id in found.experiment_ids:
        experiment = client.get_experiment(experiment_id)
        if experiment.lifecycle_stage == "active":
            if experiment.name == study:
                client.rename_experiment(experiment_id, f"{study}{DELETED}{time.time_ns()}")
            client.delete_experiment(experiment_id)
        if store.server is None:
            database = _database(store)
            for run_id in runs.kept(client, experiment_id).run_ids:
                database._hard_delete_run(run_id)
            database._hard_delete_experiment(experiment_id)


def deleted_runs(store: Store, older_than_s: float) -> list[str]:
    """Runs of the store's own database that someone deleted, on MLflow's page or by its client, so long ago."""
    if store.server is not None or not store.mlflow_file.is_file():
        return []
    connection.connect(store)
    return list(_database(store)._get_deleted_runs(older_than=int(older_than_s * 1000)))


def forget_runs(store: Store, run_ids: list[str]) -> int:
    """Delete such runs for good, with their artifacts; the bytes that were freed."""
    freed, database = 0, _database(store)
    for run_id in run_ids:
        place = urlparse(runs.artifacts_of(database, run_id))
        folder = Path(unquote(place.path))
        if place.scheme in ("", "file") and folder.is_dir() and store.root in folder.parents:
            freed += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder.parent, ignore_errors=True)
        database._hard_delete_run(run_id)
    return freed


def _database(store: Store) -> Any:
    """MLflow's own access to the database: its client cannot delete for good."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    return SqlAlchemyStore(store.tracking_uri, store.artifacts)  # type: ignore[no-untyped-call]
