"""Small batches for comparisons with plain loops, and how results are compared."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses.interface import Embeddings

DIM = 4
INTERLEAVED = [*range(10)]
BY_CLASS = [0, 2, 5, 9, 1, 6, 3, 8, 7, 4]


def embeddings(order: list[int] = INTERLEAVED, spread: float = 1.0) -> Embeddings:
    """Ten unit vectors of four classes, one class a singleton, and one image drawn twice, not quite alike."""
    generator = torch.Generator().manual_seed(0)
    y_N = torch.tensor([0, 1, 0, 1, 2, 0, 1, 2, 4, 1])
    id_N = torch.tensor([10, 21, 12, 13, 14, 15, 16, 9, 18, 13])
    z_ND = torch.randn(10, DIM, dtype=torch.float64, generator=generator)
    z_ND[9] = z_ND[3] + 0.1 * z_ND[9]
    z_ND = spread * z_ND + 1.2 * functional.one_hot(y_N % DIM, DIM)
    return Embeddings(functional.normalize(z_ND)[order].requires_grad_(), y_N[order], id_N[order])


def balanced(num_classes: int = 3, per_class: int = 3) -> Embeddings:
    """A batch that pytorch-metric-learning sees as we do: no image twice, no singleton."""
    generator = torch.Generator().manual_seed(1)
    y_N = torch.arange(num_classes).repeat(per_class)
    z_ND = torch.randn(len(y_N), DIM, dtype=torch.float64, generator=generator)
    z_ND += functional.one_hot(y_N % DIM, DIM)
    return Embeddings(functional.normalize(z_ND).requires_grad_(), y_N, torch.arange(len(y_N)))


def pair_sets(anchors: Embeddings, references: Embeddings, i: int) -> tuple[list[int], list[int]]:
    """Rows of the references that make positive and negative pairs with anchor i."""
    same = [j for j in range(len(references.y_N)) if references.y_N[j] == anchors.y_N[i]]
    others = [k for k in range(len(references.y_N)) if references.y_N[k] != anchors.y_N[i]]
    return [j for j in same if references.id_N[j] != anchors.id_N[i]], others


def assert_same(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float) -> None:
    """Equal one by one, relatively or absolutely."""
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
