"""A loss in a data parallel loop of one's own has the value and the gradient of one process, with ragged shares too."""

from __future__ import annotations

import pytest
import torch
from support.gloo_pool import GlooPool
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dmlstudy import distributed, losses
from dmlstudy.losses import catalogue
from dmlstudy.records import Scalar

NUM_ROWS, DIM, NUM_CLASSES = 12, 5, 4
SAMPLED: dict[str, dict[str, Scalar]] = {"arcface": {"sample": 0.5}}
Outcome = tuple[float, dict[str, list[float]]]


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, DIM).double()


def batch(rows: slice) -> tuple[Tensor, Tensor]:
    x = torch.randn(NUM_ROWS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x[rows], (torch.arange(NUM_ROWS) % NUM_CLASSES)[rows]


def loss_of(name: str) -> losses.batch_loss.BatchLoss:
    """Some have more classes than the batch, of which they take a sample."""
    params = SAMPLED.get(name, {})
    return losses.build(name, num_classes=NUM_CLASSES + 9 * len(params), dim=DIM, **params).double()


def embedded(name: str, model: nn.Module, x: Tensor) -> Tensor:
    """Unit vectors, or embeddings with their norms for losses that look at them."""
    h: Tensor = model(x)
    return h if catalogue.kind_of(name).uses_norms else functional.normalize(h)


def gradients(*modules: nn.Module) -> dict[str, list[float]]:
    named = [each for module in modules for each in module.named_parameters()]
    return {
        name.removeprefix("module."): p.grad.to_dense().flatten().tolist()
        for name, p in named
        if p.grad is not None
    }


def on_a_rank(name: str, split: tuple[int, ...]) -> Outcome:
    start = sum(split[: distributed.rank()])
    x, labels = batch(slice(start, start + split[distributed.rank()]))
    model = DistributedDataParallel(encoder())
    loss = distributed.across_ranks(loss_of(name))
    value = loss(embedded(name, model, x), labels)
    value.backward()
    return value.item(), gradients(model, loss)


@pytest.mark.parametrize("split", [(6, 6), (7, 4, 1), (8, 4, 0)], ids=lambda split: "-".join(map(str, split)))
@pytest.mark.parametrize(
    "name",
    [
        "multi_similarity",
        "triplet",
        "proxy_anchor",
        "margin",
        "curricularface",
        "adaface",
        "magface",
        "arcface",
    ],
)
def test_value_and_gradient_equal_one_process(pool: GlooPool, name: str, split: tuple[int, ...]) -> None:
    model, loss = encoder(), loss_of(name)
    x, labels = batch(slice(None))
    value = loss(embedded(name, model, x), labels)
    value.backward()
    truth = gradients(model, loss)
    for rank_value, found in pool.run(len(split), on_a_rank, name, split):
        assert rank_value == pytest.approx(value.item(), rel=1e-12)
        assert found.keys() == truth.keys()
        for parameter, gradient in truth.items():
            assert max(map(abs, gradient)) > 1e-6
            assert found[parameter] == pytest.approx(gradient, rel=1e-9, abs=1e-12)


def test_one_process_needs_no_group() -> None:
    model, loss = encoder(), loss_of("triplet")
    x, labels = batch(slice(None))
    z_ND = functional.normalize(model(x))
    assert distributed.across_ranks(loss)(z_ND, labels).item() == pytest.approx(loss(z_ND, labels).item())
