"""Online learners as others' estimators: their own checks, and the numbers of the learner itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from river.checks import yield_checks
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from dmlstudy import online
from dmlstudy.online.constraints import one_pass_triplets
from dmlstudy.online.estimators import MetricOneByOne, MetricTransformer, OnePass

X = np.random.default_rng(0).normal(size=(60, 5))
Y = np.random.default_rng(1).integers(0, 4, 60)

NAMES = [name for name in online.LEARNERS if name not in ("oasis", "lego")]


@parametrize_with_checks([MetricTransformer(), MetricTransformer("rdml"), MetricTransformer("oahu")])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("check", list(yield_checks(MetricOneByOne())), ids=lambda check: check.__name__)
def test_rivers_own_checks(check: Any) -> None:
    check(MetricOneByOne())


def test_the_pass_is_that_of_the_papers() -> None:
    one_pass = OnePass(1000)
    found = [one_pass.triplet(x_D, label) for x_D, label in zip(X, Y.tolist(), strict=True)]
    got = np.stack([np.stack(each) for each in found if each is not None])
    np.testing.assert_array_equal(got, X[np.array(list(one_pass_triplets(Y.tolist())))])


def test_a_pass_keeps_so_many_classes_alone() -> None:
    one_pass = OnePass(3)
    for number in range(100):
        one_pass.triplet(X[0] + number, number)
    assert list(one_pass.newest) == [97, 98, 99]
    with pytest.raises(ValueError, match="max_classes=1 must be at least 2"):
        OnePass(1)


def taught(name: str) -> online.OnlineLearner:
    """The learner itself, with the constraints of one pass."""
    learner = online.build(name, {}, num_features=5, seed=0, on_invalid="skip")
    learner.prepare(X, 0)
    if learner.arity == 1:
        learner.partial_fit(online.Constraints(X[:, None], None, Y))
        return learner
    x_T3D = X[np.array(list(one_pass_triplets(Y.tolist())))]
    if learner.arity == 3:
        learner.partial_fit(online.Constraints(x_T3D))
    else:
        pairs = np.stack([x_T3D[:, [0, 1]], x_T3D[:, [0, 2]]], axis=1).reshape(-1, 2, 5)
        learner.partial_fit(online.Constraints(pairs, np.tile([True, False], len(x_T3D))))
    return learner


def embedded(learner: online.OnlineLearner) -> np.ndarray:
    alpha = learner.layer_weights
    return np.concatenate([a**0.5 * f for a, f in zip(alpha, learner.embed(X), strict=True)], axis=1)


@pytest.mark.parametrize("name", [*NAMES, "lego"])
def test_numbers_are_the_learners(name: str) -> None:
    wanted = embedded(taught(name))
    np.testing.assert_allclose(MetricTransformer(name).fit(X, Y).transform(X), wanted, rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_points_one_by_one_are_one_pass(name: str) -> None:
    wanted = embedded(taught(name))
    parts, single = MetricTransformer(name), MetricOneByOne(name)
    for rows in np.array_split(np.arange(60), 7):
        parts.partial_fit(X[rows], Y[rows])
    points = [{f"f{i}": value for i, value in enumerate(x_D.tolist())} for x_D in X]
    for point, label in zip(points, Y.tolist(), strict=True):
        single.learn_one(point, label)
    np.testing.assert_allclose(parts.transform(X), wanted, rtol=1e-9)
    got = [list(single.transform_one(point).values()) for point in points]
    np.testing.assert_allclose(got, wanted, rtol=1e-9)


def test_class_means_are_kept_of_so_many_classes_alone() -> None:
    metric = MetricOneByOne("slda", max_classes=3)
    for number in range(20):
        metric.learn_one({"a": float(number), "b": 1.0}, f"class {number}")
        metric.learn_one({"a": 0.0, "b": 2.0}, "class 0")
    assert metric._taught is not None
    assert list(metric._taught.numbers) == ["class 18", "class 19", "class 0"]
    state = metric._taught.learner.state()
    assert len(state["slda_mean"]) == 3


def test_it_stands_in_a_pipeline() -> None:
    x, y = load_digits(return_X_y=True)
    pipeline = make_pipeline(MetricTransformer("opml"), KNeighborsClassifier())
    assert pipeline.fit(x[:500] / 16, y[:500]).score(x[500:700] / 16, y[500:700]) > 0.7


def test_what_cannot_be_learned_from_is_refused() -> None:
    with pytest.raises(ValueError, match="'oasis' embeds queries otherwise than a gallery"):
        MetricTransformer("oasis").fit(X, Y)
    with pytest.raises(ValueError, match="did you mean"):
        MetricTransformer("opmll").fit(X, Y)
    with pytest.raises(ValueError, match="feature 'b' is 'red', no number; encode it before"):
        MetricOneByOne().learn_one({"a": 1.0, "b": "red"}, 1)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=f"feature 'b' is {wrong}; leave the point out, or impute it before"
        ):
            MetricOneByOne().learn_one({"a": 1.0, "b": wrong}, 1)
