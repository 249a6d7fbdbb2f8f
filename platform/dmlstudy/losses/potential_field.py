"""The potential field of embeddings and learned proxies, in which influence fades with distance.

Shapes: B anchors on this rank, M references, D embedding size, C classes, K proxies of one class, E = C K proxies,
S the proxies of this rank's share, T anchors in a tile, Q references in its band.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy.losses.distances import euclidean
from dmlstudy.losses.interface import (
    Embeddings,
    Labels,
    Loss,
    LossSum,
    World,
    check_classes,
    labelled,
)
from dmlstudy.losses.parameters import above, at_least
from dmlstudy.losses.tiles import RowLoss, RowTerms, Tile

FLOOR = 0.1
"""The distance of a negative, as a share of delta, below which repulsion rises in a straight line."""


class PotentialField(Loss):
    """The energy of a field in which classes attract and repel, less the farther (Bhatnagar & Ahuja 2025, Eq. 1-6).

    L = (1/B) sum over all ordered pairs of {embeddings, proxies} of att(D) for one class, rep(D) for two, with
    att(D) = -(delta / max(D, delta))^alpha and rep(D) = (delta / min(D, delta))^alpha - 1, K = ``proxies`` unit vectors
    of each class. Below D = 0.1 delta, rep goes on in a straight line.

    It is the paper's energy times delta^alpha, less a constant: far negatives give 0 exactly. A proxy is no pair with
    itself. Pairs of an embedding and a proxy count twice, once from either end; those of two proxies come in once
    however many ranks there are, each taking its share. With K = 0 only pairs of embeddings remain.

    The count is the number of own anchors; without references the sum is 0. Raises ValueError unless alpha, delta > 0,
    K >= 0, labels lie in 0..C-1 and z has size ``dim``.
    """

    has_precision = True

    def __init__(
        self,
        num_classes: int,
        dim: int,
        alpha: float = 4.0,
        delta: float = 0.2,
        proxies: int = 15,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.num_classes = int(at_least("num_classes", num_classes, 1))
        self.dim = int(at_least("dim", dim, 1))
        shape = (self.num_classes, int(at_least("proxies", proxies, 0)), self.dim)
        self.field = _Field(above("alpha", alpha, 0), above("delta", delta, 0), tells=proxies == 0)
        generator = torch.Generator().manual_seed(seed)
        drawn_CKD = functional.normalize(torch.randn(shape, generator=generator), dim=-1)
        self.proxies_CKD = nn.Parameter(drawn_CKD) if proxies else None

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Energy of the anchors' pairs and of this rank's share of proxies, and the number of anchors."""
        for each in (anchors, references):  # so that all ranks refuse a label together
            check_classes(each, self.num_classes)
        if self.proxies_CKD is not None and anchors.z_ND.shape[1] != self.proxies_CKD.shape[-1]:
            raise ValueError(
                f"embeddings have size {anchors.z_ND.shape[1]}, proxies {self.proxies_CKD.shape[-1]}; "
                "build the loss with dim = the embedder's size"
            )
        total, count = self.field(anchors, references, world)
        if self.proxies_CKD is None:
            return LossSum(total, count)
        proxies = self._proxies(self.proxies_CKD, anchors, references)
        same_image = Labels(anchors.labels.y_N, torch.full_like(anchors.labels.id_N, -1))  # which no proxy is
        total = total + 2 * self.field(labelled(anchors.z_ND, same_image), proxies, world).total
        own = proxies.rows(world.share(len(proxies.y_N)))
        among_proxies = self.field(own, proxies, world).total
        return LossSum(total + among_proxies * (len(references.y_N) > 0), count)

    def _proxies(self, proxies_CKD: Tensor, *batch: Embeddings) -> Embeddings:
        """The proxies as unit vectors in the batch's precision, each with its class and a number of its own."""
        dtype = reduce(torch.promote_types, (each.z_ND.dtype for each in batch), proxies_CKD.dtype)
        z_CKD = functional.normalize(proxies_CKD.to(dtype), dim=-1)
        place_E = torch.arange(z_CKD.shape[0] * z_CKD.shape[1])
        return labelled(z_CKD.flatten(0, 1), Labels(place_E // z_CKD.shape[1], place_E))


class _Field(RowLoss):
    """Energy of the pairs of some points with others; only where it ``tells`` does it warn of a batch without pairs."""

    accepts_memory = False
    is_symmetric = True

    def __init__(self, alpha: float, delta: float, *, tells: bool) -> None:
        super().__init__(euclidean)
        self.alpha, self.delta = alpha, delta
        self._has_warned = not tells

    def rows(self, rows: Tile) -> RowTerms:
        """Energy of the tile's pairs, and the number of its anchors."""
        positive, negative = rows.positive, rows.negative
        far_TQ = positive.d.clamp(min=self.delta)
        pull_TQ = far_TQ.div(self.delta).pow_(-self.alpha).mul_(positive.chosen)
        total = -pull_TQ.sum()
        pull_TQ.mul_(self.alpha).div_(far_TQ).mul_(positive.d > self.delta)
        near_TM = negative.d.clamp(FLOOR * self.delta, self.delta)
        chosen_TM = negative.chosen & (negative.d < self.delta)
        push_TM = near_TM.div(self.delta).pow_(-self.alpha)
        slope_TM = (push_TM * -self.alpha).div_(near_TM).mul_(chosen_TM)
        total += push_TM.sub_(1).mul_(chosen_TM).sum()
        total += near_TM.sub_(negative.d).clamp_(min=0).mul_(slope_TM).sum().neg_()
        return RowTerms(total, len(rows.y_T), slope_TM, pull_TQ)
