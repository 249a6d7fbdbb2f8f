"""Running statistics of a structure head are the global batch's: on any number of ranks, at once or in chunks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.gloo_pool import GlooPool
from torch import Tensor
from torch.nn.functional import normalize

from dmlstudy import distributed
from dmlstudy.embedders.structure import MOMENTUM, StructureHead
from dmlstudy.losses import catalogue
from dmlstudy.training import exactness
from dmlstudy.training.gradients import gradients_of
from dmlstudy.training.step import Step

BATCH, NUM_STEPS = 12, 3
SPLITS = [(12,), (6, 6), (11, 1), (12, 0), (4, 4, 4), (8, 4, 0), (5, 0, 7)]
INPUTS = ["center", "standardize"]


class Structured(exactness.SmallEncoder):
    """The check's encoder with a real structure head, whose features have a large mean in common."""

    def __init__(self, input: str) -> None:
        super().__init__(has_structure=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.structure = StructureHead(8, exactness.DIM, "official", input)

    def embed_features(self, features_NF: Tensor, *, is_unit: bool = True) -> tuple[Tensor, Tensor | None]:
        assert self.structure is not None
        return normalize(self.head(features_NF)), self.structure(features_NF + 5)


class Trained(NamedTuple):
    """What a rank has after each step, and its statistics at the end."""

    losses: list[float]
    gradients: list[dict[str, NDArray[np.float64]]]
    buffers: dict[str, NDArray[np.float64]]


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x_N6 = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return x_N6, torch.arange(BATCH) % exactness.NUM_CLASSES, torch.arange(BATCH) + 100 * number


def made_step(input: str) -> Step:
    loss = catalogue.build(
        "contrastive", {}, regularizer=("structure", {"weight": 2.0}), num_classes=4, dim=exactness.DIM
    )
    return Step(Structured(input).double(), loss.double(), None).train()


def trained(split: tuple[int, ...], chunk: int | None, input: str) -> Trained:
    """Some steps of gradient descent on this rank's share."""
    start = sum(split[: distributed.rank()])
    rows = slice(start, start + split[distributed.rank()])
    step = made_step(input)
    gradients = gradients_of(step, chunk)
    losses: list[float] = []
    found: list[dict[str, NDArray[np.float64]]] = []
    for number in range(NUM_STEPS):
        step.zero_grad(set_to_none=True)
        x, y, ids = (part[rows] for part in batch(number))
        losses.append(gradients(x, distributed.asked(y, ids)).read())
        found.append(
            {name: p.grad.numpy().copy() for name, p in step.named_parameters() if p.grad is not None}
        )
        with torch.no_grad():
            for parameter in step.parameters():
                parameter -= 0.1 * parameter.grad
    return Trained(losses, found, {name: value.numpy().copy() for name, value in step.named_buffers()})


@pytest.mark.parametrize("chunk", [None, 5], ids=["at once", "in chunks"])
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split)))
@pytest.mark.parametrize("input", INPUTS)
def test_steps_equal_those_of_one_process(
    pool: GlooPool, input: str, split: tuple[int, ...], chunk: int | None
) -> None:
    truth = trained((BATCH,), None, input)
    results = pool.run(len(split), trained, split, chunk, input)
    for losses, gradients, buffers in results:
        assert losses == pytest.approx(truth.losses, rel=1e-12)
        for own, expected in zip(gradients, truth.gradients, strict=True):
            assert own.keys() == expected.keys()
            for name, gradient in own.items():
                size = np.linalg.norm(expected[name])
                assert size > 1e-9, f"{name} has no gradient: the case proves nothing"
                assert np.linalg.norm(gradient - expected[name]) < 1e-9 * size, name
        for name, value in buffers.items():
            np.testing.assert_allclose(value, truth.buffers[name], rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("input", INPUTS)
def test_statistics_are_those_of_the_definition(input: str) -> None:
    """Each step is computed with the statistics before it, the first with its own."""
    step = made_step(input)
    gradients = gradients_of(step)
    mean_F, variance = np.zeros(8), 1.0
    for number in range(NUM_STEPS):
        with torch.no_grad():
            features_NF = (step.embedder.features(batch(number)[0]) + 5).numpy()
        own_mean_F, own_variance = features_NF.mean(0), features_NF.var(0).mean()
        if number == 0:
            mean_F, variance = own_mean_F, own_variance
        head = step.embedder.get_submodule("structure")
        assert isinstance(head, StructureHead)
        x, y, ids = batch(number)
        gradients(x, distributed.asked(y, ids))
        kept = MOMENTUM
        mean_F = kept * mean_F + (1 - kept) * own_mean_F
        variance = kept * variance + (1 - kept) * own_variance
        assert head.input is not None
        np.testing.assert_allclose(head.input.mean_F, mean_F, rtol=1e-12)
        np.testing.assert_allclose(
            head.input.variance, variance if input == "standardize" else 1.0, rtol=1e-12
        )
        step.zero_grad(set_to_none=True)
    assert int(head.input.num_batches) == NUM_STEPS + 1


def test_what_every_image_has_in_common_is_gone() -> None:
    """Features of mean 5 and small spread: beside them a constant is all that an uncentred head could learn."""
    features_NF = 5 + 0.01 * torch.randn(200, 8, generator=torch.Generator().manual_seed(0)).double()
    for input in INPUTS:
        head = StructureHead(8, 4, "official", input).double()
        assert head.input is not None
        head.input(features_NF)
        head.input.renew(distributed.world())
        x_NF = head.input(features_NF)
        assert x_NF.mean(0).abs().max() < 1e-12
        assert x_NF.var(0, correction=0).mean().item() == pytest.approx(
            1.0 if input == "standardize" else 1e-4, rel=0.1
        )


def test_a_single_query_sees_what_it_would_among_others() -> None:
    head = StructureHead(8, 4, "official", "standardize")
    x_NF = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    assert head.input is not None
    head(x_NF)
    head.input.renew(distributed.world())
    head.eval()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    omega_ND = head(x_NF)
    for row in range(6):
        torch.testing.assert_close(head(x_NF[row : row + 1])[0], omega_ND[row])
    head.input.renew(distributed.world())  # nothing was seen in eval mode
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_features_that_are_all_alike_have_no_scale() -> None:
    head = StructureHead(8, 4, "official", "standardize")
    assert head.input is not None
    head(torch.full((5, 8), 3.0))
    head.input.renew(distributed.world())
    assert head.input.variance == 1
    assert head(torch.full((1, 8), 3.0)).isfinite().all()
