"""Tar shards: the same set as its folder, byte for byte; indexes; what is refused."""

from __future__ import annotations

import io
import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data import pictures
from dmlstudy.data import shards as subject

RNG = np.random.default_rng(0)


def png(number: int) -> bytes:
    sink = io.BytesIO()
    pixels_HWC = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels_HWC).save(sink, "PNG")
    return sink.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def sample(number: int, label: object, **fields: object) -> list[tuple[str, bytes]]:
    told = {"label": label, "caption": "a < b", **fields}
    sidecar = (f"s{number:03}.json", json.dumps(told).encode())
    if not fields and isinstance(label, int):
        sidecar = (f"s{number:03}.cls", str(label).encode())
    return [(f"s{number:03}.png", png(number)), sidecar]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def indexes(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "dmlstudy" / "shards").glob("*.parquet"))


def write_set(folder: Path) -> list[tuple[int, int]]:
    """Eight classes of four pictures in three shards, beside a folder of the same; class 10 comes after class 9."""
    labels = np.repeat([3, 4, 5, 6, 7, 8, 9, 10], 4)
    rows = [(number, int(labels[number])) for number in RNG.permutation(32)]
    for shard in range(3):
        own = rows[shard::3]
        write_tar(
            folder / "tar" / f"part-{shard}.tar", [m for number, label in own for m in sample(number, label)]
        )
    for number, label in rows:
        place = folder / "folders" / f"{label:02}" / f"s{number:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(png(number))
    return [row for shard in range(3) for row in rows[shard::3]]


@pytest.mark.parametrize("is_lazy", [False, True])
def test_pictures_classes_and_batches_are_those_of_a_folder(
    is_lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_lazy:
        monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", 0)
    order = write_set(tmp_path)
    found = data.load("shards", str(tmp_path / "tar"))
    same = data.load("image_folder", str(tmp_path / "folders"))
    assert found.development.class_names == ("3", "4", "5", "6")
    assert found.test.class_names == ("7", "8", "9", "10")
    for side, other in ((found.development, same.development), (found.test, same.test)):
        assert sorted(side.content_hashes()) == sorted(other.content_hashes())
        own = [number for number, label in order if str(label) in side.class_names]
        for row, number in enumerate(own):
            with Image.open(io.BytesIO(png(number))) as picture:
                np.testing.assert_array_equal(side.read(np.array([row]))[0], np.asarray(picture))
    labels_N = found.development.labels_N
    once, again = (
        [batch.tolist() for batch in data.PKBatches(labels_N, 2, 3, seed=5).epoch(1)] for _ in range(2)
    )
    assert once == again
    assert data.load("shards", str(tmp_path / "tar")).development_fingerprint == found.development_fingerprint
    assert found.places is not None
    assert found.places(0).startswith(f"{tmp_path / 'tar' / 'part-0.tar'}, row ")


def test_same_order_has_the_fingerprint_of_a_table_of_files(tmp_path: Path) -> None:
    members, lines = [], ["label,path"]
    for number in range(16):
        members += sample(number, number // 2)
        (tmp_path / f"s{number}.png").write_bytes(png(number))
        lines.append(f"{number // 2},s{number}.png")
    write_tar(tmp_path / "tars" / "a.tar", members)
    (tmp_path / "t.csv").write_text("\n".join(lines))
    found, table = data.load("shards", str(tmp_path / "tars")), data.load("table", str(tmp_path / "t.csv"))
    assert found.development_fingerprint == table.development_fingerprint
    assert found.test_fingerprint == table.test_fingerprint
    assert data.files_digest(found, str(tmp_path / "tars"))


@pytest.mark.parametrize(
    "names",
    [
        ("set-train-000.tar", "set-train-001.tar", "set-val-000.tar"),
        ("train/0.tar", "train/1.tar", "test/0.tar"),
    ],
)
def test_sides_are_told_by_names_or_folders(names: tuple[str, ...], tmp_path: Path) -> None:
    for place, name in enumerate(names):
        rows = range(8 * place, 8 * place + 8)
        write_tar(tmp_path / name, [m for number in rows for m in sample(number, f"c{number // 4}", x=1)])
    found = data.load("shards", str(tmp_path))
    assert found.development.class_names == ("c0", "c1", "c2", "c3")
    assert found.test.class_names == ("c4", "c5")


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_in_folders_and_other_members_of_all_formats(kind: int, tmp_path: Path) -> None:
    long = "/".join(["f" * 40] * (2 if kind == tarfile.USTAR_FORMAT else 5))
    members = [("__info__.json", b"{}"), ("._a.png", b"mac"), ("readme", b"x")]
    for number in range(8):
        members += [(f"{long}/k{number}.png", png(number)), (f"{long}/k{number}.txt", b"a caption")]
        members += [(f"{long}/k{number}.cls", str(number // 2).encode())]
    write_tar(tmp_path / "t" / "a b <i>.tar", members, kind)
    found = data.load("shards", str(tmp_path / "t"))
    assert (len(found.development), len(found.test)) == (4, 4)
    assert found.places is not None
    assert found.places(0) == f"{tmp_path}/t/a b <i>.tar, row 0 ({long}/k0.png)"


def test_index_is_made_once_and_again_when_a_shard_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path)
    scanned: list[str] = []
    whole = subject.scan
    monkeypatch.setattr(subject, "scan", lambda path: (scanned.append(path.name), whole(path))[1])
    before = data.load("shards", str(tmp_path / "tar"))
    assert scanned == ["part-0.tar", "part-1.tar", "part-2.tar"]
    data.load("shards", str(tmp_path / "tar"))
    assert len(scanned) == len(indexes(tmp_path)) == 3
    write_tar(tmp_path / "tar" / "part-1.tar", sample(40, 3) + sample(41, 9))
    after = data.load("shards", str(tmp_path / "tar"))
    assert scanned[3:] == ["part-1.tar"]
    assert len(indexes(tmp_path)) == 3  # the former one is gone
    assert len(after.development) + len(after.test) < len(before.development) + len(before.test)
    indexes(tmp_path)[0].write_bytes(b"PAR1 damaged")
    data.load("shards", str(tmp_path / "tar"))
    assert len(scanned) == 5


def test_a_shard_that_changes_under_a_reader_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", 0)
    write_set(tmp_path)
    found = data.load("shards", str(tmp_path / "tar"))
    for shard in (tmp_path / "tar").iterdir():
        os.utime(shard, ns=(1, 1))
    with pytest.raises(ValueError, match=r"part-\d.tar: changed since its pictures were listed; start again"):
        found.test.read(np.array([0]))


def test_readers_that_begin_together_have_one_index(tmp_path: Path) -> None:
    write_set(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: data.load("shards", str(tmp_path / "tar")), range(4)))
    assert len({each.development_fingerprint for each in found}) == 1
    assert len(indexes(tmp_path)) == 3


REFUSED: dict[str, tuple[list[tuple[str, bytes]], str]] = {
    "no label": ([("a.png", png(0))], r"s.tar: sample a has no label; add a.cls, or label or class"),
    "empty label": ([("a.png", png(0)), ("a.cls", b" ")], "sample a has no label"),
    "no picture": (
        [("a.png", png(0)), ("a.cls", b"1"), ("b.cls", b"1")],
        "sample b has a label and no picture",
    ),
    "nothing": ([("a.txt", b"x")], "s.tar: no pictures in this shard"),
    "two pictures": ([("a.png", png(0)), ("a.jpg", png(1))], "has two pictures, a.png and a.jpg; keep one"),
    "two labels": ([("a.png", png(0)), ("a.cls", b"1"), ("a.cls", b"2")], "a.cls is there twice"),
    "no JSON": ([("a.png", png(0)), ("a.json", b"{")], "a.json is no JSON \\("),
    "JSON of a list": ([("a.png", png(0)), ("a.json", b"[]")], "a.json is no JSON object"),
    "no text": ([("a.png", png(0)), ("a.cls", b"\xff\xfe")], "a.cls is no text in UTF-8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_shard_that_is_not_clear_is_refused_by_name(case: str, tmp_path: Path) -> None:
    members, message = REFUSED[case]
    write_tar(tmp_path / "t" / "s.tar", members)
    with pytest.raises(ValueError, match=message) as caught:
        data.load("shards", str(tmp_path / "t"))
    assert "\n" not in str(caught.value)
    assert not indexes(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 100, 512, 700, 1024, 2048, 3000])
def test_a_shard_that_is_cut_off_anywhere_is_refused(num_bytes: int, tmp_path: Path) -> None:
    write_tar(tmp_path / "t" / "s.tar", [m for number in range(8) for m in sample(number, number // 2)])
    shard = tmp_path / "t" / "s.tar"
    shard.write_bytes(shard.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"s.tar: (not a readable .tar|damaged or cut off)"):
        data.load("shards", str(tmp_path / "t"))


def test_links_compressed_and_missing_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no .tar shards"):
        data.load("shards", str(tmp_path))
    (tmp_path / "a.tar.gz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a.tar.gz: a compressed shard"):
        data.load("shards", str(tmp_path))
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        link = tarfile.TarInfo("a.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(ValueError, match=r"train.tar: a.png is a link"):
        data.load("shards", str(tmp_path))
    write_tar(tmp_path / "other.tar", sample(0, 0))
    with pytest.raises(ValueError, match=r"other.tar: says neither train nor test, but train.tar does"):
        data.load("shards", str(tmp_path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot be written or read .*; set XDG_CACHE_HOME"):
        data.load("shards", str(tmp_path / "tar"))
