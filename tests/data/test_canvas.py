"""Canvases: what is read is bit for bit what decoding gives; files made once, whole or not at all."""

from __future__ import annotations

import gc
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data import Augmentation, LazyImages, Loader, canvas
from dmlstudy.records import DataConfig

VIEWS = {
    "evaluation": None,
    "random_resized": Augmentation("random_resized", flip=0.5),
    "random": Augmentation("random", flip=0.5),
    "padded": Augmentation("random", padding=3),
    "flip": Augmentation(flip=1.0),
    "ops": Augmentation("random_resized", jitter=0.4, rotate=10, erase=0.5, fill=(9, 9, 9)),
}


def encoded(number: int) -> bytes:
    """JPEGs of several shapes, some turned by EXIF; grey and transparent PNGs."""
    rng = np.random.default_rng(number)
    height, width = [(40, 50), (64, 33), (30, 30), (51, 70)][number % 4]
    coarse = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    picture, buffer = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR), io.BytesIO()
    if number % 5 == 3:
        picture.convert("L").save(buffer, "png")
    elif number % 5 == 4:
        picture.putalpha(Image.fromarray(rng.integers(0, 256, (height, width), dtype=np.uint8)))
        picture.save(buffer, "png")
    else:
        exif = Image.Exif()
        exif[0x0112] = [1, 6, 3][number % 3]
        picture.save(buffer, "jpeg", exif=exif)
    return buffer.getvalue()


def as_folder(folder: Path) -> tuple[str, str]:
    for number in range(40):
        path = folder / "set" / f"class{number % 4}" / f"{number}.img.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number))
    return "image_folder", str(folder / "set")


def as_parquet(folder: Path) -> tuple[str, str]:
    rows = [{"img": {"bytes": encoded(i), "path": None}, "label": i % 4} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "set.parquet")
    return "hf_parquet", str(folder / "set.parquet")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(canvas, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(data.pictures, "IN_MEMORY_BYTES", 0)


def files(tmp_path: Path) -> list[Path]:
    """Canvases and drafts, wherever they are."""
    return sorted([*tmp_path.rglob("*.canvas"), *tmp_path.rglob(".*.draft")])


def loaded(origin: tuple[str, str], size: int = 24, resize_to: int | None = 28, **further: Any) -> LazyImages:
    found = data.load(*origin, size, resize_to, **further).development
    assert isinstance(found, LazyImages)
    return found


def opened(images: LazyImages) -> LazyImages:
    data.prepare(images)
    assert images.canvas is not None
    assert images.canvas.read(int(images.row_N[0])) is not None
    return images


@pytest.mark.parametrize("make", [as_folder, as_parquet])
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_what_is_seen_is_what_decoding_gives(make: Callable[..., Any], kind: str, tmp_path: Path) -> None:
    origin = make(tmp_path)
    for size, resize_to, keep_aspect in ((24, 28, True), (24, 28, False), (24, None, True)):
        decoded = loaded(origin, size, resize_to, keep_aspect=keep_aspect)
        kept = opened(loaded(origin, size, resize_to, keep_aspect=keep_aspect, canvas=kind))
        assert kept.fingerprint() == decoded.fingerprint()
        everything = np.arange(len(kept))[::-1]
        for name, augmentation in VIEWS.items():
            if name == "random" and resize_to is None:
                continue
            of_one, of_other = (
                next(Loader(images, augmentation, 1, 2).epoch([everything], 3)) for images in (decoded, kept)
            )
            np.testing.assert_array_equal(of_one, of_other, err_msg=name)
        chosen = kept.of_classes([1, 0]).select(np.array([3, 1]))
        assert chosen.canvas is kept.canvas
        np.testing.assert_array_equal(
            chosen.read(np.arange(2)), decoded.of_classes([1, 0]).select(np.array([3, 1])).read(np.arange(2))
        )


def test_pictures_are_decoded_once_by_one_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = as_folder(tmp_path)
    decoded: list[int] = []
    several = [loaded(origin, canvas="disk") for _ in range(4)]
    for images in several:
        assert images.canvas is not None
        slow = images.canvas.decoder.pixels

        def pixels(row: int, slow: Callable[[int], Any] = slow) -> Any:
            decoded.append(row)
            time.sleep(0.005)
            return slow(row)

        images.canvas.decoder = images.canvas.decoder._replace(pixels=pixels)
    threads = [threading.Thread(target=data.prepare, args=(images,)) for images in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(decoded) == sorted(several[0].row_N.tolist())
    assert len(files(tmp_path)) == 1
    data.prepare(several[0])  # once more
    opened(loaded(origin, canvas="disk"))
    assert len(files(tmp_path)) == 1
    monkeypatch.setattr(data.pictures, "opened", None)  # nothing is decoded any more
    opened(several[1]).read(np.arange(20))


def test_other_pictures_sizes_or_versions_are_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = as_folder(tmp_path)

    def key(**settings: Any) -> str:
        of = loaded(origin, **{"canvas": "disk", **settings}).canvas
        assert of is not None
        return of.decoder.key()

    first = key()
    assert key() == first == key(canvas="memory")
    keys = {first, key(resize_to=29), key(size=25), key(keep_aspect=False), key(background="black")}
    keys.add(key(orientation="as_stored"))
    with monkeypatch.context() as patch:
        patch.setattr(PIL, "__version__", "0.0")
        keys.add(key())
    (Path(origin[1]) / "class0" / "0.img.png").write_bytes(encoded(41))
    keys.add(key())
    assert len(keys) == 8


def test_a_torn_file_is_made_again_and_changed_pixels_are_not_used(tmp_path: Path) -> None:
    origin = as_folder(tmp_path)
    expected = loaded(origin).read(np.arange(20))
    opened(loaded(origin, canvas="disk"))
    gc.collect()
    (path,) = files(tmp_path)
    whole = path.read_bytes()

    def altered(position: int) -> bytes:
        return whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]

    for torn in (whole[:-1], whole[: canvas.PAGE], b"", whole + b"0", altered(3), altered(canvas.PAGE + 9)):
        path.write_bytes(torn)
        np.testing.assert_array_equal(opened(loaded(origin, canvas="disk")).read(np.arange(20)), expected)
        assert path.read_bytes() == whole
    path.write_bytes(altered(len(whole) - 1))
    with_fault = loaded(origin, canvas="disk")
    data.prepare(with_fault)
    assert with_fault.canvas is not None
    assert [with_fault.canvas.read(row) is None for row in with_fault.canvas.row_N.tolist()] == [
        False
    ] * 19 + [True]
    np.testing.assert_array_equal(with_fault.read(np.arange(20)), expected)


def test_where_there_is_no_room_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = as_folder(tmp_path)
    of = loaded(origin, canvas="disk").canvas
    assert of is not None
    num_bytes = sum(of.decoder.num_bytes(row) for row in of.row_N.tolist()) + 2 * canvas.PAGE
    usage = type(shutil.disk_usage("/"))
    refused = r"^data\.canvas: disk needs .* GiB for 20 pictures and .* free; [^\n]*$"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage(10**12, 0, int(1.09 * num_bytes)))
        with pytest.raises(ValueError, match=refused):
            data.prepare(loaded(origin, canvas="disk"))
        assert files(tmp_path) == []
        patch.setattr(shutil, "disk_usage", lambda folder: usage(10**12, 0, int(1.11 * num_bytes)))
        opened(loaded(origin, canvas="disk"))
    with pytest.raises(
        ValueError, match=r"^data\.canvas: memory .*more than data\.canvas_gib: 1e-06; [^\n]*disk$"
    ):
        data.prepare(loaded(origin, canvas="memory", canvas_gib=1e-6))


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = as_folder(tmp_path)
    with monkeypatch.context() as patch:

        def full(*arguments: Any) -> int:
            raise OSError(28, os.strerror(28))

        patch.setattr(os, "pwrite", full)
        with pytest.raises(
            ValueError, match=r"^data\.canvas: .*\(No space left on device\); make room[^\n]*$"
        ):
            data.prepare(loaded(origin, canvas="disk"))
    assert files(tmp_path) == []
    left = tmp_path / "cache" / "dmlstudy" / "canvases" / ".of-a-killed-process.canvas.draft"
    left.write_bytes(b"half")
    opened(loaded(origin, canvas="disk"))
    assert not left.exists()


def test_a_damaged_picture_is_an_error_where_it_is_read(tmp_path: Path) -> None:
    origin = as_folder(tmp_path)
    path = Path(origin[1]) / "class0" / "12.img.png"
    for content in (encoded(12)[:-300], b"nothing"):
        path.write_bytes(content)
        errors = []
        for kind in ("none", "disk"):
            images = loaded(origin, canvas=kind)
            data.prepare(images)
            number = next(i for i in range(20) if images.pictures.place(int(images.row_N[i])) == str(path))
            images.read(np.delete(np.arange(20), number))
            with pytest.raises(data.DamagedImage, match=r"12\.img\.png") as caught:
                images.read(np.array([number]))
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


def test_memory_is_given_back_by_the_last_one_or_after_it_was_killed(tmp_path: Path) -> None:
    origin = as_folder(tmp_path)
    first, second = (opened(loaded(origin, canvas="memory")) for _ in range(2))
    assert len(files(tmp_path)) == 1
    seen = first.read(np.arange(3))
    data.remove_unused()
    del first
    gc.collect()
    assert len(files(tmp_path)) == 1
    np.testing.assert_array_equal(second.read(np.arange(3)), seen)
    del second
    gc.collect()
    assert files(tmp_path) == []
    path = tmp_path / "shm" / f"dmlstudy-{os.getuid()}" / "of-another.canvas"
    hold = f"import fcntl, time; f = open({str(path)!r}, 'wb'); fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{hold}; time.sleep(600)"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        data.remove_unused()
        assert path.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        data.remove_unused()
    assert not path.exists()


@pytest.mark.parametrize("what", ["link", "open to others"])
def test_a_folder_that_others_may_have_made_is_left_alone(tmp_path: Path, what: str) -> None:
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    (precious / "mine.canvas").write_text("kept")
    place = tmp_path / "shm" / f"dmlstudy-{os.getuid()}"
    place.parent.mkdir(exist_ok=True)
    if what == "link":
        place.symlink_to(precious)
    else:
        precious.rename(place)
        place.chmod(0o777)
    data.remove_unused()
    assert (place / "mine.canvas").read_text() == "kept"
    with pytest.raises(ValueError, match=r"^data\.canvas: .* is not a folder of this user alone[^\n]*disk$"):
        data.prepare(loaded(as_folder(tmp_path), canvas="memory"))
    assert (place / "mine.canvas").read_text() == "kept"


def test_fingerprints_do_not_say_how_pictures_are_kept() -> None:
    plain = DataConfig(name="cub200", path="/data")
    assert "canvas" not in plain.model_dump()
    assert DataConfig(name="cub200", path="/data", canvas="disk").model_dump() == {
        **plain.model_dump(),
        "canvas": "disk",
    }


def test_a_canvas_is_refused_where_it_has_no_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data\.canvas: of a closed set .* leave it out$"):
        data.load_closed("digits", canvas="disk")
    with pytest.raises(ValueError, match=r"^data\.canvas: features are vectors.* leave it out$"):
        data.load("features", str(tmp_path), canvas="disk")
    with pytest.raises(ValueError, match=r"^data\.canvas: 'ram', choose from none, memory, disk$"):
        data.load(*as_folder(tmp_path), 24, canvas="ram")  # type: ignore[arg-type]
