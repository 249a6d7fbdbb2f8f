"""Scores of codes: average precision of a Hamming ranking, before and after re-ranking by structure.

Shapes: Q queries, M database items, F features, D bits, L concepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from dmlstudy import retrieval
from dmlstudy.hashing.model import HashingModel

Labels: TypeAlias = NDArray[np.integer[Any]] | NDArray[np.bool_]

METRICS = ("map", "map_at_r", "r_precision")
"""Of the whole ranking; those at K are named by ``metric_at``."""


def metrics_at(k: int) -> list[str]:
    """MAP@K under each of its denominators."""
    return [f"map_at_{k}_of_{denominator}" for denominator in get_args(retrieval.Denominator)]


def evaluate(
    model: HashingModel,
    query_QF: NDArray[np.float32],
    query_labels: Labels,
    database_MF: NDArray[np.float32],
    database_labels: Labels,
    *,
    at: Sequence[int] = (1000,),
    rerank: int = 0,
) -> dict[str, float]:
    """``evaluate_codes`` of the model's codes and, with ``rerank`` > 0, its structure embeddings.

    Raises ValueError as that, and for re-ranking without a structure head.
    """
    ranked = rank_codes(
        model.codes(query_QF),
        query_labels,
        model.codes(database_MF),
        database_labels,
        at=at,
        omega_QD=model.omega(query_QF) if rerank else None,
        rerank=rerank,
    )
    return means(ranked)


def means(ranked: Mapping[str, retrieval.Scores]) -> dict[str, float]:
    """The means of ``rank_codes``'s scores, those of the ranking before re-ranking under 'first_stage_' names."""
    return {
        prefix + name: value
        for prefix, scores in ranked.items()
        for name, value in scores.means().items()
        if not (prefix and name.startswith("num_"))
    }


def evaluate_codes(
    query_QD: NDArray[np.int8],
    query_labels: Labels,
    database_MD: NDArray[np.int8],
    database_labels: Labels,
    *,
    at: Sequence[int] = (1000,),
    omega_QD: NDArray[np.float32] | None = None,
    rerank: int = 0,
) -> dict[str, float]:
    """The means of ``rank_codes``, whose arguments and errors it has."""
    return means(
        rank_codes(
            query_QD, query_labels, database_MD, database_labels, at=at, omega_QD=omega_QD, rerank=rerank
        )
    )


def rank_codes(
    query_QD: NDArray[np.int8],
    query_labels: Labels,
    database_MD: NDArray[np.int8],
    database_labels: Labels,
    *,
    at: Sequence[int] = (1000,),
    omega_QD: NDArray[np.float32] | None = None,
    rerank: int = 0,
) -> dict[str, retrieval.Scores]:
    """Score Hamming ranking, by codes of +1 and -1, of a database that holds none of the queries.

    Labels are integers (relevant: equal), or booleans of shape (rows, L) (relevant: a concept in common). Gives
    ``map``, the full mean average precision, whose denominator is the number R_q of relevant items; for each K of
    ``at`` ``map_at_K_of_found``, ``_of_relevant`` and ``_of_reachable`` (``retrieval.map_at_k``); MAP@R and
    R-precision. A query without a hit counts as 0; items at one distance stand in ``retrieval.tie_order``.

    The scores are found under the prefix of their names, which is empty for these.

    With the queries' structure embeddings these are of the ranking whose first ``rerank`` are put in the order of
    their distance weighted by omega (NASA Eq. 7), and those under ``first_stage_`` of the one before.

    Raises ValueError without queries or a database, and for K < 1 and, with omega, ``rerank`` < 1.
    """
    if not len(query_QD) or not len(database_MD):
        raise ValueError(f"{len(query_QD)} queries, {len(database_MD)} database items: needs some of both")
    if len(query_labels) != len(query_QD) or len(database_labels) != len(database_MD):
        raise ValueError(
            f"{len(query_labels)} labels for {len(query_QD)} queries, {len(database_labels)} for "
            f"{len(database_MD)} database items; give one each"
        )
    order_M = retrieval.tie_order(len(database_MD))
    database_MD, database_labels = database_MD[order_M], database_labels[order_M]
    query_QP, database_MP = retrieval.pack_codes(query_QD), retrieval.pack_codes(database_MD)
    label_Q, label_M = _comparable(query_labels), _comparable(database_labels)
    num_relevant_Q = retrieval.count_relevant(label_Q, label_M)
    map_at = [(k, denominator) for k in at for denominator in get_args(retrieval.Denominator)]
    prefixes = ("",) if omega_QD is None else ("first_stage_", "")
    scores = {
        prefix: retrieval.Scores(label_Q, label_M, num_relevant_Q, (), map_at, full_map=True)
        for prefix in prefixes
    }
    for row_Q, index_QM, _ in retrieval.hamming_neighbours(query_QP, database_MP, len(database_MP)):
        scores[prefixes[0]].add(row_Q, index_QM)
        if omega_QD is not None:
            again_QM = retrieval.by_weighted_hamming(
                query_QP[row_Q], omega_QD[row_Q], database_MP, index_QM, rerank
            )
            scores[""].add(row_Q, again_QM)
    return scores


def _comparable(labels: Labels) -> NDArray[np.int64] | NDArray[np.uint8]:
    if labels.ndim == 2:
        return retrieval.pack_labels(labels.astype(np.bool_))
    return labels.astype(np.int64)
