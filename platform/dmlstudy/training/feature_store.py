"""Matrices that are computed once on a machine and then read by every process, as files in the cache folder.

``$XDG_CACHE_HOME/dmlstudy/features/<key>/`` (default ``~/.cache``) holds one matrix: ``features.npy``, mapped into
memory, and ``manifest.json`` with what the key was made of, the shape and the SHA-256 of each block of rows. Any of
these folders may be deleted at any time; what is needed again is computed again. Only this user can read them.

Shapes: N rows, F numbers in each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from dmlstudy.files import FileState, cache_folder, reserve, too_little_room
from dmlstudy.heartbeat import beat
from dmlstudy.model_folder import JSON

Matrix: TypeAlias = NDArray[np.floating[Any]]

BLOCK = 65_536
"""Rows that one digest is of."""

WAIT_S = 0.1
MATRIX, MANIFEST = "features.npy", "manifest.json"
FOLDER_MODE, FILE_MODE = 0o700, 0o600

_checked: dict[Path, FileState] = {}
"""Files whose blocks this process has checked already."""


def key_of(parts: Mapping[str, JSON]) -> str:
    """The SHA-256 (hex) of what a matrix is a function of."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def kept(
    parts: Mapping[str, JSON],
    num_rows: int,
    compute: Callable[[], Iterator[Matrix]],
    *,
    folder: Path | None = None,
) -> Matrix:
    """The matrix that ``parts`` stand for, mapped into memory; read-only.

    It is computed, in pieces in the order of its rows, if it is not there whole. Of several processes that ask at once
    one computes; the others wait, and each sign of its progress is theirs too (``beat``). If it is killed, one of them
    takes over.

    Raises ValueError where the disk has no room or the folder cannot be written, and whatever ``compute`` raises.
    """
    folder = folder or cache_folder() / "features"
    key = key_of(parts)
    place, lock = folder / key, FileLock(folder / f"{key}.lock", mode=FILE_MODE)
    with _in_words(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    seen = 0
    while True:
        found = _opened(place, parts, num_rows)
        if found is not None:
            return found
        try:
            with _in_words(folder):
                lock.acquire(blocking=False)
        except Timeout:
            time.sleep(WAIT_S)
            now = _touched_ns(Path(lock.lock_file))
            if now != seen:
                beat()
            seen = now
            continue
        try:
            found = _opened(place, parts, num_rows)
            if found is None:
                _write(place, parts, num_rows, compute, Path(lock.lock_file))
        finally:
            lock.release()


@contextlib.contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Have an error of the disk name its place and what may be done."""
    try:
        yield
    except Timeout:
        raise
    except OSError as error:
        raise ValueError(
            f"training.feature_cache: {path} cannot be written ({error.strerror or error}); mend that, point"
            " XDG_CACHE_HOME elsewhere, or set it to off"
        ) from error


def _touched_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _opened(place: Path, parts: Mapping[str, JSON], num_rows: int) -> Matrix | None:
    """The matrix in a folder; None where it is not there, not whole or of something else."""
    path = place / MATRIX
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        look = FileState.at(path)
        matrix_NF: Matrix = np.load(path, mmap_mode="r", allow_pickle=False)
        is_whole = manifest["parts"] == parts and matrix_NF.shape == (num_rows, manifest["num_features"])
        if is_whole and _checked.get(path) != look:
            is_whole = _digests(matrix_NF) == manifest["blocks"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not is_whole:
        return None
    _checked[path] = look
    return matrix_NF


def _digests(matrix_NF: Matrix) -> list[str]:
    found = []
    for start in range(0, len(matrix_NF), BLOCK):
        beat()
        found.append(hashlib.sha256(np.ascontiguousarray(matrix_NF[start : start + BLOCK]).data).hexdigest())
    return found


def _write(
    place: Path,
    parts: Mapping[str, JSON],
    num_rows: int,
    compute: Callable[[], Iterator[Matrix]],
    lock: Path,
) -> None:
    """Compute the matrix into a draft, which takes its name when it is whole; the lock is held.

    The lock file changes with each piece, by which those who wait see that it goes on.
    """
    draft = place.with_name(f"{place.name}.draft")
    for old in (draft, place):  # of a process that was killed; torn, or of another form
        _remove(old)
    try:
        matrix_NF, start = None, 0
        for piece_BF in compute():
            if matrix_NF is None:
                matrix_NF = _begun(draft, num_rows, piece_BF)
            matrix_NF[start : start + len(piece_BF)] = piece_BF
            start += len(piece_BF)
            with contextlib.suppress(FileNotFoundError):  # the cache may be deleted at any time
                os.utime(lock)
            beat()
        assert matrix_NF is not None
        assert start == num_rows
        manifest = {"parts": parts, "num_features": matrix_NF.shape[1], "blocks": _digests(matrix_NF)}
        with _in_words(place):
            matrix_NF.flush()
            (draft / MANIFEST).touch(mode=FILE_MODE)
            (draft / MANIFEST).write_text(f"{json.dumps(manifest, indent=1)}\n", encoding="utf-8")
            del matrix_NF
            os.replace(draft, place)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(draft)
        raise


def _remove(old: Path) -> None:
    """Remove the folder of an earlier attempt; raises ValueError for anything else, which is not ours."""
    if old.is_symlink() or (old.exists() and not old.is_dir()):
        raise ValueError(
            f"training.feature_cache: {old} is in the way of a folder of features; remove it, or set it to off"
        )
    with _in_words(old), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(old)


def _begun(draft: Path, num_rows: int, piece_BF: Matrix) -> np.memmap[Any, Any]:
    """A matrix for so many rows like the piece's, with room on the disk for all: a page without it is a SIGBUS."""
    _check_room(draft.parent, num_rows * math.prod(piece_BF.shape[1:]) * piece_BF.dtype.itemsize)
    path, shape = draft / MATRIX, (num_rows, *piece_BF.shape[1:])
    with _in_words(draft.parent):
        draft.mkdir(mode=FOLDER_MODE)
        path.touch(mode=FILE_MODE)
        matrix_NF = np.lib.format.open_memmap(path, "w+", piece_BF.dtype, shape)
        with path.open("r+b") as file:
            reserve(file, path.stat().st_size)
    return matrix_NF


def _check_room(folder: Path, num_bytes: int) -> None:
    free = too_little_room(folder, num_bytes)
    if free is not None:
        raise ValueError(
            f"training.feature_cache: the features take {num_bytes / 2**30:.1f} GiB and {folder} has"
            f" {free / 2**30:.1f} GiB free; free some room, point XDG_CACHE_HOME elsewhere, or set it to off"
        )
