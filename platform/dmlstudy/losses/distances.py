"""Distances between anchors and references: smaller is closer, always.

Shapes: B anchors on this rank, M references, D embedding size. All are computed in float32 also under
autocast, and in float64 when an input is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Distance: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(z_BD, z_MD) -> d_BM."""

SQUARED_FLOOR = 1e-12
"""Squared distances below this count as this, with gradient zero: sqrt has none at 0 (METHODS 0)."""


def squared_euclidean(z_BD: Tensor, z_MD: Tensor) -> Tensor:
    """Squared Euclidean distance.

    d_ij = ||z_i - z_j||^2 = ||z_i||^2 + ||z_j||^2 - 2 z_i.z_j, clamped to >= 0. (B, D), (M, D) -> (B, M).
    """
    z_BD, z_MD = _full_precision(z_BD, z_MD)
    with torch.autocast(z_BD.device.type, enabled=False):
        squares_BM = z_BD.square().sum(1)[:, None] + z_MD.square().sum(1)[None, :]
        return (squares_BM - 2 * (z_BD @ z_MD.T)).clamp(min=0)


def euclidean(z_BD: Tensor, z_MD: Tensor) -> Tensor:
    """Euclidean distance, with gradient zero at coinciding points.

    D_ij = sqrt(max(||z_i - z_j||^2, 1e-12)) (METHODS 0). (B, D), (M, D) -> (B, M).
    """
    return squared_euclidean(z_BD, z_MD).clamp(min=SQUARED_FLOOR).sqrt()


def cosine(z_BD: Tensor, z_MD: Tensor) -> Tensor:
    """Cosine distance of unit vectors.

    d_ij = 1 - z_i.z_j = D_ij^2 / 2 (METHODS 0). (B, D), (M, D) -> (B, M).
    """
    z_BD, z_MD = _full_precision(z_BD, z_MD)
    with torch.autocast(z_BD.device.type, enabled=False):
        return 1 - z_BD @ z_MD.T


DISTANCES: dict[str, Distance] = {"euclidean": euclidean, "squared_euclidean": squared_euclidean}
"""The distances a pair loss may be asked for by name."""


def _full_precision(z_BD: Tensor, z_MD: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(z_BD.dtype, z_MD.dtype), torch.float32)
    return z_BD.to(dtype), z_MD.to(dtype)
