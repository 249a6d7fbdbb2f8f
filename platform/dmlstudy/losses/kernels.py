"""Triton kernels of losses that have a form: nothing of the size T x M is in memory (after FlashAttention, Dao 2022).

A first kernel finds each anchor's sums over blocks of references, a second forms each block again, with its slopes, and
multiplies them by features at once, in turn for anchors and for references. So a row of a gradient has one writer, and
sums have one order.

This module needs Triton, which PyTorch brings for CUDA; ``tiles`` imports it where a loss asks for it. No card has
measured it. Under Triton's interpreter (``TRITON_INTERPRET=1``) it runs on a CPU.

Shapes: B anchors, M references, L of them live, F features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from dmlstudy.losses.distances import Cosine, Distance, Euclidean, SquaredEuclidean
from dmlstudy.losses.forms import FeatureRows, Form, KernelResult, Sums

BLOCK_T, BLOCK_M, BLOCK_F = 32, 32, 32

CURVES = {"exponential": 0, "softplus": 1, "hinge": 2}
DISTANCES: dict[type[Distance], int] = {Cosine: 0, Euclidean: 1, SquaredEuclidean: 2}


def sweep(
    form: Form,
    distance: Distance,
    anchors: FeatureRows,
    references: FeatureRows,
    num_live: int,
    *,
    wanted: bool,
) -> KernelResult:
    """A loss's sum, and its gradients where they are ``wanted``; features are float32."""
    left_BF, right_MF = anchors.features_NF.contiguous(), references.features_NF.contiguous()
    num_anchors, num_references = len(left_BF), len(right_MF)
    batch = (left_BF, right_MF, anchors.y_N, anchors.id_N, references.y_N, references.id_N)
    sizes = (num_anchors, num_references, left_BF.shape[1])
    blocks = {"BLOCK_T": BLOCK_T, "BLOCK_M": BLOCK_M, "BLOCK_F": BLOCK_F}
    how: dict[str, Any] = {"DISTANCE": DISTANCES[type(distance)], **blocks}
    by_anchors = (triton.cdiv(num_anchors, BLOCK_T),)

    low_B, high_B = (left_BF.new_full((num_anchors,), bound) for bound in (-math.inf, math.inf))
    if form.epsilon is not None and num_anchors:
        _extremes[by_anchors](*batch, low_B, high_B, *sizes, **how)
        low_B -= form.epsilon
        high_B += form.epsilon

    numbers = (*form.pull, *form.push)
    how |= {"CURVE": CURVES[form.curve], "PACED": form.is_paced}
    found = [left_BF.new_zeros(num_anchors) for _ in Sums._fields]
    if num_anchors:
        _sums[by_anchors](*batch, low_B, high_B, *found, *sizes, *numbers, **how)
    sums = Sums(*found)
    factors = form.factors(sums)
    left_gradient_BF, right_gradient_LF = torch.zeros_like(left_BF), torch.zeros_like(right_MF[:num_live])
    count = factors.total.new_full((), factors.count) if isinstance(factors.count, int) else factors.count
    outcome = KernelResult(factors.total, count, (left_gradient_BF, right_gradient_LF))
    if not wanted:
        return outcome

    by_line_B = torch.zeros_like(low_B) if factors.by_line_B is None else factors.by_line_B
    of_rows = (low_B, high_B, sums.pull_B, sums.push_B, factors.by_pull_B, factors.by_push_B, by_line_B)
    arguments = (*batch, *(x.contiguous() for x in of_rows))
    if num_anchors:
        _gradient[by_anchors](*arguments, left_gradient_BF, *sizes, *numbers, BY_RIGHT=False, **how)
    if num_live:
        by_live = (triton.cdiv(num_live, BLOCK_M),)
        _gradient[by_live](
            *arguments, right_gradient_LF, num_anchors, num_live, sizes[2], *numbers, BY_RIGHT=True, **how
        )
    return outcome


@triton.jit
def _distances(left, right, rows, columns, num_rows, num_columns, num_features, DISTANCE: tl.constexpr,
               BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Distances of a block, in float32."""
    product = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    for start in range(0, num_features, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        is_one = (f < num_features)[None, :]
        a = tl.load(left + rows[:, None] * num_features + f[None, :],
                    mask=(rows < num_rows)[:, None] & is_one, other=0.0)  # fmt: skip
        b = tl.load(right + columns[:, None] * num_features + f[None, :],
                    mask=(columns < num_columns)[:, None] & is_one, other=0.0)  # fmt: skip
        product = tl.dot(a, tl.trans(b), product, input_precision="ieee")
    if DISTANCE == 0:
        return 1.0 - product
    if DISTANCE == 1:
        return tl.sqrt(tl.maximum(product, 1e-12))
    return tl.maximum(product, 0.0)


@triton.jit
def _signs(y_left, id_left, y_right, id_right, rows, columns, num_rows, num_columns):
    """The positive and the negative pairs of a block."""
    is_row, is_column = rows < num_rows, columns < num_columns
    same = (
        tl.load(y_left + rows, mask=is_row, other=0)[:, None]
        == tl.load(y_right + columns, mask=is_column, other=0)[None, :]
    )
    other_image = (
        tl.load(id_left + rows, mask=is_row, other=0)[:, None]
        != tl.load(id_right + columns, mask=is_column, other=0)[None, :]
    )
    is_pair = is_row[:, None] & is_column[None, :]
    return is_pair & same & other_image, is_pair & (same == 0)


@triton.jit
def _paces(d, rate, shift, rising, PACED: tl.constexpr):
    """The paces of a sign's pairs, ``rising`` +1 of positives and -1 of negatives."""
    if PACED:
        return rate * tl.maximum(shift + rising * d, 0.0)
    return rate + 0.0 * d


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _extremes(left, right, y_left, id_left, y_right, id_right, nearest, farthest,
              num_rows, num_columns, num_features,
              DISTANCE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Each anchor's nearest negative and farthest positive distance."""
    rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    low = tl.full((BLOCK_T,), float("inf"), tl.float32)
    high = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    for start in range(0, num_columns, BLOCK_M):
        columns = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        d = _distances(left, right, rows, columns, num_rows, num_columns, num_features,
                       DISTANCE, BLOCK_T, BLOCK_M, BLOCK_F)  # fmt: skip
        positive, negative = _signs(y_left, id_left, y_right, id_right, rows, columns, num_rows, num_columns)
        low = tl.minimum(low, tl.min(tl.where(negative, d, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(positive, d, float("-inf")), 1))
    tl.store(nearest + rows, low, mask=rows < num_rows)
    tl.store(farthest + rows, high, mask=rows < num_rows)


@triton.jit
def _add(logit, chosen, largest, total, CURVE: tl.constexpr):
    """A sign's running sum with a block's logits; of exponentials relative to the largest so far."""
    if CURVE == 0:
        logit = tl.where(chosen, logit, float("-inf"))
        higher = tl.maximum(largest, tl.max(logit, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(logit - base[:, None]), 1)
        return higher, total
    if CURVE == 1:
        return largest, total + tl.sum(tl.where(chosen, _softplus(logit), 0.0), 1)
    return largest, total + tl.sum(tl.where(chosen, tl.maximum(logit, 0.0), 0.0), 1)


@triton.jit
def _sums(left, right, y_left, id_left, y_right, id_right, low, high,
          pull, push, num_pulls, num_pushes, line,
          num_rows, num_columns, num_features,
          pull_rate, pull_center, pull_shift, push_rate, push_center, push_shift,
          DISTANCE: tl.constexpr, CURVE: tl.constexpr, PACED: tl.constexpr,
          BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Sums of each anchor's pairs, by sign."""
    rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    is_row = rows < num_rows
    low_T = tl.load(low + rows, mask=is_row, other=0.0)[:, None]
    high_T = tl.load(high + rows, mask=is_row, other=0.0)[:, None]
    pull_top = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    push_top = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    pull_T, push_T = tl.zeros((BLOCK_T,), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    pulls_T, pushes_T = tl.zeros((BLOCK_T,), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    line_T = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, num_columns, BLOCK_M):
        columns = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        d = _distances(left, right, rows, columns, num_rows, num_columns, num_features,
                       DISTANCE, BLOCK_T, BLOCK_M, BLOCK_F)  # fmt: skip
        positive, negative = _signs(y_left, id_left, y_right, id_right, rows, columns, num_rows, num_columns)
        positive, negative = positive & (d >= low_T), negative & (d <= high_T)
        pull_logit = (d - pull_center) * _paces(d, pull_rate, pull_shift, 1.0, PACED)
        push_logit = (push_center - d) * _paces(d, push_rate, push_shift, -1.0, PACED)
        if CURVE == 2:
            positive, negative = positive & (pull_logit >= 0.0), negative & (push_logit >= 0.0)
        pull_top, pull_T = _add(pull_logit, positive, pull_top, pull_T, CURVE)
        push_top, push_T = _add(push_logit, negative, push_top, push_T, CURVE)
        pulls_T += tl.sum(positive.to(tl.float32), 1)
        pushes_T += tl.sum(negative.to(tl.float32), 1)
        line_T += tl.sum(tl.where(positive, d - pull_center, 0.0), 1)
    if CURVE == 0:
        pull_T, push_T = pull_top + tl.log(pull_T), push_top + tl.log(push_T)
    tl.store(pull + rows, pull_T, mask=is_row)
    tl.store(push + rows, push_T, mask=is_row)
    tl.store(num_pulls + rows, pulls_T, mask=is_row)
    tl.store(num_pushes + rows, pushes_T, mask=is_row)
    tl.store(line + rows, line_T, mask=is_row)


@triton.jit
def _weights(logit, sum_T, chosen, CURVE: tl.constexpr):
    """g of a sign's pairs."""
    if CURVE == 0:
        return tl.where(chosen, tl.exp(logit - tl.where(sum_T == float("-inf"), 0.0, sum_T)), 0.0)
    if CURVE == 1:
        return tl.where(chosen, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    return tl.where(chosen & (logit >= 0.0), 1.0, 0.0)


@triton.jit
def _slopes(left, right, y_left, id_left, y_right, id_right, low, high, pull, push, by_pull, by_push, by_line,
            rows, columns, num_rows, num_columns, num_features,
            pull_rate, pull_center, pull_shift, push_rate, push_center, push_shift,
            DISTANCE: tl.constexpr, CURVE: tl.constexpr, PACED: tl.constexpr,
            BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Slopes of a block by its products."""
    is_row = rows < num_rows
    d = _distances(left, right, rows, columns, num_rows, num_columns, num_features,
                   DISTANCE, BLOCK_T, BLOCK_M, BLOCK_F)  # fmt: skip
    positive, negative = _signs(y_left, id_left, y_right, id_right, rows, columns, num_rows, num_columns)
    positive = positive & (d >= tl.load(low + rows, mask=is_row, other=0.0)[:, None])
    negative = negative & (d <= tl.load(high + rows, mask=is_row, other=0.0)[:, None])
    pull_pace = _paces(d, pull_rate, pull_shift, 1.0, PACED)
    push_pace = _paces(d, push_rate, push_shift, -1.0, PACED)
    pull_T = tl.load(pull + rows, mask=is_row, other=0.0)[:, None]
    push_T = tl.load(push + rows, mask=is_row, other=0.0)[:, None]
    pulls = _weights((d - pull_center) * pull_pace, pull_T, positive, CURVE) * pull_pace
    pushes = _weights((push_center - d) * push_pace, push_T, negative, CURVE) * push_pace
    slope = pulls * tl.load(by_pull + rows, mask=is_row, other=0.0)[:, None]
    slope -= pushes * tl.load(by_push + rows, mask=is_row, other=0.0)[:, None]
    slope += tl.where(positive, tl.load(by_line + rows, mask=is_row, other=0.0)[:, None], 0.0)
    if DISTANCE == 0:
        return -slope
    if DISTANCE == 1:
        return tl.where(d > 1e-6, 0.5 * slope / d, 0.0)
    return slope


@triton.jit
def _gradient(left, right, y_left, id_left, y_right, id_right, low, high, pull, push, by_pull, by_push, by_line,
              gradient, num_rows, num_columns, num_features,
              pull_rate, pull_center, pull_shift, push_rate, push_center, push_shift,
              BY_RIGHT: tl.constexpr, DISTANCE: tl.constexpr, CURVE: tl.constexpr, PACED: tl.constexpr,
              BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """The gradient by some anchors' features or, ``BY_RIGHT``, by some references'."""
    OWN: tl.constexpr = BLOCK_M if BY_RIGHT else BLOCK_T
    OTHER: tl.constexpr = BLOCK_T if BY_RIGHT else BLOCK_M
    own = (tl.program_id(0) * OWN + tl.arange(0, OWN)).to(tl.int64)
    num_own = num_columns if BY_RIGHT else num_rows
    num_others = num_rows if BY_RIGHT else num_columns
    for start in range(0, num_others, OTHER):
        other = (start + tl.arange(0, OTHER)).to(tl.int64)
        rows = other if BY_RIGHT else own
        columns = own if BY_RIGHT else other
        slope = _slopes(left, right, y_left, id_left, y_right, id_right, low, high, pull, push,
                        by_pull, by_push, by_line, rows, columns, num_rows, num_columns, num_features,
                        pull_rate, pull_center, pull_shift, push_rate, push_center, push_shift,
                        DISTANCE, CURVE, PACED, BLOCK_T, BLOCK_M, BLOCK_F)  # fmt: skip
        if BY_RIGHT:
            slope = tl.trans(slope)
        for begin in range(0, num_features, BLOCK_F):
            f = begin + tl.arange(0, BLOCK_F)
            is_one = (f < num_features)[None, :]
            features = left if BY_RIGHT else right
            x = tl.load(features + other[:, None] * num_features + f[None, :],
                        mask=(other < num_others)[:, None] & is_one, other=0.0)  # fmt: skip
            place = gradient + own[:, None] * num_features + f[None, :]
            is_own = (own < num_own)[:, None] & is_one
            tl.store(place, tl.load(place, mask=is_own, other=0.0) + tl.dot(slope, x, input_precision="ieee"),
                     mask=is_own)  # fmt: skip
        tl.debug_barrier()
