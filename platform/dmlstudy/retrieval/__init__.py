"""Exact retrieval, its metrics, re-ranking and indexes for serving: the only door to faiss."""

from dmlstudy.retrieval.clusters import evaluate_clusters, k_means, nmi, pair_f1
from dmlstudy.retrieval.codes import hamming_neighbours, pack_codes
from dmlstudy.retrieval.index import CodeIndex, EmbeddingIndex, Index, Tuning
from dmlstudy.retrieval.metrics import (
    Denominator,
    Scores,
    count_relevant,
    evaluate,
    evaluate_query_gallery,
    macro_mean,
    map_at_k,
    map_at_r,
    mean_average_precision,
    micro_mean,
    pack_labels,
    r_precision,
    recall_at_k,
    score,
    tie_order,
)
from dmlstudy.retrieval.neighbours import in_gallery, in_itself, retrieve
from dmlstudy.retrieval.reranking import KReciprocal, Reranker, by_structure, by_weighted_hamming, compare

__all__ = [
    "CodeIndex",
    "Denominator",
    "EmbeddingIndex",
    "Index",
    "KReciprocal",
    "Reranker",
    "Scores",
    "Tuning",
    "by_structure",
    "by_weighted_hamming",
    "compare",
    "count_relevant",
    "evaluate",
    "evaluate_clusters",
    "evaluate_query_gallery",
    "hamming_neighbours",
    "in_gallery",
    "in_itself",
    "k_means",
    "macro_mean",
    "map_at_k",
    "map_at_r",
    "mean_average_precision",
    "micro_mean",
    "nmi",
    "pack_codes",
    "pack_labels",
    "pair_f1",
    "r_precision",
    "recall_at_k",
    "retrieve",
    "score",
    "tie_order",
]
