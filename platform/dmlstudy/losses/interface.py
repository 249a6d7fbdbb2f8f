"""What every loss takes and gives: embeddings in, a sum over local anchors and its count out.

Shapes: N rows (B anchors on this rank, or M references), D embedding size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn


class Embeddings(NamedTuple):
    """Embedded samples: the own batch, the gathered batch or a memory queue, one type for all.

    ``id_N`` names the image: two rows with an equal id are one image (the row itself, or a duplicate
    drawn with replacement) and are neither a positive nor a negative pair (METHODS 2.4).
    """

    z_ND: Tensor
    y_N: Tensor
    id_N: Tensor


class LossSum(NamedTuple):
    """Sum over the local terms, on the graph, and their number; the step divides by the global count."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which no one asks of a loss


class Loss(nn.Module, ABC):
    """A loss that is a sum over anchors: L = (1/Z) sum_a L_a(references), Z the global count.

    Anchors z_BD and references z_MD give a LossSum of two scalars. An empty selection gives a zero that
    is still attached to the graph, with zero gradients. A subclass says only what ``terms`` are.
    """

    def forward(self, anchors: Embeddings, references: Embeddings | None = None) -> LossSum:
        """Terms of the anchors against the references (default: the anchors themselves).

        Raises ValueError for wrong shapes, for labels or ids that are not int64, for unequal D.
        """
        _check("anchors", anchors)
        if references is None:
            references = anchors
        else:
            _check("references", references)
            if references.z_ND.shape[1] != anchors.z_ND.shape[1]:
                raise ValueError(
                    f"anchors have embedding size {anchors.z_ND.shape[1]}, references "
                    f"{references.z_ND.shape[1]}; embed both with the same embedder"
                )
        total, count = self.terms(anchors, references)
        return LossSum(total, count.detach())

    @abstractmethod
    def terms(self, anchors: Embeddings, references: Embeddings) -> LossSum:
        """Sum of the anchors' terms and their number, for inputs that have been checked."""

    if TYPE_CHECKING:

        def __call__(self, anchors: Embeddings, references: Embeddings | None = None) -> LossSum: ...


def per_anchor(total: Tensor, anchors: Embeddings) -> LossSum:
    """The sum with the number of all local anchors as its count, also those with an empty selection."""
    return LossSum(total, total.new_tensor(float(anchors.z_ND.shape[0])))


def check_classes(y_B: Tensor, num_classes: int) -> None:
    """Raises ValueError unless every label lies in 0..num_classes-1."""
    if y_B.numel() and not 0 <= int(y_B.min()) <= int(y_B.max()) < num_classes:
        raise ValueError(
            f"labels run from {int(y_B.min())} to {int(y_B.max())}, but the loss was built for "
            f"num_classes={num_classes}; number the training classes 0..{num_classes - 1}"
        )


def _check(role: str, embeddings: Embeddings) -> None:
    z_ND, y_N, id_N = embeddings
    if z_ND.ndim != 2 or not z_ND.is_floating_point():
        raise ValueError(
            f"{role}: embeddings must be a floating (N, D) tensor, not {z_ND.dtype} {tuple(z_ND.shape)}"
        )
    for name, x_N in (("labels", y_N), ("sample ids", id_N)):
        if x_N.dtype != torch.int64:
            raise ValueError(f"{role}: {name} must be int64, not {x_N.dtype}; convert them with .long()")
        if x_N.shape != z_ND.shape[:1]:
            raise ValueError(
                f"{role}: {name} must have one entry per embedding: "
                f"shape ({z_ND.shape[0]},), not {tuple(x_N.shape)}"
            )
