"""The file of a trial's state: one suite for a folder, for pyarrow's filesystem on a disk, and for a server of S3."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyarrow import fs

from dmlstudy.data import state_file
from dmlstudy.data.state_file import FILE, OnDisk, OnPyarrow, StateFile, at, join

DRAFT = f".{FILE}.0123.draft"


class Place(NamedTuple):
    """Somewhere to keep states: what makes them there, the names of folders, and all files, however they came."""

    kind: str
    folder: Callable[[str], str]
    filesystem: Any
    root: str

    def state(self, name: str) -> StateFile:
        made: StateFile = getattr(state_file, self.kind)(self.folder(name))
        return made

    def files(self) -> list[str]:
        there = self.filesystem.get_file_info(
            fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        )
        return sorted(info.path.removeprefix(f"{self.root}/") for info in there if info.is_file)

    def folders(self) -> list[str]:
        there = self.filesystem.get_file_info(fs.FileSelector(self.root, recursive=True))
        return sorted(info.path.removeprefix(f"{self.root}/") for info in there if not info.is_file)

    def plant(self, *paths: str) -> None:
        for path in paths:
            if not isinstance(self.filesystem, fs.S3FileSystem):
                self.filesystem.create_dir(f"{self.root}/{path}".rpartition("/")[0])
            with self.filesystem.open_output_stream(f"{self.root}/{path}") as file:
                file.write(b"planted")


@pytest.fixture(params=["path", "file", "pyarrow", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        return Place("at", server.uri, server.filesystem(), server.bucket)
    (tmp_path / "a root").mkdir()

    def folder(name: str) -> str:
        path = tmp_path / "a root" / name
        return str(path) if request.param == "path" else path.as_uri()

    kind = "OnPyarrow" if request.param == "pyarrow" else "at"
    return Place(kind, folder, fs.LocalFileSystem(), str(tmp_path / "a root"))


def content(state: StateFile) -> bytes:
    with state.local_copy() as copy:
        return copy.read_bytes()


def test_a_place_is_reached_as_it_is_named(tmp_path: Path) -> None:
    for named in (tmp_path, str(tmp_path), tmp_path.as_uri()):
        assert isinstance(at(named), OnDisk)
        assert at(named).place == str(tmp_path / FILE)
    assert isinstance(at("s3://bucket/folder"), OnPyarrow)
    assert at("s3://bucket/folder?region=x").place == f"s3://bucket/folder/{FILE}?region=x"


@pytest.mark.parametrize(
    ("folder", "below"),
    [
        ("/mnt/states", "/mnt/states/a/b"),
        ("/mnt/what?/", "/mnt/what?/a/b"),
        ("s3://bucket", "s3://bucket/a/b"),
        ("s3://bucket/folder/?scheme=http&region=x/y", "s3://bucket/folder/a/b?scheme=http&region=x/y"),
        ("file:///mnt", "file:///mnt/a/b"),
        ("hdfs:///states", "hdfs:///states/a/b"),
        (
            "abfss://container@account.dfs.core.windows.net/x",
            "abfss://container@account.dfs.core.windows.net/x/a/b",
        ),
    ],
)
def test_a_folder_below(folder: str, below: str) -> None:
    assert join(folder, "a", "b") == below


def test_what_is_written_comes_back(place: Place) -> None:
    state = place.state("study/trial")
    with pytest.raises(FileNotFoundError):
        content(state)
    large = random.Random(0).randbytes(2 * state_file.CHUNK + 1)  # more than one part of an upload
    for written in (b"first", b"", large, b"last"):
        state.write(written)
        assert content(place.state("study/trial")) == written
        assert place.files() == [f"study/trial/{FILE}"]
    with pytest.raises(FileNotFoundError):
        content(place.state("study"))


def test_what_is_removed_is_ones_own(place: Place) -> None:
    for name in ("study/one", "study/two", "study/three", "study/one-more", "other/one"):
        place.state(name).write(b"state")
    place.plant(
        f"study/two/{DRAFT}",
        "study/three/notes",
        f"study/three/{FILE}.old",
        "elsewhere/notes",
        "study/two-more/notes",
    )
    foreign = [
        "elsewhere/notes",
        f"other/one/{FILE}",
        "study/three/notes",
        f"study/three/{FILE}.old",
        "study/two-more/notes",
    ]
    place.state("study/one").remove()
    assert not any(name.startswith("study/one/") for name in place.files())
    assert f"study/one-more/{FILE}" in place.files()
    place.state("study").remove()
    assert place.files() == sorted(foreign)
    assert place.folders() == ["elsewhere", "other", "other/one", "study", "study/three", "study/two-more"]
    place.state("study").remove()
    place.state("never").remove()
    assert place.files() == sorted(foreign)
    assert "never" not in place.folders()


def test_a_draft_is_cleared_away_and_the_state_stays(place: Place) -> None:
    place.state("trial").write(b"state")
    if isinstance(place.filesystem, fs.S3FileSystem):
        place.state("trial").remove_drafts()  # there are none
        assert place.files() == [f"trial/{FILE}"]
        return
    place.plant(f"trial/{DRAFT}", "trial/.notes.draft", f"trial/below/{DRAFT}")
    place.state("trial").remove_drafts()
    place.state("never").remove_drafts()
    assert place.files() == ["trial/.notes.draft", f"trial/below/{DRAFT}", f"trial/{FILE}"]
    assert content(place.state("trial")) == b"state"


def test_a_write_that_fails_leaves_the_state_before(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    state = place.state("trial")
    state.write(b"before")
    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(state_file, "_replace", full)
    if isinstance(place.filesystem, fs.S3FileSystem):
        monkeypatch.setattr(state_file, "_put", full)
    with pytest.raises(OSError, match="No space left"):
        state.write(b"after")
    assert place.files() == [f"trial/{FILE}"]
    assert content(state) == b"before"


def test_killed_as_it_writes_it_leaves_one_whole_state(place: Place) -> None:
    size = 3 * 2**20
    script = (
        f"from dmlstudy.data import state_file\nstate = state_file.{place.kind}({place.folder('trial')!r})\n"
        f"for number in range(10**6):\n    state.write(bytes([number % 256]) * {size})\n    print(flush=True)"
    )
    moments = random.Random(time.time_ns())
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            time.sleep(moments.uniform(0, 0.2))
        finally:
            process.kill()
            process.communicate()
        found = content(place.state("trial"))
        assert len(found) == size
        assert len(set(found)) == 1
    place.state("trial").remove_drafts()
    assert place.files() == [f"trial/{FILE}"]


def test_where_nothing_can_be_moved_it_is_copied(tmp_path: Path) -> None:
    """As on Azure without a hierarchical namespace."""

    class Immovable:
        copy_file, delete_file = (
            getattr(fs.LocalFileSystem(), name) for name in ("copy_file", "delete_file")
        )

        def move(self, source: str, target: str) -> None:
            raise NotImplementedError

    for name in ("draft", "state"):
        (tmp_path / name).write_text(name)
    state_file._replace(Immovable(), str(tmp_path / "draft"), str(tmp_path / "state"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("state", "draft")]


def test_without_its_bucket_nothing_is_kept_and_none_is_made(s3: Any) -> None:
    state = at(s3.uri("trial", bucket="no-such"))
    with pytest.raises(FileNotFoundError):
        content(state)
    with pytest.raises(OSError, match="NO_SUCH_BUCKET"):
        state.write(b"state")
    assert [info.path for info in s3.filesystem().get_file_info(fs.FileSelector(""))].count("no-such") == 0


@pytest.mark.parametrize("uri", ["s3://bucket/a?colour=red", "hdfs://none:1/a", "sftp://host/a"])
def test_what_pyarrow_refuses_is_an_os_error(uri: str) -> None:
    for act in (lambda: at(uri).write(b""), lambda: content(at(uri)), at(uri).remove, at(uri).remove_drafts):
        with pytest.raises(OSError, match=r"."):
            act()


def test_google_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "GCS_PATIENCE_S", 1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        query = f"scheme=http&endpoint_override=127.0.0.1:{closed.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(OSError, match="Retry policy exhausted"):
            at(f"gs://anonymous@bucket/trial?{query}").write(b"state")
        assert time.monotonic() - started < 60
