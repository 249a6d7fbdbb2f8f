"""The best of k trials: a band where trials are independent draws, and the reason where they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dmlstudy.report import tuning
from dmlstudy.report.page import Plot
from dmlstudy.search.history import Searched, Tried
from dmlstudy.trials import Status
from dmlstudy.verdict.tuning_curves import tuning_curve

RANDOM = "name: s\nsearch: {sampler: random, scheduler: none}\n"


def family(num: int = 25, seed: int = 1, **changes: Any) -> Searched:
    scores = np.random.default_rng(seed).random(num).tolist()
    trials = [
        Tried(number=number, status=Status.FINISHED, score=score, params={}, curve={}, reason="")
        for number, score in enumerate(scores)
    ]
    for at, status in changes.pop("ends", {}).items():
        score = None if status == Status.FAILED else 0.5
        trials[at] = trials[at].model_copy(update={"status": status, "score": score})
    return Searched(family="a<b>", trials=trials, parameters=[])


def shown(
    families: list[Searched], study_file: str | None = RANDOM, again: list[dict[str, Searched]] | None = None
) -> list[str | Plot]:
    order = {each.family: 0 for each in families}
    return tuning.parts(families, order, "map_at_r", study_file, again or [])


def test_random_trials_have_a_band_without_the_default() -> None:
    own = family()
    points = tuning.curve([own])
    assert points == tuning_curve([trial.score for trial in own.trials[1:] if trial.score is not None])
    _, plot, table = shown([own])
    assert isinstance(plot, Plot)
    assert plot.label == f"a<b>: best of 24 {points[-1].best:.4f}, at least {points[-1].low:.4f}"
    high, low, median = plot.figure.data
    assert list(median.x) == list(range(1, 25))
    assert list(median.y) == [point.best for point in points]
    assert list(low.y) == [point.low for point in points]
    assert list(high.y) == [point.high for point in points if point.high < 1]
    assert median.name == "a&lt;b&gt;"
    assert f"{points[9].best:.4f} [{points[9].low:.4f}, " in table
    assert "best after 10" in table
    assert "best after 20" in table
    assert "best after 50" not in table


def test_a_failed_trial_counts_as_the_lowest_score() -> None:
    own = family(ends={3: Status.FAILED})
    rest = [trial.score for trial in own.trials[1:] if trial.score is not None]
    assert tuning.curve([own]) == tuning_curve([*rest, 0.0])


@pytest.mark.parametrize(
    ("study_file", "why"),
    [
        ("name: s\n", "trials of search.sampler: auto depend on one another"),
        ("search: {sampler: random}", "search.scheduler: its default stops trials"),
        (
            "search: {sampler: random, scheduler: none, families: adaptive}",
            "the sampler chose the families too",
        ),
        ("search: {sampler: random, scheduler: none, warm_start: auto}", "came from earlier studies"),
        ("search: {sampler: [dice]}", "cannot be read"),
        ("- 1", "cannot be read"),
        ("\x00", "cannot be read"),
        (None, "is not kept any more"),
    ],
)
def test_where_trials_depend_on_one_another_there_is_no_band(study_file: str | None, why: str) -> None:
    own = family()
    _, said, table = shown([own], study_file)
    assert isinstance(said, str)
    assert why in said
    best = max(trial.score for trial in own.trials[:10] if trial.score is not None)
    assert f"{best:.4f}" in table


def test_of_a_family_whose_trial_was_stopped_by_hand_no_band_is_told() -> None:
    assert tuning.curve([family(ends={3: Status.PRUNED})]) == []
    _, said, _ = shown([family(ends={3: Status.PRUNED})])
    assert isinstance(said, str)
    assert "it takes 5 random trials that ran to their end" in said


def test_of_few_trials_there_is_nothing_to_tell() -> None:
    assert shown([family(9)]) == []
    assert shown([]) == []
    assert tuning.curve([family(1)]) == []


def test_trials_of_random_searches_are_taken_together() -> None:
    own, other = family(12), family(15, seed=2)
    _, plot, _ = shown([own], again=[{own.family: other}])
    assert isinstance(plot, Plot)
    assert "trials of 2 searches are taken together" in plot.caption
    drawn = [trial.score for trial in (*own.trials[1:], *other.trials[1:]) if trial.score is not None]
    assert list(plot.figure.data[2].y) == [point.best for point in tuning_curve(drawn)]


def test_searches_by_a_sampler_that_learns_have_an_interval_over_searches() -> None:
    own, second, third = family(12), family(12, seed=2), family(11, seed=3)
    alone = family(12, seed=4).model_copy(update={"family": "alone"})
    _, plot, table = shown([own, alone], "name: s\n", [{own.family: second}, {own.family: third}])
    assert isinstance(plot, Plot)
    assert "at each k by itself" in plot.caption
    best = [max(trial.score or 0.0 for trial in each.trials[:10]) for each in (own, second, third)]
    mean, half = np.mean(best), 4.302653 * np.std(best, ddof=1) / 3**0.5
    high = f"{mean + half:.4f}" if mean + half < 1 else "1"
    assert f"{mean:.4f} [{mean - half:.4f}, {high}]" in table
    assert list(plot.figure.data[2].x) == list(range(1, 12)), "as far as all searches went"
    assert f"{max(trial.score or 0.0 for trial in alone.trials[:10]):.4f}" in table
    assert "Without a band: the best finished trial of this one search" in table
    _, said, _ = shown([own], "name: s\n", [{own.family: second}])
    assert isinstance(said, str), "two searches are too few"
    assert "depend on one another" in said
