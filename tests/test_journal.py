"""The journals of a store's databases: ahead while a driver writes on a local file system, and one file at rest."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from dmlstudy import journal
from dmlstudy.registry import tracking
from dmlstudy.store import Store


def database(path: Path) -> Path:
    with contextlib.closing(sqlite3.connect(path)) as opened, opened:
        opened.execute("CREATE TABLE x (i)")
    return path


def kind_of(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as opened:
        return str(opened.execute("PRAGMA journal_mode").fetchone()[0])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_where_mounts_are_not_known_nothing_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOUNTS", tmp_path / "none")
    assert not journal.is_local(tmp_path)


def test_a_writers_log_is_ahead_and_at_rest_there_is_one_file(tmp_path: Path) -> None:
    path = database(tmp_path / "a b?.db")
    journal.of_writer(path)
    assert kind_of(path) == "wal"
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("INSERT INTO x VALUES (1)")
        other.commit()
        journal.at_rest(path)
        assert kind_of(path) == "wal", "another has it open"
    journal.at_rest(path)
    assert kind_of(path) == "delete"
    assert files(tmp_path) == [path.name]
    with contextlib.closing(sqlite3.connect(path)) as opened:
        assert opened.execute("SELECT i FROM x").fetchall() == [(1,)]


def test_a_file_system_of_several_machines_has_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = database(tmp_path / "x.db")
    journal.of_writer(path)
    monkeypatch.setattr(journal, "is_local", lambda folder: False)
    journal.of_writer(path)
    assert kind_of(path) == "delete"


def test_what_cannot_be_changed_is_left(tmp_path: Path) -> None:
    (garbage := tmp_path / "garbage.db").write_bytes(b"garbage" * 100)
    for change in (journal.of_writer, journal.at_rest):
        change(garbage)
        change(tmp_path / "missing.db")
    assert garbage.read_bytes() == b"garbage" * 100
    assert files(tmp_path) == ["garbage.db"]


def test_mlflows_database_is_ahead_while_a_driver_writes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tracker = tracking.StudyTracker(store, "s", {})
    assert kind_of(store.mlflow_file) == "wal"
    assert tracker.client.search_registered_models() == []
    tracker.end_study("interrupted", {})
    assert kind_of(store.mlflow_file) == "delete"
    assert not list(tmp_path.glob("mlflow.db-*"))
    tracking.StudyTracker(store, "s", {})
    assert kind_of(store.mlflow_file) == "wal"
