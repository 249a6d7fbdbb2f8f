"""The product of ``neighbours`` on another device: items that may be among the nearest of some queries.

The bound of the product's error holds for float32 sums in any order, so for a GPU's too. It does not hold for
TensorFloat-32, which rounds the operands to 10 bits: here products are in full float32, whatever was set.

Shapes: B queries, M gallery items, D embedding size, E = D + 2, C columns of one tile, S sampled columns, H hits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]

_CELLS = 1 << 26  # of a tile: 256 MiB, a quarter of that for what is above the floor, and the hits
_WIDTH = 4  # numbers of a row are a multiple of it, or a GPU reads them one by one


Found: TypeAlias = tuple[NDArray[np.int32], NDArray[np.int32], Floats]
"""Row, item and p of some cells."""


class DeviceProduct:
    """p_BM = left_BE . right_ME of ``neighbours._Product``, on a device; what is above a floor comes back.

    Any number of threads may ask; they take turns, so that one tile is there at a time.
    """

    def __init__(self, right_ME: Floats, column_S: Ints, device: torch.device) -> None:
        self._device = device
        self._right_ME = self._sent(right_ME)
        self._column_S = torch.from_numpy(column_S).to(device)
        self._right_SE = self._right_ME[self._column_S]
        self._turn = threading.Lock()

    def floor(self, left_BE: Floats, self_B: Ints, rank: int) -> Floats:
        """The ``rank``-th largest p of each query over the sampled columns, its own place (``self_B``) left out."""
        with self._turn:
            product_BS = self._multiplied(self._sent(left_BE), self._right_SE)
            is_self_BS = torch.from_numpy(self_B).to(self._device)[:, None] == self._column_S
            product_BS.masked_fill_(is_self_BS, -torch.inf)
            floor_B = product_BS.topk(rank, dim=1).values[:, -1]
            return np.asarray(floor_B.cpu().numpy())

    def above(self, left_BE: Floats, floor_B: Floats, self_B: Ints) -> Iterator[Found]:
        """All cells above their row's floor, tile by tile; rows of a tile ascending."""
        num_items = len(self._right_ME)
        num_columns = max(1, _CELLS // len(left_BE))
        for column in range(0, num_items, num_columns):
            with self._turn:
                right_CE = self._right_ME[column : column + num_columns]
                product_BC = self._multiplied(self._sent(left_BE), right_CE)
                place_B = self_B - column
                own_B = np.flatnonzero((place_B >= 0) & (place_B < len(right_CE)))
                product_BC[torch.from_numpy(own_B), torch.from_numpy(place_B[own_B])] = -torch.inf
                is_above_BC = product_BC > torch.from_numpy(floor_B).to(self._device)[:, None]
                row_H, column_H = is_above_BC.nonzero(as_tuple=True)
                found = row_H.int(), (column_H + column).int(), product_BC[row_H, column_H]
                row, item, value = (each.cpu().numpy() for each in found)
            yield row, item, value

    def _sent(self, rows_XE: Floats) -> Tensor:
        """The rows on the device, with zeros at their ends, which change no sum."""
        more = -rows_XE.shape[1] % _WIDTH
        return F.pad(torch.from_numpy(rows_XE).to(self._device), (0, more))

    def _multiplied(self, left_BE: Tensor, right_CE: Tensor) -> Tensor:
        from dmlstudy.embedders.precision import full_products  # not above: backbones take seconds to import

        with full_products():
            return left_BE @ right_CE.T
