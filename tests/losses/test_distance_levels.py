"""Multi-level distance regularisation against the paper's sums, and how its running statistics move."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import tiles
from dmlstudy.losses.distance_levels import DistanceLevels
from dmlstudy.losses.interface import Embeddings

DIM = 4


def embeddings(num_rows: int, *, dim: int = DIM, seed: int = 0) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    z_ND = torch.randn(num_rows, dim, dtype=torch.float64, generator=generator)
    return Embeddings(
        functional.normalize(z_ND).requires_grad_(), torch.arange(num_rows) % 3, torch.arange(num_rows) + 40
    )


def levels_at(*levels: float, momentum: float = 0.9) -> DistanceLevels:
    loss = DistanceLevels(momentum).double()
    with torch.no_grad():
        loss.levels_L.copy_(torch.tensor(levels))
    return loss


def distances(batch: Embeddings) -> list[Tensor]:
    z_ND = batch.z_ND
    places = range(len(z_ND))
    return [((z_ND[i] - z_ND[j]) ** 2).sum().sqrt() for i in places for j in places if i != j]


def as_printed(batch: Embeddings, levels_L: Tensor, mean: float, std: float) -> Tensor:
    """The paper's sum with one number at a time."""
    total = torch.zeros((), dtype=torch.float64)
    pairs = distances(batch)
    for d in pairs:
        gaps = [((d - mean) / std - level).abs() for level in levels_L]
        total = total + gaps[min(range(len(gaps)), key=lambda number: gaps[number].item())]
    return total / len(pairs)


def moments(batch: Embeddings) -> tuple[float, float]:
    values = [d.item() for d in distances(batch)]
    return statistics.fmean(values), statistics.stdev(values)


def test_value_and_gradients_equal_the_formula_over_three_batches() -> None:
    loss = levels_at(-1.2, 0.1, 0.9, momentum=0.7)
    assert DistanceLevels().levels_L.tolist() == [-3, 0, 3]
    mean, std = moments(embeddings(9, seed=0))
    for seed in range(3):
        batch = embeddings(9, seed=seed)
        if seed:
            batch_mean, batch_std = moments(batch)
            mean, std = 0.7 * mean + 0.3 * batch_mean, 0.7 * std + 0.3 * batch_std
        total, count = loss(batch)
        assert count == 9
        leaves = [batch.z_ND, loss.levels_L]
        expected = as_printed(batch, loss.levels_L, mean, std)
        torch.testing.assert_close(total / count, expected, rtol=1e-10, atol=1e-10)
        for got, wanted in zip(
            torch.autograd.grad(total / count, leaves), torch.autograd.grad(expected, leaves), strict=True
        ):
            assert wanted.abs().max() > 1e-3
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
        assert loss.running_mean.item() == pytest.approx(mean, rel=1e-12)
        assert loss.running_std.item() == pytest.approx(std, rel=1e-12)


def test_statistics_move_in_training_with_gradients_alone() -> None:
    loss, batch, other = levels_at(-1, 0, 1), embeddings(9), embeddings(9, seed=1)
    before = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    loss.eval()
    at_first = loss(batch).total.detach()
    with torch.no_grad():
        assert loss.train()(batch).total == at_first  # without any running ones, the batch's own
    assert all(torch.equal(before[name], buffer) for name, buffer in loss.named_buffers())
    torch.testing.assert_close(loss(batch).total.detach(), at_first, rtol=1e-14, atol=0)
    assert loss.num_batches == 1
    moved = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    mean, std = (moved[name].item() for name in ("running_mean", "running_std"))
    expected = as_printed(other, loss.levels_L, mean, std).item()
    assert loss.eval()(other).total.item() / 9 == pytest.approx(expected, rel=1e-12)
    assert all(torch.equal(moved[name], buffer) for name, buffer in loss.named_buffers())


def test_statistics_are_saved_with_the_state() -> None:
    loss, batch = levels_at(-1, 0, 1), embeddings(9)
    loss(embeddings(9, seed=1))
    again = DistanceLevels().double()
    again.load_state_dict(loss.state_dict())
    assert again(batch).total == loss(batch).total


def test_batch_order_labels_ids_and_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = embeddings(11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    relabelled = batch._replace(y_N=torch.zeros_like(batch.y_N), id_N=torch.zeros_like(batch.id_N))

    def parts(batch: Embeddings) -> tuple[Tensor, ...]:
        loss = levels_at(-1.2, 0.1, 0.9)
        total = loss(batch).total
        return total.detach(), *torch.autograd.grad(total, [loss.levels_L, batch.z_ND])

    whole = parts(batch)
    assert torch.equal(parts(relabelled)[0], whole[0])
    permuted = parts(batch.rows(order))
    torch.testing.assert_close(permuted[:2], whole[:2], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(permuted[2], whole[2][order], rtol=1e-10, atol=1e-12)
    monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", 1)
    torch.testing.assert_close(parts(batch), whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_collapse_and_duplicates_stay_finite(dtype: torch.dtype) -> None:
    collapsed = functional.normalize(torch.ones(6, DIM, dtype=dtype))
    repeated = embeddings(5).z_ND.detach().to(dtype)[[0, 1, 2, 3, 3, 4, 0]]
    for z_ND in (collapsed, repeated, repeated[:2]):
        loss = DistanceLevels()
        z_ND.requires_grad_()
        names = torch.arange(len(z_ND))
        total, _ = loss(Embeddings(z_ND, names, names))
        total.backward()
        for x in (total, z_ND.grad, loss.levels_L.grad, loss.running_mean, loss.running_std):
            assert x.isfinite().all()


@pytest.mark.parametrize("num_rows", [0, 1])
def test_one_row_or_none_is_zero_on_the_graph_and_moves_nothing(num_rows: int) -> None:
    loss, batch = DistanceLevels().double(), embeddings(num_rows)
    total, count = loss(batch)
    assert total == 0
    assert count == num_rows
    total.backward()
    assert (batch.z_ND.grad == 0).all()
    assert (loss.levels_L.grad == 0).all()
    assert loss.num_batches == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_autocast_computes_in_full_precision(dtype: torch.dtype) -> None:
    batch = embeddings(9)
    single = batch._replace(z_ND=batch.z_ND.detach().float())
    plain = DistanceLevels()(single).total
    with torch.autocast("cpu", dtype=dtype):
        under = DistanceLevels()(single).total
    assert plain.dtype == under.dtype == torch.float32
    assert torch.equal(plain, under)
    torch.testing.assert_close(plain.double(), DistanceLevels()(batch).total, rtol=1e-4, atol=0)
    half = DistanceLevels()(single._replace(z_ND=single.z_ND.to(dtype))).total
    assert half.dtype == torch.float32
    assert half.isfinite()


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_faults(momentum: float) -> None:
    with pytest.raises(ValueError, match="momentum="):
        DistanceLevels(momentum)
