"""Embeddings off the sphere reach the loss over the mean distance of the global batch, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.gloo_pool import GlooPool
from torch import Tensor

from dmlstudy import distributed
from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings
from dmlstudy.training import exactness
from dmlstudy.training.gradients import gradients_of
from dmlstudy.training.step import Step

BATCH = 12
SPLITS = [(12,), (6, 6), (11, 1), (8, 4, 0), (5, 0, 7)]
Result = tuple[float, dict[str, NDArray[np.float64]]]


class Raw(exactness.SmallEncoder):
    """The check's encoder without its unit norm."""

    def __init__(self) -> None:
        super().__init__(has_structure=True)

    def embed_features(self, features_NF: Tensor, *, is_unit: bool = True) -> tuple[Tensor, Tensor | None]:
        _, omega_ND = super().embed_features(features_NF)
        return 7 * self.head(features_NF), omega_ND


def batch() -> tuple[Tensor, Tensor, Tensor]:
    x_N6 = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x_N6, torch.arange(BATCH) % exactness.NUM_CLASSES, torch.arange(BATCH)


def made_step() -> Step:
    loss = catalogue.build("triplet", {}, regularizer=("structure", {"weight": 2.0}), num_classes=4, dim=5)
    return Step(Raw().double(), loss.double(), None, is_rescaled=True).train()


def step_on_rank(split: tuple[int, ...], chunk: int | None) -> Result:
    start = sum(split[: distributed.rank()])
    rows = slice(start, start + split[distributed.rank()])
    step = made_step()
    x, y, ids = (part[rows] for part in batch())
    mean = gradients_of(step, chunk)(x, distributed.asked(y, ids)).read()
    return mean, {name: p.grad.numpy().copy() for name, p in step.named_parameters() if p.grad is not None}


def by_definition() -> Result:
    """z over the mean of all distances of two different rows, then the loss; by autograd alone."""
    step = made_step()
    x_N6, y_N, id_N = batch()
    z_ND, omega_ND = step.embedder.embed_with_structure(x_N6)
    i, j = torch.triu_indices(BATCH, BATCH, offset=1)
    scale = (z_ND[i] - z_ND[j]).norm(dim=1).mean()
    total, count = step.loss(Embeddings(z_ND / scale, y_N, id_N, omega_ND))
    (total / count).backward()
    found = {name: p.grad.numpy() for name, p in step.named_parameters() if p.grad is not None}
    return (total / count).item(), found


@pytest.mark.parametrize("chunk", [None, 5], ids=["at once", "in chunks"])
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split)))
def test_a_step_is_that_of_the_definition(pool: GlooPool, split: tuple[int, ...], chunk: int | None) -> None:
    mean, truth = by_definition()
    for found, gradients in pool.run(len(split), step_on_rank, split, chunk):
        assert found == pytest.approx(mean, rel=1e-12)
        assert gradients.keys() == truth.keys()
        largest = max(np.linalg.norm(gradient) for gradient in truth.values())
        for name, gradient in gradients.items():  # that of the head's bias is 0, for distances do not see it
            error = np.linalg.norm(gradient - truth[name]) / largest
            assert error < 1e-9, f"{name}: relative error {error:.1e}"


def test_the_loss_does_not_see_the_scale() -> None:
    losses = []
    for factor in (1.0, 100.0):
        step = made_step()
        with torch.no_grad():
            step.embedder.get_submodule("head").weight.mul_(factor)
            step.embedder.get_submodule("head").bias.mul_(factor)
        x, y, ids = batch()
        total, count, _ = step(x, distributed.asked(y, ids))
        losses.append((total / count).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] > 0
