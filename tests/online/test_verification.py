"""Verification by folds against loops: thresholds of the other folds, accuracy with its standard error, AUC."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

from dmlstudy import online
from dmlstudy.data.lfw import FacePairs
from dmlstudy.online import constraints
from dmlstudy.online.verification import best_threshold, verify, verify_on

D = 6


def people(num: int = 30, each: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points around one centre per person; half of the features say nothing."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(num), each)
    centres = rng.normal(size=(num, D)) * np.array([1, 1, 1, 0, 0, 0])
    noise = np.array([0.4, 0.4, 0.4, 1, 1, 1]) * rng.normal(size=(len(labels), D))
    return (centres[labels] + noise).astype(np.float32), labels


def folds_of(labels: np.ndarray, num_folds: int, num: int = 40) -> list[FacePairs]:
    found = []
    for seed in range(num_folds):
        pairs = constraints.sample_pairs(labels, num, np.random.default_rng(seed))
        assert pairs.is_similar_T is not None
        found.append(FacePairs(pairs.index_TC, pairs.is_similar_T))
    return found


def accuracy_at(threshold: float, apart: list[float], similar: list[bool]) -> float:
    return sum((d < threshold) == s for d, s in zip(apart, similar, strict=True)) / len(apart)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("decimals", [1, 6])
def test_no_threshold_is_better_and_none_as_good_is_lower(seed: int, decimals: int) -> None:
    rng = np.random.default_rng(seed)
    apart = np.round(rng.random(25), decimals)  # with ties, where there is one digit
    similar = rng.random(25) < np.where(apart < 0.5, 0.8, 0.2)
    found = best_threshold(apart, similar)
    values = sorted(set(apart.tolist()))
    tried = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(values)), math.inf]
    scores = [accuracy_at(t, apart.tolist(), similar.tolist()) for t in tried]
    assert found == tried[scores.index(max(scores))]


def test_thresholds_at_the_ends() -> None:
    apart = np.array([0.1, 0.2])
    assert best_threshold(apart, np.array([True, True])) == math.inf
    assert best_threshold(apart, np.array([False, False])) == -math.inf
    near = np.array([1.0, np.nextafter(1.0, 2)])
    assert ((near < best_threshold(near, np.array([True, False]))) == [True, False]).all()
    with pytest.raises(ValueError, match="no pairs"):
        best_threshold(np.empty(0), np.empty(0, bool))


def test_folds_are_judged_by_the_others_threshold() -> None:
    x, labels = people()
    learner, folds = online.OAHU(D, num_hidden=2, width=8, size=4), folds_of(labels, 10)
    found = verify(learner, x, folds)
    apart = [online.dissimilarity(learner, x[f.index_P2[:, 0]], x[f.index_P2[:, 1]]).tolist() for f in folds]
    accuracies = []
    for number, fold in enumerate(folds):
        others = [other for other in range(10) if other != number]
        threshold = best_threshold(
            np.array([d for other in others for d in apart[other]]),
            np.concatenate([folds[other].is_similar_P for other in others]),
        )
        assert found.threshold_F[number] == threshold
        same = online.are_similar(learner, x[fold.index_P2[:, 0]], x[fold.index_P2[:, 1]], threshold)
        accuracies.append(float((same == fold.is_similar_P).mean()))
    np.testing.assert_allclose(found.accuracy_F, accuracies)
    assert found.accuracy == pytest.approx(statistics.fmean(accuracies))
    assert found.standard_error == pytest.approx(statistics.stdev(accuracies) / math.sqrt(10))
    similar = np.concatenate([fold.is_similar_P for fold in folds])
    assert found.auc == pytest.approx(roc_auc_score(similar, -np.concatenate(apart)))
    with pytest.raises(ValueError, match="1 folds"):
        verify(learner, x, folds[:1])


def test_learning_helps_and_no_constraint_holds_a_pair_that_is_judged() -> None:
    """As OAHU's section 4.4: constraints of labels, drawn anew where they hold a held-out pair."""
    x, labels = people(60)
    train, test, *folds = folds_of(labels, 6, 60)
    held_out = np.concatenate([each.index_P2 for each in (train, test, *folds)])
    learner = online.build("opml", {"step_size": 0.01}, num_features=D)
    plain = online.build("euclidean", {}, num_features=D)
    stream = constraints.stream_of(labels, 3, 2000, 0, rng=np.random.default_rng(0), exclude=held_out)
    forbidden = {frozenset(pair) for pair in held_out.tolist()}
    for triplet in stream.index_TC.tolist():
        assert not forbidden & {frozenset((a, b)) for a in triplet for b in triplet if a != b}
    for block in stream.blocks(x, 500):
        learner.partial_fit(block)
    before, after = verify(plain, x, folds), verify(learner, x, folds)
    assert after.auc > before.auc + 0.02
    assert after.accuracy > before.accuracy
    accuracy, auc = verify_on(learner, x, train, test)
    assert accuracy > verify_on(plain, x, train, test)[0]
    assert 0.5 < auc <= 1
