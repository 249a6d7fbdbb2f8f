"""Heads that turn features into an embedding: one linear head, one for each level, and codes of K bits.

Shapes: N images, F features, D embedding size (of a code: bits).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlstudy.losses.adaptive import layer_sizes

NO_CODE = "none"
LINEAR, NO_HEAD = "linear", "none"

CODES: Mapping[str, str] = {
    NO_CODE: "real numbers",
    "tanh": "tanh in training, its sign in use",
    "sign": "the sign; its gradient is taken for the identity's (straight-through)",
}


class LevelHeads(nn.Module):
    """A linear head for each level's part of features_NF; their outputs side by side are D numbers (GPW, v2).

    Level l of L gives D // L numbers, and one more where l < D mod L; with ``is_unit`` each level's are of unit norm,
    so that no stage outweighs another. Raises ValueError for D < L.
    """

    def __init__(self, levels: tuple[int, ...], dim: int, layer_norm: bool, *, is_unit: bool = False) -> None:
        super().__init__()
        self.is_unit = is_unit
        if dim < len(levels):
            raise ValueError(
                f"embedder.dim: {dim} is less than the {len(levels)} levels' heads give; raise it"
            )
        self.levels = list(levels)
        sizes = [dim // len(levels) + (number < dim % len(levels)) for number in range(len(levels))]
        self.heads = nn.ModuleList(
            linear_head(features, size, layer_norm) for features, size in zip(levels, sizes, strict=True)
        )

    def forward(self, features_NF: Tensor) -> Tensor:
        """h_ND, before the whole is normalised."""
        parts = torch.split(features_NF, self.levels, dim=1)
        heads_NF = [head(part) for head, part in zip(self.heads, parts, strict=True)]
        if self.is_unit:
            heads_NF = [normalize(own_NF.float(), dim=1, eps=1e-12) for own_NF in heads_NF]
        return torch.cat(heads_NF, dim=1)


class DepthHead(nn.Module):
    """Embeddings of the features and of each of L hidden layers on them, all on their spheres (OAHU, section 3.8).

    h^0 = x, h^l = relu(W^l h^{l-1} + b^l), f^l = Theta^l h^l / |.|; the output is [sqrt(alpha^0) f^0, ...,
    sqrt(alpha^L) f^L], so that the squared distance of two is sum_l alpha^l D^l^2.

    ``weigh`` sets alpha, which begins as 1 / (L + 1). Layer l gives D // (L + 1) numbers, and one more where l
    < D mod (L + 1). ``layer_norm`` puts one, without parameters, before it all. Raises ValueError for D < L +
    1.
    """

    alpha_L: Tensor

    def __init__(self, features: int, dim: int, depth: int, width: int, layer_norm: bool) -> None:
        super().__init__()
        if dim <= depth:
            raise ValueError(
                f"embedder.dim: {dim} is less than the {depth + 1} layers' embeddings give; raise it"
            )
        self.sizes = sizes = layer_sizes(dim, depth + 1)
        self.norm = nn.LayerNorm(features, elementwise_affine=False) if layer_norm else nn.Identity()
        self.hidden = nn.ModuleList(nn.Linear(width if layer else features, width) for layer in range(depth))
        self.theta = nn.ModuleList(
            nn.Linear(width if layer else features, size, bias=False) for layer, size in enumerate(sizes)
        )
        self.register_buffer("alpha_L", torch.full((depth + 1,), 1 / (depth + 1), dtype=torch.float64))

    def forward(self, features_NF: Tensor) -> Tensor:
        """z_ND of unit norm."""
        h_NH, parts = self.norm(features_NF), []
        for layer, theta in enumerate(self.theta):
            if layer:
                h_NH = torch.relu(self.hidden[layer - 1](h_NH))
            parts.append(normalize(theta(h_NH).float(), dim=1, eps=1e-12))
        root_L = self.alpha_L.sqrt().to(parts[0].dtype)
        return torch.cat([root * part for root, part in zip(root_L, parts, strict=True)], dim=1)

    def weigh(self, alpha_L: Tensor) -> None:
        """Take over the weights of the layers."""
        self.alpha_L.copy_(alpha_L)


def linear_head(features: int, dim: int, layer_norm: bool) -> nn.Module:
    """h = W x + b, of x's layer norm (without parameters) if ``layer_norm``."""
    if not layer_norm:
        return nn.Linear(features, dim)
    return nn.Sequential(nn.LayerNorm(features, elementwise_affine=False), nn.Linear(features, dim))


def bare_head(features: int, layer_norm: bool) -> nn.Module:
    """The features as they are, or their layer norm (without parameters) if ``layer_norm``."""
    return nn.LayerNorm(features, elementwise_affine=False) if layer_norm else nn.Identity()


def encode(h_ND: Tensor, code: str, *, training: bool) -> Tensor:
    """The numbers that go onto the sphere: h itself, tanh(h), or sign(h) in {-1, 1}^D with sign(0) = 1.

    Divided by sqrt(D) a code has unit norm, and the squared distance of two is 4/D times their Hamming
    distance. 'sign' has the gradient of h (GreedyHash, Su et al. 2018); 'tanh' is replaced by its sign in use.
    """
    if code == NO_CODE:
        return h_ND
    if code == "tanh" and training:
        return h_ND.tanh()
    sign_ND = torch.where(h_ND >= 0, 1.0, -1.0).to(h_ND.dtype)
    return sign_ND + (h_ND - h_ND.detach()) if training else sign_ND
