"""Losses of deep metric learning: distances, mining and weighting as parts, and one catalogue of losses.

No loss knows ``torch.distributed``: it is given anchors and references and sums over its local anchors. ``build`` makes
one for a training loop of one's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmlstudy.losses.batch_loss import build as build


def __getattr__(name: str) -> Any:
    """``build``, imported on first use: reading a study file needs no torch."""
    if name != "build":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dmlstudy.losses.batch_loss import build

    return build
