"""Triton kernels of a tile of a loss that has a form: two passes over its products, which become slopes in place.

The first pass finds each anchor's sums, one anchor a program. The second one writes slopes by products, in the parts
that the precision multiplies. Sums have one order, so results repeat.

Columns are in the order of (label, id): those of an anchor's class are adjacent, and all others are its negatives.
So no label is read, and ids are read in its class alone.

This module needs Triton, which PyTorch brings for CUDA; ``tiles`` imports it where a loss asks for it. Under Triton's
interpreter (``TRITON_INTERPRET=1``) it runs on a CPU.

Shapes: T anchors of a tile, M references.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmlstudy.losses.distances import Cosine, Distance, Euclidean, SquaredEuclidean
from dmlstudy.losses.forms import Bands, Form, Sums
from dmlstudy.losses.products import Parts

BLOCK, BAND_BLOCK = 2048, 128
"""Columns that a program reads at once: of all references, and of an anchor's class."""

WARPS = 8

CURVES = {"exponential": 0, "softplus": 1, "hinge": 2}
DISTANCES: dict[type[Distance], int] = {Cosine: 0, Euclidean: 1, SquaredEuclidean: 2}


def sweep(
    form: Form, distance: Distance, product_TM: Tensor, bands: Bands, parts: Parts
) -> tuple[Tensor, Tensor | int]:
    """The sum of a tile's terms and their number; slopes by the products are written into ``parts``, if any.

    One part takes slopes as they are, or rounded to bfloat16, and two take them as sums of two bfloat16 numbers. A part
    may be the products' own memory. All is float32.
    """
    num_anchors, num_columns = product_TM.shape
    found = [product_TM.new_zeros(num_anchors) for _ in Sums._fields]
    least_T, most_T = (product_TM.new_full((num_anchors,), bound) for bound in (-torch.inf, torch.inf))
    numbers = (*form.pull, *form.push)
    how: dict[str, Any] = {
        "DISTANCE": DISTANCES[type(distance)],
        "CURVE": CURVES[form.curve],
        "PACED": form.is_paced,
        "BLOCK": BLOCK,
        "num_warps": WARPS,
    }
    if num_anchors:
        epsilon = 0.0 if form.epsilon is None else form.epsilon
        _sums[(num_anchors,)](
            product_TM, *bands, least_T, most_T, *found, num_columns, epsilon, *numbers,
            RULE=form.epsilon is not None, BAND_BLOCK=BAND_BLOCK, **how,
        )  # fmt: skip
    sums = Sums(*found)
    factors = form.factors(sums)
    if parts and num_anchors and num_columns:
        by_line_T = torch.zeros_like(least_T) if factors.by_line_T is None else factors.by_line_T
        by_row = (factors.by_pull_T, factors.by_push_T, by_line_T)
        num_blocks = triton.cdiv(num_columns, BLOCK)
        _slopes[(num_anchors * num_blocks,)](
            product_TM, *bands, least_T, most_T, sums.pull_T, sums.push_T, *(x.contiguous() for x in by_row),
            parts[0], parts[-1], num_columns, num_blocks, *numbers,
            IN_TWO=len(parts) == 2, **how,
        )  # fmt: skip
    return factors.total, factors.count


@triton.jit
def _distance(product, DISTANCE: tl.constexpr):
    if DISTANCE == 0:
        return 1.0 - product
    if DISTANCE == 1:
        return tl.sqrt(tl.maximum(product, 1e-12))
    return tl.maximum(product, 0.0)


@triton.jit
def _pace(d, rate, shift, rising, PACED: tl.constexpr):
    """The paces of a sign's pairs, ``rising`` +1 of positives and -1 of negatives."""
    if PACED:
        return rate * tl.maximum(shift + rising * d, 0.0)
    return rate + 0.0 * d


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _add(logit, chosen, largest, total, CURVE: tl.constexpr):
    """Running sums of lanes with a block's logits; of exponentials relative to a lane's largest so far."""
    if CURVE == 0:
        logit = tl.where(chosen, logit, float("-inf"))
        higher = tl.maximum(largest, logit)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        return higher, total * tl.exp(largest - base) + tl.exp(logit - base)
    if CURVE == 1:
        return largest, total + tl.where(chosen, _softplus(logit), 0.0)
    return largest, total + tl.where(chosen, tl.maximum(logit, 0.0), 0.0)


@triton.jit
def _sum(largest, total, CURVE: tl.constexpr):
    """The sum of all lanes; of exponentials its logarithm."""
    if CURVE == 0:
        top = tl.max(largest, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        return top + tl.log(tl.sum(total * tl.exp(largest - base), 0))
    return tl.sum(total, 0)


@triton.jit
def _sums(product, first_column, stop_column, id_left, id_right, least, most,
          pull, push, num_pulls, num_pushes, line, num_columns, epsilon,
          pull_rate, pull_center, pull_shift, push_rate, push_center, push_shift,
          RULE: tl.constexpr, DISTANCE: tl.constexpr, CURVE: tl.constexpr, PACED: tl.constexpr,
          BLOCK: tl.constexpr, BAND_BLOCK: tl.constexpr):  # fmt: skip
    """Sums of an anchor's pairs, by sign; with RULE of those that the multi-similarity rule keeps, and its bounds."""
    row = tl.program_id(0).to(tl.int64)
    own = product + row * num_columns
    first, stop = tl.load(first_column + row), tl.load(stop_column + row)
    own_id = tl.load(id_left + row)

    farthest_bound = float("inf")
    if RULE:
        farthest = tl.full((BAND_BLOCK,), float("-inf"), tl.float32)
        for start in range(first, stop, BAND_BLOCK):
            column = start + tl.arange(0, BAND_BLOCK)
            is_column = column < stop
            d = _distance(tl.load(own + column, mask=is_column, other=0.0), DISTANCE)
            positive = is_column & (tl.load(id_right + column, mask=is_column, other=0) != own_id)
            farthest = tl.maximum(farthest, tl.where(positive, d, float("-inf")))
        farthest_bound = tl.max(farthest, 0) + epsilon
        tl.store(most + row, farthest_bound)

    nearest = tl.full((BLOCK,), float("inf"), tl.float32)
    push_top = tl.full((BLOCK,), float("-inf"), tl.float32)
    push_sum, pushes = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < num_columns
        d = _distance(tl.load(own + column, mask=is_column, other=0.0), DISTANCE)
        negative = is_column & ((column < first) | (column >= stop))
        if RULE:
            nearest = tl.minimum(nearest, tl.where(negative, d, float("inf")))
            negative = negative & (d <= farthest_bound)
        logit = (push_center - d) * _pace(d, push_rate, push_shift, -1.0, PACED)
        if CURVE == 2:
            negative = negative & (logit >= 0.0)
        push_top, push_sum = _add(logit, negative, push_top, push_sum, CURVE)
        pushes += negative.to(tl.float32)
    tl.store(push + row, _sum(push_top, push_sum, CURVE))
    tl.store(num_pushes + row, tl.sum(pushes, 0))

    nearest_bound = float("-inf")
    if RULE:
        nearest_bound = tl.min(nearest, 0) - epsilon
        tl.store(least + row, nearest_bound)
    pull_top = tl.full((BAND_BLOCK,), float("-inf"), tl.float32)
    pull_sum, pulls = tl.zeros((BAND_BLOCK,), tl.float32), tl.zeros((BAND_BLOCK,), tl.float32)
    lines = tl.zeros((BAND_BLOCK,), tl.float32)
    for start in range(first, stop, BAND_BLOCK):
        column = start + tl.arange(0, BAND_BLOCK)
        is_column = column < stop
        d = _distance(tl.load(own + column, mask=is_column, other=0.0), DISTANCE)
        positive = is_column & (tl.load(id_right + column, mask=is_column, other=0) != own_id)
        positive = positive & (d >= nearest_bound)
        logit = (d - pull_center) * _pace(d, pull_rate, pull_shift, 1.0, PACED)
        if CURVE == 2:
            positive = positive & (logit >= 0.0)
        pull_top, pull_sum = _add(logit, positive, pull_top, pull_sum, CURVE)
        pulls += positive.to(tl.float32)
        lines += tl.where(positive, d - pull_center, 0.0)
    tl.store(pull + row, _sum(pull_top, pull_sum, CURVE))
    tl.store(num_pulls + row, tl.sum(pulls, 0))
    tl.store(line + row, tl.sum(lines, 0))


@triton.jit
def _weight(logit, total, chosen, CURVE: tl.constexpr):
    """g of a sign's pairs."""
    if CURVE == 0:
        return tl.where(chosen, tl.exp(logit - tl.where(total == float("-inf"), 0.0, total)), 0.0)
    if CURVE == 1:
        return tl.where(chosen, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    return tl.where(chosen & (logit >= 0.0), 1.0, 0.0)


@triton.jit
def _slopes(product, first_column, stop_column, id_left, id_right, least, most, pull, push, by_pull, by_push, by_line,
            high, low, num_columns, num_blocks,
            pull_rate, pull_center, pull_shift, push_rate, push_center, push_shift,
            DISTANCE: tl.constexpr, CURVE: tl.constexpr, PACED: tl.constexpr, IN_TWO: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Slopes of a block of an anchor's products."""
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    start = (program % num_blocks) * BLOCK
    column = start + tl.arange(0, BLOCK)
    is_column = column < num_columns
    place = row * num_columns + column
    d = _distance(tl.load(product + place, mask=is_column, other=0.0), DISTANCE)
    first, stop = tl.load(first_column + row), tl.load(stop_column + row)
    is_own = is_column & (column >= first) & (column < stop)
    negative = is_column & (is_own == 0) & (d <= tl.load(most + row))
    pace = _pace(d, push_rate, push_shift, -1.0, PACED)
    slope = (
        -tl.load(by_push + row)
        * pace
        * _weight((push_center - d) * pace, tl.load(push + row), negative, CURVE)
    )
    if (start < stop) & (start + BLOCK > first):
        other_id = tl.load(id_right + column, mask=is_own, other=0) != tl.load(id_left + row)
        positive = is_own & other_id & (d >= tl.load(least + row))
        pace = _pace(d, pull_rate, pull_shift, 1.0, PACED)
        weight = _weight((d - pull_center) * pace, tl.load(pull + row), positive, CURVE)
        slope += tl.load(by_pull + row) * pace * weight + tl.where(positive, tl.load(by_line + row), 0.0)
    if DISTANCE == 0:
        slope = -slope
    if DISTANCE == 1:
        slope = tl.where(d > 1e-6, 0.5 * slope / d, 0.0)
    rounded = slope.to(high.dtype.element_ty)
    tl.store(high + place, rounded, mask=is_column)
    if IN_TWO:
        tl.store(low + place, (slope - rounded.to(tl.float32)).to(low.dtype.element_ty), mask=is_column)
