"""What people are told of their data: files that are not taken, classes of one image, a picture under two labels."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data import pictures


def picture_set(folder: Path, sizes: dict[str, int], seed: int = 0) -> Path:
    """Classes with so many pictures each, all different."""
    rng = np.random.default_rng(seed)
    for name, size in sizes.items():
        (folder / name).mkdir(parents=True)
        for number in range(size):
            pixels = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def told(folder: Path, **named: object) -> list[str]:
    return data.remarks(data.load("image_folder", str(folder), 8, **named), str(folder))  # type: ignore[arg-type]


def test_of_a_set_as_it_should_be_nothing_is_told(tmp_path: Path) -> None:
    assert told(picture_set(tmp_path, dict.fromkeys("abcdefgh", 2))) == []
    digits = data.load("digits")
    assert data.remarks(digits, None) == []


def test_files_that_are_not_taken_are_counted_by_kind(tmp_path: Path) -> None:
    picture_set(tmp_path, dict.fromkeys("abcd", 2))
    for name in ("a/1.HEIX", "a/2.heix", "b/notes.txt", "b/deep/Makefile", ".hidden/x.txt", "c/.x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert told(tmp_path) == ["left out: 2 .heix, 1 without a suffix, 1 .txt"]
    for number in range(12):
        (tmp_path / "a" / f"x.{number}").touch()
    (line,) = told(tmp_path)
    assert line.startswith("left out: 2 .heix, 1 without a suffix, 1 .0, ")
    assert line.endswith(", 7 of other kinds")


def test_pictures_beside_the_class_folders_are_told(tmp_path: Path) -> None:
    picture_set(tmp_path, dict.fromkeys("abcd", 2))
    shutil.copy(tmp_path / "a" / "0.png", tmp_path / "loose.png")
    (tmp_path / "labels.csv").touch()
    assert told(tmp_path) == [f"left out: 1 pictures beside the class folders, as {tmp_path / 'loose.png'}"]


def test_a_name_is_no_command_to_the_terminal(tmp_path: Path) -> None:
    picture_set(tmp_path, dict.fromkeys("abcd", 2))
    shutil.copy(tmp_path / "a" / "0.png", tmp_path / "\x1b[31mred\nerror: all is lost.png")
    (line,) = told(tmp_path)
    assert line.endswith(r"/\x1b[31mred error: all is lost.png")


def test_of_train_and_test_what_lies_beside_them_is_told(tmp_path: Path) -> None:
    for seed, (side, names) in enumerate((("train", "abcd"), ("test", "efgh"), ("val", "ij"))):
        picture_set(tmp_path / side, dict.fromkeys(names, 2), seed)
    Image.new("RGB", (9, 9)).save(tmp_path / "train" / "loose.png")
    (tmp_path / "test" / "e" / "a.txt").touch()
    assert told(tmp_path) == [
        "left out: 1 .txt",
        f"left out: 1 pictures beside the class folders, as {tmp_path / 'train' / 'loose.png'}",
        "left out: what is in val beside train and test",
    ]


def test_hidden_files_are_no_pictures(tmp_path: Path) -> None:
    picture_set(tmp_path, dict.fromkeys("abcd", 2))
    (tmp_path / "a" / "._0.png").write_bytes(b"what a Mac leaves")
    (tmp_path / "b" / ".ipynb_checkpoints").mkdir()
    shutil.copy(tmp_path / "b" / "0.png", tmp_path / "b" / ".ipynb_checkpoints" / "0-checkpoint.png")
    assert len(data.load("image_folder", str(tmp_path), 8).development) == 4
    assert len(data.open_images(tmp_path, data.Fit(8), 3)) == 8


@pytest.mark.parametrize("limit", [0, 2**30], ids=["lazy", "decoded"])
def test_the_same_picture_under_two_labels_is_told_with_two_names(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "IN_MEMORY_BYTES", limit)
    picture_set(tmp_path, dict.fromkeys("abcdefgh", 3))
    shutil.copy(tmp_path / "b" / "1.png", tmp_path / "d" / "x.png")
    shutil.copy(tmp_path / "c" / "1.png", tmp_path / "h" / "x.png")  # in development and test
    assert told(tmp_path) == [
        f"the same picture under two labels: 4 images, as {tmp_path / 'b' / '1.png'} and {tmp_path / 'd' / 'x.png'}"
    ]
    (tmp_path / "a" / "0.png").write_bytes(b"no picture")  # numbers go by what is left
    assert told(tmp_path, on_corrupt="skip") == told(tmp_path, on_corrupt="skip")
    assert str(tmp_path / "b" / "1.png") in told(tmp_path, on_corrupt="skip")[0]


def test_copies_within_a_class_are_told(tmp_path: Path) -> None:
    """Whatever the model, the nearest item of each is its copy."""
    picture_set(tmp_path, dict.fromkeys("abcdefgh", 3))
    shutil.copy(tmp_path / "a" / "0.png", tmp_path / "a" / "9.png")
    for number in (0, 1):
        shutil.copy(tmp_path / "h" / f"{number}.png", tmp_path / "h" / f"again{number}.png")
    said = "images have an identical copy in their own class, which any model finds: scores are too high"
    assert told(tmp_path) == [
        f"development: 2 of 13 {said}; keep one of each",
        f"test: 4 of 14 {said}; keep one of each",
    ]


def test_classes_of_one_image_are_told(tmp_path: Path) -> None:
    picture_set(tmp_path, {"a": 1, "b": 2, "c": 2, "d": 2, "e": 1, "f": 1, "g": 2})
    assert told(tmp_path) == [
        "development: 1 of 4 classes have one image: never a hit, never a positive pair",
        "test: 2 of 3 classes have one image: never a hit, never a positive pair",
    ]


def check(folder: Path, num_folds: int = 2) -> None:
    found = data.load("image_folder", str(folder), 8)
    data.check_hits(found, data.class_disjoint_folds(found.development.labels_N, num_folds, 0))


def test_a_side_where_no_query_can_have_a_hit_is_refused(tmp_path: Path) -> None:
    check(picture_set(tmp_path / "sound", dict.fromkeys("abcdefgh", 2)))
    check(picture_set(tmp_path / "some", {**dict.fromkeys("abcdefgh", 1), "b": 2, "c": 2, "f": 2, "a": 2}))
    with pytest.raises(
        ValueError, match=r"^data: each of the 4 test classes of image_folder has one image, so no"
    ):
        check(picture_set(tmp_path / "test", {**dict.fromkeys("abcd", 2), **dict.fromkeys("efgh", 1)}))
    with pytest.raises(
        ValueError, match=r"^data: each of the 2 fold \d's validation classes of .* has one image"
    ):
        check(picture_set(tmp_path / "fold", {**dict.fromkeys("abcd", 1), **dict.fromkeys("efgh", 2)}))


def test_a_closed_set_has_its_own_remarks(tmp_path: Path) -> None:
    for side in ("train", "test"):
        picture_set(tmp_path / side, dict.fromkeys("ab", 1))
    (tmp_path / "train" / "a" / "n.txt").touch()
    lines = data.remarks(data.load_closed("image_folder", str(tmp_path), 8), str(tmp_path))
    assert lines == ["left out: 1 .txt"]  # the same pictures have the same labels on both sides
    shutil.copy(tmp_path / "train" / "a" / "0.png", tmp_path / "test" / "b" / "x.png")
    (_, line) = data.remarks(data.load_closed("image_folder", str(tmp_path), 8), str(tmp_path))
    assert line.startswith("the same picture under two labels: ")
