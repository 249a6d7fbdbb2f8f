"""Short forms of embeddings: their leading part, and 8 bits or 1 bit for each number; and exact search by 8 bits.

This is the one place that defines them: scores of a verdict, files of embeddings and galleries ask here.

| bits | a vector is kept as | compared by |
|---|---|---|
| 32 | unit float32 (E) | Euclidean distance |
| 8 | q = round(127 z / max_d \\|z_d\\|), int8 (E) | Euclidean distance of q / \\|q\\| |
| 1 | [z_d > 0], packed, uint8 (ceil(E / 8)) | Euclidean distance of signs / sqrt(E) = 2 sqrt(Hamming / E) |

Shapes: N items, Q queries, M items of a gallery, D embedding size, E size of the leading part, K neighbours, B rows of
a tile, H hits.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from dmlstudy.metric_names import Bits
from dmlstudy.retrieval.codes import pack_codes
from dmlstudy.retrieval.neighbours import Floats, Ints

Bytes: TypeAlias = NDArray[np.int8]

LARGEST = 127
"""The largest whole number of a vector of 8 bits."""

_TILE = 1 << 14  # items measured at once
_EXACT_COLUMNS = (1 << 24) // LARGEST**2  # products of so many whole numbers sum up exactly in float32
_HITS_PER_ROW = 64  # times k: of more hits of a tile, those beyond its k-th nearest are dropped first


def leading(z_ND: Floats, size: int) -> Floats:
    """The first ``size`` numbers as unit vectors, (N, E)."""
    return unit(z_ND[:, :size].astype(np.float64))


def whole_numbers(z_ND: Floats) -> Bytes:
    """Vectors rounded to whole numbers in -127..127: q = round(127 z / max_d |z_d|); of zeros, zeros.

    Each vector has a scale of its own. Cosines do not see it, so nothing is fitted, and nothing but q is kept.
    """
    largest_N1 = np.abs(z_ND).max(axis=1, keepdims=True)
    scaled_ND = LARGEST * z_ND.astype(np.float64) / np.where(largest_N1 > 0, largest_N1, 1)
    return np.rint(scaled_ND).astype(np.int8)


def eight_bits(z_ND: Floats) -> Floats:
    """The same as unit vectors."""
    return unit(whole_numbers(z_ND).astype(np.float64))


def one_bit(z_ND: Floats) -> Floats:
    """Signs as unit vectors, 1 where z > 0: their order by distance is that of Hamming distances."""
    return unit(np.where(z_ND > 0, 1.0, -1.0))


def unit(values_NE: NDArray[np.float64]) -> Floats:
    """Rows over their norms; a row of zeros stays."""
    norms_N1 = np.linalg.norm(values_NE, axis=1, keepdims=True)
    return (values_NE / np.where(norms_N1 > 0, norms_N1, 1)).astype(np.float32)


def kept(z_ND: Floats, size: int | None, bits: Bits) -> NDArray[Any]:
    """Vectors as a file keeps them: of their first ``size`` numbers (None: all), of so many bits each.

    Float32 (N, E), int8 (N, E) or packed uint8 (N, ceil(E / 8)). Raises ValueError for a size that is not below D, and
    for other bits.
    """
    if size is not None and not 1 <= size < z_ND.shape[1]:
        raise ValueError(
            f"size {size}: the embeddings have {z_ND.shape[1]} numbers; give a size from 1 to {z_ND.shape[1] - 1}"
        )
    part_NE = z_ND if size is None else leading(z_ND, size)
    if bits == 32:
        return part_NE
    if bits == 8:
        return whole_numbers(part_NE)
    if bits == 1:
        return pack_codes(part_NE)
    raise ValueError(f"bits {bits}: choose from 32, 8, 1")


def squared_norms(q_NE: Bytes) -> NDArray[np.int32]:
    """The squared norms of vectors of 8 bits, exactly."""
    found_N = np.empty(len(q_NE), np.int32)
    for start in range(0, len(q_NE), _TILE):
        part_BE = q_NE[start : start + _TILE].astype(np.int32)
        found_N[start : start + _TILE] = np.einsum("be,be->b", part_BE, part_BE)
    return found_N


def nearest_of_8_bits(
    query_QE: Bytes, gallery_ME: Bytes, square_M: NDArray[np.int32], k: int
) -> tuple[Ints, Floats]:
    """The k nearest items of each query by the cosine q.g / |g|, ties by index, and their Euclidean distances.

    Products of whole numbers are summed exactly, whatever the tiles, so the order is that of a plain loop in float64.
    ``square_M`` is ``squared_norms`` of the gallery, which may lie on a disk; k is clamped to its size. Memory beside
    it is that of a tile. A vector of zeros is at cosine 0 of all.

    Raises ValueError for unequal sizes, k < 1 and an empty gallery.
    """
    if query_QE.shape[1] != gallery_ME.shape[1]:
        raise ValueError(f"queries of size {query_QE.shape[1]}, the gallery's are of {gallery_ME.shape[1]}")
    num_queries, num_items = len(query_QE), len(gallery_ME)
    if k < 1 or num_items < 1:
        raise ValueError(f"k = {k} neighbours of {num_items} items; needs k >= 1 and an item to find")
    k = min(k, num_items)
    place_QK = np.full((num_queries, k), -1, np.int64)
    cosine_QK = np.full((num_queries, k), -np.inf)
    query = torch.from_numpy(query_QE.astype(np.float32))
    for start in range(0, num_items, _TILE):
        tile_BE = gallery_ME[start : start + _TILE].astype(np.float32)
        norm_B = np.sqrt(square_M[start : start + _TILE].astype(np.float64))
        cosine_QB = _products(query, tile_BE) / np.where(norm_B > 0, norm_B, 1)
        is_hit_QB = cosine_QB > cosine_QK[:, -1:]
        if k < len(tile_BE) and int(is_hit_QB.sum()) > _HITS_PER_ROW * k * num_queries:
            is_hit_QB &= cosine_QB >= np.partition(cosine_QB, -k, axis=1)[:, -k][:, None]
        row_H, column_H = np.nonzero(is_hit_QB)
        if len(row_H):
            _merge(place_QK, cosine_QK, row_H, column_H + start, cosine_QB[row_H, column_H])
    square_Q1 = squared_norms(query_QE)[:, None].astype(np.float64)
    cosine_QK /= np.sqrt(np.maximum(square_Q1, 1))
    return place_QK, np.sqrt(np.maximum(2 - 2 * cosine_QK, 0)).astype(np.float32)


def _products(query: torch.Tensor, tile_BE: Floats) -> NDArray[np.float64]:
    """q.g of all pairs, exactly: float32 sums of so few whole numbers are."""
    tile = torch.from_numpy(tile_BE)
    found_QB = np.zeros((len(query), len(tile)))
    for first in range(0, tile.shape[1], _EXACT_COLUMNS):
        columns = slice(first, first + _EXACT_COLUMNS)
        found_QB += (query[:, columns] @ tile[:, columns].T).numpy()
    return found_QB


def _merge(
    place_QK: Ints,
    cosine_QK: NDArray[np.float64],
    row_H: Ints,
    place_H: Ints,
    cosine_H: NDArray[np.float64],
) -> None:
    """Take hits in among the k best of their rows, in place; their places lie behind those found before."""
    k = place_QK.shape[1]
    touched = np.unique(row_H)
    row = np.concatenate([np.repeat(touched, k), row_H])
    place = np.concatenate([place_QK[touched].ravel(), place_H])
    cosine = np.concatenate([cosine_QK[touched].ravel(), cosine_H])
    is_kept = place >= 0
    row, place, cosine = row[is_kept], place[is_kept], cosine[is_kept]
    order = np.lexsort((place, -cosine, row))
    row, place, cosine = row[order], place[order], cosine[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    is_first = rank < k
    place_QK[row[is_first], rank[is_first]] = place[is_first]
    cosine_QK[row[is_first], rank[is_first]] = cosine[is_first]
