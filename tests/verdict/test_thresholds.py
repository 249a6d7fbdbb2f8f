"""Errors of a shipped threshold: the jackknife by leaving classes out in fact, its coverage, its warnings and words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit, logit
from scipy.stats import norm
from scipy.stats import t as student

from dmlstudy.description import ThresholdDescription
from dmlstudy.records import PairCounts
from dmlstudy.verdict.thresholds import Rate, errors, fields, rate_over_classes, said, shipped


def counts(
    accepted: list[int],
    impostors: list[int],
    rejected: list[int],
    genuine: list[int],
    class_pairs: int = 5,
    tau: float = 0.61,
) -> PairCounts:
    return PairCounts(
        units=list(range(len(accepted))),
        impostors=impostors,
        genuine=genuine,
        shipped="1e-3",
        thresholds={"1e-3": tau},
        accepted={"1e-3": accepted},
        rejected={"1e-3": rejected},
        class_pairs={"1e-3": class_pairs},
    )


def plain_interval(
    matrix_CC: NDArray[np.float64], total_CC: NDArray[np.float64], wider: float
) -> tuple[float, float]:
    """The interval by sums over class pairs anew, with each class struck out of the matrix."""

    def rate(kept: list[int]) -> float:
        both = [(a, b) for a in kept for b in kept if a < b]
        return float(sum(matrix_CC[p] for p in both) / sum(total_CC[p] for p in both))

    everyone = list(range(len(matrix_CC)))
    left_out = [rate([c for c in everyone if c != out]) for out in everyone]
    x = [math.log(r / (1 - r)) for r in (min(max(r, 1e-12), 1 - 1e-12) for r in left_out)]
    x = [each - sum(x) / len(x) for each in x]
    num = len(x)
    variance = (num - 1) / num * sum(each**2 for each in x)
    df = min(max(3 * sum(each**2 for each in x) ** 2 / sum(each**4 for each in x) - 1, 1), num - 1)
    half = student.ppf(0.975, df) * math.sqrt(variance * wider)
    centre = logit(rate(everyone))
    return float(expit(centre - half)), float(expit(centre + half))


@pytest.mark.parametrize("num_classes", [3, 4, 20])
def test_jackknife_is_leaving_each_class_out(num_classes: int) -> None:
    rng = np.random.default_rng(num_classes)
    size_C = rng.integers(2, 20, num_classes)
    total_CC = np.triu(np.outer(size_C, size_C), 1)
    matrix_CC = rng.binomial(total_CC, 0.05 * rng.random(total_CC.shape))
    found = rate_over_classes(
        (matrix_CC + matrix_CC.T).sum(1).tolist(), (total_CC + total_CC.T).sum(1).tolist(), classes_in_pair=2
    )
    assert (found.num, found.total) == (matrix_CC.sum(), total_CC.sum())
    low, high = plain_interval(matrix_CC, total_CC, 1)
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-12), pytest.approx(high, rel=1e-12))
    low, high = plain_interval(matrix_CC, total_CC, 2)
    assert (found.new_low, found.new_high) == (pytest.approx(low, rel=1e-12), pytest.approx(high, rel=1e-12))
    assert low < found.rate < high


def test_genuine_pairs_are_of_one_class() -> None:
    rejected, genuine = [3, 0, 4, 1], [10, 6, 15, 28]
    found = rate_over_classes(rejected, genuine, classes_in_pair=1)
    assert found.rate == 8 / 59
    left = [(8 - g) / (59 - q) for g, q in zip(rejected, genuine, strict=True)]
    x = np.log(left) - np.log1p(-np.array(left))
    x -= x.mean()
    variance = 3 / 4 * (x**2).sum()
    df = min(max(3 * (x**2).sum() ** 2 / (x**4).sum() - 1, 1), 3)
    assert found.low == pytest.approx(
        expit(logit(8 / 59) - student.ppf(0.975, df) * math.sqrt(variance)), rel=1e-12
    )


def simulated(
    rng: np.random.Generator, num_classes: int, wanted: float
) -> tuple[list[int], list[int], float]:
    """M and P of classes of which some attract impostors, and the rate of the kind of classes.

    A pair of items of classes a and b is accepted if a normal score, with an effect of each class and of their pair,
    exceeds a threshold: its variances are 0.15, 0.15, 0.2 and 0.5.
    """
    size_C = rng.integers(3, 21, num_classes)
    of_class_C = rng.normal(0, math.sqrt(0.15), num_classes)
    of_pair_CC = rng.normal(0, math.sqrt(0.2), (num_classes, num_classes))
    theta = norm.isf(wanted)
    chance_CC = norm.sf((theta - of_class_C[:, None] - of_class_C - of_pair_CC) / math.sqrt(0.5))
    total_CC = np.triu(np.outer(size_C, size_C), 1)
    matrix_CC = rng.binomial(total_CC, chance_CC)
    return (matrix_CC + matrix_CC.T).sum(1).tolist(), (total_CC + total_CC.T).sum(1).tolist(), wanted


def test_coverage_on_simulated_studies() -> None:
    """50 classes of 3 to 20 items, FMR 1e-2: of classes like these, and of as many new ones."""
    rng = np.random.default_rng(20)
    num_studies = 400
    holds = holds_new = naive = 0
    for _ in range(num_studies):
        accepted, impostors, truth = simulated(rng, 50, 1e-2)
        found = rate_over_classes(accepted, impostors, classes_in_pair=2)
        new_accepted, new_impostors, _ = simulated(rng, 50, 1e-2)
        new = sum(new_accepted) / sum(new_impostors)
        assert found.low is not None
        assert found.high is not None
        assert found.new_low is not None
        assert found.new_high is not None
        holds += found.low <= truth <= found.high
        holds_new += found.new_low <= new <= found.new_high
        half = 1.96 * math.sqrt(found.rate * (1 - found.rate) / found.total)
        naive += abs(found.rate - truth) <= half
    assert holds >= 0.93 * num_studies
    assert holds_new >= 0.93 * num_studies
    assert naive < 0.5 * num_studies  # as if pairs were independent


@pytest.mark.parametrize(
    ("hit", "total", "in_pair"),
    [
        ([0, 0, 0], [10, 10, 10], 2),  # no match
        ([10, 10, 10], [10, 10, 10], 2),  # nothing but matches
        ([3, 3], [10, 10], 2),  # two classes: without one there is no pair
        ([3, 3, 0], [10, 10, 0], 2),
        ([2], [10], 1),
        ([2] * 6, [100] * 6, 1),  # all alike: they do not say how unlike others are
    ],
)
def test_where_there_is_no_interval(hit: list[int], total: list[int], in_pair: int) -> None:
    found = rate_over_classes(hit, total, classes_in_pair=in_pair)
    assert (found.low, found.high, found.new_low, found.new_high) == (None,) * 4
    assert str(found) == f"{sum(hit) // in_pair} of {sum(total) // in_pair} pairs"


def test_the_card_line() -> None:
    found = errors(counts([4, 2, 2, 0] * 25, [9900] * 100, [1, 0, 0, 0] * 25, [3] * 100), "1e-3")
    assert str(found).startswith(
        "tau 0.61, set for FMR 1e-3 on held-out development classes; on 100 unseen classes FMR 2e-4 ["
    )
    assert str(found).endswith("]")
    assert "FNMR 0.08 [0.0" in str(found)
    assert found.warnings == []
    assert found.on_new_classes.startswith("100 new classes of the kind will show a FMR from ")
    read = ThresholdDescription.model_validate(fields(found))
    assert read.words == str(found)
    assert read.fmr.rate == 100 / 495000


def test_warnings() -> None:
    none = errors(counts([0] * 3, [10] * 3, [1, 1, 1], [6] * 3, class_pairs=0), "1e-3")
    assert str(none.fmr) == "0 of 15 pairs"
    assert none.on_new_classes == ""
    assert [each[:25] for each in none.warnings] == ["no impostor of 15 was acc", "3 classes have genuine pa"]
    few = errors(counts([9, 8, 1, 0], [90] * 4, [1] * 4, [6] * 4, class_pairs=2), "1e-3").warnings
    assert few[0].startswith("one class is in 100% of the 9 accepted impostors")
    assert few[1].startswith("2 pairs of classes hold all 9 accepted impostors")
    # a class of one item has no genuine pair, and is none of those that FNMR is told of
    single = errors(counts([2] * 60, [90] * 60, [1] * 49 + [0] * 11, [6] * 49 + [0] * 11), "1e-3")
    assert single.fnmr.num_classes == 49
    assert [each[:10] for each in single.warnings] == ["49 classes"]


def test_nothing_ships_without_pairs() -> None:
    assert shipped(None) is None
    assert shipped(counts([0, 0], [1, 1], [0, 0], [0, 0])) is None
    own = counts([1, 1], [1, 1], [1, 0], [1, 1]).model_copy(update={"shipped": "1e-2"})
    assert shipped(own) is None
    with pytest.raises(ValueError, match="impostors and genuine pairs"):
        errors(counts([0], [0], [0], [3]), "1e-3")


def test_rates_as_people_read_them() -> None:
    assert [said(each) for each in (1e-3, 0.0013, 0.0999, 0.5, 0.00096, 0.0)] == [
        "1e-3",
        "1.3e-3",
        "0.10",
        "0.50",
        "9.6e-4",
        "0",
    ]
    assert str(Rate(13, 10_000, 9, 0.0007, 0.0026)) == "1.3e-3 [0.7e-3, 2.6e-3]"
    assert str(Rate(13, 10_000, 9, 0.00002, 0.04)) == "1.3e-3 [2e-5, 0.04]"
