"""Optuna's storage, opened so that a report costs a write and not several waits for the disk."""

from __future__ import annotations

from typing import Any

import optuna
import sqlalchemy

from dmlstudy.registry.store import Store, sole_maker


def open_storage(store: Store) -> optuna.storages.RDBStorage:
    """The store's Optuna storage, made if it is not there.

    In SQLite a commit goes to a write-ahead log that is synchronised with the disk at checkpoints only: what was
    committed outlives the death of any process; a loss of power may take the last moments, and never the file's
    order. Where the file system cannot do that (a network's), SQLite stays as it was.
    """
    with sole_maker(store):
        storage = optuna.storages.RDBStorage(store.optuna_url)
    if storage.engine.dialect.name == "sqlite":
        sqlalchemy.event.listen(storage.engine, "connect", _write_ahead)
        storage.engine.dispose()  # connections made before do not know
    return storage


def _write_ahead(connection: Any, _: object) -> None:
    if connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] == "wal":
        connection.execute("PRAGMA synchronous=NORMAL")
