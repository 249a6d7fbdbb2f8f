"""The store, in which studies live: one folder with an MLflow database, an Optuna database and the artifacts.

<store>/mlflow.db          runs and registered models (or a tracking server instead)
<store>/optuna.db          the searches (or optuna.place, where they are)
<store>/artifacts/         what runs and models keep
<store>/store.id           tells this store from others that use the same tracking server
<store>/studies/<name>/    study.json (what runs where), progress.log, engine.log, Ray's own files, and the
                           lock, which the driver holds and has signed
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args
from urllib.parse import urlparse

import psutil

from dmlstudy.files import draft_of, put_in_place, written_whole
from dmlstudy.text import first_line

State = Literal["running", "finished", "interrupted", "failed"]

LOCK = "lock"
STOPPING = "stop-requested"
"""The file in a study's folder that says that its driver was asked to end."""
MAKING = ".making"
"""The file whose lock one process holds while it makes a file of the store."""

SIDE_FILES = ("-journal", "-wal", "-shm")
"""Files of SQLite beside a database; one left by an earlier database would be applied to a new one."""

TAKES = {
    "run": ("--store", "--tracking-uri", "--address"),
    "resume": ("--store", "--tracking-uri", "--address"),
    "logs": ("--store", "--tracking-uri"),
    "stop": ("--store",),
}
"""Options of ``Store.given`` that a command takes, where they are not store and server."""

OPTUNA_URL = "DMLSTUDY_OPTUNA_URL"
"""The variable that names another database for searches, with a login: it stands in no file and no command line."""

LOOK_S = 2.0
"""A driver looks so often whether the study is still its own."""

LOST_S = 5 * LOOK_S
"""After so long it has seen that it is not, or has written nothing for so long."""

LOCK_PATIENCE_S = 0.5
"""Someone who only looks at a study holds its lock for an instant; a driver waits for that."""


class StoreError(ValueError):
    """A store that is not there, cannot be written or has no such study or model; one line with the fix."""


class Driver(NamedTuple):
    """The process that drives a study; without a ``pid`` one that has not said yet who it is."""

    pid: int | None = None
    host: str = ""
    began: float = 0.0
    """The time when it began, which tells it from a later process of the same id."""

    @classmethod
    def own(cls) -> Driver:
        """This process."""
        return cls(os.getpid(), socket.gethostname(), psutil.Process().create_time())

    @classmethod
    def noted(cls, lock: Path) -> Driver | None:
        """The one that a lock file names; None where it names none."""
        with suppress(OSError, ValueError, TypeError):
            return cls(**json.loads(lock.read_text(encoding="utf-8")))
        return None

    def has_ended(self) -> bool:
        """True if it was a process of this machine that is gone; of another machine's nothing is known here."""
        if self.pid is None or self.host != socket.gethostname():
            return False
        try:
            return bool(psutil.Process(self.pid).create_time() != self.began)
        except psutil.NoSuchProcess:
            return True


class Hold(NamedTuple):
    """A driver's hold on a study.

    Its lock ends with the process, and on a shared file system with the connection too: then another machine may take
    the study over, and this driver is to end.
    """

    lock: Path
    driver: Driver

    def lost_to(self) -> Driver | None:
        """The driver that has taken the study over; None while that is not known of any."""
        there = Driver.noted(self.lock)
        return there if there is not None and there != self.driver else None

    @contextmanager
    def watched(self, end: Callable[[Driver], None]) -> Iterator[None]:
        """Call ``end`` from another thread, once, where the hold is lost while the block lasts."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(LOOK_S):
                if (other := self.lost_to()) is not None:
                    end(other)
                    return

        threading.Thread(target=watch, name="study-hold", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()


@dataclass(frozen=True)
class Store:
    """A folder of studies; ``server`` is an MLflow server to use instead of the folder's database.

    A running study waits ``patience_s`` for a server that stopped answering; anything else fails at once. ``given`` are
    the options of the command line that named this store, for the commands that messages advise.
    """

    root: Path
    server: str | None = None
    patience_s: float = 600.0
    given: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False)
    search_database: str | None = field(
        default_factory=lambda: os.environ.get(OPTUNA_URL) or None, repr=False
    )
    """The URL of a database for searches instead of the folder's; by default the variable DMLSTUDY_OPTUNA_URL."""

    def __post_init__(self) -> None:
        refuse_login(self.server)

    @property
    def tracking_uri(self) -> str:
        return self.server or sqlite_url(self.mlflow_file)

    @property
    def mlflow_file(self) -> Path:
        return self.root / "mlflow.db"

    @property
    def optuna_file(self) -> Path:
        return self.root / "optuna.db"

    @property
    def optuna_place(self) -> Path:
        """The file that tells where searches are that are not in ``optuna_file``."""
        return self.root / "optuna.place"

    @property
    def optuna_url(self) -> str:
        return self.search_database or sqlite_url(self.optuna_file)

    @property
    def has_searches(self) -> bool:
        """True if there is a database of searches, here or elsewhere."""
        return self.optuna_file.is_file() or self.optuna_place.is_file()

    @property
    def artifacts(self) -> str | None:
        """The place of a new experiment's artifacts; a server decides for itself."""
        return None if self.server else (self.root.absolute() / "artifacts").as_uri()

    def command(self, verb: str, *words: str) -> str:
        """A command line that does this with the same store, server and cluster, to be copied into a shell."""
        taken = TAKES.get(verb, ("--store", "--tracking-uri"))
        options = [
            part for option, value in self.given.items() if option in taken for part in (option, value)
        ]
        return shlex.join(["dmlstudy", verb, *words, *options])

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
        for database in (self.mlflow_file, self.optuna_file):
            if database.exists() and not (database.is_file() and os.access(database, os.W_OK)):
                raise StoreError(f"{database}: cannot be written; change its owner or name another --store")

    def identity(self) -> str:
        """The id that distinguishes this store from all others, made once."""
        path = self.root / "store.id"
        make_whole(self, path, lambda draft: draft.write_text(secrets.token_hex(8), encoding="utf-8"))
        return path.read_text(encoding="utf-8")

    def studies(self) -> list[str]:
        """Names of the studies in this store."""
        return sorted(path.parent.name for path in self.root.glob("studies/*/study.json"))

    def read_state(self, name: str) -> dict[str, Any]:
        """Read what ``write_state`` wrote; raises StoreError if there is no such study.

        If the study's driver is gone without a word, ``state`` is "interrupted", ``crashed`` is true, and ``updated``
        is its last sign of life. ``stopped`` says that an interrupted study was asked to end, and so has not
        ``crashed``, even if it had no time to record that. If another driver has taken the study over, ``pid`` and
        ``host`` are its.
        """
        path = self.study_folder(name) / "study.json"
        try:
            state = _read_state(path)
        except FileNotFoundError:
            known = self.studies()
            there = (
                f"there are: {', '.join(known)}" if known else "it is empty; start one with `dmlstudy run`"
            )
            raise StoreError(f"no study {name!r} in the store {self.root}; {there}") from None
        state["crashed"] = False
        if state["state"] == "running":
            driver = self.driver(name)
            if driver is None:  # nobody holds the study: its driver was killed
                state |= {"state": "interrupted", "crashed": True, "updated": self.last_sign(name)}
            elif driver.pid is not None:
                state |= {"pid": driver.pid, "host": driver.host}
        state["stopped"] = state["state"] == "interrupted" and (path.parent / STOPPING).exists()
        state["crashed"] = state["crashed"] and not state["stopped"]
        return state

    def driver(self, name: str) -> Driver | None:
        """The process that holds the study now; None where there is none."""
        try:
            with open(self.study_folder(name) / LOCK, encoding="utf-8") as file:
                if _try_lock(file, fcntl.LOCK_SH):
                    return None
                return Driver(**json.loads(file.read()))
        except FileNotFoundError:
            return None
        except json.JSONDecodeError:  # it was taken an instant ago
            return Driver()

    def write_state(self, name: str, state: State, left_at: float | None = None, **details: Any) -> None:
        """Record what the study is doing and which process does it, atomically.

        A new ``started`` begins a session; the seconds of the sessions before it add up in ``spent``. ``left_at`` is
        when a session before it was last heard of, for the case that it was killed.
        """
        folder = self.study_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "study.json"
        old = _read_state(path) if path.exists() else {}
        new = old | details
        if "started" in details:
            end = old.get("updated", 0.0)
            if old.get("state") == "running":
                end = left_at or self.last_sign(name)
            session = max(0.0, end - old["started"]) if "started" in old else 0.0
            new["spent"] = old.get("spent", 0.0) + session
        new |= {"state": state, "pid": os.getpid(), "host": socket.gethostname(), "updated": time.time()}
        new |= {"cwd": os.getcwd(), "server": self.server}
        if "started" in details:
            (folder / STOPPING).unlink(missing_ok=True)
        with written_whole(path, folder / f".study.json.{os.getpid()}") as file:
            file.write(json.dumps(new, indent=1).encode())

    def last_sign(self, name: str) -> float | None:
        """The time when a driver last wrote of its study; None of one that was not begun."""
        files = (
            "study.json",
            "running.json",
            "progress.log",
        )  # engines write into their log before a session begins
        paths = [self.study_folder(name) / file for file in files]
        return max((path.stat().st_mtime for path in paths if path.exists()), default=None)


def _read_state(path: Path) -> dict[str, Any]:
    """A study's study.json; raises StoreError where it is damaged."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        state = json.loads(text)
        why = "" if isinstance(state, dict) and state.get("state") in get_args(State) else "it has no state"
    except ValueError as error:
        state, why = None, first_line(error) if text.strip() else "it is empty"
    if why:
        raise StoreError(
            f"{path}: is damaged ({why}); delete it and run the study file again: the databases keep what is finished,"
            " and the study goes on from there"
        )
    return dict(state)


def spec_of(store: Store, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The study file as study.json keeps it; raises StoreError where it is not there."""
    spec = state.get("spec")
    if isinstance(spec, dict) and isinstance(spec.get("families"), dict):
        return spec
    raise StoreError(
        f"{store.study_folder(name) / 'study.json'}: does not hold the study file any more; delete it and run the"
        " study file again: the databases keep what is finished, and the study goes on from there"
    )


def seconds_spent(state: Mapping[str, Any]) -> float:
    """Seconds that a study has run, over all its sessions, from what ``read_state`` says."""
    if "started" not in state:
        return 0.0
    end = time.time() if state["state"] == "running" else state["updated"]
    return float(state.get("spent", 0.0) + max(0.0, end - state["started"]))


def sqlite_url(path: Path) -> str:
    """The address by which SQLAlchemy opens a database, which would take ``?`` and ``%20`` in a path for its own."""
    if not {"?", "%"} & set(str(path)):
        return f"sqlite:///{path}"
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(path)).render_as_string()


def refuse_login(uri: str | None) -> None:
    """Raise StoreError for an address with a login in it, for addresses are written down and shown to others."""
    if uri is not None and "@" in uri:
        raise StoreError(
            "--tracking-uri: a login in the address would be seen by others; give http://HOST:PORT, and the login"
            " as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
        )


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
def sole_driver(store: Store, name: str) -> Iterator[Hold]:
    """Hold the study for this process; the lock ends with the process however it ends.

    A driver before it that may still be alive without its lock gets the time to see that it is to end.
    Raises StoreError where another process holds it.
    """
    folder = store.study_folder(name)
    end = time.monotonic() + LOCK_PATIENCE_S
    while (file := _taken(folder)) is None:
        if time.monotonic() > end:
            raise StoreError(f"study {name!r} is running already; see `{store.command('status', name)}`")
        time.sleep(0.05)
    with file:
        hold, before = Hold(folder / LOCK, Driver.own()), Driver.noted(folder / LOCK)
        file.truncate(0)
        file.write(json.dumps(hold.driver._asdict()))
        file.flush()
        if before is not None and before != hold.driver:
            _let_end(before, store, name)
        for draft in driver_drafts(folder):
            draft.unlink(missing_ok=True)
        try:
            yield hold
        finally:
            if not (folder / "study.json").exists():  # it never began: leave nothing behind
                with suppress(OSError):
                    _clear(folder)
                for empty in (folder, folder.parent, store.root):
                    with suppress(OSError):
                        empty.rmdir()


def _let_end(before: Driver, store: Store, name: str) -> None:
    """Wait, while a driver that has lost its lock may be alive, until it must have seen that."""
    began = (store.study_folder(name) / LOCK).stat().st_mtime  # by the clock of whoever keeps the files
    end = time.monotonic() + LOST_S
    while not before.has_ended() and time.monotonic() < end:
        sign = store.last_sign(name)
        if before.host != socket.gethostname() and (sign is None or began - sign > LOST_S):
            return
        time.sleep(0.1)


def driver_drafts(folder: Path) -> list[Path]:
    """Files that the driver of a study was writing; of no use once it is gone."""
    return [path for name in ("study", "running") for path in folder.glob(f".{name}.json.*")]


def _taken(folder: Path) -> IO[str] | None:
    """The lock file of a study's folder, made if missing, and held; None where another process holds it."""
    with suppress(FileNotFoundError):  # its driver has cleared the folder away meanwhile
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a", encoding="utf-8")  # noqa: SIM115
        try:
            if _try_lock(file) and os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK)):
                return file
        except FileNotFoundError:  # so what is held is not the lock any more
            pass
        file.close()
    return None


def _clear(folder: Path) -> None:
    """Empty a study's folder; the lock goes last, because another driver may then take the study."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == LOCK):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def sole_maker(store: Store) -> Iterator[None]:
    """Wait for and hold the store while a file of it is made, for two studies may begin at once."""
    with open(store.root / MAKING, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_whole(
    store: Store,
    path: Path,
    make: Callable[[Path], object],
    *,
    is_void: Callable[[Path], bool] = lambda _: False,
) -> None:
    """Make a file of the store if it is not there, whole or not at all, whenever the process is killed.

    ``make`` writes a draft, which takes its name when it is done; a draft that a killed maker has left is removed. An
    empty file counts as none, and so does one that ``is_void``: the rest of one that was made in its place.
    """
    if _is_made(path) and not is_void(path):
        return
    draft = draft_of(path)
    with sole_maker(store):
        if _is_made(path) and not is_void(path):  # by another one meanwhile
            return
        remove_database(draft)
        try:
            make(draft)
        except BaseException:
            remove_database(draft)
            raise
        left = [f"{draft.name}{end}" for end in SIDE_FILES if Path(f"{draft}{end}").exists()]
        assert not left, f"{left} would be lost: its database was not closed"
        remove_database(path)
        put_in_place(draft, path)


def _is_made(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def remove_database(path: Path) -> None:
    """Remove a file, and what SQLite may have kept beside it before it."""
    for end in (*SIDE_FILES, ""):
        Path(f"{path}{end}").unlink(missing_ok=True)


def holds_nothing(path: Path, *, apart_from: Mapping[str, str] = {}) -> bool:
    """True if a SQLite database provably holds no row, whatever tables it has.

    ``apart_from`` names tables whose rows do not count where the condition holds, in SQL. A file that cannot be read
    as a database may hold something.
    """
    try:
        with closing(sqlite3.connect(path, timeout=20)) as database:
            tables = [
                row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            ]
            for table in tables:
                condition = f" WHERE NOT ({apart_from[table]})" if table in apart_from else ""
                if database.execute(f'SELECT 1 FROM "{table}"{condition} LIMIT 1').fetchone():
                    return False
    except sqlite3.Error:
        return False
    return True


def _try_lock(file: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
