"""Paired comparisons: the t-test against scipy's, Holm's correction by hand, and what the intervals promise."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats

from dmlstudy.verdict import comparison
from dmlstudy.verdict.comparison import ALPHA, Comparison, Outcome, tallied

FINE = 1e-6


def compare(
    scores: Mapping[str, Mapping[int, float]],
    resolution: float = FINE,
    pairs: list[tuple[str, str]] | None = None,
) -> list[Comparison]:
    return comparison.compare(scores, pairs=pairs, resolution=resolution)


def scores(
    seed: int, means: dict[str, float], spread: float = 0.01, n: int = 5
) -> dict[str, dict[int, float]]:
    rng = np.random.default_rng(seed)
    return {
        name: {k + 1: float(mean + spread * rng.normal()) for k in range(n)} for name, mean in means.items()
    }


def by_pair(comparisons: list[Comparison]) -> dict[tuple[str, str], Comparison]:
    return {(c.first, c.second): c for c in comparisons}


def test_two_families_are_a_paired_t_test() -> None:
    given = scores(0, {"a": 0.52, "b": 0.5})
    (found,) = compare(given)
    a, b = (list(given[name].values()) for name in "ab")
    test = stats.ttest_rel(a, b)
    interval = test.confidence_interval(0.95)
    assert found.p_value == found.adjusted_p_value == pytest.approx(test.pvalue)
    assert found.effect == pytest.approx(np.mean(a) - np.mean(b))
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found.outcome == ("better" if test.pvalue < ALPHA else "not distinguishable")


def test_holm_by_hand_and_bonferroni_beside_it() -> None:
    given = scores(3, {"a": 0.60, "b": 0.56, "c": 0.555})
    found = by_pair(compare(given))
    p = sorted((c.p_value, pair) for pair, c in found.items())
    expected, worst = {}, 0.0
    for rank, (value, pair) in enumerate(p):
        worst = max(worst, min(1.0, value * (3 - rank)))
        expected[pair] = worst
    for (first, second), one in found.items():
        assert one.adjusted_p_value == pytest.approx(expected[first, second])
        assert (one.outcome != "not distinguishable") == (expected[first, second] <= ALPHA)
        test = stats.ttest_rel(list(given[first].values()), list(given[second].values()))
        interval = test.confidence_interval(1 - ALPHA / 3)
        assert (one.low, one.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found["a", "b"].outcome == found["a", "c"].outcome == "better"
    assert found["b", "c"].outcome == "not distinguishable"


@pytest.mark.parametrize("seed", range(20))
def test_an_interval_that_leaves_out_zero_is_a_difference(seed: int) -> None:
    """Holm's test finds whatever the intervals of all pairs show, and more."""
    for one in compare(scores(seed, {"a": 0.52, "b": 0.51, "c": 0.5, "d": 0.505})):
        assert one.low is not None
        assert one.high is not None
        assert one.low < one.effect < one.high
        assert one.adjusted_p_value >= one.p_value
        if one.low > 0 or one.high < 0:
            assert one.outcome == ("better" if one.effect > 0 else "worse")


def test_the_intervals_hold_together() -> None:
    """In at least 95% of studies all true differences are covered, also where many differences are found."""
    means = {"a": 0.58, "b": 0.55, "c": 0.52, "d": 0.50}
    truth = {(a, b): means[a] - means[b] for a, b in itertools.combinations(means, 2)}
    num, covered = 3000, 0
    for seed in range(num):
        found = by_pair(compare(scores(seed, means)))
        covered += all((c.low or 0) <= truth[pair] <= (c.high or 0) for pair, c in found.items())
    assert covered / num >= 1 - ALPHA


def test_no_difference_is_rarely_called_one() -> None:
    """Of 300 studies of four equal families at most about 5% may name any difference."""
    wrong = sum(
        any(c.outcome != "not distinguishable" for c in compare(scores(seed, dict.fromkeys("abcd", 0.5))))
        for seed in range(300)
    )
    assert wrong <= 300 * ALPHA + 3 * (300 * ALPHA * (1 - ALPHA)) ** 0.5


def test_only_common_seeds_count() -> None:
    (found,) = compare({"a": {1: 0.5, 2: 0.6, 3: 0.9}, "b": {1: 0.4, 2: 0.4, 4: 0.1}})
    assert found.num_seeds == 2
    assert found.effect == pytest.approx(0.15)


def test_only_the_pairs_asked_for_count() -> None:
    given = scores(0, {"a": 0.52, "b": 0.5, "c": 0.4})
    (found,) = compare(given, pairs=[("b", "a")])
    assert found == compare({name: given[name] for name in "ba"})[0]
    assert compare(given, pairs=[]) == []


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({1: 0.5}, {1: 0.1}),
        ({1: 0.5}, {2: 0.1}),
        ({}, {}),
        ({1: 0.5, 2: 0.5}, {1: 0.5, 2: 0.5}),
        ({1: 0.5, 2: 0.6}, {1: 0.1, 2: 0.2}),  # by the same on both
    ],
)
def test_too_little_tells_nothing(a: dict[int, float], b: dict[int, float]) -> None:
    (found,) = compare({"a": a, "b": b})
    assert found.outcome == "not distinguishable"
    assert found.adjusted_p_value == 1
    assert found.low is None
    assert str(found).startswith("a not distinguishable from b: ")


def test_seeds_that_agree_on_a_coarse_score_leave_doubt() -> None:
    """50 queries show steps of 0.02 only: one step on each of 5 seeds is no certainty, ten steps are enough."""

    def against(effect: float) -> Comparison:
        a = {seed: 0.5 + 0.1 * seed for seed in range(5)}
        (found,) = compare({"a": a, "b": {seed: a[seed] - effect for seed in a}}, resolution=0.02)
        return found

    one, ten = against(0.02), against(0.2)
    assert one.outcome == "not distinguishable"
    assert one.low is not None
    assert one.low < 0
    assert ten.outcome == "better"
    assert ten.low is not None
    assert 0.1 < ten.low < ten.effect < (ten.high or 0)


@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.parametrize("steps", [0.1, 0.5, 1.0])
def test_no_difference_on_a_coarse_score_is_rarely_called_one(n: int, steps: float) -> None:
    rng = np.random.default_rng(n)
    wrong = 0
    for _ in range(400):
        level = rng.random()
        rounded = np.round(level + steps * rng.normal(size=(2, n))) / 50
        a, b = (dict(enumerate(row.tolist())) for row in rounded)
        wrong += compare({"a": a, "b": b}, resolution=1 / 50)[0].outcome != "not distinguishable"
    assert wrong <= 400 * ALPHA


def test_swapping_two_families_turns_the_outcome() -> None:
    given = scores(3, {"a": 0.6, "b": 0.5})
    (forth,) = compare(given)
    (back,) = compare({name: given[name] for name in "ba"})
    assert (forth.outcome, back.outcome) == ("better", "worse")
    assert back.effect == pytest.approx(-forth.effect)
    assert back.low == pytest.approx(-(forth.high or 0))


def test_a_line_says_what_decided() -> None:
    given = {"a": {1: 0.6, 2: 0.61, 3: 0.62}, "b": {1: 0.5, 2: 0.53, 3: 0.5}}
    (found,) = compare(given)
    assert str(found) == "a better than b on these classes: +0.1000 [+0.0503, +0.1497] p 0.013"


def test_wins_ties_and_losses_are_counted_from_the_familys_side() -> None:
    def one(first: str, second: str, outcome: Outcome) -> Comparison:
        return Comparison(
            first=first,
            second=second,
            num_seeds=5,
            effect=0.0,
            low=None,
            high=None,
            p_value=1.0,
            adjusted_p_value=1.0,
            outcome=outcome,
        )

    studies = [
        [one("a", "b", "better"), one("c", "a", "better"), one("b", "c", "worse")],
        [one("b", "a", "worse"), one("a", "c", "not distinguishable")],
        [one("a", "b", "worse")],
    ]
    tallies = tallied(studies, "a")
    assert {rival: str(tally) for rival, tally in tallies.items()} == {"b": "2/0/1", "c": "0/1/1"}
    assert tallied(studies, "d") == {}
