"""Retrieval with the product on a device: digits do not change, whatever the device's rounding within the bound.

A stand-in takes the device's place: its products are off by a share of the proven bound, with random signs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.hard_sets import HARD

from dmlstudy import retrieval
from dmlstudy.retrieval.device_products import DeviceProduct

NEIGHBOURS = sys.modules["dmlstudy.retrieval.neighbours"]
GPU = torch.device("cuda")
"""Never reached: the stand-in computes on the CPU."""

SHARE = 0.9
"""Of the bound; the rest is left to the rounding of the direct kernel."""


def standing_in(monkeypatch: pytest.MonkeyPatch, share: float) -> list[tuple[int, int]]:
    """Put products that are off by this share of the bound in the device's place; shapes of those it was asked for."""
    asked = []
    rng = np.random.default_rng(0)

    class Perturbed(DeviceProduct):
        def __init__(self, right_ME: np.ndarray, column_S: np.ndarray, device: torch.device) -> None:
            assert device == GPU
            self.dim = right_ME.shape[1] - 2
            super().__init__(right_ME, column_S, torch.device("cpu"))

        def _multiplied(self, left_BE: torch.Tensor, right_CE: torch.Tensor) -> torch.Tensor:
            assert left_BE.shape[1] % 4 == right_CE.shape[1] % 4 == 0
            asked.append((len(left_BE), len(right_CE)))
            exact_BC = left_BE.double() @ right_CE.double().T
            half_BC = left_BE[:, self.dim, None].double() - right_CE[:, self.dim + 1].double()
            sign_BC = torch.from_numpy(rng.choice([-1.0, 1.0], exact_BC.shape))
            return (exact_BC + sign_BC * (share * error_of(self.dim)) * half_BC).float()

    monkeypatch.setattr(NEIGHBOURS, "DeviceProduct", Perturbed)
    monkeypatch.setattr(NEIGHBOURS, "_TILE", 32)
    monkeypatch.setattr(NEIGHBOURS, "_SMALL_GALLERY", 200)
    monkeypatch.setattr(NEIGHBOURS, "_FEWEST_SAMPLED", 100)
    monkeypatch.setattr(NEIGHBOURS, "_HITS_AT_ONCE", 4000)
    monkeypatch.setattr(sys.modules["dmlstudy.retrieval.device_products"], "_CELLS", 32 * 100)
    return asked


def error_of(dim: int) -> float:
    """The bound over |q|^2/2 + |g|^2/2, as it is proven."""
    return 2 * (3 * dim + 16) * 2.0**-24


def made(hard: str) -> np.ndarray:
    z_ND = np.random.default_rng(0).normal(size=(437, 9)).astype(np.float32)
    return HARD[hard](z_ND).astype(np.float32)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("k", [1, 5, 30])
@pytest.mark.parametrize("hard", HARD)
def test_an_error_within_the_bound_changes_no_digit(
    monkeypatch: pytest.MonkeyPatch, hard: str, k: int, num_threads: int
) -> None:
    z_ND = made(hard)
    queries = np.arange(300, 100, -3)
    expected = retrieval.retrieve(z_ND, z_ND, k, np.arange(437))
    expected_of_some = retrieval.retrieve(z_ND[queries], z_ND, k, queries)
    asked = standing_in(monkeypatch, SHARE)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        parts = list(retrieval.in_itself(z_ND, k, device=GPU))
        found_of_some = retrieval.retrieve(z_ND[queries], z_ND, k, queries, device=GPU)
    finally:
        torch.set_num_threads(before)
    assert asked, "the device was not asked"
    np.testing.assert_array_equal(np.concatenate([part.index_QK for part in parts]), expected[0])
    np.testing.assert_array_equal(np.concatenate([part.distance_QK for part in parts]), expected[1])
    for found, wanted in zip(found_of_some, expected_of_some, strict=True):
        np.testing.assert_array_equal(found, wanted)


def again(z_ND: np.ndarray, device: torch.device | None) -> retrieval.Reranker:
    encodings = retrieval.KReciprocal(z_ND, 6, 3, device=device)
    return lambda row_Q, index_QK: encodings.order(row_Q, index_QK, 10)


SCORES: dict[str, Callable[[np.ndarray, np.ndarray, torch.device | None], object]] = {
    "evaluate": lambda z, y, device: retrieval.evaluate(
        z, y, macro=True, map_at=[(9, "found")], device=device
    ),
    "query and gallery": lambda z, y, device: retrieval.gallery_scores(
        z[:150], y[:150], z[150:], y[150:], device=device
    ).means(),
    "rank": lambda z, y, device: {
        name: scores.means()
        for name, scores in retrieval.rank(
            z, y, {"again": again(z, device)}, 10, device=device
        ).scores.items()
    },
}


@pytest.mark.parametrize("scored", SCORES)
@pytest.mark.parametrize("hard", ["spread", "nearly collapsed", "on an arc", "with copies"])
def test_metrics_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch, hard: str, scored: str) -> None:
    z_ND, labels_N = made(hard), np.arange(437) // 7
    on_cpu = SCORES[scored](z_ND, labels_N, None)
    assert SCORES[scored](z_ND, labels_N, torch.device("cpu")) == on_cpu
    asked = standing_in(monkeypatch, SHARE)
    assert SCORES[scored](z_ND, labels_N, GPU) == on_cpu
    assert asked


def test_an_error_beyond_the_bound_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours on an arc are nearer to each other than such an error."""
    z_ND = made("on an arc")
    expected = retrieval.retrieve(z_ND, z_ND, 5, np.arange(437))[0]
    standing_in(monkeypatch, 4.0)
    found = retrieval.retrieve(z_ND, z_ND, 5, np.arange(437), device=GPU)[0]
    assert (found != expected).any(axis=1).mean() > 0.05


@pytest.mark.parametrize("hard", HARD)
def test_the_stand_in_is_within_the_bound_and_near_it(monkeypatch: pytest.MonkeyPatch, hard: str) -> None:
    z_ND = made(hard)
    standing_in(monkeypatch, SHARE)
    product = NEIGHBOURS._Product(z_ND, z_ND, np.full(437, -1), num_sampled=50, rank=3, device=GPU)
    rows, columns = np.divmod(np.arange(437 * 437), 437)
    direct_NN = NEIGHBOURS._direct(z_ND, z_ND, rows, columns).reshape(437, 437).astype(np.float64)
    centred_ND = (z_ND - z_ND.mean(axis=0, dtype=np.float64).astype(np.float32)).astype(np.float64)
    half_N = (centred_ND**2).sum(axis=1) / 2
    bound_NN = product.error * (half_N[:, None] + half_N)
    for start in range(0, 437, 32):
        floor_B = np.full(min(32, 437 - start), -np.inf, np.float32)
        for row_H, item_H, value_H in product.above(start, floor_B):
            off_H = np.abs(value_H.astype(np.float64) + direct_NN[start + row_H, item_H] / 2)
            assert (off_H <= bound_NN[start + row_H, item_H]).all()
            near_H = off_H >= 0.5 * bound_NN[start + row_H, item_H]
            assert near_H.mean() > 0.9


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("hard", HARD)
def test_a_gpu_changes_no_digit(monkeypatch: pytest.MonkeyPatch, hard: str) -> None:
    z_ND = made(hard)
    monkeypatch.setattr(NEIGHBOURS, "_SMALL_GALLERY", 200)
    monkeypatch.setattr(NEIGHBOURS, "_FEWEST_SAMPLED", 100)
    on_cpu = retrieval.retrieve(z_ND, z_ND, 5, np.arange(437))
    for found, wanted in zip(
        retrieval.retrieve(z_ND, z_ND, 5, np.arange(437), device=GPU), on_cpu, strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
