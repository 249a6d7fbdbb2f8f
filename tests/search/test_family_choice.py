"""The choice among families: its formula by integration, and searches that grouped TPE alone would lose."""

from __future__ import annotations

import math
import warnings
from collections import Counter

import optuna
import pytest
from scipy import stats
from support.tune_simulator import Tune, in_memory, study

from dmlstudy.records import TrialConfig
from dmlstudy.search.family_choice import ALIKE, AT_LEAST, chances, chosen, expected_improvement

NAMES = ("red", "blue", "green", "sharp")


@pytest.mark.parametrize("best", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("scores", [[0.4, 0.3, 0.3], [0.1, 0.2, 0.6, 0.4]])
def test_the_expected_improvement_is_the_integral(scores: list[float], best: float) -> None:
    n, mean = len(scores), sum(scores) / len(scores)
    scale = math.sqrt((1 + 1 / n) * sum((score - mean) ** 2 for score in scores) / (n - 1))
    expected = stats.t(n - 1, mean, scale).expect(lambda x: x - best, lb=best, limit=200)
    assert expected_improvement(scores, best) == pytest.approx(expected, rel=1e-5)


def test_without_any_spread_it_is_what_is_there() -> None:
    assert expected_improvement([0.5] * 3, 0.4) == pytest.approx(0.1)
    assert expected_improvement([0.5] * 3, 0.6) == 0.0
    assert math.isnan(expected_improvement([0.5] * 2, 0.4))


def test_a_wide_spread_is_worth_more_than_a_better_mean_that_never_changes() -> None:
    found = chances({"steady": [0.6, 0.601, 0.599, 0.6] * 3, "wide": [0.3, 0.55, 0.2, 0.5] * 3})
    assert found["wide"] > found["steady"]
    assert sum(found.values()) == pytest.approx(1)


def test_a_family_that_always_fails_is_seldom_tried_again() -> None:
    found = chances({"fails": [], "runs": [0.4, 0.5, 0.45]})
    assert found["fails"] == pytest.approx(ALIKE / 2)
    assert chances({"a": [], "b": []}) == {"a": 0.5, "b": 0.5}
    assert chances({"a": [0.5] * 3, "b": [0.5] * 3}) == {"a": 0.5, "b": 0.5}, "nothing is to be gained"


def test_each_family_has_some_trials_first() -> None:
    asked: Counter[str] = Counter()
    for number in range(3 * AT_LEAST):
        asked[chosen({"a": [0.9] * 9, "b": [0.1], "c": []}, asked, number)] += 1
    assert asked == dict.fromkeys("abc", AT_LEAST)


def quality(family: str, lr: float) -> float:
    """Three families that score 0.8 whatever the learning rate is, and one that scores 0.9 at one, and else 0.3."""
    place = math.log10(lr)
    if family == "sharp":
        return 0.3 + 0.6 * math.exp(-(((place + 5.3) / 0.4) ** 2) / 2)
    return 0.78 + 0.02 * math.sin(7 * place + NAMES.index(family))


def adaptive(seed: int) -> float:
    families = {name: {"space": "contrastive", "override": {"batch.classes": "all"}} for name in NAMES}
    search = {"trials_per_family": 10, "families": "adaptive", "scheduler": "none", "seed": seed}

    def score(config: TrialConfig, step: int) -> float:
        return quality(config.family, config.training.lr)

    best = Tune(in_memory(study(families=families, search=search)), score).run().search.best()
    assert best is not None
    return best[0]


def grouped(seed: int) -> float:
    """Optuna's grouped TPE over family and parameters, with as many trials at random first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=3)
    own = optuna.create_study(direction="maximize", sampler=sampler)

    def objective(trial: optuna.Trial) -> float:
        family = trial.suggest_categorical("family", NAMES)
        trial.suggest_float(f"{family}/margin", 0.3, 1.5)
        return quality(family, trial.suggest_float(f"{family}/lr", 1e-6, 1e-4, log=True))

    own.optimize(objective, n_trials=40)
    return float(own.best_value)


def test_a_family_that_needs_its_learning_rate_is_found_where_grouped_tpe_leaves_it() -> None:
    """Of 24 searches of 40 trials, those that find more than the families that need no search have."""
    found = [sum(search(seed) > 0.85 for seed in range(24)) for search in (adaptive, grouped)]
    assert found[0] >= 22
    assert found[1] <= 17
