"""Search by hyperbolic distance: exact, ties by index, against plain loops and against the losses' distance."""

from __future__ import annotations

import sys

import faiss
import numpy as np
import pytest
import torch

from dmlstudy import retrieval
from dmlstudy.embedders import on_ball
from dmlstudy.losses.distances import Hyperbolic

CURVATURES = [0.1, 1.0, 7.0]


def points(rows: int, dim: int, curvature: float, seed: int = 0) -> np.ndarray:
    """Points from the middle to the rim, some of them twice."""
    rng = np.random.default_rng(seed)
    v_ND = rng.normal(size=(rows, dim)) * rng.uniform(0.1, 2, (rows, 1))
    z_ND = on_ball(torch.from_numpy(v_ND), curvature, 2.3).numpy().astype(np.float32)
    z_ND[rows // 2 : rows // 2 + rows // 8] = z_ND[3]
    return z_ND


def plain(query_QD: np.ndarray, gallery_MD: np.ndarray, curvature: float) -> np.ndarray:
    x, y = query_QD.astype(np.float64)[:, None], gallery_MD.astype(np.float64)[None]
    lambdas = (1 - curvature * (x**2).sum(2)) * (1 - curvature * (y**2).sum(2))
    return 2 / np.sqrt(curvature) * np.arcsinh(np.sqrt(curvature * ((x - y) ** 2).sum(2) / lambdas))


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("k", [1, 5, 120, 200])
@pytest.mark.parametrize("with_self", [False, True])
def test_retrieve_is_the_sorted_list(
    monkeypatch: pytest.MonkeyPatch, curvature: float, k: int, with_self: bool
) -> None:
    module = sys.modules["dmlstudy.retrieval.neighbours"]
    monkeypatch.setattr(module, "_TILE", 32)
    monkeypatch.setattr(module, "_CELLS_PER_CHUNK", 1000)
    gallery = points(120, 6, curvature)
    query = gallery[20:70] if with_self else points(50, 6, curvature, seed=1)
    itself = np.arange(20, 70) if with_self else None
    index_QK, distance_QK = retrieval.retrieve(query, gallery, k, itself, curvature=curvature)
    assert index_QK.shape == distance_QK.shape == (50, min(k, 120 - with_self))
    assert (index_QK.dtype, distance_QK.dtype) == (np.int64, np.float32)
    wanted_QM = plain(query, gallery, curvature)
    if itself is not None:
        wanted_QM[np.arange(50), itself] = np.inf
    order_QK = np.argsort(wanted_QM, axis=1, kind="stable")[:, : index_QK.shape[1]]
    np.testing.assert_array_equal(index_QK, order_QK)
    np.testing.assert_allclose(distance_QK, np.take_along_axis(wanted_QM, order_QK, 1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("k", [1, 30, 436])
@pytest.mark.parametrize("kind", ["spread", "collapsed", "nearly collapsed", "at the rim", "on an arc"])
def test_the_product_finds_what_the_direct_kernel_ranks(
    monkeypatch: pytest.MonkeyPatch, kind: str, k: int
) -> None:
    monkeypatch.setattr(sys.modules["dmlstudy.retrieval.neighbours"], "_TILE", 32)
    curvature = 1.0
    z = points(437, 9, curvature)
    if kind in ("collapsed", "nearly collapsed"):
        z = 0.5 + (1e-6 * z if kind == "nearly collapsed" else 0 * z)
        z = (z / 2).astype(np.float32)
    if kind == "at the rim":
        z *= 0.999 / np.linalg.norm(z, axis=1, keepdims=True)
    if kind == "on an arc":
        angle = np.linspace(0, 1, len(z))
        z = 0.9 * np.stack([np.cos(angle), np.sin(angle), *np.zeros((7, len(z)))], axis=1).astype(np.float32)
        z = z.astype(np.float32)
    rows, columns = np.divmod(np.arange(437 * 437), 437)
    direct = np.empty(437 * 437, np.float32)
    pointers = [faiss.swig_ptr(a) for a in (z, rows, z, columns, direct)]
    faiss.pairwise_indexed_L2sqr(9, len(rows), *pointers)
    square_N = np.einsum("nd,nd->n", z.astype(np.float64), z.astype(np.float64))
    key_NN = (direct.reshape(437, 437) / (1 - curvature * square_N)).astype(np.float32)
    np.fill_diagonal(key_NN, np.inf)
    expected = np.argsort(key_NN, axis=1, kind="stable")[:, :k]
    parts = list(retrieval.in_itself(z, k, curvature=curvature))
    agreed = np.concatenate([part.index_QK for part in parts]) == expected
    assert agreed.all()


def test_it_is_the_losses_distance() -> None:
    z_ND = points(40, 6, 0.1)
    index_QK, distance_QK = retrieval.retrieve(z_ND, z_ND, 40, curvature=0.1)
    z = torch.from_numpy(z_ND).double()
    of_loss_QK = Hyperbolic(0.1)(z, z).numpy()[np.arange(40)[:, None], index_QK]
    np.testing.assert_allclose(distance_QK, of_loss_QK, rtol=1e-5, atol=3e-6)  # the loss has a floor
    pairs = retrieval.hyperbolic_distances(z_ND.repeat(40, 0), z_ND[index_QK.ravel()], 0.1)
    np.testing.assert_allclose(distance_QK.ravel(), pairs, rtol=1e-5, atol=1e-7)


def test_metrics_are_those_of_its_order() -> None:
    """The order is another than the Euclidean one, and both of the set's forms score it alike."""
    z_ND, labels_N = points(90, 3, 1.0), np.arange(90) % 5
    found = retrieval.evaluate(z_ND, labels_N, (1, 4), curvature=1.0)
    assert found != retrieval.evaluate(z_ND, labels_N, (1, 4))
    ranked = retrieval.rank(z_ND, labels_N, {}, 1, (1, 4), curvature=1.0)
    assert ranked.scores["none"].means() == found
    split = retrieval.rank(
        z_ND, labels_N, {}, 1, (1, 4), query=np.arange(90), gallery=np.arange(90), curvature=1.0
    )
    assert split.scores["none"].means()["map_at_r"] == pytest.approx(found["map_at_r"], abs=0.02)
    separate = retrieval.gallery_scores(
        z_ND, labels_N, z_ND, labels_N, (1, 4), self_index=np.arange(90), curvature=1.0
    ).means()
    assert separate == split.scores["none"].means()


def test_points_outside_the_ball_are_refused() -> None:
    z_ND = points(10, 3, 1.0)
    z_ND[4] = 1.0
    with pytest.raises(
        ValueError, match=r"gallery embedding 4 has the norm 1\.73.* outside the ball of curvature 1"
    ):
        retrieval.retrieve(z_ND[:3], z_ND, 2, curvature=1.0)
    with pytest.raises(ValueError, match="query embedding 4 "):
        retrieval.retrieve(z_ND, z_ND[:3], 2, curvature=1.0)
