"""Folders of the library datasets: its own ``save_to_disk``, and pictures beside a metadata file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from dmlstudy import data

NAMES = ["wren", "robin", "owl", "jay"]


def pixels(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (5, 5, 3), dtype=np.uint8))


def saved(rows: list[int], **columns: Any) -> Any:
    """Class r // 4 of each row r."""
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=NAMES),
            "cam": datasets.Value("string"),
        }
    )
    content = {
        "image": [pixels(row) for row in rows],
        "label": [row // 4 for row in rows],
        "cam": ["ab"[row % 2] for row in rows],
    }
    return datasets.Dataset.from_dict(content | columns, features=features)


def test_a_saved_set_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    saved(list(range(16))).save_to_disk(tmp_path / "set", num_shards=3)
    found = data.load("hf_datasets", str(tmp_path / "set"), camera="cam")
    whole = datasets.load_from_disk(tmp_path / "set")
    assert found.development.class_names == ("wren", "robin")
    assert found.test.class_names == ("owl", "jay")
    for row in range(8):
        np.testing.assert_array_equal(
            found.test.read(np.array([row]))[0], np.asarray(whole[8 + row]["image"])
        )
    assert found.test_camera_N is not None
    assert found.test_camera_N.tolist() == [0, 1] * 4
    assert found.places is not None
    assert found.places(15).startswith(str(tmp_path / "set" / "data-00002-of-00003.arrow, row "))
    assert data.files_digest(found, str(tmp_path / "set"))


def test_rows_that_were_selected_and_shuffled_keep_their_labels(tmp_path: Path) -> None:
    part = saved(list(range(16))).shuffle(seed=1).select(range(12))
    part.save_to_disk(tmp_path / "set")
    found = data.load("hf_datasets", str(tmp_path / "set"))
    images = [(side, row) for side in (found.development, found.test) for row in range(len(side))]
    read = {
        side.read(np.array([row])).tobytes(): side.class_names[side.labels_N[row]] for side, row in images
    }
    assert read == {np.asarray(each["image"]).tobytes(): NAMES[each["label"]] for each in part}


def test_splits_of_other_classes_stay_and_of_the_same_are_halved(tmp_path: Path) -> None:
    apart = {"train": saved(list(range(8))), "validation": saved(list(range(8, 16)))}
    datasets.DatasetDict(apart).save_to_disk(tmp_path / "apart")
    found = data.load("hf_datasets", str(tmp_path / "apart"))
    assert (found.development.class_names, found.test.class_names) == (("wren", "robin"), ("owl", "jay"))
    within = {"train": saved([0, 1, 4, 5, 8, 9, 12, 13]), "test": saved([2, 6, 10, 14])}
    datasets.DatasetDict(within).save_to_disk(tmp_path / "within")
    found = data.load("hf_datasets", str(tmp_path / "within"))
    assert (len(found.development), len(found.test)) == (6, 6)


def test_pictures_that_are_only_named_are_read_from_their_files(tmp_path: Path) -> None:
    for row in range(16):
        pixels(row).save(tmp_path / f"{row:02}.png")
    told = {
        "image": [str(tmp_path / f"{row:02}.png") for row in range(16)],
        "label": [str(r // 4) for r in range(16)],
    }
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    datasets.Dataset.from_dict(told, features=features).save_to_disk(tmp_path / "set")
    found = data.load("hf_datasets", str(tmp_path / "set"))
    assert found.test.class_names == ("2", "3")
    np.testing.assert_array_equal(found.test.read(np.array([0]))[0], np.asarray(pixels(8)))


def test_what_cannot_be_used_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither dataset_dict.json nor state.json"):
        data.load("hf_datasets", str(tmp_path))
    saved(list(range(16)), label=[0, -1, *[1] * 14]).save_to_disk(tmp_path / "a")
    with pytest.raises(
        ValueError, match=r"a/data-00000-of-00001.arrow, row 1: label is -1, expected a class"
    ):
        data.load("hf_datasets", str(tmp_path / "a"))
    saved(list(range(16)), image=[None, *map(pixels, range(15))]).save_to_disk(tmp_path / "b")
    with pytest.raises(ValueError, match=r"row 0: no picture; take the row out, or store one"):
        data.load("hf_datasets", str(tmp_path / "b"))
    saved(list(range(16))).rename_column("image", "one").add_column("n", list(range(16))).save_to_disk(
        tmp_path / "c"
    )
    assert len(data.load("hf_datasets", str(tmp_path / "c")).test) == 8
    saved(list(range(16))).remove_columns(["label"]).save_to_disk(tmp_path / "d")
    with pytest.raises(
        ValueError, match=r"d: no column of labels, a ClassLabel; rename the one that is meant to label"
    ):
        data.load("hf_datasets", str(tmp_path / "d"))
    arrow = tmp_path / "c" / "data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"arrow: not a readable Arrow stream"):
        data.load("hf_datasets", str(tmp_path / "c"))
    arrow.unlink()
    with pytest.raises(ValueError, match=r"state.json names data-00000-of-00001.arrow, which is not there"):
        data.load("hf_datasets", str(tmp_path / "c"))
    (tmp_path / "d" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state.json: not readable"):
        data.load("hf_datasets", str(tmp_path / "d"))


def write_metadata(folder: Path, rows: list[int], kind: str) -> None:
    told = [{"file_name": f"p/{row:02} a.png", "label": NAMES[row // 4], "cam": row % 2} for row in rows]
    (folder / "p").mkdir(parents=True)
    for row, each in zip(rows, told, strict=True):
        pixels(row).save(folder / str(each["file_name"]))
    if kind == "jsonl":
        text = "\n".join(map(json.dumps, told))
    else:
        text = "\n".join([",".join(told[0]), *(",".join(map(str, each.values())) for each in told)])
    (folder / f"metadata.{kind}").write_text(text + "\n")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("place", ["", "data"])
def test_pictures_with_metadata_beside_them(kind: str, place: str, tmp_path: Path) -> None:
    write_metadata(tmp_path / place / "train", list(range(8)), kind)
    write_metadata(tmp_path / place / "test", list(range(8, 16)), kind)
    found = data.load("hf_datasets", str(tmp_path), camera="cam")
    assert (found.development.class_names, found.test.class_names) == (("robin", "wren"), ("jay", "owl"))
    assert found.left_out == ()
    np.testing.assert_array_equal(found.test.read(np.array([7]))[0], np.asarray(pixels(15)))
    assert found.test_camera_N is not None
    assert found.test_camera_N.tolist() == [0, 1] * 4


@pytest.mark.parametrize("sides", [("train", "test"), ("",)])
def test_pictures_that_the_metadata_do_not_name_are_told(sides: tuple[str, ...], tmp_path: Path) -> None:
    for place, side in enumerate(sides):
        num = 16 // len(sides)
        write_metadata(tmp_path / side, list(range(num * place, num * (place + 1))), "csv")
    for name in ("more.png", "\x1b[31m.png"):
        pixels(0).save(tmp_path / sides[0] / "p" / name)
    found = data.load("hf_datasets", str(tmp_path))
    file = tmp_path / sides[0] / "metadata.csv"
    assert found.left_out == (f"left out: 2 pictures that {file} does not name, as 'p/\\x1b[31m.png'",)
    assert found.left_out[0] in data.remarks(found, str(tmp_path))


def test_metadata_without_a_label_or_picture_is_named(tmp_path: Path) -> None:
    write_metadata(tmp_path / "a", list(range(16)), "jsonl")
    (tmp_path / "a" / "p" / "03 a.png").unlink()
    with pytest.raises(ValueError, match=r"metadata.jsonl, row 3: no file .*03 a.png; paths are relative"):
        data.load("hf_datasets", str(tmp_path / "a"))
    (tmp_path / "a" / "metadata.jsonl").write_text('{"file_name": "p/00 a.png"}\n')
    with pytest.raises(ValueError, match=r"needs the columns file_name and label, but has file_name"):
        data.load("hf_datasets", str(tmp_path / "a"))
    (tmp_path / "a" / "metadata.jsonl").write_text('{"file_name": "p/00 a.png"}\n[1]\n')
    with pytest.raises(ValueError, match=r"metadata.jsonl, line 2: not a JSON object"):
        data.load("hf_datasets", str(tmp_path / "a"))
