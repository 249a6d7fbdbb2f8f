"""A study's leaderboard on MLflow's page: runs and view by hand, and what a browser shows of them."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.ui import ui_of

from dmlstudy.records import BatchConfig, DataConfig, EmbedderConfig, LossConfig, TrainingConfig, TrialConfig
from dmlstudy.registry import mlflow_view, tracking
from dmlstudy.registry.leaderboard import Leaderboard, leaderboard
from dmlstudy.registry.models import RegisteredVersion
from dmlstudy.registry.runs import StudyRuns, raw_runs
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.store import Store

VERSION = RegisteredVersion(
    name="m", version=1, aliases=[], study="s", family="modest", metrics={}, sha256="", run_id=""
)

SCORES = {
    "modest": (0.7, (0.41, 0.43, 0.45)),
    "lucky": (0.6, (0.82, 0.84, 0.88)),
    "untrained": (None, (0.1, 0.2, 0.3)),
}


@pytest.fixture(scope="module")
def published(store: Store) -> tuple[StudyTracker, Leaderboard]:
    """``modest`` wins by validation, ``lucky`` is the better one on the test classes; written twice, as on resuming."""
    tracker = StudyTracker(store, "<b>page</b>", {})
    for family, (validation, tests) in SCORES.items():
        for seed in range(len(tests)):
            config = TrialConfig(
                family=family,
                phase="verdict",
                seed=seed,
                data=DataConfig(name="digits"),
                embedder=EmbedderConfig(),
                batch=BatchConfig(),
                training=TrainingConfig(lr={"modest": 0.25, "lucky": 0.5}.get(family, 1.0)),
                loss=LossConfig(name="contrastive"),
            )
            run_id = tracker.start_trial("x", config, None)
            tracker.end_trial(run_id, "finished", [], {"test_map_at_r": tests[seed], "test_recall_at_1": 0.5})
        if validation is not None:
            found = config.model_copy(update={"phase": "search"})
            run_id = tracker.start_trial("x", found, 0)
            tracker.end_trial(run_id, "finished", [], {"map_at_r": validation})
    tracker.end_study("finished", {"objective": "map_at_r", "winner": "modest", "model": "m/1"})
    found_board = leaderboard(store, "<b>page</b>")
    for _ in range(2):
        mlflow_view.publish(
            tracker.client, tracker.experiment_id, tracker.parent_id, found_board, {"modest": VERSION}
        )
    return tracker, found_board


def rows(tracker: StudyTracker) -> dict[str, Any]:
    found = list(raw_runs(tracker.client, tracker.experiment_id, "tags.dmlstudy_kind = 'leaderboard'"))
    assert len({run.data.tags["family"] for run in found}) == len(found), "a row stands there twice"
    return {run.data.tags["family"]: run for run in found}


def test_each_row_is_a_run_with_its_interval(published: tuple[StudyTracker, Leaderboard]) -> None:
    tracker, read = published
    found = rows(tracker)
    assert found.keys() == SCORES.keys()
    for row in read.rows:
        metrics, estimate = found[row.family].data.metrics, row.test["test_map_at_r"]
        assert estimate.half_width is not None
        expected = {
            "test_map_at_r": estimate.mean,
            "test_map_at_r_low": estimate.mean - estimate.half_width,
            "test_map_at_r_high": estimate.mean + estimate.half_width,
        }
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=5e-5)
    tags = found["modest"].data.tags
    assert (tags["rank"], tags["comparison"], tags["model"]) == ("001", "winner", "m/1")
    assert tags[tracking.PARENT] == tracker.parent_id
    assert found["lucky"].data.tags["comparison"].startswith("better on these classes, p ")
    assert found["modest"].data.params["training.lr"] == "0.25"


def test_the_rows_change_nothing_that_is_read(
    store: Store, published: tuple[StudyTracker, Leaderboard]
) -> None:
    assert leaderboard(store, "<b>page</b>") == published[1]


def test_the_note_begins_with_the_numbers_and_the_link(published: tuple[StudyTracker, Leaderboard]) -> None:
    tracker = published[0]
    first, *rest = tracker.client.get_experiment(tracker.experiment_id).tags[mlflow_view.NOTE].splitlines()
    assert first == (
        f"[Leaderboard](#/experiments/{tracker.experiment_id}/runs?viewStateShareKey=leaderboard): **modest** wins by"
        " map_at_r, validation 0.7000, test 0.4300 ± 0.050; untrained 0.2000 ± 0.248."
    )
    assert any(line.startswith("| lucky | 0.6000 |") for line in rest)


def test_a_row_that_was_begun_gets_what_it_lacks_and_keeps_the_rest(store: Store) -> None:
    tracker = StudyTracker(store, "row-begun", {})
    begun = tracker.client.create_run(tracker.experiment_id, tags={"dmlstudy_kind": "leaderboard"})
    tracker.client.log_param(begun.info.run_id, "a", "1")
    for _ in range(2):
        run = StudyRuns(tracker.client, tracker.experiment_id).get(begun.info.run_id)
        params = {"a": "2", **{f"p{number}": "x" for number in range(150)}}
        mlflow_view.write(tracker.client, run, [("score", 0.123456)], params, {"status": "finished"})
    run = StudyRuns(tracker.client, tracker.experiment_id).get(begun.info.run_id)
    assert (run.params["a"], len(run.params), run.metrics["score"]) == ("1", 151, 0.1235)
    assert len(tracker.client.get_metric_history(run.id, "score")) == 1


def test_ui_says_where_the_leaderboards_are(
    store: Store, published: tuple[StudyTracker, Leaderboard]
) -> None:
    tracker = published[0]
    place = f"http://127.0.0.1:5000/#/experiments/{tracker.experiment_id}/runs?viewStateShareKey=leaderboard"
    assert mlflow_view.links(store, 5000)["<b>page</b>"] == place


def test_the_page_shows_the_leaderboard(
    store: Store, published: tuple[StudyTracker, Leaderboard], dom: Callable[..., str]
) -> None:
    with ui_of(store) as port:
        shown = html.unescape(
            re.sub(r"<[^>]*>", "|", dom(mlflow_view.links(store, port)["<b>page</b>"], width=2600))
        )
    places = [shown.find(f"|{name}|") for name in ("modest", "lucky", "untrained")]
    assert -1 not in places
    assert places == sorted(places), "the rows are not in the order of their validation scores"
    for value in ("0.7", "0.43", "0.8467", "winner", "m/1", "better on these classes, p"):
        assert f"|{value}" in shown, f"{value} is not on the page"
    for column in (
        "validation",
        "test_map_at_r",
        "test_map_at_r_low",
        "test_map_at_r_high",
        "comparison",
        "model",
    ):
        assert f"|{column}|" in shown, f"no column {column}"
