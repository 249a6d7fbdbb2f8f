"""A store is made whole or not at all: processes killed with SIGKILL after the n-th write of its making."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmlstudy.files import draft_of
from dmlstudy.registry import connection, tracking
from dmlstudy.registry.runs import raw_runs
from dmlstudy.store import Store, StoreError, holds_nothing, make_whole

ZYGOTE = """
import json, os, signal, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")
os.environ["MLFLOW_LOGGING_LEVEL"] = "CRITICAL"
import mlflow, optuna, sqlalchemy
from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as _registry
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as _tracking
from dmlstudy.store import Store
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.search.storage import open_storage

root, how = Path(sys.argv[1]), sys.argv[2]


def first_run(folder):
    store = Store(folder)
    store.prepare()
    StudyTracker(store, "s", {"study.yaml": "name: s"})
    optuna.create_study(storage=open_storage(store), study_name="s", load_if_exists=True)


def as_it_was_made_before(folder):
    folder.mkdir()
    mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()


def killed_after(writes, work, folder):
    # How a child that does the work ends, and how many writes it got to.
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        seen = 0

        def wrote(*_):
            nonlocal seen
            seen += 1
            if seen == writes:
                os.write(tell, str(seen).encode())
                os.kill(os.getpid(), signal.SIGKILL)

        def stated(connection, cursor, statement, *_):
            if not statement.lstrip().upper().startswith(("SELECT", "PRAGMA")):
                wrote()

        def heard(event, arguments):
            if event in ("os.rename", "os.remove", "os.mkdir"):
                wrote()

        sqlalchemy.event.listen(sqlalchemy.Engine, "after_cursor_execute", stated)
        sqlalchemy.event.listen(sqlalchemy.Engine, "commit", wrote)
        sys.addaudithook(heard)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            work(folder)
            os.write(tell, str(seen).encode())
        except BaseException as error:
            os.write(tell, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(tell)
    _, status = os.waitpid(child, 0)
    with os.fdopen(told) as file:
        return os.WIFSIGNALED(status), file.read()


work = {"now": first_run, "before": as_it_was_made_before}[how]
_, most = killed_after(-1, work, root / "whole")
found = []
for share in map(float, sys.argv[3:]):
    folder = root / f"killed-{share}"
    at = max(1, min(int(most), round(share * int(most))))
    died, _ = killed_after(at, work, folder)
    if how == "before" and (folder / "mlflow.db").exists():
        os.utime(folder / "mlflow.db", (0, 0))  # some time ago
    left = sorted(path.name for path in folder.glob("*")) if folder.exists() else []
    _, again = killed_after(-1, first_run, folder)
    found.append({"at": at, "died": died, "left": left, "again": again})
print(json.dumps({"most": int(most), "found": found}))
"""


def killed(folder: Path, how: str, shares: list[float]) -> dict[str, Any]:
    """What came of first runs that were killed after these shares of their writes, and run again."""
    command = [sys.executable, "-c", ZYGOTE, str(folder), how, *map(str, shares)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200).stdout
    return dict(json.loads(said.splitlines()[-1]))


def check(folder: Path, how: str, shares: list[float]) -> None:
    seen = killed(folder, how, shares)
    assert seen["most"] > 100
    for share, each in zip(shares, seen["found"], strict=True):
        assert each["died"], each
        assert each["again"].isdigit(), each  # it says how many writes it made, or what it raised
        store = Store(folder / f"killed-{share}")
        assert not list(store.root.glob(".*.draft*")), "no draft stays"
        assert len(store.identity()) == 16
        client = connection.connect(store)
        experiment = tracking.experiment_of(client, store, "s")
        (run,) = raw_runs(client, experiment, "tags.dmlstudy_kind = 'study'")
        assert run.data.tags["store_id"] == store.identity()


FEW = [0.02, 0.3, 0.75, 0.9, 0.985]
MANY = [round(number / 41, 4) for number in range(1, 41)]


def test_a_first_run_killed_after_some_of_its_writes_leaves_a_store_that_works(tmp_path: Path) -> None:
    check(tmp_path, "now", FEW)


def test_a_store_that_an_earlier_version_has_left_half_made_is_made_anew(tmp_path: Path) -> None:
    check(tmp_path, "before", [0.05, 0.5, 0.97])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["now", "before"])
def test_a_first_run_killed_after_any_of_its_writes(how: str, tmp_path: Path) -> None:
    check(tmp_path, how, MANY)


def half_made(folder: Path) -> Store:
    """A store whose MLflow database has a table without a row, and no more."""
    store = Store(folder)
    store.prepare()
    with sqlite3.connect(store.mlflow_file) as database:
        database.execute("CREATE TABLE experiments (experiment_id INTEGER, name TEXT)")
        database.execute("INSERT INTO experiments VALUES (0, 'Default')")
    database.close()
    return store


def test_who_looks_at_a_half_made_store_sees_an_empty_one(tmp_path: Path) -> None:
    store = half_made(tmp_path)
    with pytest.raises(StoreError, match="no studies in the store"):
        connection.connect(store)


def test_a_database_that_another_program_is_making_is_left_to_it(tmp_path: Path) -> None:
    store = half_made(tmp_path)
    assert not connection._is_void(store.mlflow_file)
    os.utime(store.mlflow_file, (0, 0))
    assert connection._is_void(store.mlflow_file)
    assert connection.connect(store, create=True).search_experiments()
    os.utime(store.mlflow_file, (0, 0))
    assert not connection._is_void(store.mlflow_file)


def test_a_database_that_holds_anything_is_never_made_anew(tmp_path: Path) -> None:
    store = half_made(tmp_path)
    with sqlite3.connect(store.mlflow_file) as database:
        database.execute("INSERT INTO experiments VALUES (1, 'mine')")
    database.close()
    os.utime(store.mlflow_file, (0, 0))
    before = store.mlflow_file.read_bytes()
    with pytest.raises(StoreError, match="does not answer"):
        connection.connect(store, create=True)
    with sqlite3.connect(store.mlflow_file) as database:
        assert database.execute("SELECT name FROM experiments").fetchall()[-1] == ("mine",)
    database.close()
    assert len(before) <= store.mlflow_file.stat().st_size
    store.mlflow_file.write_bytes(b"not a database" * 100)
    assert not holds_nothing(store.mlflow_file)
    with pytest.raises(StoreError, match="file is not a database"):
        connection.connect(store, create=True)
    assert store.mlflow_file.read_bytes() == b"not a database" * 100


def test_what_sqlite_kept_beside_an_earlier_database_is_not_applied_to_a_new_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = tmp_path / "made"
    for end in ("-wal", "-journal", "-shm"):
        Path(f"{path}{end}").write_text("of another")
        Path(f"{draft_of(path)}{end}").write_text("of a killed maker")
    make_whole(store, path, lambda draft: draft.write_text("whole"))
    assert {each.name for each in tmp_path.iterdir()} == {"made", ".making"}
    make_whole(store, path, lambda draft: pytest.fail("it is there"))

    def fails(draft: Path) -> None:
        draft.write_text("hal")
        raise OSError("no space left")

    path.write_text("")  # an empty file counts as none
    with pytest.raises(OSError, match="no space left"):
        make_whole(store, path, fails)
    assert {each.name for each in tmp_path.iterdir()} == {"made", ".making"}
