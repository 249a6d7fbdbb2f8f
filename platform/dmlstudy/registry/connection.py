"""The MLflow of a store: connecting to it, making its database, waiting for a server that is away."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlflow
import requests
from mlflow.exceptions import MlflowException
from mlflow.tracking._tracking_service import utils

from dmlstudy.patience import ServerPatience
from dmlstudy.registry import artifact_places, row_counts
from dmlstudy.store import Store, StoreError, holds_nothing, knock_at_server, make_whole, sqlite_url
from dmlstudy.text import first_line

MADE_BY_MLFLOW = {"alembic_version": "1", "experiments": "name = 'Default'", "workspaces": "name = 'default'"}
"""Rows that MLflow writes into a database before anyone uses it: for each table a condition in SQL."""

LEFT_S = 10.0
"""Nobody makes a database any more to which nothing was written for so long: MLflow's migrations take seconds."""

T = TypeVar("T")
P = ParamSpec("P")


def connect(store: Store, *, create: bool = False) -> mlflow.MlflowClient:
    """A client of the store's MLflow; raises StoreError where it does not answer, and of a store that was moved.

    The store's own database is made only if ``create`` says so.
    """
    if store.server:
        knock_at_server(store.server)
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    try:
        if store.server is None and create:
            make_whole(store, store.mlflow_file, functools.partial(_make_database, store), is_void=_is_void)
        elif store.server is None and not _is_there(store.mlflow_file):
            raise StoreError(
                f"no studies in the store {store.root}; start one with `dmlstudy run` or name --store"
            )
        if store.server is None:
            artifact_places.check(store)
        if mlflow.get_tracking_uri() != store.tracking_uri:
            getattr(utils, "_artifact_repos_cache", {}).clear()  # it is by run, and a copy has the same runs
        mlflow.set_tracking_uri(store.tracking_uri)
        client = mlflow.MlflowClient(store.tracking_uri)
        client.search_experiments(max_results=1)
        count_rows(store)
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(
            f"the MLflow store {store.tracking_uri} does not answer ({first_line(error)});"
            f" {'free some room on the disk' if 'is full' in str(error) else 'check --store or --tracking-uri'}"
        ) from None
    return client


def count_rows(store: Store) -> None:
    """Keep queries of the store's own database fast, however many runs there are."""
    if store.server is None:
        row_counts.refresh(store.mlflow_file)


def disconnect(store: Store) -> None:
    """Close this process's connections to the store's own database; later calls make new ones."""
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as RegisteredModels
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as Runs

    for kind in (Runs, RegisteredModels):
        engine = kind._engine_map.get(store.tracking_uri)
        if engine is not None:
            engine.dispose()


def _make_database(store: Store, draft: Path) -> None:
    """Make MLflow's database, by dozens of migrations that each write to the disk."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    made = SqlAlchemyStore(sqlite_url(draft), store.artifacts)  # type: ignore[no-untyped-call]
    made._dispose_engine()  # type: ignore[no-untyped-call]
    SqlAlchemyStore._engine_map.pop(made.db_uri, None)


def _is_there(database: Path) -> bool:
    return database.is_file() and database.stat().st_size > 0 and not _is_half_made(database)


def _is_half_made(database: Path) -> bool:
    """True if a killed process has left some of the tables, with no study recorded in them.

    A database is made whole or not at all (``make_whole``); this is one that an older version made in its place.
    """
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=20)) as opened:
            versions = opened.execute("SELECT version_num FROM alembic_version").fetchall()
    except sqlite3.Error as error:
        if "no such table" not in str(error):
            return False
        versions = []
    if versions == [(_newest_schema(),)]:
        return False
    return holds_nothing(database, apart_from=MADE_BY_MLFLOW)


def _is_void(database: Path) -> bool:
    """True for an abandoned half-made database, not one that another program (MLflow's server) is just making."""
    return time.time() - database.stat().st_mtime > LEFT_S and _is_half_made(database)


@functools.cache
def _newest_schema() -> str:
    from mlflow.store.db.utils import _get_latest_schema_revision

    return str(_get_latest_schema_revision())  # type: ignore[no-untyped-call]


def in_one_line(
    call: Callable[Concatenate[Store, P], T],
) -> Callable[Concatenate[Store, P], T]:
    """The same function of a store, that raises StoreError for what its MLflow refuses, as for want of a permission."""

    @functools.wraps(call)
    def asked(store: Store, /, *args: P.args, **named: P.kwargs) -> T:
        try:
            with _unlogged():
                return call(store, *args, **named)
        except MlflowException as error:
            raise StoreError(
                f"the MLflow store {store.tracking_uri} refuses: {first_line(error)}; see that you may do that there,"
                " or name another with --store or --tracking-uri"
            ) from error

    return asked


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keep MLflow from logging the traceback of a database's refusal, which the caller receives."""
    log = logging.getLogger("mlflow.store.db.utils")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def not_taken(store: Store, error: Exception) -> StoreError:
    """The error of a record that a store has not taken, as of a full disk."""
    return StoreError(
        f"the MLflow store {store.tracking_uri} did not take a record: {first_line(error)};"
        " mend it and run the study again, it goes on from there"
    )


class Patience:
    """Calls again what failed while the MLflow server was away, for at most ``store.patience_s`` an outage."""

    def __init__(self, store: Store, client: mlflow.MlflowClient, tell: Callable[[str], object]) -> None:
        self._store = store
        self._client = client
        left_s = store.patience_s if store.server else 0.0
        self.server = ServerPatience("MLflow server", store.server or "", left_s, self._answers, tell)
        if store.server:  # its own retries take up to minutes, and say nothing
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")

    def __call__(self, call: Callable[[], T]) -> T:
        """The result of ``call``; raises StoreError where the store cannot take it."""
        try:
            return self.server.call(call, _is_outage)
        except (MlflowException, OSError) as error:
            raise not_taken(self._store, error) from error

    def _answers(self) -> bool:
        assert self._store.server is not None
        try:
            knock_at_server(self._store.server)
            self._client.search_experiments(max_results=1)
        except (MlflowException, StoreError, OSError):
            return False
        return True


def _is_outage(error: Exception) -> bool:
    """True if the server, or the database behind it, may only be away; a full disk here does not count."""
    if isinstance(error, MlflowException):
        return int(error.get_http_status_code()) >= 500  # type: ignore[no-untyped-call]
    return isinstance(error, StoreError | requests.exceptions.RequestException | ConnectionError)


class PatientClient:
    """An MLflow client whose every call goes through a ``Patience``."""

    def __init__(self, client: mlflow.MlflowClient, patiently: Patience) -> None:
        self._client = client
        self._patiently = patiently

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self._patiently(functools.partial(method, *args, **kwargs))
