"""The one file with a running trial's state, in a folder on a disk or on any of pyarrow's filesystems.

A folder is named by a path, or by a URI that pyarrow reads (``s3://bucket/folder?region=...``, ``gs://``,
``hdfs://``, ``abfss://``); ``file:///folder`` is the path. Whatever a filesystem refuses is an OSError.

Writing leaves the old file or the new one, whole, whenever it is killed. S3 and GCS show an object once all of it is
there. Elsewhere a draft beside the file replaces it atomically, except on HDFS, where the old file is removed first.

Only files of this name and their drafts are ever removed, and folders that hold nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from dmlstudy.files import written_whole

FILE = "trial.safetensors"

PUTS_WHOLE = ("s3", "gcs")
"""Filesystems on which an object is there whole or not at all, so that it needs no draft."""

NEEDS_NO_FOLDERS = (*PUTS_WHOLE, "abfs")
"""Filesystems on which a file needs no folder; making one there could make a bucket too."""

GCS_PATIENCE_S = 30
"""Time for which Google's client retries, instead of its 15 minutes; others give up within 2 minutes."""

CHUNK = 16 * 2**20
"""Bytes read at once, for each read is a request."""


class StateFile(Protocol):
    """A trial's state in a folder; ``place`` names it for people."""

    place: str

    def local_copy(self) -> contextlib.AbstractContextManager[Path]:
        """A local file with its content, for the time of the block; FileNotFoundError where there is none."""

    def write(self, content: bytes) -> None:
        """Put the content in its place, all or nothing; missing folders are made."""

    def remove_drafts(self) -> None:
        """Remove what processes that were killed as they wrote have left beside it."""

    def remove(self) -> None:
        """Remove the file and its drafts, here and in the folders below, and all folders that are empty then."""


def at(folder: str | Path) -> StateFile:
    """The state file in a folder, given as a path or a URI; nothing is touched yet."""
    scheme, is_uri, _ = str(folder).partition("://")
    if not is_uri:
        return OnDisk(Path(folder))
    if scheme == "file":
        return OnDisk(Path(unquote(urlsplit(str(folder)).path)))
    return OnPyarrow(str(folder))


def join(folder: str, *names: str) -> str:
    """The folder below, of a path or of a URI with or without a query."""
    path, mark, query = folder.partition("?") if "://" in folder else (folder, "", "")
    return "/".join([path.rstrip("/"), *names]) + mark + query


class OnDisk:
    """A state file in a folder of this machine, or of one that shares its disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / FILE
        self.place = str(self._path)

    @contextlib.contextmanager
    def local_copy(self) -> Iterator[Path]:
        yield self._path

    def write(self, content: bytes) -> None:
        """As in the protocol; even after a loss of power the file is there whole, or as before."""
        with written_whole(self._path, self._folder / _new_draft()) as file:
            file.write(content)

    def remove_drafts(self) -> None:
        for draft in self._folder.glob(_draft("*")):
            draft.unlink(missing_ok=True)

    def remove(self) -> None:
        for folder, _, names in os.walk(self._folder, topdown=False):
            for name in filter(_is_own, names):
                Path(folder, name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds other files
                os.rmdir(folder)


class OnPyarrow:
    """A state file in a folder that only pyarrow reaches, named by a URI."""

    def __init__(self, folder: str) -> None:
        self._uri = folder
        self.place = join(folder, FILE)

    @functools.cached_property
    def _where(self) -> tuple[Any, str]:
        """The filesystem and the folder's path in it; to find it may take requests."""
        from pyarrow import fs  # type: ignore[import-untyped]

        uri = self._uri
        if uri.startswith(("gs://", "gcs://")) and "retry_limit_seconds=" not in uri:
            uri += f"{'&' if '?' in uri else '?'}retry_limit_seconds={GCS_PATIENCE_S}"
        filesystem, path = fs.FileSystem.from_uri(uri)
        return filesystem, path.rstrip("/")

    @contextlib.contextmanager
    def local_copy(self) -> Iterator[Path]:
        with tempfile.NamedTemporaryFile() as copy:
            with _refusals():
                filesystem, folder = self._where
                with filesystem.open_input_stream(f"{folder}/{FILE}") as file:
                    shutil.copyfileobj(file, copy, CHUNK)
            copy.flush()
            yield Path(copy.name)

    def write(self, content: bytes) -> None:
        with _refusals():
            filesystem, folder = self._where
            if filesystem.type_name in PUTS_WHOLE:
                _put(filesystem, f"{folder}/{FILE}", content)
                return
            if filesystem.type_name not in NEEDS_NO_FOLDERS:
                filesystem.create_dir(folder, recursive=True)
            draft = f"{folder}/{_new_draft()}"
            try:
                _put(filesystem, draft, content)
                _replace(filesystem, draft, f"{folder}/{FILE}")
            except OSError:
                with contextlib.suppress(OSError):
                    filesystem.delete_file(draft)
                raise

    def remove_drafts(self) -> None:
        with _refusals():
            filesystem, folder = self._where
            if filesystem.type_name in PUTS_WHOLE:
                return
            from pyarrow import fs

            for info in filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True)):
                if _is_own(info.base_name) and info.base_name != FILE:
                    filesystem.delete_file(info.path)

    def remove(self) -> None:
        with _refusals():
            from pyarrow import fs

            filesystem, folder = self._where
            there = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True, recursive=True))
            files = [info for info in there if info.type != fs.FileType.Directory]
            for info in files:
                if _is_own(info.base_name):
                    with contextlib.suppress(FileNotFoundError):
                        filesystem.delete_file(info.path)
            others = [info.path for info in files if not _is_own(info.base_name)]
            folders = [info.path for info in there if info.type == fs.FileType.Directory]
            for path in sorted([folder, *folders], key=len, reverse=True):
                is_bucket = "/" not in path
                if not is_bucket and not any(other.startswith(f"{path}/") for other in others):
                    with contextlib.suppress(FileNotFoundError):
                        filesystem.delete_dir(path)


def _put(filesystem: Any, path: str, content: bytes) -> None:
    with filesystem.open_output_stream(path) as file:
        file.write(content)


def _replace(filesystem: Any, draft: str, path: str) -> None:
    """Move the draft, or copy it where nothing can be moved: on Azure without a hierarchical namespace."""
    try:
        filesystem.move(draft, path)
    except NotImplementedError:
        filesystem.copy_file(draft, path)
        filesystem.delete_file(draft)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Let pyarrow's own errors be OSErrors, as most of them are."""
    import pyarrow

    try:
        yield
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from None


def _draft(mark: str) -> str:
    return f".{FILE}.{mark}.draft"


def _new_draft() -> str:
    return _draft(uuid.uuid4().hex)


def _is_own(name: str) -> bool:
    return name == FILE or (name.startswith(f".{FILE}.") and name.endswith(".draft"))
