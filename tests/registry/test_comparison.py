"""Paired comparisons: the t-test against scipy's, Holm's correction by hand, and its laws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dmlstudy.registry.comparison import ALPHA, Comparison, compare


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
    (comparison,) = compare(given)
    a, b = (list(given[name].values()) for name in "ab")
    test = stats.ttest_rel(a, b)
    interval = test.confidence_interval(0.95)
    assert comparison.p_value == comparison.adjusted_p_value == pytest.approx(test.pvalue)
    assert comparison.effect == pytest.approx(np.mean(a) - np.mean(b))
    assert (comparison.low, comparison.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert comparison.outcome == ("better" if test.pvalue < ALPHA else "not distinguishable")


def test_holm_by_hand() -> None:
    found = by_pair(compare(scores(3, {"a": 0.60, "b": 0.56, "c": 0.555})))
    p = sorted((c.p_value, pair) for pair, c in found.items())
    expected, worst = {}, 0.0
    for rank, (value, pair) in enumerate(p):
        worst = max(worst, min(1.0, value * (3 - rank)))
        expected[pair] = worst
    for pair, comparison in found.items():
        assert comparison.adjusted_p_value == pytest.approx(expected[pair])
        assert (comparison.outcome != "not distinguishable") == (expected[pair] <= ALPHA)
    assert found["a", "b"].outcome == found["a", "c"].outcome == "better"
    assert found["b", "c"].outcome == "not distinguishable"


@pytest.mark.parametrize("seed", range(20))
def test_the_interval_leaves_out_zero_exactly_where_there_is_a_difference(seed: int) -> None:
    for comparison in compare(scores(seed, {"a": 0.52, "b": 0.51, "c": 0.5, "d": 0.505})):
        assert comparison.low is not None
        assert comparison.high is not None
        assert comparison.low < comparison.effect < comparison.high
        excludes_zero = comparison.low > 0 or comparison.high < 0
        assert excludes_zero == (comparison.outcome != "not distinguishable")
        assert comparison.adjusted_p_value >= comparison.p_value


def test_no_difference_is_rarely_called_one() -> None:
    """Of 300 studies of four equal families at most about 5% may name any difference."""
    wrong = sum(
        any(c.outcome != "not distinguishable" for c in compare(scores(seed, dict.fromkeys("abcd", 0.5))))
        for seed in range(300)
    )
    assert wrong <= 300 * ALPHA + 3 * (300 * ALPHA * (1 - ALPHA)) ** 0.5


def test_only_common_seeds_count() -> None:
    (comparison,) = compare({"a": {1: 0.5, 2: 0.6, 3: 0.9}, "b": {1: 0.4, 2: 0.5, 4: 0.1}})
    assert comparison.num_seeds == 2
    assert comparison.effect == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("a", "b"), [({1: 0.5}, {1: 0.1}), ({1: 0.5}, {2: 0.1}), ({}, {}), ({1: 0.5, 2: 0.5}, {1: 0.5, 2: 0.5})]
)
def test_too_little_tells_nothing(a: dict[int, float], b: dict[int, float]) -> None:
    (comparison,) = compare({"a": a, "b": b})
    assert comparison.outcome == "not distinguishable"
    assert comparison.adjusted_p_value == 1
    assert "not distinguishable from b" in str(comparison)


def test_swapping_two_families_turns_the_outcome() -> None:
    given = scores(3, {"a": 0.6, "b": 0.5})
    (forth,) = compare(given)
    (back,) = compare({name: given[name] for name in "ba"})
    assert (forth.outcome, back.outcome) == ("better", "worse")
    assert back.effect == pytest.approx(-forth.effect)
    assert back.low == pytest.approx(-forth.high)
