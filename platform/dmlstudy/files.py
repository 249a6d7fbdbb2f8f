"""Files: where one of results may go, how it is written whole or not at all, its digest; the cache and its room."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from dmlstudy.text import first_line

PARQUET, ZIP = b"PAR1", b"PK\x03\x04"
"""First bytes of files of results."""

SPARE = 1.1
"""A disk must have room for so many times the size of a file that is made on it."""

TEMPORARY = "dmlstudy-files-"
"""The beginning of temporary folders' names."""

DRAFT, MARK = ".draft", "[0-9a-f]" * 32
"""The end of the names of files that are not whole yet, and what tells two drafts of one file apart, as a pattern."""

FOLDER_DRAFT = f".dmlstudy{DRAFT}"
"""The end of the names of folders that are not whole yet."""

_temporary: set[str] = set()


class FileState(NamedTuple):
    """A file as it was at one moment; what has changed it since looks different."""

    inode: int
    size: int
    changed_ns: int

    @classmethod
    def at(cls, path: Path) -> FileState:
        """Raises OSError where there is none."""
        found = path.stat()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


def cache_folder() -> Path:
    """The folder of what can be made again, ``$XDG_CACHE_HOME/dmlstudy`` (default ``~/.cache``); not made yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmlstudy"


def too_little_room(folder: Path, num_bytes: int) -> int | None:
    """The bytes that are free on a folder's disk where a file of this size needs more; None where it has room."""
    free = shutil.disk_usage(folder).free
    return free if free < SPARE * num_bytes else None


def reserve(file: IO[bytes], num_bytes: int) -> None:
    """Have the file system keep room for the whole file, where it can, so that no write comes too late for it."""
    os.truncate(file.fileno(), num_bytes)
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def is_private(folder: Path) -> bool:
    """True of a folder, and no link to one, that is this user's and open to nobody else. Raises OSError for none."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder that is deleted when the block ends, or by ``remove_temporary_folders``.

    Its name has this process's id in it, so that ``dmlstudy prune`` knows those that killed processes have left.
    """
    prefix = f"{TEMPORARY}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        _temporary.add(folder)
        try:
            yield folder
        finally:
            _temporary.discard(folder)


def remove_temporary_folders() -> None:
    """Delete what ``temporary_folder`` has made and not yet deleted, where a process ends in the middle of a block."""
    for folder in list(_temporary):
        shutil.rmtree(folder, ignore_errors=True)


def read_json(path: Path, where_missing: str, where_damaged: str) -> Any:
    """The content of a file of JSON. Raises ValueError naming one that is missing or damaged, and what to do then."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {where_missing}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable ({first_line(error)}); {where_damaged}") from None


def check_output(path: str | Path, what: str, begins: bytes) -> Path:
    """The path, if a file of results may be written to it: no file is there, or one that ``begins`` so.

    ``what`` is what such a file is called. Raises ValueError for a folder that is missing or cannot be written, for a
    folder in the file's place, and for any other file: it is kept.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder; make it or name another output")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path.parent}: cannot be written; change its permissions or name another output")
    if path.exists() and not path.is_file():  # a device or a pipe, which may have no end
        raise ValueError(f"{path}: is no file; name another output")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(begins)).lower() != begins.lower():
                raise ValueError(f"{path}: exists already and is not {what}; name another output")
    return path


@contextlib.contextmanager
def written_whole(
    path: Path, draft: Path | None = None, *, outlasts_power: bool = True
) -> Iterator[IO[bytes]]:
    """A file that takes its place when the block ends, whole, also after a loss of power; if the block raises, never.

    Until then it is a draft in the same folder, which is made if missing. The draft is this call's alone and locked, so
    calls that write the same file do not mix, and the next one removes what a killed one has left.

    ``draft`` is another name for it, without a lock, for files of which there is one writer. Without ``outlasts_power``
    the disk is not waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _own_draft(path) if draft is None else draft.open("wb") as file:
            draft = Path(file.name)
            yield file
            file.flush()
            put_in_place(draft, path, outlasts_power=outlasts_power)
    except BaseException as error:
        if draft is not None:
            with contextlib.suppress(OSError):
                draft.unlink()
        is_of_draft = isinstance(error, OSError) and str(error.filename) in ("None", str(draft))
        if isinstance(error, OSError) and error.errno and is_of_draft:  # as of a full disk
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def _own_draft(path: Path) -> IO[bytes]:
    """A new file beside ``path``, locked where the file system has locks."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{MARK}{DRAFT}"):
        if not is_held(left):
            left.unlink(missing_ok=True)
    while True:
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}{DRAFT}")
        try:
            file = draft.open("xb")
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if _is_at(file.fileno(), draft):
            return file
        file.close()  # between its first two steps another call took it for a killed one's


def draft_of(path: Path) -> Path:
    """The name of a file of which there is one writer, until it is whole."""
    return path.with_name(f".{path.name}{DRAFT}")


@contextlib.contextmanager
def draft_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside ``folder``, for its content until ``put_in_place``; removed if it is still there then.

    It is this process's alone: raises ValueError where another is making the same. What a killed one has left in it is
    cleared away.
    """
    taken = ValueError(f"{folder}: is being made by another call; wait for that, or name a new folder")
    draft = folder.with_name(f".{folder.name}{FOLDER_DRAFT}")
    draft.mkdir(exist_ok=True)
    held = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken from None
        except OSError:  # a file system that locks no folders
            pass
        if not _is_at(held, draft):  # the other call has ended meanwhile
            raise taken
        for left in draft.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield draft
        finally:
            if _is_at(held, draft):
                shutil.rmtree(draft, ignore_errors=True)
    finally:
        os.close(held)


def is_held(path: Path) -> bool:
    """True if the process lives that makes this draft, a file or a folder; also where that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    """True if an open file or folder still has this name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def put_in_place(draft: Path, path: Path, *, outlasts_power: bool = True) -> None:
    """Give a draft that is whole its name; after a loss of power the disk has it as it is, or what was there before."""
    if not outlasts_power:
        os.replace(draft, path)
        return
    _synchronise(draft)
    os.replace(draft, path)
    with contextlib.suppress(OSError):  # file systems that cannot do it for a folder
        _synchronise(path.parent)


def _synchronise(path: Path) -> None:
    """Have the disk keep a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
