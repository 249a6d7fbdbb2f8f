"""Where studies live: one folder with one MLflow database, one Optuna database and the artifacts.

<store>/mlflow.db          runs and registered models (or a tracking server instead)
<store>/optuna.db          the searches, one Optuna study per study; optuna-dashboard opens it
<store>/artifacts/         what runs and models keep
<store>/studies/<name>/    study.json (what runs where), engine.log, Ray's own files
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import urlparse

State = Literal["running", "finished", "interrupted", "failed"]


class StoreError(ValueError):
    """A store that is not there, cannot be written or has no such study or model; one line with the mend."""


@dataclass(frozen=True)
class Store:
    """A folder of studies; ``tracking_uri`` names an MLflow server to use instead of the folder's database."""

    root: Path
    server: str | None = None

    @property
    def tracking_uri(self) -> str:
        return self.server or f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def optuna_url(self) -> str:
        return f"sqlite:///{self.root / 'optuna.db'}"

    @property
    def artifacts(self) -> str | None:
        """Where a new experiment keeps its artifacts; a server decides for itself."""
        return None if self.server else (self.root / "artifacts").as_uri()

    def study_folder(self, name: str) -> Path:
        return self.root / "studies" / name

    def prepare(self) -> None:
        """Make the folder, and check that it and its databases can be written; raises StoreError."""
        if self.server:
            knock_at_server(self.server)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise StoreError(
                f"{self.root}: the store cannot be written ({error.strerror}); name another with --store"
            ) from None
        for database in (self.root / "mlflow.db", self.root / "optuna.db"):
            if database.exists() and not (database.is_file() and os.access(database, os.W_OK)):
                raise StoreError(f"{database}: cannot be written; change its owner or name another --store")

    def studies(self) -> list[str]:
        """Names of the studies in this store."""
        return sorted(path.parent.name for path in self.root.glob("studies/*/study.json"))

    def read_state(self, name: str) -> dict[str, Any]:
        """What ``write_state`` wrote; raises StoreError where there is no such study."""
        path = self.study_folder(name) / "study.json"
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            known = self.studies()
            there = (
                f"there are: {', '.join(known)}" if known else "it is empty; start one with `dmlstudy run`"
            )
            raise StoreError(f"no study {name!r} in the store {self.root}; {there}") from None
        if state["state"] == "running":
            with open(path.with_name("lock"), "a", encoding="utf-8") as file:
                if _try_lock(file):  # nobody holds the study: its driver was killed
                    state["state"] = "interrupted"
        return state

    def write_state(self, name: str, state: State, **details: Any) -> None:
        """Record what the study is doing and which process does it, atomically."""
        folder = self.study_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "study.json"
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        new = old | details
        new |= {"state": state, "pid": os.getpid(), "host": socket.gethostname(), "updated": time.time()}
        draft = folder / f".study.json.{os.getpid()}"
        draft.write_text(json.dumps(new, indent=1), encoding="utf-8")
        os.replace(draft, path)


def knock_at_server(uri: str) -> None:
    """Raise StoreError where no MLflow server listens, for its client would try again for minutes."""
    address = urlparse(uri)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise StoreError(f"--tracking-uri {uri}: expected http://HOST:PORT of an MLflow server")
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=5).close()
    except OSError as error:
        raise StoreError(f"no MLflow server at {uri}: {error.strerror or error}") from None


@contextmanager
def sole_driver(store: Store, name: str) -> Iterator[None]:
    """Hold the study for this process; the lock ends with the process however it ends.

    Raises StoreError where another process holds it.
    """
    folder = store.study_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as file:
        if not _try_lock(file):
            raise StoreError(f"study {name!r} is running already; see `dmlstudy status {name}`")
        try:
            yield
        finally:
            if not (folder / "study.json").exists():  # it never began: leave nothing behind
                shutil.rmtree(folder, ignore_errors=True)
                for empty in (folder.parent, store.root):
                    with suppress(OSError):
                        empty.rmdir()


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
