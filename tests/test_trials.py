"""How a trial stands, in the words of whoever is asked, and which of two trials is the better."""

from __future__ import annotations

import json

import pytest
from mlflow.entities import RunStatus
from optuna.trial import TrialState

from dmlstudy.trials import ENDED, MLFLOW_STATUSES, OPTUNA_STATES, Status, best_ranked, rank


def test_what_is_stored_is_what_earlier_studies_have_stored() -> None:
    expected = ["waiting", "running", "paused", "finished", "pruned", "failed", "interrupted", "superseded"]
    assert list(Status) == expected
    assert json.dumps(dict.fromkeys(ENDED, 0)) == '{"finished": 0, "pruned": 0, "failed": 0}'


@pytest.mark.parametrize("status", ENDED)
def test_optunas_states_come_back(status: Status) -> None:
    assert TrialState[status.in_optuna].is_finished()
    assert Status.of_optuna(status.in_optuna) is status
    assert status.has_ended


@pytest.mark.parametrize("state", [state for state in TrialState if not state.is_finished()])
def test_what_is_not_over_waits(state: TrialState) -> None:
    assert Status.of_optuna(state.name) is Status.WAITING


def test_the_engines_know_their_own_words() -> None:
    assert set(OPTUNA_STATES) == set(ENDED) == {status for status in Status if status.has_ended}
    assert {state.name for state in TrialState if state.is_finished()} == set(OPTUNA_STATES.values())
    assert {RunStatus.from_string(status.in_mlflow) for status in MLFLOW_STATUSES}
    assert [status.words for status in ENDED] == ["finished", "stopped early", "failed"]


def test_the_higher_objective_is_better_and_of_equals_the_first() -> None:
    trials = [(0.5, 0), (0.7, 3), (0.7, 1), (0.6, 2)]
    assert best_ranked(trials, lambda each: each) == (0.7, 1)
    assert best_ranked([], lambda each: each) is None
    assert sorted(trials, key=lambda each: rank(*each), reverse=True) == [
        (0.7, 1),
        (0.7, 3),
        (0.6, 2),
        (0.5, 0),
    ]
    assert rank(0.5, None) == rank(0.5, 0)
