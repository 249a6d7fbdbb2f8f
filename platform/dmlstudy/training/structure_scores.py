"""Signs that a structure head does anything: its weights' deviation between items, and the share at a bound.

Shapes: N items, D embedding size or bits of a code, E those of several models side by side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dmlstudy.embedders.structure import deviation, saturated_share
from dmlstudy.metric_names import OMEGA_DEVIATION, OMEGA_SATURATED
from dmlstudy.records import TrialConfig


def structure_scores(omega_NE: NDArray[np.float32], dim: int, config: TrialConfig) -> dict[str, float]:
    """``omega_deviation`` and ``omega_saturated`` of the items' structure embeddings, D = ``dim`` for each model."""
    assert config.regularizer is not None
    preset = str(config.regularizer.params.get("preset", "official"))
    return {
        OMEGA_DEVIATION: deviation(omega_NE),
        OMEGA_SATURATED: saturated_share(omega_NE, preset, dim),
    }
