"""Pictures decoded on demand are those in memory; memory stays flat; damaged ones are named or left out."""

from __future__ import annotations

import io
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data import Augmentation, Loader, parquet, pictures
from dmlstudy.data.images import Fit


def encoded(seed: int, height: int = 12, width: int = 17) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def as_folder(folder: Path) -> tuple[str, str]:
    for number in range(24):
        path = folder / "set" / f"class{number % 6}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number))
    return "image_folder", str(folder / "set")


def as_parquet(folder: Path) -> tuple[str, str]:
    rows = [{"img": {"bytes": encoded(i), "path": None}, "label": i % 6} for i in range(24)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "set.parquet", row_group_size=5)
    return "hf_parquet", str(folder / "set.parquet")


@pytest.fixture(params=[as_folder, as_parquet, "mapped"])
def origin(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    if request.param == "mapped":
        monkeypatch.setattr(parquet, "IN_MEMORY_BYTES", 0)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return as_parquet(tmp_path)
    make: Callable[[Path], tuple[str, str]] = request.param
    return make(tmp_path)


def test_lazy_images_are_those_in_memory(origin: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = data.load(*origin, 8)
    assert isinstance(kept.test, data.ImageSet)
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", 0)
    lazy = data.load(*origin, 8)
    augmentation = Augmentation("random_resized", flip=0.5)
    for one, other in ((kept.development, lazy.development), (kept.test, lazy.test)):
        assert isinstance(other, data.LazyImages)
        assert (one.image_shape, one.class_names, len(one)) == (
            other.image_shape,
            other.class_names,
            len(other),
        )
        np.testing.assert_array_equal(one.labels_N, other.labels_N)
        some = np.array([5, 0, 5, 11])
        chosen = [images.of_classes([2, 0]).select(np.array([7, 1, 3])) for images in (one, other)]
        np.testing.assert_array_equal(chosen[0].labels_N, chosen[1].labels_N)
        for first, second, indices in ((one, other, some), (*chosen, np.arange(3))):
            np.testing.assert_array_equal(first.read(indices), second.read(indices))

            def views(index: int) -> Any:
                return augmentation.random_view(1, 2, index)

            np.testing.assert_array_equal(first.read(indices, views), second.read(indices, views))


def test_lazy_fingerprint_sees_contents_labels_and_sizes(
    origin: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", 0)
    found = data.load(*origin, 8)
    whole = found.development
    seen = {
        whole.fingerprint(),
        found.test.fingerprint(),
        data.load(*origin, 9).development.fingerprint(),
        data.load(*origin, 8, 9).development.fingerprint(),
        data.load(*origin, 8, 9, False).development.fingerprint(),
        whole.of_classes([1, 0, 2]).fingerprint(),
        whole.select(np.arange(11)).fingerprint(),
        whole.select(np.arange(12)[::-1]).fingerprint(),
    }
    assert len(seen) == 8
    assert data.load(*origin, 8).development.fingerprint() == whole.fingerprint()
    assert found.num_shared_images == 0


def test_shared_pictures_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", 0)
    _, folder = as_folder(tmp_path)
    for number in (3, 4):
        (Path(folder) / f"class{number}" / "copy.png").write_bytes(encoded(0))
    assert data.load("image_folder", folder, 8).num_shared_images == 2


def test_a_mapped_file_is_made_once_and_anew_for_other_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "IN_MEMORY_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, path = as_parquet(tmp_path)
    table = parquet.PictureTable([Path(path)])
    assert [table.encoded(i) for i in (23, 0, 5)] == [encoded(23), encoded(0), encoded(5)]
    (kept,) = (tmp_path / "cache" / "dmlstudy").glob("*.arrow")
    made = kept.stat().st_mtime_ns
    parquet.PictureTable([Path(path)])
    assert kept.stat().st_mtime_ns == made
    pq.write_table(pq.read_table(path).slice(0, 6), path)
    assert len(parquet.PictureTable([Path(path)])) == 6
    kept.write_bytes(b"ARROW1")
    as_parquet(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "set.parquet"))
    with pytest.raises(
        ValueError, match=r"cannot be written or read .*set XDG_CACHE_HOME to a folder with room"
    ):
        parquet.PictureTable([Path(path)])


def test_a_mapped_file_is_written_once_by_whoever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks, also of other hosts with the same process ids, wait for it; what killed writers left is removed."""
    monkeypatch.setattr(parquet, "IN_MEMORY_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "dmlstudy"
    folder.mkdir(parents=True)
    (folder / ".0123.arrow.4711.draft").write_bytes(b"half")
    _, path = as_parquet(tmp_path)
    drafts, together, write = [], threading.Barrier(4), pa.ipc.new_file

    def new_file(sink: Any, schema: Any) -> Any:
        drafts.extend(folder.glob(".*.draft"))
        time.sleep(0.05)
        return write(sink, schema)

    def read() -> bytes:
        together.wait()
        return parquet.PictureTable([Path(path)]).encoded(7)

    monkeypatch.setattr(pa.ipc, "new_file", new_file)
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(4)]
        assert [reader.result() for reader in readers] == [encoded(7)] * 4
    assert len(drafts) == 1
    assert not list(folder.glob(".*.draft"))


def test_memory_does_not_grow_with_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = as_folder(tmp_path)
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", 0)
    found = data.load("image_folder", folder, 64).development  # 12 KiB each once decoded
    peaks = []
    for rounds in (6, 40):  # with 6 as many batches are ahead at once as with 40
        batches = [np.arange(12)] * rounds
        tracemalloc.start()
        assert sum(len(images) for images in Loader(found, threads=2).epoch(batches)) == 12 * rounds
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] + 2**18
    assert peaks[1] < 40 * 12 * 64 * 64 * 3 / 4


@pytest.mark.parametrize("keep_aspect", [True, False])
def test_evaluation_sees_the_centre_of_what_resizing_leaves(keep_aspect: bool, tmp_path: Path) -> None:
    _, folder = as_folder(tmp_path)
    found = data.load("image_folder", folder, 8, 10, keep_aspect)
    assert isinstance(found.development, data.LazyImages)
    with Image.open(io.BytesIO(encoded(0))) as picture:  # 12 x 17
        resized = picture.resize((14 if keep_aspect else 10, 10), Image.Resampling.BILINEAR)
    left = 3 if keep_aspect else 1
    np.testing.assert_array_equal(
        found.development.read(np.arange(1))[0], np.asarray(resized)[1:9, left : left + 8]
    )


def test_sizes_that_contradict_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = as_folder(tmp_path)
    for size in (None, 11):
        with pytest.raises(ValueError, match=r"data\.resize_to: 10 .*set data\.image_size to at most 10"):
            data.load("image_folder", folder, size, 10)
    with pytest.raises(ValueError, match=r"digits has images of one size.*augmentation\.padding"):
        data.load("digits", None, 8, 10)
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", 0)
    (Path(folder) / "class0" / "0.png").write_bytes(encoded(0, 9, 9))
    with pytest.raises(ValueError, match=r"image is \(12, 17\), the first one is \(9, 9\).*data\.image_size"):
        data.load("image_folder", folder).development.read(np.arange(3))


def break_one(origin: tuple[str, str]) -> str:
    """Damage the fourth picture; returns what names it."""
    kind, path = origin
    if kind == "image_folder":
        broken = Path(path) / "class3" / "3.png"
        broken.write_bytes(broken.read_bytes()[:100])
        return r"class3/3\.png"
    rows = pq.read_table(path).to_pylist()
    rows[3]["img"]["bytes"] = rows[3]["img"]["bytes"][:100]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
    return r"set\.parquet, row 3"


def test_a_damaged_picture_is_named_as_it_is_read(
    origin: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = break_one(origin)
    line = (
        rf"{place}: not a readable image .*; repair or remove it, or leave it out by data\.on_corrupt: skip$"
    )
    with pytest.raises(ValueError, match=line):
        data.load(*origin, 8)
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", 0)
    found = data.load(*origin, 8)
    assert len(found.test) == 12
    batches = [np.array([4, 5]), np.arange(12), np.array([4])]
    reading = Loader(found.test, threads=2).epoch(batches)
    assert next(reading).shape == (2, 8, 8, 3)
    with pytest.raises(ValueError, match=line):
        next(reading)


@pytest.mark.parametrize("limit", [0, 2**30])
def test_damaged_pictures_are_left_out_and_counted(
    limit: int, origin: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", limit)
    whole = data.load(*origin, 8, on_corrupt="skip")
    assert whole.num_damaged == 0
    before = whole.test.read(np.arange(12))
    kept = np.delete(np.arange(12), 2 if origin[0] == "image_folder" else 0)  # files go by their names
    break_one(origin)
    found = data.load(*origin, 8, on_corrupt="skip")
    assert found.num_damaged == 1
    assert found.damaged == (
        14 if origin[0] == "image_folder" else 12,
    )  # of 12 development and 12 test pictures
    assert (len(found.development), len(found.test)) == (12, 11)
    np.testing.assert_array_equal(found.test.read(np.arange(11)), before[kept])
    np.testing.assert_array_equal(found.test.labels_N, whole.test.labels_N[kept])


def test_only_what_cannot_be_decoded_counts_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture that one machine cannot read, or of an unknown range, is never left out: that would change the data."""
    _, folder = as_folder(tmp_path)
    lost, read = Path(folder) / "class3" / "3.png", Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path == lost:
            raise OSError(5, "Input/output error")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_bytes)
        for on_corrupt in ("skip", "error"):
            with pytest.raises(ValueError, match=r"class3/3\.png: not readable \(Input/output error\)"):
                data.load("image_folder", folder, 8, on_corrupt=on_corrupt)
    Image.fromarray(np.full((4, 4), 7.5, np.float32)).save(lost.with_suffix(".tif"))
    with pytest.raises(
        ValueError, match=r"class3/3\.tif: floating-point pixels from 7\.5 to 7\.5; scale them"
    ):
        data.load("image_folder", folder, 8, on_corrupt="skip")


def test_queries_stay_queries_where_pictures_are_left_out(tmp_path: Path) -> None:
    _, folder = as_folder(tmp_path)
    lines = ["label,path,split,is_query,is_gallery"]
    for i in range(24):
        side = "train" if i % 6 < 3 else "test"
        lines.append(f"{i % 6},set/class{i % 6}/{i}.png,{side},{i % 6 > 2 and i < 12},{i % 6 > 2 and i >= 8}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    whole = data.load("table", str(tmp_path / "t.csv"), 8)
    (Path(folder) / "class4" / "4.png").write_bytes(b"")
    found = data.load("table", str(tmp_path / "t.csv"), 8, on_corrupt="skip")
    assert found.num_damaged == 1

    def contents(which: data.ZeroShotData, indices: Any) -> list[bytes]:
        return [image.tobytes() for image in which.test.read(indices)]

    lost = whole.test.read(np.array([1]))[0].tobytes()
    assert contents(found, found.test_query) == [c for c in contents(whole, whole.test_query) if c != lost]
    assert contents(found, found.test_gallery) == contents(whole, whole.test_gallery)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_loader_gives_every_batch_in_order(threads: int, tmp_path: Path) -> None:
    _, folder = as_folder(tmp_path)
    images = data.load("image_folder", folder, 8).development
    batches = [np.random.default_rng(i).integers(0, 12, 1 + i % 7) for i in range(20)] + [np.arange(0)]
    loader = Loader(images, threads=threads)
    for read, batch in zip(loader.epoch(batches), batches, strict=True):
        np.testing.assert_array_equal(read, images.read(batch))
    rates = loader.rates
    assert rates.images_per_second > 0
    assert rates.waited_seconds > 0
    broken_off = loader.epoch(iter(batches))
    next(broken_off)
    broken_off.close()  # type: ignore[attr-defined]


def test_pictures_to_embed_are_seen_as_in_evaluation(tmp_path: Path) -> None:
    _, folder = as_folder(tmp_path)
    for resize_to, keep_aspect in ((None, True), (10, True), (10, False)):
        found = data.load("image_folder", folder, 8, resize_to, keep_aspect)
        path = Path(folder) / "class0"
        images_NHWC = data.open_images(path, Fit(8, resize_to, keep_aspect), 3).read(range(4))
        np.testing.assert_array_equal(images_NHWC, found.development.read(np.arange(4)))


def test_fit_leaves_a_picture_of_the_right_size_alone() -> None:
    picture = Image.new("RGB", (10, 14))
    assert Fit(8, 10).canvas(picture) is picture
    assert Fit().canvas(picture) is picture
