"""A loss and a regulariser together, each with its own mean over the global batch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World, brought_to
from dmlstudy.losses.parameters import at_least


class Regularized(Loss):
    """L = L_base + weight * L_regularizer (CGML Eq. 4, NASA Eq. 13).

    Each of the two is its own sum over all ranks by its own count Z, at least 1: the total is
    base.total + weight * regularizer.total * Z_base / Z_regularizer, and the count is the base's.

    The base sees all references; the regulariser sees the batch alone, without the rows of a memory behind it.
    Where the base has no terms at all, the regulariser remains. Raises ValueError unless weight >= 0.
    """

    def __init__(self, base: Loss, regularizer: Loss, weight: float) -> None:
        super().__init__()
        self.base = base
        self.regularizer = regularizer
        self.weight = at_least("weight", weight, 0)

    @property
    def accepts_memory(self) -> bool:  # type: ignore[override]  # what is a class's elsewhere is the base's here
        """True if the base accepts references of earlier batches."""
        return self.base.accepts_memory

    @property
    def uses_norms(self) -> bool:  # type: ignore[override]  # as above
        """True if one of the two looks at norms."""
        return self.base.uses_norms or self.regularizer.uses_norms

    @property
    def retains(self) -> Literal["", "features", "embedding"]:  # type: ignore[override]  # as above
        """The output whose distance from the start's one of the two looks at."""
        return self.base.retains or self.regularizer.retains

    @property
    def layer_weights(self) -> Tensor | None:
        return self.base.layer_weights

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """The base's sum and the regulariser's, brought to the base's count."""
        batch = references
        if self.accepts_memory and (size := world.total(len(anchors.z_ND))) < len(references.y_N):
            batch = references.rows(slice(0, size))
        base = self.base(anchors, references, world)
        regularizer = self.regularizer(anchors, batch, world)
        (term,) = brought_to(base.count, [(self.weight, regularizer)], world)
        return LossSum(base.total + term, base.count)
