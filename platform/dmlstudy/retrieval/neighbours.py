"""Exact nearest neighbours in bounded memory, ties by gallery index.

A matrix product finds the few items that may be among the nearest of each query, within a proven bound of its
rounding error; these alone are then measured by faiss's direct kernel sum_d (q_d - g_d)^2, which gives equal
vectors equal distances wherever they stand, and are ranked by (distance, index). So the answer is that of the
direct kernel on all pairs, digit for digit, at the price of the product. The product of a set with itself is
symmetric, and only half of it is made.

Shapes: Q queries, M gallery items, N items of a set in itself, D embedding size, E = D + 2, K neighbours, B rows
and C columns of one tile, S sampled columns, H hits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Keys: TypeAlias = NDArray[np.uint64]

_TILE = 1024  # rows and columns of one tile of the matrix product
_CELLS_PER_CHUNK = 1 << 22  # pairs measured at once where all are: 4 M x (8 + 8 + 4) bytes
_HITS_AT_ONCE = 1 << 25  # hits expected of the rows that are open at once: 32 M x 10 bytes
_SMALL_GALLERY = 2048  # below, every pair is measured
_LAST = np.uint64(0x7F800000_FFFFFFFF)  # the key of no item: behind all others, unpacked to -1 at infinity


def _num_threads() -> int:
    """Return OMP_NUM_THREADS if it is set (as Ray does per worker), else the cores of this process."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# torch and faiss bring an OpenMP runtime each; without this faiss would take every core of the machine.
faiss.omp_set_num_threads(_num_threads())


class Neighbours(NamedTuple):
    """The nearest items of some rows: ``row_Q`` ascending, ``index_QK`` int64, ``distance_QK`` float32.

    A row that has fewer than K items ends in -1 and infinity.
    """

    row_Q: Ints
    index_QK: Ints
    distance_QK: Floats


def retrieve(
    query_QD: Floats, gallery_MD: Floats, k: int, self_index: Ints | None = None
) -> tuple[Ints, Floats]:
    """Return the k nearest gallery items of each query by Euclidean distance, ties by gallery index.

    ``self_index[q]`` is the gallery index of query q itself, which is left out (-1: the query is not in
    the gallery). k is clamped to the gallery's size, less one where every query is in it; where only some are, these
    have one item less, and with k the gallery's size -1 and infinity in its place, at the end.
    Returns ``index_QK`` (int64) and ``distance_QK`` (float32, same unit as the embeddings), nearest first.
    Raises ValueError for NaN or infinite embeddings, unequal D, k < 1 or an empty gallery.
    """
    parts = list(in_gallery(query_QD, gallery_MD, k, self_index))
    if not parts:
        k = min(k, num_reachable(len(gallery_MD), self_index))
        return np.empty((0, k), np.int64), np.empty((0, k), np.float32)
    return np.concatenate([p.index_QK for p in parts]), np.concatenate([p.distance_QK for p in parts])


def in_gallery(
    query_QD: Floats, gallery_MD: Floats, k: int, self_index: Ints | None = None
) -> Iterator[Neighbours]:
    """Yield the answer of ``retrieve`` in parts, rows ascending; memory O((Q + M) D) beside one part."""
    query_QD = _checked("query", query_QD)
    gallery_MD = _checked("gallery", gallery_MD)
    num_queries, num_items = len(query_QD), len(gallery_MD)
    if query_QD.shape[1] != gallery_MD.shape[1]:
        raise ValueError(f"queries have {query_QD.shape[1]} dimensions, the gallery {gallery_MD.shape[1]}")
    k = min(k, num_reachable(num_items, self_index))
    if k < 1:
        raise ValueError(f"k = {k} neighbours of {num_items} gallery items; needs k >= 1 and an item to find")
    self_Q = np.full(num_queries, -1, np.int64) if self_index is None else np.asarray(self_index, np.int64)
    assert self_Q.shape == (num_queries,)
    return _neighbours(query_QD, gallery_MD, k, self_Q, is_one_set=False)


def num_reachable(num_items: int, self_index: Ints | None) -> int:
    """The most items of a gallery that a query can have: all of them, or one less where every query is in it."""
    return num_items - (self_index is not None and bool((np.asarray(self_index) >= 0).all()))


def in_itself(z_ND: Floats, k: int) -> Iterator[Neighbours]:
    """Yield, in parts, the k nearest others of every item of a set, as ``retrieve`` finds them, in half the time.

    k is clamped to N - 1. Raises ValueError for embeddings that are not finite, k < 1 and fewer than 2 items.
    """
    z_ND = _checked("gallery", z_ND)
    k = min(k, len(z_ND) - 1)
    if k < 1:
        raise ValueError(f"k = {k} neighbours among {len(z_ND)} items; needs k >= 1 and 2 items")
    return _neighbours(z_ND, z_ND, k, np.arange(len(z_ND)), is_one_set=True)


def _neighbours(
    query_QD: Floats, gallery_MD: Floats, k: int, self_Q: Ints, *, is_one_set: bool
) -> Iterator[Neighbours]:
    num_queries, num_items = len(query_QD), len(gallery_MD)
    num_sampled = min(num_items, max(_SMALL_GALLERY // 2, num_items // 32))
    expected = k * num_sampled / num_items
    rank = math.ceil(expected + 3 * math.sqrt(expected) + 3)  # of 10^5 queries, a few have less than k hits
    if num_items <= _SMALL_GALLERY or 3 * rank > num_sampled:
        rows_at_once = max(1, _CELLS_PER_CHUNK // num_items)
        for start in range(0, num_queries, rows_at_once):
            row_B = np.arange(start, min(start + rows_at_once, num_queries))
            yield Neighbours(row_B, *_measure_all(query_QD, gallery_MD, k, self_Q, row_B))
        return

    product = _Product(query_QD, gallery_MD, self_Q)
    floor_Q = product.sampled_floor(num_sampled, rank)
    hits_per_row = rank * num_items // num_sampled
    rows_per_panel = max(1, _HITS_AT_ONCE // hits_per_row // _TILE) * _TILE
    for first in range(0, num_queries, rows_per_panel):
        after = min(first + rows_per_panel, num_queries)
        panel = {
            start: _Hits(start, min(start + _TILE, after), hits_per_row)
            for start in range(first, after, _TILE)
        }
        for start, hits in panel.items():
            for column in range(0, num_items, _TILE):
                mirrored = panel.get(column) if is_one_set else None
                if mirrored is not None and column < start:
                    continue  # its mirror image is done
                product_BC = product.tile(start, hits.after, column)
                other = mirrored if column > start else None
                own_found, other_found = _above(
                    product_BC,
                    floor_Q[start : hits.after],
                    floor_Q[column : other.after] if other is not None else None,
                )
                row_H, column_H, value_H = own_found
                hits.add(row_H, column_H + column, value_H)
                if other is not None and other_found is not None:
                    column_H, row_H, value_H = other_found
                    other.add(column_H, row_H + start, value_H)
        for start in list(panel):
            hits = panel.pop(start)
            row_B = np.arange(start, hits.after)
            index_BK, distance_BK, is_certain_B = hits.nearest(
                query_QD, gallery_MD, k, floor_Q, product.error
            )
            uncertain = row_B[~is_certain_B]
            rows_at_once = max(1, _CELLS_PER_CHUNK // num_items)
            for part in range(0, len(uncertain), rows_at_once):
                some = uncertain[part : part + rows_at_once]
                index_BK[some - start], distance_BK[some - start] = _measure_all(
                    query_QD, gallery_MD, k, self_Q, some
                )
            yield Neighbours(row_B, index_BK, distance_BK)


class _Product:
    """Tiles of p_QM = -||q - g||^2 / 2 by one matrix product, with a query's own place at -inf.

    With the gallery's mean taken off both, p = q.g - |q|^2/2 - |g|^2/2 = [q, |q|^2/2, 1] . [g, -1, -|g|^2/2].
    ``error`` bounds |p + d2 / 2| for d2 the direct kernel's squared distance: a float32 sum of n products in
    any order is off by at most n u sum |products| (1 + O(n u)), u = 2^-24 (Higham 2002, Eq. 3.5). With
    h the largest |q|^2/2 or |g|^2/2 the products of p sum to at most 4h, and so do those of d2 / 2 and of h.
    """

    def __init__(self, query_QD: Floats, gallery_MD: Floats, self_Q: Ints) -> None:
        self._centre_D = gallery_MD.mean(axis=0, dtype=np.float64).astype(np.float32)
        self._query_QD, self._self_Q, self._num_items = query_QD, self_Q, len(gallery_MD)
        centred_MD, half_M = self._centred(gallery_MD)
        num_items, dim = centred_MD.shape
        self._right_ME = np.empty((num_items, dim + 2), np.float32)
        self._right_ME[:, :dim] = centred_MD
        self._right_ME[:, dim] = -1
        self._right_ME[:, dim + 1] = -half_M
        largest = half_M.max()
        self._is_one_set = query_QD is gallery_MD
        if not self._is_one_set:
            for start in range(0, len(query_QD), _TILE):
                largest = max(largest, self._centred(query_QD[start : start + _TILE])[1].max())
        self.error = float(largest) * 4 * (3 * dim + 16) * 2.0**-24
        self._left = (-1, np.empty((0, 0), np.float32))
        self._out_BC = np.empty((_TILE, _TILE), np.float32)

    def sampled_floor(self, num_sampled: int, rank: int) -> Floats:
        """The ``rank``-th largest p of each query over some columns, drawn with a fixed seed."""
        column_S = np.sort(
            np.random.default_rng(0).choice(self._num_items, num_sampled, replace=False, shuffle=False)
        )
        right_SE = self._right_ME[column_S]
        floor_Q = np.empty(len(self._query_QD), np.float32)
        for start in range(0, len(floor_Q), _TILE):
            rows = slice(start, start + _TILE)
            product_BS = torch.from_numpy(self._left_of(start)) @ torch.from_numpy(right_SE).T
            self_B = self._self_Q[rows]
            place_B = np.minimum(np.searchsorted(column_S, self_B), num_sampled - 1)
            own_B = np.flatnonzero(column_S[place_B] == self_B)
            product_BS.numpy()[own_B, place_B[own_B]] = -np.inf
            floor_Q[rows] = np.partition(product_BS.numpy(), num_sampled - rank, axis=1)[
                :, num_sampled - rank
            ]
        return floor_Q

    def tile(self, start: int, after: int, column: int) -> Floats:
        """p of these rows and the columns from ``column``; valid until the next tile."""
        left_BE = self._left_of(start)[: after - start]
        right_CE = self._right_ME[column : column + _TILE]
        out_BC = self._out_BC[: len(left_BE), : len(right_CE)]
        if out_BC.shape != self._out_BC.shape:
            out_BC = np.empty(out_BC.shape, np.float32)
        torch.mm(torch.from_numpy(left_BE), torch.from_numpy(right_CE).T, out=torch.from_numpy(out_BC))
        self_B = self._self_Q[start:after] - column
        own_B = np.flatnonzero((self_B >= 0) & (self_B < len(right_CE)))
        out_BC[own_B, self_B[own_B]] = -np.inf
        return out_BC

    def _left_of(self, start: int) -> Floats:
        if self._left[0] != start:
            if self._is_one_set:
                right_BE = self._right_ME[start : start + _TILE]
                centred_BD, half_B = right_BE[:, :-2], -right_BE[:, -1]
            else:
                centred_BD, half_B = self._centred(self._query_QD[start : start + _TILE])
            self._left = (start, np.column_stack([centred_BD, half_B, np.ones_like(half_B)]))
        return self._left[1]

    def _centred(self, z_ND: Floats) -> tuple[Floats, Floats]:
        centred_ND = z_ND - self._centre_D
        return centred_ND, np.einsum("nd,nd->n", centred_ND, centred_ND) / np.float32(2)


class _Hits:
    """What the tiles have found for the rows from ``start`` to ``after``: every p above the row's floor.

    They are kept row by row, X places wide, with ``num_B`` of each row filled.
    """

    def __init__(self, start: int, after: int, expected: int) -> None:
        self.start, self.after = start, after
        self._most = 8 * expected  # of a row: beyond, ties abound and all is measured
        self._num_B = np.zeros(after - start, np.int64)
        self._value_BX = np.full((after - start, expected + expected // 2), -np.inf, np.float32)
        self._item_BX = np.empty(self._value_BX.shape, np.int32)

    def add(self, row_H: Ints, item_H: Ints, value_H: Floats) -> None:
        """Hits in ascending order of their rows, which count from ``start``."""
        found_B = np.bincount(row_H, minlength=len(self._num_B))
        before_B = self._num_B - (np.cumsum(found_B) - found_B)
        self._num_B += found_B
        place_H = np.arange(len(row_H)) + before_B[row_H]
        fullest, width = int(self._num_B.max()), self._value_BX.shape[1]
        if fullest > width and width < self._most:
            self._widen(min(self._most, max(fullest, 2 * width)))
        if fullest > self._value_BX.shape[1]:
            fits_H = place_H < self._value_BX.shape[1]
            row_H, place_H, item_H, value_H = row_H[fits_H], place_H[fits_H], item_H[fits_H], value_H[fits_H]
        self._value_BX[row_H, place_H] = value_H
        self._item_BX[row_H, place_H] = item_H

    def _widen(self, width: int) -> None:
        more = ((0, 0), (0, width - self._value_BX.shape[1]))
        self._value_BX = np.pad(self._value_BX, more, constant_values=-np.inf)
        self._item_BX = np.pad(self._item_BX, more)

    def nearest(
        self, query_QD: Floats, gallery_MD: Floats, k: int, floor_Q: Floats, error: float
    ) -> tuple[Ints, Floats, NDArray[np.bool_]]:
        """index_BK, distance_BK, and for which rows they are proven to be right."""
        num_rows = self.after - self.start
        index_BK = np.zeros((num_rows, k), np.int64)
        distance_BK = np.zeros((num_rows, k), np.float32)
        is_certain_B = (self._num_B >= k) & (self._num_B <= self._most)
        if not is_certain_B.any():
            return index_BK, distance_BK, is_certain_B

        # An item of the k nearest has d2/2 <= the k-th largest p, negated, + error, so its own p is within 2 errors.
        used = int(self._num_B[is_certain_B].max())
        value_BX = self._value_BX[:, :used]
        least_B = np.partition(value_BX, used - k, axis=1)[:, used - k] - np.float32(2 * error)
        is_certain_B &= least_B > floor_Q[self.start : self.after]
        least_B[~is_certain_B] = np.inf
        row_H, place_H = np.nonzero(value_BX >= least_B[:, None])
        item_H = self._item_BX[row_H, place_H]
        key_H = _keys(_direct(query_QD, gallery_MD, row_H + self.start, item_H), item_H)
        key_BX = _by_row(row_H, key_H, num_rows)
        if key_BX.shape[1] >= k:
            key_BX.sort(axis=1)
            index_BK[:], distance_BK[:] = _unpacked(key_BX[:, :k])
        return index_BK, distance_BK, is_certain_B


def _above(
    product_BC: Floats, floor_B: Floats, floor_C: Floats | None
) -> tuple[tuple[Ints, Ints, Floats], tuple[Ints, Ints, Floats] | None]:
    """Row, column and p of a tile's cells above their row's floor; and, as (column, row, p), above their column's.

    Both in ascending order of the first.
    """
    num_columns = product_BC.shape[1]
    is_above_BC = product_BC > floor_B[:, None]
    if floor_C is not None:
        is_above_BC |= product_BC > floor_C
    cell_H = np.flatnonzero(is_above_BC)
    value_H = product_BC.ravel()[cell_H]
    if num_columns.bit_count() == 1:  # a power of 2 is divided by in a tenth of the time
        row_H, column_H = cell_H >> (num_columns.bit_length() - 1), cell_H & (num_columns - 1)
    else:
        row_H, column_H = np.divmod(cell_H, num_columns)
    if floor_C is None:
        return (row_H, column_H, value_H), None
    for_row_H = value_H > floor_B[row_H]
    for_column_H = value_H > floor_C[column_H]
    own, other = (
        tuple(each[for_H] for each in (row_H, column_H, value_H)) for for_H in (for_row_H, for_column_H)
    )
    order_H = np.argsort(other[1].astype(np.uint16), kind="stable")  # of 16 bits: a radix sort
    return own, (other[1][order_H], other[0][order_H], other[2][order_H])


def _by_row(row_H: Ints, key_H: Keys, num_rows: int) -> Keys:
    """Keys of ascending rows as one row each, filled up with ``_LAST``."""
    count_B = np.bincount(row_H, minlength=num_rows)
    first_B = np.cumsum(count_B) - count_B
    key_BX = np.full((num_rows, int(count_B.max(initial=0))), _LAST, np.uint64)
    key_BX[row_H, np.arange(len(row_H)) - first_B[row_H]] = key_H
    return key_BX


def _measure_all(
    query_QD: Floats, gallery_MD: Floats, k: int, self_Q: Ints, row_B: Ints
) -> tuple[Ints, Floats]:
    """index_BK and distance_BK of these rows, every pair measured."""
    num_rows, num_items = len(row_B), len(gallery_MD)
    item_X = np.tile(np.arange(num_items), num_rows)
    key_BM = _keys(_direct(query_QD, gallery_MD, np.repeat(row_B, num_items), item_X), item_X)
    key_BM = key_BM.reshape(num_rows, num_items)
    has_self_B = np.flatnonzero(self_Q[row_B] >= 0)
    key_BM[has_self_B, self_Q[row_B][has_self_B]] = _LAST
    if k < num_items:
        key_BM.partition(k - 1, axis=1)
    key_BK = key_BM[:, :k]
    key_BK.sort(axis=1)
    return _unpacked(key_BK)


def _direct(query_QD: Floats, gallery_MD: Floats, row_H: Ints, item_H: NDArray[np.integer]) -> Floats:
    """sum_d (q_d - g_d)^2 of pairs, the same for equal vectors whatever their places."""
    row_H, item_H = np.ascontiguousarray(row_H, np.int64), np.ascontiguousarray(item_H, np.int64)
    distance_H = np.empty(len(row_H), np.float32)
    pointers = [faiss.swig_ptr(a) for a in (query_QD, row_H, gallery_MD, item_H, distance_H)]
    if len(row_H):
        faiss.pairwise_indexed_L2sqr(  # type: ignore[attr-defined]
            query_QD.shape[1], len(row_H), *pointers
        )
    return distance_H


def _keys(distance_H: Floats, item_H: NDArray[np.integer]) -> Keys:
    """(distance, index) as one number of the same order: a float that is not negative orders as its bits do."""
    return (distance_H.view(np.uint32).astype(np.uint64) << np.uint64(32)) | item_H.astype(np.uint64)


def _unpacked(key_BK: Keys) -> tuple[Ints, Floats]:
    """index_BK and distance_BK (no longer squared)."""
    index_BK = key_BK.astype(np.uint32).view(np.int32).astype(np.int64)  # the lower half; of ``_LAST`` -1
    return index_BK, np.sqrt((key_BK >> np.uint64(32)).astype(np.uint32).view(np.float32))


def _checked(name: str, z_ND: Floats) -> Floats:
    if z_ND.ndim != 2:
        raise ValueError(f"{name} embeddings have shape {z_ND.shape}, expected (rows, dimensions)")
    for start in range(0, len(z_ND), _TILE):
        in_range_N = (np.abs(z_ND[start : start + _TILE]) < 1e17).all(
            axis=1
        )  # false for NaN; beyond, squares overflow
        if not in_range_N.all():
            row = start + int(np.argmin(in_range_N))
            raise ValueError(
                f"{name} embedding {row} is not finite: the training diverged, or the input is damaged"
            )
    return np.ascontiguousarray(z_ND, dtype=np.float32)
