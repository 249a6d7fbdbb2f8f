"""Scores of embeddings, as retrieval finds one by another.

Shapes: N items, D embedding size, E size of several side by side, Q queries, K results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlstudy import distributed, retrieval
from dmlstudy.data.images import Indices, Labels
from dmlstudy.records import RetrievalConfig, TrialConfig
from dmlstudy.training.scores import Scored, joined, unit_scores
from dmlstudy.training.structure_scores import structure_scores
from dmlstudy.training.verification_scores import verification_scores

FIRST_STAGE = "first_stage_"
"""Before the names of scores of the order that is re-ranked."""

NAMES = ("embeddings", "structure")
"""Of the tensors of ``Embedded``."""


class Embedded(NamedTuple):
    """Embeddings z_ND, of unit norm or a ball unless the embedder is built without; of a structure head, omega_ND."""

    z_ND: NDArray[np.float32]
    omega_ND: NDArray[np.float32] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The same as tensors by name."""
        columns = zip(NAMES, self, strict=True)
        return {name: torch.from_numpy(values) for name, values in columns if values is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Embedded:
        """The inverse of ``tensors``."""
        z_ND, omega_ND = (tensors.get(name) for name in NAMES)
        assert z_ND is not None
        return cls(z_ND.numpy(), None if omega_ND is None else omega_ND.numpy())


def concatenated(of_folds: Sequence[Embedded]) -> Embedded:
    """All models' embeddings as one, of unit norm or a ball if theirs are, with all structure embeddings side by side.

    Where all models agree, distances are those of each, hyperbolic ones too.
    """
    omegas = [embedded.omega_ND for embedded in of_folds if embedded.omega_ND is not None]
    z_NE = np.concatenate([embedded.z_ND for embedded in of_folds], axis=1) / math.sqrt(len(of_folds))
    return Embedded(z_NE.astype(np.float32), np.concatenate(omegas, axis=1) if omegas else None)


def retrieval_scores(
    embedded: Embedded,
    labels_N: Labels,
    query: Indices | None,
    gallery: Indices | None,
    config: TrialConfig,
    *,
    camera_N: Indices | None = None,
    device: torch.device | None = None,
    by_class: bool = False,
) -> Scored:
    """Metrics of the retrieval that the configuration asks for: every rank must call this.

    Each rank ranks its share of the queries, a GPU as ``device`` finding the candidates; whatever is not of single
    queries (clusters, verification) rank 0 computes for all. The numbers are those of one process, digit for digit.

    With ``camera_N`` rankings are without a query's own class by its own camera, as ``retrieval.rank`` has it.

    With structure embeddings there are ``omega_deviation`` and ``omega_saturated`` of the queries'.

    With re-ranking the plain names are of its order and 'first_stage_' of the one before; a verdict has the wall
    time of both stages too, which no two runs measure alike, and scores of clusters if wished for. ``by_class`` adds
    the sums of all that are means over queries, by the queries' class.

    Verification, if wished for, adds thresholds in a search, and errors of pairs in a verdict.
    """

    def own_share() -> retrieval.Ranked:
        rerankers = _rerankers(embedded, config.retrieval, device)
        return retrieval.rank(
            embedded.z_ND,
            labels_N,
            rerankers,
            config.retrieval.first if rerankers else 1,
            config.recall_at,
            query=query,
            gallery=gallery,
            map_at=[
                (k, denominator) for k in config.map_at for denominator in get_args(retrieval.Denominator)
            ],
            full_map=config.full_map,
            macro=config.macro,
            reid=config.reid,
            camera_N=camera_N,
            curvature=config.embedder.ball_curvature,
            device=device,
            share=distributed.own_slice,
        )

    ranked = retrieval.Ranked.joined(distributed.computed_by_each(own_share))
    return distributed.computed_once(
        lambda: _scores(ranked, embedded, labels_N, query, gallery, config, device, by_class)
    )


def _scores(
    ranked: retrieval.Ranked,
    embedded: Embedded,
    labels_N: Labels,
    query: Indices | None,
    gallery: Indices | None,
    config: TrialConfig,
    device: torch.device | None,
    by_class: bool,
) -> Scored:
    final = config.retrieval.rerank
    prefixes = {name: "" if name == final else FIRST_STAGE for name in ranked.scores}
    label_Q = labels_N[ranked.query_Q] if by_class else None
    scored = joined([_named(ranked.scores[name], label_Q, prefix) for name, prefix in prefixes.items()])
    metrics = scored.metrics
    if ranked.num_left_out is not None:
        metrics["num_queries_left_out"] = float(ranked.num_left_out)
    if embedded.omega_ND is not None:
        omega_QD = embedded.omega_ND if query is None else embedded.omega_ND[query]
        metrics |= structure_scores(omega_QD, config.embedder.size, config)
    if config.phase == "verdict":
        if final != "none":
            metrics["search_ms_per_query"] = ranked.ms_per_query["none"]
            metrics["rerank_ms_per_query"] = ranked.ms_per_query[final]
        if config.clusters:
            metrics |= retrieval.evaluate_clusters(embedded.z_ND, labels_N, device=device)
    if config.verification:
        found, pair_counts = verification_scores(embedded.z_ND, labels_N, query, gallery, config)
        metrics |= found
        scored = scored._replace(pair_counts=pair_counts)
    return scored


def _named(scores: retrieval.Scores, label_Q: Labels | None, prefix: str) -> Scored:
    """The scores of one ranking under names with this prefix, with sums by class where labels are given."""
    metrics = {
        prefix + metric: value
        for metric, value in scores.means().items()
        if not (prefix and metric.startswith("num_"))
    }
    if label_Q is None:
        return Scored(metrics)
    unit_U, count_U, sums = scores.sums(label_Q)
    return Scored(
        metrics,
        unit_scores(
            unit_U.tolist(),
            count_U.tolist(),
            {prefix + metric: sum_U.tolist() for metric, sum_U in sums.items()},
        ),
    )


def _rerankers(
    embedded: Embedded, how: RetrievalConfig, device: torch.device | None
) -> dict[str, retrieval.Reranker]:
    """The one that is wished for, by its name."""
    z_ND, omega_ND = embedded
    if how.rerank == "k_reciprocal":
        encodings = retrieval.KReciprocal(z_ND, how.k1, how.k2, how.distance_weight, device)
        return {how.rerank: lambda row_Q, index_QK: encodings.order(row_Q, index_QK, how.first)}
    if how.rerank == "structure":
        assert omega_ND is not None
        return {
            how.rerank: lambda row_Q, index_QK: retrieval.by_structure(
                z_ND[row_Q], omega_ND[row_Q], z_ND, index_QK, how.first
            )
        }
    return {}
