"""Exact nearest neighbours in bounded memory, ties by gallery index.

A matrix product finds the few items that may be among the nearest of each query, within a proven bound of its
rounding error. These alone are then measured by faiss's direct kernel sum_d (q_d - g_d)^2, which gives equal
vectors equal distances wherever they stand, and are ranked by (distance, index).

The answer is that of the direct kernel on all pairs, digit for digit, at the price of the product. The product of a
set with itself is symmetric, and only half of it is computed.

Where many items are the same vector, as after a collapse, a product cannot tell their ties apart: then the nearest
different vectors are found, and each stands for its items.

Shapes: Q queries, M gallery items, N items of a set in itself, D embedding size, E = D + 2, K neighbours, B rows
and C columns of one tile, S sampled columns, H hits.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from dmlstudy.retrieval import hyperbolic
from dmlstudy.retrieval.device_products import DeviceProduct, Found
from dmlstudy.retrieval.threads import Threads, as_many_as_torch_has

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Keys: TypeAlias = NDArray[np.uint64]

_TILE = 1024  # rows and columns of one tile of the matrix product: 4 MiB
_CELLS_PER_CHUNK = 1 << 22  # pairs measured at once where all are: 4 M x (8 + 8 + 4) bytes
_HITS_AT_ONCE = 1 << 26  # places for hits of the rows that are open at once: 64 M x 8 bytes
_SMALL_GALLERY = 256  # up to it every pair is measured
_FEWEST_SAMPLED = 512  # columns, of which a floor is found; twice as many from 8,192 items on
_MANY_COPIES = 512  # of one vector: from here on vectors are told apart before they are searched
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
    query_QD: Floats,
    gallery_MD: Floats,
    k: int,
    self_index: Ints | None = None,
    *,
    curvature: float | None = None,
    device: torch.device | None = None,
) -> tuple[Ints, Floats]:
    """Return the k nearest gallery items of each query by Euclidean distance, ties by gallery index.

    With a ``curvature`` embeddings are points of that ball, and distances hyperbolic.

    ``self_index[q]`` is the gallery index of query q itself, which is left out (-1: the query is not in
    the gallery). k is clamped to the gallery's size, less one where every query is in it. Where only some are, their
    rows have one item less, and with k the gallery's size they end in -1 and infinity.

    A GPU as ``device`` finds the candidates faster, outside a ball; the answer is the same, digit for digit.

    Returns ``index_QK`` (int64) and ``distance_QK`` (float32, same unit as the embeddings), nearest first.
    Raises ValueError for NaN or infinite embeddings, unequal D, k < 1, an empty gallery, or points outside the ball.
    """
    parts = list(in_gallery(query_QD, gallery_MD, k, self_index, curvature=curvature, device=device))
    if not parts:
        k = min(k, num_reachable(len(gallery_MD), self_index))
        return np.empty((0, k), np.int64), np.empty((0, k), np.float32)
    return np.concatenate([p.index_QK for p in parts]), np.concatenate([p.distance_QK for p in parts])


def in_gallery(
    query_QD: Floats,
    gallery_MD: Floats,
    k: int,
    self_index: Ints | None = None,
    *,
    curvature: float | None = None,
    device: torch.device | None = None,
) -> Iterator[Neighbours]:
    """Yield the answer of ``retrieve`` in parts, rows ascending; memory O((Q + M) D) beside one part."""
    query_QD = checked("query", query_QD)
    gallery_MD = checked("gallery", gallery_MD)
    num_queries, num_items = len(query_QD), len(gallery_MD)
    if query_QD.shape[1] != gallery_MD.shape[1]:
        raise ValueError(f"queries have {query_QD.shape[1]} dimensions, the gallery {gallery_MD.shape[1]}")
    k = min(k, num_reachable(num_items, self_index))
    if k < 1:
        raise ValueError(f"k = {k} neighbours of {num_items} gallery items; needs k >= 1 and an item to find")
    self_Q = np.full(num_queries, -1, np.int64) if self_index is None else np.asarray(self_index, np.int64)
    assert self_Q.shape == (num_queries,)
    if not num_queries:
        return iter(())
    if curvature is not None:
        return _InBall(query_QD, gallery_MD, k, self_Q, curvature).neighbours()
    if (copies := _Copies.where_many(gallery_MD)) is not None:
        return copies.neighbours(query_QD, k, self_Q, device)
    return _neighbours(query_QD, gallery_MD, k, self_Q, is_one_set=False, device=device)


def num_reachable(num_items: int, self_index: Ints | None) -> int:
    """The most items of a gallery that a query can have: all of them, or one less where every query is in it."""
    return num_items - (self_index is not None and bool((np.asarray(self_index) >= 0).all()))


def in_itself(
    z_ND: Floats, k: int, *, curvature: float | None = None, device: torch.device | None = None
) -> Iterator[Neighbours]:
    """Yield, in parts, the k nearest others of every item of a set, as ``retrieve`` finds them, in half the time.

    k is clamped to N - 1. Raises ValueError for embeddings that are not finite, k < 1 and fewer than 2 items.
    """
    z_ND = checked("gallery", z_ND)
    k = min(k, len(z_ND) - 1)
    if k < 1:
        raise ValueError(f"k = {k} neighbours among {len(z_ND)} items; needs k >= 1 and 2 items")
    if curvature is not None:
        return _InBall(z_ND, z_ND, k, np.arange(len(z_ND)), curvature).neighbours()
    if (copies := _Copies.where_many(z_ND)) is not None:
        return copies.neighbours(z_ND, k, np.arange(len(z_ND)), device)
    return _neighbours(z_ND, z_ND, k, np.arange(len(z_ND)), is_one_set=True, device=device)


def _neighbours(
    query_QD: Floats,
    gallery_MD: Floats,
    k: int,
    self_Q: Ints,
    *,
    is_one_set: bool,
    device: torch.device | None,
) -> Iterator[Neighbours]:
    num_queries, num_items = len(query_QD), len(gallery_MD)
    fewest = min(max(_FEWEST_SAMPLED, num_items // 8), 2 * _FEWEST_SAMPLED)
    num_sampled = min(num_items, max(fewest, num_items // 32))
    expected = k * num_sampled / num_items
    rank = math.ceil(expected + 3 * math.sqrt(expected) + 3)  # of 10^5 queries, a few have less than k hits
    every_pair = _EveryPair(query_QD, gallery_MD, k, self_Q)
    with as_many_as_torch_has(math.ceil(num_queries / _TILE) * math.ceil(num_items / _TILE)) as threads:
        if num_items <= _SMALL_GALLERY or 3 * rank > num_sampled:
            yield from threads.map(every_pair.of_rows, every_pair.parts(np.arange(num_queries), threads))
            return

        product = _Product(query_QD, gallery_MD, self_Q, num_sampled, rank, device)
        floor_Q = np.concatenate(list(threads.map(product.sampled_floor, range(0, num_queries, _TILE))))
        hits_per_row = rank * num_items // num_sampled
        width = math.ceil(
            hits_per_row * (1 + 4 / math.sqrt(rank))
        )  # four deviations: few rows need to be widened
        rows_per_panel = max(1, _HITS_AT_ONCE // width // _TILE) * _TILE
        for first in range(0, num_queries, rows_per_panel):
            after = min(first + rows_per_panel, num_queries)
            panel = _Panel(product, floor_Q, first, after, width)
            panel.sift_all(threads, num_items, is_one_set=is_one_set)
            for found, is_certain_B in threads.map(
                lambda hits: hits.nearest(product, query_QD, gallery_MD, k), panel.filled()
            ):
                for part in every_pair.parts(found.row_Q[~is_certain_B], threads):
                    place = part - found.row_Q[0]
                    row_H, item_H = product.candidates(found.row_Q[0], place, k)
                    key_H = _keys(_direct(query_QD, gallery_MD, part[row_H], item_H), item_H)
                    found.index_QK[place], found.distance_QK[place] = _nearest_of(row_H, key_H, len(part), k)
                yield found


class _Panel:
    """Rows whose hits are held at once: first all their tiles are sifted, by any number of threads."""

    def __init__(self, product: _Product, floor_Q: Floats, first: int, after: int, width: int) -> None:
        self._product = product
        self._hits = {
            start: _Hits(start, floor_Q[start : min(start + _TILE, after)], width)
            for start in range(first, after, _TILE)
        }

    def sift_all(self, threads: Threads, num_items: int, *, is_one_set: bool) -> None:
        """Find the hits of all rows, on the device where there is one: it makes the mirror images too."""
        if self._product.on_device is None:
            finds = threads.map(self._sift, self._tiles(num_items, is_one_set=is_one_set))
        else:
            finds = threads.map(self._sift_on_device, self._hits.values())
        for _ in finds:
            pass

    def _sift_on_device(self, own: _Hits) -> None:
        for row_H, item_H, value_H in self._product.above(own.start, own.floor_B):
            own.add(row_H, item_H, value_H)

    def _tiles(self, num_items: int, *, is_one_set: bool) -> Iterator[tuple[_Hits, int, _Hits | None]]:
        """Rows, first column, and the rows that these columns are, where the tile tells of them too.

        In one set a tile's mirror image is not made.
        """
        for start, own in self._hits.items():
            for column in range(0, num_items, _TILE):
                mirrored = self._hits.get(column) if is_one_set else None
                if mirrored is None or column == start:
                    yield own, column, None
                elif column > start:
                    yield own, column, mirrored

    def _sift(self, tile: tuple[_Hits, int, _Hits | None]) -> None:
        own, column, mirrored = tile
        product_BC = self._product.tile(own.start, len(own.floor_B), column)
        of_row, of_column = _above(product_BC, own.floor_B, None if mirrored is None else mirrored.floor_B)
        row_H, column_H, value_H = of_row
        own.add(row_H, column_H + column, value_H)
        if mirrored is not None and of_column is not None:
            column_H, row_H, value_H = of_column
            mirrored.add(column_H, row_H + own.start, value_H)

    def filled(self) -> Iterator[_Hits]:
        """The finds for the rows, which are not kept here any longer."""
        for start in list(self._hits):
            yield self._hits.pop(start)


class _Product:
    """Tiles of p_QM = -||q - g||^2 / 2 by one matrix product, with a query's own place at -inf.

    With the gallery's mean taken off both, p = q.g - |q|^2/2 - |g|^2/2 = [q, |q|^2/2, 1] . [g, -1, -|g|^2/2].

    ``error`` times h = |q|^2/2 + |g|^2/2 bounds |p + d2 / 2|, where d2 is the direct kernel's squared distance.

    Proof: a float32 sum of n products in any order is off by at most n u sum |products| (1 + O(n u)), u = 2^-24
    (Higham 2002, Eq. 3.5). The products of p sum to at most 2h, and so do those of d2 / 2 and of h.

    A query's floor is its ``rank``-th largest p over ``num_sampled`` columns, drawn with a fixed seed.
    Any number of threads may ask.
    """

    def __init__(
        self,
        query_QD: Floats,
        gallery_MD: Floats,
        self_Q: Ints,
        num_sampled: int,
        rank: int,
        device: torch.device | None = None,
    ) -> None:
        self._centre_D = gallery_MD.mean(axis=0, dtype=np.float64).astype(np.float32)
        self._query_QD, self._self_Q, self._rank = query_QD, self_Q, rank
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
        self.largest, self.error = float(largest), 2 * (3 * dim + 16) * 2.0**-24
        self._column_S = np.sort(
            np.random.default_rng(0).choice(num_items, num_sampled, replace=False, shuffle=False)
        )
        self.on_device: DeviceProduct | None = None
        if device is not None and device.type != "cpu":
            self.on_device = DeviceProduct(self._right_ME, self._column_S, device)
        self._right_SE = self._right_ME[self._column_S]
        self._of_thread = _OfThread()

    def sampled_floor(self, start: int) -> Floats:
        """The floors of the tile's rows from ``start``."""
        if self.on_device is not None:
            return self.on_device.floor(self._left_of(start), self._self_Q[start : start + _TILE], self._rank)
        product_BS = (torch.from_numpy(self._left_of(start)) @ torch.from_numpy(self._right_SE).T).numpy()
        last, floor = len(self._column_S) - 1, len(self._column_S) - self._rank
        self_B = self._self_Q[start : start + _TILE]
        place_B = np.minimum(np.searchsorted(self._column_S, self_B), last)
        own_B = np.flatnonzero(self._column_S[place_B] == self_B)
        product_BS[own_B, place_B[own_B]] = -np.inf
        product_BS.partition(floor, axis=1)
        return product_BS[:, floor].copy()

    def tile(self, start: int, num_rows: int, column: int) -> Floats:
        """p of the rows from ``start`` and the columns from ``column``; valid until this thread's next tile."""
        left_BE = self._left_of(start)[:num_rows]
        right_CE = self._right_ME[column : column + _TILE]
        out_BC = self._of_thread.out_BC[: len(left_BE), : len(right_CE)]
        if out_BC.size != _TILE * _TILE:
            out_BC = np.empty(out_BC.shape, np.float32)
        torch.mm(torch.from_numpy(left_BE), torch.from_numpy(right_CE).T, out=torch.from_numpy(out_BC))
        self_B = self._self_Q[start : start + num_rows] - column
        own_B = np.flatnonzero((self_B >= 0) & (self_B < len(right_CE)))
        out_BC[own_B, self_B[own_B]] = -np.inf
        return out_BC

    def above(self, start: int, floor_B: Floats) -> Iterator[Found]:
        """Row, item and p above the floors of the rows from ``start``, as the device finds them."""
        assert self.on_device is not None
        rows = slice(start, start + len(floor_B))
        left_BE = self._left_of(start)[: len(floor_B)]
        yield from self.on_device.above(left_BE, floor_B, self._self_Q[rows])

    def candidates(self, start: int, place_B: Ints, k: int) -> tuple[Ints, Ints]:
        """For some rows of the tile from ``start`` every item that may be of their k nearest, as (place, item).

        Here p is of double precision, and off from -d2 / 2 by the direct kernel's own rounding, (D + 3) u d2 / 2, and
        by that of the centred vectors, 8 u h at most.
        """
        left_BD = self._left_of(start)[place_B, :-2].astype(np.float64)
        half_B = np.einsum("bd,bd->b", left_BD, left_BD) / 2
        product_BM = np.empty((len(place_B), len(self._right_ME)))
        for column in range(
            0, len(self._right_ME), _TILE
        ):  # the whole gallery in double would be as much again
            right_CD = self._right_ME[column : column + _TILE, :-2].astype(np.float64)
            part_BC = product_BM[:, column : column + _TILE]
            part_BC[:] = (torch.from_numpy(left_BD) @ torch.from_numpy(right_CD).T).numpy()
            part_BC -= half_B[:, None] + np.einsum("cd,cd->c", right_CD, right_CD) / 2
        self_B = self._self_Q[start + place_B]
        own_B = np.flatnonzero(self_B >= 0)
        product_BM[own_B, self_B[own_B]] = -np.inf
        last_B = np.partition(product_BM, -k, axis=1)[:, -k]
        reach_B = np.maximum(0, -last_B)
        half_of_item_B = np.minimum(self.largest, 1.01 * (np.sqrt(half_B) + np.sqrt(reach_B)) ** 2)
        dim = left_BD.shape[1]
        error_B = 1.01 * 2.0**-24 * ((dim + 3) * reach_B + 8 * (half_B + half_of_item_B))
        is_near_BM = (product_BM >= (last_B - 2.1 * error_B)[:, None]) & (product_BM > -np.inf)
        row_H, item_H = np.nonzero(is_near_BM)
        return row_H, item_H

    def errors(self, start: int, last_B: Floats) -> Floats:
        """The error of p for the k nearest items of the rows from ``start``, whose k-th largest p is ``last_B``.

        Such an item, and one with so large a p, has d2/2 <= t = -last + error, and d2/2 >= (|g| - |q|)^2 / 2: so
        sqrt(|g|^2/2) <= sqrt(|q|^2/2) + sqrt(t). Twice from the largest |g| of all, for what lies far off is not near.
        """
        half_B = self._left_of(start)[: len(last_B), -2].astype(np.float64)
        half_of_item_B: NDArray[np.float64] = np.full(len(last_B), self.largest)
        for _ in range(2):
            error_B = 1.01 * self.error * (half_B + half_of_item_B)
            reach_B = np.sqrt(np.maximum(0, error_B - last_B))
            half_of_item_B = np.minimum(self.largest, (np.sqrt(half_B) + reach_B) ** 2)
        return np.asarray(1.01 * self.error * (half_B + half_of_item_B), np.float32)  # 1%: rounding in halves

    def _left_of(self, start: int) -> Floats:
        mine = self._of_thread
        if mine.start != start:
            if self._is_one_set:
                right_BE = self._right_ME[start : start + _TILE]
                centred_BD, half_B = right_BE[:, :-2], -right_BE[:, -1]
            else:
                centred_BD, half_B = self._centred(self._query_QD[start : start + _TILE])
            mine.start, mine.left_BE = start, np.column_stack([centred_BD, half_B, np.ones_like(half_B)])
        return mine.left_BE

    def _centred(self, z_ND: Floats) -> tuple[Floats, Floats]:
        centred_ND = z_ND - self._centre_D
        return centred_ND, np.einsum("nd,nd->n", centred_ND, centred_ND) / np.float32(2)


class _OfThread(threading.local):
    """A thread's memory between its tiles: the left side of its last rows, and a tile to write on."""

    def __init__(self) -> None:
        self.start, self.left_BE = -1, np.empty((0, 0), np.float32)
        self.out_BC = np.empty((_TILE, _TILE), np.float32)


class _Hits:
    """The finds of the tiles for some rows, from ``start``: every p above the row's floor, in any order.

    They are kept row by row, X places wide, with ``num_B`` of each row filled.
    """

    def __init__(self, start: int, floor_B: Floats, width: int) -> None:
        self.start, self.floor_B = start, floor_B
        self._lock = threading.Lock()
        self._most = 4 * width  # of a row: beyond, ties abound and it is looked at by ``candidates``
        self._num_B = np.zeros(len(floor_B), np.int64)
        self._value_BX = np.full((len(floor_B), width), -np.inf, np.float32)
        self._item_BX = np.empty(self._value_BX.shape, np.int32)

    def add(self, row_H: NDArray[np.integer], item_H: NDArray[np.integer], value_H: Floats) -> None:
        """Hits in ascending order of their rows, which count from ``start``."""
        found_B = np.bincount(row_H, minlength=len(self._num_B))
        first_B = np.cumsum(found_B) - found_B
        with self._lock:
            place_H = np.arange(len(row_H)) + np.repeat(self._num_B - first_B, found_B)
            self._num_B += found_B
            fullest, width = int(self._num_B.max()), self._value_BX.shape[1]
            if fullest > width and width < self._most:
                self._widen(min(self._most, max(fullest, width + width // 4)))
                width = self._value_BX.shape[1]
            if fullest > width:
                fits_H = np.flatnonzero(place_H < width)
                row_H, item_H, value_H = row_H.take(fits_H), item_H.take(fits_H), value_H.take(fits_H)
                place_H = place_H.take(fits_H)
            place_H += np.multiply(row_H, width, dtype=np.int64)  # one number for both is faster to write by
            self._value_BX.ravel()[place_H] = value_H
            self._item_BX.ravel()[place_H] = item_H

    def _widen(self, width: int) -> None:
        more = ((0, 0), (0, width - self._value_BX.shape[1]))
        self._value_BX = np.pad(self._value_BX, more, constant_values=-np.inf)
        self._item_BX = np.pad(self._item_BX, more)

    def nearest(
        self, product: _Product, query_QD: Floats, gallery_MD: Floats, k: int
    ) -> tuple[Neighbours, NDArray[np.bool_]]:
        """The k nearest of each row, and for which rows they are proven to be right."""
        num_rows = len(self.floor_B)
        found = Neighbours(
            np.arange(self.start, self.start + num_rows),
            np.zeros((num_rows, k), np.int64),
            np.zeros((num_rows, k), np.float32),
        )
        used = min(int(self._num_B.max()), self._value_BX.shape[1])
        if used < k:
            return found, np.zeros(num_rows, bool)

        # An item of the k nearest has d2/2 <= the k-th largest p, negated, + error, so its own p is within 2 errors.
        value_BX = self._value_BX[:, :used]
        last_B = np.partition(value_BX, used - k, axis=1)[:, used - k]
        least_B = last_B - 2 * product.errors(self.start, last_B)
        is_certain_B = (least_B > self.floor_B) & (self._num_B <= used)
        if is_certain_B.any():
            row_H, place_H = np.nonzero(value_BX >= np.where(is_certain_B, least_B, np.inf)[:, None])
            item_H = self._item_BX[row_H, place_H]
            key_H = _keys(_direct(query_QD, gallery_MD, row_H + self.start, item_H), item_H)
            found.index_QK[:], found.distance_QK[:] = _nearest_of(row_H, key_H, num_rows, k)
        return found, is_certain_B


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
    cell_H = np.flatnonzero(is_above_BC).astype(np.int32)  # of half the bytes, which each step below reads
    value_H = product_BC.ravel().take(cell_H)
    if num_columns.bit_count() == 1:  # a power of 2 is divided by in a tenth of the time
        row_H, column_H = cell_H >> (num_columns.bit_length() - 1), cell_H & (num_columns - 1)
    else:
        row_H, column_H = np.divmod(cell_H, np.int32(num_columns))
    if floor_C is None:
        return (row_H, column_H, value_H), None
    own_H = np.flatnonzero(value_H > floor_B.take(row_H))
    other_H = np.flatnonzero(value_H > floor_C.take(column_H))
    column_of_other_H = column_H.take(other_H)
    order_H = np.argsort(column_of_other_H.astype(np.uint16), kind="stable")  # of 16 bits: a radix sort
    other_H = other_H.take(order_H)
    return (
        (row_H.take(own_H), column_H.take(own_H), value_H.take(own_H)),
        (column_of_other_H.take(order_H), row_H.take(other_H), value_H.take(other_H)),
    )


def _nearest_of(row_H: Ints, key_H: Keys, num_rows: int, k: int) -> tuple[Ints, Floats]:
    """index_BK and distance_BK of the k least keys of each row, the rows ascending; of none -1 at infinity."""
    count_B = np.bincount(row_H, minlength=num_rows)
    first_B = np.cumsum(count_B) - count_B
    key_BX = np.full((num_rows, max(k, int(count_B.max(initial=0)))), _LAST, np.uint64)
    key_BX[row_H, np.arange(len(row_H)) - first_B[row_H]] = key_H
    if k < key_BX.shape[1]:
        key_BX.partition(k - 1, axis=1)
    key_BK = key_BX[:, :k]
    key_BK.sort(axis=1)
    return _unpacked(key_BK)


class _EveryPair:
    """The nearest items by measuring every pair: for small galleries and long rankings."""

    def __init__(self, query_QD: Floats, gallery_MD: Floats, k: int, self_Q: Ints) -> None:
        self._query_QD, self._gallery_MD, self._k, self._self_Q = query_QD, gallery_MD, k, self_Q

    def parts(self, row_B: Ints, threads: Threads) -> list[Ints]:
        """The rows in parts, of which all threads together can hold one each."""
        size = max(1, _CELLS_PER_CHUNK // threads.count // len(self._gallery_MD))
        return [row_B[start : start + size] for start in range(0, len(row_B), size)]

    def of_rows(self, row_B: Ints) -> Neighbours:
        num_rows, num_items = len(row_B), len(self._gallery_MD)
        item_X = np.tile(np.arange(num_items), num_rows)
        row_X = np.repeat(row_B, num_items)
        key_BM = _keys(_direct(self._query_QD, self._gallery_MD, row_X, item_X), item_X)
        key_BM = key_BM.reshape(num_rows, num_items)
        self_B = self._self_Q[row_B]
        has_self_B = np.flatnonzero(self_B >= 0)
        key_BM[has_self_B, self_B[has_self_B]] = _LAST
        if self._k < num_items:
            key_BM.partition(self._k - 1, axis=1)
        key_BK = key_BM[:, : self._k]
        key_BK.sort(axis=1)
        return Neighbours(row_B, *_unpacked(key_BK))


class _InBall:
    """The nearest items by hyperbolic distance (``hyperbolic``).

    For one query its order is that of a(y) = lambda_y |x - y|^2, an inner product of D + 2 numbers. A product in double
    precision finds the items that may be among the nearest; these are measured by the direct kernel, times lambda_y in
    double precision, and ranked by (a, index).

    The direct kernel is off by (D + 3) u |x - y|^2 at most, u = 2^-24, and the product by (2 D + 16) 2^-52 lambda_y
    (|x|^2 + |y|^2).
    """

    def __init__(self, query_QD: Floats, gallery_MD: Floats, k: int, self_Q: Ints, curvature: float) -> None:
        self._query_QD, self._gallery_MD, self._k, self._self_Q = query_QD, gallery_MD, k, self_Q
        self._curvature = curvature
        self._square_Q = hyperbolic.squares("query", query_QD, curvature)
        self._square_M = hyperbolic.squares("gallery", gallery_MD, curvature)
        self._factor_M = 1 / (1 - curvature * self._square_M)

    def neighbours(self) -> Iterator[Neighbours]:
        size = max(1, _CELLS_PER_CHUNK // len(self._gallery_MD))
        for start in range(0, len(self._query_QD), size):
            yield self._of_rows(np.arange(start, min(start + size, len(self._query_QD))))

    def _of_rows(self, row_B: Ints) -> Neighbours:
        row_H, item_H = np.nonzero(self._is_candidate(row_B))
        direct_H = _direct(self._query_QD, self._gallery_MD, row_B[row_H], item_H)
        order_H = (direct_H * self._factor_M[item_H]).astype(np.float32)
        index_BK, root_BK = _nearest_of(row_H, _keys(order_H, item_H), len(row_B), self._k)
        factor_B1 = 1 / (1 - self._curvature * self._square_Q[row_B, None])
        return Neighbours(row_B, index_BK, hyperbolic.distance(root_BK * np.sqrt(factor_B1), self._curvature))

    def _is_candidate(self, row_B: Ints) -> NDArray[np.bool_]:
        query_BD, square_B1 = self._query_QD[row_B].astype(np.float64), self._square_Q[row_B, None]
        dim = query_BD.shape[1]
        order_BM = np.empty((len(row_B), len(self._gallery_MD)))
        for start in range(
            0, len(self._gallery_MD), _TILE
        ):  # all of it in double would be twice as much again
            columns = slice(start, start + _TILE)
            item_CD = self._gallery_MD[columns].astype(np.float64)
            product_BC = (torch.from_numpy(query_BD) @ torch.from_numpy(item_CD).T).numpy()
            order_BM[:, columns] = square_B1 + self._square_M[columns] - 2 * product_BC
        order_BM *= self._factor_M
        self_B = self._self_Q[row_B]
        own_B = np.flatnonzero(self_B >= 0)
        order_BM[own_B, self_B[own_B]] = np.inf
        last_B1 = np.partition(order_BM, self._k - 1, axis=1)[:, self._k - 1 : self._k]
        largest = float((self._factor_M * self._square_M).max()), float(self._factor_M.max())
        error_B1 = (2 * dim + 16) * 2.0**-52 * (largest[0] + largest[1] * square_B1) + 1e-36
        reach_B1 = (np.maximum(last_B1, 0) + 2 * error_B1) * (1 + 2.5 * (dim + 8) * 2.0**-24)
        return np.asarray((order_BM <= reach_B1) & (order_BM < np.inf))


class _Copies:
    """A gallery's different vectors V, in the order of their first items, and the items of each, ascending."""

    def __init__(self, gallery_MD: Floats, vector_M: Ints, first_V: Ints) -> None:
        self._vector_VD = gallery_MD[first_V]
        self._item_M = np.argsort(vector_M, kind="stable")
        self._count_V = np.bincount(vector_M)
        self._start_V = np.cumsum(self._count_V) - self._count_V

    @classmethod
    def where_many(cls, gallery_MD: Floats) -> _Copies | None:
        """None where no vector is that of ``_MANY_COPIES`` items; most galleries tell by a few of their columns."""
        if len(gallery_MD) < _MANY_COPIES:
            return None
        few_D = np.unique(np.linspace(0, gallery_MD.shape[1] - 1, 4).astype(np.int64))
        if _largest(_hashed(np.ascontiguousarray(gallery_MD[:, few_D]))) < _MANY_COPIES:
            return None
        vector_M, first_V = _told_apart(gallery_MD)
        return None if _largest(vector_M) < _MANY_COPIES else cls(gallery_MD, vector_M, first_V)

    def neighbours(
        self, query_QD: Floats, k: int, self_Q: Ints, device: torch.device | None
    ) -> Iterator[Neighbours]:
        """As ``_neighbours``; equal queries are asked once.

        The k + 1 nearest items, oneself among them, are of the k + 1 nearest vectors by (distance, first item): before
        an item there stands, for each vector that comes before its own, that vector's first item.
        """
        num_vectors = min(k + 1, len(self._vector_VD))
        rows_at_once = max(_TILE, _CELLS_PER_CHUNK // (k + 1))
        for start in range(0, len(query_QD), rows_at_once):
            row_B = np.arange(start, min(start + rows_at_once, len(query_QD)))
            query_B, first_U = _told_apart(query_QD[row_B])
            asked_UD = query_QD[row_B[first_U]]
            key_UX = np.full((len(first_U), k + 1), _LAST)
            of_nobody_U = np.full(len(first_U), -1)
            for row_A, vector_AK, _ in _neighbours(
                asked_UD, self._vector_VD, num_vectors, of_nobody_U, is_one_set=False, device=device
            ):
                squared_A = _direct(asked_UD, self._vector_VD, row_A.repeat(num_vectors), vector_AK.ravel())
                for row, vector_K, squared_K in zip(
                    row_A.tolist(), vector_AK, squared_A.reshape(vector_AK.shape), strict=True
                ):
                    key_X = self._items(vector_K, squared_K, k + 1)
                    key_UX[row, : len(key_X)] = key_X
            index_BX, distance_BX = _unpacked(key_UX[query_B])
            is_self_BX = (index_BX == self_Q[row_B][:, None]) & (index_BX >= 0)
            order_BK = np.argsort(is_self_BX, axis=1, kind="stable")[:, :k]  # oneself last, and out
            yield Neighbours(
                row_B,
                np.take_along_axis(index_BX, order_BK, 1),
                np.take_along_axis(distance_BX, order_BK, 1),
            )

    def _items(self, vector_K: Ints, squared_K: Floats, most: int) -> Keys:
        """Keys of the nearest items, ascending, from the nearest vectors and their squared distances."""
        count_K = self._count_V[vector_K]
        enough = min(int(np.searchsorted(np.cumsum(count_K), most)), len(vector_K) - 1)
        used = int(np.searchsorted(squared_K, squared_K[enough], side="right"))  # with all as far as the last
        count_K = np.minimum(count_K[:used], most)
        place_X = np.arange(count_K.sum()) - np.repeat(np.cumsum(count_K) - count_K, count_K)
        item_X = self._item_M[np.repeat(self._start_V[vector_K[:used]], count_K) + place_X]
        key_X = _keys(np.repeat(squared_K[:used], count_K), item_X)
        key_X.sort()
        return key_X[:most]


def _told_apart(z_ND: Floats) -> tuple[Ints, Ints]:
    """For each row which different vector it is, and the first row of each, ascending.

    Vectors whose bits have one hash (with -0 as 0) are compared; should two that differ have the same, every row counts
    as a vector of its own.
    """
    _, first_V, vector_N = np.unique(_hashed(z_ND), return_index=True, return_inverse=True)
    order_V = np.argsort(first_V)
    rank_V = np.empty_like(order_V)
    rank_V[order_V] = np.arange(len(order_V))
    first_V, vector_N = first_V[order_V], rank_V[vector_N]
    for start in range(0, len(z_ND), _TILE):
        part = slice(start, start + _TILE)
        if not np.array_equal(z_ND[part], z_ND[first_V[vector_N[part]]]):
            return np.arange(len(z_ND)), np.arange(len(z_ND))
    return vector_N, first_V


def _hashed(z_ND: Floats) -> NDArray[np.uint64]:
    """Of equal vectors the same number, of others hardly ever."""
    factor_D = np.random.default_rng(0).integers(0, 1 << 63, z_ND.shape[1], np.uint64) * np.uint64(2)
    factor_D += np.uint64(1)
    hash_N = np.empty(len(z_ND), np.uint64)
    for start in range(0, len(z_ND), _TILE):
        word_BD = (z_ND[start : start + _TILE] + np.float32(0)).view(np.uint32) * factor_D
        hash_N[start : start + _TILE] = (word_BD ^ (word_BD >> np.uint64(32))).sum(axis=1)
    return hash_N


def _largest(group_N: NDArray[np.integer]) -> int:
    """Number of rows of the largest group."""
    return int(np.unique(group_N, return_counts=True)[1].max(initial=0))


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


def checked(name: str, z_ND: Floats) -> Floats:
    """The embeddings, contiguous. Raises ValueError naming the first that is not finite, and for another shape."""
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
