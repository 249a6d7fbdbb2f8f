"""Threshold-consistent margin: pairs beyond two thresholds that hold for all classes are pulled and pushed.

Shapes: B anchors on this rank, T anchors in a tile, M references, Q references in the tile's band.
"""

from __future__ import annotations

from typing import ClassVar

from dmlstudy.losses.distances import cosine
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World, brought_to
from dmlstudy.losses.parameters import at_least
from dmlstudy.losses.tiles import RowLoss, RowTerms, Tile


class ThresholdConsistentMargin(Loss):
    """Threshold-consistent margin, alone or beside another loss (Zhang et al. 2024; TCM).

    L = positive_weight mean_{(i,j) positive, S_ij <= m1} (m1 - S_ij)
      + negative_weight mean_{(i,k) negative, S_ik >= m2} (S_ik - m2), S = z_i.z_j of unit vectors,
    m1 = ``positive_margin``, m2 = ``negative_margin``.

    Each mean runs over the ordered pairs of all ranks that are beyond their margin. The total is L times the number of
    all ranks' anchors, so that total / count is L. It is a sum over anchors for given numbers of such pairs only.

    The count is the number of own anchors; the mean over no pair is 0. Raises ValueError unless margins lie in -1..1
    and weights >= 0.
    """

    accepts_memory = True
    has_precision = True

    def __init__(
        self,
        positive_margin: float = 0.9,
        negative_margin: float = 0.5,
        positive_weight: float = 1.0,
        negative_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.pulls = _Pulls(_cosine_of("positive_margin", positive_margin))
        self.pushes = _Pushes(_cosine_of("negative_margin", negative_margin))
        self.positive_weight = at_least("positive_weight", positive_weight, 0)
        self.negative_weight = at_least("negative_weight", negative_weight, 0)

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """The scaled sums over the anchors' pairs, and the number of anchors."""
        pull = self.pulls.terms(anchors, references, world)
        push = self.pushes.terms(anchors, references, world)
        count = pull.count.new_full((), len(anchors.z_ND))
        parts = [(self.positive_weight, pull), (self.negative_weight, push)]
        by_pull, by_push = brought_to(count, parts, world)
        return LossSum(by_pull + by_push, count)


class _Pulls(RowLoss):
    """Sum of m - S_ij over the positive pairs with S_ij <= m, and their number."""

    only_positives: ClassVar[bool] = True

    def __init__(self, margin: float) -> None:
        super().__init__(cosine)
        self.margin = margin

    def rows(self, rows: Tile) -> RowTerms:
        positive = rows.positive
        hard_TQ = positive.chosen & (positive.d >= 1 - self.margin)
        total = (positive.d - (1 - self.margin)).mul_(hard_TQ).sum()
        return RowTerms(total, hard_TQ.sum(), hard_TQ.to(positive.d.dtype))


class _Pushes(RowLoss):
    """Sum of S_ik - m over the negative pairs with S_ik >= m, and their number."""

    is_symmetric = True

    def __init__(self, margin: float) -> None:
        super().__init__(cosine)
        self.margin = margin

    def rows(self, rows: Tile) -> RowTerms:
        negative = rows.negative
        hard_TM = negative.chosen & (negative.d <= 1 - self.margin)
        total = (1 - self.margin - negative.d).mul_(hard_TM).sum()
        return RowTerms(total, hard_TM.sum(), hard_TM.to(negative.d.dtype).neg_())


def _cosine_of(parameter: str, value: float) -> float:
    if not -1 <= value <= 1:
        raise ValueError(f"{parameter}={value} must be a cosine, within -1..1")
    return value
