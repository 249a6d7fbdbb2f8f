"""Files of results: where one may go, and how it is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PARQUET, HTML, ZIP = b"PAR1", b"<!doctype html", b"PK\x03\x04"
"""First bytes of files of results."""

_temporary: set[str] = set()


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder that is deleted when the block ends, or by ``remove_temporary_folders``."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _temporary.add(folder)
        try:
            yield folder
        finally:
            _temporary.discard(folder)


def remove_temporary_folders() -> None:
    """Delete what ``temporary_folder`` has made and not yet deleted, where a process ends in the middle of a block."""
    for folder in list(_temporary):
        shutil.rmtree(folder, ignore_errors=True)


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
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(begins)).lower() != begins.lower():
                raise ValueError(f"{path}: exists already and is not {what}; name another output")
    return path


@contextlib.contextmanager
def written_whole(path: Path, draft: Path) -> Iterator[IO[bytes]]:
    """A file that takes its place when the block ends, whole, also after a loss of power; if the block raises, never.

    ``draft``, in the same folder, is what it is called until then; the folder is made if missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError) and error.filename is None and error.errno:  # as of a full disk
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
