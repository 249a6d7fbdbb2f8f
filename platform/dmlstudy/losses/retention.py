"""Retention: what a model learns anew is to leave its outputs near those that it began with.

Shapes: B anchors on this rank.
"""

from __future__ import annotations

from typing import Literal

from dmlstudy.losses.distances import full_precision
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World, per_anchor
from dmlstudy.losses.parameters import choice


class Retention(Loss):
    """Mean squared distance of images' unit vectors from those of the model that training began with.

    L_i = ||f_i - f0_i||^2 = 2 - 2 cos(f_i, f0_i), f the backbone's features or the embedding, by ``of``; f0 is from a
    frozen copy of the start in eval mode, of the same view, without gradient. Distances are given (``drift_N``).

    The count is the number of anchors. Raises ValueError for an unknown name and for anchors without distances.
    """

    def __init__(self, of: str = "features") -> None:
        super().__init__()
        outputs: dict[str, Literal["features", "embedding"]] = {
            "features": "features",
            "embedding": "embedding",
        }
        self.retains = choice("of", of, outputs)

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum of the anchors' squared distances, and their number."""
        if anchors.drift_N is None:
            raise ValueError(
                "retention needs each embedding's distance from the start's, which a study's training step finds;"
                " in a loop of your own give Embeddings with drift_N"
            )
        (drift_N,) = full_precision(anchors.drift_N)
        return per_anchor(drift_N.sum(), anchors)
