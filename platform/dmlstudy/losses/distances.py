"""Distances between anchors and references: smaller is closer, always.

Shapes: N rows, T anchors, M references, D embedding size, F features. All are computed in float32 also
under autocast, and in float64 when an input is float64.

Every distance here is a function of one product of matrices, d_TM = of(left_TF @ right_MF^T), where left and
right are features of the embeddings. So one matrix multiplication gives a tile of distances, and two give
the gradient from a tile of slopes, without an autograd graph.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dmlstudy.losses.parameters import above, part
from dmlstudy.losses.products import Product, exact
from dmlstudy.records import CURVATURE

SQUARED_FLOOR = 1e-12
"""Squared distances below this count as this, with gradient zero: sqrt has none at 0."""


NEAR_BOUNDARY = 1e-3
"""The least 1 - c |x|^2 that a point of a ball counts with: at its boundary distances are infinite."""


@runtime_checkable
class Distance(Protocol):
    """(z_TD, z_MD) -> d_TM, differentiable; and its pieces, for those who go tile by tile."""

    def __call__(self, z_TD: Tensor, z_MD: Tensor, product: Product = exact) -> Tensor:
        """All distances at once."""
        z_TD, z_MD = full_precision(z_TD, z_MD)
        with torch.autocast(z_TD.device.type, enabled=False):
            return self.of(product(self.left(z_TD), self.right(z_MD).T))

    @abstractmethod
    def left(self, z_ND: Tensor) -> Tensor:
        """An anchor's features (N, F)."""
        ...

    @abstractmethod
    def right(self, z_ND: Tensor) -> Tensor:
        """A reference's features (N, F)."""
        ...

    @abstractmethod
    def of(self, product_TM: Tensor) -> Tensor:
        """The distance from the product of features; the product's memory may be reused without a graph."""
        ...

    @abstractmethod
    def product_slope(self, slope_TM: Tensor, d_TM: Tensor) -> Tensor:
        """The slope by the product from the slope by the distance, whose memory is reused."""
        ...

    @abstractmethod
    def left_gradient(self, gradient_NF: Tensor, z_ND: Tensor) -> Tensor:
        """The gradient by z from that by ``left(z)``."""
        ...

    @abstractmethod
    def right_gradient(self, gradient_NF: Tensor, z_ND: Tensor) -> Tensor:
        """The gradient by z from that by ``right(z)``."""
        ...


class SquaredEuclidean(Distance):
    """d_ij = max(0, ||z_i - z_j||^2), as (z_i, ||z_i||^2, 1) . (-2 z_j, 1, ||z_j||^2)."""

    def left(self, z_ND: Tensor) -> Tensor:
        return torch.cat([z_ND, z_ND.square().sum(1, keepdim=True), z_ND.new_ones(len(z_ND), 1)], dim=1)

    def right(self, z_ND: Tensor) -> Tensor:
        return torch.cat([-2 * z_ND, z_ND.new_ones(len(z_ND), 1), z_ND.square().sum(1, keepdim=True)], dim=1)

    def of(self, product_TM: Tensor) -> Tensor:
        return product_TM.clamp(min=0) if product_TM.requires_grad else product_TM.clamp_(min=0)

    def product_slope(self, slope_TM: Tensor, d_TM: Tensor) -> Tensor:
        return slope_TM

    def left_gradient(self, gradient_NF: Tensor, z_ND: Tensor) -> Tensor:
        size = z_ND.shape[1]
        return torch.addcmul(gradient_NF[:, :size], z_ND, gradient_NF[:, size : size + 1], value=2)

    def right_gradient(self, gradient_NF: Tensor, z_ND: Tensor) -> Tensor:
        size = z_ND.shape[1]
        return 2 * (z_ND * gradient_NF[:, size + 1 :] - gradient_NF[:, :size])


class Euclidean(SquaredEuclidean):
    """D_ij = sqrt(max(||z_i - z_j||^2, 1e-12)), with gradient zero at coinciding points."""

    def of(self, product_TM: Tensor) -> Tensor:
        if product_TM.requires_grad:
            return product_TM.clamp(min=SQUARED_FLOOR).sqrt()
        return product_TM.clamp_(min=SQUARED_FLOOR).sqrt_()

    def product_slope(self, slope_TM: Tensor, d_TM: Tensor) -> Tensor:
        slope_TM.div_(d_TM).mul_(0.5)
        at_floor_TM = d_TM <= SQUARED_FLOOR**0.5
        return slope_TM.masked_fill_(at_floor_TM, 0)


class Cosine(Distance):
    """d_ij = 1 - z_i.z_j = D_ij^2 / 2, the cosine distance of unit vectors."""

    def left(self, z_ND: Tensor) -> Tensor:
        return z_ND

    def right(self, z_ND: Tensor) -> Tensor:
        return z_ND

    def of(self, product_TM: Tensor) -> Tensor:
        return 1 - product_TM if product_TM.requires_grad else product_TM.neg_().add_(1)

    def product_slope(self, slope_TM: Tensor, d_TM: Tensor) -> Tensor:
        return slope_TM.neg_()

    def left_gradient(self, gradient_NF: Tensor, z_ND: Tensor) -> Tensor:
        return gradient_NF

    def right_gradient(self, gradient_NF: Tensor, z_ND: Tensor) -> Tensor:
        return gradient_NF


class Hyperbolic(Distance):
    """d_ij of points of a ball of curvature -c (Ermolov et al. 2022, Eq. 1-3), for any x of |x| < 1 / sqrt(c).

    d = (2 / sqrt(c)) asinh(sqrt(c A)), A = max(1e-12, lambda_x lambda_y |x - y|^2), lambda_x = 1 / (1 - c |x|^2), as
    lambda_x (x, |x|^2, 1) . lambda_y (-2 y, 1, |y|^2); the same as (2 / sqrt(c)) artanh(sqrt(c) |(-x) + y|) with
    Moebius addition, and as c -> 0 it is 2 |x - y|.

    Where c |x|^2 is above 1 - 1e-3, which ``embedders.ball`` never gives, lambda_x stays 1000. The gradient is zero at
    coinciding points, and is that by coordinates, as in the authors' code. Raises ValueError unless curvature > 0.
    """

    def __init__(self, curvature: float = CURVATURE) -> None:
        self.curvature = above("curvature", curvature, 0)

    def left(self, z_ND: Tensor) -> Tensor:
        square_N1, factor_N1 = self._squares(z_ND)
        return torch.cat([factor_N1 * z_ND, factor_N1 * square_N1, factor_N1], dim=1)

    def right(self, z_ND: Tensor) -> Tensor:
        square_N1, factor_N1 = self._squares(z_ND)
        return torch.cat([-2 * factor_N1 * z_ND, factor_N1, factor_N1 * square_N1], dim=1)

    def of(self, product_TM: Tensor) -> Tensor:
        root = math.sqrt(self.curvature)
        if product_TM.requires_grad:
            return (product_TM.clamp(min=SQUARED_FLOOR) * self.curvature).sqrt().asinh() * (2 / root)
        return product_TM.clamp_(min=SQUARED_FLOOR).mul_(self.curvature).sqrt_().asinh_().mul_(2 / root)

    def product_slope(self, slope_TM: Tensor, d_TM: Tensor) -> Tensor:
        root = math.sqrt(self.curvature)
        at_floor_TM = d_TM <= 2 * SQUARED_FLOOR**0.5 * (1 + 1e-6)
        # d' = 1 / sqrt(A (1 + c A)) = 2 sqrt(c) / sinh(sqrt(c) d)
        slope_TM.mul_(2 * root).div_((root * d_TM).sinh_())
        return slope_TM.masked_fill_(at_floor_TM, 0)

    def left_gradient(self, gradient_NF: Tensor, z_ND: Tensor) -> Tensor:
        by_z_ND, by_square_N1, by_one_N1 = gradient_NF[:, :-2], gradient_NF[:, -2:-1], gradient_NF[:, -1:]
        return self._gradient(by_z_ND, by_square_N1, by_one_N1, z_ND)

    def right_gradient(self, gradient_NF: Tensor, z_ND: Tensor) -> Tensor:
        by_z_ND, by_one_N1, by_square_N1 = gradient_NF[:, :-2], gradient_NF[:, -2:-1], gradient_NF[:, -1:]
        return self._gradient(-2 * by_z_ND, by_square_N1, by_one_N1, z_ND)

    def _squares(self, z_ND: Tensor) -> tuple[Tensor, Tensor]:
        """|x|^2 and lambda of each point."""
        square_N1 = z_ND.square().sum(1, keepdim=True)
        return square_N1, (1 - self.curvature * square_N1).clamp(min=NEAR_BOUNDARY).reciprocal()

    def _gradient(self, by_z_ND: Tensor, by_square_N1: Tensor, by_one_N1: Tensor, z_ND: Tensor) -> Tensor:
        """The gradient by x from those by the parts of lambda (x, |x|^2, 1)."""
        square_N1, factor_N1 = self._squares(z_ND)
        by_factor_N1 = (by_z_ND * z_ND).sum(1, keepdim=True) + by_square_N1 * square_N1 + by_one_N1
        by_factor_N1 = by_factor_N1 * (1 - self.curvature * square_N1 > NEAR_BOUNDARY)
        turned_N1 = by_square_N1 * factor_N1 + by_factor_N1 * (self.curvature * factor_N1.square())
        return torch.addcmul(factor_N1 * by_z_ND, z_ND, turned_N1, value=2)


euclidean, squared_euclidean, cosine = Euclidean(), SquaredEuclidean(), Cosine()


def checked_distance(distance: object) -> Distance:
    """The distance, after it was tried on a few embeddings.

    Raises ValueError unless it has all methods, and where its gradients are not those of its values.
    """

    def tried(distance: Distance) -> str | None:
        generator = torch.Generator().manual_seed(0)
        z_ND = torch.randn(5, 4, dtype=torch.float64, generator=generator)
        z_ND /= z_ND.norm(dim=1, keepdim=True)
        if isinstance(distance, Hyperbolic):
            z_ND /= 2 * distance.curvature**0.5
        slope_TM = torch.rand(2, 3, dtype=torch.float64, generator=generator)
        z_TD, z_MD = z_ND[:2], z_ND[2:]
        with torch.enable_grad():
            leaves = (z_TD.clone().requires_grad_(), z_MD.clone().requires_grad_())
            d_TM = distance(*leaves)
            if d_TM.shape != slope_TM.shape:
                return f"distances of 2 and 3 embeddings have the shape {tuple(d_TM.shape)}"
            wanted = torch.autograd.grad((d_TM * slope_TM).sum(), leaves)
        left_TF, right_MF = distance.left(z_TD), distance.right(z_MD)
        of_tile_TM = distance.of(left_TF @ right_MF.T)
        slope_TM = distance.product_slope(slope_TM, of_tile_TM.clone())
        found = (
            distance.left_gradient(slope_TM @ right_MF, z_TD),
            distance.right_gradient(slope_TM.T @ left_TF, z_MD),
        )
        if not torch.allclose(of_tile_TM, d_TM.detach(), rtol=1e-4, atol=1e-6):
            return "its call differs from of(left @ right.T)"
        if not all(torch.allclose(*each, rtol=1e-4, atol=1e-6) for each in zip(found, wanted, strict=True)):
            return "its gradients are not those of its values"
        return None

    return part(
        "distance", distance, Distance, "an object with the methods of losses.distances.Distance", tried
    )


def full_precision(*parts: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one type, their widest, and float32 at least."""
    dtype = torch.float32
    for x in parts:
        dtype = torch.promote_types(dtype, x.dtype)
    return tuple(x.to(dtype) for x in parts)
