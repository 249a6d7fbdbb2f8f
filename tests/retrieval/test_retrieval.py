"""Retrieval and its metrics against loops in plain Python, with ties, duplicates and large labels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import faiss
import numpy as np
import pytest
import torch
from support.hard_sets import HARD, on_an_arc

from dmlstudy import retrieval


def grid(rows: int, dim: int, seed: int, values: int = 3) -> np.ndarray:
    """Small integers: distances are exact in float32, so ties and duplicates abound."""
    return np.random.default_rng(seed).integers(0, values, (rows, dim)).astype(np.float32)


def rank(query: np.ndarray, gallery: np.ndarray, itself: int | None) -> list[tuple[float, int]]:
    distances = [(float(((query - g).astype(np.float64) ** 2).sum()), i) for i, g in enumerate(gallery)]
    return sorted(pair for pair in distances if pair[1] != itself)


def scores(relevant: list[bool], num_relevant: int) -> dict[str, float]:
    def precision_sum(ranks: int) -> float:
        return sum(sum(relevant[:k]) / k for k in range(1, ranks + 1) if relevant[k - 1])

    if num_relevant == 0:
        return {"map_at_r": 0.0, "r_precision": 0.0, "map": 0.0}
    return {
        "map_at_r": precision_sum(num_relevant) / num_relevant,
        "r_precision": sum(relevant[:num_relevant]) / num_relevant,
        "map": precision_sum(len(relevant)) / num_relevant,
    }


@pytest.mark.parametrize("dim", [1, 2, 5])
@pytest.mark.parametrize("k", [1, 3, 39, 200])
@pytest.mark.parametrize("with_self", [False, True])
def test_retrieve_is_the_sorted_list(dim: int, k: int, with_self: bool) -> None:
    gallery = grid(60, dim, seed=dim)
    query = gallery[10:35] if with_self else grid(25, dim, seed=9)
    itself = np.arange(10, 35) if with_self else None
    index, distance = retrieval.retrieve(query, gallery, k, itself)
    assert index.shape == distance.shape == (25, min(k, 60 - with_self))
    assert (index.dtype, distance.dtype) == (np.int64, np.float32)
    for q in range(25):
        expected = rank(query[q], gallery, q + 10 if with_self else None)[: index.shape[1]]
        assert index[q].tolist() == [i for _, i in expected]
        np.testing.assert_allclose(distance[q], np.sqrt([d for d, _ in expected]), rtol=1e-6)


@pytest.fixture(params=[1, 4], ids=lambda n: f"{n} threads")
def small_tiles(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """So that a few hundred items go the way of a large set: product, sample, panels, tiles that are ragged."""
    module = sys.modules["dmlstudy.retrieval.neighbours"]
    monkeypatch.setattr(module, "_TILE", 32)
    monkeypatch.setattr(module, "_SMALL_GALLERY", 200)
    monkeypatch.setattr(module, "_FEWEST_SAMPLED", 100)
    monkeypatch.setattr(module, "_HITS_AT_ONCE", 4000)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    assert torch.get_num_threads() == request.param, "a call has changed torch's number of threads"
    torch.set_num_threads(before)


def in_itself(z: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    parts = list(retrieval.in_itself(z, k))
    assert np.concatenate([part.row_Q for part in parts]).tolist() == list(range(len(z)))
    return np.concatenate([p.index_QK for p in parts]), np.concatenate([p.distance_QK for p in parts])


@pytest.mark.parametrize("many_copies", [2, 60, 1000])
@pytest.mark.parametrize("k", [1, 5, 30, 436])
@pytest.mark.parametrize("hard", HARD)
def test_the_product_finds_what_the_direct_kernel_ranks(
    small_tiles: None, monkeypatch: pytest.MonkeyPatch, hard: str, k: int, many_copies: int
) -> None:
    monkeypatch.setattr(sys.modules["dmlstudy.retrieval.neighbours"], "_MANY_COPIES", many_copies)
    monkeypatch.setattr(sys.modules["dmlstudy.retrieval.neighbours"], "_CELLS_PER_CHUNK", 4000)
    z = HARD[hard](np.random.default_rng(0).normal(size=(437, 9)).astype(np.float32)).astype(np.float32)
    rows, columns = np.divmod(np.arange(437 * 437), 437)
    direct = np.empty(437 * 437, np.float32)
    pointers = [faiss.swig_ptr(a) for a in (z, rows, z, columns, direct)]
    faiss.pairwise_indexed_L2sqr(9, len(rows), *pointers)
    direct = direct.reshape(437, 437)
    np.fill_diagonal(direct, np.inf)
    expected = np.argsort(direct, axis=1, kind="stable")[:, :k]
    index, distance = in_itself(z, k)
    np.testing.assert_array_equal(index, expected)
    np.testing.assert_array_equal(distance, np.sqrt(np.take_along_axis(direct, expected, axis=1)))
    np.testing.assert_array_equal(retrieval.retrieve(z, z, k, np.arange(437))[0], expected)
    queries = np.arange(300, 100, -3)
    np.testing.assert_array_equal(retrieval.retrieve(z[queries], z, k, queries)[0], expected[queries])


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        (lambda z: z, 0.05),
        (lambda z: z * (np.arange(len(z)) % 2)[:, None], 0.05),  # a collapse: thousands of items on one place
        (lambda z: z * np.where(np.arange(len(z)) % 500, 1, 300)[:, None], 0.05),  # some lie far off
        (on_an_arc, 0.1),
    ],
    ids=["ordinary", "half dead", "far off", "on an arc"],
)
def test_few_pairs_are_measured(
    monkeypatch: pytest.MonkeyPatch, shape: Callable[[np.ndarray], np.ndarray], most: float
) -> None:
    """For it is the product that makes this fast."""
    module, measured = sys.modules["dmlstudy.retrieval.neighbours"], []
    whole = module._direct
    monkeypatch.setattr(
        module, "_direct", lambda q, g, row, item: measured.append(len(row)) or whole(q, g, row, item)
    )
    z = shape(np.random.default_rng(0).normal(size=(6000, 9))).astype(np.float32)
    index, _ = in_itself(z, 5)
    assert 6000 <= sum(measured) < most * 6000**2
    assert (retrieval.retrieve(z, z, 5, np.arange(6000))[0] == index).all()
    assert sum(measured) < 2 * most * 6000**2
    direct = whole(z, z, np.full(6000, 7), np.arange(6000))
    direct[7] = np.inf
    assert index[7].tolist() == np.argsort(direct, kind="stable")[:5].tolist()


def test_vectors_of_one_hash_are_not_taken_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["dmlstudy.retrieval.neighbours"]
    z = np.random.default_rng(0).normal(size=(900, 5)).astype(np.float32)
    z[:600] = z[0]
    expected = in_itself(z, 4)[0]
    monkeypatch.setattr(module, "_hashed", lambda z_ND: np.zeros(len(z_ND), np.uint64))
    np.testing.assert_array_equal(in_itself(z, 4)[0], expected)


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_for_the_product(seed: int) -> None:
    module = sys.modules["dmlstudy.retrieval.neighbours"]
    rng = np.random.default_rng(seed)
    z = (rng.normal(size=(400, [3, 128, 700][seed])) * rng.exponential(size=(400, 1))).astype(np.float32)
    product = module._Product(z, z, np.full(400, -1), num_sampled=50, rank=3)
    tile = product.tile(0, num_rows=400, column=0).astype(np.float64)
    rows, columns = np.divmod(np.arange(400 * 400), 400)
    direct = module._direct(z, z, rows, columns).reshape(400, 400) / 2
    centred = z - z.mean(axis=0, dtype=np.float64)
    half = (centred**2).sum(axis=1) / 2
    exact = ((centred[:, None] - centred) ** 2).sum(axis=2) / 2
    bound = product.error * (half[:, None] + half)
    assert (np.abs(tile + exact) + np.abs(exact - direct) < bound).all()
    last = np.partition(tile.astype(np.float32), 395, axis=1)[:, 395]
    of_row = product.errors(0, last)
    is_near = (exact <= -last[:, None] + of_row[:, None]) | (tile >= last[:, None])
    assert (bound <= of_row[:, None])[
        is_near
    ].all()  # so it is a bound for all that may be of the nearest five
    assert of_row.min() < product.error * 2 * half.max() / 3


def test_equal_vectors_tie_exactly_wherever_they_stand() -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=(7, 65)).astype(np.float32)
    copy_of = rng.integers(0, 7, 2003)
    gallery = points[copy_of]
    index, distance = retrieval.retrieve(points, gallery, 40)
    for q in range(7):
        same = np.flatnonzero((gallery == points[q]).all(axis=1))
        assert index[q].tolist() == same[:40].tolist()
    assert (distance == 0).all()
    query = rng.normal(size=(300, 65)).astype(np.float32)
    index, distance = retrieval.retrieve(query, gallery, 2003)
    for q in range(300):
        assert len(np.unique(distance[q])) <= 7
        blocks = np.split(index[q], np.flatnonzero(np.diff(copy_of[index[q]])) + 1)
        assert all((np.diff(block) > 0).all() for block in blocks)


def test_a_collapsed_embedding_ranks_by_index() -> None:
    index, _ = retrieval.retrieve(np.ones((4, 3), np.float32), np.ones((500, 3), np.float32), 3, np.arange(4))
    assert index.tolist() == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


def test_self_goes_by_index_and_may_be_absent() -> None:
    gallery = np.array([[0.0], [0.0], [1.0]], np.float32)
    index, _ = retrieval.retrieve(gallery, gallery, 2, np.array([0, 1, -1]))
    assert index.tolist() == [[1, 2], [0, 2], [2, 0]]


@pytest.mark.parametrize("k", [1, 5, 6, 7, 9])
def test_a_query_in_the_gallery_has_one_item_less_than_one_outside(k: int) -> None:
    """Nobody is cut off for another's sake: at k = 7, the gallery's size, those inside end in -1."""
    gallery, outside = grid(7, 2, seed=1), grid(3, 2, seed=2)
    query, itself = np.concatenate([gallery[[4, 0]], outside]), np.array([4, 0, -1, -1, -1])
    index, distance = retrieval.retrieve(query, gallery, k, itself)
    assert index.shape == distance.shape == (5, min(k, 7))
    for q in range(5):
        expected = rank(query[q], gallery, itself[q])[:k]
        missing = index.shape[1] - len(expected)
        assert index[q].tolist() == [i for _, i in expected] + [-1] * missing
        np.testing.assert_allclose(distance[q], np.sqrt([d for d, _ in expected] + [np.inf] * missing))
    all_inside, _ = retrieval.retrieve(gallery, gallery, k, np.arange(7))
    all_outside, _ = retrieval.retrieve(outside, gallery, k, np.full(3, -1))
    assert (all_inside.shape[1], all_outside.shape[1]) == (min(k, 6), min(k, 7))
    assert (all_inside >= 0).all()


def test_chunks_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    z, labels = grid(50, 2, seed=3), np.random.default_rng(3).integers(0, 6, 50)
    whole, whole_scores = retrieval.retrieve(z, z, 7, np.arange(50)), retrieval.evaluate(z, labels)
    monkeypatch.setattr(sys.modules["dmlstudy.retrieval.neighbours"], "_CELLS_PER_CHUNK", 131)
    np.testing.assert_array_equal(whole[0], retrieval.retrieve(z, z, 7, np.arange(50))[0])
    assert whole_scores == retrieval.evaluate(z, labels)


@pytest.mark.parametrize("seed", range(8))
def test_metrics_are_the_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, labels = grid(40, 3, seed), rng.integers(0, [2, 5, 15, 60][seed % 4], 40)
    result = retrieval.evaluate(z, labels, recall_at=(1, 2, 5, 100))
    among_ties = retrieval.tie_order(40).tolist()
    ranked = [
        sorted((i for i in among_ties if i != q), key=lambda i: float(((z[q] - z[i]) ** 2).sum()))
        for q in range(40)
    ]
    relevant = [[bool(labels[i] == labels[q]) for i in ranked[q]] for q in range(40)]
    counts = np.array([sum(r) for r in relevant])
    expected = [scores(r, sum(r)) for r in relevant]

    def mean(key: str) -> float:
        return float(np.mean([e[key] for e in expected]))

    for k in (1, 2, 5, 100):
        assert result[f"recall_at_{k}"] == pytest.approx(np.mean([any(r[:k]) for r in relevant]))
    assert result["map_at_r"] == pytest.approx(mean("map_at_r"))
    assert result["r_precision"] == pytest.approx(mean("r_precision"))
    assert result["map_at_r"] <= result["r_precision"] + 1e-12
    assert result["num_queries_without_positive"] == (counts == 0).sum()
    full = retrieval.mean_average_precision(labels[np.array(ranked)], labels, counts)
    np.testing.assert_allclose(full, [e["map"] for e in expected])


def test_full_map_is_scikit_learns() -> None:
    from sklearn.metrics import average_precision_score

    rng = np.random.default_rng(0)
    z, labels = rng.normal(size=(30, 4)).astype(np.float32), np.repeat(np.arange(5), 6)
    index, distance = retrieval.retrieve(z, z, 29, np.arange(30))
    ours = retrieval.mean_average_precision(labels[index], labels, np.full(30, 5))
    theirs = [average_precision_score(labels[index[q]] == labels[q], -distance[q]) for q in range(30)]
    np.testing.assert_allclose(ours, theirs)


def test_perfect_and_hopeless_rankings() -> None:
    labels = np.repeat([0, 1], 5)
    good = np.repeat([[0.0], [9.0]], 5, axis=0).astype(np.float32)
    assert retrieval.evaluate(good, labels, (1,)) == {
        "recall_at_1": 1.0,
        "map_at_r": 1.0,
        "r_precision": 1.0,
        "num_queries_without_positive": 0.0,
    }
    alone = retrieval.evaluate(good, np.arange(10), (1, 2))
    assert alone["recall_at_2"] == alone["map_at_r"] == alone["r_precision"] == 0
    assert alone["num_queries_without_positive"] == 10


def test_a_collapsed_model_gains_nothing_from_data_sorted_by_class() -> None:
    labels = np.repeat(np.arange(10), 60)
    z, reference = np.ones((600, 4), np.float32), {"same": lambda _, index: index}
    places = np.arange(600)
    by_index = np.stack([np.delete(labels, q) for q in range(600)])
    assert retrieval.mean_average_precision(by_index, labels, np.full(600, 59)).mean() > 0.2
    found = (
        retrieval.evaluate(z, labels, full_map=True),
        retrieval.gallery_scores(z, labels, z, labels, self_index=places, full_map=True).means(),
        *retrieval.compare(z, labels, reference, 600, full_map=True).values(),
        *retrieval.compare(z, labels, reference, 600, query=places, gallery=places, full_map=True).values(),
    )
    for scores in found:
        assert scores["map"] == pytest.approx(0.1, abs=0.015)


def test_labels_beyond_float32_stay_apart() -> None:
    labels = np.array([2**24, 2**24 + 1, 2**24, 2**24 + 1])
    z = np.array([[0.0], [0.1], [5.0], [5.1]], np.float32)  # nearest neighbours are of the other class
    assert retrieval.evaluate(z, labels, (1,))["recall_at_1"] == 0.0
    assert retrieval.recall_at_k(np.array([[2**53 + 1]]), np.array([2**53]), 1).tolist() == [0.0]


def test_permuting_a_set_without_ties_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    z, labels = rng.normal(size=(60, 8)).astype(np.float32), rng.integers(0, 7, 60)
    order = rng.permutation(60)
    first, second = retrieval.evaluate(z, labels), retrieval.evaluate(z[order], labels[order])
    assert first == pytest.approx(second)


def test_a_ranking_too_short_is_refused() -> None:
    ranked, labels, counts = np.array([[1, 1]]), np.array([1]), np.array([3])
    for metric in (retrieval.map_at_r, retrieval.r_precision):
        with pytest.raises(ValueError, match="3 relevant items, the ranking holds 2"):
            metric(ranked, labels, counts)
    with pytest.raises(ValueError, match="full ranking"):
        retrieval.mean_average_precision(ranked, labels, counts)


def test_faults_are_named() -> None:
    z = np.zeros((4, 2), np.float32)
    bad = z.copy()
    bad[2, 1] = np.nan
    with pytest.raises(ValueError, match="gallery embedding 2 is not finite"):
        retrieval.retrieve(z, bad, 1)
    with pytest.raises(ValueError, match="2 is not finite"):
        retrieval.evaluate(bad, np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="2 dimensions, the gallery 3"):
        retrieval.retrieve(z, np.zeros((4, 3), np.float32), 1)
    with pytest.raises(ValueError, match="k = 0"):
        retrieval.retrieve(z[:1], z[:1], 1, np.array([0]))
    with pytest.raises(ValueError, match="at least 2"):
        retrieval.evaluate(z[:1], np.zeros(1, np.int64))


@pytest.mark.parametrize("first", ["torch", "dmlstudy.retrieval"])
def test_torch_and_faiss_live_in_one_process(first: str) -> None:
    code = f"""
import os
os.environ["OMP_NUM_THREADS"] = "2"
import {first}, torch, faiss, numpy as np
from dmlstudy import retrieval
z = torch.randn(300, 16)
for _ in range(3):
    z = torch.nn.functional.normalize(z @ torch.randn(16, 16), dim=1)
    index, _ = retrieval.retrieve(z.numpy(), z.numpy(), 5, np.arange(300))
assert faiss.omp_get_max_threads() == 2 and torch.get_num_threads() == 2
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
