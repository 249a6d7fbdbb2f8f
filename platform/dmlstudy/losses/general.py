"""General pair-based weighting (GPW): the pair form, the triplet form, and contrastive as its plainest case.

Shapes: B anchors on this rank, M references, T anchors in a tile, P most positives of any anchor.
"""

from __future__ import annotations

import torch

from dmlstudy.losses.distances import DISTANCES
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, per_anchor
from dmlstudy.losses.mining import AllOf, Miner, SimilarityRule, Thresholds, candidates, violating_triplets
from dmlstudy.losses.parameters import at_least, choice
from dmlstudy.losses.weighting import weighting_named


class PairWeighting(Loss):
    """Pairs beyond their margins, each weighted by how far (GPW Eq. 20, 26, 28-29, 31-32, 34-35).

    L_i = sum_{j in P_i} w+_ij (D_ij - m1) + sum_{k in N_i} w-_ik (m2 - D_ik), with detached weights
    1, (D-m1)^p and (m2-D)^q, or e^{alpha(D-m1)} and e^{beta(m2-D)}, normalised per anchor and sign
    ('anchor') or not ('none'). Mining: 'threshold' is Eq. 18-19, 'threshold+margin' adds Eq. 24-25 with
    epsilon. With squared distances the margins are squared ones (Eq. 38). The count is the number of
    anchors; an empty set gives 0. Raises ValueError unless 0 <= m1 <= m2 and p, q, alpha, beta,
    epsilon >= 0, and for unknown names.
    """

    def __init__(
        self,
        positive_margin: float = 0.0,
        negative_margin: float = 0.8,
        weighting: str = "exponential",
        p: float = 0.0,
        q: float = 1.0,
        alpha: float = 0.0,
        beta: float = 2.0,
        normalize: str = "anchor",
        mining: str = "threshold",
        epsilon: float = 0.1,
        distance: str = "euclidean",
    ) -> None:
        super().__init__()
        self.positive_margin = at_least("positive_margin", positive_margin, 0)
        self.negative_margin = at_least("negative_margin", negative_margin, positive_margin)
        for name, value in (("p", p), ("q", q), ("alpha", alpha), ("beta", beta), ("epsilon", epsilon)):
            at_least(name, value, 0)
        thresholds = Thresholds(positive_margin, negative_margin)
        miners: dict[str, Miner] = {
            "threshold": thresholds,
            "threshold+margin": AllOf((thresholds, SimilarityRule(epsilon))),
        }
        self.miner = choice("mining", mining, miners)
        self.distance = choice("distance", distance, DISTANCES)
        self.positive_weighting = weighting_named(weighting, normalize, exponent=p, rate=alpha)
        self.negative_weighting = weighting_named(weighting, normalize, exponent=q, rate=beta)

    def terms(self, anchors: Embeddings, references: Embeddings) -> LossSum:
        """Sum of L_i over the anchors, and their number."""
        d_BM = self.distance(anchors.z_ND, references.z_ND)
        chosen = self.miner(d_BM, candidates(anchors, references))
        pull_BM, push_BM = d_BM - self.positive_margin, self.negative_margin - d_BM
        total = (self.positive_weighting(pull_BM, chosen.positive_BM) * pull_BM).sum()
        total = total + (self.negative_weighting(push_BM, chosen.negative_BM) * push_BM).sum()
        return per_anchor(total, anchors)


class Contrastive(PairWeighting):
    """Contrastive loss in mean form (GPW Eq. 13, as 20 with weights 26 normalised by 34-35).

    L_i = mean_{j in P_i} (D_ij - m1) + mean_{k in N_i} (m2 - D_ik), means over the pairs beyond their
    margin. The count is the number of anchors; an empty set gives 0. Raises ValueError unless
    0 <= m1 <= m2.
    """

    def __init__(self, positive_margin: float = 0.0, negative_margin: float = 0.8) -> None:
        super().__init__(positive_margin, negative_margin, weighting="constant")


class TripletWeighting(Loss):
    """All violating triplets, each weighted by how far (GPW Eq. 21, 23, 27, 30, 33, 36).

    L_i = sum_{T_i} w_ijk (D_ij - D_ik + m), T_i = {(j, k) : D_ij + m >= D_ik}, with detached weights
    1, (D_ij-D_ik+m)^p or e^{alpha(D_ij-D_ik+m)}, normalised over T_i ('anchor') or not ('none'). As the
    weights are detached, the sum is linear in the distances: only its B*M coefficients are kept for
    backward, and triplets live one tile at a time. The count is the number of anchors; an empty set gives
    0. Raises ValueError unless margin, p, alpha >= 0, and for unknown names.
    """

    def __init__(
        self,
        margin: float = 0.1,
        weighting: str = "exponential",
        p: float = 5.0,
        alpha: float = 40.0,
        normalize: str = "anchor",
        distance: str = "euclidean",
    ) -> None:
        super().__init__()
        self.margin = at_least("margin", margin, 0)
        at_least("p", p, 0)
        at_least("alpha", alpha, 0)
        self.distance = choice("distance", distance, DISTANCES)
        self.weighting = weighting_named(weighting, normalize, exponent=p, rate=alpha)

    def terms(self, anchors: Embeddings, references: Embeddings) -> LossSum:
        """Sum of L_i over the anchors, and their number."""
        d_BM = self.distance(anchors.z_ND, references.z_ND)
        coefficient_BM = torch.zeros_like(d_BM)
        weight = d_BM.new_zeros(())
        for tile in violating_triplets(d_BM, candidates(anchors, references), self.margin):
            w_TPM = self.weighting(tile.excess_TPM, tile.chosen_TPM)
            coefficient_BM[tile.rows] -= w_TPM.sum(1)
            coefficient_BM[tile.rows].scatter_add_(1, tile.positive_TP, w_TPM.sum(2))
            weight += w_TPM.sum()
        return per_anchor((coefficient_BM * d_BM).sum() + self.margin * weight, anchors)
