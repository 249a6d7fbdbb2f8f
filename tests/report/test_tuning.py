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


def family(num: int = 25, **changes: Any) -> Searched:
    scores = np.random.default_rng(1).random(num).tolist()
    trials = [
        Tried(number=number, status=Status.FINISHED, score=score, params={}, curve={}, reason="")
        for number, score in enumerate(scores)
    ]
    for at, status in changes.pop("ends", {}).items():
        score = None if status == Status.FAILED else 0.5
        trials[at] = trials[at].model_copy(update={"status": status, "score": score})
    return Searched(family="a<b>", trials=trials, parameters=[])


def shown(families: list[Searched], study_file: str | None = RANDOM) -> list[str | Plot]:
    return tuning.parts(families, {each.family: 0 for each in families}, "map_at_r", study_file)


def test_random_trials_have_a_band_without_the_default() -> None:
    own = family()
    points = tuning.curve(own)
    assert points == tuning_curve([trial.score for trial in own.trials[1:] if trial.score is not None])
    _, plot, table = shown([own])
    assert isinstance(plot, Plot)
    assert plot.label == f"a<b>: best of 24 {points[-1].median:.4f}, at least {points[-1].low:.4f}"
    high, low, median = plot.figure.data
    assert list(median.x) == list(range(1, 25))
    assert list(median.y) == [point.median for point in points]
    assert list(low.y) == [point.low for point in points]
    assert list(high.y) == [point.high for point in points if point.high < 1]
    assert median.name == "a&lt;b&gt;"
    assert f"{points[9].median:.4f} [{points[9].low:.4f}, " in table
    assert "best after 10" in table
    assert "best after 20" in table
    assert "best after 50" not in table


def test_a_failed_trial_counts_as_the_lowest_score() -> None:
    own = family(ends={3: Status.FAILED})
    rest = [trial.score for trial in own.trials[1:] if trial.score is not None]
    assert tuning.curve(own) == tuning_curve([*rest, 0.0])


@pytest.mark.parametrize(
    ("study_file", "why"),
    [
        ("name: s\n", "trials of search.sampler: tpe depend on one another"),
        ("search: {sampler: random}", "search.scheduler: halving stops trials"),
        (
            "search: {sampler: random, scheduler: none, families: adaptive}",
            "the sampler chose the families too",
        ),
        ("search: {sampler: random, scheduler: none, warm_start: auto}", "came from earlier studies"),
        ("search: {sampler: dice}", "cannot be read"),
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
    assert tuning.curve(family(ends={3: Status.PRUNED})) == []
    _, said, _ = shown([family(ends={3: Status.PRUNED})])
    assert isinstance(said, str)
    assert "it takes 5 random trials that ran to their end" in said


def test_of_few_trials_there_is_nothing_to_tell() -> None:
    assert shown([family(9)]) == []
    assert shown([]) == []
    assert tuning.curve(family(1)) == []
