"""Test, then train: the error on the rows of a stream as they first appear, before anything is learned from them.

Shapes: T constraints, C points of a constraint, R rows in the order they are first named, W windows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy.online.constraints import IndexedConstraints
from dmlstudy.online.enumeration import Rows
from dmlstudy.online.learner import Flags, Floats
from dmlstudy.online.stream import BLOCK

NUM_WINDOWS = 50
"""Windows of a stream at most: a curve is as large of any stream."""

RECENT = 1000
"""Rows of the stream, the newest, among which a class is told by neighbours."""


class Newcomers(NamedTuple):
    """Rows that a part of a stream names first, and the newest rows that were named before."""

    new: Rows
    known: Rows


class Prequential:
    """The prequential error of a stream (Gama, Sebastiao, Rodrigues 2013), of windows that do not overlap.

    The classes of the rows that a block of 240 constraints names for the first time are predicted before the block is
    learned from, by what was learned from all blocks before it. A row that came before is not predicted again.

    A window's error is wrong / predicted; no rows of it are weighted less, as a fading factor would. Windows have
    ``width`` constraints, whole blocks, and number 50 at most. In the first block nothing is known and nothing
    predicted; a window without new rows has no error.
    """

    def __init__(self, stream: IndexedConstraints) -> None:
        num = len(stream.index_TC)
        self.width = max(1, -(-num // (NUM_WINDOWS * BLOCK))) * BLOCK
        row_TC = stream.index_TC
        rows, first = np.unique(row_TC.ravel(), return_index=True)
        order_R = np.argsort(first)
        self._row_R = rows[order_R]
        self._at_R = first[order_R] // row_TC.shape[1]
        """The constraint that names it first."""
        self.count_W2 = np.zeros((NUM_WINDOWS, 2), np.int64)
        """Of each window the rows predicted wrongly, and all predicted."""

    def newcomers(self, start: int, stop: int) -> Newcomers:
        """Of the constraints from ``start`` to before ``stop``; no new rows where none is known."""
        begin, end = np.searchsorted(self._at_R, [start, stop])
        known_R = self._row_R[max(0, begin - RECENT) : begin]
        return Newcomers(self._row_R[begin:end] if begin else self._row_R[:0], known_R)

    def add(self, start: int, is_wrong_Q: Flags) -> None:
        """Count the predictions for the newcomers of the constraints from ``start`` on, which are of one window."""
        self.count_W2[start // self.width] += int(is_wrong_Q.sum()), len(is_wrong_Q)

    def restore(self, count_W2: NDArray[np.int64]) -> None:
        """Go on from such counts. Raises ValueError for others."""
        if count_W2.shape != self.count_W2.shape:
            raise ValueError(f"counts of windows have the shape {count_W2.shape}, not {self.count_W2.shape}")
        self.count_W2 = count_W2.copy()

    @property
    def error_W(self) -> Floats:
        """The error of each window; not a number where nothing was predicted."""
        wrong_W, num_W = self.count_W2.T
        error_W: Floats = np.divide(wrong_W, num_W, out=np.full(NUM_WINDOWS, np.nan), where=num_W > 0)
        return error_W

    @property
    def error(self) -> float:
        """Of all predictions; not a number where there are none."""
        wrong, num = self.count_W2.sum(axis=0).tolist()
        return float(wrong / num) if num else float("nan")

    def metrics(self) -> dict[str, float]:
        """Numbers for a report: ``prequential_error``, ``_error_W`` of window W, and ``prequential_width``."""
        told = {
            f"prequential_error_{window:02d}": float(error)
            for window, error in enumerate(self.error_W)
            if not np.isnan(error)
        }
        if not told:
            return {}
        return {"prequential_error": self.error, "prequential_width": float(self.width), **told}
