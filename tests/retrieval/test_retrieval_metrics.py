"""Metrics beyond one label per item in one set: MAP@k and its denominators, label sets, query and gallery, clusters."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from sklearn.cluster import KMeans
from sklearn.metrics.cluster import pair_confusion_matrix

from dmlstudy import retrieval

LABEL_SETS = {"one": 1, "sets": 11}


def data(num_items: int, labels_each: int, seed: int) -> tuple[np.ndarray, np.ndarray, list[set[int]]]:
    """Embeddings, labels as the package takes them, and the same labels as Python sets."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(num_items, 3)).astype(np.float32)
    if labels_each == 1:
        labels = rng.integers(0, 6, num_items)
        return z, labels, [{int(label)} for label in labels]
    has = rng.random((num_items, labels_each)) < 0.15
    return z, retrieval.pack_labels(has), [set(np.flatnonzero(row).tolist()) for row in has]


def ranked(z: np.ndarray, gallery: np.ndarray, itself: int | None) -> list[int]:
    distances = [(float(((z - g).astype(np.float64) ** 2).sum()), i) for i, g in enumerate(gallery)]
    return [i for _, i in sorted(distances) if i != itself]


def average_precision(hits: list[bool], among: int) -> float:
    return sum(sum(hits[:i]) / i for i in range(1, len(hits) + 1) if hits[i - 1]) / max(among, 1)


@pytest.mark.parametrize("kind", LABEL_SETS)
@pytest.mark.parametrize("k", [1, 4, 20, 500])
def test_map_at_k_is_the_loop_under_each_denominator(kind: str, k: int) -> None:
    z, labels, sets = data(45, LABEL_SETS[kind], seed=1)
    index, _ = retrieval.retrieve(z, z, 44, np.arange(45))
    counts = retrieval.count_relevant(labels, labels, np.arange(45))
    hits = [[bool(sets[q] & sets[i]) for i in ranked(z[q], z, q)] for q in range(45)]
    assert counts.tolist() == [sum(row) for row in hits]
    assert counts.dtype == np.int64
    among = {
        "found": [sum(row[:k]) for row in hits],
        "relevant": [sum(row) for row in hits],
        "reachable": [min(sum(row), k) for row in hits],
    }
    for denominator, sizes in among.items():
        ours = retrieval.map_at_k(labels[index], labels, counts, k, denominator)  # type: ignore[arg-type]
        np.testing.assert_allclose(
            ours, [average_precision(r[:k], n) for r, n in zip(hits, sizes, strict=True)]
        )
    full = retrieval.mean_average_precision(labels[index], labels, counts)
    np.testing.assert_allclose(retrieval.map_at_k(labels[index], labels, counts, 44, "relevant"), full)


def test_the_denominators_differ_and_found_is_the_largest() -> None:
    ranking, label, counts = np.array([[1, 0, 1, 0, 1]]), np.array([1]), np.array([3])
    at_2 = {
        d: float(retrieval.map_at_k(ranking, label, counts, 2, d)[0])
        for d in ("found", "reachable", "relevant")
    }
    assert at_2 == pytest.approx({"found": 1.0, "reachable": 1 / 2, "relevant": 1 / 3})


@pytest.mark.parametrize("kind", LABEL_SETS)
def test_one_evaluation_gives_every_metric(kind: str) -> None:
    z, labels, sets = data(60, LABEL_SETS[kind], seed=2)
    is_one = kind == "one"
    found = retrieval.evaluate(z, labels, (1, 3), map_at=((7, "found"),), full_map=True, macro=is_one)
    hits = [[bool(sets[q] & sets[i]) for i in ranked(z[q], z, q)] for q in range(60)]
    expected = {
        "recall_at_3": [float(any(r[:3])) for r in hits],
        "r_precision": [sum(r[: sum(r)]) / max(sum(r), 1) for r in hits],
        "map_at_r": [average_precision(r[: sum(r)], sum(r)) for r in hits],
        "map": [average_precision(r, sum(r)) for r in hits],
        "map_at_7_of_found": [average_precision(r[:7], sum(r[:7])) for r in hits],
    }
    for name, values in expected.items():
        assert found[name] == pytest.approx(np.mean(values))
        if is_one:
            means = [np.mean(np.array(values)[labels == c]) for c in np.unique(labels)]
            assert found[f"macro_{name}"] == pytest.approx(np.mean(means))
    assert found["num_queries_without_positive"] == sum(not any(r) for r in hits)


def test_macro_is_not_micro_and_queries_may_be_dropped() -> None:
    values, labels = np.array([1.0, 1.0, 1.0, 0.0]), np.array([0, 0, 0, 2**53 + 1])
    assert retrieval.micro_mean(values) == 0.75
    assert retrieval.macro_mean(values, labels) == 0.5
    keep = values > 0
    assert retrieval.micro_mean(values, keep) == retrieval.macro_mean(values, labels, keep) == 1.0
    assert retrieval.micro_mean(values, values > 2) == retrieval.macro_mean(values, labels, values > 2) == 0.0
    with pytest.raises(ValueError, match="one label per query"):
        retrieval.macro_mean(values, np.ones((4, 1), np.uint8))


def test_queries_against_a_gallery_apart() -> None:
    rng = np.random.default_rng(0)
    query, gallery = rng.normal(size=(20, 3)).astype(np.float32), rng.normal(size=(50, 3)).astype(np.float32)
    query_labels, gallery_labels = rng.integers(0, 9, 20), rng.integers(0, 7, 50)
    found = retrieval.gallery_scores(
        query, query_labels, gallery, gallery_labels, (1, 10), full_map=True
    ).means()
    hits = [
        [bool(gallery_labels[i] == query_labels[q]) for i in ranked(query[q], gallery, None)]
        for q in range(20)
    ]
    assert found["recall_at_10"] == pytest.approx(np.mean([any(r[:10]) for r in hits]))
    assert found["map_at_r"] == pytest.approx(np.mean([average_precision(r[: sum(r)], sum(r)) for r in hits]))
    assert found["map"] == pytest.approx(np.mean([average_precision(r, sum(r)) for r in hits]))
    assert found["num_queries_without_positive"] == sum(not any(r) for r in hits) > 0
    together = retrieval.gallery_scores(
        gallery, gallery_labels, gallery, gallery_labels, self_index=np.arange(50)
    ).means()
    whole = retrieval.evaluate(gallery, gallery_labels, (1, 10, 20, 30))
    assert together == pytest.approx(whole, rel=1e-12)


def test_a_query_that_shares_no_label_with_itself_counts_no_self() -> None:
    labels = retrieval.pack_labels(np.array([[0, 0], [1, 0], [1, 1]], bool))
    assert retrieval.count_relevant(labels, labels, np.arange(3)).tolist() == [0, 1, 1]


def test_metric_faults_are_named() -> None:
    ranking, label, counts = np.array([[1, 1]]), np.array([1]), np.array([3])
    with pytest.raises(ValueError, match="retrieve more"):
        retrieval.map_at_k(ranking, label, counts, 5, "relevant")
    with pytest.raises(ValueError, match="choose from found, relevant, reachable"):
        retrieval.map_at_k(ranking, label, counts, 2, "other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k must be at least 1"):
        retrieval.map_at_k(ranking, label, counts, 0, "found")
    with pytest.raises(ValueError, match="labels of type float32"):
        retrieval.recall_at_k(ranking, label.astype(np.float32), 1)
    with pytest.raises(ValueError, match="both have label sets"):
        retrieval.count_relevant(label, np.ones((1, 1), np.uint8))
    with pytest.raises(ValueError, match="0 queries"):
        retrieval.gallery_scores(np.ones((0, 2)), np.ones(0, int), np.ones((1, 2)), np.ones(1, int)).means()


@pytest.mark.parametrize("seed", range(6))
def test_clusters_are_scored_as_scikit_learn_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, clusters = rng.integers(0, 1 + 3 * seed, 40), rng.integers(0, 5, 40) * (seed != 4)
    for mean in ("arithmetic", "geometric"):
        expected = reference.normalized_mutual_info_score(labels, clusters, average_method=mean)
        assert retrieval.nmi(labels, clusters, mean) == pytest.approx(expected)  # type: ignore[arg-type]
    (_, fp), (fn, tp) = pair_confusion_matrix(labels, clusters)
    assert retrieval.pair_f1(labels, clusters) == pytest.approx(2 * tp / max(1, 2 * tp + fp + fn))


def test_clusters_without_pairs_score_0() -> None:
    assert retrieval.pair_f1(np.arange(5), np.arange(5)) == 0.0


def cost_and_changes(z_ND: np.ndarray, cluster_N: np.ndarray) -> tuple[float, int]:
    """Sum of squared distances to the clusters' means, and how many items are nearer to another's; float64."""
    z_ND = z_ND.astype(np.float64)
    means_KD = np.stack([z_ND[cluster_N == c].mean(axis=0) for c in range(cluster_N.max() + 1)])
    squared_NK = np.square(z_ND[:, None] - means_KD).sum(axis=2)
    cost = squared_NK[np.arange(len(z_ND)), cluster_N].sum()
    return float(cost), int((squared_NK.argmin(axis=1) != cluster_N).sum())


@pytest.mark.parametrize(("num_items", "dim", "num_clusters"), [(400, 8, 12), (2000, 32, 50)])
def test_k_means_goes_on_until_no_item_changes_its_cluster(
    num_items: int, dim: int, num_clusters: int
) -> None:
    z_ND = np.random.default_rng(0).normal(size=(num_items, dim))
    z_ND /= np.linalg.norm(z_ND, axis=1, keepdims=True)
    cost, num_changes = cost_and_changes(z_ND, retrieval.k_means(z_ND, num_clusters))
    assert num_changes == 0
    theirs = KMeans(num_clusters, init="random", n_init=10, max_iter=1000, tol=0, random_state=0)
    assert cost == pytest.approx(theirs.fit(z_ND).inertia_, rel=0.01)
    early, num_changes = cost_and_changes(z_ND, retrieval.k_means(z_ND, num_clusters, num_steps=5))
    assert num_changes > 0
    assert early > cost


def test_k_means_finds_separate_classes_and_repeats_itself() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), 30)
    directions = np.linalg.qr(rng.normal(size=(16, 16)))[0][:8]
    z = ((directions[labels] + 0.05 * rng.normal(size=(240, 16))) * rng.uniform(1, 9, (240, 1))).astype(
        np.float32
    )
    found = retrieval.evaluate_clusters(z, labels)
    assert found == pytest.approx({"nmi": 1.0, "nmi_geometric": 1.0, "f1": 1.0})
    noise = rng.normal(size=(300, 16)).astype(np.float32)
    first = retrieval.k_means(noise, 9, seed=3, num_restarts=2)
    assert first.dtype == np.int64
    np.testing.assert_array_equal(first, retrieval.k_means(noise, 9, seed=3, num_restarts=2))
    assert (first != retrieval.k_means(noise, 9, seed=4, num_restarts=2)).any()
    with pytest.raises(ValueError, match="301 clusters of 300"):
        retrieval.k_means(noise, 301)


@pytest.mark.parametrize(
    ("device", "num_gpus", "asked"),
    [(None, 2, []), ("cpu", 2, []), ("cuda:1", 2, [1]), ("cuda", 2, [0]), ("cuda", 0, []), ("cuda:2", 2, [])],
)
def test_k_means_is_put_on_the_device_s_gpu_where_faiss_sees_it(
    monkeypatch: pytest.MonkeyPatch, device: str | None, num_gpus: int, asked: list[int]
) -> None:
    placed: list[int] = []
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: num_gpus)
    monkeypatch.setattr(faiss, "StandardGpuResources", lambda: "resources", raising=False)
    monkeypatch.setattr(
        faiss, "index_cpu_to_gpu", lambda _, number, index: placed.append(number) or index, raising=False
    )
    noise = np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32)
    there = None if device is None else torch.device(device)
    found = retrieval.k_means(noise, 9, seed=3, num_restarts=2, device=there)
    assert placed == asked
    np.testing.assert_array_equal(found, retrieval.k_means(noise, 9, seed=3, num_restarts=2))


@pytest.mark.parametrize("kind", ["one label", "label sets"])
def test_a_place_without_an_item_is_relevant_to_nobody(kind: str) -> None:
    """Also where the last item, on which a -1 would fall, is relevant to all."""
    rng = np.random.default_rng(0)
    if kind == "one label":
        label_Q, label_M = rng.integers(-2, 2, 6), rng.integers(-2, 2, 9)
        label_M[-1] = label_Q[0]
    else:
        label_Q, label_M = (retrieval.pack_labels(rng.random((rows, 10)) < 0.3) for rows in (6, 9))
        label_M[-1] = 255
    ranking = np.stack([rng.permutation(8) for _ in range(6)])
    filled = np.column_stack([ranking, np.full((6, 3), -1)])
    num_relevant = retrieval.count_relevant(label_Q, label_M[:8])
    few, many = (
        retrieval.score(
            [(np.arange(6), index)], label_Q, label_M, num_relevant, (1, 11), ((11, "found"),), full_map=True
        )
        for index in (ranking, filled)
    )
    assert few == many
