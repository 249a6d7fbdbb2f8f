"""Mining: which of an anchor's pairs take part.

A rule looks at all candidates of a tile, its positive and its negative side, and says which it keeps. Rules
combine by '+': a pair stays if every rule keeps it, each asked about the full candidate sets (``losses/README.md``).
An anchor's smallest and largest distances are taken over its candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from dmlstudy.losses.parameters import part
from dmlstudy.losses.tiles import Side, Tile
from dmlstudy.transfers import is_free_to_read


@runtime_checkable
class Miner(Protocol):
    """A rule by which pairs are kept."""

    def __call__(self, positive: Side, negative: Side) -> tuple[Tensor, Tensor]:
        """The candidates of each sign that are kept, as two boolean masks."""
        ...


def keep_all(positive: Side, negative: Side) -> tuple[Tensor, Tensor]:
    """Every candidate."""
    return positive.chosen, negative.chosen


@dataclass(frozen=True)
class Thresholds:
    """P_i = {j in pos(i) : D_ij >= m1}, N_i = {k in neg(i) : D_ik <= m2} (GPW Eq. 18, 19)."""

    positive_margin: float
    negative_margin: float

    def __call__(self, positive: Side, negative: Side) -> tuple[Tensor, Tensor]:
        """The pairs whose hinge is not negative, both bounds inclusive."""
        return (
            positive.chosen & (positive.d >= self.positive_margin),
            negative.chosen & (negative.d <= self.negative_margin),
        )


@dataclass(frozen=True)
class SimilarityRule:
    """The multi-similarity rule (GPW Eq. 24, 25): pairs of some triplet that violates a margin epsilon.

    Keep j in pos(i) with D_ij >= min_{neg(i)} D_ik - eps, and k in neg(i) with
    D_ik <= max_{pos(i)} D_ij + eps. An anchor without positives or without negatives keeps no pair.
    """

    epsilon: float

    def __call__(self, positive: Side, negative: Side) -> tuple[Tensor, Tensor]:
        """The informative pairs, both bounds inclusive."""
        return (
            positive.chosen & (positive.d >= nearest(negative) - self.epsilon),
            negative.chosen & (negative.d <= farthest(positive) + self.epsilon),
        )


def batch_hard(positive: Side, negative: Side) -> tuple[Tensor, Tensor]:
    """The farthest positive and the nearest negative (GPW Eq. 22, whose second max must be a min: Hermans et al. 2017).

    Of equally far ones the first by (label, id).
    """
    return only_nearest(Side(-positive.d, positive.chosen)), only_nearest(negative)


def only_nearest(side: Side) -> Tensor:
    """Each anchor's nearest chosen reference alone, of equally near ones the first by (label, id)."""
    if side.d.shape[1] == 0:
        return side.chosen
    nearest_T1 = side.d.masked_fill(~side.chosen, math.inf).argmin(1, keepdim=True)
    return torch.zeros_like(side.chosen).scatter_(1, nearest_T1, True).logical_and_(side.chosen)


@dataclass(frozen=True)
class AllOf:
    """The pairs that every rule keeps."""

    rules: tuple[Miner, ...]

    def __call__(self, positive: Side, negative: Side) -> tuple[Tensor, Tensor]:
        """Intersection of what the rules keep."""
        pull, push = self.rules[0](positive, negative)
        for rule in self.rules[1:]:
            more_pull, more_push = rule(positive, negative)
            pull, push = pull & more_pull, push & more_push
        return pull, push


def checked_miner(miner: object) -> Miner:
    """The miner, after it was tried on a small tile; raises ValueError unless it gives two boolean masks."""

    def tried(miner: Miner) -> str | None:
        d_TM = torch.tensor([[0.1, 0.4, 0.3], [0.2, 0.7, 0.5]])
        positive = Side(d_TM[:, :2], torch.tensor([[True, False], [True, True]]))
        negative = Side(d_TM, torch.tensor([[False, True, True], [False, False, True]]))
        masks: Any = miner(positive, negative)
        if not isinstance(masks, tuple) or len(masks) != 2:
            return "it gives no pair of masks"
        for mask, side in zip(masks, (positive, negative), strict=True):
            if mask.dtype != torch.bool or mask.shape != side.d.shape:
                return f"a mask is {mask.dtype} {tuple(mask.shape)}, not bool {tuple(side.d.shape)}"
        return None

    return part("mining", miner, Miner, "a callable (positive, negative) -> two boolean masks", tried)


def nearest(side: Side) -> Tensor:
    """The smallest chosen distance of each anchor, (T, 1), no gradient; infinite where none is chosen."""
    if side.d.shape[1] == 0:
        return side.d.new_full((len(side.d), 1), math.inf)
    return side.d.detach().masked_fill(~side.chosen, math.inf).amin(1, keepdim=True)


def farthest(side: Side) -> Tensor:
    """The largest chosen distance of each anchor, (T, 1), no gradient; -infinite where none is chosen."""
    if side.d.shape[1] == 0:
        return side.d.new_full((len(side.d), 1), -math.inf)
    return side.d.detach().masked_fill(~side.chosen, -math.inf).amax(1, keepdim=True)


def positives_in_columns(rows: Tile, chosen_TQ: Tensor) -> tuple[Tensor, Tensor]:
    """Each anchor's chosen positives side by side: their places in the band, and which are real, (T, P).

    P is the most that any anchor of the tile has; anchors with fewer are padded. Where it can only be read from a
    device it is the most that any could have, which the host knows.
    """
    num_TP = 0
    if chosen_TQ.numel():
        num_TP = int(chosen_TQ.sum(1).max()) if is_free_to_read(chosen_TQ) else rows.most_positives()
    place_TP = chosen_TQ.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :num_TP]
    return place_TP, chosen_TQ.gather(1, place_TP)


class Draw(NamedTuple):
    """One negative for each positive pair of a tile, (T, P) each, anchors with fewer pairs padded."""

    place_TP: Tensor
    """The positives' places in the band."""

    real_TP: Tensor
    """True for positives."""

    column_TP: Tensor
    """The drawn negatives' columns."""

    drawn_TP: Tensor
    """True for positives with a negative."""


@runtime_checkable
class NegativeDraw(Protocol):
    """A way to take one negative for each positive pair."""

    counts_all: ClassVar[bool]
    """True if a mean over its triplets also counts those whose term is 0."""

    def draw(self, rows: Tile, d_TM: Tensor) -> Draw:
        """The draw of a tile; ``d_TM`` are its Euclidean distances."""
        ...


@dataclass(frozen=True)
class DistanceWeighted(NegativeDraw):
    """Negatives drawn with probability ~ 1/q(D), see ``distance_weighted``."""

    seed: int = 0
    counts_all: ClassVar[bool] = True

    def draw(self, rows: Tile, d_TM: Tensor) -> Draw:
        return distance_weighted(rows, self.seed, d_TM)


NEAR, FAR = 0.5, 1.4
"""Of distance-weighted draws: nearer negatives count as this far, and from the other on none is drawn."""


def distance_weighted(rows: Tile, seed: int, d_TM: Tensor) -> Draw:
    """One negative of the anchor for each positive pair, with probability ~ 1/q(D) (Wu et al. 2017, Eq. 4-5).

    q is the density of distances of uniform points on the sphere, log 1/q(D) = (2-d) log D - (d-3)/2
    log(1 - D^2/4), d the embedding size; D below 0.5 counts as 0.5, and negatives with D >= 1.4 are left
    out, unless an anchor has no nearer one: then all of its negatives are equally likely.

    ``d_TM`` are Euclidean distances, of unit vectors.

    The draw inverts the cumulated weights, in units of 2^-32 of the anchor's largest, at ``uniforms``; so it depends
    on no rank, tile or order of the batch (but on that of two copies of one image, which also draw the same).
    """
    chosen_TM = rows.negative.chosen
    place_TP, real_TP = positives_in_columns(rows, rows.positive.chosen)
    if place_TP.shape[1] == 0:
        return Draw(place_TP, real_TP, place_TP, real_TP)
    quarter_TM = d_TM.clamp(NEAR, FAR)
    far_TM = (quarter_TM >= FAR).logical_or_(~chosen_TM)
    quarter_TM.square_().div_(4)
    weight_TM = quarter_TM.log().mul_(1 - rows.dim / 2)
    weight_TM.sub_(quarter_TM.neg_().log1p_(), alpha=(rows.dim - 3) / 2).masked_fill_(far_TM, -math.inf)
    largest_T1 = weight_TM.amax(1, keepdim=True)
    all_far_T1 = largest_T1 == -math.inf
    weight_TM.sub_(largest_T1.masked_fill_(all_far_T1, 0)).exp_().add_(chosen_TM & all_far_T1)
    upto_TM = weight_TM.mul_(2.0**32).long().cumsum_(1)
    whole_T1 = upto_TM[:, -1:]
    target_TP = (uniforms(rows, seed, rows.id_Q[place_TP]) * whole_T1).long()
    column_TP = torch.searchsorted(upto_TM, target_TP.minimum(whole_T1 - 1), right=True)
    return Draw(place_TP, real_TP, column_TP, real_TP & (whole_T1 > 0))


def uniforms(rows: Tile, seed: int, id_TP: Tensor) -> Tensor:
    """A number in [0, 1) for each of the tile's anchors and the image ids beside it, (T, P), float64.

    It depends on the seed, the batch's images and the pair's ids alone: not on the rank, the number of ranks,
    the order of the batch or the tile. Batches of other images draw other numbers.
    """
    x_TP = scrambled(rows.id_T + scrambled(rows.salt + seed))[:, None] + id_TP
    return unit_interval(scrambled(scrambled(x_TP)))


def unit_interval(x: Tensor) -> Tensor:
    """The numbers in [0, 1), float64, that hashes stand for, of their first 53 bits."""
    return ((x >> 11) & (2**53 - 1)).double() / 2.0**53


def scrambled(x: Tensor) -> Tensor:
    """An integer hash with full avalanche (splitmix64's finaliser), in wrapping int64."""
    x = x + -7046029254386353131
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))
