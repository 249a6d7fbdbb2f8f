"""The triplet loss with the usual ways to choose triplets.

Shapes: T anchors in a tile, M references, Q references in the tile's band, P most positives of any anchor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dmlstudy.losses.distances import Distance, Euclidean, SquaredEuclidean, euclidean
from dmlstudy.losses.mining import DistanceWeighted, Draw, Miner, NegativeDraw, keep_all
from dmlstudy.losses.pair_weighting import Triplets
from dmlstudy.losses.parameters import at_least
from dmlstudy.losses.tiles import RowLoss, RowTerms, Tile


class Triplet(RowLoss):
    """Triplet loss, a mean over the triplets (GPW Eq. 14).

    [D_ij - D_ik + m]_+ over j in pos(i), k in neg(i), m = ``margin``. Mining 'all' takes all triplets,
    'semi_hard' those with D_ij < D_ik (Schroff et al. 2015), 'batch_hard' each anchor's farthest positive with
    its nearest negative (Hermans et al. 2017); their count is the number of terms above 0.

    'distance_weighted' takes one negative for each positive pair, drawn with probability ~ 1/q(D)
    (``mining.distance_weighted``, from its seed), and counts all of its triplets, as NASA does.

    Any ``miner`` of pairs gives the triplets of the pairs that it keeps. Without triplets both sum and count are 0.
    Raises ValueError unless margin >= 0, and for draws by distances that are no Euclidean ones.
    """

    def __init__(
        self,
        margin: float = 0.2,
        miner: Miner | NegativeDraw = keep_all,
        semi_hard: bool = False,
        distance: Distance = euclidean,
    ) -> None:
        super().__init__(distance)
        self.margin = at_least("margin", margin, 0)
        self.miner = miner
        self.semi_hard = semi_hard
        self.squared = type(distance) is SquaredEuclidean
        if isinstance(miner, DistanceWeighted) and type(distance) not in (Euclidean, SquaredEuclidean):
            raise ValueError(
                "mining='distance_weighted' draws by Euclidean distances; pass distance='euclidean' or"
                " 'squared_euclidean'"
            )

    def rows(self, rows: Tile) -> RowTerms:
        """Sum over the tile's triplets, and the number that counts."""
        if isinstance(self.miner, NegativeDraw):
            d_TM = rows.d_TM.sqrt() if self.squared else rows.d_TM
            draw = self.miner.draw(rows, d_TM)
            return self._one_negative_each(rows, draw, only_positive=not self.miner.counts_all)
        triplets = Triplets(rows, self.miner, self.margin, self.semi_hard)
        slopes = triplets.slopes()
        total, count = rows.d_TM.new_zeros(()), rows.d_TM.new_zeros(())
        for place_T1, excess_TM, chosen_TM in triplets:
            total += excess_TM.mul_(chosen_TM).sum()
            one_TM = excess_TM.sign_()
            count += one_TM.sum()
            slopes.add(place_T1, one_TM)
        return RowTerms(total, count, slopes.slope_TM, slopes.band_slope_TQ)

    def _one_negative_each(self, rows: Tile, draw: Draw, only_positive: bool) -> RowTerms:
        d_TP = rows.positive.d.gather(1, draw.place_TP)
        excess_TP = (d_TP + self.margin - rows.d_TM.gather(1, draw.column_TP)).clamp_(min=0)
        total = excess_TP.mul_(draw.drawn_TP).sum()
        one_TP = excess_TP.sign_()
        return RowTerms(
            total,
            one_TP.sum() if only_positive else draw.drawn_TP.sum(),
            torch.zeros_like(rows.d_TM).scatter_add_(1, draw.column_TP, -one_TP),
            torch.zeros_like(rows.positive.d).scatter_(1, draw.place_TP, one_TP),
        )


@dataclass(frozen=True)
class Hardest(NegativeDraw):
    """Each anchor's farthest positive with its nearest negative."""

    counts_all: ClassVar[bool] = False

    def draw(self, rows: Tile, d_TM: Tensor) -> Draw:
        return _hardest(rows)


def _hardest(rows: Tile) -> Draw:
    """Each anchor's farthest positive and nearest negative, of equally far ones the first."""
    positive, negative = rows.positive, rows.negative
    if positive.d.shape[1] == 0:
        none_T0 = torch.zeros(positive.d.shape, dtype=torch.int64, device=positive.d.device)
        return Draw(none_T0, positive.chosen, none_T0, positive.chosen)
    d_T1, place_T1 = positive.d.masked_fill(~positive.chosen, -math.inf).max(1, keepdim=True)
    nearest_T1, column_T1 = negative.d.masked_fill(~negative.chosen, math.inf).min(1, keepdim=True)
    real_T1 = d_T1 > -math.inf
    return Draw(place_T1, real_T1, column_T1, real_T1 & (nearest_T1 < math.inf))
