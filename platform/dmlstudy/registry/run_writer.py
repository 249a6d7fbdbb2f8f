"""Writing the runs of trials: by MLflow's client, or as rows of a store's own database.

MLflow's client begins and ends a run in more than a dozen transactions, each of which maps rows to objects. That takes
15 to 25 ms of a processor for each trial, half of what a study's driver does. The rows alone take 2 to 3.

They are written in two transactions, so that a kill finds a run begun or not, and ended or not.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME, MLFLOW_USER
from mlflow.utils.uri import append_to_uri_path
from mlflow.utils.validation import _validate_batch_log_data

from dmlstudy import journal
from dmlstudy.registry import runs
from dmlstudy.registry.connection import not_taken
from dmlstudy.store import Store
from dmlstudy.trials import Status

BATCH = 1000
"""Metrics that MLflow's client takes at once."""

PATIENCE_S = 20.0
"""Seconds for which MLflow waits for another writer of its database."""

COLUMNS = {
    "runs": "run_uuid name source_type source_name entry_point_name user_id status start_time end_time source_version"
    " lifecycle_stage artifact_uri experiment_id deleted_time",
    "params": "key value run_uuid",
    "tags": "key value run_uuid",
    "metrics": "key value timestamp run_uuid step is_nan",
    "latest_metrics": "key value timestamp step is_nan run_uuid",
}
"""The tables that are written to, as MLflow 3 has them."""


class RunWriter(Protocol):
    """Begins and changes the runs of trials."""

    def begin(self, experiment_id: str, name: str, tags: Mapping[str, str], params: Mapping[str, str]) -> str:
        """Begin a run; gives back its id."""

    def change(
        self, run_id: str, status: str, tags: Mapping[str, str], metrics: Sequence[Metric] = ()
    ) -> None:
        """Log what a run has come to, and give it a status of MLflow's, as of now."""

    def close(self) -> None:
        """Let go of the store; a later call opens it again."""


def writer_of(store: Store, client: mlflow.MlflowClient) -> RunWriter:
    """The writer of a store: by rows where it has a database of its own with the tables known here, else by client."""
    by_client = ByClient(client)
    if store.server is not None or not _is_known(store.mlflow_file):
        return by_client
    return ByRows(store, by_client)


class ByClient:
    """Writes by MLflow's client, to whatever store it is of.

    A run that goes on is open first, and one that ends is closed last: killed in between, the next session finds it
    open. ``set_terminated`` alone writes a status without reading the run before and after.
    """

    def __init__(self, client: mlflow.MlflowClient) -> None:
        self._client = client

    def begin(self, experiment_id: str, name: str, tags: Mapping[str, str], params: Mapping[str, str]) -> str:
        run_id = runs.begin(self._client, experiment_id, name, tags).id
        self._client.log_batch(run_id, params=[Param(*each) for each in params.items()])
        return run_id

    def change(
        self, run_id: str, status: str, tags: Mapping[str, str], metrics: Sequence[Metric] = ()
    ) -> None:
        opens = status == Status.RUNNING.in_mlflow
        if opens:
            self._client.set_terminated(run_id, status)
        told = [RunTag(*each) for each in tags.items()]
        for start in range(0, max(len(metrics), 1), BATCH):  # the tags last, for then everything is there
            is_last = start + BATCH >= len(metrics)
            self._client.log_batch(
                run_id, metrics=metrics[start : start + BATCH], tags=told if is_last else []
            )
        if not opens:
            self._client.set_terminated(run_id, status)

    def close(self) -> None:
        pass


class ByRows:
    """Writes rows of an SQLite database; of an odd experiment or run it leaves the refusal to ``otherwise``."""

    def __init__(self, store: Store, otherwise: RunWriter) -> None:
        self._store = store
        self._otherwise = otherwise
        self._one_at_a_time = threading.Lock()
        self._rows: sqlite3.Connection | None = None
        """Kept open, for SQLite reads its tables anew for each connection, which takes longer than to write rows."""

    def begin(self, experiment_id: str, name: str, tags: Mapping[str, str], params: Mapping[str, str]) -> str:
        run_id = uuid.uuid4().hex
        _, checked, told = self._checked({**tags, MLFLOW_RUN_NAME: name}, params=params)
        with self._transaction() as rows:
            found = rows.execute(
                "SELECT artifact_location FROM experiments WHERE experiment_id = ? AND lifecycle_stage = 'active'",
                (int(experiment_id),),
            ).fetchone()
            if found is not None:
                place = append_to_uri_path(found[0], run_id, "artifacts")  # type: ignore[no-untyped-call]
                rows.execute(
                    "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status,"
                    " start_time, source_version, lifecycle_stage, artifact_uri, experiment_id)"
                    " VALUES (?, ?, 'UNKNOWN', '', '', ?, 'RUNNING', ?, '', 'active', ?, ?)",
                    (run_id, name, tags.get(MLFLOW_USER, "unknown"), _now_ms(), place, int(experiment_id)),
                )
                rows.executemany(
                    "INSERT INTO tags (run_uuid, key, value) VALUES (?, ?, ?)", _of(run_id, told)
                )
                rows.executemany(
                    "INSERT INTO params (run_uuid, key, value) VALUES (?, ?, ?)", _of(run_id, checked)
                )
                return run_id
        return self._otherwise.begin(experiment_id, name, tags, params)

    def change(
        self, run_id: str, status: str, tags: Mapping[str, str], metrics: Sequence[Metric] = ()
    ) -> None:
        checked, _, told = self._checked(tags, metrics=metrics)
        points = [(each.step, each.timestamp, float(each.value), each.key, run_id) for each in checked]
        newest: dict[str, tuple[int, int, float, str, str]] = {}
        for point in points:  # in the order in which they are given, which readers see
            newest[point[3]] = max(newest.get(point[3], point), point)
        with self._transaction() as rows:
            changed = rows.execute(
                "UPDATE runs SET status = ?, end_time = ? WHERE run_uuid = ? AND lifecycle_stage = 'active'",
                (status, _now_ms(), run_id),
            )
            if changed.rowcount:
                rows.executemany(
                    "INSERT INTO metrics (step, timestamp, value, key, run_uuid, is_nan) VALUES (?, ?, ?, ?, ?, 0)"
                    " ON CONFLICT DO NOTHING",
                    points,
                )
                rows.executemany(
                    "INSERT INTO latest_metrics (step, timestamp, value, key, run_uuid, is_nan)"
                    " VALUES (?, ?, ?, ?, ?, 0) ON CONFLICT DO UPDATE SET value = excluded.value,"
                    " timestamp = excluded.timestamp, step = excluded.step, is_nan = 0"
                    " WHERE (excluded.step, excluded.timestamp, excluded.value) > (step, timestamp, value)",
                    newest.values(),
                )
                rows.executemany(
                    "INSERT INTO tags (run_uuid, key, value) VALUES (?, ?, ?)"
                    " ON CONFLICT DO UPDATE SET value = excluded.value",
                    _of(run_id, told),
                )
                return
        self._otherwise.change(run_id, status, tags, metrics)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    __del__ = close

    def _checked(
        self, tags: Mapping[str, str], *, params: Mapping[str, str] = {}, metrics: Sequence[Metric] = ()
    ) -> tuple[Sequence[Metric], list[Param], list[RunTag]]:
        """Names and values as MLflow writes them, which cuts long ones; raises StoreError where it refuses one."""
        given = [Param(*each) for each in params.items()], [RunTag(*each) for each in tags.items()]
        checked: tuple[Sequence[Metric], list[Param], list[RunTag]]
        try:
            checked = _validate_batch_log_data(metrics, *given)  # type: ignore[no-untyped-call]
        except MlflowException as error:
            raise not_taken(self._store, error) from error
        return checked

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All that is written in the block, or nothing of it; raises StoreError where the database does not take it."""
        with self._one_at_a_time:
            try:
                if self._rows is None:
                    self._rows = journal.connected(self._store.mlflow_file, PATIENCE_S)
                self._rows.execute("BEGIN IMMEDIATE")
                with self._rows:
                    yield self._rows
            except sqlite3.Error as error:
                self.close()
                raise not_taken(self._store, error) from error


def _of(run_id: str, pairs: Sequence[Param | RunTag]) -> list[tuple[str, str, str]]:
    return [(run_id, pair.key, pair.value) for pair in pairs]


def _now_ms() -> int:
    return int(time.time() * 1000)


def _is_known(database: Path) -> bool:
    """True if a database has the tables that are written to here, with these columns and no others."""
    with contextlib.suppress(sqlite3.Error), journal.opened(database, PATIENCE_S) as rows:
        return all(
            {row[1] for row in rows.execute(f"PRAGMA table_info({table})")} == set(names.split())
            for table, names in COLUMNS.items()
        )
    return False
