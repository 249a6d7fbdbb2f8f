"""Four methods that learn binary codes of frozen features without labels.

Each has one linear or two-layer encoder to logits h_ND; a bit is +1 where its logit is above 0, else -1, in
training as in use.

Where a paper's objective is a sum, it is divided by the number of numbers it runs over, so that the weight of a
further term means the same for every batch size and number of features; Adam takes the same steps either way.

Shapes: B rows of a batch, N rows, F features, D bits, H hidden units, C size of the continuous bottleneck.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy.losses.parameters import at_least

MAX_ROWS = 5000
"""Rows whose pairs SSDH takes its statistics from: 12.5 M distances."""

BINS_PER_UNIT = 100


class CodesAndLoss(NamedTuple):
    """The outcome of a batch: codes +-1 that carry the method's own gradient estimate, and its loss."""

    z_BD: Tensor
    loss: Tensor


class HashMethod(nn.Module, ABC):
    """A method of unsupervised hashing: features in, codes and a loss out."""

    def prepare(self, x_NF: Tensor) -> None:
        """Take what the method needs to know of all training features, before the first step: nothing, for most."""

    @abstractmethod
    def logits(self, x_NF: Tensor) -> Tensor:
        """h_ND, whose signs are the codes."""

    @abstractmethod
    def step(self, x_BF: Tensor, generator: torch.Generator) -> CodesAndLoss:
        """Codes and loss of a batch; all randomness is ``generator``'s."""


def signs(h_ND: Tensor) -> Tensor:
    """+1 where the logit is above 0, else -1; unlike torch.sign never 0."""
    return torch.where(h_ND > 0, 1.0, -1.0).to(h_ND.dtype)


def with_slope_of(hard: Tensor, soft: Tensor) -> Tensor:
    """The value ``hard`` with the gradient of ``soft`` (straight-through)."""
    return hard.detach() + (soft - soft.detach())


def bernoulli_bits(h_ND: Tensor) -> Tensor:
    """b = [sigma(h) > 1/2] in {0, 1} with slope sigma(h)(1 - sigma(h)), the mean of b's distributional derivative.

    SGH's doubly stochastic neuron (SGH Eq. 10) with its noise at 1/2, as in the authors' code of SGH and of TBH.
    """
    return with_slope_of((signs(h_ND) + 1) / 2, h_ND.sigmoid())


class SGH(HashMethod):
    """Stochastic generative hashing: codes from which a linear decoder rebuilds the features (Dai et al. 2017).

    h = x W + c, b = [h > 0], x^ = (b U) o |s| + m,

    L = (1/BF) [ sum_i ||x_i - x^_i||^2 / 2 + alpha sum_id xent(h_id, b_id) + beta (||W||^2 + ||U||^2) / 2 ],
    xent(h, b) = log(1 + e^h) - b h, with gradient through b everywhere (its slope is sigma(h)(1 - sigma(h))).

    Starts as in the authors' code: W ~ N(0, 1/F), c ~ N(0, 1), U ~ N(0, 1/D), m and s the mean and the variance
    (at least 1e-7) of the training features; so features are best scaled to a variance near 1. The code's
    sum is divided by BF. Raises ValueError unless alpha, beta >= 0.
    """

    def __init__(self, num_features: int, num_bits: int, alpha: float = 1.0e-3, beta: float = 1.0e-3) -> None:
        super().__init__()
        self.alpha = at_least("alpha", alpha, 0)
        self.beta = at_least("beta", beta, 0)
        self.encoder_FD = nn.Parameter(torch.randn(num_features, num_bits) / math.sqrt(num_features))
        self.bias_D = nn.Parameter(torch.randn(num_bits))
        self.decoder_DF = nn.Parameter(torch.randn(num_bits, num_features) / math.sqrt(num_bits))
        self.scale_F = nn.Parameter(torch.ones(num_features))
        self.shift_F = nn.Parameter(torch.zeros(num_features))

    def prepare(self, x_NF: Tensor) -> None:
        """Start scale and shift at the features' variance and mean."""
        with torch.no_grad():
            self.scale_F.copy_(x_NF.var(dim=0, correction=0).clamp(min=1e-7))
            self.shift_F.copy_(x_NF.mean(dim=0))

    def logits(self, x_NF: Tensor) -> Tensor:
        return x_NF @ self.encoder_FD + self.bias_D

    def step(self, x_BF: Tensor, generator: torch.Generator) -> CodesAndLoss:
        h_BD = self.logits(x_BF)
        b_BD = bernoulli_bits(h_BD)
        rebuilt_BF = (b_BD @ self.decoder_DF) * self.scale_F.abs() + self.shift_F
        distortion = (rebuilt_BF - x_BF).square().sum() / 2
        entropy = (functional.softplus(h_BD) - b_BD * h_BD).sum()
        ridge = (self.encoder_FD.square().sum() + self.decoder_DF.square().sum()) / 2
        total = distortion + self.alpha * entropy + self.beta * ridge
        return CodesAndLoss(2 * b_BD - 1, total / x_BF.numel())


class SSDH(HashMethod):
    """Semantic structure-based unsupervised deep hashing: keep near pairs near, far pairs far (Yang et al. 2018).

    v = tanh(h), H_ij = v_i . v_j / D, L = (1/B^2) sum_ij |S_ij| (H_ij - S_ij)^2, the pairs i = j among them;
    S_ij = +1 where the cosine distance of the features is below mode - near sigma_l, -1 where it is above
    mode + far sigma_r, else 0.

    The mode is the left edge of the fullest bin (of width 1/100) of all training pairs' distances, sigma_l^2 and
    sigma_r^2 are the mean squared deviations from it on either side: the two half Gaussians of the paper. Pairs are
    those of at most 5000 rows, evenly spaced.

    The code has tanh's slope. On frozen features the encoder is F -> ``hidden`` -> D with ReLU, our choice: the paper
    fine-tunes a VGG-16 there. Raises ValueError unless near, far >= 0 and hidden >= 1.
    """

    mode: Tensor
    near_limit: Tensor
    far_limit: Tensor

    def __init__(
        self, num_features: int, num_bits: int, near: float = 2.0, far: float = 2.0, hidden: int = 1024
    ) -> None:
        super().__init__()
        self.near = at_least("near", near, 0)
        self.far = at_least("far", far, 0)
        at_least("hidden", hidden, 1)
        self.encoder = nn.Sequential(nn.Linear(num_features, hidden), nn.ReLU(), nn.Linear(hidden, num_bits))
        for name in ("mode", "near_limit", "far_limit"):
            self.register_buffer(name, torch.tensor(math.nan))

    def prepare(self, x_NF: Tensor) -> None:
        """Find the two limits on cosine distance. Raises ValueError for fewer than two rows."""
        if len(x_NF) < 2:
            raise ValueError(f"ssdh needs at least 2 rows of features, got {len(x_NF)}")
        rows = torch.linspace(0, len(x_NF) - 1, min(len(x_NF), MAX_ROWS)).round().long()
        distance_NN = cosine_distances(x_NF[rows])
        first, second = torch.triu_indices(len(rows), len(rows), offset=1)
        pair_P = distance_NN[first, second]
        counts = torch.histc(pair_P, bins=2 * BINS_PER_UNIT, min=0, max=2)
        self.mode = counts.argmax().to(pair_P.dtype) / BINS_PER_UNIT
        deviation_P = pair_P - self.mode
        on_left_P = deviation_P <= 0
        self.near_limit = self.mode - self.near * _root_mean_square(deviation_P[on_left_P])
        self.far_limit = self.mode + self.far * _root_mean_square(deviation_P[~on_left_P])

    def logits(self, x_NF: Tensor) -> Tensor:
        h_ND: Tensor = self.encoder(x_NF)
        return h_ND

    def step(self, x_BF: Tensor, generator: torch.Generator) -> CodesAndLoss:
        assert not self.mode.isnan(), "prepare comes before the first step"
        distance_BB = cosine_distances(x_BF)
        wanted_BB = (distance_BB < self.near_limit).to(x_BF.dtype) - (distance_BB > self.far_limit).to(
            x_BF.dtype
        )
        h_BD = self.logits(x_BF)
        v_BD = h_BD.tanh()
        got_BB = v_BD @ v_BD.T / v_BD.shape[1]
        loss = (wanted_BB.abs() * (got_BB - wanted_BB).square()).mean()
        return CodesAndLoss(with_slope_of(signs(h_BD), v_BD), loss)


class GreedyHash(HashMethod):
    """Greedy hash, the unsupervised variant: codes as similar as the features (Su et al. 2018).

    z = sign(h) with the gradient of h, h linear in x; with the batch's first and second half paired row by row (a
    last odd row is in no pair), L = mean (cos(z_a, z_b) - cos(x_a, x_b))^2 + penalty mean | |h| - 1 |^3.
    Raises ValueError unless penalty >= 0.
    """

    def __init__(self, num_features: int, num_bits: int, penalty: float = 0.1) -> None:
        super().__init__()
        self.penalty = at_least("penalty", penalty, 0)
        self.encoder = nn.Linear(num_features, num_bits)

    def logits(self, x_NF: Tensor) -> Tensor:
        h_ND: Tensor = self.encoder(x_NF)
        return h_ND

    def step(self, x_BF: Tensor, generator: torch.Generator) -> CodesAndLoss:
        h_BD = self.logits(x_BF)
        z_BD = with_slope_of(signs(h_BD), h_BD)
        half = len(x_BF) // 2
        first, second = slice(0, half), slice(half, 2 * half)
        got = functional.cosine_similarity(z_BD[first], z_BD[second])
        wanted = functional.cosine_similarity(x_BF[first], x_BF[second])
        disparity = (got - wanted).square().sum() / max(half, 1)
        return CodesAndLoss(z_BD, disparity + self.penalty * (h_BD.abs() - 1).abs().pow(3).mean())


class TBH(HashMethod):
    """Twin-bottleneck hashing: codes whose Hamming graph smooths what the decoder sees (Shen et al. 2020).

    e = relu(x), b = [h(e) > 0], c = sigmoid(linear(e)); A_ij = (1 - hamming(b_i, b_j) / D)^1.4 and
    y = sigmoid(Q^-1/2 A Q^-1/2 linear(c)), Q the rows' sums of A; x^ is decoded from y.

    With critics d_b, d_y that tell random bits from b and uniform numbers from y (one linear layer each, ``t`` the
    sum of both cross-entropies), the encoder and decoder minimise (1/F) [ sum_i ||x_i - x^_i||^2 / (2B) - adversarial
    t ], and the critics t.

    Both happen in one step: the critics' input has its gradient reversed, and the loss has
    the former's value.

    The authors' code sums the distortion over the batch, which amounts to adversarial = 1/B: the default is that at a
    batch of 100, and at 1 the critics' random bits win over the data. Raises ValueError unless adversarial >= 0 and
    hidden, continuous >= 1.
    """

    def __init__(
        self,
        num_features: int,
        num_bits: int,
        hidden: int = 1024,
        continuous: int = 512,
        adversarial: float = 0.01,
    ) -> None:
        super().__init__()
        at_least("hidden", hidden, 1)
        at_least("continuous", continuous, 1)
        self.adversarial = at_least("adversarial", adversarial, 0)
        self.encoder = nn.Sequential(nn.Linear(num_features, hidden), nn.ReLU())
        self.to_bits = nn.Linear(hidden, num_bits)
        self.to_continuous = nn.Linear(hidden, continuous)
        self.graph = nn.Linear(continuous, continuous)
        self.decoder = nn.Sequential(
            nn.Linear(continuous, hidden), nn.ReLU(), nn.Linear(hidden, num_features)
        )
        self.bits_critic = nn.Linear(num_bits, 1)
        self.graph_critic = nn.Linear(continuous, 1)

    def logits(self, x_NF: Tensor) -> Tensor:
        h_ND: Tensor = self.to_bits(self.encoder(x_NF))
        return h_ND

    def step(self, x_BF: Tensor, generator: torch.Generator) -> CodesAndLoss:
        e_BH = self.encoder(x_BF)
        b_BD = bernoulli_bits(self.to_bits(e_BH))
        c_BC = self.to_continuous(e_BH).sigmoid()
        y_BC = (smoothing(b_BD) @ self.graph(c_BC)).sigmoid()
        distortion = (self.decoder(y_BC) - x_BF).square().sum() / (2 * len(x_BF))
        uniform_BD, uniform_BC = (
            torch.rand(v.shape, generator=generator, dtype=v.dtype).to(v.device) for v in (b_BD, y_BC)
        )
        told_apart = _cross_entropy(self.bits_critic, (uniform_BD > 0.5).to(b_BD.dtype), b_BD)
        told_apart = told_apart + _cross_entropy(self.graph_critic, uniform_BC, y_BC)
        weighted = self.adversarial * told_apart
        loss = distortion + weighted - 2 * weighted.detach()
        return CodesAndLoss(2 * b_BD - 1, loss / x_BF.shape[1])


def smoothing(b_BD: Tensor) -> Tensor:
    """Q^-1/2 A Q^-1/2 of the graph A_ij = (1 - hamming(b_i, b_j) / D)^1.4 on bits {0, 1} (TBH Eq. 4-5)."""
    agreement_BB = b_BD @ (b_BD - 1).T + (b_BD - 1) @ b_BD.T
    graph_BB = (1 - agreement_BB.abs() / b_BD.shape[1]).pow(1.4)
    root_B = (graph_BB.sum(dim=1) + 1e-8).rsqrt()
    return root_B[:, None] * graph_BB * root_B


def _cross_entropy(critic: nn.Linear, real_BX: Tensor, made_BX: Tensor) -> Tensor:
    """The critic's loss on real against made rows; its gradient reaches what was made with the sign reversed."""
    reversed_BX = 2 * made_BX.detach() - made_BX
    return functional.softplus(-critic(real_BX)).mean() + functional.softplus(critic(reversed_BX)).mean()


def cosine_distances(x_NF: Tensor) -> Tensor:
    """1 - cos of all pairs of rows, in [0, 2]; 0 from a row to itself, 1 from a row of zeros to others."""
    unit_NF = functional.normalize(x_NF, dim=1, eps=1e-12)
    return (1 - unit_NF @ unit_NF.T).clamp(0, 2).fill_diagonal_(0)


def _root_mean_square(x_P: Tensor) -> Tensor:
    """sqrt(mean x^2), 0 for none."""
    return x_P.square().sum().div(max(1, x_P.numel())).sqrt()


METHODS: Mapping[str, type[HashMethod]] = {
    "sgh": SGH,
    "ssdh": SSDH,
    "greedyhash": GreedyHash,
    "tbh": TBH,
}
"""Every method of hashing a study can name."""
