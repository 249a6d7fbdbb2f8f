"""A trial that waits, packed and unpacked."""

from __future__ import annotations

import math

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from dmlstudy.search.waiting import WaitingTrial, WaitingTrials


def test_a_trial_that_waits_comes_back_as_it_was() -> None:
    distributions = {
        "lr": FloatDistribution(1e-6, 1.0, log=True),
        "p": IntDistribution(1, 8),
        "kind": CategoricalDistribution(("a", None, 3, True)),
    }
    for state in (TrialState.RUNNING, TrialState.PRUNED):
        trial = create_trial(
            state=state,
            params={"lr": 0.1, "p": 3, "kind": None},
            distributions=distributions,
            user_attrs={"family": "triplet", "generation": 3, "promotions": [4, 9]},
            system_attrs={"cma:generation": 1},
            intermediate_values={1: 0.25, 3: math.inf},
        )
        trial.number, trial._trial_id = 70_000, 70_312
        if state == TrialState.PRUNED:
            trial.values = [0.25]
        packed = WaitingTrials()
        packed[4] = WaitingTrial(trial, step=1, number=69_990)
        packed[5] = WaitingTrial(trial, step=3, number=69_991)
        again = packed[4]
        assert (again.trial, again.step, again.number) == (trial, 1, 69_990)
        assert again.trial.distributions is trial.distributions
        again.trial.user_attrs["promotions"].append(12)
        again.trial.intermediate_values[5] = 0.5
        assert packed[4].trial == trial, "what goes on is a copy"
        stopped = packed[4].stopped()
        assert (stopped.number, stopped.state, stopped.values, stopped.intermediate_values) == (
            *(69_990, TrialState.PRUNED, [0.25]),
            {1: 0.25},
        )
        del packed[4]
        assert 4 not in packed
        assert packed[5].step == 3


def test_trials_of_different_spaces_keep_their_own() -> None:
    packed = WaitingTrials()
    trials = [
        create_trial(
            state=TrialState.RUNNING, params={name: 0.5}, distributions={name: FloatDistribution(0, 1)}
        )
        for name in ("margin", "lr", "margin", "tau")
    ]
    for turn, trial in enumerate(trials):
        packed[turn] = WaitingTrial(trial, step=1, number=turn)
    assert [packed[turn].trial for turn in range(4)] == trials
    assert packed[0].trial.distributions is packed[2].trial.distributions


def test_parameters_may_be_in_another_order() -> None:
    """A storage hands out a trial's parameters in another order than the one in which they were drawn."""
    distributions = {"family": CategoricalDistribution(("red", "blue")), "lr": FloatDistribution(0, 1)}
    params = {"family": "blue", "lr": 0.25}
    packed = WaitingTrials()
    for turn, order in enumerate((("family", "lr"), ("lr", "family"))):
        trial = create_trial(
            state=TrialState.RUNNING,
            params={name: params[name] for name in order},
            distributions={name: distributions[name] for name in order},
        )
        packed[turn] = WaitingTrial(trial, step=1, number=turn)
    assert [packed[turn].trial.params for turn in range(2)] == [params, params]


def test_ten_thousand_take_little_memory() -> None:
    distributions = {name: FloatDistribution(0, 1) for name in ("lr", "margin", "tau", "lambda")}
    packed = WaitingTrials()
    for turn in range(10_000):
        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict.fromkeys(distributions, turn / 10_000),
            distributions=dict(distributions),
            user_attrs={"family": "triplet", "generation": 3},
            intermediate_values={1: 0.3},
        )
        packed[turn] = WaitingTrial(trial, step=1, number=turn)
    assert len(packed._records._buffer) / 10_000 < 120
