"""Two sources of chance: against plain loops over queries, against matrices, and by simulated studies."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dmlstudy.records import UnitScores
from dmlstudy.verdict.comparison import (
    ALPHA,
    Comparison,
    ModelComparison,
    UnitMeans,
    compare,
    compare_models,
    remarks,
)
from dmlstudy.verdict.two_sources import OneSeed, Shuffles, TwoSources, Weights

FINE = 1e-6

Values = NDArray[np.float64]


def by_loops(value_SQ: list[list[float]], class_Q: list[int], resolution: float) -> dict[str, float]:
    """Variances of the paired differences value_SQ of each query, one class and query after another."""
    num_seeds, num_queries = len(value_SQ), len(class_Q)
    classes = sorted(set(class_Q))
    weight = {c: class_Q.count(c) / num_queries for c in classes}
    d = {
        (s, c): sum(v for v, own in zip(value_SQ[s], class_Q, strict=True) if own == c) / class_Q.count(c)
        for s in range(num_seeds)
        for c in classes
    }
    of_seed = [sum(weight[c] * d[s, c] for c in classes) for s in range(num_seeds)]
    of_class = {c: sum(d[s, c] for s in range(num_seeds)) / num_seeds for c in classes}
    effect = sum(of_seed) / num_seeds
    p = {k: sum(weight[c] ** k for c in classes) for k in (2, 3)}
    f = p[2] / (p[2] - 2 * p[3] + p[2] ** 2)
    v_s = sum((each - effect) ** 2 for each in of_seed) / (num_seeds * (num_seeds - 1))
    v_s = max(v_s, resolution**2 / num_seeds)
    v_c = f * sum(weight[c] ** 2 * (of_class[c] - effect) ** 2 for c in classes)
    v_sc = 0.0
    for s, c in d:
        v_sc += weight[c] ** 2 * (d[s, c] - of_seed[s] - of_class[c] + effect) ** 2
    v_sc *= f / (num_seeds * (num_seeds - 1))
    v_k = max(v_c - v_sc, 0.0) if len(classes) >= 10 else v_c
    return {"effect": effect, "v_s": v_s, "v_k": v_k, "v_sc": v_sc}


@pytest.mark.parametrize("num_classes", [2, 7, 23])
def test_variances_are_those_of_plain_loops_over_queries(num_classes: int) -> None:
    rng = np.random.default_rng(num_classes)
    counts = rng.integers(1, 9, num_classes).tolist()
    class_Q = [c for c, count in enumerate(counts) for _ in range(count)]
    value_SQ = rng.normal(size=(4, len(class_Q)))
    expected = by_loops(value_SQ.tolist(), class_Q, FINE)
    d_SC = np.array([np.bincount(class_Q, row) / counts for row in value_SQ])
    found = TwoSources.of(d_SC, Weights.of(counts), FINE)
    assert found.effect == pytest.approx(expected["effect"], abs=1e-12)
    assert found.effect == pytest.approx(float(value_SQ.mean()), abs=1e-12)
    assert found.of_seeds == pytest.approx(expected["v_s"], abs=1e-12)
    assert found.of_units == pytest.approx(expected["v_k"], abs=1e-12)
    assert found.of_both == pytest.approx(expected["v_sc"], abs=1e-12)


@pytest.mark.parametrize("num_classes", [2, 3, 10, 60])
def test_f_and_nu_are_those_of_the_quadratic_form(num_classes: int) -> None:
    """f = p2 / tr A and nu = tr(A)^2 / tr(A^2) for A = (I - 1w')' diag(w^2) (I - 1w')."""
    rng = np.random.default_rng(num_classes)
    for _ in range(20):
        counts = rng.integers(1, 1001, num_classes).tolist()
        found = Weights.of(counts)
        w_C = np.array(counts) / sum(counts)
        centred_CC = np.eye(num_classes) - np.outer(np.ones(num_classes), w_C)
        a_CC = centred_CC.T @ np.diag(w_C**2) @ centred_CC
        nu = np.trace(a_CC) ** 2 / np.trace(a_CC @ a_CC)
        assert found.f == pytest.approx(float((w_C**2).sum() / np.trace(a_CC)), rel=1e-8)
        assert found.nu == pytest.approx(max(1.0, float(nu)), rel=1e-8)


def test_equal_classes_have_the_usual_degrees_of_freedom() -> None:
    found = Weights.of([7] * 20)
    assert (found.f, found.nu, found.p2) == (pytest.approx(20 / 19), pytest.approx(19), pytest.approx(1 / 20))
    assert not found.are_rough
    assert Weights.of([1] * 9).are_rough


@pytest.mark.parametrize("counts", [[10**6, *[1] * 30], [1000, 1, 1], [1, 1]])
def test_one_class_that_outweighs_all_others_cancels_nothing(counts: list[int]) -> None:
    found = Weights.of(counts)
    assert 1 <= found.nu < 2
    assert 0 < found.f < math.inf
    assert found.are_rough


@pytest.mark.parametrize("counts", [[], [5], [5, 0]])
def test_fewer_than_two_classes_have_no_weights(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="units: needs two or more, each with a query"):
        Weights.of(counts)


def study(
    rng: np.random.Generator, num_seeds: int, counts: list[int], deviations: tuple[float, float, float]
) -> Values:
    """Paired differences of the true mean 0, with deviations of a seed, of a class and of both."""
    of_seed, of_class, of_both = deviations
    num_classes = len(counts)
    return (
        of_seed * rng.normal(size=(num_seeds, 1))
        + of_class * rng.normal(size=num_classes)
        + of_both * rng.normal(size=(num_seeds, num_classes))
    )


def sizes(rng: np.random.Generator, num_classes: int, *, are_equal: bool) -> list[int]:
    if are_equal:
        return [10] * num_classes
    return np.maximum(1, 10 * rng.lognormal(size=num_classes)).astype(int).tolist()


@pytest.mark.parametrize(
    ("num_classes", "num_seeds", "deviations", "are_equal", "bounds"),
    [
        (20, 5, (1.0, 4.5, 1.0), True, (0.935, 0.965)),
        (20, 5, (0.0, 1.0, 0.01), False, (0.935, 0.985)),
        (20, 5, (0.0, 0.0, 1.0), True, (0.94, 0.98)),
        (100, 3, (1.0, 0.01, 0.01), True, (0.935, 0.965)),
    ],
    ids=["both", "classes", "interaction", "seeds"],
)
def test_the_interval_holds_the_truth_on_classes_like_these(
    num_classes: int,
    num_seeds: int,
    deviations: tuple[float, float, float],
    are_equal: bool,
    bounds: tuple[float, float],
) -> None:
    rng = np.random.default_rng(num_classes + num_seeds)
    num_studies, covered = 2000, 0
    for number in range(num_studies):
        if number % 100 == 0:  # other classes of the same kind have other sizes
            counts = sizes(rng, num_classes, are_equal=are_equal)
            weights = Weights.of(counts)
        found = TwoSources.of(study(rng, num_seeds, counts, deviations), weights, FINE)
        covered += abs(found.effect) <= found.half_width(ALPHA)
    assert bounds[0] <= covered / num_studies <= bounds[1]


def means(d_SC: Values, counts: list[int], key: str = "k") -> dict[int, UnitMeans]:
    return {seed: UnitMeans(key, counts, row) for seed, row in enumerate(d_SC, 1)}


def compared(of_families: dict[str, Values], counts: list[int], **more: Any) -> list[Comparison]:
    """Families by their scores of shape (S, C)."""
    w_C = np.array(counts) / sum(counts)
    scores = {name: dict(enumerate((own @ w_C).tolist(), 1)) for name, own in of_families.items()}
    by_unit = {name: means(own, counts) for name, own in of_families.items()}
    return compare(scores, resolution=FINE, **({"by_unit": by_unit} | more))


def test_like_is_never_narrower_nor_decided_without_here() -> None:
    """1,000 random studies; each also says of these classes what it says without scores by class."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(1000):
        num_seeds, num_classes = int(rng.integers(2, 7)), int(rng.integers(5, 30))
        counts = rng.integers(1, 50, num_classes).tolist()
        spread = tuple(10 ** rng.uniform(-3, -1, 3))
        of_families = {
            name: 0.5 + 0.05 * rng.normal() + study(rng, num_seeds, counts, spread)  # type: ignore[arg-type]
            for name in "abc"
        }
        found = compared(of_families, counts)
        for each, alone in zip(found, compared(of_families, counts, by_unit={}), strict=True):
            todays = ("low", "high", "effect", "p_value", "adjusted_p_value", "outcome", "num_seeds")
            assert all(getattr(each, name) == getattr(alone, name) for name in todays)
            assert each.low is not None
            assert each.high is not None
            assert each.like_low is not None
            assert each.like_high is not None
            assert each.like_p_value is not None
            assert each.like_adjusted_p_value is not None
            assert each.like_low <= each.low <= each.high <= each.like_high
            assert each.like_p_value >= each.p_value
            assert each.like_adjusted_p_value >= each.adjusted_p_value
            assert each.like_outcome in (each.outcome, "not distinguishable")
            seen.add((each.outcome, each.like_outcome))
    assert len(seen) == 5, "all outcomes were drawn"


def test_a_turned_pair_mirrors() -> None:
    rng = np.random.default_rng(1)
    counts = [3] * 15
    of_families = {"a": 0.6 + 0.02 * rng.normal(size=(4, 15)), "b": 0.5 + 0.02 * rng.normal(size=(4, 15))}
    (forth,) = compared(of_families, counts)
    (back,) = compared({name: of_families[name] for name in "ba"}, counts)
    assert (forth.like_outcome, back.like_outcome) == ("better", "worse")
    for name, value in back.turned.model_dump().items():
        expected = getattr(forth, name)
        assert value == (pytest.approx(expected) if isinstance(expected, float) else expected), name


def test_a_line_names_the_population() -> None:
    """Each of the three outcomes; brackets belong to the population before them."""
    rng = np.random.default_rng(2)
    of_class_C = 0.06 * rng.normal(size=20)
    base_SC = 0.5 + 0.002 * rng.normal(size=(5, 20))
    of_families = {
        "a": base_SC + 0.2 + of_class_C,
        "b": base_SC + of_class_C + 0.002 * rng.normal(size=(5, 20)),
        "d": base_SC - 0.02 + 0.06 * rng.normal(size=20),
    }
    lines = {(each.first, each.second): str(each) for each in compared(of_families, [4] * 20)}
    assert lines["a", "b"].startswith("a better than b on classes like these: +0.2")
    assert "; on these 20 classes [" in lines["a", "b"]
    assert " on these 20 classes only: " in lines["b", "d"]
    assert lines["b", "d"].endswith("% of it classes")
    assert "; on classes like these [" in lines["b", "d"]
    (same,) = compared({"a": base_SC, "b": base_SC + 0.001 * rng.normal(size=(5, 20))}, [4] * 20)
    assert str(same).startswith("a not distinguishable from b: ")
    assert "; on classes like these [" in str(same)


def test_edges() -> None:
    rng = np.random.default_rng(3)
    other_SC = rng.random((3, 12))
    (one,) = compared({"a": other_SC[:1], "b": other_SC[:1] / 2}, [2] * 12)
    assert (one.like_outcome, one.like_unknown, one.num_classes) == (None, "too few seeds", 12)
    (two,) = compared({"a": other_SC[:, :2], "b": other_SC[:, :2] / 2}, [2] * 2)
    assert (two.like_outcome, two.like_unknown) == (None, "fewer than 5 classes")
    (equal,) = compared({"a": other_SC, "b": other_SC}, [2] * 12)
    assert (equal.p_value, equal.like_p_value, equal.num_moved) == (1.0, 1.0, 0)
    assert equal.like_outcome == "not distinguishable"
    (alike,) = compared({"a": other_SC + 0.1, "b": other_SC}, [2] * 12)
    assert (alike.like_outcome, alike.like_low) == ("better", pytest.approx(alike.low))
    (heavy,) = compared({"a": other_SC + 0.1, "b": other_SC}, [200] + [2] * 11)
    assert heavy.like_is_rough
    assert any("rough, mostly too wide" in line for line in remarks([heavy]))


def test_a_coarse_score_leaves_doubt() -> None:
    """One query of 240 that differs, on every seed: V_C is near resolution^2, and t near 1."""
    base_SC = np.full((5, 12), 0.5)
    moved_SC = base_SC.copy()
    moved_SC[:, 0] += 1 / 20
    scores = {"a": dict.fromkeys(range(1, 6), 0.5 + 1 / 240), "b": dict.fromkeys(range(1, 6), 0.5)}
    by_unit = {"a": means(moved_SC, [20] * 12), "b": means(base_SC, [20] * 12)}
    (found,) = compare(scores, resolution=1 / 240, by_unit=by_unit)
    assert found.num_moved == 1
    assert found.like_outcome == "not distinguishable"
    assert found.like_p_value is not None
    assert found.like_p_value > 0.3
    said = remarks([found])[-1]
    assert said.startswith(
        "differing in few classes only, so that the interval for classes like these may be too narrow"
    )
    assert said.endswith(": a and b in 1 of 12")
    assert remarks([found] * 5)[-1].endswith(", a and b in 1 of 12 and 2 more pairs")


def test_equal_pairs_keep_their_order_in_holm() -> None:
    rng = np.random.default_rng(4)
    base_SC, better_SC = rng.random((4, 12)), rng.random((4, 12))
    found = compared({"a": better_SC, "b": base_SC, "c": base_SC}, [2] * 12)
    first, second, ties = found
    assert first.like_p_value == second.like_p_value
    assert first.like_adjusted_p_value == second.like_adjusted_p_value
    assert ties.like_p_value == 1


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda own: {seed: each._replace(key="other") for seed, each in own.items()}, "the same classes"),
        (lambda own: {seed: each for seed, each in own.items() if seed > 1}, "no scores by class were kept"),
    ],
)
def test_unequal_classes_and_missing_scores_are_refused_with_a_reason(other: Any, reason: str) -> None:
    rng = np.random.default_rng(5)
    a_SC, b_SC = rng.random((3, 12)), rng.random((3, 12))
    by_unit = {"a": means(a_SC, [2] * 12), "b": other(means(b_SC, [2] * 12))}
    (found,) = compared({"a": a_SC, "b": b_SC}, [2] * 12, by_unit=by_unit)
    assert found.like_outcome is None
    assert reason in found.like_unknown
    assert remarks([found, compared({"a": a_SC, "b": b_SC}, [2] * 12)[0]])[1] == (
        f"1 of 2 pairs are of these classes alone: {found.like_unknown}"
    )
    (line,) = remarks([found])
    assert line.endswith(found.like_unknown)


def test_a_macro_mean_weighs_classes_alike() -> None:
    scores = UnitScores(units=[1, 2], counts=[1, 3], sums={"map_at_r": [0.5, 0.6]})
    micro, macro = (UnitMeans.of(scores, f"test_{name}map_at_r") for name in ("", "macro_"))
    assert micro is not None
    assert macro is not None
    assert (micro.counts, macro.counts) == ([1, 3], [1, 1])
    assert macro.mean_C.tolist() == pytest.approx([0.5, 0.2])
    assert UnitMeans.of(scores, "test_nmi") is None


def test_shuffled_rows_have_nadeau_and_bengios_factor() -> None:
    rng = np.random.default_rng(6)
    scores = {name: dict(enumerate((0.5 + 0.02 * rng.normal(size=5)).tolist())) for name in "ab"}
    (found,) = compare(scores, resolution=FINE, unit="row", overlap=1.5)
    differences = [scores["a"][seed] - scores["b"][seed] for seed in range(5)]
    s, effect = float(np.std(differences, ddof=1)), float(np.mean(differences))
    half = stats.t.ppf(0.975, 4) * s * math.sqrt(1 / 5 + 1.5)
    assert (found.like_low, found.like_high) == (pytest.approx(effect - half), pytest.approx(effect + half))
    assert found.high == pytest.approx(effect + stats.t.ppf(0.975, 4) * s / math.sqrt(5))
    assert found.class_share == pytest.approx(1.5 / (1 / 5 + 1.5))
    assert found.class_deviation is None
    assert "; on rows like these [" in str(found)
    assert Shuffles(0.0, 5, 1.0, 1.0).p_value == 1
    (one,) = compare(
        {name: {1: own[1]} for name, own in scores.items()}, resolution=FINE, unit="row", overlap=1.0
    )
    assert one.like_unknown == "too few seeds"


def test_shuffled_halves_of_one_pool_cover_rows_like_these() -> None:
    """2,000 pools whose difference is a mean over rows: the factor covers, the seeds alone do not."""
    rng = np.random.default_rng(7)
    covered = {"like": 0, "here": 0}
    num_studies = 2000
    for _ in range(num_studies):
        pool_N = rng.normal(size=200)
        own = [float(rng.permutation(pool_N)[:100].mean()) for _ in range(5)]
        s, effect = float(np.std(own, ddof=1)), float(np.mean(own))
        covered["like"] += abs(effect) <= Shuffles(effect, 5, s, 1.0).half_width(ALPHA)
        covered["here"] += abs(effect) <= stats.t.ppf(0.975, 4) * s / math.sqrt(5)
    assert covered["like"] / num_studies >= 0.94
    assert covered["here"] / num_studies <= 0.85


@pytest.mark.parametrize("unit", ["image", "row"])
def test_images_and_rows_are_named_as_such(unit: Any) -> None:
    rng = np.random.default_rng(8)
    of_families = {"a": rng.random((3, 40)) + 1, "b": rng.random((3, 40))}
    (found,) = compared(of_families, [1] * 40, unit=unit)
    assert f"a better than b on {unit}s like these: " in str(found)
    assert f"; on these 40 {unit}s [" in str(found)
    assert "of the same classes" in remarks([found])[0]


def test_two_models_by_class() -> None:
    """A paired t-test over classes of one size; with few classes, or unequal ones, a reason."""
    rng = np.random.default_rng(9)
    a_C, b_C = rng.random(25) + 0.3, rng.random(25)
    found = compare_models(UnitMeans("k", [4] * 25, a_C), UnitMeans("k", [4] * 25, b_C), "class")
    assert isinstance(found, ModelComparison)
    test = stats.ttest_rel(a_C, b_C)
    interval = test.confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found.p_value == pytest.approx(test.pvalue)
    few = [UnitMeans("k", [4] * 9, each[:9]) for each in (a_C, b_C)]
    assert compare_models(*few, "class") == "fewer than 10 classes"
    other = UnitMeans("l", [4] * 25, b_C)
    assert (
        compare_models(UnitMeans("k", [4] * 25, a_C), other, "row") == "they were not judged by the same rows"
    )
    assert OneSeed.of(np.zeros(12), Weights.of([1] * 12)).p_value == 1
    assert OneSeed.of(np.full(12, 0.5), Weights.of([1] * 12)).p_value == pytest.approx(0, abs=1e-30)


def test_two_models_cover_classes_like_these() -> None:
    rng = np.random.default_rng(10)
    weights, covered = Weights.of([5] * 20), 0
    for _ in range(2000):
        found = OneSeed.of(rng.normal(size=20), weights)
        covered += abs(found.effect) <= found.half_width(ALPHA)
    assert 0.935 <= covered / 2000 <= 0.965


def test_sums_run_in_the_order_of_units() -> None:
    """The same study twice has the same digits, and the order of families changes none but signs."""
    rng = np.random.default_rng(11)
    of_families = {name: rng.random((3, 30)) for name in "abc"}
    counts = rng.integers(1, 9, 30).tolist()
    assert compared(of_families, counts) == compared(of_families, counts)
    for first, second in itertools.combinations("abc", 2):
        (forth,) = compared({name: of_families[name] for name in (first, second)}, counts)
        (back,) = compared({name: of_families[name] for name in (second, first)}, counts)
        assert (forth.like_low, forth.like_p_value) == (-(back.like_high or 0), back.like_p_value)
