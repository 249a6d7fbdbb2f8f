"""Closed sets: training and test rows of the same classes, pictures of several concepts, and vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data import PartSize, layouts
from dmlstudy.data import seen_classes as closed_sets

RNG = np.random.default_rng(0)


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(path)


def test_a_closed_set_has_all_classes_on_both_sides() -> None:
    closed = data.load_closed("digits")
    assert (len(closed.development), len(closed.test)) == (1438, 359)
    assert set(closed.development.labels_N) == set(closed.test.labels_N) == set(range(10))
    assert closed.num_shared_between_folds == 0


def test_rows_that_come_twice_may_be_on_both_sides_of_a_fold() -> None:
    closed = data.load_closed("digits")
    twice = closed.development.select(np.array([0, 1, 2, 0, 3, 0, 2]))
    assert data.ClosedSet("x", twice, closed.test).num_shared_between_folds == 5


def test_the_fingerprint_of_a_side_sees_its_concepts() -> None:
    closed = data.load_closed("digits")
    assert closed.development_fingerprint == closed.development.fingerprint()
    assert closed.test_fingerprint == closed.test.fingerprint()

    def with_concepts(num_first: int) -> data.ClosedSet:
        shows = [RNG.random((len(side), 4)) < 0.5 for side in (closed.development, closed.test)]
        shows[0][0, :], shows[1][0, :] = np.arange(4) < num_first, True
        return data.ClosedSet("x", closed.development, closed.test, (shows[0], shows[1]))

    one, other = with_concepts(1), with_concepts(2)
    assert len({closed.test_fingerprint, one.test_fingerprint, other.test_fingerprint}) == 3
    assert one.development_fingerprint != other.development_fingerprint
    same = data.ClosedSet("y", closed.development, closed.test, one.concepts)
    assert same.development_fingerprint == one.development_fingerprint
    assert same.test_fingerprint == one.test_fingerprint


def test_an_image_folder_is_a_closed_set_if_its_classes_are_the_same(tmp_path: Path) -> None:
    for side, classes in (("train", "abc"), ("test", "ca")):
        for name in classes:
            for number in range(3):
                picture(tmp_path / side / name / f"{number}.png")
    closed = data.load_closed("image_folder", str(tmp_path))
    assert closed.development.class_names == ("a", "b", "c")
    assert [closed.test.class_names[label] for label in closed.test.labels_N] == list("aaaccc")
    (tmp_path / "test" / "a").rename(tmp_path / "test" / "z")
    with pytest.raises(ValueError, match="1 test classes that are not trained on, as 'z'"):
        data.load_closed("image_folder", str(tmp_path))


def test_an_image_folder_without_its_sides_is_refused(tmp_path: Path) -> None:
    for name in "abc":
        picture(tmp_path / name / "0.png")
    with pytest.raises(ValueError, match=r"has no folder train; a closed set needs train and test"):
        data.load_closed("image_folder", str(tmp_path))
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=r"has no folder test; a closed set needs train and test"):
        data.load_closed("image_folder", str(tmp_path))


@pytest.mark.parametrize("load", [data.load, data.load_closed])
def test_sizes_that_do_not_go_with_the_data_are_refused(load: Callable[..., Any], tmp_path: Path) -> None:
    for side, classes in (("train", "abcd"), ("test", "abcd")):
        for name in classes:
            picture(tmp_path / side / name / "0.png")
    for image_size in (6, None):
        with pytest.raises(ValueError, match=r"data\.resize_to: 3 pixels.*set data\.image_size to at most 3"):
            load("image_folder", str(tmp_path), image_size, 3)
    assert load("image_folder", str(tmp_path), 3, 5).test.image_shape == (3, 3, 3)
    for name in ("digits", "mnist"):
        for image_size in (8, None):
            with pytest.raises(
                ValueError, match=rf"data\.resize_to: {name} has images of one size; leave it out"
            ):
                load(name, str(tmp_path), image_size, 10)
    for sizes, key in (((8, None), "image_size"), ((None, 8), "resize_to")):
        with pytest.raises(ValueError, match=rf"data\.{key}: features are vectors, which have no side"):
            load("features", str(tmp_path), *sizes)


def test_counts_of_known_sets_are_checked(tmp_path: Path) -> None:
    small = {"cifar10": {"training": PartSize(3, 6), "test": PartSize(3, 3)}}
    for side, repeats in (("train", 2), ("test", 1)):
        for name in "abc":
            for number in range(repeats):
                picture(tmp_path / side / name / f"{number}.png")
        rows = [
            {"img": {"bytes": path.read_bytes(), "path": None}, "label": "abc".index(path.parent.name)}
            for path in sorted((tmp_path / side).glob("*/*.png"))
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{side}.parquet")
    assert len(data.load_closed("cifar10", str(tmp_path), expected=small).development) == 6
    with pytest.raises(
        ValueError, match="cifar10 has 10 training classes with 50000 images, this folder 3 with 6; unpack"
    ):
        data.load_closed("cifar10", str(tmp_path))
    wrong = {"cifar10": small["cifar10"] | {"test": PartSize(3, 4)}}
    with pytest.raises(ValueError, match="cifar10 has 3 test classes with 4 images, this folder 3 with 3"):
        data.load_closed("cifar10", str(tmp_path), expected=wrong)


def test_counts_of_torchvision_s_own_files_are_checked(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for side, count in (("train", 30), ("t10k", 10)):
        pixels = np.zeros((count, 28, 28), np.uint8)
        for what, magic, content in (
            ("images-idx3", 0x803, pixels),
            ("labels-idx1", 0x801, np.arange(count) % 10),
        ):
            header = np.array([magic, *content.shape], ">i4").tobytes()
            (raw / f"{side}-{what}-ubyte").write_bytes(header + content.astype(np.uint8).tobytes())
    small = {"fashion_mnist": {"training": PartSize(10, 30), "test": PartSize(10, 10)}}
    assert len(data.load_closed("fashion_mnist", str(tmp_path), expected=small).test) == 10
    with pytest.raises(ValueError, match="10 training classes with 60000 images, this folder 10 with 30"):
        data.load_closed("fashion_mnist", str(tmp_path))


def few_queries(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    few = {name: (layout, num) for name, (layout, _) in closed_sets.CONCEPTS.items()}
    monkeypatch.setattr(closed_sets, "CONCEPTS", few)


def flickr(folder: Path) -> None:
    for number in range(1, 13):
        picture(folder / "mirflickr" / f"im{number}.jpg")
    notes = folder / "mirflickr25k_annotations_v080"
    notes.mkdir()
    (notes / "animals.txt").write_text("\n".join(map(str, range(1, 7))) + "\n")
    (notes / "sky.txt").write_text("\n".join(map(str, range(4, 12))) + "\n")
    (notes / "sky_r1.txt").write_text("4\n")
    (notes / "README.txt").write_text("about the annotations")


def test_flickr25k_has_several_concepts_per_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flickr(tmp_path)
    whole = layouts.flickr25k(tmp_path)
    assert whole.names == ("animals", "sky")
    assert whole.paths[3].name == "im4.jpg"
    assert whole.shows_NL[3].tolist() == [True, True]
    assert whole.shows_NL[11].tolist() == [False, False]
    few_queries(monkeypatch, 3)
    expected = {"flickr25k": {layouts.CONCEPTS: PartSize(2, 12)}}
    found = data.load_closed("flickr25k", str(tmp_path), expected=expected)
    assert (len(found.development), len(found.test)) == (8, 3)  # one shows nothing
    development, test = found.relevance
    assert (development.shape, test.shape) == ((8, 2), (3, 2))
    assert np.concatenate([development, test]).sum() == 6 + 8
    again = data.load_closed("flickr25k", str(tmp_path), expected=expected)
    np.testing.assert_array_equal(again.relevance[1], test)
    few_queries(monkeypatch, 11)
    with pytest.raises(ValueError, match="flickr25k has 11 pictures with a concept; needs over 11"):
        data.load_closed("flickr25k", str(tmp_path), expected=expected)
    with pytest.raises(
        ValueError,
        match="flickr25k has 24 concepts with 25000 images, this folder 2 with 12; unpack the archive",
    ):
        data.load_closed("flickr25k", str(tmp_path))


def test_flickr25k_without_its_parts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"im1\.jpg"):
        layouts.flickr25k(tmp_path)
    flickr(tmp_path)
    notes = tmp_path / "mirflickr25k_annotations_v080"
    (notes / "sea.txt").write_text("99\n")
    with pytest.raises(
        ValueError, match=r"lists picture im99.jpg in sea.txt, which is not there, with 0 more"
    ):
        layouts.flickr25k(tmp_path)
    (notes / "sea.txt").write_text("none\n")
    with pytest.raises(ValueError, match=r"sea.txt: not a list of picture numbers"):
        layouts.flickr25k(tmp_path)


def nuswide(folder: Path) -> None:
    names = [f"sky\\\\{number:04d}.jpg".replace("\\\\", "\\") for number in range(8)]
    for name in names:
        picture(folder / "Flickr" / name.replace("\\", "/"))
    (folder / "ImageList").mkdir()
    (folder / "ImageList" / "Imagelist.txt").write_text("\n".join(names) + "\n")
    labels = folder / "Groundtruth" / "AllLabels"
    labels.mkdir(parents=True)
    for concept in range(23):  # concept c is shown by as many pictures as it has number, at most 6
        shown = [int(number < min(concept, 6)) for number in range(8)]
        (labels / f"Labels_c{concept:02d}.txt").write_text("\n".join(map(str, shown)) + "\n")


def test_nuswide21_takes_the_most_frequent_concepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nuswide(tmp_path)
    whole = layouts.nuswide21(tmp_path)
    assert whole.names == tuple(f"c{concept:02d}" for concept in range(2, 23))
    assert [path.name for path in whole.paths] == [f"{number:04d}.jpg" for number in range(6)]
    assert whole.shows_NL[:, 0].tolist() == [True, True, False, False, False, False]
    few_queries(monkeypatch, 2)
    expected = {"nuswide21": {layouts.CONCEPTS: PartSize(21, 6)}}
    found = data.load_closed("nuswide21", str(tmp_path), expected=expected)
    assert (len(found.development), len(found.test)) == (4, 2)
    with pytest.raises(
        ValueError, match="nuswide21 has 21 concepts with 195834 images, this folder 21 with 6;"
    ):
        data.load_closed("nuswide21", str(tmp_path))
    (tmp_path / "Flickr" / "sky" / "0002.jpg").unlink()
    with pytest.raises(ValueError, match=r"0002.jpg: nuswide21 lists this picture, which is not there"):
        layouts.nuswide21(tmp_path)
    (tmp_path / "Groundtruth" / "AllLabels" / "Labels_c05.txt").write_text("1\n0\n")
    with pytest.raises(ValueError, match="2 labels of 'c05' for 8 pictures"):
        layouts.nuswide21(tmp_path)
    with pytest.raises(ValueError, match=r"Imagelist.txt"):
        layouts.nuswide21(tmp_path / "Flickr")


def test_matrices_are_zero_shot_data_and_closed_sets(tmp_path: Path) -> None:
    x, y = RNG.normal(size=(12, 5)).astype(np.float32), np.repeat(np.arange(4), 3)
    np.savez(tmp_path / "all.npz", x=x, y=y)
    whole = data.load("features", str(tmp_path / "all.npz"))
    assert whole.development.image_shape == (5,)
    assert (len(whole.development), len(whole.test)) == (6, 6)
    np.testing.assert_array_equal(whole.test.read(np.array([1])), x[7:8])
    np.savez(tmp_path / "train.npz", x=x[y < 2], y=y[y < 2])
    np.savez(tmp_path / "test.npz", x=x[y >= 2], y=y[y >= 2])
    apart = data.load("features", str(tmp_path))
    assert apart.test.class_names == ("2", "3")
    assert apart.test.fingerprint() == whole.test.fingerprint()
    with pytest.raises(ValueError, match="2 test classes that are not trained on, as '2'"):
        data.load_closed("features", str(tmp_path))
    np.savez(tmp_path / "test.npz", x=x[y < 2][:, :4], y=y[y < 2])
    with pytest.raises(ValueError, match="5 training and 4 test features"):
        data.load_closed("features", str(tmp_path))
    (tmp_path / "test.npz").unlink()
    with pytest.raises(ValueError, match=r"needs one of test.npz and test.parquet"):
        data.load("features", str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.image_size: features are vectors"):
        data.load("features", str(tmp_path / "all.npz"), image_size=8)
    with pytest.raises(ValueError, match="no closed set 'omniglot'"):
        data.load_closed("omniglot", str(tmp_path))
