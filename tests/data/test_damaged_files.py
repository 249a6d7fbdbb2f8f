"""Data files that are damaged or odd: each is refused in one line that names the file, and none is waited for."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data.images import Fit


def png() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, "PNG")
    return content.getvalue()


def header_of(shape: str) -> bytes:
    """A ``.npy`` file that tells of more than it holds."""
    told = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(told)) + told.encode() + b"\0" * 64


def npy(shape: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "it.npy").write_bytes(header_of(shape))
        return folder / "it.npy"

    return write


def npz(shape: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "it.npz", "w") as archive:
            archive.writestr("x.npy", header_of(shape))
            archive.writestr("images.npy", header_of(shape))
        return folder / "it.npz"

    return write


def arrays(**named: np.ndarray) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.savez(folder / "it.npz", **named)
        return folder / "it.npz"

    return write


def parquet(*columns: tuple[str, Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        names, values = zip(*columns, strict=True)
        table = pa.Table.from_arrays([pa.array(value) for value in values], names=list(names))
        pq.write_table(table, folder / "it.parquet")
        return folder / "it.parquet"

    return write


def text(name: str, content: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return write


def cut(write: Callable[[Path], Path], at: float, changed: bytes = b"") -> Callable[[Path], Path]:
    """The file that another one writes, broken off, or with some bytes changed."""

    def damaged(folder: Path) -> Path:
        path = write(folder)
        content = path.read_bytes()
        place = int(len(content) * at)
        path.write_bytes(content[:place] + (changed + content[place + len(changed) :] if changed else b""))
        return path

    return damaged


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "it.png")
    return folder / "it.png"


def table_of_a_device(folder: Path) -> Path:
    return text("it.csv", "path\n/dev/zero\n")(folder)


def table_of_a_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return text("it.csv", "path,label\npipe,a\n")(folder)


PICTURES = [{"bytes": png(), "path": "a.png"}] * 2
VECTORS = [[1.0, 2.0], [3.0, 4.0]]

AS_VECTORS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a header of 10^12 rows": (npy("(1000000000000, 10)"), "not a readable NumPy file"),
    "a header of 10^30 rows": (npy("(" + "1" + "0" * 30 + ", 10)"), "not a readable NumPy file"),
    "a header of 10^12 rows in an archive": (npz("(1000000000000, 10)"), "not a readable NumPy file"),
    "a header of 10^30 rows in an archive": (npz("(" + "1" + "0" * 30 + ",)"), "not a readable NumPy file"),
    "a header that is no shape": (npy("('a', 3)"), "not a readable NumPy file"),
    "complex numbers": (arrays(x=np.ones((3, 2), np.complex64)), r"x is of complex numbers \(complex64\)"),
    "no columns": (arrays(x=np.ones((3, 0))), r"x has the shape \(3, 0\)"),
    "no rows": (arrays(x=np.ones((0, 3))), r"x has the shape \(0, 3\)"),
    "numbers beyond float32": (arrays(x=np.full((2, 2), 1e300)), "row 0 of x is not finite"),
    "two columns label": (
        parquet(("x", VECTORS), ("label", [1, 2]), ("label", [1, 2])),
        "two columns 'label'",
    ),
    "no list column": (parquet(("x", [1.0, 2.0]), ("label", [1, 2])), "not a matrix of numbers"),
    "lists of unequal length": (parquet(("x", [[1.0], [1.0, 2.0]])), "expected lists of one length"),
    "a Parquet file broken off": (cut(parquet(("x", VECTORS)), 0.6), "not a readable"),
    "a Parquet file with another footer": (cut(parquet(("x", VECTORS)), 0.7, b"\xff" * 40), "it.parquet"),
    "an archive broken off": (cut(arrays(x=np.ones((9, 9))), 0.5), "not a readable NumPy file"),
    "a FIFO": (fifo, "is neither a file nor a folder; name one"),
}

AS_PICTURES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "bytes of int64": (
        parquet(("image", [{"bytes": 3, "path": "a"}] * 2)),
        r"image\.bytes is int64, expected binary",
    ),
    "no bytes": (parquet(("image", [{"path": "a"}] * 2)), r"image\.bytes is missing, expected binary"),
    "two columns label": (
        parquet(("image", PICTURES), ("label", [1, 2]), ("label", [1, 2])),
        "has two columns 'label'",
    ),
    "two columns image": (parquet(("image", PICTURES), ("image", PICTURES)), "has two columns 'image'"),
    "two columns path": (text("it.csv", "path,path\na.png,b.png\n"), "has two columns 'path'"),
    "rows of unequal length": (text("it.csv", "path,label\na.png\nb.png,1,2\n"), "not a readable table"),
    "a Parquet file broken off": (cut(parquet(("image", PICTURES)), 0.6), "not a readable Parquet file"),
    "damaged pages": (cut(parquet(("image", PICTURES)), 0.02, b"\xff" * 60), "damaged|not a readable"),
    "a header of 10^12 images": (npy("(1000000000000, 8, 8)"), "not a readable NumPy file|dtype float32"),
    "a FIFO": (fifo, "is neither a file nor a folder; name one"),
    "a table that names a device": (table_of_a_device, "row 0: /dev/zero is not a file"),
    "a table that names a FIFO": (table_of_a_fifo, "row 0: .*pipe is not a file"),
}


def refused(read: Callable[[], object], path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read()
    said = str(caught.value)
    assert "\n" not in said
    assert str(path) in said
    assert len(said) < 600


@pytest.mark.parametrize("case", AS_VECTORS)
def test_vectors(case: str, tmp_path: Path) -> None:
    write, message = AS_VECTORS[case]
    path = write(tmp_path)
    refused(lambda: data.open_vectors(path, 2), path, message)


@pytest.mark.parametrize("case", AS_PICTURES)
def test_pictures(case: str, tmp_path: Path) -> None:
    write, message = AS_PICTURES[case]
    path = write(tmp_path)
    refused(lambda: data.open_images(path, Fit(4), 3).read(range(1)), path, message)


def test_a_data_set_of_such_files(tmp_path: Path) -> None:
    path = parquet(("image", PICTURES), ("label", [1, 2]), ("label", [1, 2]))(tmp_path)
    refused(lambda: data.load("hf_parquet", str(path), 4), path, "has two columns 'label'")
    path = text("it.csv", "label,path,path\na,b.png,c.png\n")(tmp_path)
    refused(lambda: data.load("table", str(path), 4), path, "has two columns 'path'")
    path = arrays(x=np.ones((3, 0)), y=np.arange(3))(tmp_path)
    refused(lambda: data.load("features", str(path)), path, r"x has the shape \(3, 0\)")


def test_pictures_without_a_path_are_numbered(tmp_path: Path) -> None:
    path = parquet(("image", [{"bytes": png()}] * 2))(tmp_path)
    assert data.open_images(path, Fit(4), 3).ids == ["0", "1"]
