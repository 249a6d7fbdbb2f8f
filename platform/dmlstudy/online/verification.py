"""Verification: whether two points are of one class, with the threshold chosen on other pairs (LFW's protocol).

Shapes: N points, D features, P pairs, F folds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy.data.lfw import FacePairs
from dmlstudy.online.applications import dissimilarity, roc_auc
from dmlstudy.online.learner import Flags, Floats, OnlineLearner


class Verified(NamedTuple):
    """Accuracy by folds, each with the threshold of the others; their mean and its standard error; AUC of all pairs."""

    accuracy_F: Floats
    threshold_F: Floats
    accuracy: float
    standard_error: float
    auc: float


def best_threshold(dissimilarity_P: Floats, is_similar_P: Flags) -> float:
    """The T for which most pairs are told rightly by ``dissimilarity < T``, of equally good ones the lowest.

    T lies halfway between two neighbouring values, or is -inf (no pair is similar) or inf (all are).
    Raises ValueError without pairs.
    """
    if not len(dissimilarity_P):
        raise ValueError("no pairs to choose a threshold by")
    value_V, place_P = np.unique(dissimilarity_P, return_inverse=True)
    gain_V = np.bincount(place_P, np.where(is_similar_P, 1, -1), len(value_V))
    num_right_T = np.concatenate([[0], np.cumsum(gain_V)])  # more than where no pair is called similar
    middle = (value_V[:-1] + value_V[1:]) / 2
    threshold_T = np.concatenate([[-np.inf], np.where(middle > value_V[:-1], middle, value_V[1:]), [np.inf]])
    return float(threshold_T[num_right_T.argmax()])


def verify(learner: OnlineLearner, x_ND: NDArray[np.floating], folds: Sequence[FacePairs]) -> Verified:
    """Verification of pairs by the learned metric: each fold with the threshold that is best on all the others.

    The standard error is that of the mean over folds, s / sqrt(F). Raises ValueError for fewer than two folds.
    """
    if len(folds) < 2:
        raise ValueError(f"{len(folds)} folds: a fold's threshold is chosen on the others; give two or more")
    apart = [_apart(learner, x_ND, fold) for fold in folds]
    accuracy_F, threshold_F = np.empty(len(folds)), np.empty(len(folds))
    for number, fold in enumerate(folds):
        others = [other for other in range(len(folds)) if other != number]
        threshold_F[number] = best_threshold(
            np.concatenate([apart[other] for other in others]),
            np.concatenate([folds[other].is_similar_P for other in others]),
        )
        accuracy_F[number] = ((apart[number] < threshold_F[number]) == fold.is_similar_P).mean()
    return Verified(
        accuracy_F,
        threshold_F,
        float(accuracy_F.mean()),
        float(accuracy_F.std(ddof=1) / math.sqrt(len(folds))),
        roc_auc(np.concatenate(apart), np.concatenate([fold.is_similar_P for fold in folds])),
    )


def verify_on(
    learner: OnlineLearner, x_ND: NDArray[np.floating], train: FacePairs, test: FacePairs
) -> tuple[float, float]:
    """Accuracy on ``test`` with the threshold that is best on ``train``, and the AUC there: LFW's View 1."""
    threshold = best_threshold(_apart(learner, x_ND, train), train.is_similar_P)
    apart_P = _apart(learner, x_ND, test)
    return float(((apart_P < threshold) == test.is_similar_P).mean()), roc_auc(apart_P, test.is_similar_P)


def _apart(learner: OnlineLearner, x_ND: NDArray[np.floating], pairs: FacePairs) -> Floats:
    return dissimilarity(learner, x_ND[pairs.index_P2[:, 0]], x_ND[pairs.index_P2[:, 1]])
