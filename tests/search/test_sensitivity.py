"""Sensitivities against two-sample intervals of SciPy, and against responses whose sensitivities are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState, create_trial
from scipy import stats

from dmlstudy.search.history import _searched
from dmlstudy.search.sensitivity import FEWEST_FREE, Influence, Sensitivity, influences, sensitivities

optuna.logging.set_verbosity(optuna.logging.WARNING)

SPACE: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(1e-6, 1e-3, log=True),
    "margin": FloatDistribution(0.0, 1.0),
    "p": FloatDistribution(0.0, 1.0),
    "form": CategoricalDistribution(["a", None, True]),
}
TRUE = {"lr": 0.12, "margin": 0.05, "p": 0.0, "form": 0.04}
"""The range of the response below over each parameter."""


def response(params: Mapping[str, Any], together: float = 0.0) -> float:
    at = (math.log10(params["lr"]) + 4.5) / 1.5
    of_form = {"a": 0.0, None: 0.04, True: 0.01}[params["form"]]
    return 0.5 - 0.12 * at**2 + 0.05 * params["margin"] + of_form + together * at * (2 * params["margin"] - 1)


def trials_of(
    num: int,
    seed: int,
    score: Callable[[Mapping[str, Any]], float] = response,
    noise: float = 0.01,
    sampler: str = "random",
    space: Mapping[str, BaseDistribution] = SPACE,
) -> list[FrozenTrial]:
    kinds = {
        "random": optuna.samplers.RandomSampler(seed=seed),
        "tpe": optuna.samplers.TPESampler(seed=seed, n_startup_trials=6),
    }
    study = optuna.create_study(direction="maximize", sampler=kinds[sampler])
    rng = np.random.default_rng(seed)
    for _ in range(num):
        trial = study.ask(dict(space))
        study.tell(trial, score(trial.params) + noise * float(rng.standard_normal()))
    return study.trials


def made(
    params: Mapping[str, Any], score: float | None, space: Mapping[str, BaseDistribution], **more: Any
) -> FrozenTrial:
    own = {name: space[name] for name in params}
    return create_trial(params=dict(params), distributions=own, value=score, **more)


@pytest.mark.parametrize(
    ("sampler", "num", "num_studies", "together"),
    [("random", 19, 120, 0.0), ("random", 40, 40, 0.02), ("tpe", 25, 40, 0.0)],
)
def test_bands_hold_what_is_true(sampler: str, num: int, num_studies: int, together: float) -> None:
    """All bands of a study at once in 95%; a parameter without effect is seldom said to matter."""
    all_held, num_false, widths = 0, 0, []
    for seed in range(num_studies):
        trials = trials_of(num, seed, lambda params: response(params, together), sampler=sampler)
        found = sensitivities(trials, SPACE)
        lr = [math.log(trial.params["lr"]) for trial in trials]
        margin = [trial.params["margin"] for trial in trials]
        ends = [(each - math.log(10**-4.5)) / (1.5 * math.log(10)) for each in (min(lr), max(lr))]
        true = TRUE | {
            "lr": 0.12 * max(each**2 for each in ends),
            "margin": 0.05 * (max(margin) - min(margin)),
        }
        all_held += all(each.low - 1e-9 <= true[name] <= each.high for name, each in found.items())
        num_false += found["p"].low > 0
        widths.append(found["lr"].high - found["lr"].low)
        assert all(each.low <= each.change <= each.high for each in found.values())
    assert all_held >= 0.92 * num_studies
    assert num_false <= 0.05 * num_studies
    assert np.median(widths) < 0.1


def test_of_two_choices_the_band_is_the_two_sample_t_interval() -> None:
    rng = np.random.default_rng(3)
    space = {"form": CategoricalDistribution(["a", "b"])}
    one, other = rng.normal(0.5, 0.02, 9), rng.normal(0.6, 0.02, 12)
    trials = [made({"form": "a"}, score, space) for score in one]
    trials += [made({"form": "b"}, score, space) for score in other]
    expected = stats.ttest_ind(other, one).confidence_interval(0.95)
    found = sensitivities(trials, space)["form"]
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.change == pytest.approx(other.mean() - one.mean(), abs=1e-3)


def test_a_band_begins_above_zero_exactly_where_an_f_test_finds_something() -> None:
    answers = []
    for seed in range(40):
        trials = trials_of(16, seed, lambda params: 0.3 * params["margin"] ** 2, noise=0.1)
        own = [trial for trial in trials if trial.params]
        y = np.array([trial.values[0] for trial in own])
        u = np.array([trial.params["margin"] for trial in own])
        fitted = np.polyval(np.polyfit(u, y, 2), u)
        free = len(y) - 3
        f = (((fitted - y.mean()) ** 2).sum() / 2) / (((y - fitted) ** 2).sum() / free)
        found = sensitivities(own, {"margin": SPACE["margin"]})["margin"]
        # Values of one parabola that are compared reach almost every direction, never one more.
        assert found.low == 0 or stats.f.sf(f, 2, free) < 0.05
        answers.append((found.low > 0) == bool(stats.f.sf(f, 2, free) < 0.05))
    assert np.mean(answers) > 0.9


def test_too_few_trials_are_said_to_be_too_few() -> None:
    assert sensitivities([], SPACE) == {}
    assert sensitivities(trials_of(1, 0), SPACE) == {}
    equal = trials_of(20, 0, lambda params: 0.5, noise=0.0)
    assert sensitivities(equal, SPACE) == {}
    few = sensitivities(trials_of(9, 0), SPACE)
    assert {each.untold for name, each in few.items() if name != "form"} == {"9 of 12 trials needed"}
    assert {each.num_lacking for name, each in few.items() if name != "form"} == {3}
    assert set(influences(few).values()) == {Influence.TOO_FEW}
    enough = sensitivities(trials_of(7 + FEWEST_FREE, 0), SPACE)
    assert not any(each.untold for each in enough.values())


def test_a_parameter_that_was_not_moved_or_moved_with_another_is_not_told() -> None:
    space = {name: FloatDistribution(0, 1) for name in ("one", "same", "still")}
    rng = np.random.default_rng(0)
    draws = rng.random(20)
    trials = [made({"one": x, "same": x, "still": 0.5}, x + rng.normal(0, 0.1), space) for x in draws]
    found = sensitivities(trials, {**space, "never": FloatDistribution(0, 1)})
    assert found["still"].untold == "one value was tried"
    assert found["never"].untold == "no trial has it"
    assert found["one"].untold == found["same"].untold == "it was moved together with others"


def test_a_parameter_under_a_choice_counts_where_it_is() -> None:
    """``power`` is of the form ``a`` alone and moves the score by 0.2; the choice itself by 0.05 at its middle."""
    space = {
        "form": CategoricalDistribution(["a", "b"]),
        "power": IntDistribution(1, 3),
        "p": FloatDistribution(0, 1),
    }
    rng = np.random.default_rng(1)
    trials = []
    for _ in range(40):
        own: dict[str, Any] = {"form": ["a", "b"][rng.integers(2)], "p": float(rng.random())}
        score = 0.4 + rng.normal(0, 0.01)
        if own["form"] == "a":
            own["power"] = int(rng.integers(1, 4))
            score += 0.05 + 0.1 * (own["power"] - 2)
        trials.append(made(own, score, space))
    found = sensitivities(trials, space)
    assert found["power"].low < 0.2 < found["power"].high
    assert found["form"].low < 0.05 < found["form"].high
    assert found["power"].low > 0.17
    assert influences(found) == {
        "form": Influence.MATTERS,
        "power": Influence.MATTERS,
        "p": Influence.DOES_NOT,
    }


def test_trials_stopped_early_count_and_failed_ones_do_not() -> None:
    """Those that were stopped are the bad ones: without them the range of what was tried would be seen in part."""
    finished = trials_of(30, 5)
    cut = sorted(trial.values[0] for trial in finished)[15]
    mixed = []
    for trial in finished:
        score = trial.values[0]
        named = {f"f/{name}": value for name, value in trial.params.items()}
        space = {f"f/{name}": each for name, each in SPACE.items()}
        if score < cut:
            mixed.append(
                made(named, None, space, state=TrialState.PRUNED, intermediate_values={1: score - 0.1})
            )
        else:
            mixed.append(made(named, score, space, intermediate_values={1: score - 0.1, 2: score}))
    found = _searched("f", [*mixed, made({}, None, {}, state=TrialState.FAIL)])
    whole = sensitivities(finished, SPACE)
    own = {each.name: each.sensitivity for each in found.parameters}
    assert own.keys() == whole.keys()
    for name, each in own.items():
        assert each is not None
        assert (each.low, each.high) == pytest.approx((whole[name].low, whole[name].high))


def test_scores_that_are_no_numbers_are_left_out() -> None:
    trials = trials_of(30, 5)
    broken = [made(trials[0].params, math.inf, SPACE), made(trials[1].params, -math.inf, SPACE)]
    assert sensitivities([*trials, *broken], SPACE) == sensitivities(trials, SPACE)


def test_an_answer_is_given_beside_the_strongest() -> None:
    known = {
        "strong": Sensitivity(change=0.12, low=0.08, high=0.17),
        "weak": Sensitivity(change=0.01, low=0.0, high=0.039),
        "wide": Sensitivity(change=0.01, low=0.0, high=0.041),
        "few": Sensitivity(untold="3 of 9 trials"),
    }
    assert influences(known) == {
        "strong": Influence.MATTERS,
        "weak": Influence.DOES_NOT,
        "wide": Influence.OPEN,
        "few": Influence.TOO_FEW,
    }
    assert influences({"weak": known["weak"]}) == {"weak": Influence.OPEN}
    assert influences({}) == {}
