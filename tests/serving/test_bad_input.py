"""What people get wrong, as they would: one line that names the culprit, exit code 2, nothing overwritten or left."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dmlstudy import cli, data
from dmlstudy.files import PARQUET, check_output
from dmlstudy.serving import guards, server
from dmlstudy.serving.embed import EmbedJob, embed_into
from dmlstudy.serving.gallery import build

RefusedRequest = Callable[..., str]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> RefusedRequest:
    """Calls the command, checks that it refuses, and changes nothing below ``tmp_path``; returns what it says."""

    def call(*arguments: object) -> str:
        before = contents(tmp_path)
        monkeypatch.setattr(sys, "argv", ["dmlstudy", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capfd.readouterr().err.strip()
        assert ended.value.code == 2, said
        assert said.startswith("error: "), said
        assert said.count("\n") == 0, said
        assert contents(tmp_path) == before
        return said

    return call


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def half(path: Path, folder: Path) -> Path:
    """A copy that was broken off."""
    (folder / path.name).write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return folder / path.name


@pytest.mark.parametrize("kind", ["pictures", "paths", "vectors"])
def test_a_half_written_parquet_file_as_input(
    kind: str, models: dict[str, Path], pictures: Path, tmp_path: Path, refused: RefusedRequest
) -> None:
    files = sorted(pictures.rglob("*.png"))
    tables = {
        "pictures": {"image": [{"bytes": each.read_bytes(), "path": each.name} for each in files]},
        "paths": {"path": [str(each) for each in files]},
        "vectors": {"x": np.ones((30, 10), np.float32).tolist()},
    }
    whole = tmp_path / "whole"
    whole.mkdir()
    pq.write_table(pa.table(tables[kind]), whole / "it.parquet")
    broken = half(whole / "it.parquet", tmp_path)
    model = models["codes" if kind == "vectors" else "plain"]
    said = refused("embed", model, broken, "-o", tmp_path / "z.parquet")
    assert re.search(rf"{re.escape(str(broken))}.*not a readable", said), said


def test_inputs_that_cannot_be_used(
    models: dict[str, Path], pictures: Path, tmp_path: Path, refused: RefusedRequest
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("no image")
    table: list[tuple[str, Path, str]] = [
        ("plain", tmp_path / "empty", "empty: no images in this folder"),
        ("plain", tmp_path / "other", "other: no images in this folder"),
        ("plain", tmp_path / "nowhere", "nowhere: no such file or folder"),
        ("plain", tmp_path / "other" / "notes.txt", r"notes\.txt: not a readable image"),
        ("codes", pictures, re.escape(str(pictures))),
        ("codes", tmp_path / "other" / "notes.txt", r"notes\.txt"),
    ]
    for model, inputs, message in table:
        parts = tmp_path.parent / f"{tmp_path.name}-out"
        parts.mkdir(exist_ok=True)
        said = refused("embed", models[model], inputs, "-o", parts / "z.parquet")
        assert re.search(message, said), said
        assert not (parts / "z.parquet").exists()


def test_an_output_that_is_something_else_is_kept(
    models: dict[str, Path], pictures: Path, tmp_path: Path, refused: RefusedRequest
) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    z, gallery = tmp_path / "z.parquet", tmp_path / "gallery"
    embed_into(EmbedJob(str(models["plain"]), str(pictures), str(z), device="cpu"))
    build(z, gallery)
    for arguments in (
        ("embed", models["plain"], pictures, "-o", thesis),
        ("retrieve", models["plain"], gallery, pictures, "--sheet", thesis),
    ):
        said = refused(*arguments)
        assert re.search(r"thesis\.tex: exists already and is not a .*; name another output", said), said
    for arguments in (
        ("embed", models["plain"], pictures, "-o", tmp_path),
        ("retrieve", models["plain"], gallery, pictures, "--sheet", tmp_path),
    ):
        assert ": is a folder; name a file" in refused(*arguments)
    assert "thesis.tex: exists already" in refused("index", z, "-o", thesis)


def test_earlier_results_are_replaced(models: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    z = tmp_path / "z.parquet"
    data.write_embeddings(z, ["old"], None, np.ones((1, 2), np.float32))
    embed_into(EmbedJob(str(models["plain"]), str(pictures), str(z), device="cpu"))
    assert len(data.read_embeddings(z)[0]) == 30


def test_a_place_that_cannot_be_written(
    models: dict[str, Path], pictures: Path, refused: RefusedRequest
) -> None:
    said = refused("embed", models["plain"], pictures, "-o", "/proc/z.parquet")
    assert re.search(r"/proc/.*; see that it is there, may be used and has room", said), said
    said = refused("export", models["plain"], "--format", "torch_export", "-o", "/proc/z.pt2")
    assert "/proc/" in said


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the question is answered for it."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match=rf"{tmp_path}: cannot be written; change its permissions"):
        check_output(tmp_path / "z.parquet", "a Parquet file", PARQUET)


def test_another_model_than_the_gallery_s(
    models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path, refused: RefusedRequest
) -> None:
    z, gallery = tmp_path / "z.parquet", tmp_path / "gallery"
    embed_into(EmbedJob(str(models["plain"]), str(pictures), str(z), device="cpu"))
    build(z, gallery)
    for model, inputs in (("structure", pictures), ("learner", vectors)):  # of as many numbers, and of others
        said = refused("retrieve", models[model], gallery, inputs)
        assert "the gallery was made by another model" in said
    said = refused("serve", models["learner"], "--gallery", gallery, "--port", 0)
    assert "the gallery was made by another model" in said
    broken = shutil.copytree(models["plain"], tmp_path / "broken")
    (broken / "weights.safetensors").unlink()
    said = refused("retrieve", broken, gallery, pictures)
    assert "weights.safetensors: listed in the manifest, but missing" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["models"],
        ["pull", "m@champion", "--to", "to"],
        ["embed", "m@champion", "x.npz", "-o", "z.parquet"],
        ["retrieve", "m", "gallery", "x.png"],
        ["serve", "m", "--port", "0"],
        ["export", "m", "--format", "onnx"],
        ["promote", "m/1"],
        ["rollback", "m"],
        ["compare", "m/1", "m/2"],
        ["leaderboard", "s"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_tracking_server_that_is_away(
    arguments: list[str],
    closed_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: RefusedRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gallery").mkdir()
    address = f"http://127.0.0.1:{closed_port}"
    said = refused(*arguments, "--tracking-uri", address, "--store", tmp_path / "store")
    assert f"no MLflow server at {address}: Connection refused" in said


def test_token_files_that_hold_none(models: dict[str, Path], tmp_path: Path, refused: RefusedRequest) -> None:
    for name, content, message in (
        ("empty", b"", "empty: has no token in its first line; write one of 16 characters or more there"),
        ("blank", b" \n0123456789abcdef\n", "blank: has no token in its first line"),
        ("binary", b"\xff\xfe\x00", "binary: the token cannot be read"),
        ("short", b"12345\n", "the token has 5 characters; take 16 or more"),
    ):
        (tmp_path / name).write_bytes(content)
        said = refused("serve", models["plain"], "--token-file", tmp_path / name, "--port", 0)
        assert message in said
    said = refused("serve", models["plain"], "--token-file", tmp_path / "nowhere", "--port", 0)
    assert "nowhere: the token cannot be read" in said
    (tmp_path / "good").write_bytes(b"0123456789abcdef\r\nmore\n")
    assert guards.read_token(tmp_path / "good") == "0123456789abcdef"


def test_a_port_in_use_is_told_before_the_model_is_loaded(
    models: dict[str, Path], tmp_path: Path, refused: RefusedRequest
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused("serve", tmp_path / "no-model", "--port", port)
        assert f"--host 127.0.0.1 --port {port}: Address already in use; name another with --port" in said
        (tmp_path / "mlflow.db").touch()
        said = refused("ui", "--port", port, "--store", tmp_path)
        assert f"port {port}: Address already in use; name another with --port" in said
    for port in (70000, -1):
        said = refused("serve", models["plain"], "--port", port)
        assert f"--port {port}" in said


def test_a_place_that_is_bound_is_served(models: dict[str, Path]) -> None:
    with server.bound("localhost", 0) as place:
        assert place.getsockname()[0] in ("127.0.0.1", "::1")
        assert place.getsockname()[1] > 0
    assert place.fileno() == -1


def test_a_full_disk_is_one_line(
    models: dict[str, Path],
    pictures: Path,
    tmp_path: Path,
    refused: RefusedRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As full as a test can have it: a limit on the size of files, and a disk that is full as they are closed."""
    folder = tmp_path.parent / f"{tmp_path.name}-full"
    folder.mkdir()
    own = EmbedJob(str(models["plain"]), str(pictures), str(folder / "z.parquet"), device="cpu")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (10, 500):  # of the note beside the parts, and of a part
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                embed_into(own)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert str(caught.value.filename).startswith(f"{folder}/z.parquet.parts/")
        assert not [path for path in folder.rglob("*") if path.name.startswith(".")], "no draft stays"

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = refused("embed", models["plain"], pictures, "-o", folder / "z.parquet")
    assert "No space left on device" in said
    assert not (folder / "z.parquet").exists()


def test_what_cannot_be_embedded_is_one_line(
    models: dict[str, Path], tmp_path: Path, refused: RefusedRequest
) -> None:
    (tmp_path / "t.csv").write_text("path\n/dev/zero\n")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "large").mkdir()
    Image.new("L", (40, 30)).save(tmp_path / "large" / "a.png")
    (tmp_path / "phone").mkdir()
    for number in range(3):
        (tmp_path / "phone" / f"{number}.heix").touch()
    for inputs, further, message in (
        ("t.csv", [], "row 0: /dev/zero is not a file"),
        ("pipe.png", [], "is neither a file nor a folder"),
        ("large", ["--max-pixels", 1199], r"a\.png: 40 x 30 pixels, more than 1199; .*--max-pixels of embed"),
        ("phone", [], r"no images in this folder that are read, only 3 \.heix; convert them"),
        ("large", ["--on-corrupt", "leave"], "--on-corrupt leave: choose from error, skip"),
    ):
        out = tmp_path.parent / f"{tmp_path.name}-out"
        out.mkdir(exist_ok=True)
        said = refused("embed", models["plain"], tmp_path / inputs, "-o", out / "z.parquet", *further)
        assert re.search(message, said), said


def test_skipped_pictures_are_told_by_the_command(
    models: dict[str, Path],
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(pictures, tmp_path / "pictures")
    (folder / "class0" / "00.png").write_bytes(b"no picture")
    (folder / "class0" / "notes.txt").touch()
    z = tmp_path / "z.parquet"
    command = [
        "dmlstudy",
        "embed",
        models["plain"],
        folder,
        "-o",
        z,
        "--on-corrupt",
        "skip",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(sys, "argv", [*map(str, command)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "left out: 1 .txt"
    assert re.fullmatch(r"left out: .*class0/00\.png: not a readable image \(none of PNG.*", lines[1])
    assert lines[2] == f"29 embeddings of size 6 (24 bytes each) in {z}"
