"""The band of a tuning curve holds for all numbers of trials at once, whatever the distribution of scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dmlstudy.verdict.tuning_curves import pointwise_curve, tuning_curve


def test_the_median_of_the_best_is_a_quantile_of_the_scores() -> None:
    scores = [0.5, 0.1, 0.9, 0.3, 0.7]
    by_k = {point.num_trials: point for point in tuning_curve(scores)}
    assert list(by_k) == [1, 2, 3, 4, 5]
    for k, point in by_k.items():
        share = 0.5 ** (1 / k)
        assert point.best == next(s for s in sorted(scores) if sum(x <= s for x in scores) / 5 >= share)
        assert point.low <= point.best <= point.high
    assert by_k[1].best == 0.5
    assert by_k[5].best == 0.9
    assert by_k[5].high == 1.0  # five scores do not bound the best of five
    assert by_k[1].low == 0.1


def test_it_rises_and_does_not_depend_on_the_order() -> None:
    scores = np.random.default_rng(0).random(40).tolist()
    points = tuning_curve(scores)
    assert points == tuning_curve(scores[::-1])
    for name in ("best", "low", "high"):
        values = [getattr(point, name) for point in points]
        assert values == sorted(values)


@pytest.mark.parametrize("num", [5, 6, 7, 8, 9, 10, 19, 50])
def test_the_band_covers_all_numbers_of_trials_at_once(num: int) -> None:
    """Uniform scores, whose quantiles are known; the intervals' order is that of any continuous distribution."""
    rng = np.random.default_rng(num)
    truth_K = 0.5 ** (1 / np.arange(1, num + 1))
    held = 0
    for _ in range(4000):
        points = tuning_curve(rng.random(num).tolist())
        low_K, high_K = np.array([(point.low, point.high) for point in points]).T
        held += bool(((low_K <= truth_K) & (truth_K <= high_K)).all())
    assert 0.945 <= held / 4000 <= 0.97


def test_ties_and_failures() -> None:
    points = tuning_curve([0.4] * 6)
    assert {point.best for point in points} == {0.4}
    assert all(point.low == 0.4 and point.high in (0.4, 1.0) for point in points)
    assert tuning_curve([0.0, 0.0, 0.5, 0.6, 0.7])[0].best == 0.5


@pytest.mark.parametrize(
    ("scores", "said"),
    [([0.1] * 4, "4 scores"), ([0.1] * 5 + [1.2], "from 0 to 1"), ([0.1] * 5 + [math.nan], "from 0 to 1")],
)
def test_what_has_no_curve(scores: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tuning_curve(scores)


def test_the_interval_over_searches_covers_the_mean_at_each_k() -> None:
    """Searches that learn: each trial is near the best before it."""
    rng = np.random.default_rng(5)

    def search() -> dict[int, float]:
        best, found = rng.normal(0.5, 0.1), {}
        for k in range(1, 21):
            best = max(best, rng.normal(best - 0.05, 0.1)) if k > 1 else best
            found[k] = best
        return found

    truth = np.mean([list(search().values()) for _ in range(20_000)], axis=0)
    for num in (3, 5):
        held_K = np.zeros(20)
        for _ in range(2000):
            points = pointwise_curve([search() for _ in range(num)])
            held_K += [point.low <= mean <= point.high for point, mean in zip(points, truth, strict=True)]
        assert (held_K / 2000 >= 0.93).all(), num
        assert (held_K / 2000 <= 0.97).all(), num


def test_two_searches_have_no_interval() -> None:
    with pytest.raises(ValueError, match="2 searches: an interval over them needs 3"):
        pointwise_curve([{1: 0.5}, {1: 0.6}])
