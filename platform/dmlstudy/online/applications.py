"""Applications of a learned metric (OAHU, section 3.6): classification, comparison of pairs, retrieval.

Shapes: N and Q points and queries, M gallery items, D features, K neighbours, l = 0..L layers (one, of a linear
metric), P pairs, C classes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import f1_score, roc_auc_score  # type: ignore[import-untyped]

from dmlstudy import retrieval
from dmlstudy.online.learner import Floats, OnlineLearner

Ints: TypeAlias = NDArray[np.int64]
Vote: TypeAlias = Literal["similarity", "majority"]
Merge: TypeAlias = Literal["max", "sum"]


class Candidates(NamedTuple):
    """The k nearest gallery items of each query in each layer, and how similar they are (Eq. 23, 27)."""

    index_QLK: Ints
    similarity_QLK: Floats


def candidates(
    learner: OnlineLearner,
    query_QD: NDArray[np.floating],
    gallery_MD: NDArray[np.floating],
    k: int,
    self_index: Ints | None = None,
) -> Candidates:
    """The k nearest in each layer, nearest first, ties by gallery index; k is clamped to M.

    Query q is left out of its own candidates where it is the gallery's item ``self_index[q]``.

    S = alpha^l exp(-(D^l - d_min) / (d_max - d_min)) with the least and the largest distance among the layer's k; where
    these are equal, as for k = 1, S = alpha^l. Raises ValueError for k < 1, an empty gallery and points the learner
    does not take.
    """
    of_gallery, of_query = learner.embed(gallery_MD), learner.embed(query_QD, "query")
    found = [
        retrieval.retrieve(q_QE.astype(np.float32), g_ME.astype(np.float32), k, self_index)
        for q_QE, g_ME in zip(of_query, of_gallery, strict=True)
    ]
    index_QLK = np.stack([index_QK for index_QK, _ in found], axis=1)
    distance_QLK = np.stack([distance_QK for _, distance_QK in found], axis=1).astype(np.float64)
    nearest_QL1, farthest_QL1 = distance_QLK[:, :, :1], distance_QLK[:, :, -1:]
    spread_QL1 = farthest_QL1 - nearest_QL1
    scaled_QLK = (distance_QLK - nearest_QL1) / np.where(spread_QL1 > 0, spread_QL1, 1)
    return Candidates(index_QLK, np.exp(-scaled_QLK) * learner.layer_weights[:, None])


def classify(
    learner: OnlineLearner,
    query_QD: NDArray[np.floating],
    gallery_MD: NDArray[np.floating],
    labels_M: Ints,
    k: int,
    vote: Vote = "similarity",
) -> Ints:
    """The class of each query: argmax_c of the summed similarities of its candidates of class c (Eq. 24, 25).

    ``vote="majority"`` counts each candidate once, as a plain k-NN classifier of one metric does. Of equal classes the
    smallest is taken. Raises ValueError as ``candidates``, for another vote, and unless each item has a label.
    """
    if vote not in ("similarity", "majority"):
        raise ValueError(f"vote={vote!r}: choose similarity or majority")
    if len(labels_M) != len(gallery_MD):
        raise ValueError(f"{len(gallery_MD)} gallery items, {len(labels_M)} labels: give one each")
    found = candidates(learner, query_QD, gallery_MD, k)
    class_C, class_M = np.unique(labels_M, return_inverse=True)
    num_queries = len(found.index_QLK)
    class_QX = class_M[found.index_QLK].reshape(num_queries, -1)
    score_QX = found.similarity_QLK.reshape(num_queries, -1)
    if vote == "majority":
        score_QX = np.ones_like(score_QX)
    place_QX = np.arange(num_queries)[:, None] * len(class_C) + class_QX
    score_QC = np.bincount(place_QX.ravel(), score_QX.ravel(), num_queries * len(class_C))
    return np.asarray(class_C[score_QC.reshape(num_queries, -1).argmax(axis=1)])


def pair_distances(
    learner: OnlineLearner, x_PD: NDArray[np.floating], other_PD: NDArray[np.floating]
) -> Floats:
    """(P, L + 1): the distance of each pair's points in each layer, in [0, 2] where embeddings are unit vectors.

    Raises ValueError where there are not as many of the one as of the other.
    """
    if len(x_PD) != len(other_PD):
        raise ValueError(f"{len(x_PD)} points and {len(other_PD)} others; give as many, a pair in each row")
    pairs = zip(learner.embed(x_PD, "query"), learner.embed(other_PD), strict=True)
    return np.stack([np.linalg.norm(a_PE - b_PE, axis=1) for a_PE, b_PE in pairs], axis=1)


def are_similar(
    learner: OnlineLearner, x_PD: NDArray[np.floating], other_PD: NDArray[np.floating], threshold: float
) -> NDArray[np.bool_]:
    """True where P = sum_l alpha^l [D^l / 2 < T] >= 1/2 (Eq. 26), for a threshold T in (0, 1)."""
    if not 0 < threshold < 1:
        raise ValueError(f"threshold={threshold} must lie between 0 and 1: distances are halved")
    half_PL = pair_distances(learner, x_PD, other_PD) / 2
    return np.asarray((half_PL < threshold) @ learner.layer_weights >= 0.5)


def dissimilarity(
    learner: OnlineLearner, x_PD: NDArray[np.floating], other_PD: NDArray[np.floating]
) -> Floats:
    """The least threshold beyond which a pair is similar: the alpha-weighted lower median of D^l / 2.

    ``are_similar`` with T is this < T; so the ROC of all thresholds is that of this one number.
    """
    half_PL = pair_distances(learner, x_PD, other_PD) / 2
    order_PL = np.argsort(half_PL, axis=1, kind="stable")
    reached_PL = np.cumsum(learner.layer_weights[order_PL], axis=1)
    reached_PL[:, -1] = 1  # the sum of all, but for rounding
    place_P = (reached_PL >= 0.5).argmax(axis=1)
    at_P = np.arange(len(half_PL))
    return np.asarray(half_PL[at_P, order_PL[at_P, place_P]])


def retrieve_distinct(
    learner: OnlineLearner,
    query_QD: NDArray[np.floating],
    gallery_MD: NDArray[np.floating],
    k: int,
    merge: Merge = "max",
    self_index: Ints | None = None,
) -> tuple[Ints, Floats]:
    """The k most similar distinct items of each query, most similar first, and their similarities (Eq. 27).

    An item that several layers find has the largest of its similarities (``merge="max"``) or their sum; ties by
    gallery index. ``self_index`` is as of ``candidates``. Raises ValueError as that, and for a merge not of these.
    """
    if merge not in ("max", "sum"):
        raise ValueError(f"merge={merge!r}: choose max or sum")
    found = candidates(learner, query_QD, gallery_MD, k, self_index)
    num_queries, _, k = found.index_QLK.shape
    index_QX = found.index_QLK.reshape(num_queries, -1)
    order_QX = np.argsort(index_QX, axis=1, kind="stable")
    index_QX = np.take_along_axis(index_QX, order_QX, 1)
    score_QX = np.take_along_axis(found.similarity_QLK.reshape(num_queries, -1), order_QX, 1)
    is_first_QX = np.ones_like(index_QX, dtype=bool)
    is_first_QX[:, 1:] = index_QX[:, 1:] != index_QX[:, :-1]
    start = np.flatnonzero(is_first_QX)
    merged = (np.maximum if merge == "max" else np.add).reduceat(score_QX.ravel(), start)
    score_QX = np.full(index_QX.shape, -np.inf)
    score_QX.ravel()[start] = merged
    best_QK = np.argsort(-score_QX, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(index_QX, best_QK, 1), np.take_along_axis(score_QX, best_QK, 1)


def judged(labels_Q: Ints, predicted_Q: Ints) -> dict[str, float]:
    """Error rate and macro F1 over the classes of either side (F1 of a class never predicted: 0)."""
    error_rate = float((labels_Q != predicted_Q).mean())
    macro_f1 = float(f1_score(labels_Q, predicted_Q, average="macro", zero_division=0))
    return {"error_rate": error_rate, "accuracy": 1 - error_rate, "macro_f1": macro_f1}


def roc_auc(dissimilarity_P: Floats, is_similar_P: NDArray[np.bool_]) -> float:
    """Area under the curve of true positives against false ones as the threshold grows."""
    return float(roc_auc_score(is_similar_P, -dissimilarity_P))
