"""Files of embeddings a batch at a time, so that a file may be larger than memory.

Shapes: N items of a batch, D columns of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from numpy.typing import NDArray

from dmlstudy.data.parquet import (
    embeddings_file,
    embeddings_metadata,
    embeddings_table,
    kept_dtype,
    parquet_file,
    replace_atomically,
)
from dmlstudy.text import first_line

BATCH = 1 << 16
"""Items of a batch."""


class EmbeddingsHead(NamedTuple):
    """The number of items of a file, the numbers of each embedding, and their type."""

    num_items: int
    dim: int
    dtype: np.dtype[Any]


class ItemBatch(NamedTuple):
    """Some items in their order; a label is None where none is known."""

    ids: list[str]
    labels: list[str | None]


def read_head(path: str | Path) -> EmbeddingsHead:
    """The head of a file of embeddings. Raises ValueError naming a file that is none."""
    return _head(Path(path), embeddings_file(Path(path)))


def read_item_batches(path: str | Path) -> Iterator[ItemBatch]:
    """The columns id and label of a file of embeddings, or of a gallery's items, in batches."""
    path = Path(path)
    for batch in _batches(
        path, parquet_file(path) if path.is_file() else embeddings_file(path), ["id", "label"]
    ):
        yield ItemBatch(batch.column("id").to_pylist(), batch.column("label").to_pylist())


def read_vector_batches(path: str | Path) -> Iterator[NDArray[Any]]:
    """The embeddings (N, D) of a file in batches: float32, int8 or uint8. Raises ValueError naming the file."""
    path = Path(path)
    file = embeddings_file(path)
    head = _head(path, file)
    for batch in _batches(path, file, ["embedding"]):
        values = batch.column("embedding").flatten()
        if values.null_count or len(values) != len(batch) * head.dim:
            raise ValueError(f"{path}: an embedding is missing; make the file anew")
        yield values.to_numpy(zero_copy_only=False).astype(head.dtype, copy=False).reshape(-1, head.dim)


def write_batches(
    path: str | Path,
    items: Iterable[ItemBatch],
    vectors: Iterable[NDArray[Any]],
    origin: Mapping[str, str],
    left_out: Sequence[tuple[str, str]] = (),
) -> int:
    """Write batches of items and of their embeddings as one file of embeddings, all or nothing; the number of items.

    Batches of both may differ in length. Raises ValueError where there are more of one than of the other.
    """
    path = Path(path)
    metadata = embeddings_metadata(origin, left_out)
    num_items = 0

    def write(draft: Path) -> None:
        nonlocal num_items
        writer: Any = None
        try:
            for batch, z_ND in _in_step(iter(items), iter(vectors)):
                table = embeddings_table(*batch, z_ND).replace_schema_metadata(metadata)
                if writer is None:
                    writer = pq.ParquetWriter(draft, table.schema)
                writer.write_table(table)
                num_items += len(table)
        finally:
            if writer is not None:
                writer.close()
        if writer is None:
            raise ValueError(f"{path}: there are no items to write")

    replace_atomically(path, write)
    return num_items


def write_item_batches(path: Path, items: Iterable[ItemBatch]) -> int:
    """Write batches as ``write_items`` writes all at once; the number of items."""
    schema = pa.schema([("id", pa.string()), ("label", pa.string())])
    num_items = 0

    def write(draft: Path) -> None:
        nonlocal num_items
        with pq.ParquetWriter(draft, schema) as writer:
            for batch in items:
                writer.write_table(
                    pa.table({"id": batch.ids, "label": pa.array(batch.labels, pa.string())}, schema)
                )
                num_items += len(batch.ids)

    replace_atomically(path, write)
    return num_items


def _in_step(
    items: Iterator[ItemBatch], vectors: Iterator[NDArray[Any]]
) -> Iterator[tuple[ItemBatch, NDArray[Any]]]:
    """Both in batches of equal lengths. Raises ValueError where one ends before the other."""
    batch, z_ND = ItemBatch([], []), np.empty((0, 0))
    while True:
        if not batch.ids:
            batch = next(items, ItemBatch([], []))
        if not len(z_ND):
            z_ND = next(vectors, np.empty((0, 0)))
        num = min(len(batch.ids), len(z_ND))
        if num == 0:
            if batch.ids or len(z_ND):
                raise ValueError("there are as many embeddings as items in a sound file; make it anew")
            return
        yield ItemBatch(batch.ids[:num], batch.labels[:num]), z_ND[:num]
        batch, z_ND = ItemBatch(batch.ids[num:], batch.labels[num:]), z_ND[num:]


def _head(path: Path, file: Any) -> EmbeddingsHead:
    column = file.schema_arrow.field("embedding").type
    dtype = np.dtype(column.value_type.to_pandas_dtype())
    return EmbeddingsHead(file.metadata.num_rows, column.list_size, kept_dtype(dtype))


def _batches(path: Path, file: Any, columns: list[str]) -> Iterator[Any]:
    try:
        for group in range(file.num_row_groups):  # all groups at once would be held until the last was read
            yield from file.iter_batches(batch_size=BATCH, row_groups=[group], columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: damaged ({first_line(error)})") from error
