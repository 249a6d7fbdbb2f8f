"""The power of a verdict: the noncentral t-distribution, what is told against simulation, and the pilots."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dmlstudy.spec.study_file import ProtocolConfig
from dmlstudy.verdict.comparison import ALPHA, Comparison, UnitMeans, compare
from dmlstudy.verdict.power import (
    ASSUMED,
    Pilot,
    PlanPower,
    noncentrality,
    of_comparisons,
    of_folds,
    smallest,
)
from dmlstudy.verdict.sequential import Plan
from dmlstudy.verdict.two_sources import TwoSources, Weights


@pytest.mark.parametrize("df", [2.0, 4.0, 9.0, 23.5, 99.0])
@pytest.mark.parametrize("level", [0.05, 0.005])
def test_the_noncentrality_against_scipy(df: float, level: float) -> None:
    """The other tail, which is left out, is far below a percent."""
    critical = stats.t.ppf(1 - level / 2, df)
    assert stats.nct.sf(critical, df, noncentrality(df, level)) == pytest.approx(0.8, abs=2e-3)


def test_the_noncentrality_of_many_degrees_of_freedom_is_the_normal_one() -> None:
    normal = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert noncentrality(1e6, 0.05) == pytest.approx(normal, abs=1e-3)


def of(num_classes: int) -> Weights:
    return Weights.of([10] * num_classes)


@pytest.mark.parametrize(
    ("num_seeds", "num_classes", "here", "like"),
    [
        (3, 20, 0.030, 0.042),
        (5, 20, 0.015, 0.041),
        (10, 20, 0.009, 0.040),
        (3, 100, 0.027, 0.027),
        (5, 100, 0.014, 0.020),
        (10, 100, 0.008, 0.019),
        (5, 659, 0.014, 0.014),
        (10, 659, 0.008, 0.010),
    ],
)
def test_what_is_assumed_in_a_table(num_seeds: int, num_classes: int, here: float, like: float) -> None:
    found = smallest(ASSUMED, num_seeds, ALPHA, of(num_classes))
    assert found.like is not None
    assert (found.here, found.like) == (pytest.approx(here, abs=6e-4), pytest.approx(like, abs=6e-4))


@pytest.mark.parametrize("level", [ALPHA, ALPHA / 4])
@pytest.mark.parametrize(("num_seeds", "num_classes"), [(3, 20), (5, 100), (10, 100)])
def test_a_difference_told_to_be_seen_is_seen_in_four_of_five_studies(
    num_seeds: int, num_classes: int, level: float
) -> None:
    """2,000 studies of seeds, classes and their interaction, each with the difference that is told for these classes.

    For classes like these too; there the largest of three p-values may be stricter than each.
    """
    rng, pilot, num_studies = np.random.default_rng(7), ASSUMED, 2_000
    weights = of(num_classes)
    found = smallest(pilot, num_seeds, level, weights)
    assert found.like is not None
    shape = (num_studies, num_seeds, num_classes)
    noise = pilot.of_seed * rng.normal(size=(num_studies, num_seeds, 1)) + pilot.of_both * rng.normal(
        size=shape
    )
    d_KS = noise.mean(axis=2) + found.here  # these classes: their own means belong to the truth
    t = d_KS.mean(axis=1) / (d_KS.std(axis=1, ddof=1) / math.sqrt(num_seeds))
    seen = 2 * stats.t.sf(np.abs(t), num_seeds - 1) <= level
    assert 0.77 <= seen.mean() <= 0.83
    d_KSC = noise + pilot.of_class * rng.normal(size=(num_studies, 1, num_classes)) + found.like
    like = [TwoSources.of(d_SC, weights, 1e-9).p_value <= level for d_SC in d_KSC[:600]]
    assert 0.70 <= np.mean(like) <= 0.85


def power(num_seeds: object = 5, families: int = 5, pilot: Pilot = ASSUMED, **protocol: object) -> PlanPower:
    config = ProtocolConfig.model_validate({"verdict_seeds": num_seeds, **protocol})
    return PlanPower(Plan.of(config), families, "class", (10,) * 100, pilot)


def test_the_line_says_what_is_seen_and_what_more_seeds_or_fewer_pairs_bring() -> None:
    (line,) = power(5, 4, compare="winner").told()
    assert line == (
        "power: 5 seeds, 100 classes, 4 pairs: sees 2.0 points on these classes, 2.4 on classes like these, with 80%;"
        " 10 seeds: 1.1, 2.2; what limits: classes (deviations of a paired seed 0.8, of a class 6.0, of their"
        " interaction 2.0: assumed)"
    )
    (line,) = power(5, 4).told()
    assert "5 seeds, 100 classes, 10 pairs: sees" in line
    assert "protocol.compare: winner (4 pairs): 2.0, 2.4" in line
    (line,) = power(5, 4, compare=[["a", "b"], ["c", "d"]]).told()
    assert "5 seeds, 100 classes, 2 pairs: sees" in line
    assert "protocol.compare" not in line
    (line,) = power({"from": 3, "to": 10}).told()
    assert line.startswith("power: up to 10 seeds, 100 classes, 5 pairs: sees")


def test_added_seeds_cost_a_fifth_of_the_level() -> None:
    in_steps, fixed = power({"from": 3, "to": 10}), power(10, compare="winner")
    expected = smallest(ASSUMED, 10, 0.8 * ALPHA / 5, of(100))
    assert in_steps.seen(10, 5) == expected
    assert expected.here > fixed.seen(10, 5).here


def test_one_seed_sees_nothing_and_a_metric_that_is_no_mean_says_nothing_of_others() -> None:
    (line,) = power(1, 1).told()
    assert "1 seed, 100 classes, 1 pair: one seed sees no difference; 5 seeds: 1.4, 2.0" in line
    assert power(1, 1).facts()["sees_here"] is None
    (line,) = power()._replace(counts=None).told()
    assert "like these" not in line
    assert "5 seeds, 15 pairs: sees" in line
    (line,) = power()._replace(counts=(3, 3, 3, 3)).told()  # fewer than five
    assert "like these" not in line


def test_nothing_varies_from_classes_or_from_seeds() -> None:
    alone = Pilot(of_seed=0.01, of_class=0.0, of_both=0.0, source="t")
    found = smallest(alone, 5, ALPHA, of(20))
    assert found.here == found.like
    still = Pilot(of_seed=0.0, of_class=0.01, of_both=0.0, source="t")
    found = smallest(still, 5, ALPHA, of(20))
    assert found.here == 0.0
    assert found.like == pytest.approx(noncentrality(19, ALPHA) * 0.01 / math.sqrt(20))
    assert found.limit == "classes"


def test_shuffled_rows() -> None:
    found = smallest(ASSUMED, 10, ALPHA, None, 1.0)
    assert found.like is not None
    assert found.like / found.here == pytest.approx(math.sqrt(11))


def simulated(rng: np.random.Generator, pilot: Pilot, num_seeds: int, num_classes: int) -> Comparison:
    own_C = pilot.of_class * rng.normal(size=num_classes)
    a, b, counts = {}, {}, [5] * num_classes
    for seed in range(1, num_seeds + 1):
        d_C = own_C + pilot.of_seed * rng.normal() + pilot.of_both * rng.normal(size=num_classes)
        a[seed] = UnitMeans("k", counts, 0.5 + d_C)
        b[seed] = UnitMeans("k", counts, np.full(num_classes, 0.5))
    units = {"a": a, "b": b}
    scores = {name: {s: float(each.mean_C.mean()) for s, each in own.items()} for name, own in units.items()}
    (found,) = compare(scores, resolution=1e-6, by_unit=units)
    return found


def test_an_earlier_verdict_gives_its_three_deviations() -> None:
    rng = np.random.default_rng(11)
    true = Pilot(of_seed=0.01, of_class=0.05, of_both=0.03, source="")
    comparisons = [simulated(rng, true, 10, 100) for _ in range(40)]
    found = of_comparisons(comparisons, [5] * 100, "the verdict of x")
    assert found is not None
    assert found.of_seed == pytest.approx(0.01, rel=0.1)
    assert found.of_class == pytest.approx(0.05, rel=0.1)
    assert found.of_both == pytest.approx(0.03, rel=0.1)
    assert found.source == "the verdict of x"
    here = [each.model_copy(update={"class_deviation": None}) for each in comparisons]
    assert of_comparisons(here, [5] * 100, "") is None
    assert of_comparisons([], None, "") is None


def test_folds_give_a_deviation_of_classes_and_one_of_seeds() -> None:
    rng, num_folds, num_classes = np.random.default_rng(12), 4, 200
    d_F = 0.01 * rng.normal(size=num_folds)
    folds: dict[str, dict[int, UnitMeans]] = {"a": {}, "b": {}}
    for fold, mean in enumerate(d_F):
        own_C = 0.06 * rng.normal(size=num_classes)
        counts = [int(n) for n in rng.integers(3, 9, size=num_classes)]
        own_C -= own_C @ np.array(counts) / sum(counts)
        folds["a"][fold] = UnitMeans(f"fold {fold}", counts, 0.5 + mean + own_C)
        folds["b"][fold] = UnitMeans(f"fold {fold}", counts, np.full(num_classes, 0.5))
    found = of_folds(folds)
    assert found is not None
    assert found.of_seed == pytest.approx(float(np.std(d_F, ddof=1)))
    assert found.of_class == pytest.approx(0.06, rel=0.1)
    assert (found.of_both, found.source) == (0.0, "this search's folds")


def test_small_folds_do_not_hide_the_deviation_of_classes() -> None:
    """Of five classes a fold each, as many means are taken out as there are folds."""
    rng, variances = np.random.default_rng(13), []
    for _ in range(300):
        folds: dict[str, dict[int, UnitMeans]] = {"a": {}, "b": {}}
        for fold in range(4):
            counts = [4, 5, 6, 5, 4]
            folds["a"][fold] = UnitMeans(f"fold {fold}", counts, 0.06 * rng.normal(size=5))
            folds["b"][fold] = UnitMeans(f"fold {fold}", counts, np.zeros(5))
        found = of_folds(folds)
        assert found is not None
        variances.append(found.of_class**2)
    assert float(np.mean(variances)) ** 0.5 == pytest.approx(0.06, rel=0.03)


def test_too_little_for_a_pilot() -> None:
    one = UnitMeans("k", [3] * 8, np.zeros(8))
    assert of_folds({}) is None
    assert of_folds({"a": {0: one, 1: one}}) is None  # one family
    assert of_folds({"a": {0: one}, "b": {0: one}}) is None  # one fold
    assert of_folds({"a": {0: one, 1: one}, "b": {0: one._replace(key="other"), 1: one}}) is None
