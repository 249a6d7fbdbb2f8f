"""A tile's terms as one compiled function: on a GPU, 40 to 80 passes over a tile's distances become a few.

``rows`` of a loss stays the definition. Compiled, it is the same up to rounding; where it cannot be compiled it runs as
it is.

Shapes: T anchors in a tile, M references, Q references in the tile's band.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmlstudy.losses.interface import Loss
from dmlstudy.losses.tiles import RowLoss, RowTerms, Tile
from dmlstudy.text import one_line

DEVICES = ("cuda",)
"""Kinds of device that gain by it: on a CPU a tile stays in its caches."""


class Fused:
    """``rows`` of a loss, compiled at its first tile on one of ``devices`` for tiles of any size.

    Where compiling or running fails it says so, once, and runs ``rows`` itself from then on.
    """

    def __init__(
        self,
        loss: RowLoss,
        backend: str | Callable[..., Any] = "inductor",
        devices: tuple[str, ...] = DEVICES,
    ) -> None:
        self.rows, self.name, self.devices = loss.rows, type(loss).__name__, devices
        self.has_failed = False
        self._compiled = torch.compile(self._terms, dynamic=True, backend=backend)

    def __call__(self, tile: Tile) -> RowTerms:
        """The tile's terms."""
        if self.has_failed or tile.d_TM.device.type not in self.devices:
            return self.rows(tile)
        parts = tile.d_TM, tile.y_T, tile.id_T, tile.y_Q, tile.id_Q, tile.salt
        try:
            terms: RowTerms = self._compiled(
                *parts, tile.band.start, tile.band.stop, tile.dim, tile.most_positives()
            )
        except Exception as error:
            self.has_failed = True
            warnings.warn(
                f"{self.name} is not compiled and runs as it is: {type(error).__name__}: {one_line(error, 200)}",
                stacklevel=2,
            )
            return self.rows(tile)
        return terms

    def _terms(
        self,
        d_TM: Tensor,
        y_T: Tensor,
        id_T: Tensor,
        y_Q: Tensor,
        id_Q: Tensor,
        salt: Tensor,
        low: int,
        high: int,
        dim: int,
        most: int,
    ) -> RowTerms:
        """``rows`` of tensors and numbers, which may be others at each call without compiling again."""
        return self.rows(Tile(d_TM, slice(low, high), y_T, id_T, y_Q, id_Q, salt, dim, lambda: most))


def fuse(loss: Loss) -> None:
    """Have every loss of distances within this one compile what it does to a tile."""
    for module in loss.modules():
        if isinstance(module, RowLoss):
            module.fused = Fused(module)
