"""Mining: which pairs and triplets enter a loss. Selections carry no gradient.

Shapes: B anchors on this rank, M references, T anchors in a tile, P most positives of any anchor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dmlstudy.losses.interface import Embeddings

TILE_ELEMENTS = 2**22
"""Triplets looked at together: tiles of anchors are cut so that T*P*M stays below (one anchor at least)."""


class Pairs(NamedTuple):
    """Chosen pairs as boolean masks of shape (B, M)."""

    positive_BM: Tensor
    negative_BM: Tensor


Miner: TypeAlias = Callable[[Tensor, Pairs], Pairs]
"""(d_BM, candidate pairs) -> chosen pairs."""


def candidates(anchors: Embeddings, references: Embeddings) -> Pairs:
    """All pairs of different images: pos(i) = {j : y_j = y_i, id_j != id_i}, neg(i) = {k : y_k != y_i}."""
    same_class_BM = anchors.y_N[:, None] == references.y_N[None, :]
    other_image_BM = anchors.id_N[:, None] != references.id_N[None, :]
    return Pairs(same_class_BM & other_image_BM, ~same_class_BM & other_image_BM)


@dataclass(frozen=True)
class Thresholds:
    """P_i = {j in pos(i) : D_ij >= m1}, N_i = {k in neg(i) : D_ik <= m2} (GPW Eq. 18, 19)."""

    positive_margin: float
    negative_margin: float

    def __call__(self, d_BM: Tensor, pairs: Pairs) -> Pairs:
        """The pairs whose hinge is not negative, both bounds inclusive."""
        return Pairs(
            pairs.positive_BM & (d_BM >= self.positive_margin),
            pairs.negative_BM & (d_BM <= self.negative_margin),
        )


@dataclass(frozen=True)
class SimilarityRule:
    """The multi-similarity rule (GPW Eq. 24, 25), min and max over the full negative and positive sets.

    Keep j in pos(i) with D_ij >= min_{neg(i)} D_ik - eps, and k in neg(i) with
    D_ik <= max_{pos(i)} D_ij + eps. An anchor without positives or without negatives keeps no pair.
    """

    epsilon: float

    def __call__(self, d_BM: Tensor, pairs: Pairs) -> Pairs:
        """The informative ones of ``pairs``, both bounds inclusive."""
        if d_BM.numel() == 0:
            return pairs
        nearest_B1 = d_BM.detach().masked_fill(~pairs.negative_BM, math.inf).amin(1, keepdim=True)
        farthest_B1 = d_BM.detach().masked_fill(~pairs.positive_BM, -math.inf).amax(1, keepdim=True)
        return Pairs(
            pairs.positive_BM & (d_BM >= nearest_B1 - self.epsilon),
            pairs.negative_BM & (d_BM <= farthest_B1 + self.epsilon),
        )


@dataclass(frozen=True)
class AllOf:
    """The pairs that every miner keeps, each of them asked about the full candidate sets."""

    miners: tuple[Miner, ...]

    def __call__(self, d_BM: Tensor, pairs: Pairs) -> Pairs:
        """Intersection of the miners' selections."""
        chosen = pairs
        for miner in self.miners:
            kept = miner(d_BM, pairs)
            chosen = Pairs(chosen.positive_BM & kept.positive_BM, chosen.negative_BM & kept.negative_BM)
        return chosen


class TripletTile(NamedTuple):
    """The triplets of a few anchors: ``excess`` = D_ij - D_ik + m, and which of them are chosen."""

    rows: slice
    positive_TP: Tensor  # index of each positive among the references; padded, never chosen there
    excess_TPM: Tensor
    chosen_TPM: Tensor


def violating_triplets(d_BM: Tensor, pairs: Pairs, margin: float) -> Iterator[TripletTile]:
    """All triplets within the margin, tile by tile: D_ij + m >= D_ik (GPW Eq. 21).

    Anchors come in row tiles with their positives side by side, so the peak is O(T*P*M), never O(B*M*M).
    Nothing is yielded when no anchor has a positive.
    """
    num_anchors, num_references = d_BM.shape
    d_BM = d_BM.detach()
    num_positives = int(pairs.positive_BM.sum(1).max()) if num_anchors else 0
    if num_positives == 0:
        return
    tile = max(1, TILE_ELEMENTS // (num_positives * num_references))
    for start in range(0, num_anchors, tile):
        rows = slice(start, min(start + tile, num_anchors))
        d_TM, is_positive_TM = d_BM[rows], pairs.positive_BM[rows]
        positives_first_TM = is_positive_TM.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        positive_TP = positives_first_TM[:, :num_positives]
        excess_TPM = d_TM.gather(1, positive_TP)[:, :, None] - d_TM[:, None, :] + margin
        within_TPM = is_positive_TM.gather(1, positive_TP)[:, :, None] & pairs.negative_BM[rows][:, None, :]
        yield TripletTile(rows, positive_TP, excess_TPM, within_TPM & (excess_TPM >= 0))
