"""Scaling of features before a learner sees them; what it needs to know is taken from training points alone.

Shapes: N points, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dmlstudy.losses.parameters import choice

SCALINGS: Mapping[str, str] = {
    "none": "as they are",
    "unit": "each point over its norm",
    "standardize": "each feature less its mean, over its standard deviation (1 where it has none)",
    "centred_unit": "each feature less its mean, then each point over its norm",
    "contrast": "each point less its own mean, then over its norm",
}

UNIT = ("unit", "centred_unit", "contrast")


class Preparation(NamedTuple):
    """(x - shift) / scale, less the point's own mean with ``contrast``, and over its norm where the kind says so."""

    kind: str
    shift_D: NDArray[np.float64]
    scale_D: NDArray[np.float64]

    @classmethod
    def of(cls, kind: str, x_ND: NDArray[np.floating]) -> Self:
        """The preparation of this ``kind`` from training points. Raises ValueError for an unknown kind or no points."""
        choice("online.scaling", kind, SCALINGS)
        if not len(x_ND):
            raise ValueError("no points to scale by")
        num_features = x_ND.shape[1]
        shift_D, scale_D = np.zeros(num_features), np.ones(num_features)
        if kind in ("standardize", "centred_unit"):
            shift_D = x_ND.mean(axis=0, dtype=np.float64)
        if kind == "standardize":
            deviation_D = x_ND.std(axis=0, dtype=np.float64)
            scale_D = np.where(deviation_D > 1e-12, deviation_D, 1.0)
        return cls(kind, shift_D, scale_D)

    def __call__(self, x_ND: NDArray[np.floating]) -> NDArray[np.float32]:
        """The points, scaled; one without a direction stays at the origin."""
        scaled_ND = ((x_ND - self.shift_D) / self.scale_D).astype(np.float32)
        if self.kind == "contrast":
            scaled_ND -= scaled_ND.mean(axis=1, keepdims=True)
        if self.kind in UNIT:
            norm_N1 = np.linalg.norm(scaled_ND, axis=1, keepdims=True)
            scaled_ND /= np.where(norm_N1 > 1e-12, norm_N1, 1.0)
        return scaled_ND
