"""Runs written as rows are those that MLflow's client writes, and a kill finds them whole or not there."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from dmlstudy.registry import artifact_places, connection
from dmlstudy.registry.run_writer import COLUMNS, ByClient, ByRows, RunWriter, writer_of
from dmlstudy.registry.runs import KIND, RunKind
from dmlstudy.store import Store, StoreError

TAGS = {
    KIND: RunKind.SEARCH.value,
    "seed": "0",
    "status": "running",
    "mlflow.user": "Ada",
    "family": "<b>Käfer</b> 'a'; DROP TABLE runs",
}
PARAMS = {"training.lr": "0.001", "data.path": "/data/" + "x" * 9000, "empty": ""}
TWICE = Metric("loss", 0.5, 10, 1)
FIRST = [TWICE, TWICE, Metric("loss", 0.25, 10, 2), Metric("score", 1, 10, 1)]
LATER = [
    Metric("loss", 0.75, 20, 1),
    Metric("loss", 0.25, 10, 2),
    Metric("score", 0.5, 20, 1),
    Metric("new", -1.0, 20, 3),
]


@pytest.fixture
def altered(store: Store, tmp_path: Path) -> Store:
    """A store whose database may be altered."""
    made = Store(tmp_path / "store")
    made.prepare()
    with (
        contextlib.closing(sqlite3.connect(store.mlflow_file)) as database,
        contextlib.closing(sqlite3.connect(made.mlflow_file)) as copy,
    ):
        database.backup(copy)
    artifact_places.relocate(made)
    return made


@pytest.fixture
def client(store: Store) -> mlflow.MlflowClient:
    return connection.connect(store)


@pytest.fixture
def experiment(store: Store, client: mlflow.MlflowClient, request: pytest.FixtureRequest) -> str:
    place = f"{store.artifacts}/of-run-writer"
    return str(client.create_experiment(request.node.name, artifact_location=place))


def rows_of(store: Store, run_id: str) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of a run in their order, without its id and the times at which it was written."""
    found = {}
    with contextlib.closing(sqlite3.connect(store.mlflow_file)) as database:
        for table, names in COLUMNS.items():
            said = ", ".join(name for name in names.split() if name not in ("start_time", "end_time"))
            rows = database.execute(
                f"SELECT {said} FROM {table} WHERE run_uuid = ? ORDER BY rowid", (run_id,)
            ).fetchall()
            found[table] = [tuple(str(value).replace(run_id, "ID") for value in row) for row in rows]
    return found


def live(writer: RunWriter, experiment: str) -> str:
    """A run that pauses, goes on and ends."""
    run_id = writer.begin(experiment, "a #0", TAGS, PARAMS)
    writer.change(run_id, "SCHEDULED", {"status": "paused", "spans": "[]"}, FIRST)
    writer.change(run_id, "RUNNING", {"status": "running"})
    writer.change(run_id, "FINISHED", {"status": "finished", "reason": "it's over"}, LATER)
    return run_id


def test_both_ways_write_the_same_rows(store: Store, client: mlflow.MlflowClient, experiment: str) -> None:
    by_rows = writer_of(store, client)
    assert isinstance(by_rows, ByRows), "the tables of this MLflow are not those that are known"
    written, expected = (live(writer, experiment) for writer in (by_rows, ByClient(client)))
    assert rows_of(store, written) == rows_of(store, expected)


def test_mlflow_reads_them(store: Store, client: mlflow.MlflowClient, experiment: str) -> None:
    run = client.get_run(live(writer_of(store, client), experiment))
    assert run.info.status == "FINISHED"
    assert run.info.end_time >= run.info.start_time
    assert run.data.tags["family"] == TAGS["family"]
    assert run.data.params["training.lr"] == "0.001"
    assert run.data.metrics == {"loss": 0.25, "score": 0.5, "new": -1.0}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(1, 0.5), (1, 0.75), (2, 0.25)]
    client.log_text(run.info.run_id, "seen", "note.txt")
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["note.txt"]


def test_a_thousand_metrics_are_written_by_both(
    store: Store, client: mlflow.MlflowClient, experiment: str
) -> None:
    many = [Metric("loss", float(step), 1, step) for step in range(2500)]
    for writer in (writer_of(store, client), ByClient(client)):
        run_id = writer.begin(experiment, "long", TAGS, {})
        writer.change(run_id, "FINISHED", {"status": "finished"}, many)
        assert len(rows_of(store, run_id)["metrics"]) == 2500
        assert client.get_run(run_id).data.metrics == {"loss": 2499.0}


class KilledClient:
    """A client whose process dies before a call of ``log_batch``."""

    def __init__(self, client: mlflow.MlflowClient, before: int) -> None:
        self._client, self._left = client, before

    def __getattr__(self, name: str) -> Any:
        self._left -= name == "log_batch"
        if not self._left:
            raise KeyboardInterrupt
        return getattr(self._client, name)


@pytest.mark.parametrize("before", [1, 2, 3])
def test_the_client_killed_amid_a_long_curve_leaves_no_ended_run(
    client: mlflow.MlflowClient, experiment: str, before: int
) -> None:
    run_id = ByClient(client).begin(experiment, "long", TAGS, {})
    curve = [Metric("loss", 1.0, 1, step) for step in range(2500)]
    with pytest.raises(KeyboardInterrupt):
        ByClient(KilledClient(client, before)).change(run_id, "FINISHED", {"status": "finished"}, curve)
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["status"]) == ("RUNNING", "running")


@pytest.mark.parametrize("name", ["a\nb", "", "x" * 300])
def test_names_that_mlflow_refuses_are_refused(
    store: Store, client: mlflow.MlflowClient, experiment: str, name: str
) -> None:
    for writer in (writer_of(store, client), ByClient(client)):
        run_id = writer.begin(experiment, "a", TAGS, {})
        with pytest.raises((StoreError, MlflowException)):
            writer.change(run_id, "FINISHED", {"status": "finished"}, [Metric(name, 1.0, 1, 1)])
        assert client.get_run(run_id).info.status == "RUNNING"


def test_what_was_deleted_in_mlflow_is_not_written_to(
    store: Store, client: mlflow.MlflowClient, experiment: str
) -> None:
    writer = writer_of(store, client)
    run_id = writer.begin(experiment, "a", TAGS, {})
    client.delete_run(run_id)
    with pytest.raises(MlflowException, match="active"):
        writer.change(run_id, "FINISHED", {"status": "finished"}, FIRST)
    assert rows_of(store, run_id)["metrics"] == []
    client.delete_experiment(experiment)
    with pytest.raises(MlflowException, match="active"):
        writer.begin(experiment, "b", TAGS, {})
    with pytest.raises(MlflowException, match="not found"):
        writer.change("0" * 32, "FINISHED", {})


def test_tables_of_another_mlflow_are_left_to_its_client(altered: Store) -> None:
    client = connection.connect(altered)
    assert isinstance(writer_of(altered, client), ByRows)
    with contextlib.closing(sqlite3.connect(altered.mlflow_file)) as database:
        database.execute("ALTER TABLE latest_metrics ADD COLUMN unit VARCHAR(10)")
    assert isinstance(writer_of(altered, client), ByClient)


def test_what_is_refused_in_the_midst_leaves_nothing(altered: Store) -> None:
    client = connection.connect(altered)
    experiment = str(client.create_experiment("study"))
    writer = writer_of(altered, client)
    run_id = writer.begin(experiment, "a", TAGS, {})
    before = rows_of(altered, run_id)
    with contextlib.closing(sqlite3.connect(altered.mlflow_file)) as database:
        for table in ("tags", "params"):  # the last to which each call writes
            database.execute(
                f"CREATE TRIGGER full_{table} BEFORE INSERT ON {table} BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
            )
    with pytest.raises(
        StoreError, match=r"did not take a record: disk is full; mend it and run the study again"
    ):
        writer.change(run_id, "FINISHED", {"status": "finished", "reason": "new"}, FIRST)
    assert rows_of(altered, run_id) == before
    with pytest.raises(StoreError, match="disk is full"):
        writer.begin(experiment, "b", TAGS, PARAMS)
    assert len(client.search_runs([experiment])) == 1


KILLED = """
import sys
from pathlib import Path
from mlflow.entities import Metric
from dmlstudy.registry import connection
from dmlstudy.registry.run_writer import writer_of
from dmlstudy.store import Store
store = Store(Path(sys.argv[1]))
writer = writer_of(store, connection.connect(store))
print("ready", flush=True)
while True:
    points = [Metric("loss", 1 / step, step, step) for step in range(1, 200)]
    run_id = writer.begin(sys.argv[2], "a", {"dmlstudy_kind": "search", "seed": "0"}, {"p": "1", "q": "2"})
    writer.change(run_id, "FINISHED", {"status": "finished"}, points)
"""


def test_a_kill_finds_runs_whole(store: Store, client: mlflow.MlflowClient, experiment: str) -> None:
    endings = set()
    for delay in (0.1, 0.23):
        command = [sys.executable, "-c", KILLED, str(store.root), experiment]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as writing:
            assert writing.stdout is not None
            assert writing.stdout.readline() == "ready\n"
            with contextlib.suppress(subprocess.TimeoutExpired):
                writing.wait(delay)
            writing.send_signal(signal.SIGKILL)
    found: list[Mapping[str, Any]] = [
        run.to_dictionary() for run in client.search_runs([experiment], max_results=5000)
    ]
    for run in found:
        info, data = run["info"], run["data"]
        assert data["params"] == {"p": "1", "q": "2"}
        ended = info["status"] == "FINISHED"
        assert (data["tags"].get("status") == "finished") == ended == ("loss" in data["metrics"])
        assert len(rows_of(store, info["run_id"])["metrics"]) == (199 if ended else 0)
        endings.add(ended)
    assert True in endings
