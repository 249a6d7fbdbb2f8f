"""The law of the training step: any world size gives the gradient of one process on the global batch.

Every catalogue entry, on 2, 3 and 4 gloo processes, with equal and ragged local batches (also one row,
also none), float64, encoder and loss wrapped together: encoder and loss parameters to 1e-9 relative.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gloo_pool import GlooPool
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy import distributed
from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings, LossSum
from dmlstudy.records import Scalar

NUM_CLASSES, DIM, BATCH = 4, 5, 12
Gather = Callable[[Embeddings], Embeddings]
Result = tuple[float, dict[str, NDArray[np.float64]]]

SETTINGS: dict[str, dict[str, Scalar]] = {
    "pair_weighting": {"negative_margin": 1.5, "mining": "threshold+margin", "alpha": 1.0},
    "triplet_weighting": {"margin": 0.3, "alpha": 10.0},
    "multi_similarity": {},
    "contrastive": {"negative_margin": 1.5},
    "margin": {},
    "proxy_nca": {},
}
SPLITS = [(6, 6), (11, 1), (4, 4, 4), (7, 4, 1), (8, 4, 0), (3, 3, 3, 3), (5, 0, 1, 6)]


class Step(nn.Module):
    """Encoder and loss as one module, as the training step wraps them."""

    def __init__(self, name: str, gather: Gather) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, DIM))
        with torch.no_grad():
            for parameter in self.encoder.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.loss = catalogue.build(name, SETTINGS[name], num_classes=NUM_CLASSES, dim=DIM)
        self.gather = gather

    def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> LossSum:
        anchors = Embeddings(functional.normalize(self.encoder(x)), y, ids)
        return self.loss(anchors, self.gather(anchors))


def global_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Three images per class, one of them drawn twice; classes and duplicates spread over the ranks."""
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, ids = torch.arange(BATCH) % NUM_CLASSES, torch.arange(BATCH) + 2**53
    x[11], ids[11] = x[3], ids[3]
    return x, y, ids


def local_step(name: str, split: tuple[int, ...], gather: Gather) -> Result:
    """What one rank ends up with: the logged mean, and the gradients that data parallel left on it."""
    start = sum(split[: distributed.rank()])
    rows = slice(start, start + split[distributed.rank()])
    step = Step(name, gather).double()
    parallel = distributed.data_parallel(step)
    objective, mean = distributed.scaled_for_mean(parallel(*(part[rows] for part in global_batch())))
    objective.backward()
    gradients = {}
    for parameter_name, parameter in step.named_parameters():
        assert parameter.grad is not None, parameter_name
        gradients[parameter_name] = parameter.grad.numpy()
    return mean, gradients


def exact_step(name: str, split: tuple[int, ...]) -> Result:
    return local_step(name, split, distributed.gather)


def step_without_gradient_through_the_gather(name: str, split: tuple[int, ...]) -> Result:
    """The usual mistake: the other ranks' rows are constants."""

    def detached_gather(local: Embeddings) -> Embeddings:
        z_MD = distributed.gather_rows(local.z_ND)
        start = sum(split[: distributed.rank()])
        live = torch.cat([z_MD[:start], local.z_ND, z_MD[start + len(local.z_ND) :]])
        return Embeddings(live, distributed.gather_rows(local.y_N), distributed.gather_rows(local.id_N))

    return local_step(name, split, detached_gather)


def one_process(name: str) -> Result:
    """The truth, by the loss alone: no process group, no gather, no scaling."""
    step = Step(name, lambda anchors: anchors).double()
    total, count = step(*global_batch())
    assert count > 0
    mean = total / count
    mean.backward()
    return mean.item(), {name: p.grad.numpy() for name, p in step.named_parameters() if p.grad is not None}


def flat(gradients: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([gradients[name].ravel() for name in sorted(gradients)])


def test_every_entry_is_covered() -> None:
    assert SETTINGS.keys() == catalogue.CATALOGUE.keys()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split)))
@pytest.mark.parametrize("name", list(catalogue.CATALOGUE))
def test_gradient_equals_one_process(pool: GlooPool, name: str, split: tuple[int, ...]) -> None:
    assert sum(split) == BATCH
    mean, truth = one_process(name)
    results = pool.run(len(split), exact_step, name, split)
    for rank_mean, gradients in results:
        assert rank_mean == pytest.approx(mean, rel=1e-12)
        assert gradients.keys() == truth.keys()
        for parameter, gradient in gradients.items():
            size = np.linalg.norm(truth[parameter])
            assert size > 1e-3, f"{parameter} has no gradient: the case proves nothing"
            error = np.linalg.norm(gradient - truth[parameter]) / size
            assert error < 1e-9, f"{parameter}: relative error {error:.1e}"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [name for name in catalogue.CATALOGUE if name != "proxy_nca"])
def test_a_gather_without_gradient_is_found_out(pool: GlooPool, name: str) -> None:
    """Guards the test above: the comparison must see the mistake it is there for."""
    truth = flat(one_process(name)[1])
    ((_, wrong), _) = pool.run(2, step_without_gradient_through_the_gather, name, (7, 5))
    error = np.linalg.norm(flat(wrong) - truth) / np.linalg.norm(truth)
    assert error > 1e-3, f"relative error only {error:.1e}"
