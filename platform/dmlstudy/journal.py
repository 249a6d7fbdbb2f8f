"""SQLite's journals, in which changes of a store's databases wait until they are in the file.

A **log written ahead** (``-wal``) costs one wait for the disk each commit, and readers do not wait for a writer. It is
shared through memory, so it is for a file system of one machine only: on another's SQLite would not refuse, and lose
what two machines write.

A **rollback journal** (``-journal``) is for any file system, and at rest it is no file.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay"}
"""File systems of one machine alone."""

MOUNTS = Path("/proc/mounts")

PATIENCE_S = 1.0


def is_local(folder: Path) -> bool:
    """True if the folder lies on a file system of this machine alone; False where that is unknown."""
    try:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    kinds: list[tuple[int, int, str]] = []
    for number, line in enumerate(mounts):
        _, point, kind, *_ = line.split()
        place = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point))
        if folder.resolve().is_relative_to(place):
            kinds.append((len(place.parts), number, kind))
    return bool(kinds) and max(kinds)[-1] in LOCAL


def write_ahead(connection: Any) -> bool:
    """Have a connection's database log ahead, from now on and for everyone; True if it does."""
    return bool(connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] == "wal")


def roll_back(connection: Any) -> None:
    """Have a connection's database keep a rollback journal, unless others have it open."""
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA journal_mode=DELETE")


def of_writer(database: Path) -> None:
    """Give a database the journal that suits one who writes much to it; one that cannot be changed keeps its own."""
    with contextlib.suppress(sqlite3.Error), opened(database) as connection:
        (write_ahead if is_local(database.parent) else roll_back)(connection)


def at_rest(database: Path) -> None:
    """Bring a log back into its database, which is one file then and can be read where nothing can be written.

    Where others have the database open it stays as it is.
    """
    with contextlib.suppress(sqlite3.Error), opened(database) as connection:
        roll_back(connection)


def opened(database: Path, wait_s: float = PATIENCE_S) -> contextlib.closing[sqlite3.Connection]:
    """As ``connected``, for a ``with``."""
    return contextlib.closing(connected(database, wait_s))


def connected(database: Path, wait_s: float) -> sqlite3.Connection:
    """A connection, for any thread, to a database that is there; it waits so long for whoever else is writing."""
    there = f"file:{quote(str(database))}?mode=rw"
    return sqlite3.connect(there, timeout=wait_s, isolation_level=None, check_same_thread=False, uri=True)
