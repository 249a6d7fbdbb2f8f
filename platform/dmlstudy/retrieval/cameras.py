"""Cameras: a query's own class by its own camera is left out of its ranking, as re-identification has it.

Pictures by one camera often follow each other within a second, and whoever finds them has recognised the background.
A camera below 0 is unknown, and equal to no other.

Shapes: N items, Q queries, M gallery items, K results.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dmlstudy.retrieval.metrics import Labels
from dmlstudy.retrieval.neighbours import Ints


class SameCamera(NamedTuple):
    """Groups of items of one class by one camera; -1 is a group that nobody else is in."""

    group_Q: Ints
    group_M: Ints
    num_Q: Ints
    """Gallery items of the query's group, itself not counted."""

    @classmethod
    def of(cls, labels_N: Labels, camera_N: Ints, query: Ints, gallery: Ints) -> Self:
        """Of the queries and gallery at these places among N items; a query may be in the gallery.

        Raises ValueError for label sets, and where there are not as many cameras as labels.
        """
        if labels_N.ndim != 1:
            raise ValueError("cameras need one label per item; label sets have no identity")
        if camera_N.shape != labels_N.shape:
            raise ValueError(f"{len(camera_N)} cameras for {len(labels_N)} labels: needs as many")
        pairs_N2 = np.column_stack([labels_N, camera_N])
        _, group_N = np.unique(pairs_N2, axis=0, return_inverse=True)
        group_N = np.where(camera_N >= 0, group_N.reshape(-1), -1).astype(np.int64)
        group_Q, group_M = group_N[query], group_N[gallery]
        size_G = np.bincount(group_M[group_M >= 0], minlength=len(labels_N) + 1)
        is_in_gallery_N = np.zeros(len(labels_N), np.bool_)
        is_in_gallery_N[gallery] = True
        num_Q = np.where(group_Q >= 0, size_G[group_Q] - is_in_gallery_N[query], 0)
        return cls(group_Q, group_M, num_Q.astype(np.int64))

    @property
    def most(self) -> int:
        """The most items that are left out of a ranking."""
        return int(self.num_Q.max(initial=0))

    def part(self, rows: NDArray[np.bool_] | slice) -> SameCamera:
        """The same of some of the queries."""
        return SameCamera(self.group_Q[rows], self.group_M, self.num_Q[rows])

    def left_out(self, row_Q: Ints, index_QK: Ints, k: int) -> Ints:
        """Rankings, of places in the gallery, without the items of their query's group, cut after ``k``.

        The others keep their order; a row that has fewer than k ends in -1. The first k are exact where ``most`` more
        had been retrieved.
        """
        is_same_QK = (self.group_M[index_QK] == self.group_Q[row_Q][:, None]) & (index_QK >= 0)
        is_same_QK &= self.group_Q[row_Q][:, None] >= 0
        kept_QK = np.where(is_same_QK, -1, index_QK)
        order_QK = np.argsort(kept_QK < 0, axis=1, kind="stable")
        return np.asarray(np.take_along_axis(kept_QK, order_QK, axis=1)[:, :k])


def num_relevant_elsewhere(
    labels_N: Labels, camera_N: Ints, query: Ints | None = None, gallery: Ints | None = None
) -> Ints:
    """R_q: gallery items of each query's class that are not by its camera; without ``query`` all items are both."""
    every = np.arange(len(labels_N))
    query, gallery = every if query is None else query, every if gallery is None else gallery
    is_in_gallery_N = np.isin(every, gallery)
    size_C = np.bincount(labels_N[gallery], minlength=int(labels_N.max(initial=0)) + 1)
    same = SameCamera.of(labels_N, camera_N, query, gallery)
    return np.asarray(size_C[labels_N[query]] - is_in_gallery_N[query] - same.num_Q, dtype=np.int64)
