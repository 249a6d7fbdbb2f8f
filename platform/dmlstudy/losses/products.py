"""Matrix products of losses in several precisions, of which a GPU's tensor cores make the coarser ones faster.

| name | factors | relative error of a factor |
|---|---|---|
| ``float32`` | as they are; of float64 in float64 | 2^-24 |
| ``bf16x3`` | each as the sum of two bfloat16 numbers, three products | 2^-16 |
| ``tf32`` | rounded to 10 bits of mantissa | 2^-11 |
| ``bf16`` | rounded to bfloat16, 7 bits of mantissa | 2^-8 |

Sums are in float32 at least. On a CPU the factors are rounded in the same way, so that results are a GPU's up to the
order of its sums, and nothing is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Product = Callable[[Tensor, Tensor], Tensor]
"""(N, K) and (K, M) -> (N, M), in the factors' dtype."""


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


PRODUCTS: dict[str, Product] = {"float32": exact, "bf16x3": in_bf16x3, "tf32": in_tf32, "bf16": in_bf16}
"""Precisions by name, from fine to coarse."""


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


def _rounded_to_tf32(x: Tensor) -> Tensor:
    """x to the nearest number of 10 bits of mantissa, of two equally near ones the even one."""
    bits = x.float().view(torch.int32)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return bits.view(torch.float32).to(x.dtype)
