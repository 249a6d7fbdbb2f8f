"""What a model is used on: every origin gives the same items, part by part, and faults are named."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data.images import Fit
from dmlstudy.data.inputs import Inputs


def picture(seed: int, shape: tuple[int, ...] = (6, 6)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of two grey pictures, one of them in colour."""
    for number, name in enumerate(("a/0", "a/1", "b/0", "b/1")):
        path = tmp_path / "folder" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, (6, 6, 3) if name == "b/1" else (6, 6)).save(path)
    return tmp_path / "folder"


def whole(inputs: Inputs) -> np.ndarray:
    """All items, after they were read in unequal parts too."""
    read = inputs.read(range(len(inputs)))
    cuts = [0, 1, len(inputs)]
    parts = [inputs.read(range(*cut)) for cut in itertools.pairwise(cuts) if cut[0] < cut[1]]
    np.testing.assert_array_equal(np.concatenate(parts), read)
    return read


def test_a_folder_an_image_and_a_flat_folder(folder: Path) -> None:
    found = data.open_images(folder, Fit(), 3)
    assert (found.ids, found.labels) == (["a/0.png", "a/1.png", "b/0.png", "b/1.png"], ["a", "a", "b", "b"])
    read = whole(found)
    assert read.shape == (4, 6, 6, 3)
    np.testing.assert_array_equal(read[0, ..., 2], np.asarray(picture(0)))
    np.testing.assert_array_equal(read[3], np.asarray(picture(3, (6, 6, 3))))
    flat = data.open_images(folder / "a", Fit(5), 1)
    assert (flat.ids, flat.labels, whole(flat).shape) == (["0.png", "1.png"], None, (2, 5, 5, 1))
    alone = data.open_images(folder / "a" / "1.png", Fit(), 1)
    assert (alone.ids, alone.labels) == (["1.png"], None)
    np.testing.assert_array_equal(alone.read(range(1))[0, ..., 0], np.asarray(picture(1)))


def test_arrays(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (3, 7, 6), dtype=np.uint8)
    np.save(tmp_path / "x.npy", array)
    found = data.open_images(tmp_path / "x.npy", Fit(), 3)
    assert (found.ids, found.labels, whole(found).shape) == (["0", "1", "2"], None, (3, 7, 6, 3))
    np.savez(tmp_path / "x.npz", images=array, ids=np.array(["p", "q", "r"]), labels=np.array([4, 5, 4]))
    found = data.open_images(tmp_path / "x.npz", Fit(9), 1)
    assert (found.ids, found.labels, whole(found).shape) == (["p", "q", "r"], ["4", "5", "4"], (3, 9, 9, 1))


def test_parquet_of_pictures(folder: Path, tmp_path: Path) -> None:
    rows = [{"bytes": path.read_bytes(), "path": path.name} for path in sorted(folder.glob("a/*.png"))]
    pq.write_table(pa.table({"image": rows}), tmp_path / "x.parquet")
    found = data.open_images(tmp_path / "x.parquet", Fit(), 1)
    assert (found.ids, found.labels) == (["0.png", "1.png"], None)
    np.testing.assert_array_equal(whole(found), data.open_images(folder / "a", Fit(), 1).read(range(2)))
    pq.write_table(pa.table({"image": rows, "label": [7, 5]}), tmp_path / "y.parquet")
    assert data.open_images(tmp_path / "y.parquet", Fit(), 1).labels == ["7", "5"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_names_files_of_its_folder(kind: str, folder: Path) -> None:
    columns = {"path": ["b/1.png", "a/0.png"], "label": ["7", "x"], "id": ["one", "two"]}
    table = folder / f"table.{kind}"
    if kind == "csv":
        rows = zip(*columns.values(), strict=True)
        table.write_text("\n".join([",".join(columns), *(",".join(row) for row in rows)]) + "\n")
    else:
        pq.write_table(pa.table(columns), table)
    found = data.open_images(table, Fit(), 3)
    assert (found.ids, found.labels) == (["one", "two"], ["7", "x"])
    np.testing.assert_array_equal(whole(found)[1, ..., 0], np.asarray(picture(0)))


def test_vectors_with_and_without_labels(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    found = data.open_vectors(tmp_path / "x.npz", 4)
    assert (found.ids, found.labels) == (["0", "1", "2", "3", "4"], None)
    np.testing.assert_array_equal(whole(found), x)
    data.write_embeddings(tmp_path / "z.parquet", list("abcde"), list("vwxyz"), x)
    found = data.open_vectors(tmp_path / "z.parquet", 4)
    assert (found.ids, found.labels) == (list("abcde"), list("vwxyz"))
    np.testing.assert_array_equal(whole(found), x)
    with pytest.raises(ValueError, match=r"x\.npz: vectors of size 4; the model takes 3"):
        data.open_vectors(tmp_path / "x.npz", 3)


def test_an_item_that_changed_has_another_key_and_the_others_keep_theirs(folder: Path) -> None:
    def keys() -> list[str]:
        return list(data.open_images(folder, Fit(), 1).keys())

    before = keys()
    assert keys() == before
    time.sleep(0.01)
    picture(9).save(folder / "a" / "0.png")
    changed = keys()
    assert changed[0] != before[0]
    assert changed[1:] == before[1:]
    (folder / "a" / "1.png").rename(folder / "a" / "2.png")
    assert keys()[1] != before[1]
    (folder / "a" / "0.png").unlink()
    assert keys()[1:] == before[2:]


def test_a_table_with_faults_is_refused(folder: Path) -> None:
    for text, message in (
        ("file\na/0.png\n", "no column path; it has file"),
        ("path,label\na/0.png,x\n,y\n", "row 1 has no path"),
    ):
        (folder / "t.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            data.open_images(folder / "t.csv", Fit(), 1)
    (folder / "t.csv").write_text("path\na/9.png\n")
    with pytest.raises(ValueError, match=r"a/9\.png: not readable \(No such file"):
        data.open_images(folder / "t.csv", Fit(), 1).read(range(1))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 4, 4), np.float32), "dtype float32, expected uint8"),
        (np.zeros((2, 3, 8, 8), np.uint8), "expected NHW or NHWC"),
        (np.zeros((8, 8), np.uint8), "expected NHW or NHWC"),
        (np.zeros((0, 8, 8), np.uint8), "N > 0"),
    ],
)
def test_arrays_of_another_kind_are_refused(array: np.ndarray, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match=message):
        data.open_images(tmp_path / "x.npy", Fit(), 1)


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        data.open_images(tmp_path / "none", Fit(), 1)
    (tmp_path / "p.tar.GZ").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"p\.tar\.GZ: is an archive; unpack it and name its folder"):
        data.open_images(tmp_path / "p.tar.GZ", Fit(), 1)
    (tmp_path / "p.tar.GZ").unlink()
    with pytest.raises(ValueError, match="no images in this folder"):
        data.open_images(tmp_path, Fit(), 1)
    (tmp_path / "x.npy").write_bytes(b"junk")
    with pytest.raises(ValueError, match="not a readable NumPy file"):
        data.open_images(tmp_path / "x.npy", Fit(), 1)
    np.save(tmp_path / "o.npy", np.array([{"code": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="not a readable NumPy file"):
        data.open_images(tmp_path / "o.npy", Fit(), 1)
    np.savez(tmp_path / "x.npz", images=np.zeros((3, 4, 4), np.uint8), ids=np.array(["a"]))
    with pytest.raises(ValueError, match="1 ids for 3 images"):
        data.open_images(tmp_path / "x.npz", Fit(), 1)
