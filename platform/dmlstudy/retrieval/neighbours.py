"""Exact nearest neighbours, the only door to faiss.

Shapes: Q queries, M gallery items, D embedding size, K neighbours, A neighbours asked of faiss.
"""

from __future__ import annotations

import os
from typing import TypeAlias

import faiss
import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]

_CELLS_PER_CHUNK = 1 << 24  # neighbours held at once: 16 M x (4 + 8) bytes


def _num_threads() -> int:
    """Return OMP_NUM_THREADS if it is set (as Ray does per worker), else the cores of this process."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# torch and faiss bring an OpenMP runtime each; without this faiss would take every core of the machine.
faiss.omp_set_num_threads(_num_threads())
# Always the direct kernel sum_d (q_d - g_d)^2 (the default depends on faiss's version): unlike the BLAS form
# |q|^2 + |g|^2 - 2 q.g it gives equal vectors equal distances wherever they stand, so that ties are ties.
faiss.cvar.distance_compute_blas_threshold = 2**31 - 1


def retrieve(
    query_QD: Floats, gallery_MD: Floats, k: int, self_index: Ints | None = None
) -> tuple[Ints, Floats]:
    """Return the k nearest gallery items of each query by Euclidean distance, ties by gallery index.

    ``self_index[q]`` is the gallery index of query q itself, which is left out (-1: the query is not in
    the gallery). k is clamped to the gallery's size, less one with ``self_index``.
    Returns ``index_QK`` (int64) and ``distance_QK`` (float32, same unit as the embeddings), nearest first.
    Memory beyond the result: O(2^24) neighbours at a time.
    Raises ValueError for NaN or infinite embeddings, unequal D, k < 1 or an empty gallery.
    """
    query_QD = _checked("query", query_QD)
    gallery_MD = _checked("gallery", gallery_MD)
    num_queries, num_items = len(query_QD), len(gallery_MD)
    if query_QD.shape[1] != gallery_MD.shape[1]:
        raise ValueError(f"queries have {query_QD.shape[1]} dimensions, the gallery {gallery_MD.shape[1]}")
    k = min(k, num_items - (self_index is not None))
    if k < 1:
        raise ValueError(f"k = {k} neighbours of {num_items} gallery items; needs k >= 1 and an item to find")
    self_Q = np.full(num_queries, -1, np.int64) if self_index is None else np.asarray(self_index, np.int64)
    assert self_Q.shape == (num_queries,)

    index_QK = np.empty((num_queries, k), np.int64)
    distance_QK = np.empty((num_queries, k), np.float32)
    open_rows = np.arange(num_queries)
    asked = min(num_items, k + 2)  # one for the query itself, one to see a tie at the boundary
    while len(open_rows):
        still_open = []
        rows_per_chunk = max(1, _CELLS_PER_CHUNK // asked)
        for start in range(0, len(open_rows), rows_per_chunk):
            rows = open_rows[start : start + rows_per_chunk]
            index_QK[rows], distance_QK[rows], tied = _ask(query_QD[rows], gallery_MD, k, asked, self_Q[rows])
            still_open.append(rows[tied])
        open_rows = np.concatenate(still_open)
        asked = min(num_items, 4 * asked)
    return index_QK, np.sqrt(distance_QK)


def _ask(
    query_QD: Floats, gallery_MD: Floats, k: int, asked: int, self_Q: Ints
) -> tuple[Ints, Floats, NDArray[np.bool_]]:
    """Return index_QK, squared distance_QK and whether an item not returned may tie with the k-th."""
    distance_QA, index_QA = faiss.knn(query_QD, gallery_MD, asked)
    assert index_QA.min(initial=0) >= 0
    farthest_Q = distance_QA[:, -1].copy()
    distance_QA[index_QA == self_Q[:, None]] = np.inf
    order_QK = np.lexsort((index_QA, distance_QA), axis=-1)[:, :k]
    distance_QK = np.take_along_axis(distance_QA, order_QK, axis=1)
    tied_Q = (distance_QK[:, -1] >= farthest_Q) & (asked < len(gallery_MD))
    return np.take_along_axis(index_QA, order_QK, axis=1), distance_QK, tied_Q


def _checked(name: str, z_ND: Floats) -> Floats:
    if z_ND.ndim != 2:
        raise ValueError(f"{name} embeddings have shape {z_ND.shape}, expected (rows, dimensions)")
    in_range_N = (np.abs(z_ND) < 1e17).all(axis=1)  # false for NaN; beyond, squared distances overflow
    if not in_range_N.all():
        row = int(np.argmin(in_range_N))
        raise ValueError(
            f"{name} embedding {row} is not finite: the training diverged, or the input is damaged"
        )
    return np.ascontiguousarray(z_ND, dtype=np.float32)
