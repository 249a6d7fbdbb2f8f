"""Pictures listed in a table, and matrices of features.

Shapes: N rows, D features.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmlstudy.data import parquet
from dmlstudy.data.images import Indices, Labels, RandomViews, relabelled
from dmlstudy.data.layouts import Parts
from dmlstudy.data.pictures import TabledFiles, by_name, halved
from dmlstudy.text import first_line

NOT_NUMPY = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,  # of a header that tells of more than there is
    OverflowError,
    TypeError,
    SyntaxError,
    KeyError,
    NotImplementedError,
    RuntimeError,  # of an encrypted archive
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors that NumPy and zipfile raise for files that are not theirs."""

TRAIN = ("train", "development")
TEST = ("test", "validation", "val")


def table(path: Path) -> Parts:
    """A CSV or Parquet table with columns label and path, and if it has them split, is_query and is_gallery.

    Paths are relative to the table's folder. ``split`` is train (or development) or test (or validation, val);
    without it the first half of the classes, as they come up, is for development.

    ``is_query`` and ``is_gallery``, which need ``split``, say which test rows rank and which are ranked; a row may be
    both, and one that is neither is left out.

    Raises ValueError naming the column or row that is missing or cannot be used.
    """
    columns = parquet.read_columns(path)
    for name in ("label", "path"):
        if name not in columns:
            raise ValueError(f"{path}: no column {name}, but {', '.join(columns)}")
        if None in columns[name]:
            raise ValueError(f"{path}, row {columns[name].index(None)}: no {name}")
    files = [path.parent / each for each in columns["path"]]
    missing = next((row for row, file in enumerate(files) if not file.is_file()), None)
    if missing is not None:
        raise ValueError(f"{path}, row {missing}: no file {files[missing]}; paths are relative to the table")
    whole = by_name(TabledFiles(files, columns), [str(label) for label in columns["label"]])
    roles = [name for name in ("is_query", "is_gallery") if name in columns]
    if "split" not in columns:
        if roles:
            raise ValueError(
                f"{path}: {' and '.join(roles)} without a column split, which says what is for testing; add split"
            )
        return Parts(*halved(whole))
    is_train_N = _is_train(path, columns["split"])
    is_query_N, is_gallery_N = (
        _flags(path, name, columns, ~is_train_N) for name in ("is_query", "is_gallery")
    )
    is_used_N = ~is_train_N & (is_query_N | is_gallery_N)
    train, test = whole.part(is_train_N), whole.part(is_used_N)
    if not roles:
        return Parts(train, test)
    query, gallery = np.flatnonzero(is_query_N[is_used_N]), np.flatnonzero(is_gallery_N[is_used_N])
    return Parts(train, test, query, gallery)


def _is_train(path: Path, splits: Sequence[Any]) -> NDArray[np.bool_]:
    for row, split in enumerate(splits):
        if split not in (*TRAIN, *TEST):
            raise ValueError(
                f"{path}, row {row}: split is {split!r}, choose one of {', '.join((*TRAIN, *TEST))}"
            )
    return np.array([split in TRAIN for split in splits], dtype=np.bool_)


def _flags(
    path: Path, name: str, columns: Mapping[str, Any], is_test_N: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """A column of flags; true for all where there is no such column."""
    if name not in columns:
        return np.ones(len(is_test_N), dtype=np.bool_)
    values = columns[name]
    for row in np.flatnonzero(is_test_N).tolist():
        if values[row] not in (True, False):
            raise ValueError(f"{path}, row {row}: {name} is {values[row]!r}, expected true or false")
    return np.array([value is not None and bool(value) for value in values], dtype=np.bool_)


@dataclass(frozen=True, eq=False)
class Features:
    """Vectors with a class each; ``labels_N`` indexes ``class_names``."""

    x_ND: NDArray[np.float32]
    labels_N: Labels
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels_N)

    def select(self, indices: Indices) -> Features:
        """The rows at ``indices``; labels and class names stay as they are."""
        return Features(self.x_ND[indices], self.labels_N[indices], self.class_names)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The vectors' length."""
        return self.x_ND.shape[1:]

    def read(self, indices: Indices, views: RandomViews | None = None) -> NDArray[np.float32]:
        """The vectors at ``indices``, for which there are no views."""
        assert views is None
        return self.x_ND[indices]

    def of_classes(self, classes: Sequence[int] | Labels) -> Features:
        """The rows of ``classes`` in their present order, labels renumbered in the order of ``classes``."""
        kept_N, labels_N = relabelled(self.labels_N, len(self.class_names), classes)
        return Features(self.x_ND[kept_N], labels_N[kept_N], tuple(self.class_names[c] for c in classes))

    def content_hashes(self) -> list[bytes]:
        """One per row, of its vector; found once."""
        return self._content_hashes

    @cached_property
    def _content_hashes(self) -> list[bytes]:
        return [hashlib.blake2b(x_D.tobytes(), digest_size=16).digest() for x_D in self.x_ND]

    def fingerprint(self) -> str:
        """The SHA-256 (hex) over shape, labels and vectors."""
        digest = hashlib.sha256(repr(self.x_ND.shape).encode())
        digest.update(np.ascontiguousarray(self.labels_N, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self.x_ND, dtype="<f4").data)
        return digest.hexdigest()


def matrix(path: Path) -> tuple[NDArray[np.float32], Any, dict[str, Any]]:
    """``x_ND`` of a file as ``load_features`` takes it, its labels as they stand there (None without), and all columns.

    Raises ValueError naming the file for no such matrix, no rows, and values that are not finite.
    """
    columns = parquet.read_columns(path) if path.suffix.lower() == ".parquet" else arrays(path, "x")
    x, y = (
        next((columns[name] for name in names if name in columns), None)
        for names in (("x", "features", "X", "embedding"), ("y", "labels", "label"))
    )
    if x is None:
        raise ValueError(f"{path}: needs x (or features) in it, but has {', '.join(columns)}")
    if not isinstance(x, np.ndarray) or x.ndim < 2 or not np.issubdtype(x.dtype, np.number):
        raise ValueError(f"{path}: x is not a matrix of numbers; give it the shape (rows, features)")
    if np.issubdtype(x.dtype, np.complexfloating):
        raise ValueError(
            f"{path}: x is of complex numbers ({x.dtype}); store real and imaginary parts as features"
        )
    if x.size == 0:
        raise ValueError(f"{path}: x has the shape {x.shape}; give it a row and a feature at least")
    with np.errstate(over="ignore"):  # what overflows is infinite, and refused below
        x_ND = np.ascontiguousarray(x.reshape(len(x), -1), dtype=np.float32)
    if not np.isfinite(x_ND).all():
        raise ValueError(f"{path}: row {int(np.argmin(np.isfinite(x_ND).all(axis=1)))} of x is not finite")
    return x_ND, y, columns


def load_features(path: str | Path) -> Features:
    """A feature matrix: ``.npz`` with arrays ``x`` (or ``features``, ``X``; N x D, or of more axes, which are
    flattened) and ``y`` (or ``labels``; N, or N x 1), or Parquet with a list column ``x``, ``features`` or
    ``embedding`` and a column ``label``.

    Classes are numbered in the order of their sorted labels, numbers by size. Raises ValueError naming the file for
    missing arrays, unequal lengths, rows without a label and values that are not finite.
    """
    path = Path(path)
    x_ND, y, columns = matrix(path)
    if y is None:
        raise ValueError(
            f"{path}: needs x and y (or features and labels) in one file, but has {', '.join(columns)}"
        )
    y_N = _labels(path, y)
    if len(x_ND) != len(y_N):
        raise ValueError(f"{path}: {len(x_ND)} rows of x, {len(y_N)} labels")
    classes, labels_N = np.unique(y_N, return_inverse=True)
    return Features(x_ND, labels_N.astype(np.int64), tuple(str(c) for c in classes.tolist()))


def _labels(path: Path, y: NDArray[Any] | Sequence[Any]) -> NDArray[Any]:
    """One label per row, of an array or of a column with None for null."""
    labels = np.asarray(y)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise ValueError(f"{path}: y has the shape {labels.shape}, expected one label per row, (rows,)")
    is_missing_N = [label is None or label != label for label in labels.tolist()]  # NaN
    if any(is_missing_N):
        raise ValueError(f"{path}: row {is_missing_N.index(True)} has no label; leave it out or label it")
    return labels


def arrays(path: Path, alone: str) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz`` file by their names, or that of an ``.npy`` file under the name ``alone``.

    Raises ValueError naming a file that is missing or broken, or holds Python objects.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return {alone: content}
            with content:
                return {key: content[key] for key in content.files}
    except NOT_NUMPY as error:
        raise ValueError(f"{path}: not a readable NumPy file ({first_line(error)})") from error
