"""Weights of the chosen pairs or triplets, by how far each exceeds its hinge.

``excess`` e >= 0 is D_ij - m1, m2 - D_ik or D_ij - D_ik + m. A weighting gives the raw weight u(e) and its
derivative.

``largest`` is the anchor's largest excess, or None: where weights are normalised per anchor (GPW Eq. 34-36) u
is taken relative to it, as a common factor cancels, and nothing overflows; raw weights (None) are absolute.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dmlstudy.losses.parameters import part


@runtime_checkable
class Weighting(Protocol):
    """A function of the excess, of any shape."""

    @abstractmethod
    def raw(self, excess: Tensor, largest: Tensor | None) -> Tensor:
        """u(e), broadcastable to e."""
        ...

    @abstractmethod
    def slope(self, u: Tensor, excess: Tensor) -> Tensor:
        """du/de where u = raw(e)."""
        ...


class Constant(Weighting):
    """u = 1 (GPW Eq. 26, 27)."""

    def raw(self, excess: Tensor, largest: Tensor | None) -> Tensor:
        return excess.new_ones(())

    def slope(self, u: Tensor, excess: Tensor) -> Tensor:
        return excess.new_zeros(())


@dataclass(frozen=True)
class Power(Weighting):
    """u = e^exponent, with 0^0 = 1 (GPW Eq. 28-30); the slope at e = 0 counts as 0."""

    exponent: float

    def raw(self, excess: Tensor, largest: Tensor | None) -> Tensor:
        ratio = excess if largest is None else excess / torch.where(largest > 0, largest, 1)
        return ratio**self.exponent

    def slope(self, u: Tensor, excess: Tensor) -> Tensor:
        return torch.where(excess > 0, self.exponent * u / excess, 0)


@dataclass(frozen=True)
class Exponential(Weighting):
    """u = e^{rate * excess} (GPW Eq. 31-33).

    Relative to the largest it is the numerator of a softmax. Raw, it saturates at the square root of the
    largest number of its type (e^44 in float32), so that sums over a batch stay finite.
    """

    rate: float

    def raw(self, excess: Tensor, largest: Tensor | None) -> Tensor:
        if largest is None:
            return (self.rate * excess).clamp_(max=math.log(torch.finfo(excess.dtype).max) / 2).exp_()
        return (excess - largest).mul_(self.rate).exp_()

    def slope(self, u: Tensor, excess: Tensor) -> Tensor:
        return self.rate * u


def checked_weighting(weighting: object) -> Weighting:
    """The weighting, after it was tried on a small tile.

    Raises ValueError unless it has both methods, and where its slope is not the derivative of its weight.
    """

    def tried(weighting: Weighting) -> str | None:
        excess_TM = torch.tensor([[0.1, 0.4, 0.3], [0.2, 0.7, 0.5]], dtype=torch.float64)
        relative = weighting.raw(excess_TM.clone(), excess_TM.amax(1, keepdim=True))
        with torch.enable_grad():
            leaf_TM = excess_TM.clone().requires_grad_()
            u = weighting.raw(leaf_TM, None)
            for weight in (u, relative):
                if (weight * excess_TM).shape != excess_TM.shape:
                    return (
                        f"raw gives the shape {tuple(weight.shape)} for excesses of {tuple(excess_TM.shape)}"
                    )
            wanted_TM = torch.zeros_like(excess_TM)
            if u.requires_grad:
                (wanted_TM,) = torch.autograd.grad(u.expand_as(leaf_TM).sum(), leaf_TM)
        slope = weighting.slope(u.detach(), excess_TM)
        if not torch.allclose(slope.double().expand_as(wanted_TM), wanted_TM, rtol=1e-4, atol=1e-6):
            return "slope is not the derivative of raw"
        return None

    return part(
        "weighting", weighting, Weighting, "an object with raw(excess, largest) and slope(u, excess)", tried
    )
