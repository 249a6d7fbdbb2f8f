"""Weighting: how much each chosen pair or triplet counts, by how far it exceeds its hinge.

``excess`` e >= 0 is D_ij - m1, m2 - D_ik or D_ij - D_ik + m. A weighting gives the raw weight u(e) and its
derivative. ``largest`` is the anchor's largest excess, or None: where weights are normalised per anchor (GPW
Eq. 34-36) u is taken relative to it, as a common factor cancels, and nothing overflows; raw weights (None)
are absolute.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from dmlstudy.losses.parameters import choice


class Weighting(ABC):
    """A function of the excess, of any shape."""

    @abstractmethod
    def raw(self, excess: Tensor, largest: Tensor | None) -> Tensor:
        """u(e), broadcastable to e."""

    @abstractmethod
    def slope(self, u: Tensor, excess: Tensor) -> Tensor:
        """du/de where u = raw(e)."""


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


def weighting_named(kind: str, *, exponent: float, rate: float) -> Weighting:
    """The weighting of that kind; raises ValueError for an unknown kind."""
    kinds: dict[str, Weighting] = {
        "constant": Constant(),
        "power": Power(exponent),
        "exponential": Exponential(rate),
    }
    return choice("weighting", kind, kinds)
