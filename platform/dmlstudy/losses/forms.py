"""Losses of which a pair of GPU kernels computes a tile: sums of rows, and slopes as elementwise functions of them.

``rows`` of a loss stays the definition. A form says the same by numbers, which ``kernels`` reads.

Of a positive pair e = D - center and of a negative one e = center - D. A pair's logit is l = pace e, its pace the rate
or, where ``is_paced``, rate [shift + D]_+ and rate [shift - D]_+, through which no gradient flows.

| curve | sum S of a row and a sign | slope g by e, over the pace |
|---|---|---|
| ``exponential`` | log sum e^l | e^(l - S) |
| ``softplus`` | sum log(1 + e^l) | 1 / (1 + e^-l) |
| ``hinge`` | sum [l]_+ over the n pairs of l >= 0 | 1 where l >= 0 |

Shapes: B anchors, M references, T anchors of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


class Bands(NamedTuple):
    """Places of the class of each of T anchors among M references: its first column, and the one after its last.

    Columns outside are its negatives, those inside with another id its positives.
    """

    low_T: Tensor
    high_T: Tensor
    id_T: Tensor
    id_M: Tensor


class Sums(NamedTuple):
    """S of each anchor's positives and negatives, their numbers, and the sum of e over positives."""

    pull_T: Tensor
    push_T: Tensor
    num_pulls_T: Tensor
    num_pushes_T: Tensor
    line_T: Tensor


class Factors(NamedTuple):
    """The total of all anchors and the number of terms, and what g is multiplied by at an anchor's pairs of each sign.

    ``by_line_T`` is the slope by e of each positive pair beside it.
    """

    total: Tensor
    count: Tensor | int  # type: ignore[assignment]  # hides tuple.count
    by_pull_T: Tensor
    by_push_T: Tensor
    by_line_T: Tensor | None = None


class Logit(NamedTuple):
    """A sign's logit."""

    rate: float
    center: float
    shift: float = 0.0


@dataclass(frozen=True)
class Form:
    """A loss as kernels compute it; with ``epsilon`` of the pairs that the multi-similarity rule keeps."""

    curve: Literal["exponential", "softplus", "hinge"]
    pull: Logit
    push: Logit
    factors: Callable[[Sums], Factors]
    is_paced: bool = False
    epsilon: float | None = None
