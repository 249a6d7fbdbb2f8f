"""Matrix products of losses in several precisions, of which a GPU's tensor cores make the coarser ones faster.

| name | factors | relative error of a factor |
|---|---|---|
| ``float32`` | as they are; of float64 in float64 | 2^-24 |
| ``bf16x3`` | each as the sum of two bfloat16 numbers, three products | 2^-16 |
| ``tf32`` | rounded to 10 bits of mantissa | 2^-11 |
| ``bf16`` | rounded to bfloat16, 7 bits of mantissa | 2^-8 |

Sums are in float32 at least. On a CPU the factors are rounded in the same way, so that results are a GPU's up to the
order of its sums, and nothing is faster.

Shapes: N and M rows, F features, T rows of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Product = Callable[[Tensor, Tensor], Tensor]
"""(N, K) and (K, M) -> (N, M), in the factors' dtype."""

Parts: TypeAlias = tuple[Tensor, ...]
"""A matrix as a precision multiplies it: tensors of its shape, whose sum it is up to rounding."""


def exact(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """a b in the factors' own precision."""
    return a_NK @ b_KM


def in_tf32(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """a b of factors with 10 bits of mantissa."""
    if a_NK.device.type == "cuda" and a_NK.dtype == torch.float32:
        settings = torch.backends.cuda.matmul
        before = settings.fp32_precision
        settings.fp32_precision = "tf32"
        try:
            return a_NK @ b_KM
        finally:
            settings.fp32_precision = before
    return _rounded_to_tf32(a_NK) @ _rounded_to_tf32(b_KM)


def in_bf16(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """a b of bfloat16 factors."""
    return _of_bf16(a_NK.bfloat16(), b_KM.bfloat16(), a_NK.dtype)


def in_bf16x3(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """a b of factors that are sums of two bfloat16 numbers each, without the product of the two smaller ones."""
    (a_high, a_low), (b_high, b_low) = _split(a_NK), _split(b_KM)
    small = _of_bf16(a_high, b_low, a_NK.dtype) + _of_bf16(a_low, b_high, a_NK.dtype)
    return small.add_(_of_bf16(a_high, b_high, a_NK.dtype))


def differentiable(product: Product) -> Product:
    """The product for a graph of autograd: its gradients are products of the same kind. An exact one is its own."""
    if product is exact:
        return exact
    return lambda a_NK, b_KM: _OnGraph.apply(product, a_NK, b_KM)


def factor_last(total_of: Callable[..., Tensor], product: Product, *leaves: Tensor) -> Tensor:
    """total_of(*leaves), a number on a graph of such products, whose gradient ignores its factor until the leaves.

    A rounded slope of 3 L is not three times that of L, and the factor depends on the number of ranks. Exact products
    need no such care.
    """
    if product is exact:
        return total_of(*leaves)
    factor: list[Tensor] = []
    total: Tensor = _Hold.apply(factor, total_of(*(_Release.apply(factor, leaf) for leaf in leaves)))
    return total


def add_product(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor, product: Product, scale: float = 1.0) -> None:
    """Add scale a b to ``out``; of exact factors in one step, without memory of its own."""
    if product is exact:
        out_NM.addmm_(a_NK, b_KM, alpha=scale)
    else:
        out_NM.add_(product(a_NK, b_KM), alpha=scale)


def scaled_sum(c_NM: Tensor, a_NK: Tensor, b_KM: Tensor, product: Product, scale: float) -> Tensor:
    """scale (c + a b); of exact factors in one step."""
    if product is exact:
        return torch.addmm(c_NM, a_NK, b_KM, beta=scale, alpha=scale)
    return product(a_NK, b_KM).add_(c_NM).mul_(scale)


def write_product(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor, product: Product) -> None:
    """Write a b into ``out``; of exact factors without memory of its own."""
    if product is exact:
        torch.mm(a_NK, b_KM, out=out_NM)
    else:
        out_NM.copy_(product(a_NK, b_KM))


class Factor:
    """Rows that many products share (N, F), as they are.

    A slope by a product of such rows is given by its parts: the precision's roundings of it, (T, M) each.
    """

    def __init__(self, x_NF: Tensor, product: Product) -> None:
        self.x_NF, self.product = x_NF, product

    def rows(self, which: slice) -> Factor:
        """Some of the rows."""
        own = copy(self)
        own.x_NF = self.x_NF[which]
        return own

    def times(self, other: Factor) -> Tensor:
        """x y^T (N, M)."""
        return self.product(self.x_NF, other.x_NF.T)

    def parts(self, slope_TM: Tensor) -> Parts:
        """A slope's parts; one of them may be the slope itself."""
        return (slope_TM,)

    def room(self, slope_TM: Tensor) -> Parts:
        """Memory for the parts, which may be the slope's own."""
        return (slope_TM,)

    def weighted(self, parts: Parts) -> Tensor:
        """s x (T, F), of M = N rows."""
        return self.product(parts[0], self.x_NF)

    def add_weighted(self, out_MF: Tensor, parts: Parts) -> None:
        """Add s^T x to ``out``, of T = N rows."""
        add_product(out_MF, parts[0].T, self.x_NF, self.product)


class _Bfloat16(Factor):
    """The same, of bfloat16 factors."""

    def __init__(self, x_NF: Tensor, product: Product) -> None:
        super().__init__(x_NF.bfloat16(), product)
        self.dtype = x_NF.dtype

    def times(self, other: Factor) -> Tensor:
        return _of_bf16(self.x_NF, other.x_NF.T, self.dtype)

    def parts(self, slope_TM: Tensor) -> Parts:
        return (slope_TM.bfloat16(),)

    def room(self, slope_TM: Tensor) -> Parts:
        return (torch.empty_like(slope_TM, dtype=torch.bfloat16),)

    def weighted(self, parts: Parts) -> Tensor:
        return _of_bf16(parts[0], self.x_NF, self.dtype)

    def add_weighted(self, out_MF: Tensor, parts: Parts) -> None:
        _add_of_bf16(out_MF, parts[0].T, self.x_NF)


class _TwoBfloat16(Factor):
    """The same, of factors that are sums of two bfloat16 numbers, in ``x_NF`` side by side: high, low and high again.

    Products of parts that have the same sum are one product of longer rows.
    """

    def __init__(self, x_NF: Tensor, product: Product) -> None:
        high_NF, low_NF = _split(x_NF)
        super().__init__(torch.cat([high_NF, low_NF, high_NF], dim=1), product)
        self.dtype, self.size = x_NF.dtype, x_NF.shape[1]

    @property
    def high_NF(self) -> Tensor:
        return self.x_NF[:, : self.size]

    @property
    def low_NF(self) -> Tensor:
        return self.x_NF[:, self.size : 2 * self.size]

    def times(self, other: Factor) -> Tensor:
        turned_NE = torch.cat([self.high_NF, self.high_NF, self.low_NF], dim=1)
        return _of_bf16(turned_NE, other.x_NF.T, self.dtype)

    def parts(self, slope_TM: Tensor) -> Parts:
        return _split(slope_TM)

    def room(self, slope_TM: Tensor) -> Parts:
        return tuple(torch.empty_like(slope_TM, dtype=torch.bfloat16) for _ in range(2))

    def weighted(self, parts: Parts) -> Tensor:
        high_TM, low_TM = parts
        both_TE = _of_bf16(high_TM, self.x_NF[:, : 2 * self.size], self.dtype)
        small_TF = both_TE[:, self.size :] + _of_bf16(low_TM, self.high_NF, self.dtype)
        return small_TF.add_(both_TE[:, : self.size])

    def add_weighted(self, out_MF: Tensor, parts: Parts) -> None:
        high_TM, low_TM = parts
        _add_of_bf16(out_MF, high_TM.T, self.low_NF)
        _add_of_bf16(out_MF, low_TM.T, self.high_NF)
        _add_of_bf16(out_MF, high_TM.T, self.high_NF)


def factor(x_NF: Tensor, product: Product) -> Factor:
    """Rows of a kind of products, prepared once for all of them."""
    kind = _FACTORS.get(product, Factor)
    return kind(x_NF, product)


PRODUCTS: dict[str, Product] = {"float32": exact, "bf16x3": in_bf16x3, "tf32": in_tf32, "bf16": in_bf16}
"""Precisions by name, from fine to coarse."""


_FACTORS: dict[Product, type[Factor]] = {in_bf16: _Bfloat16, in_bf16x3: _TwoBfloat16}


class _OnGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Product, a_NK: Tensor, b_KM: Tensor) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(a_NK, b_KM)
        return product(a_NK, b_KM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_NM: Tensor) -> tuple[Tensor | None, ...]:
        a_NK, b_KM = ctx.saved_tensors
        _, by_a, by_b = ctx.needs_input_grad
        return (
            None,
            ctx.product(slope_NM, b_KM.T) if by_a else None,
            ctx.product(a_NK.T, slope_NM) if by_b else None,
        )


class _Unchanged(torch.autograd.Function):
    """x, with a place for a factor of its slope."""

    @staticmethod
    def forward(ctx: Any, factor: list[Tensor], x: Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)


class _Hold(_Unchanged):
    """x; backward keeps the slope and goes on with ones."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[None, Tensor]:
        ctx.factor[:] = [slope]
        return None, torch.ones_like(slope)


class _Release(_Unchanged):
    """x; backward multiplies by the slope that was kept."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[None, Tensor]:
        (factor,) = ctx.factor
        return None, slope * factor.to(slope.dtype)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    high = x.bfloat16()
    return high, (x - high.to(x.dtype)).bfloat16()


def _of_bf16(a_NK: Tensor, b_KM: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of bfloat16 factors with sums in float32 at least."""
    if a_NK.device.type == "cuda" and dtype == torch.float32:
        return torch.mm(a_NK, b_KM, out_dtype=torch.float32)
    return a_NK.to(dtype) @ b_KM.to(dtype)


def _add_of_bf16(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor) -> None:
    """Add a product of bfloat16 factors to ``out``."""
    if out_NM.device.type == "cuda" and out_NM.dtype == torch.float32:
        torch.addmm(out_NM, a_NK, b_KM, out_dtype=torch.float32, out=out_NM)
    else:
        out_NM.addmm_(a_NK.to(out_NM.dtype), b_KM.to(out_NM.dtype))


def _rounded_to_tf32(x: Tensor) -> Tensor:
    """x to the nearest number of 10 bits of mantissa, of two equally near ones the even one."""
    bits = x.float().view(torch.int32)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return bits.view(torch.float32).to(x.dtype)
