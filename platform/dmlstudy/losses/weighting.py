"""Weighting: how much each chosen pair or triplet counts. Weights are detached (GPW footnote 6).

Shapes: the first dimension runs over anchors, the others over an anchor's pairs (B, M) or triplets
(T, P, M). ``excess`` is the amount by which a term exceeds its hinge: D_ij - m1, m2 - D_ik or
D_ij - D_ik + m. What is not chosen weighs exactly 0 and is in no normaliser; an empty selection weighs 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dmlstudy.losses.parameters import choice

Weighting: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(excess, chosen) -> w >= 0, all of one shape."""

Normalize: TypeAlias = Literal["anchor", "none"]
"""'anchor': weights of an anchor's chosen set sum to 1 (GPW Eq. 34-36); 'none': raw weights."""


@dataclass(frozen=True)
class Constant:
    """u = 1 (GPW Eq. 26, 27)."""

    normalize: Normalize

    @torch.no_grad()
    def __call__(self, excess: Tensor, chosen: Tensor) -> Tensor:
        """Equal weights."""
        return _normalized(chosen.to(excess.dtype), self.normalize)


@dataclass(frozen=True)
class Power:
    """u = excess^exponent, with 0^0 = 1 (GPW Eq. 28-30)."""

    exponent: float
    normalize: Normalize

    @torch.no_grad()
    def __call__(self, excess: Tensor, chosen: Tensor) -> Tensor:
        """Powers, taken relative to the anchor's largest where they are normalised: no underflow."""
        u = torch.where(chosen, excess.clamp(min=0), 0)
        if self.normalize == "anchor" and u.numel():
            largest = _per_anchor(u.flatten(1).amax(1), u)
            u = u / torch.where(largest > 0, largest, 1)
        return _normalized(torch.where(chosen, u**self.exponent, 0), self.normalize)


@dataclass(frozen=True)
class Exponential:
    """u = e^{rate * excess} (GPW Eq. 31-33).

    Normalised, it is a masked softmax. Raw, it saturates at the square root of the largest number of its
    type (e^44 in float32), so that sums over a batch stay finite.
    """

    rate: float
    normalize: Normalize

    @torch.no_grad()
    def __call__(self, excess: Tensor, chosen: Tensor) -> Tensor:
        """Exponentials of the chosen, zero elsewhere."""
        if excess.numel() == 0:
            return torch.zeros_like(excess)
        logits = torch.where(chosen, self.rate * excess, -math.inf)
        if self.normalize == "anchor":
            largest = _per_anchor(logits.flatten(1).amax(1), logits)
            logits = logits - torch.where(largest.isfinite(), largest, 0)
        else:
            logits = logits.clamp(max=math.log(torch.finfo(logits.dtype).max) / 2)
        return _normalized(logits.exp(), self.normalize)


def weighting_named(kind: str, normalize: str, *, exponent: float, rate: float) -> Weighting:
    """The weighting of that kind; raises ValueError for an unknown kind or normalisation."""
    scope: Normalize = choice("normalize", normalize, {name: name for name in get_args(Normalize)})
    kinds: dict[str, Weighting] = {
        "constant": Constant(scope),
        "power": Power(exponent, scope),
        "exponential": Exponential(rate, scope),
    }
    return choice("weighting", kind, kinds)


def _normalized(u: Tensor, normalize: Normalize) -> Tensor:
    if normalize == "none":
        return u
    total = _per_anchor(u.flatten(1).sum(1), u)
    return u / torch.where(total > 0, total, 1)


def _per_anchor(x_B: Tensor, like: Tensor) -> Tensor:
    return x_B.view(-1, *([1] * (like.ndim - 1)))
