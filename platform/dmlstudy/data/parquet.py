"""Parquet: images in the Hugging Face layout in, embeddings in and out.

Shapes: N rows, D embedding size, H, W, C height, width and channels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from numpy.typing import NDArray

from dmlstudy.data.images import Images, Labels, decode, stack


class ImageTable(NamedTuple):
    """Rows of image files: where each picture came from, its class id if the files have labels."""

    ids: list[str]
    images_NHWC: Images
    labels_N: Labels | None
    class_names: dict[int, str]  # of the labels that occur, in the order of the class ids


def read_images(paths: Sequence[Path], image_size: int | None) -> ImageTable:
    """Read files in the Hugging Face layout (``image`` or ``img`` = struct{bytes, path}, ``label`` = int),
    one row group at a time; class names come from the files' metadata, else they are the label's digits.

    Raises ValueError naming the file for a broken file, a missing column, a null or a picture that
    cannot be decoded.
    """
    files = [_open(path) for path in paths]
    num_images = sum(file.metadata.num_rows for file in files)
    if num_images == 0:
        raise ValueError(f"{paths[0]}: no rows")
    has_labels = all("label" in file.schema_arrow.names for file in files)
    ids: list[str] = []
    labels: list[int] = []

    def pictures() -> Iterator[tuple[str, Images]]:
        for path, file in zip(paths, files, strict=True):
            for position, row in enumerate(_rows(path, file, has_labels)):
                place = f"{path}, row {position}"
                picture = row["picture"] or {}
                if not picture.get("bytes"):
                    raise ValueError(f"{place}: no image bytes; store the picture inside the file")
                if has_labels:
                    if row["label"] is None or row["label"] < 0:
                        raise ValueError(
                            f"{place}: label is {row['label']}; give every image a class id >= 0"
                        )
                    labels.append(row["label"])
                ids.append(picture.get("path") or str(len(ids)))
                yield place, decode(picture["bytes"], place, image_size)

    images_NHWC = stack(pictures(), num_images)
    if not has_labels:
        return ImageTable(ids, images_NHWC, None, {})
    labels_N = np.array(labels, dtype=np.int64)
    names = next((n for n in map(_class_names, files) if n), ())
    class_names = {c: names[c] if c < len(names) else str(c) for c in np.unique(labels_N).tolist()}
    return ImageTable(ids, images_NHWC, labels_N, class_names)


def _open(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from error


def _rows(path: Path, file: Any, has_labels: bool) -> Iterator[dict[str, Any]]:
    schema = file.schema_arrow
    column = next((c for c in ("image", "img") if c in schema.names), None)
    if column is None or not pa.types.is_struct(schema.field(column).type):
        raise ValueError(f"{path}: no column image or img of type struct{{bytes, path}}, but {schema.names}")
    if has_labels and not pa.types.is_integer(schema.field("label").type):
        raise ValueError(f"{path}: column label is {schema.field('label').type}, expected int64")
    columns = [column, *(["label"] if has_labels else [])]
    for group in range(file.num_row_groups):
        try:
            table = file.read_row_group(group, columns=columns)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{path}: row group {group} is damaged ({error})") from error
        for row in table.to_pylist():
            yield {"picture": row[column], "label": row.get("label")}


def _class_names(file: Any) -> Sequence[str]:
    metadata = file.schema_arrow.metadata or {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features["label"]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def write_embeddings(
    path: str | Path, ids: Sequence[str], labels: Sequence[str] | None, z_ND: NDArray[np.float32]
) -> None:
    """Write columns id, label (null if unknown) and embedding (fixed-size list of float32), all or nothing.

    Raises ValueError if the folder is missing or the columns differ in length.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: folder {path.parent} does not exist; create it first")
    if z_ND.ndim != 2 or len(ids) != len(z_ND) or (labels is not None and len(labels) != len(z_ND)):
        num_labels = "no" if labels is None else len(labels)
        raise ValueError(f"{path}: {len(ids)} ids, {num_labels} labels and embeddings of shape {z_ND.shape}")
    values = pa.array(np.ascontiguousarray(z_ND, dtype=np.float32).reshape(-1))
    table = pa.table(
        {
            "id": pa.array(list(ids), pa.string()),
            "label": pa.nulls(len(ids), pa.string()) if labels is None else pa.array(labels, pa.string()),
            "embedding": pa.FixedSizeListArray.from_arrays(values, z_ND.shape[1]),
        }
    )
    _replace_atomically(path, lambda draft: pq.write_table(table, draft))


def _replace_atomically(path: Path, write: Callable[[Path], None]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        write(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_embeddings(path: str | Path) -> tuple[list[str], list[str] | None, NDArray[np.float32]]:
    """Read what ``write_embeddings`` wrote: ids, labels (None if unknown), z_ND.

    Raises ValueError naming the file if it is missing, broken or not a file of embeddings.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        table = _open(path).read()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: damaged ({error})") from error
    schema = table.schema
    if not {"id", "label", "embedding"} <= set(schema.names) or not pa.types.is_fixed_size_list(
        schema.field("embedding").type
    ):
        raise ValueError(f"{path}: not a file of embeddings, its columns are {schema.names}")
    dim = schema.field("embedding").type.list_size
    values = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    labels = table["label"]
    return (
        table["id"].to_pylist(),
        None if labels.null_count == len(labels) else labels.to_pylist(),
        values.astype(np.float32, copy=False).reshape(-1, dim),
    )
