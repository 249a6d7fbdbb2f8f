"""Trials that wait to be promoted: who goes on, who is given up, and that no death of the driver changes it."""

from __future__ import annotations

import math

import pytest
from optuna.storages import InMemoryStorage
from support.tune_simulator import HILL, Tune, in_memory, known, study

from dmlstudy.records import TrialConfig


def test_each_family_of_an_adaptive_search_has_one_that_finishes() -> None:
    families = dict.fromkeys("abcde", HILL)
    for seed in range(4):
        search = {"trials_per_family": 5, "scheduler": "asha", "families": "adaptive", "reduction_factor": 3}
        found = study(families=families, search={**search, "seed": seed})
        tune = Tune(in_memory(found)).run()
        assert tune.search.best_configs().keys() == families.keys()
        assert known(Tune(in_memory(found), at_once=3, seed=1).run().search) == known(tune.search)
        for num_steps in range(60, tune.num_steps, 13):
            storage = InMemoryStorage()
            Tune(in_memory(found, storage=storage), at_once=2).run(num_steps)
            assert known(Tune(in_memory(found, storage=storage)).run().search) == known(tune.search)


@pytest.mark.parametrize("generation_size", [2, 19])
def test_trials_wait_until_one_has_finished_whatever_the_promoted_ones_do(generation_size: int) -> None:
    """The best at the first rung fail later on."""

    def diverges(config: TrialConfig, step: int) -> float:
        if config.phase == "search" and step > 1 and config.training.lr > 3e-4:
            raise RuntimeError("loss is nan")
        return 0.1 * math.log10(config.training.lr) + 0.7 + 0.01 * step

    search = {"scheduler": "asha", "trials_per_family": 19, "generation_size": generation_size}
    for seed in range(5):
        found = study(families={"red": HILL}, search={**search, "seed": seed, "sampler": "random"})
        tune = Tune(in_memory(found), diverges).run()
        assert tune.search.best_configs().keys() == {"red"}


@pytest.mark.parametrize(("num_trials", "fold_test", "seed"), [(24, 0.1, 1), (30, 0.3, 0)])
def test_a_promoted_trial_is_judged_by_its_folds_from_its_rung_on(
    num_trials: int, fold_test: float, seed: int
) -> None:
    """So it does not matter when a driver is killed."""
    search = {"trials_per_family": num_trials, "scheduler": "asha", "reduction_factor": 2, "seed": seed}
    search |= {"sampler": "random", "fold_test": fold_test}
    found = study(families={"red": HILL}, search=search)
    expected = known(Tune(in_memory(found)).run().search)
    assert any("by its folds" in str(attrs.get("reason")) for *_, attrs in expected)
    for method, every in (("commit", 3), ("record", 4), ("observe", 7)):
        for calls in range(1, 120, every):
            storage = InMemoryStorage()
            Tune(in_memory(found, storage=storage), dies_before=(method, calls)).run()
            assert known(Tune(in_memory(found, storage=storage)).run().search) == expected, calls
