"""CSV files of individuals, as wildlife-datasets writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from dmlstudy import data


def write(folder: Path, header: str, rows: list[str], name: str = "metadata.csv") -> Path:
    for row in rows:
        path = folder / next(word for word in row.split(",") if word.endswith(".jpg"))
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (len(path.stem), hash(path.stem) % 199, 7)).save(path)
    (folder / name).write_text("\n".join([header, *rows]) + "\n")
    return folder / name


ROWS = [f"{n},{n // 4:03},images/a b/p{n:02}.jpg,2019-01-0{1 + n % 2},turtle" for n in range(16)]
HEADER = "image_id,identity,path,date,species"


@pytest.mark.parametrize("by_folder", [False, True])
def test_identities_are_read_as_written_and_halved(by_folder: bool, tmp_path: Path) -> None:
    file = write(tmp_path, HEADER, ROWS)
    found = data.load("wildlife", str(tmp_path if by_folder else file), camera="date")
    assert found.development.class_names == ("000", "001")  # no numbers
    assert found.test.class_names == ("002", "003")
    assert found.test_camera_N is not None
    assert found.test_camera_N.tolist() == [0, 1] * 4
    assert data.load("wildlife", str(file)).test_camera_N is None


def test_unknown_individuals_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*ROWS, "16,unknown,u1.jpg,,x", "17,,u2.jpg,,x"]
    found = data.load("wildlife", str(write(tmp_path, HEADER, rows)))
    assert len(found.development) + len(found.test) == 16
    assert "left out: 2 pictures whose identity is empty or unknown" in data.remarks(found, None)


def test_a_split_by_individuals_is_kept_and_one_within_them_is_halved(tmp_path: Path) -> None:
    apart = [f"{row},{'test' if n < 8 else 'train'}" for n, row in enumerate(ROWS)]
    found = data.load("wildlife", str(write(tmp_path, HEADER + ",split", apart)))
    assert (found.development.class_names, found.test.class_names) == (("002", "003"), ("000", "001"))
    within = [f"{row},{'test' if n % 4 == 3 else 'train'}" for n, row in enumerate(ROWS)]
    found = data.load("wildlife", str(write(tmp_path, HEADER + ",split", within)))
    assert found.development.class_names == ("000", "001")
    some = [f"{row},{'test' if n in (0, 1, 2, 3, 4, 5) else 'train'}" for n, row in enumerate(ROWS)]
    with pytest.raises(
        ValueError, match=r"metadata.csv, column split: 1 of 3 training and 2 test classes are in both"
    ):
        data.load("wildlife", str(write(tmp_path, HEADER + ",split", some)))


def test_boxes_are_told_not_to_be_used(tmp_path: Path) -> None:
    rows = [f'{row},"[1, 2, 3, 4]"' for row in ROWS]
    found = data.load("wildlife", str(write(tmp_path, HEADER + ",bbox", rows)))
    assert any(line.startswith("column bbox: not used") for line in data.remarks(found, None))


def test_what_cannot_be_used_is_named_by_row_or_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"wildlife needs a CSV file or its folder"):
        data.load("wildlife", str(tmp_path / "no.csv"))
    with pytest.raises(ValueError, match=r"has none of metadata.csv, annotations.csv"):
        data.load("wildlife", str(tmp_path))
    file = write(tmp_path, HEADER, ROWS)
    (tmp_path / "images" / "a b" / "p03.jpg").unlink()
    with pytest.raises(ValueError, match=r"metadata.csv, row 3: no file .*p03.jpg; paths are relative"):
        data.load("wildlife", str(file))
    write(tmp_path, HEADER.replace("identity", "who"), ROWS)
    with pytest.raises(ValueError, match=r"no column identity, but image_id, who"):
        data.load("wildlife", str(file))
    write(tmp_path, HEADER + ",split", [f"{row},hidden" for row in ROWS])
    with pytest.raises(ValueError, match=r"row 0: split is 'hidden', choose one of train"):
        data.load("wildlife", str(file))
