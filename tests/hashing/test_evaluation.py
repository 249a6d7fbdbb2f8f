"""Hamming ranking, re-ranking and the average precisions against one item at a time."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dmlstudy.hashing import METRICS, HashingModel, build, evaluate, evaluate_codes, metrics_at
from dmlstudy.retrieval import tie_order

RNG = np.random.default_rng(0)


def model(structure: bool = True) -> HashingModel:
    return build("greedyhash", 8, 5, {}, term=("point_ranking", {}) if structure else None, seed=1)


def features(num_rows: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(num_rows, 5)).astype(np.float32)


def ranked(
    z_D: NDArray[np.int8], z_MD: NDArray[np.int8], omega_D: NDArray[np.float32], num: int
) -> list[int]:
    """Python's sorts are stable: by Hamming distance, then the first ``num`` by the weighted one."""
    order = sorted(tie_order(len(z_MD)).tolist(), key=lambda m: int((z_D != z_MD[m]).sum()))
    weight = [
        sum(float(w) for w, differs in zip(omega_D, z_D != z_M, strict=True) if differs) for z_M in z_MD
    ]
    return sorted(order[:num], key=lambda m: weight[m]) + order[num:]


def scores(hits: list[bool], k: int) -> tuple[float, float, float, float]:
    """Full AP, and the sum of precisions at the first k's hits over its three denominators."""

    def summed(first: int) -> float:
        return sum(sum(hits[:i]) / i for i in range(1, min(first, len(hits)) + 1) if hits[i - 1])

    total = sum(hits)
    return (
        summed(len(hits)) / max(total, 1),
        summed(k) / max(sum(hits[:k]), 1),
        summed(k) / max(total, 1),
        summed(k) / max(min(total, k), 1),
    )


@pytest.mark.parametrize("multi_label", [False, True])
def test_scores_equal_the_definitions(multi_label: bool) -> None:
    hasher, query_QF, database_MF = model(), features(9, 1), features(60, 2)
    if multi_label:
        query_labels, database_labels = (RNG.random((rows, 4)) < 0.25 for rows in (9, 60))
        query_labels[3] = False
    else:
        query_labels, database_labels = RNG.integers(0, 4, 9), RNG.integers(0, 4, 60)
        query_labels[3] = 77
    got = evaluate(hasher, query_QF, query_labels, database_MF, database_labels, at=(10, 100), rerank=25)
    codes, items, omega = hasher.codes(query_QF), hasher.codes(database_MF), hasher.omega(query_QF)
    for prefix, num in (("first_stage_", 0), ("", 25)):
        for k in (10, 100):
            rows = []
            for q in range(9):
                order = ranked(codes[q], items, omega[q], num)
                if multi_label:
                    hits = [bool((query_labels[q] & database_labels[m]).any()) for m in order]
                else:
                    hits = [bool(query_labels[q] == database_labels[m]) for m in order]
                rows.append(scores(hits, k))
            wanted = np.mean(rows, axis=0)
            names = ["map", *(f"map_at_{k}_of_{name}" for name in ("found", "relevant", "reachable"))]
            assert set(names) <= {*METRICS, *metrics_at(k)}
            assert [got[prefix + name] for name in names] == pytest.approx(list(wanted), abs=1e-12)
    assert got["map"] != got["first_stage_map"]
    assert got["map_at_100_of_relevant"] == got["map"]


def test_collapsed_codes_gain_nothing_from_a_database_sorted_by_class() -> None:
    labels = np.repeat(np.arange(10), 60)
    codes, omega = np.ones((600, 8), np.int8), np.ones((600, 8), np.float32)
    scores = evaluate_codes(codes, labels, codes, labels, at=(10,), omega_QD=omega, rerank=600)
    for name in ("map", "first_stage_map"):
        assert scores[name] == pytest.approx(0.1, abs=0.015)  # in the order of the database: 0.21


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (features(7, 1), RNG.integers(0, 3, 7), features(50, 2), RNG.integers(0, 3, 50))
    whole = evaluate(model(), *arguments, at=(5,), rerank=20)
    monkeypatch.setattr("dmlstudy.retrieval.codes._CELLS_PER_CHUNK", 1)
    assert evaluate(model(), *arguments, at=(5,), rerank=20) == pytest.approx(whole, abs=1e-15)


def test_faults() -> None:
    x_NF, y_N = features(4, 1), np.zeros(4, np.int64)
    with pytest.raises(ValueError, match="0 queries, 4 database items"):
        evaluate(model(), x_NF[:0], y_N[:0], x_NF, y_N)
    with pytest.raises(ValueError, match="3 labels for 4 queries"):
        evaluate(model(), x_NF, y_N[:3], x_NF, y_N)
    with pytest.raises(ValueError, match="has no structure head"):
        evaluate(model(structure=False), x_NF, y_N, x_NF, y_N, rerank=2)
    with pytest.raises(ValueError, match="MAP@0: k must be at least 1"):
        evaluate(model(), x_NF, y_N, x_NF, y_N, at=(0,))
