"""Regularisers that spread embeddings over the sphere: KoLeo and the global orthogonal one.

Shapes: B anchors on this rank, M references (the global batch), D embedding size, T anchors in a tile, G groups of
rows.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from dmlstudy.losses.distances import euclidean, full_precision
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World, per_anchor
from dmlstudy.losses.mining import only_nearest
from dmlstudy.losses.parameters import at_least, choice
from dmlstudy.losses.plan import order_of
from dmlstudy.losses.products import differentiable, factor_last
from dmlstudy.losses.tiles import RowLoss, RowTerms, Tile
from dmlstudy.transfers import placed

PAIRS = {"all": True, "negatives": False}
"""Names of the pairs that a regulariser looks at, and whether positives are among them."""

KOLEO_FLOOR = 1e-8
"""Added to a distance before its logarithm is taken, as in DINOv2."""


class KoLeo(RowLoss):
    """Kozachenko-Leonenko regulariser: no image has a near neighbour (Sablayrolles et al. 2019).

    L_i = -log(min_j D_ij + 1e-8), D the Euclidean distance, over all other images of the global batch or, with
    ``pairs='negatives'``, over those of other classes. Gradient flows through the nearest alone, of equally near ones
    the first by (label, id); rows of the same image are skipped.

    The count is the number of anchors; without another image the term is 0. Raises ValueError for an unknown name.
    """

    needs_positives: ClassVar[bool] = False

    def __init__(self, pairs: str = "all") -> None:
        super().__init__(euclidean)
        self.with_positives = choice("pairs", pairs, PAIRS)

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        nearest_TM = only_nearest(rows.others if self.with_positives else rows.negative)
        distance_TM = (rows.d_TM + KOLEO_FLOOR).masked_fill_(~nearest_TM, 1)
        return RowTerms(
            -distance_TM.log().sum(), len(rows.y_T), distance_TM.reciprocal_().neg_().mul_(nearest_TM)
        )


class GlobalOrthogonal(Loss):
    """Global orthogonal regulariser: pairs are like uniform points of the sphere (Zhang et al. 2017).

    L = first_moment M1^2 + second_moment max(0, M2 - 1/D), M1 and M2 the means of S_ij and S_ij^2 over the
    ordered pairs of the global batch that are of different classes (``pairs='negatives'``) or of different images
    ('all'), S = z_i.z_j.

    No pair is formed: with groups g of rows that are no pairs (a class, or an image),
    sum S = ||sum_i z_i||^2 - sum_g ||sum_{i in g} z_i||^2, and sum S^2 = ||Z'Z||_F^2 - sum_g ||Z_g'Z_g||_F^2.

    The count is the number of anchors, and each has the term L; without a pair L = 0. Raises ValueError unless the
    weights are >= 0, and for an unknown name.
    """

    has_precision = True

    def __init__(
        self, first_moment: float = 1.0, second_moment: float = 1.0, pairs: str = "negatives"
    ) -> None:
        super().__init__()
        self.first_moment = at_least("first_moment", first_moment, 0)
        self.second_moment = at_least("second_moment", second_moment, 0)
        self.with_positives = choice("pairs", pairs, PAIRS)

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """L times the number of anchors, and that number."""
        (z_MD,) = full_precision(references.z_ND)
        with torch.autocast(z_MD.device.type, enabled=False):
            mean = factor_last(lambda z_MD: self._mean(references._replace(z_ND=z_MD)), self.product, z_MD)
        return per_anchor(mean * len(anchors.z_ND), anchors)

    def _mean(self, references: Embeddings) -> Tensor:
        order_M = order_of(references)
        y_M, id_M = references.labels.rows(order_M)
        z_MD = references.z_ND[placed(order_M, references.z_ND.device)]
        changed_M = y_M[1:] != y_M[:-1]
        if self.with_positives:
            changed_M = changed_M | (id_M[1:] != id_M[:-1])
        sizes_G = _sizes(changed_M, len(y_M))
        number = len(y_M) ** 2 - sum(size**2 for size in sizes_G)
        if number == 0:
            return 0 * z_MD.sum()
        sum_1 = z_MD.sum(0).square().sum()
        product = differentiable(self.product)
        sum_2 = product(z_MD.T, z_MD).square().sum()
        alone_N = torch.tensor([size == 1 for size in sizes_G for _ in range(size)]).nonzero().flatten()
        norm_N = z_MD[placed(alone_N, z_MD.device)].square().sum(1)
        sum_1, sum_2 = sum_1 - norm_N.sum(), sum_2 - norm_N.square().sum()
        for z_ND in torch.split(z_MD, sizes_G):
            if len(z_ND) > 1:
                sum_1 = sum_1 - z_ND.sum(0).square().sum()
                pair = (z_ND, z_ND.T) if len(z_ND) < z_ND.shape[1] else (z_ND.T, z_ND)
                sum_2 = sum_2 - product(*pair).square().sum()
        excess = (sum_2 / number - 1 / z_MD.shape[1]).clamp(min=0)
        return self.first_moment * (sum_1 / number).square() + self.second_moment * excess


def _sizes(changed_M: Tensor, num_rows: int) -> list[int]:
    """Numbers of rows of the groups, which end before each row that ``changed``; M - 1 flags for M rows."""
    ends = [*(changed_M.nonzero().flatten() + 1).tolist(), num_rows]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True) if end > start]
