"""The folder that a model is pulled into: made beside its place and put there whole.

A draft is locked by who makes it, for as long as its process lives; what a killed one has left is removed by the
next to put something there.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dmlstudy.files import is_held
from dmlstudy.model_folder import MANIFEST
from dmlstudy.saved import KINDS, is_model
from dmlstudy.store import StoreError

PREFIX = ".pull-"

LOCK, CONTENT = "lock", "content"

UNLOCKED_S = 86400.0
"""A draft without a lock, of an earlier version or one that is just begun, is left alone for a day."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux's renameat2."""


def check_place(to: Path, *, replace: bool) -> None:
    """Raise StoreError unless ``to`` is missing, an empty folder, or with ``replace`` the folder of a model alone."""
    if not to.exists() and not to.is_symlink():
        return
    if to.is_dir() and not to.is_symlink() and not any(to.iterdir()):
        return
    if not replace:
        raise StoreError(
            f"{to}: exists already; name a new folder with --to, or replace a model with --force"
        )
    if to.is_symlink() or not to.is_dir() or not is_model(to):
        raise StoreError(
            f"{to}: is not the folder of a model, and --force replaces no other; name a new one with --to"
        )
    further = sorted(_files(to) - _listed(to))
    if further:
        raise StoreError(
            f"{to / further[0]}: no file of the model there; move it away before --force, or name a new folder"
        )


@contextmanager
def draft(to: Path) -> Iterator[Path]:
    """A folder beside ``to`` that is removed in the end, and by the next draft there if this process is killed."""
    _remove_left(to.parent)
    with (
        tempfile.TemporaryDirectory(dir=to.parent, prefix=PREFIX) as folder,
        open(Path(folder) / LOCK, "w", encoding="utf-8") as file,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        content = Path(folder) / CONTENT
        content.mkdir()
        yield content


def put(folder: Path, to: Path, *, replace: bool) -> None:
    """Put a folder at its place in one step; one that it replaces is left where it was itself."""
    if replace and to.exists() and any(to.iterdir()):
        _exchange(folder, to)
        return
    with suppress(FileNotFoundError):
        to.rmdir()
    os.replace(folder, to)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change places: at once where Linux can, else with an instant in which ``other`` is missing."""
    with suppress(OSError, AttributeError):
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
            return
    aside = one.with_name(f"{one.name}.replaced")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise


def _remove_left(parent: Path) -> None:
    """Remove the drafts of processes that are gone."""
    for left in parent.glob(f"{PREFIX}*"):
        if is_left(left):
            shutil.rmtree(left, ignore_errors=True)


def is_left(folder: Path) -> bool:
    """True of a draft whose maker is gone: a folder of that name with nothing in it that no draft has."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    try:
        if {each.name for each in folder.iterdir()} - {LOCK, CONTENT}:
            return False
        if (folder / LOCK).exists():
            return not is_held(folder / LOCK)
        return time.time() - folder.stat().st_mtime > UNLOCKED_S
    except OSError:  # it went away, or may not be looked into
        return False


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def _listed(folder: Path) -> set[str]:
    """The files that belong to the model in a folder, also where its manifest is gone or damaged."""
    known = {MANIFEST, *KINDS}
    with suppress(OSError, ValueError, TypeError):
        return known | set(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    return known
