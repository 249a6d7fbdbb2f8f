"""The linear learners against their formulas with whole matrices, what these imply, and one contract for all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from dmlstudy.online import linear
from dmlstudy.online.learner import Constraints, Counts, Floats
from dmlstudy.online.linear import (
    LEGO,
    OASIS,
    OPML,
    RDML,
    LinearLearner,
    PairHinge,
    TripletHinge,
    lowest_eigenpair,
)

D = 12


def lego(num_features: int, similar: float, dissimilar: float, eta: float) -> LEGO:
    learner = LEGO(num_features, eta=eta)
    learner.limit(similar, dissimilar)
    return learner


BUILDERS: dict[str, Callable[[], LinearLearner]] = {
    "lego": lambda: lego(D, 2.0, 9.0, 0.01),
    "rdml-exact": lambda: RDML(D, step_size=0.02),
    "rdml-capped": lambda: RDML(D, step_size=0.001, projection="capped"),
    "rdml-from-identity": lambda: RDML(D, step_size=0.02, initial="identity"),
    "rdml-capped-from-identity": lambda: RDML(D, step_size=0.001, projection="capped", initial="identity"),
    "oasis": lambda: OASIS(D, aggressiveness=0.05),
    "opml": lambda: OPML(D, step_size=0.03),
    "pair-hinge": lambda: PairHinge(D, bound=9.0, eta=0.001),
    "triplet-hinge": lambda: TripletHinge(D, margin=0.3, eta=0.02),
}
"""Learners that use some constraints of ``stream`` and pass others by."""

each_learner = pytest.mark.parametrize("name", BUILDERS)


def points(num_points: int, seed: int = 0) -> tuple[Floats, np.ndarray]:
    """Points of four classes, and their classes."""
    rng = np.random.default_rng(seed)
    class_N = rng.integers(0, 4, num_points)
    return 0.6 * rng.normal(size=(4, D))[class_N] + 0.8 * rng.normal(size=(num_points, D)), class_N


def stream(arity: int, num_constraints: int, seed: int = 0) -> Constraints:
    x_ND, class_N = points(80, seed)
    rng = np.random.default_rng(seed + 1)
    chosen, is_similar = [], []
    while len(chosen) < num_constraints:
        i, j, k = rng.integers(0, len(x_ND), 3)
        if i != j and (arity == 2 or class_N[i] == class_N[j] != class_N[k]):
            chosen.append([i, j, k][:arity])
            is_similar.append(class_N[i] == class_N[j])
    chosen_BC = np.array(chosen, int).reshape(-1, arity)
    return Constraints(x_ND[chosen_BC], np.array(is_similar, bool) if arity == 2 else None)


def part(constraints: Constraints, start: int, stop: int | None = None) -> Constraints:
    x_BCD, is_similar_B, _ = constraints
    return Constraints(x_BCD[start:stop], None if is_similar_B is None else is_similar_B[start:stop])


def one_by_one(constraints: Constraints) -> list[Constraints]:
    return [part(constraints, i, i + 1) for i in range(len(constraints.x_BCD))]


def pair(z_D: Floats, is_similar: bool) -> Constraints:
    """A pair with this difference."""
    return Constraints(np.stack([z_D, np.zeros(len(z_D))])[None], np.array([is_similar]))


def triplet(a_D: Floats, b_D: Floats) -> Constraints:
    """A triplet whose anchor is 0, with these differences."""
    return Constraints(np.stack([np.zeros(len(a_D)), -a_D, -b_D])[None])


def matrix(learner: LinearLearner) -> Floats:
    """What the learner's formula calls A, W or L."""
    kept_DD = np.array(learner.state()[learner.matrix_name], np.float64)
    return kept_DD.T @ kept_DD if isinstance(learner, LEGO) else kept_DD


def is_same_state(learner: LinearLearner, other: LinearLearner) -> bool:
    one, two = learner.state(), other.state()
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def trained(name: str, num_constraints: int = 60) -> LinearLearner:
    learner = BUILDERS[name]()
    learner.partial_fit(stream(learner.arity, num_constraints))
    return learner


# Reference: one step with whole matrices; the matrix, the loss, whether the matrix moved.

Step = tuple[Floats, float, bool]


def lego_step(learner: LEGO, a: Floats, x: Floats, similar: bool) -> Step:
    z, eta = x[0] - x[1], learner.eta
    yhat = z @ a @ z
    y = learner.state()["lego_limits"][0 if similar else 1]
    if (similar and yhat <= y) or (not similar and yhat >= y):
        return a, 0.0, False
    q = eta * y * yhat - 1
    ybar = (q + math.sqrt(q**2 + 4 * eta * yhat**2)) / (2 * eta * yhat)
    moved = a - eta * (ybar - y) * np.outer(a @ z, a @ z) / (1 + eta * (ybar - y) * yhat)
    return moved, (y - yhat) ** 2 / 2, True


def rdml_step(learner: RDML, a: Floats, x: Floats, similar: bool) -> Step:
    z, y = x[0] - x[1], 1 if similar else -1
    loss = max(0.0, y * (z @ a @ z - 1))
    if y * (1 - z @ a @ z) > 0:
        return a, loss, False
    return a - y * learner.step_size * np.outer(z, z), loss, True


def rdml_exact_step(learner: RDML, a: Floats, x: Floats, similar: bool) -> Step:
    stepped, loss, used = rdml_step(learner, a, x, similar)
    values, vectors = np.linalg.eigh(stepped)
    return (vectors * values.clip(min=0)) @ vectors.T if used else a, loss, used


def rdml_capped_step(learner: RDML, a: Floats, x: Floats, similar: bool) -> Step:
    stepped, loss, used = rdml_step(learner, a, x, similar)
    if not used or not similar:
        return stepped, loss, used
    z, inverse = x[0] - x[1], np.linalg.pinv(a, rcond=1e-10, hermitian=True)
    if np.linalg.norm(a @ inverse @ z - z) > 1e-7 * np.linalg.norm(z):
        return a, loss, False
    return a - min(learner.step_size, 1 / (z @ inverse @ z)) * np.outer(z, z), loss, True


def oasis_step(learner: OASIS, w: Floats, x: Floats, similar: bool) -> Step:
    loss = max(0.0, 1 - x[0] @ w @ (x[1] - x[2]))
    v = np.outer(x[0], x[1] - x[2])
    return w + min(learner.aggressiveness, loss / np.linalg.norm(v) ** 2) * v, loss, loss > 0


def opml_step(learner: OPML, m: Floats, x: Floats, similar: bool) -> Step:
    a, b = x[0] - x[1], x[0] - x[2]
    loss = max(0.0, 1 + np.linalg.norm(m @ a) ** 2 - np.linalg.norm(m @ b) ** 2)
    perturbed = np.eye(D) + learner.step_size * (np.outer(a, a) - np.outer(b, b))
    if loss == 0 or np.linalg.eigvalsh(perturbed)[0] <= 0:
        return m, loss, False
    return m @ np.linalg.inv(perturbed), loss, True


def pair_hinge_step(learner: PairHinge, m: Floats, x: Floats, similar: bool) -> Step:
    """The loss's gradient entry by entry: d|M z|^2 / dM_rc = 2 (M z)_r z_c."""
    z, y = x[0] - x[1], 1 if similar else -1
    mapped = [sum(m[r, c] * z[c] for c in range(D)) for r in range(D)]
    loss = max(0.0, y * (sum(v * v for v in mapped) - learner.bound) + 1)
    gradient = np.array([[2 * y * mapped[r] * z[c] for c in range(D)] for r in range(D)])
    return (m - learner.eta * gradient, loss, True) if loss > 0 else (m, 0.0, False)


def triplet_hinge_step(learner: TripletHinge, m: Floats, x: Floats, similar: bool) -> Step:
    """The loss's gradient entry by entry: d|M z| / dM_rc = (M z)_r z_c / |M z|."""

    def distance_and_gradient(z: Floats) -> tuple[float, Floats]:
        mapped = [sum(m[r, c] * z[c] for c in range(D)) for r in range(D)]
        distance = math.sqrt(sum(v * v for v in mapped))
        return distance, np.array([[mapped[r] * z[c] / distance for c in range(D)] for r in range(D)])

    (positive, pull), (negative, push) = (distance_and_gradient(x[0] - other) for other in x[1:])
    loss = max(0.0, learner.margin + positive - negative)
    return (m - learner.eta * (pull - push), loss, True) if loss > 0 else (m, 0.0, False)


REFERENCES = {
    "lego": lego_step,
    "rdml-exact": rdml_exact_step,
    "rdml-capped": rdml_capped_step,
    "rdml-from-identity": rdml_exact_step,
    "rdml-capped-from-identity": rdml_capped_step,
    "oasis": oasis_step,
    "opml": opml_step,
    "pair-hinge": pair_hinge_step,
    "triplet-hinge": triplet_hinge_step,
}


@each_learner
def test_every_step_is_the_formula(name: str) -> None:
    learner = BUILDERS[name]()
    expected, num_used = matrix(learner), 0
    constraints = stream(learner.arity, 300)
    for i, one in enumerate(one_by_one(constraints)):
        similar = constraints.is_similar_B is not None and bool(constraints.is_similar_B[i])
        expected, loss, used = REFERENCES[name](learner, expected, constraints.x_BCD[i], similar)  # type: ignore[operator]
        num_used += used
        assert learner.partial_fit(one)[0] == pytest.approx(loss, rel=1e-9, abs=1e-9)
        assert learner.counts.used == num_used
        np.testing.assert_allclose(matrix(learner), expected, rtol=1e-10, atol=1e-10)
    assert 20 < num_used < 300
    if isinstance(learner, OPML):
        assert learner.num_ill_posed > 0


# Laws.


@pytest.mark.parametrize("eta", [1e-4, 0.1, 100.0])
def test_lego_moves_a_violating_pair_to_the_minimisers_distance(eta: float) -> None:
    """ybar is where the derivative of LogDet and loss is 0, 1/yhat - 1/ybar + eta (ybar - y) = 0, below or above y."""
    learner = lego(D, 2.0, 9.0, eta)
    learner.partial_fit(stream(2, 50))
    num_moved = 0
    constraints = stream(2, 60, seed=5)
    assert constraints.is_similar_B is not None
    for i, one in enumerate(one_by_one(constraints)):
        z_2D = one.x_BCD[0]
        before = float(np.sum(np.diff(learner.embed(z_2D)[0], axis=0) ** 2))
        loss = learner.partial_fit(one)[0]
        after = float(np.sum(np.diff(learner.embed(z_2D)[0], axis=0) ** 2))
        if loss == 0:
            assert after == before
            continue
        y = 2.0 if constraints.is_similar_B[i] else 9.0
        assert min(before, y) < after < max(before, y)
        assert eta * (y - after) == pytest.approx(1 / before - 1 / after, rel=1e-6, abs=1e-9)
        num_moved += 1
    assert num_moved > 5


def test_legos_metric_stays_positive_definite() -> None:
    learner = lego(D, 0.5, 30.0, 1.0)
    for one in one_by_one(stream(2, 300)):
        learner.partial_fit(one)
        assert np.linalg.eigvalsh(matrix(learner))[0] > 0
    assert learner.counts.used > 150


@pytest.mark.parametrize("length", [1e-60, 1e-200])
def test_lego_does_not_count_a_step_without_effect(length: float) -> None:
    """Of two points all but the same: the second's square is 0 in float64."""
    learner = lego(D, 0.5, 1.5, 0.1)
    assert learner.partial_fit(pair(length * np.eye(D)[0], False))[0] == 1.5**2 / 2
    assert learner.counts == Counts(seen=1, used=0)
    assert np.array_equal(matrix(learner), np.eye(D))


@pytest.mark.parametrize("projection", ["exact", "capped"])
@pytest.mark.parametrize("step_size", [0.003, 0.1, 3.0])
def test_rdmls_metric_stays_positive_semi_definite(projection: str, step_size: float) -> None:
    learner = RDML(D, step_size, projection)
    num_on_border = 0
    for one in one_by_one(stream(2, 300, seed=2)):
        learner.partial_fit(one)
        value_D = np.linalg.eigvalsh(matrix(learner))
        assert value_D[0] >= -1e-13 * value_D[-1]
        num_on_border += bool(value_D[0] < 1e-12 * value_D[-1])
    assert num_on_border > 10


def test_rdmls_projections_agree_inside_of_the_cone() -> None:
    exact, capped = (RDML(D, 1e-4, projection, "identity") for projection in ("exact", "capped"))
    for learner in (exact, capped):
        learner.partial_fit(stream(2, 80))
    assert np.linalg.eigvalsh(matrix(exact))[0] > 0.1
    assert is_same_state(exact, capped)
    assert exact.counts.used > 10


def test_rdmls_capped_step_ends_at_the_cones_border() -> None:
    z_D = np.arange(1.0, D + 1)
    learner = RDML(D, 1.0, "capped", "identity")
    learner.partial_fit(pair(z_D, True))
    np.testing.assert_allclose(matrix(learner), np.eye(D) - np.outer(z_D, z_D) / (z_D @ z_D), atol=1e-14)
    outside_D = 5 * np.eye(D)[0]
    assert learner.partial_fit(pair(outside_D, True))[0] > 1
    assert learner.counts == Counts(seen=2, used=1)


def test_rdmls_capped_step_takes_nothing_from_outside_of_the_range() -> None:
    learner = RDML(3, 1.0, "capped")
    learner.restore({**learner.state(), "rdml_metric": np.diag([1.0, 1.0, 0.0])})
    learner.partial_fit(pair(np.array([2, 0, 4e-9]), True))
    assert learner.counts.used == 1
    np.testing.assert_allclose(matrix(learner), np.diag([0.0, 1.0, 0.0]), atol=1e-15)


def test_rdml_learns_from_a_pair_at_distance_1() -> None:
    for is_similar in (True, False):
        learner = RDML(D, 0.25, initial="identity")
        assert learner.partial_fit(pair(np.eye(D)[0], is_similar))[0] == 0
        assert learner.counts.used == 1
        assert matrix(learner)[0, 0] == (0.75 if is_similar else 1.25)


@pytest.mark.parametrize(("num_features", "rank"), [(1, 1), (6, 0), (6, 3), (40, 40), (40, 25), (350, 350)])
@pytest.mark.parametrize("most_products", [3, 300])
def test_the_negative_eigenpair_is_found(
    num_features: int, rank: int, most_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Lanczos' method, and by what stands in where that needs too long; there may be none, too."""
    monkeypatch.setattr(linear, "MOST_PRODUCTS", most_products)
    rng = np.random.default_rng(rank)
    signs = set()
    for step in (1e-6, 1e-3, 1.0, 1e3):
        factor_RD = rng.normal(size=(rank, num_features)) * 0.97 ** np.arange(num_features)
        a_DD = factor_RD.T @ factor_RD
        z_D = rng.normal(size=num_features) if rank % 2 == 0 else rng.normal(size=rank) @ factor_RD
        moved_DD = a_DD - step * np.outer(z_D, z_D)
        value, q_D = lowest_eigenpair(np.tril(a_DD), z_D, step)
        scale = np.abs(moved_DD).max() * num_features
        lowest = np.linalg.eigvalsh(moved_DD)[0]
        if lowest < -1e-11 * scale:
            assert value == pytest.approx(lowest, abs=1e-11 * scale)
        else:
            assert value > -1e-11 * scale
        np.testing.assert_allclose(moved_DD @ q_D, value * q_D, atol=1e-11 * scale)
        assert np.linalg.norm(q_D) == pytest.approx(1)
        signs.add(bool(lowest < -1e-11 * scale))
    assert True in signs


def test_the_negative_eigenpair_is_found_below_a_spread_spectrum() -> None:
    """Large eigenvalues, found first, spoil a basis that is not kept orthogonal."""
    rng = np.random.default_rng(0)
    vectors_DD = np.linalg.qr(rng.normal(size=(200, 200)))[0]
    a_DD = (vectors_DD * np.array([*np.linspace(0.9, 1, 197), 10, 100, 1e6])) @ vectors_DD.T
    z_D = rng.normal(size=200)
    moved_DD = a_DD - 0.005 * np.outer(z_D, z_D)
    value, q_D = lowest_eigenpair(a_DD, z_D, 0.005)
    assert value == pytest.approx(np.linalg.eigvalsh(moved_DD)[0], rel=1e-6)
    np.testing.assert_allclose(moved_DD @ q_D, value * q_D, atol=1e-12 * 1e6)
    assert np.linalg.norm(q_D) == pytest.approx(1, abs=1e-14)


def test_the_negative_eigenpair_is_found_in_two_steps_where_two_exhaust_it() -> None:
    value, q_D = lowest_eigenpair(np.diag([1.0, 4.0, 0, 0, 0, 0]), np.array([1.0, 1, 0, 0, 0, 0]), 1.0)
    assert value == pytest.approx((3 - math.sqrt(13)) / 2)
    assert not q_D[2:].any()


def test_oasis_satisfies_the_hinge_or_steps_by_c() -> None:
    learner = OASIS(D, aggressiveness=0.01)
    num_satisfied = num_capped = 0
    for one in one_by_one(stream(3, 200)):
        before = matrix(learner)
        loss = learner.partial_fit(one)[0]
        step = matrix(learner) - before
        x, v = one.x_BCD[0, 0], one.x_BCD[0, 1] - one.x_BCD[0, 2]
        if loss == 0:
            assert not step.any()
        elif abs(1 - x @ matrix(learner) @ v) < 1e-9:
            num_satisfied += 1
            assert np.linalg.norm(step) <= 0.01 * np.linalg.norm(np.outer(x, v)) * (1 + 1e-9)
        else:
            num_capped += 1
            np.testing.assert_allclose(step, 0.01 * np.outer(x, v), atol=1e-12)
            assert x @ matrix(learner) @ v < 1
    assert min(num_satisfied, num_capped) > 10


def test_oasis_embeds_a_gallery_in_parts_as_it_does_whole() -> None:
    learner = trained("oasis")
    x_ND = points(9, seed=4)[0]
    x_ND[3] *= 1.4
    whole_NE = learner.embed(x_ND)[0]
    np.testing.assert_array_equal(
        np.vstack([learner.embed(x_ND[i : i + 2])[0] for i in (0, 2, 4, 6, 8)]), whole_NE
    )
    assert isinstance(learner, OASIS)
    np.testing.assert_allclose(np.linalg.norm(whole_NE, axis=1), learner.radius)
    q_ND = points(5, seed=6)[0]
    squared_QN = ((learner.embed(q_ND, "query")[0][:, None] - whole_NE) ** 2).sum(2)
    similarity_QN = q_ND @ matrix(learner) @ x_ND.T
    expected_QN = ((q_ND @ matrix(learner)) ** 2).sum(1)[:, None] + learner.radius**2 - 2 * similarity_QN
    np.testing.assert_allclose(squared_QN, expected_QN, atol=1e-10)


def test_oasis_names_a_point_too_long_to_embed() -> None:
    learner = OASIS(D)
    x_ND = points(3)[0]
    learner.embed(x_ND)
    with pytest.raises(ValueError, match=r"point 1 of the gallery.*until it has seen a constraint"):
        learner.embed(x_ND * np.array([[1], [1e3], [1]]))
    learner.partial_fit(stream(3, 20))
    with pytest.raises(ValueError, match=r"point 2 of the gallery.*2 times the longest"):
        learner.embed(x_ND * np.array([[1], [1], [1e3]]))
    learner.embed(1e3 * x_ND, "query")


@pytest.mark.parametrize(("bound", "is_similar", "loss"), [(2, True, 0), (1.5, True, 0.5), (1.5, False, 1.5)])
def test_the_hinge_of_a_pair_leaves_a_band_of_one(bound: float, is_similar: bool, loss: float) -> None:
    learner = PairHinge(D, bound=bound, eta=0.1)
    assert learner.partial_fit(pair(np.eye(D)[0], is_similar))[0] == loss
    assert learner.counts.used == (loss > 0)
    moved = {True: 1 - 0.2, False: 1 + 0.2}[is_similar] if loss else 1.0
    assert matrix(learner)[0, 0] == pytest.approx(moved)


def test_the_hinge_of_a_triplet_lets_a_failure_pass() -> None:
    """OAHU's Figure 2: without a margin, a negative nearer to the positive than to the anchor costs nothing."""
    learner = TripletHinge(D, margin=0.0)
    e = np.eye(D)
    assert learner.partial_fit(triplet(2 * e[0], 2.1 * e[0]))[0] == 0
    assert learner.counts.used == 0
    assert TripletHinge(D, margin=0.5).partial_fit(triplet(2 * e[0], 2.1 * e[0]))[0] == pytest.approx(0.4)


@pytest.mark.parametrize("length", [0.0, 1e-200])
def test_the_hinge_of_a_triplet_has_no_direction_at_distance_0(length: float) -> None:
    learner = TripletHinge(D, margin=1.0, eta=0.1)
    learner.restore({**learner.state(), "triplet_hinge_map": np.diag([length] + [1.0] * (D - 1))})
    e = np.eye(D)
    assert learner.partial_fit(triplet(e[0], 0.5 * e[1]))[0] == pytest.approx(0.5)
    assert np.isfinite(matrix(learner)).all()
    assert matrix(learner)[1, 1] == pytest.approx(1 + 0.1 * 0.5)


def test_opml_lowers_the_loss_by_its_step() -> None:
    """L' minimises |L' - L|^2 / 2 + lambda z / 2, so z falls by |L' - L|^2 / lambda at least."""
    learner = OPML(D, step_size=0.02)
    num_moved = 0
    for one in one_by_one(stream(3, 100)):
        before = matrix(learner)
        loss, used = learner.partial_fit(one)[0], learner.counts.used
        step = np.linalg.norm(matrix(learner) - before) ** 2
        x = one.x_BCD[0] @ matrix(learner).T
        after = 1 + ((x[0] - x[1]) ** 2).sum() - ((x[0] - x[2]) ** 2).sum()
        if step:
            num_moved += 1
            assert after <= loss - step / 0.02 + 1e-10
            assert after < loss
        assert used == num_moved
    assert num_moved > 20


def test_opml_passes_over_what_is_ill_posed_and_counts_it() -> None:
    """lambda |b|^2 = 1.5 with a at right angles to b; then with an a near enough to b that all is well."""
    learner = OPML(D, step_size=0.1)
    e = np.eye(D)
    a_D, b_D = math.sqrt(14.9) * e[0], math.sqrt(15) * e[1]
    assert learner.partial_fit(triplet(a_D, b_D))[0] == pytest.approx(0.9)
    assert (learner.num_ill_posed, learner.counts) == (1, Counts(seen=1, used=0))
    assert np.array_equal(matrix(learner), np.eye(D))
    near_D = math.sqrt(14.9) * (0.95 * e[1] + math.sqrt(1 - 0.95**2) * e[0])
    assert learner.partial_fit(triplet(near_D, b_D))[0] == pytest.approx(0.9)
    assert (learner.num_ill_posed, learner.counts) == (1, Counts(seen=2, used=1))
    perturbed = np.eye(D) + 0.1 * (np.outer(near_D, near_D) - np.outer(b_D, b_D))
    np.testing.assert_allclose(matrix(learner), np.linalg.inv(perturbed), atol=1e-12)


@pytest.mark.parametrize("excess", [-1e-6, 1e-6])
def test_opml_learns_up_to_the_border_of_what_is_well_posed(excess: float) -> None:
    learner = OPML(D, step_size=0.1)
    e = np.eye(D)
    assert learner.partial_fit(triplet(3.1 * e[0], math.sqrt(10 * (1 + excess)) * e[1]))[0] > 0
    assert learner.num_ill_posed == (excess > 0)
    assert matrix(learner)[1, 1] == pytest.approx(1 if excess > 0 else 1e6, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_opmls_condition_is_that_of_the_full_matrix(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = []
    for scale in np.geomspace(0.05, 3, 40):
        a_D = scale * rng.normal(size=D)
        b_D = (a_D + scale * rng.choice([0.1, 1.0]) * rng.normal(size=D)) * rng.uniform(0.9, 1.1)
        learner = OPML(D, step_size=0.1)
        loss = learner.partial_fit(triplet(a_D, b_D))[0]
        lowest = np.linalg.eigvalsh(np.eye(D) + 0.1 * (np.outer(a_D, a_D) - np.outer(b_D, b_D)))[0]
        if loss > 0:
            assert learner.num_ill_posed == (lowest <= 0)
            assert learner.counts.used == (lowest > 0)
            kinds.append((lowest > 0, 0.1 * b_D @ b_D < 1))
    assert (True, False) in kinds  # well-posed although lambda |b|^2 >= 1


# Contracts.


@each_learner
def test_one_call_is_the_same_as_one_for_each(name: str) -> None:
    together, singly = BUILDERS[name](), BUILDERS[name]()
    constraints = stream(together.arity, 80)
    loss_B = together.partial_fit(constraints)
    np.testing.assert_array_equal(
        np.concatenate([singly.partial_fit(one) for one in one_by_one(constraints)]), loss_B
    )
    assert is_same_state(together, singly)
    assert 0 < together.counts.used < together.counts.seen == 80
    assert (loss_B >= 0).all()


@each_learner
def test_a_restored_learner_goes_on_bit_by_bit(name: str) -> None:
    learner, other = trained(name), BUILDERS[name]()
    state = learner.state()
    kept = {key: value.copy() for key, value in state.items()}
    rest = stream(learner.arity, 60, seed=8)
    loss_B = learner.partial_fit(rest)
    for key, value in kept.items():
        np.testing.assert_array_equal(state[key], value)  # a state is a copy
    other.restore(state)
    np.testing.assert_array_equal(other.partial_fit(rest), loss_B)
    assert is_same_state(learner, other)
    for key, value in kept.items():
        np.testing.assert_array_equal(state[key], value)


@pytest.mark.parametrize(
    ("name", "other"), list(itertools.permutations(["lego", "rdml-exact", "oasis", "opml"], 2))
)
def test_no_learner_takes_anothers_state(name: str, other: str) -> None:
    with pytest.raises(ValueError, match=r"this [A-Z]+ needs"):
        BUILDERS[name]().restore(trained(other).state())


@each_learner
def test_an_empty_stream_changes_nothing(name: str) -> None:
    learner, same = trained(name), trained(name)
    assert learner.partial_fit(part(stream(learner.arity, 1), 1)).shape == (0,)
    assert is_same_state(learner, same)


@each_learner
def test_single_precision_is_read_as_the_double_it_stands_for(name: str) -> None:
    learner, same = BUILDERS[name](), BUILDERS[name]()
    x_BCD, is_similar_B, _ = stream(learner.arity, 40)
    learner.partial_fit(Constraints(x_BCD.astype(np.float32), is_similar_B))
    same.partial_fit(Constraints(x_BCD.astype(np.float32).astype(np.float64), is_similar_B))
    assert is_same_state(learner, same)


def spoilt(constraints: Constraints, how: str) -> Constraints:
    """The same with a point that is no point in constraint 3."""
    x_BCD = constraints.x_BCD.copy()
    if how == "repeated":
        x_BCD[3, 1] = x_BCD[3, 0]
    else:
        x_BCD[3, 1, 5] = float(how)
    return Constraints(x_BCD, constraints.is_similar_B)


@each_learner
@pytest.mark.parametrize("how", ["nan", "-inf", "1e16", "repeated"])
def test_what_is_no_constraint_is_refused_or_passed_over(name: str, how: str) -> None:
    learner, same = trained(name), trained(name)
    bad = spoilt(stream(learner.arity, 20, seed=3), how)
    with pytest.raises(ValueError, match="constraint 63"):
        learner.partial_fit(bad)
    assert is_same_state(learner, same)

    learner.on_invalid = "skip"
    loss_B = learner.partial_fit(bad)
    assert np.isnan(loss_B).tolist() == [i == 3 for i in range(20)]
    same.partial_fit(part(bad, 0, 3))
    same.partial_fit(part(bad, 4))
    assert np.array_equal(matrix(learner), matrix(same))
    assert learner.counts == Counts(same.counts.seen + 1, same.counts.used, 1)


@each_learner
def test_wrong_sizes_are_refused(name: str) -> None:
    learner, same = trained(name), trained(name)
    x_BCD, is_similar_B, _ = stream(learner.arity, 5)
    for x in (x_BCD[:, :, 1:], x_BCD[:, 1:], x_BCD[0]):
        with pytest.raises(ValueError, match="learns from"):
            learner.partial_fit(Constraints(x, is_similar_B))
    if is_similar_B is not None:
        with pytest.raises(ValueError, match="is_similar_B"):
            learner.partial_fit(Constraints(x_BCD))
    for x_ND in (np.ones((3, D + 1)), np.ones(D), np.full((2, D), np.nan)):
        with pytest.raises(ValueError, match="point"):
            learner.embed(x_ND)
        with pytest.raises(ValueError, match="point"):
            learner.embed(x_ND, "query")
    assert is_same_state(learner, same)


@each_learner
@pytest.mark.parametrize("num_constraints", [0, 200])
def test_neighbours_of_embeddings_are_those_of_the_learned_distance(name: str, num_constraints: int) -> None:
    learner = trained(name, num_constraints)
    if name.startswith("rdml") and not matrix(learner).any():
        return  # all distances are 0
    x_ND, q_ND = points(30, seed=21)[0], points(7, seed=22)[0]
    (query_QE,), (gallery_NE,) = learner.embed(q_ND, "query"), learner.embed(x_ND, "gallery")
    assert query_QE.shape[1] == gallery_NE.shape[1]
    assert query_QE.dtype == gallery_NE.dtype == np.float64
    learned_DD = matrix(learner)
    for q_D, query_E in zip(q_ND, query_QE, strict=True):
        far_N = np.array(
            [
                -q_D @ learned_DD @ x_D
                if isinstance(learner, OASIS)
                else np.linalg.norm(learned_DD @ (q_D - x_D)) ** 2
                if isinstance(learner, OPML | PairHinge | TripletHinge)
                else (q_D - x_D) @ learned_DD @ (q_D - x_D)
                for x_D in x_ND
            ]
        )
        embedded_N = ((query_E - gallery_NE) ** 2).sum(axis=1)
        assert embedded_N.argsort().tolist() == far_N.argsort().tolist()
        if not isinstance(learner, OASIS):
            np.testing.assert_allclose(embedded_N, far_N, rtol=1e-9, atol=1e-12)


def test_an_untrained_rdml_embeds_all_points_as_one() -> None:
    assert not RDML(D).embed(points(3)[0])[0].any()
    assert RDML(D).embed(points(3)[0])[0].shape == (3, D)


@each_learner
def test_there_is_one_layer(name: str) -> None:
    learner = BUILDERS[name]()
    assert learner.layer_weights.tolist() == [1.0]
    assert len(learner.embed(points(2)[0])) == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LEGO(D, similar_quantile=-0.1), "similar_quantile"),
        (lambda: LEGO(D, similar_quantile=0.9, dissimilar_quantile=0.5), "dissimilar_quantile"),
        (lambda: LEGO(D, dissimilar_quantile=1.1), "at most 1"),
        (lambda: lego(D, 0.0, 2.0, 1.0), "similar limit"),
        (lambda: lego(D, 2.0, 2.0, 1.0), "dissimilar limit"),
        (lambda: LEGO(D, eta=-1.0), "eta"),
        (lambda: RDML(D, step_size=0.0), "step_size"),
        (lambda: RDML(D, projection="exakt"), "projection='exakt'.*exact"),
        (lambda: RDML(D, initial="one"), "initial='one'"),
        (lambda: OASIS(D, aggressiveness=math.inf), "aggressiveness"),
        (lambda: OPML(D, step_size=math.nan), "step_size"),
        (lambda: OPML(0), "num_features"),
        (lambda: OPML(D, on_invalid="pass"), "on_invalid"),  # type: ignore[arg-type]
    ],
)
def test_wrong_parameters_are_named(build: Callable[[], LinearLearner], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("name", ["lego", "rdml-exact", "rdml-capped", "oasis", "opml"])
def test_one_feature_is_enough(name: str) -> None:
    kinds: dict[str, LinearLearner] = {
        "lego": lego(1, 0.5, 1.5, 1.0),
        "rdml-exact": RDML(1),
        "rdml-capped": RDML(1, projection="capped", initial="identity"),
        "oasis": OASIS(1),
        "opml": OPML(1),
    }
    learner = kinds[name]
    x_BCD, is_similar_B, _ = stream(learner.arity, 100)
    learner.partial_fit(Constraints(x_BCD[:, :, :1], is_similar_B))
    assert learner.counts.used > 0
    assert np.isfinite(learner.embed(x_BCD[:, 0, :1])[0]).all()


def test_lego_takes_its_limits_from_the_points_or_says_that_it_has_none() -> None:
    x_ND, _ = points(300)
    learner = LEGO(D, similar_quantile=0.1, dissimilar_quantile=0.8)
    with pytest.raises(ValueError, match=r"no limits yet: prepare\(points\)"):
        learner.partial_fit(stream(2, 5))
    assert learner.counts == Counts()
    learner.prepare(x_ND, seed=3)
    all_NN = ((x_ND[:, None] - x_ND) ** 2).sum(axis=2)[~np.eye(300, dtype=bool)]
    limits = learner.state()["lego_limits"]
    np.testing.assert_allclose([(all_NN < limit).mean() for limit in limits], [0.1, 0.8], atol=0.02)
    again = LEGO(D)
    again.restore(learner.state())
    again.prepare(x_ND, seed=3)
    assert not np.array_equal(again.state()["lego_limits"], limits)  # its quantiles are others
    with pytest.raises(ValueError, match="1 points: LEGO takes its limits from pairs"):
        learner.prepare(x_ND[:1])
    with pytest.raises(ValueError, match="similar limit=0"):
        learner.prepare(np.ones((50, D)))


# Faults.


@each_learner
@pytest.mark.parametrize("scale", [1e12, 1e15 / 8, 1e-12, 1e-160, 1e-310])
def test_extreme_inputs_leave_finite_parameters(name: str, scale: float) -> None:
    """And what comes after them is still learned from, or at least does no harm."""
    learner = trained(name)
    for seed in (11, 12):
        x_BCD, is_similar_B, _ = stream(learner.arity, 60, seed)
        loss_B = learner.partial_fit(Constraints(scale * x_BCD, is_similar_B))
        assert np.isfinite(loss_B).all()
        assert np.isfinite(matrix(learner)).all()
        learner.partial_fit(stream(learner.arity, 30, seed))
        assert np.isfinite(matrix(learner)).all()
    for side in ("query", "gallery"):
        assert np.isfinite(learner.embed(points(5)[0], side)[0]).all()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "learner",
    [
        lego(D, 1e-300, 1e300, 1e300),
        lego(D, 1e-300, 1e300, 1e-300),
        RDML(D, step_size=1e300),
        RDML(D, step_size=1e300, projection="capped", initial="identity"),
        RDML(D, step_size=1e-320),
        OASIS(D, aggressiveness=1e300),
        OPML(D, step_size=1e300),
        OPML(D, step_size=1e-320),
    ],
    ids=lambda learner: type(learner).__name__,
)
def test_extreme_parameters_leave_finite_ones(learner: LinearLearner) -> None:
    for scale in (1.0, 1e12, 1e-12, 1.0):
        x_BCD, is_similar_B, _ = stream(learner.arity, 40)
        learner.partial_fit(Constraints(scale * x_BCD, is_similar_B))
        assert np.isfinite(matrix(learner)).all()
    assert np.isfinite(learner.embed(points(5)[0], "query")[0]).all()


@each_learner
def test_a_step_too_large_is_not_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MOST_STEP", 1e-30)
    learner = BUILDERS[name]()
    before = matrix(learner)
    assert learner.partial_fit(stream(learner.arity, 40)).max() > 0
    assert np.array_equal(matrix(learner), before)
    assert learner.counts == Counts(seen=40, used=0)


@pytest.mark.parametrize("name", ["oasis", "opml"])
def test_a_triplet_without_a_difference_teaches_nothing(name: str) -> None:
    learner = BUILDERS[name]()
    a_D = np.ones(D)
    with pytest.raises(ValueError, match="constraint 0 repeats one point"):
        learner.partial_fit(triplet(a_D, a_D))  # x+ = x-
    if name == "oasis":
        assert learner.partial_fit(triplet(a_D, 2 * a_D)).tolist() == [1.0]  # x = 0
    assert learner.counts.used == 0
    assert np.array_equal(matrix(learner), np.eye(D))


def test_a_metric_that_is_not_quite_semi_definite_still_embeds() -> None:
    """Rounding leaves eigenvalues just below 0."""
    learner = RDML(D)
    vectors_DD = np.linalg.qr(np.random.default_rng(0).normal(size=(D, D)))[0]
    value_D = np.array([-1e-14, -1e-15, 1e-15, *np.linspace(0.5, 2, D - 3)])
    state = learner.state()
    state["rdml_metric"] = (vectors_DD * value_D) @ vectors_DD.T
    learner.restore(state)
    x_ND = points(6)[0]
    embedded_NN = ((learner.embed(x_ND)[0][:, None] - learner.embed(x_ND)[0]) ** 2).sum(2)
    difference_NND = x_ND[:, None] - x_ND
    expected_NN = np.einsum("ijd,de,ije->ij", difference_NND, matrix(learner), difference_NND)
    np.testing.assert_allclose(embedded_NN, expected_NN, atol=1e-10)
