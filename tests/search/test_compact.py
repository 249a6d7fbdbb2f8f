"""What the search keeps of many trials: the same as the plain lists and trials would be, and small."""

from __future__ import annotations

import math
import random
import sys

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from dmlstudy.search.compact import SortedRows, WaitingTrial


@pytest.mark.parametrize("width", [1, 2, 3])
def test_rows_are_those_of_a_sorted_list(width: int) -> None:
    draw, rows, expected = random.Random(width), SortedRows(width), list[tuple[float, ...]]()
    levels = [-math.inf, -1.0, 0.0, 0.5, 3.0, math.inf]
    for _ in range(400):
        row = tuple(draw.choices(levels, k=width))
        if draw.random() < 0.7:
            rows.add(row)
            expected = sorted([*expected, row])
        else:
            rows.discard(row)
            if row in expected:
                expected.remove(row)
        assert [rows[at] for at in range(len(rows))] == expected
        assert list(reversed(rows)) == expected[::-1]
        assert len(rows) == len(expected)
        assert (row in rows) == (row in expected)
        assert rows.num_below(row) == sum(other < row for other in expected)
        if expected:
            assert (rows[0], rows[-1]) == (expected[0], expected[-1])
    with pytest.raises(IndexError):
        rows[len(rows)]


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
        waiting = WaitingTrial(trial, "triplet", step=1)
        again = waiting.trial()
        assert again == trial
        assert again.distributions is trial.distributions
        assert waiting.family == "triplet"
        again.user_attrs["promotions"].append(12)
        again.intermediate_values[5] = 0.5
        assert waiting.trial() == trial, "what goes on is a copy"
        stopped = waiting.stopped()
        assert (stopped.state, stopped.values, stopped.intermediate_values) == (
            TrialState.PRUNED,
            [0.25],
            {1: 0.25},
        )
        assert sys.getsizeof(waiting) + sys.getsizeof(waiting._bytes) < 500
