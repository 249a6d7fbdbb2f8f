"""Exact retrieval, its metrics, re-ranking and indexes for serving: the only door to faiss."""

from dmlstudy.retrieval.clusters import evaluate_clusters, k_means, nmi, pair_f1
from dmlstudy.retrieval.codes import hamming_neighbours, pack_codes
from dmlstudy.retrieval.hyperbolic import of_pairs as hyperbolic_distances
from dmlstudy.retrieval.index import CodeIndex, EmbeddingIndex, Index, Tuning
from dmlstudy.retrieval.metrics import (
    Denominator,
    Scores,
    UnitSums,
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
from dmlstudy.retrieval.open_set import open_set
from dmlstudy.retrieval.pairs import Pairs
from dmlstudy.retrieval.reranking import (
    KReciprocal,
    Ranked,
    Reranker,
    by_structure,
    by_weighted_hamming,
    compare,
    rank,
)
from dmlstudy.retrieval.verification import (
    FEWEST_MATCHES,
    RATES,
    Verification,
    fewest_impostors,
    is_measurable,
    thresholds,
    verify,
)

__all__ = [
    "FEWEST_MATCHES",
    "RATES",
    "CodeIndex",
    "Denominator",
    "EmbeddingIndex",
    "Index",
    "KReciprocal",
    "Pairs",
    "Ranked",
    "Reranker",
    "Scores",
    "Tuning",
    "UnitSums",
    "Verification",
    "by_structure",
    "by_weighted_hamming",
    "compare",
    "count_relevant",
    "evaluate",
    "evaluate_clusters",
    "evaluate_query_gallery",
    "fewest_impostors",
    "hamming_neighbours",
    "hyperbolic_distances",
    "in_gallery",
    "in_itself",
    "is_measurable",
    "k_means",
    "macro_mean",
    "map_at_k",
    "map_at_r",
    "mean_average_precision",
    "micro_mean",
    "nmi",
    "open_set",
    "pack_codes",
    "pack_labels",
    "pair_f1",
    "r_precision",
    "rank",
    "recall_at_k",
    "retrieve",
    "score",
    "thresholds",
    "tie_order",
    "verify",
]
