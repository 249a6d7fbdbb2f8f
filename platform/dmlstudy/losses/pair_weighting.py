"""General pair-based weighting (GPW): the pair form and the triplet form, with contrastive as the plainest case.

Both combine mining, weighting and distance, each chosen freely: an object, which the catalogue knows by a name.

Shapes: T anchors in a tile, M references, Q references in the tile's band, P most positives of any anchor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dmlstudy.losses.distances import Distance, euclidean
from dmlstudy.losses.forms import Factors, Form, Logit, Sums
from dmlstudy.losses.mining import Miner, Thresholds, keep_all, positives_in_columns
from dmlstudy.losses.parameters import at_least, choice
from dmlstudy.losses.tiles import RowLoss, RowTerms, Tile
from dmlstudy.losses.weighting import Constant, Exponential, Weighting

Normalize: TypeAlias = Literal["anchor", "none"]
"""'anchor': weights of an anchor's chosen set sum to 1 (GPW Eq. 34-36); 'none': raw weights."""


class PairWeighting(RowLoss):
    """A sum over the pairs beyond their margins, weighted by how far beyond (GPW Eq. 20, 26, 28-29, 31-32, 34-35).

    L_i = sum_{j in P_i} w+_ij (D_ij - m1) + sum_{k in N_i} w-_ik (m2 - D_ik), with detached weights
    1, (D-m1)^p and (m2-D)^q, or e^{alpha(D-m1)} and e^{beta(m2-D)}, normalised per anchor and sign
    ('anchor') or not ('none').

    P_i and N_i are the pairs beyond their thresholds (Eq. 18-19); mining 'threshold+margin' keeps of them what
    the multi-similarity rule with epsilon keeps (Eq. 24-25), 'threshold+batch_hard' an anchor's farthest
    positive and nearest negative, and names may be joined further by '+'.

    With squared distances the margins are squared ones (Eq. 38). ``detach_weights=False`` lets the gradient through
    the weights too (``losses/README.md``). The count is the number of anchors; an empty set gives 0. Raises
    ValueError unless 0 <= m1 <= m2, and for an unknown ``normalize``.
    """

    def __init__(
        self,
        positive_margin: float = 0.0,
        negative_margin: float = 0.8,
        positive_weighting: Weighting = Exponential(0.0),  # noqa: B008  # frozen
        negative_weighting: Weighting = Exponential(2.0),  # noqa: B008
        normalize: str = "anchor",
        miner: Miner = keep_all,
        distance: Distance = euclidean,
        detach_weights: bool = True,
    ) -> None:
        super().__init__(distance)
        self.positive_margin = at_least("positive_margin", positive_margin, 0)
        self.negative_margin = at_least("negative_margin", negative_margin, positive_margin)
        self.thresholds = Thresholds(positive_margin, negative_margin)
        self.miner = miner
        self.positive_weighting = positive_weighting
        self.negative_weighting = negative_weighting
        self.normalize = _normalize(normalize)
        self.detach_weights = detach_weights

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        positive, negative = rows.positive, rows.negative
        pull_TQ, push_TM = self.miner(positive, negative)
        beyond_TQ, within_TM = self.thresholds(positive, negative)
        pull = self._weighted(positive.d - self.positive_margin, pull_TQ & beyond_TQ, self.positive_weighting)
        push = self._weighted(self.negative_margin - negative.d, push_TM & within_TM, self.negative_weighting)
        return RowTerms(pull[0] + push[0], len(rows.y_T), push[1].neg_(), pull[1])

    def _weighted(self, excess: Tensor, chosen: Tensor, weighting: Weighting) -> tuple[Tensor, Tensor]:
        """sum_i sum_j w_ij e_ij, and its slope by e: w where weights are detached."""
        if excess.numel() == 0:
            return excess.sum(), excess
        excess = excess.clamp_(min=0).mul_(chosen)
        normalized = self.normalize == "anchor"
        u = weighting.raw(excess, excess.amax(1, keepdim=True) if normalized else None) * chosen
        sum_T1 = u.sum(1, keepdim=True) if normalized else u.new_ones(len(u), 1)
        sum_T1 = torch.where(sum_T1 > 0, sum_T1, 1)
        mean_T1 = (u * excess).sum(1, keepdim=True) / sum_T1
        slope = u
        if not self.detach_weights:
            gap = excess - mean_T1 if normalized else excess
            slope = (u + weighting.slope(u, excess) * gap) * chosen
        return mean_T1.sum(), slope / sum_T1 if normalized else slope


class Contrastive(PairWeighting):
    """Contrastive loss in mean form (GPW Eq. 13, as 20 with weights 26 normalised by 34-35).

    L_i = mean_{j in P_i} (D_ij - m1) + mean_{k in N_i} (m2 - D_ik), means over the pairs beyond their
    margin. The count is the number of anchors; an empty set gives 0. Raises ValueError unless
    0 <= m1 <= m2.
    """

    has_kernels = True

    def __init__(self, positive_margin: float = 0.0, negative_margin: float = 0.8) -> None:
        super().__init__(positive_margin, negative_margin, Constant(), Constant())

    def form(self) -> Form:
        """Two means of hinges."""
        pull, push = Logit(1.0, self.positive_margin), Logit(1.0, self.negative_margin)
        return Form("hinge", pull, push, _means)


def _means(sums: Sums) -> Factors:
    by_pull_T, by_push_T = 1 / sums.num_pulls_T.clamp(min=1), 1 / sums.num_pushes_T.clamp(min=1)
    total = (sums.pull_T * by_pull_T + sums.push_T * by_push_T).sum()
    return Factors(total, len(by_pull_T), by_pull_T, by_push_T)


class TripletWeighting(RowLoss):
    """A sum over violating triplets, weighted by how far they violate the margin (GPW Eq. 21, 23, 27, 30, 33, 36).

    L_i = sum_{T_i} w_ijk (D_ij - D_ik + m), T_i = {(j, k) : D_ij + m >= D_ik}, with detached weights
    1, (D_ij-D_ik+m)^p or e^{alpha(D_ij-D_ik+m)}, normalised over T_i ('anchor') or not ('none').

    T_i is taken from all pairs ('all'), from those the multi-similarity rule with epsilon keeps ('margin'),
    from the farthest positive and nearest negative ('batch_hard', Eq. 22), from those with D_ij >=
    ``positive_margin`` and D_ik <= ``negative_margin`` ('threshold'), or restricted to D_ij < D_ik
    ('semi_hard'); names may be joined by '+'.

    ``detach_weights=False`` lets the gradient through the weights too. The triplets of one positive per anchor live
    at a time. The count is the number of anchors; an empty set gives 0. Raises ValueError unless margin >= 0, and for
    an unknown ``normalize``.
    """

    def __init__(
        self,
        margin: float = 0.1,
        weighting: Weighting = Exponential(40.0),  # noqa: B008  # frozen
        normalize: str = "anchor",
        miner: Miner = keep_all,
        semi_hard: bool = False,
        distance: Distance = euclidean,
        detach_weights: bool = True,
    ) -> None:
        super().__init__(distance)
        self.margin = at_least("margin", margin, 0)
        self.miner = miner
        self.semi_hard = semi_hard
        self.weighting = weighting
        self.normalize = _normalize(normalize)
        self.detach_weights = detach_weights

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        triplets = Triplets(rows, self.miner, self.margin, self.semi_hard)
        normalized = self.normalize == "anchor"
        largest_T1 = triplets.largest_T1 if normalized else None
        # With u the raw weights: L = sum(u e) / sum(u), and its slope by e is (u + u' e - u' L) / sum(u).
        sum_T1, weighted_T1 = rows.d_TM.new_zeros(2, len(rows.y_T), 1)
        by_u, by_slope = triplets.slopes(), None if self.detach_weights else triplets.slopes()
        for place_T1, excess_TM, chosen_TM in triplets:
            u_TM = self.weighting.raw(excess_TM, largest_T1) * chosen_TM
            sum_T1 += u_TM.sum(1, keepdim=True)
            if by_slope is not None:
                slope_TM = self.weighting.slope(u_TM, excess_TM) * chosen_TM
                by_slope.add(place_T1, slope_TM)
                by_u.add(place_T1, slope_TM * excess_TM)
            by_u.add(place_T1, u_TM)
            weighted_T1 += u_TM.mul_(excess_TM).sum(1, keepdim=True)
        if not normalized:
            return RowTerms(weighted_T1.sum(), len(rows.y_T), by_u.slope_TM, by_u.band_slope_TQ)
        sum_T1 = torch.where(sum_T1 > 0, sum_T1, 1)
        mean_T1 = weighted_T1 / sum_T1
        if by_slope is not None:
            by_u.slope_TM -= mean_T1 * by_slope.slope_TM
            by_u.band_slope_TQ -= mean_T1 * by_slope.band_slope_TQ
        return RowTerms(
            mean_T1.sum(), len(rows.y_T), by_u.slope_TM.div_(sum_T1), by_u.band_slope_TQ.div_(sum_T1)
        )


class Triplets:
    """The violating triplets of a tile, one positive of each anchor at a time, against all its negatives."""

    def __init__(self, rows: Tile, miner: Miner, margin: float, semi_hard: bool) -> None:
        positive, negative = rows.positive, rows.negative
        pull_TQ, push_TM = miner(positive, negative)
        self.margin, self.semi_hard = margin, semi_hard
        self.num_band = positive.d.shape[1]
        self.place_TP, real_TP = positives_in_columns(rows, pull_TQ)
        self.d_TP = positive.d.gather(1, self.place_TP).masked_fill_(~real_TP, -math.inf)
        self.d_TM = negative.d.masked_fill(~push_TM, math.inf)

    @property
    def largest_T1(self) -> Tensor:
        """The largest excess of each anchor's triplets, 0 where it has none."""
        if 0 in (self.d_TP.shape[1], self.d_TM.shape[1]):
            return self.d_TM.new_zeros(len(self.d_TM), 1)
        return (self.d_TP.amax(1, keepdim=True) - self.d_TM.amin(1, keepdim=True) + self.margin).clamp_(min=0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Places of the positives in the band (T, 1), excess D_ij - D_ik + m >= 0 (T, M), and which count."""
        for number in range(self.d_TP.shape[1]):
            one = slice(number, number + 1)
            excess_TM = (self.d_TP[:, one] + self.margin) - self.d_TM
            chosen_TM = excess_TM >= 0
            if self.semi_hard:
                chosen_TM &= excess_TM < self.margin
            yield self.place_TP[:, one], excess_TM.clamp_(min=0), chosen_TM

    def slopes(self) -> TripletSlopes:
        """Room for the slopes of a sum over triplets."""
        return TripletSlopes(torch.zeros_like(self.d_TM), self.d_TM.new_zeros(len(self.d_TM), self.num_band))


class TripletSlopes:
    """Slopes by the distances, from slopes by D_ij - D_ik."""

    def __init__(self, slope_TM: Tensor, band_slope_TQ: Tensor) -> None:
        self.slope_TM = slope_TM
        self.band_slope_TQ = band_slope_TQ

    def add(self, place_T1: Tensor, slope_TM: Tensor) -> None:
        """Adds the slopes of the triplets of one positive per anchor."""
        self.slope_TM -= slope_TM
        self.band_slope_TQ.scatter_add_(1, place_T1, slope_TM.sum(1, keepdim=True))


def _normalize(normalize: str) -> Normalize:
    names: dict[str, Normalize] = {name: name for name in get_args(Normalize)}
    return choice("normalize", normalize, names)
