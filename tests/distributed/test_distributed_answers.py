"""Gathering, agreeing and dividing work: on real ranks, and without any process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gloo_pool import GlooPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dmlstudy import distributed
from dmlstudy.engine.energy import of_all_ranks
from dmlstudy.losses.interface import Embeddings, LossSum

pytestmark = pytest.mark.timeout(180)
HUGE = 2**53 + 1
"""An id that floating point would round."""


def local_rows(sizes: tuple[int, ...]) -> Embeddings:
    start = sum(sizes[: distributed.rank()])
    row_N = torch.arange(start, start + sizes[distributed.rank()])
    z_ND = torch.stack([row_N, 10 * row_N, 100 * row_N], dim=1).double().requires_grad_()
    return Embeddings(z_ND, row_N % 2, row_N + HUGE)


def gather_and_pull(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Rank r's objective is (r+1) * sum_m (m+1) * sum_d z_md: row m's gradient is (m+1) * sum_r (r+1)."""
    local = local_rows(sizes)
    everyone = distributed.gather(local)
    factor_M1 = torch.arange(1, sum(sizes) + 1)[:, None]
    ((distributed.rank() + 1) * factor_M1 * everyone.z_ND).sum().backward()
    assert local.z_ND.grad is not None
    return {
        "rows": everyone.z_ND[:, 0].tolist(),
        "labels": everyone.y_N.tolist(),
        "ids": everyone.id_N.tolist(),
        "gradient": local.z_ND.grad.tolist(),
        "evaluated": distributed.gather_rows(local.z_ND).requires_grad,
        "images": distributed.gather_rows(
            torch.ones(sizes[distributed.rank()], 2, 2, dtype=torch.bool)
        ).shape,
    }


@pytest.mark.parametrize("sizes", [(3, 3), (4, 0), (1, 2, 3), (0, 5, 0), (2, 0, 3, 1), (0, 0)])
def test_gather_keeps_rank_order_and_sums_gradients(pool: GlooPool, sizes: tuple[int, ...]) -> None:
    results = pool.run(len(sizes), gather_and_pull, sizes)
    num_rows = sum(sizes)
    weight = sum(range(1, len(sizes) + 1))
    gradients = [row for result in results for row in result["gradient"]]
    assert gradients == [[weight * (row + 1)] * 3 for row in range(num_rows)]
    for result in results:
        assert result["rows"] == list(range(num_rows))
        assert result["labels"] == [row % 2 for row in range(num_rows)]
        assert result["ids"] == [row + HUGE for row in range(num_rows)]
        assert not result["evaluated"]
        assert result["images"] == (num_rows, 2, 2)


def answers() -> dict[str, Any]:
    rank = distributed.rank()
    x = torch.tensor([1.0, rank], requires_grad=True)
    summed = distributed.sum_over_ranks(x)
    loss = LossSum(torch.tensor(2.0 + rank, requires_grad=True), torch.tensor(float(rank)))
    objective, mean, _ = distributed.scaled_for_mean(loss)
    nothing, no_mean, _ = distributed.scaled_for_mean(LossSum(0 * loss.total, torch.tensor(0.0)))
    return {
        "rank": (rank, distributed.world_size()),
        "sum": (summed.tolist(), summed.requires_grad, x.tolist()),
        "max": distributed.max_over_ranks(x).tolist(),
        "rows": distributed.rows_on_rank_0(x.repeat(rank, 1)).tolist(),
        "any": (distributed.any_rank(rank == 1), distributed.any_rank(False)),
        "agree": (distributed.agree(rank == 0), distributed.agree(rank != 0)),
        "energy": (of_all_ranks(1.5 + rank), of_all_ranks(None if rank == 0 else 1.0), of_all_ranks(None)),
        "slices": [range(n)[distributed.own_slice(n)] for n in (0, 1, 7, 12)],
        "objective": (objective.item(), mean.item(), nothing.item(), no_mean.item()),
        "parallel": isinstance(distributed.data_parallel(nn.Linear(2, 2)), DistributedDataParallel),
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_agree(pool: GlooPool, world_size: int) -> None:
    results = pool.run(world_size, answers)
    count = sum(range(world_size))
    mean = sum(2 + rank for rank in range(world_size)) / count
    for rank, result in enumerate(results):
        assert result["rank"] == (rank, world_size)
        assert result["sum"] == ([world_size, count], False, [1, rank])
        assert result["max"] == [1, world_size - 1]
        assert result["rows"] == [
            [1, other] for other in (range(world_size) if rank == 0 else (rank,)) for _ in range(other)
        ]
        assert result["any"] == (True, False)
        assert result["agree"] == (True, False)
        assert result["objective"] == pytest.approx((world_size / count * (2 + rank), mean, 0, 0))
        assert result["energy"] == (1.5 * world_size + count, None, None)
        assert result["parallel"]
    for n, shares in zip(
        (0, 1, 7, 12), zip(*(result["slices"] for result in results), strict=True), strict=True
    ):
        assert [item for share in shares for item in share] == list(range(n))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_without_a_process_group_everything_passes_through() -> None:
    result = answers()
    assert result["rank"] == (0, 1)
    assert result["sum"] == ([1, 0], False, [1, 0])
    assert result["max"] == [1, 0]
    assert result["rows"] == []
    assert result["any"] == (False, False)
    assert result["agree"] == (True, False)
    assert result["objective"] == (2, 2, 0, 0)
    assert result["energy"] == (1.5, None, None)
    assert result["slices"] == [range(n) for n in (0, 1, 7, 12)]
    assert not result["parallel"]
    local = local_rows((3,))
    assert distributed.gather(local).z_ND is local.z_ND
    assert not distributed.gather_rows(local.z_ND).requires_grad


def counted_once(fails: bool) -> tuple[int, Any]:
    """How often this rank computed, and what it was told."""
    calls = 0

    def compute() -> dict[str, float]:
        nonlocal calls
        calls += 1
        if fails:
            raise KeyError("no such metric")
        return {"rank": float(distributed.rank()), "third": 1 / 3}

    try:
        return calls, distributed.computed_once(compute) | {"calls": calls}
    except (KeyError, RuntimeError) as error:
        return calls, f"{type(error).__name__}: {error}"


def test_what_rank_0_computes_is_everybodys(pool: GlooPool) -> None:
    found = pool.run(3, counted_once, False)
    assert [answer for _, answer in found] == [
        {"rank": 0.0, "third": 1 / 3, "calls": number} for number in (1, 0, 0)
    ]
    assert counted_once(False)[1] == {"rank": 0.0, "third": 1 / 3, "calls": 1}, "one process is rank 0"


def test_what_rank_0_cannot_compute_nobody_waits_for(pool: GlooPool) -> None:
    found = pool.run(2, counted_once, True)
    assert found == [
        (1, "KeyError: 'no such metric'"),
        (0, "RuntimeError: rank 0: KeyError: 'no such metric'"),
    ]
