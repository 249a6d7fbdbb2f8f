"""Tiles: their heights, the widths of their features, and references that need no gradient."""

from __future__ import annotations

import pytest
import torch
from support.small_batch import balanced
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import catalogue, tiles
from dmlstudy.losses.interface import Embeddings

DIM = 5
GIB = 2**30
NAMES = ["contrastive", "multi_similarity", "triplet", "supcon", "tcm", "sup_ap", "margin", "adaptive_bound"]
each_loss = pytest.mark.parametrize("name", NAMES)


def rows(number: int, first_id: int, seed: int) -> Embeddings:
    z_ND = torch.randn(number, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    id_N = first_id + torch.arange(number)
    return Embeddings(functional.normalize(z_ND).requires_grad_(), id_N % 3, id_N)


def gradients(name: str, anchors: Embeddings, references: Embeddings) -> tuple[Tensor, list[Tensor]]:
    """The sum, and its gradients by anchors and by references."""
    loss = catalogue.build(name, {}, num_classes=3, dim=DIM, num_layers=1).double().eval()
    total, _ = loss(anchors, references)
    return total.detach(), list(torch.autograd.grad(total, [anchors.z_ND, references.z_ND]))


@pytest.mark.parametrize("budget", [1, 3000, 2**24])
@each_loss
def test_rows_behind_the_live_ones_get_no_gradient(
    name: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether rows are constants or their gradient is thrown away is the same to all others."""
    monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", budget)
    anchors, batch, older = rows(7, 0, seed=0), rows(9, 0, seed=1), rows(30, 9, seed=2)
    joined = Embeddings(
        *(torch.cat([a.detach(), b.detach()]) for a, b in zip(batch[:3], older[:3], strict=True))
    )
    joined.z_ND.requires_grad_()
    total, (by_anchor_BD, by_row_MD) = gradients(name, anchors, joined)

    z_MD = torch.cat([batch.z_ND, older.z_ND.detach()])
    known = Embeddings(z_MD, joined.y_N, joined.id_N, live_LD=batch.z_ND)
    loss = catalogue.build(name, {}, num_classes=3, dim=DIM, num_layers=1).double().eval()
    known_total, _ = loss(anchors, known)
    found = torch.autograd.grad(known_total, [anchors.z_ND, batch.z_ND])
    assert torch.equal(known_total, total)
    torch.testing.assert_close(found[0], by_anchor_BD, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found[1], by_row_MD[:9], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["contrastive", "angular"])
def test_the_whole_of_the_references_never_has_a_gradient(name: str) -> None:
    anchors, batch, older = rows(4, 0, seed=0), rows(4, 0, seed=1), rows(8, 9, seed=2)
    z_MD = torch.cat([batch.z_ND, older.z_ND.detach()])
    z_MD.retain_grad()
    y_M, id_M = torch.cat([batch.y_N, older.y_N]), torch.cat([batch.id_N, older.id_N])
    loss = catalogue.build(name, {}, num_classes=3, dim=DIM)
    loss(anchors, Embeddings(z_MD, y_M, id_M, live_LD=batch.z_ND)).total.backward()
    assert z_MD.grad is None
    assert batch.z_ND.grad is not None


def test_short_vectors_have_live_rows_too() -> None:
    anchors, batch, older = rows(4, 0, seed=0), rows(4, 0, seed=1), rows(8, 9, seed=2)
    z_MD = torch.cat([batch.z_ND, older.z_ND.detach()])
    whole = Embeddings(z_MD, torch.cat([batch.y_N, older.y_N]), torch.cat([batch.id_N, older.id_N]))
    loss = catalogue.build("contrastive", {}, leading=[2, 3], num_classes=3, dim=DIM)
    by_whole = torch.autograd.grad(loss(anchors, whole).total, batch.z_ND, retain_graph=True)
    by_live = torch.autograd.grad(loss(anchors, whole._replace(live_LD=batch.z_ND)).total, batch.z_ND)
    torch.testing.assert_close(by_live, by_whole)


@pytest.mark.parametrize("distance", ["euclidean", "squared_euclidean", "cosine"])
def test_padded_features_give_the_same(distance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = balanced()
    loss = catalogue.build("pair_weighting", {"distance": distance}, num_classes=4, dim=4)
    (plain,) = torch.autograd.grad(loss(batch).total, batch.z_ND)
    monkeypatch.setitem(tiles.ALIGNED, "cpu", 8)
    assert tiles.padded(torch.ones(2, 6)).tolist() == [[1.0] * 6 + [0.0] * 2] * 2
    assert tiles.padded(torch.ones(2, 16)).shape == (2, 16)
    (wide,) = torch.autograd.grad(loss(batch).total, batch.z_ND)
    torch.testing.assert_close(wide, plain, rtol=1e-12, atol=1e-14)


def test_tiles_on_a_gpu_follow_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {0: 60 * GIB, 1: 10 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    tiles._free_share.cache_clear()
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert tiles.tile_height(2**16, 4, one) == 2 * GIB // (
        10 * 4 * 2**16
    )  # 5 % of 80 GiB is 4, and 2 the most
    assert tiles.tile_height(2**16, 4, other) == GIB // (10 * 4 * 2**16)  # of 30 GiB 1.5, as a power of two 1
    free[0] = GIB
    assert tiles.tile_height(2**16, 4, one) == 2 * GIB // (10 * 4 * 2**16)  # asked once
    assert tiles.tile_height(2**30, 4, one) == 128
    assert tiles.tile_height(2**16, 4, one, by_kernels=True) == 2 * GIB // (3 * 4 * 2**16) // 128 * 128
    assert tiles.tile_height(2**30, 4, one, by_kernels=True) == 512
    tiles._free_share.cache_clear()


def test_a_gpu_that_does_not_say_has_the_usual_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("no such call")

    monkeypatch.setattr(torch.cuda, "mem_get_info", silent)
    tiles._free_share.cache_clear()
    assert tiles.tile_height(2**12, 4, torch.device("cuda", 0)) == 2**29 // (10 * 4 * 2**12)
    tiles._free_share.cache_clear()


def test_tiles_on_a_cpu_follow_the_budget_alone() -> None:
    assert tiles.tile_height(2**10, 4, torch.device("cpu")) == 2**24 // (10 * 4 * 2**10)
    assert tiles.tile_height(2**30, 4, torch.device("cpu")) == 1


SYMMETRIC = {
    "siglip": {},
    "siglip, not learned": {"learn": False},
    "tcm": {"negative_margin": -0.2},
    "binomial_deviance": {},
    "potential_field": {"proxies": 0, "delta": 1.2},
    "potential_field, proxies": {"proxies": 2, "delta": 1.2},
}


@pytest.mark.parametrize("budget", [1, 3000, 2**24])
@pytest.mark.parametrize("label", SYMMETRIC)
def test_a_tile_that_serves_both_sides_is_as_two(
    label: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References that are a copy of the anchors take every tile; some images are in several rows."""
    monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", budget)
    name = label.partition(",")[0]
    batch = rows(23, 0, seed=3)
    batch = batch._replace(
        id_N=batch.id_N.clamp(max=19), y_N=batch.y_N.clone().index_fill_(0, torch.tensor([4]), 5)
    )
    batch.y_N[19:] = batch.y_N[19]
    loss = catalogue.build(name, SYMMETRIC[label], num_classes=6, dim=DIM).double()
    leaves = [batch.z_ND, *loss.parameters()]
    copy = batch._replace(z_ND=batch.z_ND.clone())
    once, twice = loss(batch), loss(batch, copy)
    torch.testing.assert_close(once, twice, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(
        torch.autograd.grad(once.total, leaves), torch.autograd.grad(twice.total, leaves), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("label", SYMMETRIC)
def test_half_of_the_tiles_are_formed(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", 4 * 4 * 80)
    seen: list[int] = []
    loss = catalogue.build(label.partition(",")[0], SYMMETRIC[label], num_classes=3, dim=DIM).double()
    for module in loss.modules():
        if isinstance(module, tiles.RowLoss) and module.is_symmetric:
            monkeypatch.setattr(
                module, "rows", lambda tile, of=module.rows: (seen.append(tile.d_TM.numel()), of(tile))[1]
            )
    batch = rows(16, 0, seed=3)
    loss(batch)
    assert seen[:10] == [16] * 10
    seen.clear()
    loss(batch, batch._replace(z_ND=batch.z_ND.clone()))
    assert sum(seen) >= 16 * 16


def test_labels_must_be_the_same_too() -> None:
    batch = rows(12, 0, seed=3)
    other = batch._replace(y_N=batch.y_N.flip(0))
    loss = catalogue.build("siglip", {}, num_classes=3, dim=DIM).double()
    found, wanted = loss(batch, other), loss(batch, other._replace(z_ND=batch.z_ND.clone()))
    assert torch.equal(found.total, wanted.total)
    assert not torch.allclose(found.total, loss(batch).total)
