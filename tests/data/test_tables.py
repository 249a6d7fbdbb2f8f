"""Tables of labels and paths, and feature matrices: what is read, and what is refused by row and column."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dmlstudy import data

ROWS: list[dict[str, Any]] = [
    {"label": c, "path": f"p/{i}.png", "split": "train" if c < 12 else "validation", "is_query": q, "is_gallery": g}
    for i, (c, q, g) in enumerate(
        [(10, None, None), (10, None, None), (11, None, None), (12, True, False), (13, True, True), (12, False, True),
         (13, False, True), (12, False, False)]
    )
]  # fmt: skip


def write(folder: Path, rows: list[dict[str, Any]], kind: str) -> str:
    (folder / "p").mkdir(exist_ok=True)
    for i in range(len(rows)):
        Image.new("L", (4, 4), 20 * i + 5).save(folder / "p" / f"{i}.png")
    path = folder / f"table.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_queries_and_gallery_are_as_the_table_says(kind: str, tmp_path: Path) -> None:
    found = data.load("table", write(tmp_path, ROWS, kind))
    assert (found.development.class_names, found.test.class_names) == (("10", "11"), ("12", "13"))
    assert len(found.test) == 4  # the last row is neither
    assert found.test_query is not None
    assert found.test_gallery is not None
    assert found.test_query.tolist() == [0, 1]
    assert found.test_gallery.tolist() == [1, 2, 3]
    assert found.test.read(np.arange(4))[:, 0, 0, 0].tolist() == [65, 85, 105, 125]


def test_classes_may_be_called_as_spreadsheets_call_what_is_missing(tmp_path: Path) -> None:
    names = ["NA", "null", "nan", "None"]
    rows = [{"label": name, "path": f"p/{2 * i + k}.png"} for i, name in enumerate(names) for k in range(2)]
    found = data.load("table", write(tmp_path, rows, "csv"))
    assert {*found.development.class_names, *found.test.class_names} == set(names)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_without_further_columns_classes_are_halved(kind: str, tmp_path: Path) -> None:
    rows = [{"label": row["label"], "path": row["path"]} for row in ROWS]
    found = data.load("table", write(tmp_path, rows, kind))
    assert (found.development.class_names, found.test.class_names) == (("10", "11"), ("12", "13"))
    assert found.test_query is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"split": "trian"}, r"row 3: split is 'trian'"),
        ({"path": "p/none.png"}, r"row 3: no file .*none\.png"),
        ({"label": None}, r"row 3: no label"),
        ({"label": 10}, r"1 classes are in development and test, as '10'"),
        ({"is_query": None}, r"row 3: is_query is None"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    rows = [row | change if i == 3 else row for i, row in enumerate(ROWS)]
    for kind in ("csv", "parquet"):
        with pytest.raises(ValueError, match=complaint):
            data.load("table", write(tmp_path, rows, kind))


def test_tables_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set data\.path"):
        data.load("table", str(tmp_path))
    with pytest.raises(ValueError, match="no column path, but label, file"):
        data.load("table", write(tmp_path, [{"label": 1, "file": "x"}], "csv"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"broken\.parquet: not a readable"):
        data.load("table", str(tmp_path / "broken.parquet"))
    no_gallery = [row | {"is_gallery": False, "is_query": True} for row in ROWS]
    with pytest.raises(ValueError, match="0 gallery images"):
        data.load("table", write(tmp_path, no_gallery, "csv"))


@pytest.mark.parametrize("roles", [("is_query",), ("is_gallery",), ("is_query", "is_gallery")])
def test_roles_without_a_split_are_refused(roles: tuple[str, ...], tmp_path: Path) -> None:
    rows = [{name: row[name] for name in ("label", "path", *roles)} for row in ROWS]
    with pytest.raises(ValueError, match=f"{' and '.join(roles)} without a column split, .* add split"):
        data.load("table", write(tmp_path, rows, "csv"))


def test_features_of_every_origin(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(5, 2, 3)), np.array([10, 9, 10, 100, 9])
    np.savez(tmp_path / "x.npz", x=x, y=y)
    table = pa.table({"features": x.reshape(5, 6).tolist(), "label": y})
    pq.write_table(table, tmp_path / "x.parquet")
    data.write_embeddings(
        tmp_path / "z.parquet", list("abcde"), [str(c) for c in y], x.reshape(5, 6).astype("f4")
    )
    for name, names in (("x.npz", "9 10 100"), ("x.parquet", "9 10 100"), ("z.parquet", "10 100 9")):
        found = data.load_features(tmp_path / name)
        np.testing.assert_array_equal(found.x_ND, x.reshape(5, 6).astype("f4"))
        assert found.class_names == tuple(names.split())  # by size where labels are numbers, else by spelling
        assert [found.class_names[c] for c in found.labels_N] == [str(c) for c in y]
        assert found.select(np.array([3])).x_ND.shape == (1, 6)


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x": np.ones((2, 2))}, "needs x and y"),
        ({"x": np.ones((2, 2)), "y": [1]}, "2 rows of x, 1 labels"),
        ({"x": np.ones(2), "y": [1, 2]}, "not a matrix of numbers"),
        ({"x": np.array([[1.0], [np.nan]]), "y": [1, 2]}, "row 1 of x is not finite"),
        (
            {"x": np.ones((3, 2)), "y": np.ones((3, 2))},
            r"y has the shape \(3, 2\), expected one label per row",
        ),
        ({"x": np.ones((3, 2)), "y": 1}, r"y has the shape \(\), expected one label per row"),
        ({"x": np.ones((3, 2)), "y": [1, 2, np.nan]}, "row 2 has no label"),
    ],
)
def test_features_that_cannot_be_used_are_refused(
    arrays: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=complaint):
        data.load_features(tmp_path / "x.npz")


def test_labels_may_be_a_column(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((3, 2)), y=np.array([[4], [2], [4]]))
    found = data.load_features(tmp_path / "x.npz")
    assert (found.class_names, found.labels_N.tolist()) == (("2", "4"), [1, 0, 1])


def test_files_that_are_no_features_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"x\.npy: needs x and y .* in one file, but has x"):
        data.load_features(tmp_path / "x.npy")
    for labels in (["a", None, "b"], [1, None, 2]):
        pq.write_table(pa.table({"x": np.ones((3, 2)).tolist(), "label": labels}), tmp_path / "x.parquet")
        with pytest.raises(ValueError, match=r"x\.parquet: row 1 has no label"):
            data.load_features(tmp_path / "x.parquet")
    for load in (data.load_features, lambda path: data.open_images(path, data.Fit(), 1)):
        np.savez_compressed(
            tmp_path / "x.npz", x=np.arange(4000.0).reshape(-1, 2), images=np.zeros((9, 8, 8), np.uint8)
        )
        content = bytearray((tmp_path / "x.npz").read_bytes())
        content[80:200] = bytes(120)
        (tmp_path / "x.npz").write_bytes(bytes(content))
        with pytest.raises(ValueError, match=r"x\.npz: not a readable NumPy file"):
            load(tmp_path / "x.npz")
