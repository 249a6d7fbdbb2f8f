"""Classification, comparison and retrieval against the paper's words in loops (OAHU, section 3.6)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]
from sklearn.neighbors import KNeighborsClassifier  # type: ignore[import-untyped]

from dmlstudy.online import applications
from dmlstudy.online.learner import Flags, Floats, OnlineLearner, Side, State


class Fixed(OnlineLearner):
    """Some layers that are coordinates of the points, with given weights."""

    arity = 3

    def __init__(self, layers: Sequence[slice], weights: Sequence[float]) -> None:
        super().__init__(4)
        self._layers, self._weights = layers, weights

    def embed(self, x_ND: np.ndarray, side: Side = "gallery") -> list[Floats]:
        return [self._points(x_ND)[:, layer] for layer in self._layers]

    @property
    def layer_weights(self) -> Floats:
        return np.array(self._weights)

    def _learn(self, x_BCD: Floats, *told_B: object) -> tuple[Floats, Flags]:
        raise NotImplementedError

    def _parameters(self) -> State:
        return {}

    def _set_parameters(self, state: State) -> None:
        pass


def three_layers() -> Fixed:
    return Fixed([slice(0, 2), slice(1, 3), slice(0, 4)], [0.5, 0.3, 0.2])


def grid(num: int, seed: int) -> np.ndarray:
    """Small integers, so that distances are exact and ties abound."""
    return np.random.default_rng(seed).integers(0, 4, (num, 4)).astype(float)


def by_loops(learner: Fixed, query: np.ndarray, gallery: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
    """For each query, (item, similarity) of every candidate of every layer."""
    found = []
    for q in query:
        candidates = []
        for layer, weight in zip(learner._layers, learner._weights, strict=True):
            distances = sorted((math.dist(q[layer], g[layer]), index) for index, g in enumerate(gallery))[:k]
            least, most = distances[0][0], distances[-1][0]
            for distance, index in distances:
                exponent = (distance - least) / (most - least) if most > least else 0.0
                candidates.append((index, math.exp(-exponent) * weight))
        found.append(candidates)
    return found


@pytest.mark.parametrize("k", [1, 2, 7])
def test_classes_are_those_of_the_largest_summed_similarity(k: int) -> None:
    learner, gallery, query = three_layers(), grid(60, 0), grid(40, 1)
    labels = np.random.default_rng(2).choice([3, 5, 11, 20], 60)
    expected, most = [], []
    for candidates in by_loops(learner, query, gallery, k):
        scores = {c: sum(s for index, s in candidates if labels[index] == c) for c in (3, 5, 11, 20)}
        counts = {c: sum(labels[index] == c for index, _ in candidates) for c in (3, 5, 11, 20)}
        expected.append(max(scores, key=lambda c, scores=scores: (round(scores[c], 12), -c)))
        most.append(max(counts, key=lambda c, counts=counts: (counts[c], -c)))
    assert applications.classify(learner, query, gallery, labels, k).tolist() == expected
    assert applications.classify(learner, query, gallery, labels, k, "majority").tolist() == most


def test_of_one_layer_a_majority_is_that_of_a_plain_classifier() -> None:
    rng = np.random.default_rng(0)
    gallery, query, labels = rng.normal(size=(200, 4)), rng.normal(size=(90, 4)), rng.integers(0, 5, 200)
    plain = KNeighborsClassifier(5, algorithm="brute").fit(gallery, labels).predict(query)
    learner = Fixed([slice(0, 4)], [1.0])
    assert applications.classify(learner, query, gallery, labels, 5, "majority").tolist() == plain.tolist()


@pytest.mark.parametrize("merge", ["max", "sum"])
def test_retrieved_items_are_distinct_and_the_most_similar(merge: str) -> None:
    learner, gallery, query, k = three_layers(), grid(50, 3), grid(30, 4), 6
    index, similarity = applications.retrieve_distinct(learner, query, gallery, k, merge)  # type: ignore[arg-type]
    for row, candidates in enumerate(by_loops(learner, query, gallery, k)):
        merged: dict[int, float] = {}
        for item, score in candidates:
            merged[item] = max(merged.get(item, 0), score) if merge == "max" else merged.get(item, 0) + score
        best = sorted(merged.items(), key=lambda pair: (-round(pair[1], 12), pair[0]))[:k]
        np.testing.assert_allclose(similarity[row], [score for _, score in best], rtol=1e-6)
        assert len(set(index[row])) == k
        for item, score in zip(index[row], similarity[row], strict=True):
            assert merged[item] == pytest.approx(score, rel=1e-6)


def test_a_query_that_is_in_the_gallery_is_not_its_own_candidate() -> None:
    learner, gallery = three_layers(), grid(50, 3)
    itself = np.arange(10, 30)
    index, _ = applications.retrieve_distinct(learner, gallery[itself], gallery, 6, self_index=itself)
    assert not (index == itself[:, None]).any()
    for row, q in enumerate(itself):
        others = np.delete(np.arange(50), q)
        ((expected,),) = [by_loops(learner, gallery[q : q + 1], gallery[others], 6)]
        best = {others[item]: 0.0 for item, _ in expected}
        for item, score in expected:
            best[others[item]] = max(best[others[item]], score)
        order = sorted(best.items(), key=lambda pair: (-round(pair[1], 12), pair[0]))[:6]
        assert index[row].tolist() == [item for item, _ in order]


def test_pairs_are_similar_below_the_threshold_and_one_number_has_the_roc_of_all() -> None:
    learner, rng = three_layers(), np.random.default_rng(0)
    x, other = rng.normal(size=(300, 4)) / 4, rng.normal(size=(300, 4)) / 4
    least = applications.dissimilarity(learner, x, other)
    half = applications.pair_distances(learner, x, other) / 2
    for threshold in np.linspace(0.01, 0.99, 99):
        by_words = [
            sum(w for w, d in zip(learner._weights, row, strict=True) if d < threshold) >= 0.5 for row in half
        ]
        found = applications.are_similar(learner, x, other, threshold)
        assert found.tolist() == by_words
        assert found.tolist() == (least < threshold).tolist()
    is_similar = rng.random(300) < np.exp(-least)
    points = [(0.0, 0.0), (1.0, 1.0)]
    for threshold in np.unique(least) + 1e-12:
        found = least < threshold
        points.append((float(found[~is_similar].mean()), float(found[is_similar].mean())))
    rate = np.array(sorted(points))
    area = float(np.trapezoid(rate[:, 1], rate[:, 0]))
    assert applications.roc_auc(least, is_similar) == pytest.approx(area)
    assert area == pytest.approx(roc_auc_score(is_similar, -least))


def test_what_is_judged() -> None:
    scores = applications.judged(np.array([0, 0, 1, 1, 2]), np.array([0, 1, 1, 1, 0]))
    f1 = [2 / (2 + 1 + 1), 4 / (4 + 1), 0.0]
    assert scores == {
        "error_rate": pytest.approx(0.4),
        "accuracy": pytest.approx(0.6),
        "macro_f1": pytest.approx(np.mean(f1)),
    }


def test_bad_questions() -> None:
    learner, x = three_layers(), grid(5, 0)
    labels = np.arange(5)
    with pytest.raises(ValueError, match="choose similarity or majority"):
        applications.classify(learner, x, x, labels, 1, "most")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="5 gallery items, 4 labels"):
        applications.classify(learner, x, x, labels[:4], 1)
    with pytest.raises(ValueError, match="k = 0"):
        applications.candidates(learner, x, x, 0)
    with pytest.raises(ValueError, match="gallery"):
        applications.candidates(learner, x, x[:0], 1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        applications.are_similar(learner, x, x, 1.0)
    with pytest.raises(ValueError, match=r"1 points and [0-9]+ others; give as many, a pair in each row"):
        applications.are_similar(learner, x[:1], x, 0.5)
    with pytest.raises(ValueError, match="choose max or sum"):
        applications.retrieve_distinct(learner, x, x, 1, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"takes \(N, 4\)"):
        applications.dissimilarity(learner, x[:, :3], x[:, :3])
