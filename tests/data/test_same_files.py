"""Copies of a data set have one digest, whatever their place and times, and others another."""

from __future__ import annotations

import os
import shutil
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dmlstudy import data
from dmlstudy.data import same_files
from dmlstudy.data.datasets import load


class Side:
    """So many pictures of one class."""

    def __init__(self, number: int) -> None:
        self.class_names, self.labels_N = ("c",), np.zeros(number, np.int64)

    def __len__(self) -> int:
        return len(self.labels_N)


def parquet_of(path: Path, seed: int) -> Path:
    rng, pictures = np.random.default_rng(seed), []
    for _ in range(16):
        buffer = BytesIO()
        Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(buffer, "BMP")
        pictures.append({"bytes": buffer.getvalue(), "path": None})
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"image": pictures, "label": [row // 2 for row in range(16)]}), path)
    return path


def digest_of(name: str, path: Path) -> str:
    return data.files_digest(load(name, str(path)), str(path))


def test_a_file_of_many_pictures_is_known_by_its_size_and_edges(tmp_path: Path) -> None:
    own, other = parquet_of(tmp_path / "a" / "x.parquet", 0), parquet_of(tmp_path / "b" / "x.parquet", 1)
    (tmp_path / "copy").mkdir()
    copy = Path(shutil.copy(own, tmp_path / "copy"))
    os.utime(copy, (1, 1))
    assert own.stat().st_size == other.stat().st_size
    assert digest_of("hf_parquet", copy) == digest_of("hf_parquet", own) != digest_of("hf_parquet", other)


def test_vectors_count_with_all_they_hold(tmp_path: Path) -> None:
    x_NF = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x_NF, y=np.arange(16) // 2)
    np.savez(tmp_path / "b.npz", x=x_NF, y=np.arange(16) // 2)
    x_NF[7, 1] += 1
    np.savez(tmp_path / "c.npz", x=x_NF, y=np.arange(16) // 2)
    own, copy, other = (digest_of("features", tmp_path / f"{name}.npz") for name in "abc")
    assert own == copy != other


def test_of_a_large_set_all_names_count_and_sizes_here_and_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_files, "NUM_SIZED", 3)
    for number in range(9):
        (tmp_path / str(number)).write_bytes(b"p")

    def digest(*names: str) -> str:
        side, none = Side(len(names)), Side(0)
        places = [str(tmp_path / name) for name in names]
        whole = SimpleNamespace(development=side, test=none, places=lambda number: places[number])
        return data.files_digest(whole, str(tmp_path))  # type: ignore[arg-type]

    names = [str(number) for number in range(9)]
    own = digest(*names)
    assert digest(*names[:4], "x", *names[5:]) != own
    (tmp_path / "3").write_bytes(b"longer")
    assert digest(*names) == own
    (tmp_path / "4").write_bytes(b"longer")
    assert digest(*names) != own
