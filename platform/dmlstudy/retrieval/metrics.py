"""Retrieval metrics: pure functions of ranked int64 labels, one value per query; METHODS.md section 8.

rel_q(k) = 1 if the k-th result has the query's label; R_q = number of relevant items in the gallery;
P_q(k) = (1/k) sum_{i<=k} rel_q(i). A query with R_q = 0 counts as 0. The reported metric is the mean over
queries. Shapes: Q queries, K ranks, N items of a set that is both query and gallery, D embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmlstudy.retrieval.neighbours import Floats, Ints, retrieve

Values: TypeAlias = NDArray[np.float64]

_CELLS_PER_CHUNK = 1 << 23  # ranks held at once by ``evaluate``


def recall_at_k(ranked_QK: Ints, label_Q: Ints, k: int) -> Values:
    """R@k of each query = [any rel_q(i) = 1, i <= k]; k beyond the ranking means the whole ranking."""
    if k < 1:
        raise ValueError(f"recall at {k}: k must be at least 1")
    return np.asarray(_relevance(ranked_QK[:, :k], label_Q).any(axis=1), dtype=np.float64)


def r_precision(ranked_QK: Ints, label_Q: Ints, num_relevant_Q: Ints) -> Values:
    """R-precision of each query = P_q(R_q); NASA's P@N.

    Raises ValueError if the ranking is shorter than the largest R_q.
    """
    hit_QK = _first_r_hits(ranked_QK, label_Q, num_relevant_Q)
    return np.asarray(hit_QK.sum(axis=1) / np.maximum(num_relevant_Q, 1), dtype=np.float64)


def map_at_r(ranked_QK: Ints, label_Q: Ints, num_relevant_Q: Ints) -> Values:
    """MAP@R of each query = (1/R_q) sum_{k<=R_q} P_q(k) rel_q(k); never above R-precision.

    Raises ValueError if the ranking is shorter than the largest R_q.
    """
    hit_QK = _first_r_hits(ranked_QK, label_Q, num_relevant_Q)
    return np.asarray(_precision_sum(hit_QK) / np.maximum(num_relevant_Q, 1), dtype=np.float64)


def mean_average_precision(ranked_QK: Ints, label_Q: Ints, num_relevant_Q: Ints) -> Values:
    """AP of each query over a full ranking = (1/R_q) sum_k P_q(k) rel_q(k).

    Raises ValueError if the ranking leaves out a relevant item, for then it is not full.
    """
    hit_QK = _relevance(ranked_QK, label_Q)
    if (hit_QK.sum(axis=1) != num_relevant_Q).any():
        raise ValueError("mean average precision needs the full ranking: a relevant item is not in it")
    return np.asarray(_precision_sum(hit_QK) / np.maximum(num_relevant_Q, 1), dtype=np.float64)


def _relevance(ranked_QK: Ints, label_Q: Ints) -> NDArray[np.bool_]:
    # float32 would merge ids beyond 2^24
    assert np.issubdtype(ranked_QK.dtype, np.integer)
    assert np.issubdtype(label_Q.dtype, np.integer)
    relevant_QK: NDArray[np.bool_] = ranked_QK == label_Q[:, None]
    return relevant_QK


def _first_r_hits(ranked_QK: Ints, label_Q: Ints, num_relevant_Q: Ints) -> NDArray[np.bool_]:
    num_ranks = ranked_QK.shape[1]
    largest = int(num_relevant_Q.max(initial=0))
    if num_ranks < largest:
        raise ValueError(
            f"a query has {largest} relevant items, the ranking holds {num_ranks}; retrieve more"
        )
    within_r_QK = np.arange(num_ranks) < num_relevant_Q[:, None]
    return _relevance(ranked_QK, label_Q) & within_r_QK


def _precision_sum(hit_QK: NDArray[np.bool_]) -> Values:
    """Return sum_k P_q(k) hit_q(k)."""
    rank_K = np.arange(1, hit_QK.shape[1] + 1)
    precision_sum_Q: Values = (np.cumsum(hit_QK, axis=1) / rank_K * hit_QK).sum(axis=1)
    return precision_sum_Q


def evaluate(z_ND: Floats, labels_N: Ints, recall_at: Sequence[int] = (1, 2, 4, 8)) -> dict[str, float]:
    """Score a set that is both query and gallery, each query left out of its own ranking.

    Returns ``recall_at_<k>`` for each k (clamped to the gallery), ``r_precision``, ``map_at_r`` and
    ``num_queries_without_positive``: the queries alone in their class, which count as 0.
    Raises ValueError for fewer than 2 items or embeddings that are not finite.
    """
    if len(labels_N) != len(z_ND) or len(z_ND) < 2:
        raise ValueError(f"{len(z_ND)} embeddings, {len(labels_N)} labels: needs as many, and at least 2")
    assert np.issubdtype(labels_N.dtype, np.integer)
    _, class_N, size_C = np.unique(labels_N, return_inverse=True, return_counts=True)
    num_relevant_N = size_C[class_N] - 1
    k = max(1, int(num_relevant_N.max()), *recall_at)

    chunks: list[dict[str, Values]] = []
    rows_per_chunk = max(1, _CELLS_PER_CHUNK // min(k, len(z_ND)))
    for start in range(0, len(z_ND), rows_per_chunk):
        rows = np.arange(start, min(start + rows_per_chunk, len(z_ND)))
        index_QK, _ = retrieve(z_ND[rows], z_ND, k, self_index=rows)
        ranked_QK, label_Q, num_relevant_Q = labels_N[index_QK], labels_N[rows], num_relevant_N[rows]
        values = {f"recall_at_{n}": recall_at_k(ranked_QK, label_Q, n) for n in recall_at}
        values["map_at_r"] = map_at_r(ranked_QK, label_Q, num_relevant_Q)
        values["r_precision"] = r_precision(ranked_QK, label_Q, num_relevant_Q)
        chunks.append(values)
    scores = {key: float(np.concatenate([c[key] for c in chunks]).mean()) for key in chunks[0]}
    return scores | {"num_queries_without_positive": float((num_relevant_N == 0).sum())}
