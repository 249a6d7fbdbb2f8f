"""What Tune is told of a study's search, and what the search is told of Tune."""

from __future__ import annotations

import pytest
from ray.tune.search import Searcher
from support.tune_simulator import in_memory, study

from dmlstudy.engine.tune_adapter import TuneSearch, metrics_of


def test_metrics_of_a_result() -> None:
    result = {"metrics/map_at_r": 0.5, "metrics/step": 3, "done": True, "time_total_s": 9.0}
    assert metrics_of(result) == {"map_at_r": 0.5, "step": 3.0}
    assert metrics_of({}) == {}


def test_a_trial_is_handed_on_as_plain_values_and_ends_as_tune_says() -> None:
    search = in_memory(study())
    adapter = TuneSearch(search)
    first = adapter.suggest("a")
    assert isinstance(first, dict)
    assert first == {"trial": search.assignments["a"].config.model_dump(mode="json"), "pause_after": None}
    assert isinstance(adapter.suggest("b"), dict)
    assert adapter.suggest("c") is None, "the next generation waits for this one"
    adapter.on_trial_complete("a", {"metrics/map_at_r": 0.5, "done": True})
    adapter.on_trial_complete("b", {"failure": "out of memory", "done": True})
    assert (search.assignments["a"].status, search.assignments["a"].metrics) == (
        "finished",
        {"map_at_r": 0.5},
    )
    assert (search.assignments["b"].status, search.assignments["b"].reason) == ("failed", "out of memory")


def test_tune_hears_that_the_search_is_over() -> None:
    found = study()
    search = in_memory(found, {(family, seed) for family in ("red", "blue", "untrained") for seed in (1, 2)})
    adapter = TuneSearch(search)
    number = 0
    while (answer := adapter.suggest(f"t{number}")) != Searcher.FINISHED:
        if answer is not None:
            adapter.on_trial_complete(f"t{number}", {"metrics/map_at_r": 0.5, "done": True})
            search.commit(f"t{number}")
        number += 1
        assert number < 100
    assert search.is_over or search.num_left


def test_its_state_is_in_the_storage_and_not_in_a_file_of_tunes() -> None:
    with pytest.raises(NotImplementedError, match="rebuilt from its Optuna storage"):
        TuneSearch(in_memory(study())).restore("x")
