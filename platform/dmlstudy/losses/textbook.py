"""Losses from the textbook: multi-similarity, margin and ProxyNCA++.

Shapes: B anchors on this rank, M references, D embedding size, C classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy.losses.distances import cosine, euclidean, squared_euclidean
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, check_classes, per_anchor
from dmlstudy.losses.mining import SimilarityRule, candidates
from dmlstudy.losses.parameters import above, at_least


class MultiSimilarity(Loss):
    """Multi-similarity in cosine, with its miner (Wang et al. 2019; GPW Eq. 17, METHODS 2.2).

    L_i = (1/alpha) log(1 + sum_{P_i} e^{-alpha(S_ij-lambda)}) + (1/beta) log(1 + sum_{N_i}
    e^{beta(S_ik-lambda)}), S = z_i.z_j of unit vectors, lambda = ``threshold``; P_i: S_ij <= max_{neg(i)}
    S + epsilon, N_i: S_ik >= min_{pos(i)} S - epsilon. The count is the number of anchors; an empty set
    gives log 1 = 0. Raises ValueError unless alpha, beta > 0 and epsilon >= 0.
    """

    def __init__(
        self, alpha: float = 2.0, beta: float = 50.0, threshold: float = 0.5, epsilon: float = 0.1
    ) -> None:
        super().__init__()
        self.alpha = above("alpha", alpha, 0)
        self.beta = above("beta", beta, 0)
        self.threshold = at_least("threshold", threshold, -1)
        self.miner = SimilarityRule(at_least("epsilon", epsilon, 0))

    def terms(self, anchors: Embeddings, references: Embeddings) -> LossSum:
        """Sum of L_i over the anchors, and their number."""
        d_BM = cosine(anchors.z_ND, references.z_ND)
        chosen = self.miner(d_BM, candidates(anchors, references))
        above_BM = 1 - d_BM - self.threshold
        pull_B = _log_one_plus_sum_exp(-self.alpha * above_BM, chosen.positive_BM) / self.alpha
        push_B = _log_one_plus_sum_exp(self.beta * above_BM, chosen.negative_BM) / self.beta
        return per_anchor((pull_B + push_B).sum(), anchors)


class Margin(Loss):
    """Margin loss with a learned boundary per class, over all pairs (Wu et al. 2017, METHODS 6).

    [D_ij - beta_{y_i} + alpha]_+ for positives and [beta_{y_i} - D_ik + alpha]_+ for negatives, beta_C a
    parameter that starts at ``beta``. The count is the number of pairs with a term above 0; without any
    it is 0, and so is the sum. Raises ValueError unless alpha >= 0 and labels lie in 0..C-1.
    """

    def __init__(self, num_classes: int, alpha: float = 0.2, beta: float = 1.2) -> None:
        super().__init__()
        self.num_classes = int(at_least("num_classes", num_classes, 1))
        self.alpha = at_least("alpha", alpha, 0)
        self.beta_C = nn.Parameter(torch.full((self.num_classes,), at_least("beta", beta, 0)))

    def terms(self, anchors: Embeddings, references: Embeddings) -> LossSum:
        """Sum of the pairs' terms, and the number of those above 0."""
        check_classes(anchors.y_N, self.num_classes)
        d_BM = euclidean(anchors.z_ND, references.z_ND)
        pairs = candidates(anchors, references)
        beta_B1 = self.beta_C[anchors.y_N][:, None]
        pull_BM = torch.where(pairs.positive_BM, (d_BM - beta_B1 + self.alpha).relu(), 0)
        push_BM = torch.where(pairs.negative_BM, (beta_B1 - d_BM + self.alpha).relu(), 0)
        count = (pull_BM > 0).sum() + (push_BM > 0).sum()
        total = pull_BM.sum() + push_BM.sum()
        return LossSum(total, count.to(total.dtype))


class ProxyNCA(Loss):
    """ProxyNCA++: classification by the nearest of learned unit proxies (Teh et al. 2020, METHODS 6).

    L_i = -log softmax_c(-||z_i - p_c||^2 / T) at c = y_i, p_c on the unit sphere, T = ``temperature``.
    References are not looked at. Proxies start uniform on the sphere, from ``seed`` alone. The count is
    the number of anchors. Raises ValueError unless T > 0, labels lie in 0..C-1 and z has size ``dim``.
    """

    def __init__(self, num_classes: int, dim: int, temperature: float = 1 / 9, seed: int = 0) -> None:
        super().__init__()
        self.num_classes = int(at_least("num_classes", num_classes, 1))
        self.temperature = above("temperature", temperature, 0)
        generator = torch.Generator().manual_seed(seed)
        proxies_CD = torch.randn(num_classes, int(at_least("dim", dim, 1)), generator=generator)
        self.proxies_CD = nn.Parameter(functional.normalize(proxies_CD))

    def terms(self, anchors: Embeddings, references: Embeddings) -> LossSum:
        """Sum of L_i over the anchors, and their number."""
        check_classes(anchors.y_N, self.num_classes)
        if anchors.z_ND.shape[1] != self.proxies_CD.shape[1]:
            raise ValueError(
                f"embeddings have size {anchors.z_ND.shape[1]}, proxies {self.proxies_CD.shape[1]}; "
                "build the loss with dim = the embedder's size"
            )
        d_BC = squared_euclidean(anchors.z_ND, functional.normalize(self.proxies_CD))
        return per_anchor(
            functional.cross_entropy(-d_BC / self.temperature, anchors.y_N, reduction="sum"), anchors
        )


def _log_one_plus_sum_exp(logits_BM: Tensor, chosen_BM: Tensor) -> Tensor:
    """log(1 + sum_{chosen} e^logit) per row, without overflow; 0 where nothing is chosen."""
    zeros_B1 = logits_BM.new_zeros(logits_BM.shape[0], 1)
    return torch.cat([zeros_B1, logits_BM.masked_fill(~chosen_BM, -math.inf)], dim=1).logsumexp(1)
