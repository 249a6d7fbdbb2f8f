"""Learners of running means against plain loops and NumPy, and their states, labels and bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dmlstudy import online
from dmlstudy.online.constraints import labelled_points
from dmlstudy.online.learner import Constraints, Floats
from dmlstudy.online.program import LearnedLayers
from dmlstudy.online.running import NearestClassMean, RunningLearner, StreamingLDA, Whitening

D, C = 6, 4
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, C, 300) * 7 - 3
X: Floats = RNG.normal(size=(300, D)) @ RNG.normal(size=(D, D)) + RNG.normal(size=(100, D))[LABELS]

BUILDERS = {
    "slda": lambda: StreamingLDA(D, shrinkage=0.03),
    "nearest_class_mean": lambda: NearestClassMean(D),
    "whitening": lambda: Whitening(D, shrinkage=0.03),
}
each = pytest.mark.parametrize("name", BUILDERS)


def points(rows: slice = slice(None)) -> Constraints:
    return Constraints(X[rows, None], None, LABELS[rows])


def trained(name: str, sizes: tuple[int, ...] = (300,)) -> RunningLearner:
    learner = BUILDERS[name]()
    start = 0
    for size in sizes:
        learner.partial_fit(points(slice(start, start + size)))
        start += size
    return learner


def by_loops(labels: np.ndarray) -> tuple[dict[int, Floats], Floats, list[float]]:
    """The paper's updates, one after another: means, covariance, squared distances from the mean before."""
    means: dict[int, Floats] = {}
    counts: dict[int, int] = {}
    sigma, losses = np.zeros((D, D)), []
    for t, (x, c) in enumerate(zip(X, labels.tolist(), strict=True)):
        d = x - means[c] if c in means else np.zeros(D)
        delta = t / (t + 1) * np.outer(d, d)
        sigma = (t * sigma + delta) / (t + 1)
        means[c] = means[c] + d / (counts[c] + 1) if c in means else x
        counts[c] = counts.get(c, 0) + 1
        losses.append(float(d @ d))
    return means, sigma, losses


def test_slda_is_the_papers_loop_and_rule() -> None:
    learner = StreamingLDA(D, shrinkage=0.03)
    losses = learner.partial_fit(points())
    means, sigma, expected = by_loops(LABELS)
    np.testing.assert_allclose(learner.covariance, sigma, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    assert learner.classes.tolist() == list(means)
    inverse = np.linalg.inv(0.97 * sigma + 0.03 * np.eye(D))
    query = X[:50] + 0.3
    score = np.array([[m @ inverse @ q - m @ inverse @ m / 2 for m in means.values()] for q in query])
    predicted = learner.predict(query)
    np.testing.assert_array_equal(predicted, np.array(list(means))[score.argmax(axis=1)])
    (z,) = learner.embed(query)
    apart = query[0] - query[1]
    assert ((z[0] - z[1]) ** 2).sum() == pytest.approx(apart @ inverse @ apart)


def test_class_means_are_means_and_the_nearest_tells() -> None:
    learner = trained("nearest_class_mean")
    means = np.stack([X[c == LABELS].mean(axis=0) for c in learner.classes])
    np.testing.assert_allclose(learner.means, means, rtol=1e-12)
    nearest = np.linalg.norm(X[:, None] - means, axis=2).argmin(axis=1)
    np.testing.assert_array_equal(learner.predict(X), learner.classes[nearest])
    np.testing.assert_array_equal(learner.embed(X)[0], X)
    with pytest.raises(ValueError, match="NearestClassMean has no covariance"):
        _ = learner.covariance


def test_whitening_is_that_of_the_whole_covariance() -> None:
    learner = trained("whitening", (1, 2, 240, 57))
    np.testing.assert_allclose(learner.covariance, np.cov(X.T, bias=True), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(learner.means, X.mean(axis=0)[None], rtol=1e-12)
    fine = Whitening(D, shrinkage=1e-12)
    fine.partial_fit(points())
    np.testing.assert_allclose(np.cov(fine.embed(X)[0].T, bias=True), np.eye(D), atol=1e-6)
    assert learner.predict(X) is None
    other = Whitening(D, shrinkage=0.03)
    other.partial_fit(points()._replace(label_B=np.arange(300)))
    np.testing.assert_allclose(other.covariance, learner.covariance, rtol=1e-10)


def test_shrunk_to_the_identity_slda_is_the_nearest_mean() -> None:
    whole = StreamingLDA(D, shrinkage=1.0)
    whole.partial_fit(points())
    np.testing.assert_array_equal(whole.predict(X), trained("nearest_class_mean").predict(X))
    np.testing.assert_allclose(whole.embed(X)[0], X, rtol=1e-12)


def test_a_shift_of_all_points_changes_no_class_and_no_distance() -> None:
    shifted = StreamingLDA(D, shrinkage=0.03)
    shifted.partial_fit(Constraints(X[:, None] + 1e4, None, LABELS))
    np.testing.assert_array_equal(shifted.predict(X + 1e4), trained("slda").predict(X))


@each
def test_every_point_is_used_and_one_by_one_is_the_same(name: str) -> None:
    together, single = trained(name), trained(name, (1,) * 300)
    assert single.counts == together.counts == (300, 300, 0)
    for key, value in together.state().items():
        np.testing.assert_allclose(single.state()[key], value, rtol=1e-9, atol=1e-9)


@each
def test_restored_it_goes_on_bit_for_bit(name: str) -> None:
    whole, half, other = trained(name, (120, 180)), trained(name, (120,)), BUILDERS[name]()
    other.restore(half.state())
    other.partial_fit(points(slice(120, None)))
    half.embed(X)
    half.partial_fit(points(slice(120, None)))
    for learner in (other, half):
        for key, value in whole.state().items():
            np.testing.assert_array_equal(learner.state()[key], value)
        np.testing.assert_array_equal(learner.embed(X)[0], whole.embed(X)[0])


@each
def test_saved_and_as_a_program_it_is_the_same_map(name: str, tmp_path: Path) -> None:
    import torch

    learner = trained(name)
    learned = online.Learned(learner, online.Preparation.of("standardize", X), name, {})
    if name != "nearest_class_mean":
        learned = learned._replace(params={"shrinkage": 0.03})
    online.save(learned, tmp_path / "model", {}, X[:3])
    kept = online.load(tmp_path / "model")
    np.testing.assert_array_equal(kept.embed(X), learned.embed(X))
    if learner.has_classes:
        np.testing.assert_array_equal(kept.learner.predict(X), learner.predict(X))
    computed = LearnedLayers(kept)(torch.from_numpy(X.astype(np.float32))).numpy()
    np.testing.assert_allclose(computed, learned.embed(X.astype(np.float32)), rtol=1e-4, atol=1e-4)


def test_a_forgotten_class_is_never_told() -> None:
    learner = trained("slda")
    gone = int(learner.classes[1])
    learner.forget(gone)
    predicted = learner.predict(X)
    assert predicted is not None
    assert gone not in predicted
    assert len(learner.means) == C - 1


def test_labelled_points_are_each_row_once() -> None:
    stream = labelled_points(LABELS, 100, np.random.default_rng(1))
    row_T = stream.index_TC[:, 0]
    assert len(set(row_T.tolist())) == 100
    np.testing.assert_array_equal(stream.label_T, LABELS[row_T])
    (first, *rest) = stream.blocks(X, 60)
    np.testing.assert_array_equal(first.x_BCD[:, 0], X[row_T[:60]])
    assert rest[0].label_B is not None
    np.testing.assert_array_equal(rest[0].label_B, LABELS[row_T[60:]])
    assert len(labelled_points(LABELS, 10_000, np.random.default_rng(1)).index_TC) == 300
    with pytest.raises(ValueError, match="num=0"):
        labelled_points(LABELS, 0, np.random.default_rng(1))
    with pytest.raises(ValueError, match="give one whole number for each"):
        labelled_points(["a", "b"], 1, np.random.default_rng(1))


@each
def test_bad_input_is_refused_or_passed_over(name: str) -> None:
    learner = trained(name)
    before = learner.state()
    bad = X[:5].copy()
    bad[2, 1] = np.nan
    with pytest.raises(ValueError, match="constraint 302 is not finite"):
        learner.partial_fit(Constraints(bad[:, None], None, LABELS[:5]))
    with pytest.raises(ValueError, match="labelled points need label_B"):
        learner.partial_fit(Constraints(X[:5, None]))
    with pytest.raises(ValueError, match="learns from labelled points of shape"):
        learner.partial_fit(Constraints(X[:6].reshape(2, 3, D)))
    with pytest.raises(ValueError, match=r"state '.*_mean': this .* needs float64 of shape"):
        learner.restore({**before, f"{learner.prefix}_mean": np.zeros((4, D + 1))})
    with pytest.raises(ValueError, match="each class has one"):
        learner.restore({**before, f"{learner.prefix}_mean": np.zeros((9, D))})
    for key, value in learner.state().items():
        np.testing.assert_array_equal(value, before[key])
    skipping = online.build(name, {}, num_features=D, on_invalid="skip")
    losses = skipping.partial_fit(Constraints(bad[:, None], None, LABELS[:5]))
    assert np.isnan(losses).tolist() == [False, False, True, False, False]
    assert skipping.counts == (5, 4, 1)
    assert all(np.isfinite(value).all() for value in skipping.state().values())


@pytest.mark.parametrize("shrinkage", [0.0, -1.0, 1.5, float("nan")])
def test_shrinkage_lies_between_0_and_1(shrinkage: float) -> None:
    with pytest.raises(ValueError, match="shrinkage="):
        StreamingLDA(D, shrinkage=shrinkage)
    with pytest.raises(ValueError, match="shrinkage="):
        Whitening(D, shrinkage=shrinkage)


def test_before_its_first_point_it_has_no_rule() -> None:
    assert StreamingLDA(D).predict(X) is None
    np.testing.assert_allclose(StreamingLDA(D, shrinkage=0.25).embed(X)[0], 2 * X)
