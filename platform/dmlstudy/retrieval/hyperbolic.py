"""Hyperbolic distance of points of a ball, as ``losses.distances.Hyperbolic`` has it, in double precision.

d(x, y) = (2 / sqrt(c)) asinh(sqrt(c lambda_x lambda_y) |x - y|), lambda_x = 1 / (1 - c |x|^2), in the ball of radius
1 / sqrt(c).

Shapes: N points, D embedding size, P pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROWS_AT_ONCE = 1 << 14


def squares(name: str, z_ND: NDArray[Any], curvature: float) -> NDArray[np.float64]:
    """|x|^2 of each point. Raises ValueError for one that is outside the ball of this curvature."""
    square_N = np.empty(len(z_ND))
    for start in range(0, len(z_ND), _ROWS_AT_ONCE):
        part_BD = z_ND[start : start + _ROWS_AT_ONCE].astype(np.float64)
        square_N[start : start + _ROWS_AT_ONCE] = np.einsum("bd,bd->b", part_BD, part_BD)
    if not (curvature * square_N < 1).all():
        row = int(np.argmin(curvature * square_N < 1))
        raise ValueError(
            f"{name} embedding {row} has the norm {square_N[row] ** 0.5:g} and lies outside the ball of curvature"
            f" {curvature:g}, of radius {curvature**-0.5:g}: was it made by another model?"
        )
    return square_N


def distance(root: NDArray[Any], curvature: float) -> NDArray[np.float32]:
    """The distance from sqrt(lambda_x lambda_y) |x - y|."""
    scale = float(np.sqrt(curvature))
    return (2 / scale * np.arcsinh(scale * root.astype(np.float64))).astype(np.float32)


def of_pairs(a_PD: NDArray[Any], b_PD: NDArray[Any], curvature: float) -> NDArray[np.float32]:
    """The distance of each pair of rows. Raises ValueError as ``squares``."""
    apart_P = np.linalg.norm(a_PD.astype(np.float64) - b_PD, axis=1)
    left_P, right_P = (1 - curvature * squares("an", each, curvature) for each in (a_PD, b_PD))
    return distance(apart_P / np.sqrt(left_P * right_P), curvature)
