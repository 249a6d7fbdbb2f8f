"""Points of a ball: embeddings that are compared by hyperbolic distance (Ermolov et al. 2022).

Shapes: N items, D embedding size.
"""

from __future__ import annotations

import math

from torch import Tensor

SPHERE, BALL = "sphere", "ball"
SPACES = (SPHERE, BALL)
"""Spaces of embeddings: unit vectors (or raw ones, without a unit norm), and points of a ball."""

RIM = 1e-3
"""The share of the ball's radius at its boundary that no point enters: distances are infinite there."""


def on_ball(v_ND: Tensor, curvature: float, clip_radius: float) -> Tensor:
    """Vectors as points of the ball of radius 1 / sqrt(c), by the exponential map at its centre.

    v' = v min(1, r / |v|), x = tanh(sqrt(c) |v'|) v' / (sqrt(c) |v'|), its norm cut at (1 - 1e-3) / sqrt(c), with c =
    ``curvature`` and r = ``clip_radius``. The order of lengths up to r is kept; what is cut has no gradient by length.
    """
    root = math.sqrt(curvature)
    length_N1 = v_ND.norm(dim=1, keepdim=True).clamp(min=1e-12)
    radius_N1 = (root * length_N1.clamp(max=clip_radius)).tanh() / root
    x_ND: Tensor = v_ND * (radius_N1.clamp(max=(1 - RIM) / root) / length_N1)
    return x_ND
