"""Exact retrieval and its metrics: the only door to faiss."""

from dmlstudy.retrieval.metrics import (
    evaluate,
    map_at_r,
    mean_average_precision,
    r_precision,
    recall_at_k,
)
from dmlstudy.retrieval.neighbours import retrieve

__all__ = ["evaluate", "map_at_r", "mean_average_precision", "r_precision", "recall_at_k", "retrieve"]
