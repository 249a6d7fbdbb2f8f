"""Parquet: pictures in the Hugging Face layout in, tables in, embeddings in and out.

Shapes: N rows, D embedding or feature size.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.csv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from filelock import FileLock
from numpy.typing import NDArray

from dmlstudy.data.images import Labels
from dmlstudy.files import DRAFT, PARQUET, cache_folder, check_output, written_whole
from dmlstudy.records import PairCounts, UnitScores
from dmlstudy.text import first_line

IN_MEMORY_BYTES = 2**28
"""Files that are no larger together are kept in memory, encoded; of larger ones an Arrow file is mapped."""


class PictureTable:
    """Rows of files in the Hugging Face layout (``image`` or ``img`` = struct{bytes, path}, ``label`` = int).

    The files are read a row group at a time. Pictures stay encoded: those of small files in memory, others in an
    Arrow file under ``$XDG_CACHE_HOME/dmlstudy`` (default ``~/.cache``), which is mapped into memory.

    The Arrow file is named by the files' paths, sizes and times. One process writes it, whole or not at all, while
    others wait (also those of hosts that share the folder). It may be deleted when no study runs.

    Class names come from the files' metadata, else they are the label's digits. Raises ValueError naming the file for
    a broken file, a missing column or a null.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        files = [parquet_file(path) for path in paths]
        rows = [file.metadata.num_rows for file in files]
        if sum(rows) == 0:
            raise ValueError(f"{paths[0]}: no rows")
        self._starts = [0, *itertools.accumulate(rows)]
        has_labels = all("label" in file.schema_arrow.names for file in files)
        schema = pa.schema(
            [("bytes", pa.large_binary()), ("path", pa.string())]
            + ([("label", pa.int64())] if has_labels else [])
        )

        def groups() -> Iterator[Any]:
            for path, file in zip(paths, files, strict=True):
                yield from _groups(path, file, has_labels, schema)

        if sum(path.stat().st_size for path in paths) <= IN_MEMORY_BYTES:
            table = pa.Table.from_batches(groups(), schema)
        else:
            table = _mapped(paths, schema, groups)
        self._bytes = table["bytes"]
        self._path = table["path"]
        self.labels_N: Labels | None = table["label"].to_numpy() if has_labels else None
        self.class_names: dict[int, str] = {}  # of the labels that occur, in the order of the class ids
        names = next((n for n in map(_class_names, files) if n), ())
        self.has_names = bool(names)  # else classes are called by their ids
        if self.labels_N is not None:
            self.class_names = {
                c: names[c] if c < len(names) else str(c) for c in np.unique(self.labels_N).tolist()
            }
        ends = itertools.accumulate(len(chunk) for chunk in self._bytes.chunks)
        self._chunk_starts = [0, *ends]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def ids(self) -> list[str]:
        """Each picture's origin, or its number."""
        return [path or str(row) for row, path in enumerate(self._path.to_pylist())]

    def place(self, row: int) -> str:
        number = bisect.bisect_right(self._starts, row) - 1
        return f"{self.paths[number]}, row {row - self._starts[number]}"

    def encoded(self, row: int) -> bytes:
        number = bisect.bisect_right(self._chunk_starts, row) - 1
        content: bytes = self._bytes.chunk(number)[row - self._chunk_starts[number]].as_py()
        return content


def _mapped(paths: Sequence[Path], schema: Any, groups: Callable[[], Iterator[Any]]) -> Any:
    """The rows in an Arrow file that is mapped into memory, made if it is not there."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    name = hashlib.sha256(repr((stats, schema.names)).encode()).hexdigest()[:32]
    folder = cache_folder()
    kept = folder / f"{name}.arrow"

    def write(draft: Path) -> None:
        with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in groups():
                writer.write_batch(batch)

    try:
        if not kept.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):
                if not kept.is_file():
                    for left in folder.glob(f".*.arrow.*{DRAFT}"):  # only the lock's holder writes
                        left.unlink()
                    replace_atomically(kept, write)
        return pa.ipc.open_file(pa.memory_map(str(kept))).read_all()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"{kept}: cannot be written or read ({first_line(error)}); set XDG_CACHE_HOME to a folder with room for"
            f" {sum(size for _, size, _ in stats) / 2**30:.1f} GiB, or delete the file"
        ) from error


def parquet_file(path: Path) -> Any:
    """A Parquet file, opened. Raises ValueError naming one that cannot be read."""
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({first_line(error)})") from error
    _check_names(path, file.schema_arrow.names)
    return file


def _check_names(path: Path, names: Sequence[str]) -> None:
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: has two columns {twice!r}; rename or remove one")


def _groups(path: Path, file: Any, has_labels: bool, schema: Any) -> Iterator[Any]:
    """Record batches of ``schema``, one row group after the other."""
    present = file.schema_arrow
    column = next((c for c in ("image", "img") if c in present.names), None)
    if column is None or not pa.types.is_struct(present.field(column).type):
        raise ValueError(f"{path}: no column image or img of type struct{{bytes, path}}, but {present.names}")
    fields = {field.name: field.type for field in present.field(column).type}
    if not any(
        is_of(fields.get("bytes", pa.null())) for is_of in (pa.types.is_binary, pa.types.is_large_binary)
    ):
        raise ValueError(
            f"{path}: {column}.bytes is {fields.get('bytes', 'missing')}, expected binary; store a picture's file in"
            " each"
        )
    has_paths = pa.types.is_string(fields.get("path", pa.null()))
    if has_labels and not pa.types.is_integer(present.field("label").type):
        raise ValueError(f"{path}: column label is {present.field('label').type}, expected int64")
    columns = [column, *(["label"] if has_labels else [])]
    start = 0
    for group in range(file.num_row_groups):
        try:
            batches = file.read_row_group(group, columns=columns).to_batches()
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{path}: row group {group} is damaged ({first_line(error)})") from error
        for batch in batches:
            encoded = pc.struct_field(batch[column], "bytes")
            if (row := _first(pc.fill_null(pc.equal(pc.binary_length(encoded), 0), True))) is not None:
                raise ValueError(
                    f"{path}, row {start + row}: no image bytes; store the picture inside the file"
                )
            own = pc.struct_field(batch[column], "path") if has_paths else pa.nulls(len(batch), pa.string())
            arrays = [encoded, own]
            if has_labels:
                labels = batch["label"]
                if (row := _first(pc.fill_null(pc.less(labels, 0), True))) is not None:
                    raise ValueError(
                        f"{path}, row {start + row}: label is {labels[row]}; give every image a class id >= 0"
                    )
                arrays.append(labels)
            try:
                cast = [array.cast(kind) for array, kind in zip(arrays, schema.types, strict=True)]
            except pa.ArrowException as error:
                raise ValueError(f"{path}: row group {group} cannot be read ({first_line(error)})") from error
            yield pa.RecordBatch.from_arrays(cast, schema=schema)
            start += len(batch)


def _first(flags: Any) -> int | None:
    """The position of the first that is true."""
    position = flags.index(True).as_py()
    return None if position < 0 else position


def _class_names(file: Any) -> Sequence[str]:
    metadata = file.schema_arrow.metadata or {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features["label"]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


EMBEDDING_COLUMNS = ("id", "embedding")
"""Columns by which a file of embeddings is known."""

OTHER_FILES = (".csv", ".html", ".json", ".jsonl", ".npy", ".npz", ".tsv", ".txt", ".zip")
"""Suffixes that a Parquet file should not have."""


def check_table_output(
    path: str | Path, what: str, columns: Collection[str], *, read: Sequence[str | Path] = ()
) -> Path:
    """The path, if a Parquet file may be written to it: no file is there, or one that has these columns.

    ``what`` is what such a file is called, ``read`` are the files that it is made of. Raises ValueError as
    ``files.check_output``, for one of those, and for a name that is one of other files.
    """
    path = check_output(path, what, PARQUET)
    if path.suffix.lower() in OTHER_FILES:
        raise ValueError(
            f"{path}: would be {what}, a Parquet file; call it {path.with_suffix('.parquet').name}"
        )
    if path.exists():
        if any(Path(each).exists() and path.samefile(each) for each in read):
            raise ValueError(f"{path}: is read for it and would be lost; name another output")
        try:
            there = set(pq.read_schema(path).names)
        except (OSError, pa.ArrowException):
            there = set()
        if not there >= set(columns):
            raise ValueError(f"{path}: exists already and is not {what}; name another output")
    return path


def write_embeddings(
    path: str | Path,
    ids: Sequence[str],
    labels: Sequence[str] | None,
    z_ND: NDArray[Any],
    left_out: Sequence[tuple[str, str]] = (),
) -> None:
    """Write columns id, label (null if unknown) and embedding (fixed-size list), all or nothing.

    The list is of float32, or of int8 or uint8 where ``z_ND`` is: codes of +1 and -1, numbers of 8 bits, packed bits.
    ``left_out``, the items that have no embedding and why, is kept in the metadata.

    Raises ValueError if the folder is missing or the columns differ in length.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: folder {path.parent} does not exist; create it first")
    if z_ND.ndim != 2 or len(ids) != len(z_ND) or (labels is not None and len(labels) != len(z_ND)):
        num_labels = "no" if labels is None else len(labels)
        raise ValueError(f"{path}: {len(ids)} ids, {num_labels} labels and embeddings of shape {z_ND.shape}")
    table = embeddings_table(ids, labels, z_ND).replace_schema_metadata(embeddings_metadata({}, left_out))
    replace_atomically(path, lambda draft: pq.write_table(table, draft))


def embeddings_table(ids: Sequence[str], labels: Sequence[str | None] | None, z_ND: NDArray[Any]) -> Any:
    """The columns id, label and embedding."""
    values = pa.array(np.ascontiguousarray(z_ND, kept_dtype(z_ND.dtype)).reshape(-1))
    return pa.table(
        {
            "id": pa.array(list(ids), pa.string()),
            "label": pa.nulls(len(ids), pa.string()) if labels is None else pa.array(labels, pa.string()),
            "embedding": pa.FixedSizeListArray.from_arrays(values, z_ND.shape[1]),
        }
    )


def kept_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that embeddings of a type are kept in: int8 and uint8 as they are, others as float32."""
    return dtype if dtype in (np.int8, np.uint8) else np.dtype(np.float32)


def join_embeddings(parts: Sequence[Path], path: str | Path, origin: Mapping[str, str]) -> int:
    """Put files of ``write_embeddings`` one after the other into one, all or nothing, a row group each; D.

    ``origin`` is kept in the file's metadata, for ``embeddings_origin``, and so is what parts have left out. Raises
    ValueError naming a part that is damaged, or of another size or type than the first.
    """
    path = Path(path)
    schema = parquet_file(parts[0]).schema_arrow
    metadata = embeddings_metadata(origin, [each for part in parts for each in embeddings_left_out(part)])

    def write(draft: Path) -> None:
        with pq.ParquetWriter(draft, schema.with_metadata(metadata)) as writer:
            for part in parts:
                table = _embeddings(part)
                if not table.schema.equals(schema):
                    raise ValueError(f"{part}: not of the columns of {parts[0]}; remove it and begin again")
                if len(table):
                    writer.write_table(table.replace_schema_metadata(metadata))

    replace_atomically(path, write)
    return int(schema.field("embedding").type.list_size)


def embeddings_origin(path: str | Path) -> dict[str, str]:
    """The origin that ``join_embeddings`` noted with a file; empty of another.

    Raises ValueError for one that cannot be read.
    """
    noted = (parquet_file(Path(path)).schema_arrow.metadata or {}).get(_ORIGIN)
    return {} if noted is None else dict(json.loads(noted))


def embeddings_left_out(path: str | Path) -> list[tuple[str, str]]:
    """The items that a file of embeddings has left out, and why. Raises ValueError for one that cannot be read."""
    noted = (parquet_file(Path(path)).schema_arrow.metadata or {}).get(_LEFT_OUT)
    return [] if noted is None else [(str(each), str(reason)) for each, reason in json.loads(noted)]


def embeddings_metadata(origin: Mapping[str, str], left_out: Sequence[tuple[str, str]]) -> dict[bytes, str]:
    """The metadata of a file of embeddings."""
    noted = {_ORIGIN: json.dumps(dict(origin))} if origin else {}
    return noted | ({_LEFT_OUT: json.dumps(list(left_out))} if left_out else {})


class Column(NamedTuple):
    """A column of a table; None is null."""

    name: str
    kind: Literal["string", "int64", "float64", "bool"]
    values: Sequence[str | int | float | bool | None]


def write_table(path: Path, columns: Sequence[Column]) -> None:
    """Write columns of equal length and of just these types, all or nothing."""
    types = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
    table = pa.table({each.name: pa.array(each.values, types[each.kind]) for each in columns})
    replace_atomically(path, lambda draft: pq.write_table(table, draft))


_SUM = "sum_"

_OF_FOLDS = (pa.field("fold", pa.int64()),)

_OF_VERDICTS = (pa.field("family", pa.string()), pa.field("seed", pa.int64()))


def unit_scores_as_bytes(scores: UnitScores | None) -> bytes:
    """A Parquet file with the columns unit, count and ``sum_<metric>``; no row where there are no such scores."""
    return _units_as_bytes((), {} if scores is None else {(): scores})


def read_unit_scores(path: Path) -> UnitScores | None:
    """Read what ``unit_scores_as_bytes`` gave; None of a file without rows.

    Raises ValueError naming a file that cannot be read, and one of other columns, types or values.
    """
    return _read_units(path, ()).get(())


def fold_scores_as_bytes(of_folds: Sequence[UnitScores]) -> bytes:
    """The same of each fold, with its number in the column fold."""
    return _units_as_bytes(_OF_FOLDS, {(fold,): scores for fold, scores in enumerate(of_folds)})


def read_fold_scores(path: Path) -> list[UnitScores]:
    """Read what ``fold_scores_as_bytes`` gave; errors as of ``read_unit_scores``."""
    return [scores for _, scores in sorted(_read_units(path, _OF_FOLDS).items())]


def verdict_scores_as_bytes(of_verdicts: Mapping[tuple[str, int], UnitScores]) -> bytes:
    """The same of each family and seed of a verdict, in the columns family and seed.

    A metric that only some families have is null in the rows of the others.
    """
    return _units_as_bytes(_OF_VERDICTS, of_verdicts)


def read_verdict_scores(path: Path) -> dict[tuple[str, int], UnitScores]:
    """Read what ``verdict_scores_as_bytes`` gave; errors as of ``read_unit_scores``."""
    return {(str(family), int(seed)): own for (family, seed), own in _read_units(path, _OF_VERDICTS).items()}


def _units_as_bytes(keys: Sequence[pa.Field], parts: Mapping[tuple[Any, ...], UnitScores]) -> bytes:
    """One table of several scores by unit, each under the values of its key columns."""
    names = list(dict.fromkeys(name for own in parts.values() for name in own.sums))
    rows = [(key, own, len(own.units)) for key, own in parts.items()]
    columns = {
        field.name: pa.array([key[place] for key, _, num in rows for _ in range(num)], field.type)
        for place, field in enumerate(keys)
    }
    columns["unit"] = pa.array([unit for _, own, _ in rows for unit in own.units], pa.int64())
    columns["count"] = pa.array([count for _, own, _ in rows for count in own.counts], pa.int64())
    for name in names:
        sums = [value for _, own, num in rows for value in own.sums.get(name, [None] * num)]
        columns[f"{_SUM}{name}"] = pa.array(sums, pa.float64())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


def _read_units(path: Path, keys: Sequence[pa.Field]) -> dict[tuple[Any, ...], UnitScores]:
    """The inverse of ``_units_as_bytes``. Raises ValueError as ``read_unit_scores``."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        table = parquet_file(path).read()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: not a readable table ({first_line(error)})") from error
    expected = {each.name: each.type for each in keys} | {"unit": pa.int64(), "count": pa.int64()}
    found = {each.name: each.type for each in table.schema}
    sums = {name: pa.float64() for name in found if name.startswith(_SUM)}
    if found != expected | sums or any(table[name].null_count for name in expected):
        raise ValueError(
            f"{path}: columns {', '.join(f'{name} {kind}' for name, kind in found.items())}; expected"
            f" {', '.join(f'{name} {kind}' for name, kind in expected.items())} and {_SUM}METRIC double, no null"
        )
    if len(table) and pc.min(table["count"]).as_py() < 1:
        raise ValueError(f"{path}: a count below 1")
    columns = {name: table[name].to_pylist() for name in found}
    of_rows = list(zip(*(columns[each.name] for each in keys), strict=True)) if keys else [()] * len(table)
    places: dict[tuple[Any, ...], list[int]] = {}
    for row, key in enumerate(of_rows):
        places.setdefault(key, []).append(row)
    return {key: _unit_scores(path, columns, own, list(sums)) for key, own in places.items()}


def _unit_scores(
    path: Path, columns: Mapping[str, list[Any]], rows: Sequence[int], sums: Sequence[str]
) -> UnitScores:
    """The scores in these rows; a metric that is null in all of them is none of theirs."""
    known = {name: [columns[name][row] for row in rows] for name in sums}
    for name, values in known.items():
        if any(value is None for value in values) and not all(value is None for value in values):
            raise ValueError(f"{path}: column {name} is null in some rows of a trial")
    return UnitScores(
        units=[columns["unit"][row] for row in rows],
        counts=[columns["count"][row] for row in rows],
        sums={
            name.removeprefix(_SUM): values
            for name, values in known.items()
            if values and values[0] is not None
        },
    )


_PAIRS = b"dmlstudy.pairs"


def pair_counts_as_bytes(counts: PairCounts) -> bytes:
    """A Parquet file of the columns unit, impostors and genuine, with two for each threshold; a row for each class.

    They are named ``accepted_at_1e-3`` and ``rejected_at_1e-3``. Thresholds and curve are in the metadata, as JSON.
    """
    columns = {
        "unit": pa.array(counts.units, pa.int64()),
        "impostors": pa.array(counts.impostors, pa.int64()),
        "genuine": pa.array(counts.genuine, pa.int64()),
    }
    for rate in counts.thresholds:
        columns[f"accepted_at_{rate}"] = pa.array(counts.accepted[rate], pa.int64())
        columns[f"rejected_at_{rate}"] = pa.array(counts.rejected[rate], pa.int64())
    rest = counts.model_dump(include={"shipped", "thresholds", "class_pairs", "curve"})
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns).replace_schema_metadata({_PAIRS: json.dumps(rest)}), sink)
    return bytes(sink.getvalue().to_pybytes())


def read_pair_counts(path: Path) -> PairCounts:
    """Read what ``pair_counts_as_bytes`` gave. Raises ValueError as ``read_items``, and for another file."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    noted = (parquet_file(path).schema_arrow.metadata or {}).get(_PAIRS)
    if noted is None:
        raise ValueError(f"{path}: holds no thresholds; copy it again")
    rest, columns = json.loads(noted), read_columns(path)
    return PairCounts(
        units=columns["unit"],
        impostors=columns["impostors"],
        genuine=columns["genuine"],
        accepted={rate: columns[f"accepted_at_{rate}"] for rate in rest["thresholds"]},
        rejected={rate: columns[f"rejected_at_{rate}"] for rate in rest["thresholds"]},
        **rest,
    )


def write_items(path: Path, ids: Sequence[str], labels: Sequence[str] | None) -> None:
    """Write the columns id and label (null if unknown)."""
    known = pa.nulls(len(ids), pa.string()) if labels is None else pa.array(labels, pa.string())
    table = pa.table({"id": pa.array(list(ids), pa.string()), "label": known})
    replace_atomically(path, lambda draft: pq.write_table(table, draft))


def read_items(path: Path) -> tuple[list[str], list[str] | None]:
    """Read what ``write_items`` wrote. Raises ValueError naming a file that is missing or cannot be read."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    columns = read_columns(path)
    labels = columns["label"]
    return columns["id"], None if None in labels else labels


_ORIGIN = b"dmlstudy"
_LEFT_OUT = b"dmlstudy.left_out"


def replace_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file whole, also after a loss of power, or not at all, by what writes to a path.

    Raises OSError with the file's name.
    """
    try:
        with written_whole(path) as file:
            write(Path(file.name))
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise OSError(errno.EIO, first_line(error), str(path)) from error


def read_embeddings(path: str | Path) -> tuple[list[str], list[str] | None, NDArray[Any]]:
    """Read what ``write_embeddings`` wrote: ids, labels (None if unknown), z_ND of float32, int8 or uint8.

    Raises ValueError naming the file if it is missing, broken or not a file of embeddings.
    """
    table = _embeddings(Path(path))
    schema = table.schema
    dim = schema.field("embedding").type.list_size
    values = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    labels = table["label"]
    return (
        table["id"].to_pylist(),
        None if labels.null_count == len(labels) else labels.to_pylist(),
        values.astype(kept_dtype(values.dtype), copy=False).reshape(-1, dim),
    )


def _embeddings(path: Path) -> Any:
    """The table of a file of embeddings."""
    file = embeddings_file(path)
    try:
        return file.read()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: damaged ({first_line(error)})") from error


def embeddings_file(path: Path) -> Any:
    """The Parquet file, its columns checked. Raises ValueError naming one that is missing, or no file of embeddings."""
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file that `dmlstudy embed` wrote")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    file = parquet_file(path)
    schema = file.schema_arrow
    wanted = {"id", "label", "embedding"} <= set(schema.names)
    if not wanted or not pa.types.is_fixed_size_list(schema.field("embedding").type):
        columns = ", ".join(f"{each.name} {each.type}" for each in schema)
        raise ValueError(
            f"{path}: not a file of embeddings, which has the columns id, label and embedding, a list of fixed size;"
            f" it has {columns}"
        )
    return file


def column_names(path: Path) -> list[str]:
    """The columns of a Parquet file. Raises ValueError naming a file that cannot be read."""
    return list(parquet_file(path).schema_arrow.names)


def read_columns(path: Path, as_text: Sequence[str] = ()) -> dict[str, Any]:
    """A table's columns by name, of a CSV file with a header line or a Parquet file; lists, null as None.

    Of a CSV file label, path, split and the columns ``as_text`` are read as they are written.

    A list column of numbers comes as an array (N, D). Raises ValueError naming a file that cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"data.path: no file {path}")
    try:
        if path.suffix.lower() == ".parquet":
            table = parquet_file(path).read()
        else:
            how = pyarrow.csv.ConvertOptions(
                column_types={name: pa.string() for name in ("label", "path", "split", *as_text)},
                true_values=["True", "true", "1", "1.0"],
                false_values=["False", "false", "0", "0.0"],
                strings_can_be_null=False,  # a class may be called NA or null
            )
            table = _without_empty_text(pyarrow.csv.read_csv(path, convert_options=how))
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: not a readable table ({first_line(error)})") from error
    _check_names(path, table.column_names)
    return {name: _column(path, name, table[name]) for name in table.column_names}


def _without_empty_text(table: Any) -> Any:
    """The table with null for text that is empty."""
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            column = table[place]
            table = table.set_column(place, field, pc.if_else(pc.equal(column, ""), None, column))
    return table


def _column(path: Path, name: str, column: Any) -> Any:
    is_list = pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type)
    if not is_list and not pa.types.is_large_list(column.type):
        return column.to_pylist()
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) != 1 or lengths[0] is None or not pa.types.is_floating(column.type.value_type):
        raise ValueError(
            f"{path}: column {name} is {column.type} of lengths {lengths[:3]}, expected lists of one length of"
            " float numbers"
        )
    values = pc.list_flatten(column).to_numpy()
    return values.reshape(-1, lengths[0])
