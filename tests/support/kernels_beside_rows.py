"""Kernels in Triton's interpreter beside ``rows`` in float64: the largest errors of each loss, as JSON.

A program of its own, because the interpreter is chosen when Triton is imported: TRITON_INTERPRET=1 python FILE.
"""

from __future__ import annotations

import json
import math
import sys

import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings
from dmlstudy.losses.tiles import RowLoss
from dmlstudy.records import Scalar

DIM, NUM_ANCHORS, NUM_LIVE, NUM_ROWS = 11, 37, 45, 61

SETTINGS: dict[str, tuple[str, dict[str, Scalar]]] = {
    "contrastive": ("contrastive", {"negative_margin": 1.5}),
    "binomial_deviance": ("binomial_deviance", {"beta": 0.3}),
    "multi_similarity": ("multi_similarity", {}),
    "multi_similarity, all pairs": ("multi_similarity", {"epsilon": 9.0}),
    "circle": ("circle", {"gamma": 16.0}),
    "supcon": ("supcon", {}),
    "supcon, with_positive": ("supcon", {"average": "with_positive", "temperature": 0.05}),
    "multi_similarity, bf16x3": ("multi_similarity", {"precision": "bf16x3"}),
    "circle, bf16": ("circle", {"gamma": 4.0, "precision": "bf16"}),
    "contrastive, tf32": ("contrastive", {"negative_margin": 1.5, "precision": "tf32"}),
}


def batch(dtype: torch.dtype) -> tuple[Embeddings, Embeddings]:
    """Some of the references as anchors, an image in several of them, a class of one image, and rows not live."""
    generator = torch.Generator().manual_seed(0)
    y_M = torch.randint(0, 7, (NUM_ROWS,), generator=generator)
    id_M = torch.arange(NUM_ROWS)
    y_M[5], y_M[20], id_M[20], id_M[50], y_M[50] = 9, y_M[3], id_M[3], id_M[3], y_M[3]
    z_MD = torch.randn(NUM_ROWS, DIM, generator=generator, dtype=torch.float64)
    z_MD = functional.normalize(z_MD + 1.5 * functional.one_hot(y_M, DIM)).to(dtype)
    live_LD = z_MD[:NUM_LIVE].clone().requires_grad_()
    references = Embeddings(torch.cat([live_LD, z_MD[NUM_LIVE:]]), y_M, id_M, live_LD=live_LD)
    anchors = Embeddings(z_MD[:NUM_ANCHORS].clone().requires_grad_(), y_M[:NUM_ANCHORS], id_M[:NUM_ANCHORS])
    return anchors, references


def outcome(name: str, params: dict[str, Scalar], dtype: torch.dtype, *, by_kernels: bool) -> list[Tensor]:
    """Total, count and the two gradients."""
    anchors, references = batch(dtype)
    loss = catalogue.build(name, params, num_classes=10, dim=DIM)
    assert isinstance(loss, RowLoss)
    loss.kernel_devices = ("cpu",) if by_kernels else ()
    total, count = loss(anchors, references)
    assert references.live_LD is not None
    return [total.detach(), count, *torch.autograd.grad(total, [anchors.z_ND, references.live_LD])]


def error(got: Tensor, wanted: Tensor) -> float:
    """The relative error as a whole, infinite for what is not finite."""
    found = float((got.double() - wanted.double()).norm() / wanted.double().norm())
    return found if math.isfinite(found) else math.inf


def errors(name: str, params: dict[str, Scalar]) -> list[float]:
    """Of total, count and gradients; of a coarser precision beside its own rows."""
    found = outcome(name, params, torch.float32, by_kernels=True)
    wanted = outcome(
        name, params, torch.float32 if "precision" in params else torch.float64, by_kernels=False
    )
    return [error(*each) for each in zip(found, wanted, strict=True)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({label: errors(*setting) for label, setting in SETTINGS.items()}))
