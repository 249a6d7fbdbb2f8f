"""The law of the training step: any world size gives the gradient of one process on the global batch.

Every catalogue entry, regulariser and the memory, on 2, 3 and 4 gloo processes, with equal and ragged local
batches (also one row, also none), float64, encoder and loss wrapped together: encoder and loss parameters
to 1e-9 relative. The step here is the test's own; ``law.check`` is what users run. In chunks it is a trial's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.gloo_pool import GlooPool
from torch import Tensor

from dmlstudy import distributed
from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import ALONE, Embeddings, LossSum
from dmlstudy.losses.proxies import ProxyLoss
from dmlstudy.training import exactness
from dmlstudy.training.gradients import gradients_of
from dmlstudy.training.step import Step

Gather = Callable[[Embeddings], Embeddings]
Result = tuple[float, dict[str, NDArray[np.float64]]]

BATCH = 12
SPLITS = [(6, 6), (11, 1), (4, 4, 4), (7, 4, 1), (8, 4, 0), (3, 3, 3, 3), (5, 0, 1, 6)]
CHUNKED = [
    ((12,), 1),
    ((12,), 5),
    ((12,), 12),
    ((12,), 50),
    ((6, 6), 3),
    ((11, 1), 4),
    ((8, 4, 0), 4),
    ((3, 3, 3, 3), 2),
    ((5, 0, 1, 6), 2),
]
"""Rows of each rank, and rows of a chunk: one, so many that they divide the shares or do not, all, and more."""
SEES_NO_REFERENCES = {name for name in catalogue.CATALOGUE if issubclass(catalogue.kind_of(name), ProxyLoss)}


def global_batch(number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Two draws of the same classes, one image in both; classes and draws are spread over the ranks."""
    generator = torch.Generator().manual_seed(1 + number)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    y = torch.arange(BATCH) % (BATCH // 2) % exactness.NUM_CLASSES
    ids = torch.arange(BATCH) + 2**53 + 7 * number
    x[11], ids[11] = x[1], ids[1]
    return x, y, ids


def run_step(step: Step, module: torch.nn.Module, rows: slice) -> LossSum:
    """The measured step, after another batch that fills the memory where there is one."""
    if step.memory[0] is not None:
        with torch.no_grad():
            step(*share(1, rows))
    total, count, _ = module(*share(0, rows))
    return LossSum(total, count)


def share(number: int, rows: slice) -> exactness.Batch:
    """A rank's rows of a global batch, whose labels it asks of the others."""
    x, y, ids = (part[rows] for part in global_batch(number))
    return x, distributed.asked(y, ids)


def own_gradients(step: Step) -> dict[str, NDArray[np.float64]]:
    named = zip(dict(step.named_parameters()), exactness.whole_gradients(step), strict=True)
    return {name: gradient.numpy() for name, gradient in named if gradient is not None}


def local_step(name: str, split: tuple[int, ...], gather: Gather | None) -> Result:
    """What one rank ends up with: the logged mean, and the gradients that data parallel left on it."""
    start = sum(split[: distributed.rank()])
    rows = slice(start, start + split[distributed.rank()])
    step = exactness.step_of(exactness.CASES[name], gather).double()
    parallel = distributed.data_parallel(step)
    objective, mean, _ = distributed.scaled_for_mean(run_step(step, parallel, rows))
    objective.backward()
    return mean.item(), own_gradients(step)


def exact_step(name: str, split: tuple[int, ...]) -> Result:
    return local_step(name, split, None)


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
    step = exactness.step_of(exactness.CASES[name], lambda anchors: anchors, ALONE).double()
    total, count = run_step(step, step, slice(None))
    assert count > 0
    mean = total / count
    mean.backward()
    return mean.item(), own_gradients(step)


def flat(gradients: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([gradients[name].ravel() for name in sorted(gradients)])


def test_every_entry_is_covered() -> None:
    assert {case.loss for case in exactness.CASES.values()} == catalogue.CATALOGUE.keys()
    regularizers = {case.regularizer[0] for case in exactness.CASES.values() if case.regularizer}
    assert regularizers == catalogue.REGULARIZERS.keys()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split)))
@pytest.mark.parametrize("name", list(exactness.CASES))
def test_gradient_equals_one_process(pool: GlooPool, name: str, split: tuple[int, ...]) -> None:
    assert sum(split) == BATCH
    mean, truth = one_process(name)
    results = pool.run(len(split), exact_step, name, split)
    for rank_mean, gradients in results:
        assert rank_mean == pytest.approx(mean, rel=1e-12)
        assert gradients.keys() == truth.keys()
        for parameter, gradient in gradients.items():
            size = np.linalg.norm(truth[parameter])
            assert size > 1e-6, f"{parameter} has no gradient: the case proves nothing"
            error = np.linalg.norm(gradient - truth[parameter]) / size
            assert error < 1e-9, f"{parameter}: relative error {error:.1e}"


def chunked_steps(split: tuple[int, ...], chunk: int) -> dict[str, Result]:
    """What one rank ends up with in every case, where the very step that trains takes chunks of so many images."""
    start = sum(split[: distributed.rank()])
    rows = slice(start, start + split[distributed.rank()])
    found: dict[str, Result] = {}
    for name, case in exactness.CASES.items():
        step = exactness.step_of(case).double()
        if step.memory[0] is not None:
            with torch.no_grad():
                step(*share(1, rows))
        found[name] = gradients_of(step, chunk)(*share(0, rows)).read(), own_gradients(step)
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("split", "chunk"), CHUNKED, ids=lambda value: str(value).replace(", ", "-"))
def test_gradient_in_chunks_equals_one_process(pool: GlooPool, split: tuple[int, ...], chunk: int) -> None:
    assert sum(split) == BATCH
    results = pool.run(len(split), chunked_steps, split, chunk)
    for name in exactness.CASES:
        mean, truth = one_process(name)
        for found in results:
            rank_mean, gradients = found[name]
            assert rank_mean == pytest.approx(mean, rel=1e-12), name
            assert gradients.keys() == truth.keys(), name
            for parameter, gradient in gradients.items():
                error = np.linalg.norm(gradient - truth[parameter]) / np.linalg.norm(truth[parameter])
                assert error < 1e-9, f"{name}, {parameter}: relative error {error:.1e}"


def sees_references(case: exactness.Case) -> bool:
    """With shares of classes each rank looks at all ranks' anchors; norms are not gathered by the mistake."""
    if case.has_shards:
        return not catalogue.kind_of(case.loss).uses_norms
    return case.loss not in SEES_NO_REFERENCES


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [n for n, case in exactness.CASES.items() if sees_references(case)])
def test_a_gather_without_gradient_is_found_out(pool: GlooPool, name: str) -> None:
    """Guards the test above: the comparison must see the mistake it is there for."""
    truth = flat(one_process(name)[1])
    ((_, wrong), _) = pool.run(2, step_without_gradient_through_the_gather, name, (7, 5))
    error = np.linalg.norm(flat(wrong) - truth) / np.linalg.norm(truth)
    assert error > 1e-3, f"relative error only {error:.1e}"


def check_on_rank(name: str) -> exactness.Finding:
    return exactness.check(exactness.CASES[name])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["margin", "contrastive + structure, memory", "proxy_anchor"])
def test_the_check_for_users_finds_the_ranks_exact(pool: GlooPool, name: str, world_size: int) -> None:
    for finding in pool.run(world_size, check_on_rank, name):
        assert finding.is_exact
        assert finding.value > 0
        assert finding.cosine == pytest.approx(1, abs=1e-12)
        assert finding.norm_ratio == pytest.approx(1, abs=1e-9)


def check_with_local_scaling(name: str) -> exactness.Finding:
    """A training step that divides by its own count, as one without global sums does."""

    def scaled_alone(loss: LossSum, unsound_2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = loss.total / loss.count.clamp(min=1)
        return mean, mean.detach().double(), unsound_2.expand(distributed.world_size(), 2)

    distributed.scaled_for_mean = scaled_alone
    try:
        return exactness.check(exactness.CASES[name])
    finally:
        import importlib

        importlib.reload(distributed)


@pytest.mark.timeout(180)
def test_the_check_for_users_sees_a_wrong_step(pool: GlooPool) -> None:
    (finding, _) = pool.run(2, check_with_local_scaling, "triplet")
    assert not finding.is_exact
    assert finding.error > 1e-3


def unsound_step(kind: str) -> str:
    local = Embeddings(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), torch.arange(2) + 5)
    if distributed.rank() == 1:
        nan = torch.tensor([[1.0, 1, 1], [1, float("nan"), 1]])
        local = {
            "not finite": local._replace(z_ND=nan),
            "dtype": local._replace(y_N=local.y_N.float()),
            "shape": local._replace(y_N=local.y_N[:1]),
        }[kind]
    try:
        distributed.gather(local)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not finite", "rank 1: the embeddings of 1 of 2 images are not finite, the first of image 6"),
        ("dtype", "rank 1: batch: labels must be int64, not torch.float32"),
        ("shape", "rank 1: batch: labels must have one entry per embedding"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_hear_of_an_unsound_batch(pool: GlooPool, world_size: int, kind: str, message: str) -> None:
    said = pool.run(world_size, unsound_step, kind)
    assert len(set(said)) == 1
    assert said[0].startswith(message)
