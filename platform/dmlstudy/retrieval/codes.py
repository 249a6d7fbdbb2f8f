"""Binary codes packed in bytes, and their exact nearest neighbours by Hamming distance, ties by gallery index.

Shapes: N, Q, M codes, D bits, P = ceil(D / 8) bytes of a code, W words of 8 bytes, K neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmlstudy.heartbeat import beat
from dmlstudy.retrieval.neighbours import Ints, num_reachable

Codes: TypeAlias = NDArray[np.uint8]

_CELLS_PER_CHUNK = 1 << 22  # distances held at once: 4 M x (8 + 8) bytes


def pack_codes(z_ND: NDArray[np.floating] | NDArray[np.integer] | NDArray[np.bool_]) -> Codes:
    """Codes of {-1, 1}, {0, 1} or real numbers as bytes: a bit is 1 where the number is above 0.

    Bits beyond D are 0 in every code. Raises ValueError for NaN.
    """
    z_ND = np.asarray(z_ND)
    if np.issubdtype(z_ND.dtype, np.floating) and np.isnan(z_ND).any():
        raise ValueError("a code is not a number: the training diverged, or the input is damaged")
    return np.packbits(z_ND > 0, axis=1)


def hamming_neighbours(
    query_QP: Codes, gallery_MP: Codes, k: int, self_index: Ints | None = None
) -> Iterator[tuple[Ints, Ints, NDArray[np.uint16]]]:
    """Yield (row_Q, index_QK, distance_QK) in parts, nearest first, ties by gallery index; k as ``retrieve``.

    Distances count bits; a row that has fewer than k items ends in -1, at distance 65535. Memory beyond a part:
    O(2^22) distances. Raises ValueError for unequal lengths and k < 1.
    """
    for name, codes in (("query", query_QP), ("gallery", gallery_MP)):
        if codes.ndim != 2 or codes.dtype != np.uint8:
            raise ValueError(f"{name} codes: expected uint8 of shape (rows, bytes), as pack_codes makes them")
    if query_QP.shape[1] != gallery_MP.shape[1]:
        raise ValueError(f"queries have {query_QP.shape[1]} bytes, the gallery {gallery_MP.shape[1]}")
    num_items = len(gallery_MP)
    k = min(k, num_reachable(num_items, self_index))
    if k < 1:
        raise ValueError(f"k = {k} neighbours of {num_items} gallery items; needs k >= 1 and an item to find")
    query_QW, gallery_MW = _words(query_QP), _words(gallery_MP)
    index_M = np.arange(num_items, dtype=np.uint64)
    rows_at_once = max(1, _CELLS_PER_CHUNK // num_items)
    for start in range(0, len(query_QP), rows_at_once):
        beat()
        row_Q = np.arange(start, min(start + rows_at_once, len(query_QP)))
        key_QM = np.zeros((len(row_Q), num_items), np.uint64)
        for word in range(query_QW.shape[1]):
            key_QM += np.bitwise_count(query_QW[row_Q, None, word] ^ gallery_MW[None, :, word])
        key_QM <<= np.uint64(32)
        key_QM |= index_M
        if self_index is not None:
            has_self_Q = np.flatnonzero(self_index[row_Q] >= 0)
            key_QM[has_self_Q, self_index[row_Q][has_self_Q]] = np.uint64(2**64 - 1)
        if k < num_items:
            key_QM.partition(k - 1, axis=1)
        key_QK = key_QM[:, :k]
        key_QK.sort(axis=1)
        yield (
            row_Q,
            key_QK.astype(np.uint32).view(np.int32).astype(np.int64),  # the lower half, of 2^64 - 1 -1
            (key_QK >> np.uint64(32)).astype(np.uint16),
        )


def _words(codes_NP: Codes) -> NDArray[np.uint64]:
    num_codes, num_bytes = codes_NP.shape
    padded = np.zeros((num_codes, -(-num_bytes // 8) * 8), np.uint8)
    padded[:, :num_bytes] = codes_NP
    return padded.view(np.uint64)
