"""Individuals: a CSV of pictures and the animals they show, as wildlife-datasets writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dmlstudy.data import parquet
from dmlstudy.data.layouts import Parts
from dmlstudy.data.pictures import Listing, TabledFiles, by_name, class_disjoint, halved
from dmlstudy.data.tables import TEST, TRAIN

FILES = ("metadata.csv", "annotations.csv", "train.csv")
"""Names of the CSV in a folder, the first that is there."""

UNKNOWN = ("", "unknown")
"""Identities of pictures of which nobody knows whom they show."""

_CUTS = ("bbox", "segmentation")


def wildlife(place: Path) -> Parts:
    """A CSV with the columns ``path`` and ``identity``, and if it has them ``split`` and others; or its folder.

    Paths are relative to the CSV. Rows whose identity is empty or ``unknown`` are left out. ``split`` is train (or
    development) or test (or validation, val), and its sides are as ``class_disjoint`` says. Without it the first half
    of the individuals, as they come up, is development. Other columns, as ``camera`` or ``date``, may be
    ``data.camera``.

    Raises ValueError naming the column or row that is missing or cannot be used.
    """
    file = (
        place if place.is_file() else next((place / name for name in FILES if (place / name).is_file()), None)
    )
    if file is None:
        raise ValueError(f"data.path: {place} has none of {', '.join(FILES)}; name the CSV file")
    columns = parquet.read_columns(file, as_text=("identity", "image_id"))
    for name in ("path", "identity"):
        if name not in columns:
            raise ValueError(f"{file}: no column {name}, but {', '.join(columns)}")
    identities = ["" if each is None else str(each).strip() for each in columns["identity"]]
    kept = [row for row, identity in enumerate(identities) if identity.lower() not in UNKNOWN]
    columns = {name: [values[row] for row in kept] for name, values in columns.items()}
    for row, path in zip(kept, columns["path"], strict=True):
        if not path or not (file.parent / path).is_file():
            raise ValueError(
                f"{file}, row {row}: no file {file.parent / (path or '')}; paths are relative to the table"
            )
    pictures = TabledFiles([file.parent / path for path in columns["path"]], columns)
    whole = by_name(pictures, [identities[row] for row in kept])
    lines = []
    if num := len(identities) - len(kept):
        lines.append(f"left out: {num} picture{'s' * (num > 1)} whose identity is empty or unknown")
    if cuts := [name for name in _CUTS if any(columns.get(name, []))]:
        lines.append(
            f"column {' and '.join(cuts)}: not used, pictures are seen whole; cut them out beforehand"
        )
    return Parts(*_sides(file, kept, columns, whole), left_out=tuple(lines))


def _sides(file: Path, kept: list[int], columns: dict[str, Any], whole: Listing) -> tuple[Listing, Listing]:
    if "split" not in columns:
        return halved(whole)
    for row, split in zip(kept, columns["split"], strict=True):
        if split not in (*TRAIN, *TEST):
            raise ValueError(
                f"{file}, row {row}: split is {split!r}, choose one of {', '.join((*TRAIN, *TEST))}"
            )
    is_train_N = np.array([split in TRAIN for split in columns["split"]], dtype=np.bool_)
    if is_train_N.all() or not is_train_N.any():
        return halved(whole)
    return class_disjoint(f"{file}, column split", whole.part(is_train_N), whole.part(~is_train_N))
