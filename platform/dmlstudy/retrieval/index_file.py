"""An index as one file that faiss itself opens: its own bytes, and behind them what it does not read.

    [faiss's own bytes][JSON][length of the JSON, 8 bytes][magic line][SHA-256 of all that]

``faiss.read_index(path)``, of codes ``read_index_binary``, gives the index; ids that are not 0, 1, 2, ... are in it as
those of an ``IndexIDMap``. Older files, with the header first, are read too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray

_faiss: Any = faiss  # SWIG makes its classes, of which no stub knows all

_MAGIC = b"\ndmlstudy index 2\n"
_OLD_MAGIC = b"dmlstudy index 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_MOST_HEAD = 1 << 20
_TABLE_GROWTH = 256  # bytes of product quantisation's tables for a byte of the cells' means, at most
_READING = threading.Lock()

CLASSES: Mapping[str, Mapping[str, str]] = {
    "embeddings": {
        "flat": "IndexFlat",
        "ivf": "IndexIVFFlat",
        "ivf_pq": "IndexIVFPQ",
        "hnsw": "IndexHNSWFlat",
    },
    "codes": {"flat": "IndexBinaryFlat", "ivf": "IndexBinaryIVF", "hnsw": "IndexBinaryHNSW"},
}
"""The kinds of indexes by faiss's names."""


class Content(NamedTuple):
    """The content of a file: the header, the engine on the CPU, and the ids."""

    head: dict[str, Any]
    engine: Any
    id_N: NDArray[np.int64]


def write(file: IO[bytes], head: Mapping[str, Any], engine: Any, id_N: NDArray[np.int64]) -> None:
    """Write an engine that is on the CPU, with its ids."""
    digest, size = hashlib.sha256(), 0

    def add(content: bytes) -> int:
        nonlocal size
        digest.update(content)
        size += len(content)
        return file.write(content)

    is_binary = isinstance(engine, _faiss.IndexBinary)
    whole = engine if np.array_equal(id_N, np.arange(len(id_N))) else _with_ids(engine, id_N, is_binary)
    writer = _faiss.PyCallbackIOWriter(add)
    (_faiss.write_index_binary if is_binary else _faiss.write_index)(whole, writer)
    described = json.dumps({**head, "faiss_bytes": size}).encode()
    add(described + len(described).to_bytes(8, "little") + _MAGIC)
    file.write(digest.digest())


def _with_ids(engine: Any, id_N: NDArray[np.int64], is_binary: bool) -> Any:
    """The engine in a map of ids, which only refers to it."""
    if is_binary:
        whole = _faiss.IndexBinaryIDMap(_faiss.IndexBinaryFlat(engine.d))
        whole.code_size = engine.code_size
    else:
        whole = _faiss.IndexIDMap(_faiss.IndexFlat(engine.d, engine.metric_type))
    whole.index, whole.ntotal, whole.own_fields = engine, engine.ntotal, False
    _faiss.copy_array_to_vector(np.ascontiguousarray(id_N, np.int64), whole.id_map)
    return whole


def read_head(file: IO[bytes], path: Path) -> dict[str, Any]:
    """The header of a file, which is whole. Raises ValueError where it is not."""
    refusal = ValueError(f"{path} is not an index, or is damaged or half-written: build it anew")
    if not _is_whole(file):
        raise refusal
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    if file.read(len(_OLD_MAGIC)) == _OLD_MAGIC:
        line = file.readline(_MOST_HEAD)
        start, end = file.tell(), size - _DIGEST_BYTES
    else:
        tail = size - _DIGEST_BYTES - len(_MAGIC) - 8
        if tail < 0:
            raise refusal
        file.seek(tail)
        length = int.from_bytes(file.read(8), "little")
        if file.read(len(_MAGIC)) != _MAGIC or not 0 < length <= min(tail, _MOST_HEAD):
            raise refusal
        file.seek(tail - length)
        line = file.read(length)
        start, end = 0, tail - length
    try:
        head = json.loads(line)
        assert isinstance(head, dict)
    except (ValueError, RecursionError, AssertionError):
        raise refusal from None
    return {**head, "start": start, "end": end}


def read(file: IO[bytes], path: Path, head: Mapping[str, Any], *, is_binary: bool) -> Content:
    """The engine and ids behind, or before, a header. Raises ValueError for what faiss does not read."""
    num_vectors, start, end = head.get("num_vectors"), head["start"], head["end"]
    refusal = f"{path} does not hold what its header says (%s): build it anew"
    if type(num_vectors) is not int or not 0 < num_vectors < 1 << 48:
        raise ValueError(refusal % "vectors")
    id_N = np.arange(num_vectors) if start == 0 else None
    file.seek(start)
    if id_N is None:
        if 8 * num_vectors > end - start:
            raise ValueError(refusal % "vectors")
        id_N = np.frombuffer(file.read(8 * num_vectors), "<i8").astype(np.int64)

    def next_bytes(count: int) -> bytes:
        return file.read(max(0, min(count, end - file.tell())))

    try:
        with _sizes_below((end - start) * (_TABLE_GROWTH if _has_tables(head) else 1)):
            engine = (_faiss.read_index_binary if is_binary else _faiss.read_index)(
                _faiss.PyCallbackIOReader(next_bytes)
            )
    except Exception as error:  # of C++: RuntimeError, MemoryError, ValueError or what SWIG makes of another
        raise ValueError(f"{path}: faiss does not read it ({_reason(error)}): build it anew") from None
    if not isinstance(engine, _faiss.IndexBinary if is_binary else _faiss.Index):
        raise ValueError(refusal % "an index")
    if isinstance(engine, _faiss.IndexBinaryIDMap if is_binary else _faiss.IndexIDMap):
        ids = np.array(_faiss.vector_to_array(engine.id_map), np.int64)
        inner = (_faiss.downcast_IndexBinary if is_binary else _faiss.downcast_index)(engine.index)
        inner.referenced_objects = [engine]  # the map owns it: to hand it over would break SWIG's count
        engine, id_N = inner, ids
    if engine.ntotal != num_vectors or len(id_N) != num_vectors or len(np.unique(id_N)) < num_vectors:
        raise ValueError(refusal % "ids")
    return Content(dict(head), engine, id_N)


def _has_tables(head: Mapping[str, Any]) -> bool:
    """True if faiss makes look-up tables of what it reads."""
    identity = head.get("identity")
    return isinstance(identity, dict) and identity.get("kind") == "ivf_pq"


@contextmanager
def _sizes_below(count: int) -> Iterator[None]:
    """Let faiss believe no size that a file of so many bytes cannot have, which it would reserve memory for."""
    limits = ("deserialization_vector_byte_limit", "deserialization_loop_limit")
    with _READING:  # faiss has one limit for the whole process
        before = {name: getattr(_faiss, f"get_{name}")() for name in limits if hasattr(_faiss, f"get_{name}")}
        try:
            for name in before:
                getattr(_faiss, f"set_{name}")(count)
            yield
        finally:
            for name, value in before.items():
                getattr(_faiss, f"set_{name}")(value)


def _reason(error: Exception) -> str:
    """The last part of what faiss says, without its place in faiss's source."""
    said = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"^Error in .*?: ", "", said)[:160]


def check(engine: Any, path: Path, *, kind: str, dim: int, metric: int | None) -> None:
    """Raise ValueError where an engine is not of the kind, size or metric, or points beyond its own vectors.

    ``metric`` is faiss's, None of codes. Whoever writes a file can write its digest: faiss follows the numbers of a
    graph or a list without looking.
    """
    expected = getattr(faiss, CLASSES["codes" if metric is None else "embeddings"][kind])
    is_right = isinstance(engine, expected) and engine.d == dim and engine.is_trained
    is_right = is_right and (metric is None or engine.metric_type == metric)
    parts = {"flat": _is_flat_whole, "hnsw": _is_graph_whole}
    if not (is_right and parts.get(kind, _is_cells_whole)(engine)):
        raise ValueError(f"{path} does not hold an index of the kind {kind} and size {dim}: build it anew")


def _is_flat_whole(engine: Any) -> bool:
    held = engine.xb if isinstance(engine, _faiss.IndexBinary) else engine.codes
    return bool(held.size() == engine.ntotal * engine.code_size)


def _downcast(engine: Any) -> Any:
    return (_faiss.downcast_IndexBinary if isinstance(engine, _faiss.IndexBinary) else _faiss.downcast_index)(
        engine
    )


def _is_flat_of(engine: Any, like: Any, rows: int) -> bool:
    """True if an index within another one is flat, whole, of its size and has ``rows`` rows."""
    flat = _faiss.IndexBinaryFlat if isinstance(like, _faiss.IndexBinary) else _faiss.IndexFlat
    return (
        isinstance(engine, flat) and engine.d == like.d and engine.ntotal == rows and _is_flat_whole(engine)
    )


def _is_cells_whole(engine: Any) -> bool:
    lists = engine.invlists
    if lists is None or lists.nlist != engine.nlist or lists.code_size != engine.code_size:
        return False
    if not _is_flat_of(_downcast(engine.quantizer), engine, engine.nlist):
        return False
    if isinstance(engine, _faiss.IndexIVFPQ):
        coder = engine.pq
        if coder.nbits != 8 or coder.M * coder.dsub != engine.d or engine.code_size != coder.M:
            return False
        if coder.ksub != 256 or coder.centroids.size() != 256 * engine.d:
            return False
    found = 0
    for number in range(engine.nlist):
        size = lists.list_size(number)
        if size:
            ids = _faiss.rev_swig_ptr(lists.get_ids(number), size)
            if ids.min() < 0 or ids.max() >= engine.ntotal:
                return False
        found += size
    return bool(found == engine.ntotal)


def _is_graph_whole(engine: Any) -> bool:
    graph, count = engine.hnsw, engine.ntotal
    if not _is_flat_of(_downcast(engine.storage), engine, count):
        return False
    level_N = _faiss.vector_to_array(graph.levels)
    offset = _faiss.vector_to_array(graph.offsets).astype(np.int64)
    link = _faiss.vector_to_array(graph.neighbors)
    until = _faiss.vector_to_array(graph.cum_nneighbor_per_level).astype(np.int64)
    if len(level_N) != count or len(offset) != count + 1 or offset[0] != 0 or offset[-1] != len(link):
        return False
    if level_N.min() < 1 or level_N.max() >= len(until) or (np.diff(until) < 0).any() or until[0] != 0:
        return False
    if (np.diff(offset) != until[level_N]).any() or link.min(initial=0) < -1 or link.max(initial=0) >= count:
        return False
    entry, top = graph.entry_point, graph.max_level
    if not (0 <= entry < count and 0 <= top < level_N[entry]):
        return False
    for node in np.flatnonzero(level_N > 1):  # a neighbour on a level must have links of its own there
        for level in range(1, level_N[node]):
            own = link[offset[node] + until[level] : offset[node] + until[level + 1]]
            if (level_N[own[own >= 0]] <= level).any():
                return False
    return True


def _is_whole(file: IO[bytes]) -> bool:
    """True if the file ends in the SHA-256 of its preceding bytes."""
    size = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
    if size < len(_OLD_MAGIC):
        return False
    file.seek(0)
    digest = hashlib.sha256()
    while size:
        content = file.read(min(size, 1 << 24))
        if not content:
            return False
        digest.update(content)
        size -= len(content)
    return file.read() == digest.digest()
