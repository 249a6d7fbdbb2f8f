"""OAHU's loss for a head of many depths on a network that is trained in batches (Gao et al. 2019, section 3.8).

Shapes: B anchors on this rank, M references, T anchors in a tile, D embedding size, l = 0..L layers of sizes E_l.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from dmlstudy.losses.distances import euclidean, full_precision
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World
from dmlstudy.losses.parameters import at_least, choice
from dmlstudy.losses.tiles import RowLoss, RowTerms, Tile

RULES = {"printed": 0, "hedge": 1, "linear": 2}


def layer_sizes(dim: int, num_layers: int) -> list[int]:
    """Numbers of an embedding of size ``dim`` that each layer gives: D // (L + 1), the first ones one more."""
    return [dim // num_layers + (layer < dim % num_layers) for layer in range(num_layers)]


def hedged(
    weight_L: NDArray[np.float64], loss_L: NDArray[np.float64], beta: float, smoothing: float, rule: str
) -> NDArray[np.float64]:
    """Layer weights after one round of the adaptive hedge update (OAHU Eq. 20 and Algorithm 1, lines 9-11).

    alpha^l *= beta^{L^l} where beta^{min L} ln L^l > beta - 1 (ln 0 = -inf), else alpha^l *= 1 - (1 - beta) L^l: the
    rule 'printed'; 'hedge' and 'linear' take one of the two for all layers.

    Then alpha = max(alpha, s / (L + 1)) and alpha /= sum alpha. The floor comes before the sum, as printed, so
    what is guaranteed is s / ((L + 1)(1 + s)).
    """
    linear_L = 1 - (1 - beta) * loss_L
    if rule == "linear":
        factor_L = linear_L
    else:
        factor_L = beta**loss_L
        if rule == "printed":
            with np.errstate(divide="ignore"):
                is_hedged_L = beta ** loss_L.min() * np.log(loss_L) > beta - 1
            factor_L = np.where(is_hedged_L, factor_L, linear_L)
    weight_L = np.maximum(weight_L * factor_L, smoothing / len(weight_L))
    return np.asarray(weight_L / weight_L.sum())


def check_hedge(tau: float, beta: float, smoothing: float, rule: str) -> None:
    """Raises ValueError unless 0 < tau < 2, 0 < beta < 1, 0 <= smoothing <= 1 and the rule is known."""
    if not 0 < tau < 2:
        raise ValueError(f"tau={tau} must lie between 0 and 2 (below 2/3 for the paper's theorem)")
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta} must lie between 0 and 1")
    if at_least("smoothing", smoothing, 0) > 1:
        raise ValueError(f"smoothing={smoothing} must be at most 1: it is a share of 1 / (L + 1)")
    choice("rule", rule, RULES)


class AdaptiveBound(Loss):
    """Adaptive-bound triplet loss of all layers, weighted by adaptive hedge (OAHU Eq. 9-13, 19, 20; section 3.8).

    The embedding is [sqrt(alpha^0) f^0, ..., sqrt(alpha^L) f^L] with unit vectors f^l (an embedder with ``head_depth``
    L makes it), D^l = ||f^l_i - f^l_j||.

    An anchor's term is sum_l alpha^l mean ABTL^l over all its triplets (i, j, k), j in pos(i), k in neg(i), and
    since ABTL = (L_attr(D_ij) + L_rep(D_ik)) / 2 that mean is (mean_j L_attr + mean_k L_rep) / 2: no triplet is
    ever listed.

    d_sim, d_dis and alpha are constants in the gradient. The count is the number of anchors with both positives and
    negatives. In training, with gradients enabled, each call ends with ``hedged`` by the layers' means over all
    ranks' anchors; a batch without triplets leaves alpha unchanged. Raises ValueError as ``check_hedge``, and for
    embeddings of another size.
    """

    has_precision = True
    alpha_L: Tensor

    def __init__(
        self,
        dim: int,
        num_layers: int,
        tau: float = 0.1,
        beta: float = 0.99,
        smoothing: float = 0.1,
        rule: str = "printed",
    ) -> None:
        super().__init__()
        check_hedge(tau, beta, smoothing, rule)
        self.tau, self.beta, self.smoothing, self.rule = tau, beta, smoothing, rule
        self.sizes = layer_sizes(dim, num_layers)
        self.of_layer = _OfLayer(tau)
        self.register_buffer("alpha_L", torch.full((num_layers,), 1 / num_layers, dtype=torch.float64))

    @property
    def layer_weights(self) -> Tensor | None:
        return self.alpha_L

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum over the anchors of their terms, and the number of anchors with a triplet."""
        if anchors.z_ND.shape[1] != sum(self.sizes):
            raise ValueError(
                f"embeddings of size {anchors.z_ND.shape[1]}, the loss was built for {sum(self.sizes)}"
            )
        parts = [
            self.of_layer.terms(_layer(anchors, f_ND), _layer(references, g_ND), world)
            for f_ND, g_ND in zip(self._layers(anchors), self._layers(references), strict=True)
        ]
        total_L = torch.stack([part.total for part in parts])
        count = parts[0].count
        total = (self.alpha_L.to(total_L.dtype, copy=True) * total_L).sum()  # alpha moves before backward
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                *sums_L, number = world.sum(torch.cat([total_L.double(), count.double()[None]])).tolist()
            if number:
                weight_L = hedged(
                    self.alpha_L.cpu().numpy(),
                    np.array(sums_L) / number,
                    self.beta,
                    self.smoothing,
                    self.rule,
                )
                self.alpha_L.copy_(torch.from_numpy(weight_L))
        return LossSum(total, count)

    def _layers(self, embeddings: Embeddings) -> list[Tensor]:
        (z_ND,) = full_precision(embeddings.z_ND)
        return [normalize(part, dim=1, eps=1e-12) for part in torch.split(z_ND, self.sizes, dim=1)]


class _OfLayer(RowLoss):
    """(mean_j L_attr(D_ij) + mean_k L_rep(D_ik)) / 2 of the anchors that have both."""

    def __init__(self, tau: float) -> None:
        super().__init__(euclidean)
        self.tau = tau

    def rows(self, rows: Tile) -> RowTerms:
        positive, negative = rows.positive, rows.negative
        num_positive_T, num_negative_T = positive.chosen.sum(1), negative.chosen.sum(1)
        has_both_T = (num_positive_T > 0) & (num_negative_T > 0)

        def share(number_T: Tensor) -> Tensor:
            return torch.where(has_both_T, 0.5 / number_T.clamp(min=1).to(rows.d_TM.dtype), 0)[:, None]

        similar_TQ = torch.expm1(positive.d) * (self.tau / math.expm1(2))
        pull_slope_TQ = share(num_positive_T) * positive.chosen / (2 - similar_TQ)
        pull_TQ = pull_slope_TQ * (positive.d - similar_TQ)
        dissimilar_TM = 2 - self.tau + torch.expm1(-negative.d) * (self.tau / math.expm1(-2))
        push_slope_TM = share(num_negative_T) * negative.chosen / dissimilar_TM
        push_TM = push_slope_TM * (dissimilar_TM - negative.d)
        is_pulled_TQ, is_pushed_TM = pull_TQ > 0, push_TM > 0
        total = (pull_TQ * is_pulled_TQ).sum() + (push_TM * is_pushed_TM).sum()
        return RowTerms(
            total,
            has_both_T.sum().to(total.dtype),
            -push_slope_TM * is_pushed_TM,
            pull_slope_TQ * is_pulled_TQ,
        )


def _layer(embeddings: Embeddings, f_NE: Tensor) -> Embeddings:
    return Embeddings(f_NE, embeddings.y_N, embeddings.id_N, on_host=embeddings.on_host, plan=embeddings.plan)
