"""Places of artifacts: MLflow's database has their whole paths, which do not change with a folder that is moved.

So a store that was moved or copied is refused until ``relocate`` has set them right. A copy would else write into the
store that it is a copy of.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlparse

from dmlstudy.store import Store, StoreError, sole_maker

PLACES = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
"""The columns of MLflow's database that hold places, by table."""

DEFAULT = "/artifacts/0"
"""The end of the place of the experiment that MLflow makes first, before anyone uses the database."""


def check(store: Store) -> None:
    """Raise StoreError where the store's own database has its artifacts in another store's folder.

    A folder that is the same by another path, as through a link, is this store's. A database that another program made
    says nothing.
    """
    before = _recorded_root(store)
    if before is None or _is_same(before, store.root):
        return
    came = "is a copy of" if (before / store.mlflow_file.name).exists() else "was moved or copied from"
    raise StoreError(
        f"{store.root}: this store {came} {before}, and its database still looks for its artifacts there;"
        f" `{store.command('relocate')}` sets that right, or mount it at {before}"
    )


def relocate(store: Store) -> Path | None:
    """Set the places of all artifacts to this store's folder, at once or not at all; where they were before.

    None where there is nothing to do. Raises StoreError where there is no database or it is a server's, where it cannot
    be written and while a study of the store runs.
    """
    if store.server is not None:
        raise StoreError(
            f"{store.root}: its runs are at {store.server}, which has its own places for artifacts"
        )
    if not store.mlflow_file.is_file():
        raise StoreError(f"no studies in the store {store.root}; name another with --store")
    before = _recorded_root(store)
    if before is None or _is_same(before, store.root):
        return None
    store.prepare()
    with sole_maker(store):
        for name in store.studies():
            if store.driver(name) is not None:
                raise StoreError(
                    f"study {name!r} is running; wait for its end, or `{store.command('stop', name)}`"
                )
        old, new = f"{(before / 'artifacts').as_uri()}/", f"{store.artifacts}/"
        try:
            with contextlib.closing(sqlite3.connect(store.mlflow_file, timeout=20)) as database, database:
                database.execute("BEGIN IMMEDIATE")
                there = {
                    row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                }
                for table in PLACES.keys() & there:
                    for column in PLACES[table]:
                        database.execute(
                            f"UPDATE {table} SET {column} = ? || substr({column}, ?)"
                            f" WHERE substr({column}, 1, ?) = ?",
                            (new, len(old) + 1, len(old), old),
                        )
        except sqlite3.Error as error:
            raise StoreError(
                f"{store.mlflow_file}: cannot be written ({error}); nothing was changed"
            ) from None
    return before


def _recorded_root(store: Store) -> Path | None:
    """The folder of the store for which MLflow's database was made; None where it does not say."""
    try:
        with contextlib.closing(sqlite3.connect(store.mlflow_file, timeout=20)) as database:
            row = database.execute(
                "SELECT artifact_location FROM experiments WHERE experiment_id = 0"
            ).fetchone()
    except sqlite3.Error:  # what is wrong with it, MLflow's client says
        return None
    place = urlparse(str(row[0])) if row else None
    if place is None or place.scheme != "file" or not place.path.endswith(DEFAULT):
        return None
    return Path(unquote(place.path.removesuffix(DEFAULT)))


def _is_same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(one, other)
    return False
