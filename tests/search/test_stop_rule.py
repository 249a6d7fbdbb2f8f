"""``search.stop_when``: searches that end early seldom miss anything, by simulation with known scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dmlstudy.search.stop_rule import FEWEST, EndingSearches
from dmlstudy.spec.study_file import SearchConfig

Scores = np.ndarray
"""Of some searches each trial's score; minus infinity of one that failed or was stopped."""

NUM_TRIALS, NUM_SEARCHES, LOOK_EVERY = 40, 60, 2
GAIN, PROBABILITY = 0.01, 0.2


def normal(rng: np.random.Generator, shape: tuple[int, int]) -> Scores:
    return 0.45 + 0.04 * rng.standard_normal(shape)


def narrow(rng: np.random.Generator, shape: tuple[int, int]) -> Scores:
    return 0.45 + 0.01 * rng.standard_normal(shape)


def exponential(rng: np.random.Generator, shape: tuple[int, int]) -> Scores:
    return np.minimum(0.3 + 0.03 * rng.exponential(size=shape), 1.0)


def heavy(rng: np.random.Generator, shape: tuple[int, int]) -> Scores:
    """A Pareto tail of index 0.3, up to 1."""
    return np.minimum(0.3 + 0.02 * (rng.random(shape) ** -0.3 - 1) / 0.3, 1.0)


def smooth_top(rng: np.random.Generator, shape: tuple[int, int]) -> Scores:
    """A parabola over two parameters, whose top is sharp in distribution."""
    return 0.5 - 0.4 * ((rng.random((*shape, 2)) - 0.5) ** 2).sum(axis=-1)


def mass_at_bottom(rng: np.random.Generator, shape: tuple[int, int]) -> Scores:
    """Half of the trials collapse, some of them fail."""
    found = np.where(rng.random(shape) < 0.5, 0.05, smooth_top(rng, shape))
    return np.where(rng.random(shape) < 0.2, -math.inf, found)


def stopped_early(rng: np.random.Generator, shape: tuple[int, int]) -> Scores:
    """Of each three trials about two are stopped, by a score that is not quite the last one."""
    last = normal(rng, shape)
    early = last + 0.02 * rng.standard_normal(shape)
    return np.where(early > 0.45 + 0.04 * 0.43, last, -math.inf)


def near_one(rng: np.random.Generator, shape: tuple[int, int]) -> Scores:
    return np.minimum(0.985 + 0.02 * rng.standard_normal(shape), 1.0)


def improving(rng: np.random.Generator, shape: tuple[int, int]) -> Scores:
    """A sampler that draws ever nearer to the top of a parabola over four parameters."""
    width = np.exp(-np.arange(shape[1]) / 40)
    return 0.5 - 0.4 * ((rng.random((*shape, 4)) - 0.5) ** 2).sum(axis=-1) * width


def drifting(rng: np.random.Generator, shape: tuple[int, int]) -> Scores:
    """Scores that rise steadily, by half a deviation in ten trials."""
    return 0.3 + 0.002 * np.arange(shape[1]) + 0.04 * rng.standard_normal(shape)


def ending(
    sampler: str, probability: float = PROBABILITY, gain: float = GAIN
) -> Callable[[Sequence[float], int], bool]:
    """Whether a search ends after these scores of so many trials."""
    config = SearchConfig.model_validate(
        {"sampler": sampler, "stop_when": {"gain": gain, "probability": probability}}
    )

    def ends(scores: Sequence[float], num_trials: int) -> bool:
        search: Any = SimpleNamespace(
            name="one",
            given=set(),
            outcomes=dict(enumerate(scores)),
            num_asked=len(scores),
            num_left=num_trials - len(scores),
            num_seen=len(scores),
        )
        return bool(list(EndingSearches(config, [search]).due()))

    return ends


def played(scores_RN: Scores, sampler: str) -> tuple[float, float]:
    """The share of searches that ended although the rest would have gained more, and the trials of one on average."""
    ends, num_wrong, num_run = ending(sampler), 0, 0
    num_trials = scores_RN.shape[1]
    for scores_N in scores_RN.tolist():
        looks = range(FEWEST, num_trials, LOOK_EVERY)
        last = next((n for n in looks if ends(scores_N[:n], num_trials)), num_trials)
        num_run += last
        num_wrong += last < num_trials and max(scores_N[last:]) > max(scores_N[:last]) + GAIN
    return num_wrong / len(scores_RN), num_run / len(scores_RN)


@pytest.mark.parametrize(
    ("draw", "sampler", "most_run"),
    [
        (normal, "random", 33),
        (narrow, "random", 22),
        (exponential, "random", 38),
        (heavy, "random", 40),
        (smooth_top, "random", 30),
        (mass_at_bottom, "qmc", 36),
        (stopped_early, "random", 40),
        (near_one, "random", 12),
        (narrow, "tpe", 30),
        (improving, "tpe", 38),
        (drifting, "tpe", 40),
    ],
)
def test_the_share_of_wrong_ends_is_bounded_and_trials_are_saved(
    draw: Callable[[np.random.Generator, tuple[int, int]], Scores], sampler: str, most_run: float
) -> None:
    wrong, num_run = played(draw(np.random.default_rng(7), (NUM_SEARCHES, NUM_TRIALS)), sampler)
    assert wrong <= 1.5 * PROBABILITY
    assert num_run <= most_run


def test_a_smaller_probability_and_a_smaller_gain_end_later() -> None:
    scores_N = normal(np.random.default_rng(3), (1, 200))[0].tolist()

    def first(**rule: float) -> int:
        ends = ending("random", **rule)
        return next((n for n in range(FEWEST, 200) if ends(scores_N[:n], 200)), 200)

    assert first(probability=0.5) < first(probability=0.2) < first(probability=0.05)
    assert first(gain=0.05) < first(gain=0.01) <= first(gain=0.002)


def test_sparse_samples_end_nothing() -> None:
    ends = ending("random", probability=0.99)
    assert not ends([], 40)
    assert not ends([0.5] * (FEWEST - 1), 40)
    assert not ends([-math.inf] * 39, 40), "no trial has finished"
    assert not ends([0.5, 0.4, 0.3, *[-math.inf] * 36], 40)
    assert not ends([0.5] * 39, 40), "equal scores have no tail"
    assert not ends([0.5 + i / 1000 for i in range(10)], 40), "each was better than the one before"


def test_nothing_is_better_than_a_perfect_score() -> None:
    assert ending("random", probability=1e-9)([1.0, *[-math.inf] * 9], 40)
    assert not ending("random", probability=1e-9)([1.2, *[-math.inf] * 9], 40), "a metric that is no share"
