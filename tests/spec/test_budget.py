"""Budgets in time: what is written in a study file, and what is counted."""

from __future__ import annotations

import pytest

from dmlstudy.spec.budget import TimeBudget, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30min", 1800),
        ("2h", 7200),
        ("1.5h", 5400),
        ("2d", 172800),
        ("1h 30min", 5400),
        ("5 min", 300),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "2 hours", "-1h", "1h and", "0s", "2h 0"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        seconds_of(text)


def test_it_counts_the_wall_and_the_devices() -> None:
    times = iter([100.0, 110.0, 130.0])
    budget = TimeBudget(35.0, 200.0, 4.0, clock=lambda: next(times))
    budget.pass_time(0)  # from now on
    assert (budget.wall, budget.device, budget.spent()) == (0, 0, None)
    budget.pass_time(1)
    assert (budget.wall, budget.device, budget.spent()) == (10, 40, None)
    budget.pass_time(2)
    assert (budget.wall, budget.device, budget.spent()) == (30, 200, "device_hours")
    budget.wall = 35.0  # of earlier sessions
    assert budget.spent() == "wall_time"


def test_without_limits_nothing_is_spent() -> None:
    budget = TimeBudget(None, None, 1.0)
    budget.wall = budget.device = 1e9
    assert budget.spent() is None
    assert not budget.is_limited
