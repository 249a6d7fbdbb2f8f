"""Seeds that are added until a verdict is decided: weights, looks, and the errors that they promise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.special import stdtr, stdtrit

from dmlstudy.records import SeedRange
from dmlstudy.spec.study_file import ProtocolConfig
from dmlstudy.verdict.comparison import ALPHA, Pair, UnitMeans, compare, remarks
from dmlstudy.verdict.sequential import FAILED, Looks, Plan, SeedScore, chance_left

FINE = 1e-9
Values = NDArray[np.float64]


def plan(fewest: int = 3, most: int = 10, **more: object) -> Plan:
    seeds = SeedRange.model_validate({"from": fewest, "to": most})
    return Plan.of(ProtocolConfig.model_validate({"verdict_seeds": seeds, **more}))


@pytest.mark.parametrize(
    ("fewest", "most", "looks", "weights"),
    [
        (3, 10, (3, 4, 5, 7, 10), (0.0316, 0.0421, 0.0526, 0.0737, 0.8)),
        (3, 5, (3, 4, 5), (0.0857, 0.1143, 0.8)),
        (3, 4, (3, 4), (0.2, 0.8)),
        (6, 20, (6, 7, 10, 14, 20), None),
        (3, 40, (3, 4, 5, 7, 10, 14, 20, 28, 40), None),
        (50, 100, (50, 100), (0.2, 0.8)),
    ],
)
def test_looks_and_weights(
    fewest: int, most: int, looks: tuple[int, ...], weights: tuple[float, ...] | None
) -> None:
    found = plan(fewest, most)
    assert found.looks == looks
    assert sum(found.weights) == pytest.approx(1, abs=1e-15)
    assert weights is None or found.weights == pytest.approx(weights, abs=5e-5)
    assert found.compare == "winner"


def test_a_fixed_number_is_one_look_of_all_pairs() -> None:
    found = Plan.of(ProtocolConfig())
    assert (found.looks, found.weights, found.compare, found.is_in_steps) == ((5,), (1.0,), "all", False)


def test_pairs_that_are_named_are_compared_as_they_are_named() -> None:
    possible = [("a", "b"), ("a", "c"), ("b", "c"), ("a", "untrained")]
    pairs = [["c", "a"], ["b", "c"], ["d", "a"]]
    found = Plan.of(ProtocolConfig.model_validate({"compare": pairs}))
    assert found.chosen(possible, "a") == [("c", "a"), ("b", "c")]
    assert Plan.model_validate_json(found.model_dump_json()) == found


def scores_of(x_FS: Values, names: Sequence[str]) -> dict[tuple[str, int], SeedScore]:
    return {
        (name, seed): SeedScore(float(value))
        for name, x_S in zip(names, x_FS, strict=True)
        for seed, value in enumerate(x_S, 1)
    }


def test_one_look_gives_the_digits_of_the_comparison_on_fixed_seeds() -> None:
    rng = np.random.default_rng(3)
    names, counts = ["a", "b", "c"], [int(n) for n in rng.integers(3, 20, size=12)]
    units = {
        (name, seed): UnitMeans("same", counts, 0.5 + 0.02 * place + 0.02 * rng.normal(size=12))
        for place, name in enumerate(names)
        for seed in range(1, 6)
    }
    weights = np.array(counts) / sum(counts)
    scores = {key: SeedScore(float(each.mean_C @ weights), each) for key, each in units.items()}
    pairs = list(itertools.combinations(names, 2))
    looks = Looks(Plan.of(ProtocolConfig()), names, pairs, 1e-3)
    looks.take(scores)
    expected = compare(
        {name: {seed: scores[name, seed].score or 0.0 for seed in range(1, 6)} for name in names},
        resolution=1e-3,
        by_unit={name: {seed: units[name, seed] for seed in range(1, 6)} for name in names},
    )
    for found, own in zip(looks.comparisons(), expected, strict=True):
        assert found.model_copy(update={"look": 0, "most_seeds": 0, "ended": None}) == own


def paths(differences: Values, looks: Sequence[int], weights: Sequence[float]) -> tuple[Values, Values]:
    """Sequential p and t of paired differences (..., N) after each look, by scipy's functions alone."""
    p, t = [], []
    for look, weight in zip(looks, weights, strict=True):
        first = differences[..., :look]
        t.append(first.mean(axis=-1) / (first.std(axis=-1, ddof=1) / np.sqrt(look)))
        p.append(2 * stdtr(look - 1, -np.abs(t[-1])) / weight)
    return np.minimum.accumulate(np.stack(p, axis=-1), axis=-1), np.stack(t, axis=-1)


def simulated(differences_KMN: Values, found: Plan) -> tuple[NDArray[np.bool_], Values]:
    """For K studies of M pairs: what is decided in the end, and the seeds of each pair, without ``Looks``."""
    p_KML, t_KML = paths(differences_KMN, found.looks, found.weights)
    num_studies, m, last = differences_KMN.shape
    is_open = np.ones((num_studies, m), bool)
    p_KM = np.full((num_studies, m), np.inf)
    seeds_KM = np.zeros((num_studies, m))
    for place, look in enumerate(found.looks):
        p_KM = np.where(is_open, p_KML[..., place], p_KM)
        seeds_KM = np.where(is_open, look, seeds_KM)
        order = np.argsort(p_KM, axis=1)
        stepped = np.take_along_axis(p_KM, order, axis=1) * np.arange(m, 0, -1)
        adjusted = np.empty_like(p_KM)
        np.put_along_axis(adjusted, order, np.maximum.accumulate(stepped, axis=1), axis=1)
        decided = adjusted <= ALPHA
        is_open &= ~decided
        if look < last:
            u = m - decided.sum(axis=1, keepdims=True)
            critical = stdtrit(last - 1, 1 - ALPHA * found.weights[-1] / (2 * np.maximum(u, 1)))
            reached = np.abs(t_KML[..., place]) * np.sqrt(last / look) - critical
            is_open &= stdtr(look - 1, reached / np.sqrt((last - look) / look)) >= found.give_up
    return decided, seeds_KM


def test_the_level_of_a_pair_without_a_difference() -> None:
    """40,000 paths of up to 10 seeds: between 4.0 and 5.0% decided, stopping included."""
    differences = np.random.default_rng(41).normal(size=(40_000, 1, 10))
    decided, seeds = simulated(differences, plan())
    assert 0.040 <= decided.mean() <= 0.050
    assert 3 <= seeds.mean() < 7
    never, _ = simulated(differences, plan(give_up=0.0))
    assert 0.040 <= never.mean() <= 0.050
    assert decided.sum() <= never.sum()  # giving up makes no error


def test_power_and_seeds_of_a_pair() -> None:
    """A difference of 2 deviations of a paired seed: nearly the power of 10 fixed seeds, with about 7."""
    differences = 2 + np.random.default_rng(42).normal(size=(4_000, 1, 10))
    decided, seeds = simulated(differences, plan())
    assert decided.mean() > 0.995
    assert seeds.mean() == pytest.approx(7.2, abs=0.2)


FAMILIES = ["a", "b", "c", "d", "e"]
WITH_FIRST: list[Pair] = [("a", name) for name in FAMILIES[1:]]


def test_the_family_wise_error_of_five_equal_families() -> None:
    """4,000 studies: at most 5.6% with one false difference or more. The first hundred as ``Looks`` finds them."""
    x_KFN = np.random.default_rng(43).normal(size=(4_000, 5, 10))
    differences = x_KFN[:, :1] - x_KFN[:, 1:]
    decided_KM, seeds_KM = simulated(differences, plan())
    assert 0.02 <= decided_KM.any(axis=1).mean() <= 0.056
    for study in range(100):
        looks = Looks(plan(), FAMILIES, WITH_FIRST, FINE)
        looks.take(scores_of(x_KFN[study], FAMILIES))
        found = looks.comparisons()
        assert [each.ended == "decided" for each in found] == decided_KM[study].tolist()
        assert [each.look for each in found] == seeds_KM[study].tolist()


def test_decisions_stay_and_p_never_rises() -> None:
    rng = np.random.default_rng(44)
    for _ in range(60):
        means = rng.normal(size=5)[:, None]
        scores = scores_of(means + rng.normal(size=(5, 10)), FAMILIES)
        looks, before = Looks(plan(), FAMILIES, WITH_FIRST, FINE), None
        while not looks.is_over:
            last = looks.seeds.stop - 1
            looks.take({key: each for key, each in scores.items() if key[1] <= last})
            found = looks.comparisons()
            if before is not None:
                for was, now in zip(before, found, strict=True):
                    assert now.adjusted_p_value <= was.adjusted_p_value
                    assert was.ended != "decided" or (now.ended, now.look) == ("decided", was.look)
            before = found


def test_a_look_reads_no_later_seed() -> None:
    """Whatever later seeds score, and whether they are there, a look finds the same."""
    rng = np.random.default_rng(45)
    x_FN = np.array([0.0, 0, 0.5, 1, 6])[:, None] + rng.normal(size=(5, 10))
    other = x_FN.copy()
    other[:, 3:] = rng.normal(size=(5, 7)) * 100
    found = []
    for each in (x_FN, other, x_FN[:, :3]):
        looks = Looks(plan(), FAMILIES, WITH_FIRST, FINE)
        scores = scores_of(each, FAMILIES)
        del scores["e", 1]
        scores["e", 1] = SeedScore(None)
        looks.take({key: value for key, value in scores.items() if key[1] <= 3})
        found.append((looks.comparisons(), looks.going_on, looks.wanted))
    assert found[0] == found[1] == found[2]
    assert all(seed == 4 for _, seed in found[0][2])


def test_nothing_is_said_before_all_trials_of_a_look_have_ended() -> None:
    scores = scores_of(np.random.default_rng(46).normal(size=(5, 10)), FAMILIES)
    scores.pop(("c", 2))
    looks = Looks(plan(), FAMILIES, WITH_FIRST, FINE)
    looks.take(scores)
    assert looks.comparisons() == []
    assert looks.wanted == [(name, seed) for name in FAMILIES for seed in (1, 2, 3)]


def test_a_family_whose_every_trial_failed_is_never_decided_and_ends_with_the_limit() -> None:
    scores = scores_of(np.random.default_rng(47).normal(size=(5, 10)), FAMILIES)
    scores |= {("e", seed): SeedScore(None) for seed in range(1, 11)}
    looks = Looks(plan(), FAMILIES, WITH_FIRST, FINE)
    looks.take(scores)
    assert looks.is_over
    assert [each.second for each in looks.comparisons()] == ["b", "c", "d"]  # m is 4 all the same
    nothing = Looks(plan(), FAMILIES, WITH_FIRST, FINE)
    nothing.take({key: SeedScore(None) for key in scores})
    assert nothing.is_over
    assert nothing.comparisons() == []


def test_scores_that_agree_on_every_seed() -> None:
    """No difference at all: p is 1. A difference by the resolution on every seed is none by the resolution's floor."""
    equal = scores_of(np.full((5, 10), 0.5), FAMILIES)
    looks = Looks(plan(), FAMILIES, WITH_FIRST, 1e-3)
    looks.take(equal)
    assert {(each.p_value, each.outcome) for each in looks.comparisons()} == {(1.0, "not distinguishable")}
    assert {(each.look, each.ended) for each in looks.comparisons()} == {(3, "seeds")}


def with_units(rng: np.random.Generator, effect: float, of_unit: float) -> dict[tuple[str, int], SeedScore]:
    """Two families: a small deviation over seeds, and one over 20 classes."""
    z_C = rng.normal(size=20)
    own_C = effect + of_unit * (z_C - z_C.mean())
    found = {}
    for seed in range(1, 11):
        a_C = 0.5 + 0.001 * rng.normal(size=20)
        for name, mean_C in (("a", a_C + own_C), ("b", a_C)):
            found[name, seed] = SeedScore(float(mean_C.mean()), UnitMeans("k", [5] * 20, mean_C))
    return found


def test_given_up_where_classes_limit_and_the_line_says_so() -> None:
    scores = with_units(np.random.default_rng(48), 0.005, 0.1)
    looks = Looks(plan(), ["a", "b"], [("a", "b")], 1e-4)
    looks.take(scores)
    (found,) = looks.comparisons()
    assert (found.ended, found.look) == ("classes", 3)
    assert "after 3 seeds given up, for classes limit and not seeds: a - b" in remarks([found])[-1]
    here = Looks(plan(decide_on="these_classes"), ["a", "b"], [("a", "b")], 1e-4)
    here.take(scores)
    assert here.comparisons()[0].ended != "classes"
    never = Looks(plan(give_up=0.0), ["a", "b"], [("a", "b")], 1e-4)
    never.take(scores)
    assert (never.comparisons()[0].ended, never.comparisons()[0].look) == ("limit", 10)


@pytest.mark.parametrize("failed", [(), (1, 2), (1, 2, 3)])
def test_seeds_that_failed_do_not_choose_the_population(failed: tuple[int, ...]) -> None:
    """Of two of three seeds, or all, nothing is known at the first look; there are 20 classes all the same."""
    scores = with_units(np.random.default_rng(48), 0.05, 0.3)
    scores |= {("b", seed): FAILED for seed in failed}
    looks = Looks(plan(give_up=0.0), ["a", "b"], [("a", "b")], 1e-4)
    looks.take(scores)
    (found,) = looks.comparisons()
    assert (found.outcome, found.like_outcome) == ("better", "not distinguishable")
    assert (found.ended, found.look) == ("limit", 10)


def test_an_outcome_on_classes_like_these_is_that_on_these() -> None:
    """Three seeds say better on these classes, the seven that follow worse by more, on classes like these too."""
    rng = np.random.default_rng(0)
    pattern_C = np.where(np.arange(20) % 2, 0.3, -0.3)
    found = {}
    for seed in range(1, 11):
        effect_C = 0.05 + pattern_C if seed <= 3 else -0.3 - pattern_C * 3 / 7
        for name, mean_C in (("a", 0.5 + effect_C + 1e-4 * rng.normal()), ("b", np.full(20, 0.5))):
            found[name, seed] = SeedScore(float(mean_C.mean()), UnitMeans("k", [1000] * 20, mean_C))
    looks = Looks(plan(give_up=0.0), ["a", "b"], [("a", "b")], 1e-4)
    looks.take(found)
    (pair,) = looks.comparisons()
    assert (pair.outcome, pair.like_outcome) == ("worse", "worse")
    assert pair.effect < 0


def test_the_interval_is_that_of_the_last_look() -> None:
    scores = with_units(np.random.default_rng(49), 0.2, 0.02)
    looks = Looks(plan(), ["a", "b"], [("a", "b")], 1e-4)
    looks.take(scores)
    (found,) = looks.comparisons()
    assert (found.ended, found.look, found.like_outcome, found.outcome) == ("decided", 3, "better", "better")
    d = [(scores["a", s].score or 0) - (scores["b", s].score or 0) for s in (1, 2, 3)]
    half = stats.t.ppf(1 - ALPHA * plan().weights[0] / 2, 2) * max(np.std(d, ddof=1), 1e-4) / np.sqrt(3)
    assert (found.low, found.high) == pytest.approx((np.mean(d) - half, np.mean(d) + half))
    assert found.like_low is not None
    assert found.low is not None
    assert found.like_low <= found.low


def test_the_chance_left_is_that_of_a_hand_computed_case() -> None:
    expected = stats.t.cdf((2.0 * np.sqrt(10 / 4) - 2.3) / np.sqrt(6 / 4), 3)
    assert chance_left(-2.0, 4, 10, 2.3) == pytest.approx(expected)
