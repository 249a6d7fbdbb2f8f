"""Compiled tiles: the same terms and gradients as a loss's own, and a loss that cannot be compiled runs as it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import catalogue, tiles
from dmlstudy.losses.distances import cosine
from dmlstudy.losses.fused import Fused, fuse
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.losses.tiles import RowLoss, RowTerms, Tile
from dmlstudy.records import Scalar

SETTINGS: dict[str, dict[str, Scalar]] = {
    "contrastive": {"negative_margin": 1.5},
    "multi_similarity": {},
    "binomial_deviance": {},
    "circle": {"gamma": 8.0},
    "supcon": {"learn": True},
    "siglip": {"bias": -2.0},
    "margin": {},
    "generalized_lifted_structure": {},
}


def batch(num_rows: int, seed: int) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    z_ND = torch.randn(num_rows, 6, generator=generator, dtype=torch.float64)
    y_N = torch.randint(0, 5, (num_rows,), generator=generator)
    return Embeddings(functional.normalize(z_ND).requires_grad_(), y_N, torch.arange(num_rows) // 2)


def outcome(loss: Loss, batch: Embeddings) -> list[Tensor]:
    total, count = loss(batch)
    leaves = [batch.z_ND, *loss.parameters()]
    return [total.detach(), count, *torch.autograd.grad(total, leaves, allow_unused=True)]


def counting(times: list[int]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        times.append(1)
        return graph.forward

    return backend


def build(name: str) -> Loss:
    return catalogue.build(name, SETTINGS[name], num_classes=5, dim=6).double()


@pytest.mark.parametrize("name", SETTINGS)
def test_compiled_rows_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of several heights, whose bands have other places and widths: compiled for few of them."""
    torch.compiler.reset()
    monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", 20_000)
    plain, compiled, times = build(name), build(name), list[int]()
    assert isinstance(compiled, RowLoss)
    compiled.fused = Fused(compiled, counting(times), ("cpu",))
    for num_rows, seed in ((30, 0), (41, 1), (53, 2)):
        given = batch(num_rows, seed)
        for got, wanted in zip(outcome(compiled, given), outcome(plain, given), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    assert not compiled.fused.has_failed
    assert 1 <= len(times) <= 3


def test_a_compiler_that_rewrites_gives_the_same() -> None:
    torch.compiler.reset()
    plain, compiled = build("multi_similarity"), build("multi_similarity")
    assert isinstance(compiled, RowLoss)
    compiled.fused = Fused(compiled, "aot_eager", ("cpu",))
    for got, wanted in zip(outcome(compiled, batch(20, 3)), outcome(plain, batch(20, 3)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    assert not compiled.fused.has_failed


def test_where_compiling_fails_rows_run_as_they_are() -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        raise RuntimeError("no compiler\nhere")

    torch.compiler.reset()
    plain, compiled = build("contrastive"), build("contrastive")
    assert isinstance(compiled, RowLoss)
    compiled.fused = Fused(compiled, broken, ("cpu",))
    with pytest.warns(
        UserWarning, match=r"Contrastive is not compiled and runs as it is: .*no compiler here"
    ):
        found = outcome(compiled, batch(20, 3))
    for got, wanted in zip(found, outcome(plain, batch(20, 3)), strict=True):
        assert torch.equal(got, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        outcome(compiled, batch(20, 3))


class Silent(RowLoss):
    """No terms, and a note of each call."""

    def __init__(self) -> None:
        super().__init__(cosine)
        self.num_calls = 0

    def rows(self, rows: Tile) -> RowTerms:
        self.num_calls += 1
        return RowTerms(rows.d_TM.new_zeros(()), 0, torch.zeros_like(rows.d_TM))


def test_on_a_cpu_nothing_is_compiled() -> None:
    loss = Silent()
    fuse(loss)
    assert isinstance(loss.fused, Fused)
    loss(batch(12, 0))
    assert loss.num_calls == 1


def test_losses_within_others_are_compiled() -> None:
    loss = catalogue.build("tcm", {}, regularizer=("koleo", {}), leading=[2], num_classes=5, dim=6)
    fuse(loss)
    within = [module for module in loss.modules() if isinstance(module, RowLoss)]
    assert len(within) == 3
    assert all(module.fused is not None for module in within)
    assert len({id(module.fused) for module in within}) == 3
