"""Folders of the Hugging Face library ``datasets``: what ``save_to_disk`` writes, and pictures beside a metadata file.

The Arrow files are mapped into memory and read by pyarrow; ``datasets`` itself is not needed.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from dmlstudy.data.layouts import Parts
from dmlstudy.data.parquet import read_columns
from dmlstudy.data.picture_files import image_files
from dmlstudy.data.pictures import (
    Files,
    Listing,
    TabledFiles,
    by_listed_name,
    class_disjoint,
    halved,
    in_order,
)
from dmlstudy.files import read_json
from dmlstudy.text import counted, first_line, shown

IMAGES = ("image", "img")
LABELS = ("label", "labels")
"""Names of columns that are preferred, where there are several of their kind."""

TEST = ("test", "validation", "val", "valid")
"""Splits that are tested on, the first that is there."""

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


class ArrowRows:
    """Pictures of a saved ``Dataset``, in the Arrow files that its ``state.json`` names.

    Raises ValueError naming the file or folder for what is missing or damaged, and a row without a picture or label.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = [folder / name for name in _data_files(folder)]
        features = _read_json(folder / "dataset_info.json").get("features") or {}
        tables = [_mapped(path) for path in self.paths]
        self._table = pa.concat_tables(tables)
        self._first_row = [0, *itertools.accumulate(map(len, tables))][:-1]
        image = _chosen(folder, "pictures, an Image", _of_type(features, "Image"), IMAGES)
        named = [name for name in LABELS if name in features]
        label = _chosen(folder, "labels, a ClassLabel", named or _of_type(features, "ClassLabel"), LABELS)
        stored = self._table.schema.field(image).type
        if not pa.types.is_struct(stored) or {field.name for field in stored} != {"bytes", "path"}:
            raise ValueError(
                f"{folder}: column {image} is {stored}; cast it to datasets.Image() and save it again"
            )
        self._image = self._table[image]
        self.names: Sequence[str] | None = features[label].get("names")
        """Of the classes by their ids, where the set has them."""
        self.labels = [self._label(row, value) for row, value in enumerate(self._table[label].to_pylist())]

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def place(self, row: int) -> str:
        number = bisect.bisect_right(self._first_row, row) - 1
        return f"{self.paths[number]}, row {row - self._first_row[number]}"

    def encoded(self, row: int) -> bytes:
        value = self._image[row].as_py() or {}
        if value.get("bytes"):
            return bytes(value["bytes"])
        if value.get("path"):
            return (self.folder / str(value["path"])).read_bytes()
        raise ValueError(f"{self.place(row)}: no picture; take the row out, or store one")

    def column(self, name: str) -> Sequence[Any] | None:
        """The values of a column as they are stored."""
        if name not in self._table.column_names:
            return None
        values: list[Any] = self._table[name].to_pylist()
        return values

    def _label(self, row: int, value: Any) -> str:
        if value is None or isinstance(value, float | list | dict) or (isinstance(value, int) and value < 0):
            raise ValueError(
                f"{self.place(row)}: label is {value!r}, expected a class; take the row out, or label it"
            )
        if self.names is None:
            return str(value)
        if value >= len(self.names):
            raise ValueError(
                f"{self.place(row)}: label is {value}, and there are {len(self.names)} names of classes"
            )
        return str(self.names[value])


def hf_datasets(folder: Path) -> Parts:
    """A ``Dataset`` or ``DatasetDict`` that ``save_to_disk`` wrote, or pictures with metadata as imagefolder has them.

    Of several splits ``train`` and ``test`` (or ``validation``) are taken, as ``class_disjoint`` says; a single one is
    halved by class. Classes are in the order of their ids, or else of their names.

    Raises ValueError for a folder of neither kind, and as ``ArrowRows`` and ``metadata_folder``.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits") or []
        sides = {str(name): folder / str(name) for name in splits}
        return _cut(
            folder, {name: _of_arrow(side) for name, side in sides.items() if name in ("train", *TEST)}
        )
    if (folder / "state.json").is_file():
        return Parts(*halved(_of_arrow(folder)[0]))
    for root in (folder, folder / "data"):
        found = {name: root / name for name in ("train", *TEST) if _metadata(root / name) is not None}
        if found:
            listings = {name: metadata_folder(side) for name, side in found.items()}
            lines = [line for name, side in found.items() for line in _not_named(side, listings[name])]
            parts = _cut(folder, {name: (listing, None) for name, listing in listings.items()})
            return parts._replace(left_out=tuple(lines))
        if _metadata(root) is not None:
            listing = metadata_folder(root)
            return Parts(*halved(listing), left_out=tuple(_not_named(root, listing)))
    raise ValueError(
        f"data.path: {folder} has neither dataset_dict.json nor state.json, as datasets.save_to_disk writes them, nor"
        f" {', '.join(METADATA)} in it or in train/ and test/"
    )


def _cut(folder: Path, sides: Mapping[str, tuple[Listing, bool | None]]) -> Parts:
    test = next((name for name in TEST if name in sides), None)
    if "train" not in sides:
        raise ValueError(f"data.path: {folder} has no split train; name the folder of one split alone")
    if test is None:
        return Parts(*halved(sides["train"][0]))
    (own, has_names), (other, other_has) = sides["train"], sides[test]
    if has_names != other_has:
        raise ValueError(
            f"{folder}: of train and {test} one has names of classes, the other ids; save both with names"
        )
    return Parts(*class_disjoint(str(folder), own, other))


def _of_arrow(folder: Path) -> tuple[Listing, bool]:
    rows = ArrowRows(folder)
    present = set(rows.labels)
    names = in_order(rows.labels) if rows.names is None else [name for name in rows.names if name in present]
    if len(set(names)) != len(names):
        raise ValueError(f"{folder}: two classes have the same name; give each its own")
    return by_listed_name(rows, rows.labels, names), rows.names is not None


def metadata_folder(folder: Path) -> Listing:
    """Pictures with ``metadata.csv``, ``.jsonl`` or ``.parquet`` beside them: columns ``file_name`` and ``label``.

    Paths are relative to the file. Raises ValueError naming the column or row that is missing or cannot be used.
    """
    file = _metadata(folder)
    assert file is not None
    columns = _json_lines(file) if file.suffix == ".jsonl" else read_columns(file, as_text=("file_name",))
    label = next((name for name in LABELS if name in columns), None)
    if "file_name" not in columns or label is None:
        raise ValueError(f"{file}: needs the columns file_name and label, but has {', '.join(columns)}")
    paths = []
    for row, (name, value) in enumerate(zip(columns["file_name"], columns[label], strict=True)):
        path = folder / str(name)
        if not name or not path.is_file():
            raise ValueError(f"{file}, row {row}: no file {path}; paths are relative to the metadata")
        if value is None or isinstance(value, list | dict):
            raise ValueError(
                f"{file}, row {row}: label is {value!r}, expected a class; leave the row out, or label it"
            )
        paths.append(path)
    labels = [str(value) for value in columns[label]]
    return by_listed_name(TabledFiles(paths, columns), labels, in_order(labels))


def _not_named(folder: Path, listing: Listing) -> list[str]:
    """A line where pictures lie in the folder that its metadata do not name."""
    file, pictures = _metadata(folder), listing.pictures
    assert file is not None
    assert isinstance(pictures, Files)
    named = set(pictures.paths)
    more = [path for path in image_files(folder) if path not in named]
    if not more:
        return []
    num = counted(len(more), "picture", "pictures")
    return [f"left out: {num} that {file} does not name, as {shown(more[0].relative_to(folder).as_posix())}"]


def _metadata(folder: Path) -> Path | None:
    return next((folder / name for name in METADATA if (folder / name).is_file()), None)


def _json_lines(file: Path) -> dict[str, list[Any]]:
    rows: list[dict[str, Any]] = []
    number = 0
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):  # noqa: B007
            if line.strip():
                rows.append(json.loads(line))
                if not isinstance(rows[-1], dict):
                    raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}, line {number}: not a JSON object ({first_line(error)})") from None
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _data_files(folder: Path) -> list[str]:
    files = _read_json(folder / "state.json").get("_data_files") or []
    names = [str(each["filename"]) for each in files if isinstance(each, dict) and "filename" in each]
    missing = next((name for name in names if Path(name).name != name or not (folder / name).is_file()), None)
    if missing is not None or not names:
        raise ValueError(
            f"{folder}: state.json names {missing or 'no file of data'}, which is not there; save the set again"
        )
    return names


def _read_json(path: Path) -> dict[str, Any]:
    content = read_json(path, "save the set again by datasets' save_to_disk", "save the set again")
    if not isinstance(content, dict):
        raise ValueError(f"{path}: no JSON object; save the set again")
    return content


def _mapped(path: Path) -> Any:
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).read_all()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"{path}: not a readable Arrow stream ({first_line(error)}); save the set again"
        ) from None


def _of_type(features: Mapping[str, Any], kind: str) -> list[str]:
    return [
        name
        for name, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == kind
    ]


def _chosen(folder: Path, what: str, found: Sequence[str], preferred: Sequence[str]) -> str:
    """The one column of a kind, or the first that is preferred."""
    named = next((name for name in preferred if name in found), None)
    if named is None and len(found) == 1:
        return found[0]
    if named is None:
        told = f"the columns {', '.join(found)}" if found else "no column"
        raise ValueError(f"{folder}: {told} of {what}; rename the one that is meant to {preferred[0]}")
    return named
