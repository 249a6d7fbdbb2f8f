"""Re-ranking and Hamming neighbours against plain loops in float64."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dmlstudy import retrieval

MODULE = "dmlstudy.retrieval.reranking"


@pytest.fixture(params=[1 << 22, 100], ids=["whole", "chunks"], autouse=True)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[MODULE], "_CELLS_PER_CHUNK", request.param)
    monkeypatch.setattr(sys.modules["dmlstudy.retrieval.codes"], "_CELLS_PER_CHUNK", request.param)


def random(rows: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)


@pytest.mark.parametrize("n", [1, 7, 30, 999])
def test_structure_orders_the_first_n_by_the_querys_own_distance(n: int) -> None:
    query, gallery = random(12, 5, 0), random(30, 5, 1)
    omega = np.random.default_rng(2).uniform(0.5, 1.5, (12, 5)).astype(np.float32)
    index, _ = retrieval.retrieve(query, gallery, 25)
    again = retrieval.by_structure(query, omega, gallery, index, n)
    for q in range(12):
        first = index[q, :n].tolist()
        distance = [
            sum(float(omega[q, d]) * (float(query[q, d]) - float(gallery[i, d])) ** 2 for d in range(5))
            for i in first
        ]
        order = sorted(range(len(first)), key=lambda place, d=distance: (d[place], place))
        assert again[q].tolist() == [first[place] for place in order] + index[q, n:].tolist()
    assert n == 1 or (again != index).any()
    np.testing.assert_array_equal(
        retrieval.by_structure(query, np.ones_like(omega), gallery, index, n), index
    )


@pytest.mark.parametrize("bits", [5, 8, 32, 70])
def test_hamming_neighbours_are_the_sorted_list(bits: int) -> None:
    rng = np.random.default_rng(bits)
    signs = rng.choice([-1.0, 1.0], (50, bits)).astype(np.float32)
    codes = retrieval.pack_codes(signs)
    np.testing.assert_array_equal(codes, retrieval.pack_codes(signs > 0))
    for k, with_self in ((49, True), (6, True), (50, False), (3, False)):
        itself = np.arange(50) if with_self else None
        parts = list(retrieval.hamming_neighbours(codes, codes, k, itself))
        index, distance = np.concatenate([p[1] for p in parts]), np.concatenate([p[2] for p in parts])
        assert np.concatenate([p[0] for p in parts]).tolist() == list(range(50))
        for q in range(50):
            pairs = sorted(
                (int((signs[q] != signs[i]).sum()), i) for i in range(50) if not (with_self and i == q)
            )
            assert list(zip(distance[q].tolist(), index[q].tolist(), strict=True)) == pairs[:k]


@pytest.mark.parametrize("k", [1, 8, 9, 12])
def test_hamming_neighbours_of_queries_inside_and_outside(k: int) -> None:
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (12, 6))
    codes, itself = retrieval.pack_codes(signs), np.array([-1, 3, -1, 8])
    query = np.array([9, 3, 10, 8])
    parts = list(retrieval.hamming_neighbours(codes[query], codes[:9], k, itself))
    index, distance = np.concatenate([p[1] for p in parts]), np.concatenate([p[2] for p in parts])
    for q in range(4):
        pairs = sorted((int((signs[query[q]] != signs[i]).sum()), i) for i in range(9) if i != itself[q])[:k]
        pairs += [(65535, -1)] * (min(k, 9) - len(pairs))
        assert list(zip(distance[q].tolist(), index[q].tolist(), strict=True)) == pairs


@pytest.mark.parametrize("bits", [6, 32, 70])
def test_weighted_hamming_orders_the_first_n(bits: int) -> None:
    rng = np.random.default_rng(bits)
    signs = rng.choice([-1, 1], (40, bits))
    codes, omega = retrieval.pack_codes(signs), rng.integers(1, 4, (40, bits)).astype(np.float32)
    ((_, index, _),) = [
        tuple(
            np.concatenate(column)
            for column in zip(*retrieval.hamming_neighbours(codes, codes, 39, np.arange(40)), strict=True)
        )
    ]
    again = retrieval.by_weighted_hamming(codes, omega, codes, index, 20)
    for q in range(40):
        distance = [float((omega[q] * (signs[q] != signs[i])).sum()) for i in index[q, :20]]
        order = sorted(range(20), key=lambda place, d=distance: (d[place], place))
        assert again[q].tolist() == index[q, order].tolist() + index[q, 20:].tolist()
    np.testing.assert_array_equal(
        retrieval.by_weighted_hamming(codes, np.ones_like(omega), codes, index, 20), index
    )
    # NASA Eq. 8: s = (sum omega - 2 d) / D = omega . (zbar o nbar) orders alike
    scores = (omega[0] * signs[0] * signs[index[0, :20]]).sum(axis=1)
    np.testing.assert_array_equal(index[0, np.argsort(-scores, kind="stable")], again[0, :20])


def k_reciprocal_by_loops(z: np.ndarray, k1: int, k2: int, weight: float) -> np.ndarray:
    """The final distance of every pair, from the definitions, on whole matrices."""
    n = len(z)
    squared = ((z[:, None].astype(np.float64) - z) ** 2).sum(axis=2)
    distance = squared / squared.max(axis=1, keepdims=True)
    order = np.argsort(squared, axis=1, kind="stable")

    def mutual(i: int, k: int) -> set[int]:
        return {int(j) for j in order[i, : k + 1] if i in order[j, : k + 1]}

    v = np.zeros((n, n))
    for i in range(n):
        members = mutual(i, k1)
        for j in sorted(mutual(i, k1)):
            other = mutual(j, round(k1 / 2))
            if len(other & mutual(i, k1)) > 2 / 3 * len(other):
                members |= other
        for j in members:
            v[i, j] = np.exp(-distance[i, j])
        v[i] /= v[i].sum()
    v = np.array([v[order[i, :k2]].mean(axis=0) for i in range(n)])
    jaccard = np.array(
        [
            [1 - np.minimum(v[i], v[j]).sum() / np.maximum(v[i], v[j]).sum() for j in range(n)]
            for i in range(n)
        ]
    )
    return (1 - weight) * jaccard + weight * distance


@pytest.mark.parametrize(("k1", "k2", "weight"), [(20, 6, 0.3), (5, 1, 0.3), (7, 3, 0.0), (8, 4, 1.0)])
def test_k_reciprocal_is_the_loop(k1: int, k2: int, weight: float) -> None:
    labels = np.repeat(np.arange(9), 8)
    z = (random(9, 6, 0)[labels] + 0.7 * random(72, 6, 1)).astype(np.float32)
    queries = np.arange(0, 72, 5)
    index, _ = retrieval.retrieve(z[queries], z, 71, queries)
    encodings = retrieval.KReciprocal(z, k1, k2, weight)
    again = encodings.order(queries, index, 999)
    final = k_reciprocal_by_loops(z, k1, k2, weight)
    for place, q in enumerate(queries):
        # equal to the rounding of float32: the same sequence of final distances
        np.testing.assert_allclose(final[q, again[place]], np.sort(np.delete(final[q], q)), rtol=1e-5)
    changed = (again != index).mean()
    assert changed < 0.02 if weight == 1.0 else changed > 0.15
    some = encodings.order(queries, index, 10)
    np.testing.assert_array_equal(some[:, 10:], index[:, 10:])


def test_compare_names_each_ranking_its_metrics_and_its_time() -> None:
    labels = np.repeat(np.arange(10), 12)
    signal, noise = random(10, 4, 0)[labels] + 0.1 * random(120, 4, 1), 3 * random(120, 4, 2)
    z = np.hstack([signal, noise]).astype(np.float32)
    omega = np.tile(np.repeat([1.0, 0.0], 4), (120, 1)).astype(np.float32)  # looks at the signal only
    encodings = retrieval.KReciprocal(z)
    found = retrieval.compare(
        z,
        labels,
        {
            "structure": lambda rows, index: retrieval.by_structure(z[rows], omega[rows], z, index, 119),
            "k-reciprocal": lambda rows, index: encodings.order(rows, index, 119),
        },
        n=119,
        recall_at=(1,),
    )
    assert set(found) == {"none", "structure", "k-reciprocal"}
    assert all(scores["ms_per_query"] > 0 for scores in found.values())
    plain = retrieval.evaluate(z, labels, (1,))
    assert {name: found["none"][name] for name in plain} == plain
    assert found["structure"]["recall_at_1"] > found["none"]["recall_at_1"] + 0.3
    with pytest.raises(ValueError, match="'lossy' gave other items"):
        retrieval.compare(z, labels, {"lossy": lambda rows, index: index[:, ::1] * 0}, n=5)


def test_compare_of_queries_with_a_gallery() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(8), 6))
    z, omega = random(48, 5, 1), np.abs(random(48, 5, 2))
    query, gallery = np.array([40, 3, 7, 11]), np.array([30, 7, *range(12, 28), 3])
    found = retrieval.compare(
        z,
        labels,
        {"structure": lambda rows, index: retrieval.by_structure(z[rows], omega[rows], z, index, 18)},
        n=18,
        recall_at=(1, 4),
        query=query,
        gallery=gallery,
    )
    itself = np.array([-1, 18, 1, -1])
    plain = retrieval.gallery_scores(
        z[query], labels[query], z[gallery], labels[gallery], (1, 4), self_index=itself
    ).means()
    assert {name: found["none"][name] for name in plain} == plain
    ordered = []
    for q in query:
        others = gallery[gallery != q]
        ordered.append(others[np.argsort((omega[q] * (z[others] - z[q]) ** 2).sum(axis=1), kind="stable")])
    first = np.mean([labels[order[0]] == labels[q] for q, order in zip(query, ordered, strict=True)])
    assert found["structure"]["recall_at_1"] == first


def metrics_by_loops(order: list[int], label: int, labels: np.ndarray, num_relevant: int) -> dict[str, float]:
    hits = [int(labels[i] == label) for i in order]
    precision = [hit * sum(hits[: place + 1]) / (place + 1) for place, hit in enumerate(hits)]
    return {
        "recall_at_1": float(any(hits[:1])),
        "recall_at_6": float(any(hits[:6])),
        "r_precision": sum(hits[:num_relevant]) / max(num_relevant, 1),
        "map_at_r": sum(precision[:num_relevant]) / max(num_relevant, 1),
        "map_at_5_of_found": sum(precision[:5]) / max(sum(hits[:5]), 1),
        "map_at_99_of_reachable": sum(precision) / max(num_relevant, 1),
        "map": sum(precision) / max(num_relevant, 1),
    }


@pytest.mark.parametrize("seed", range(8))
def test_compare_is_the_loop_over_queries_inside_and_outside_the_gallery(seed: int) -> None:
    """Metrics of the whole ranking, by the definitions; queries none, some or all of which are in the gallery."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, 16)
    z = rng.integers(0, 3, (16, 2)).astype(np.float32)  # ties abound, and distances are exact
    omega = rng.integers(1, 4, (16, 2)).astype(np.float32)
    places, n = rng.permutation(16), [1, 4, 10, 99][seed % 4]
    gallery, query = places[:10], places[[slice(10, 16), slice(4, 13), slice(5, 12), slice(3, 9)][seed // 2]]
    found = retrieval.compare(
        z,
        labels,
        {"structure": lambda rows, index: retrieval.by_structure(z[rows], omega[rows], z, index, n)},
        n,
        (1, 6),
        query=query,
        gallery=gallery,
        map_at=((5, "found"), (99, "reachable")),
        full_map=True,
        macro=True,
    )
    expected: dict[str, list[dict[str, float]]] = {"none": [], "structure": []}
    for q in query:
        among_ties = [int(gallery[i]) for i in retrieval.tie_order(10) if gallery[i] != q]
        order = sorted(among_ties, key=lambda i: ((z[i] - z[q]) ** 2).sum())
        again = sorted(order[:n], key=lambda i: (omega[q] * (z[i] - z[q]) ** 2).sum()) + order[n:]
        num_relevant = int((labels[order] == labels[q]).sum())
        for name, items in (("none", order), ("structure", again)):
            expected[name].append(metrics_by_loops(items, labels[q], labels, num_relevant))
    for name, of_queries in expected.items():
        for metric in of_queries[0]:
            values = np.array([each[metric] for each in of_queries])
            of_classes = [values[labels[query] == label].mean() for label in np.unique(labels[query])]
            assert found[name][metric] == pytest.approx(values.mean()), (name, metric)
            assert found[name][f"macro_{metric}"] == pytest.approx(np.mean(of_classes)), (name, metric)


def test_queries_apart_from_the_gallery_see_all_of_it() -> None:
    z, labels = random(5, 3, 0), np.zeros(5, np.int64)
    sets = {"query": np.array([0, 1]), "gallery": np.array([2, 3, 4])}
    assert retrieval.compare(z, labels, {}, 1, (1,), **sets)["none"]["r_precision"] == 1


def test_compare_holds_a_bounded_part_of_long_rankings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["dmlstudy.retrieval.neighbours"], "_CELLS_PER_CHUNK", 1000)
    z, labels, shapes = random(90, 3, 0), np.repeat(np.arange(9), 10), []

    def same(row_Q: np.ndarray, index_QK: np.ndarray) -> np.ndarray:
        shapes.append(index_QK.shape)
        return index_QK

    found = retrieval.compare(z, labels, {"same": same}, 5, (1,), map_at=((20, "found"),), full_map=True)
    plain = retrieval.evaluate(z, labels, (1,), map_at=((20, "found"),), full_map=True)
    for scores in found.values():
        assert {name: scores[name] for name in plain} == plain
    assert sum(rows for rows, _ in shapes) == 90
    assert {columns for _, columns in shapes} == {89}
    assert max(rows * columns for rows, columns in shapes) <= 1000
    shapes.clear()
    retrieval.compare(z, labels, {"same": same}, 5, (1,), map_at=((20, "found"),))
    assert {columns for _, columns in shapes} == {20}


def first_by(distance: np.ndarray, found: np.ndarray, n: int) -> list[list[int]]:
    """The first n places of each row by their distance, what is found alone; the rest, and -1, as it stands."""
    again = []
    for q, row in enumerate(found.tolist()):
        items = [i for i in row[:n] if i >= 0]
        again.append(sorted(items, key=lambda i, q=q: distance[q, i]) + row[len(items) :])
    return again


@pytest.mark.parametrize("n", [7, 60])
@pytest.mark.parametrize("kind", ["flat", "ivf", "ivf_pq", "hnsw"])
def test_what_an_index_of_embeddings_finds_is_reranked_by_structure(kind: str, n: int) -> None:
    rng = np.random.default_rng(0)
    items, queries = (rng.integers(-3, 4, (rows, 8)).astype(np.float32) for rows in (400, 20))
    omega = rng.integers(1, 5, (20, 8)).astype(np.float32)
    tuning = retrieval.Tuning(num_cells=25, num_probes=1, code_bytes=4)
    index = retrieval.EmbeddingIndex(kind, 8, model_version="m", tuning=tuning, device="cpu").train(items)  # type: ignore[arg-type]
    found, _ = index.add(items, np.arange(400)).search(queries, 60)
    if kind.startswith("ivf"):
        assert 0 < (found < 0).mean() < 1  # one cell holds fewer than 60
        assert (found[:, 0] >= 0).all()
    weighted = (omega[:, None] * (queries[:, None] - items) ** 2).sum(axis=2)
    again = retrieval.by_structure(queries, omega, items, found, n)
    assert again.tolist() == first_by(weighted, found, n)
    assert (again != found).any()


@pytest.mark.parametrize("n", [7, 60])
@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_what_an_index_of_codes_finds_is_reranked_by_weighted_hamming(kind: str, n: int) -> None:
    rng = np.random.default_rng(0)
    item_signs, query_signs = (rng.choice([-1, 1], (rows, 12)) for rows in (400, 20))
    items, queries = retrieval.pack_codes(item_signs), retrieval.pack_codes(query_signs)
    omega = rng.integers(1, 5, (20, 12)).astype(np.float32)
    tuning = retrieval.Tuning(num_cells=25, num_probes=1)
    index = retrieval.CodeIndex(kind, 12, model_version="m", tuning=tuning).train(items)  # type: ignore[arg-type]
    found, _ = index.add(items, np.arange(400)).search(queries, 60)
    if kind == "ivf":
        assert 0 < (found < 0).mean() < 1
    weighted = (omega[:, None] * (query_signs[:, None] != item_signs)).sum(axis=2)
    again = retrieval.by_weighted_hamming(queries, omega, items, found, n)
    assert again.tolist() == first_by(weighted, found, n)
    assert (again != found).any()


def test_k_reciprocal_leaves_what_is_no_item_where_it_is() -> None:
    z = random(40, 5, 0)
    index, _ = retrieval.retrieve(z, z, 12, np.arange(40))
    encodings = retrieval.KReciprocal(z, 6, 3)
    whole = encodings.order(np.arange(40), index, 8)
    short = index.copy()
    short[::2, 8:] = -1
    again = encodings.order(np.arange(40), short, 10)
    np.testing.assert_array_equal(again[::2, :8], whole[::2, :8])
    assert (again[::2, 8:] == -1).all()
    np.testing.assert_array_equal(again[1::2], encodings.order(np.arange(40), index, 10)[1::2])


def test_reranking_faults_are_named() -> None:
    z, index = random(4, 8, 0), np.array([[1, 2], [0, 2], [0, 1], [0, 1]])
    with pytest.raises(ValueError, match="needs at least 1"):
        retrieval.by_structure(z, np.ones_like(z), z, index, 0)
    with pytest.raises(ValueError, match="negative or no number"):
        retrieval.by_structure(z, np.full_like(z, np.nan), z, index, 2)
    with pytest.raises(ValueError, match="each of 4 queries needs 8"):
        retrieval.by_structure(z, np.ones((4, 7), np.float32), z, index, 2)
    for wrong in ([-1, 2], [1, -2]):
        with pytest.raises(ValueError, match="a negative place: only -1 may be there, behind the last item"):
            retrieval.by_structure(z, np.ones_like(z), z, np.array([wrong] * 4), 2)
    codes = retrieval.pack_codes(z)
    with pytest.raises(ValueError, match="a weight for each bit"):
        retrieval.by_weighted_hamming(codes, np.ones((4, 9), np.float32), codes, index, 2)
    with pytest.raises(ValueError, match="k1 >= 2"):
        retrieval.KReciprocal(z, k1=1)
    with pytest.raises(ValueError, match="not a number"):
        retrieval.pack_codes(np.full((1, 8), np.nan))
    with pytest.raises(ValueError, match="1 bytes, the gallery 2"):
        list(retrieval.hamming_neighbours(codes, np.ones((3, 2), np.uint8), 1))
