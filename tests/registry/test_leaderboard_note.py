"""The leaderboard from what the study's run knows of its search: the same as from every run."""

from __future__ import annotations

from typing import Any

import mlflow
import pytest

from dmlstudy.records import BatchConfig, DataConfig, EmbedderConfig, LossConfig, TrainingConfig, TrialConfig
from dmlstudy.registry import connection, tracking
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.store import Store

TRIALS: list[tuple[str, Any, float]] = [
    ("red", "finished", 0.5),
    ("blue", "finished", 0.7),
    ("red", "pruned", 0.9),  # after an epoch: not a final score
    ("blue", "failed", 0.8),
    ("red", "finished", 0.6),
    ("blue", "finished", 0.65),
]
COUNTS = {
    "red": {"finished": 2, "pruned": 1, "failed": 0},
    "blue": {"finished": 2, "pruned": 0, "failed": 1},
}
BEST = {"red": 4, "blue": 1}


def config(family: str, phase: Any, seed: int, lr: float) -> TrialConfig:
    return TrialConfig(
        family=family,
        phase=phase,
        seed=seed,
        data=DataConfig(name="digits"),
        embedder=EmbedderConfig(),
        batch=BatchConfig(),
        training=TrainingConfig(lr=lr),
        loss=LossConfig(name="contrastive"),
    )


def test_a_noted_search_gives_the_same_leaderboard(store: Store) -> None:
    tracker = StudyTracker(store, "noted", {})
    for number, (family, status, score) in enumerate(TRIALS):
        run_id = tracker.start_trial("x", config(family, "search", 0, 0.1 * (number + 1)), number)
        tracker.end_trial(run_id, status, [], {"map_at_r": score, "map_at_r_stderr": score / 10})
    for family in ("untrained", "red", "blue"):
        for seed in (1, 2):
            run_id = tracker.start_trial("v", config(family, "verdict", seed, 0.1), None)
            tracker.end_trial(run_id, "finished", [], {"test_map_at_r": 0.1 * seed + len(family) / 100})
    by_runs = leaderboard(store, "noted")
    tracker.note_search(COUNTS, BEST)
    assert leaderboard(store, "noted") == by_runs
    assert by_runs.rows[0].family == "blue"

    again = StudyTracker(store, "noted", {})  # another session knows none of the runs
    again.note_search({}, {})
    again.note_search(COUNTS, BEST)
    again.end_study("finished", {"objective": "map_at_r", "winner": "blue"})
    at_end = leaderboard(store, "noted")
    assert at_end.rows == by_runs.rows
    assert at_end.winner == "blue"


def test_a_note_too_long_for_a_tag_leaves_no_older_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = StudyTracker(store, "long", {})
    monkeypatch.setattr(tracking, "NOTE_EVERY_S", 0.0)
    tracker.note_search({"red": {"finished": 0, "pruned": 0, "failed": 0}}, {})
    run_id = tracker.start_trial("x", config("red", "search", 0, 0.1), 0)
    tracker.end_trial(run_id, "finished", [], {"map_at_r": 0.5})
    counts = {f"family-{number}": {"finished": 0, "pruned": 0, "failed": 0} for number in range(100)}
    tracker.note_search(counts | {"red": {"finished": 1, "pruned": 0, "failed": 0}}, {"red": 0})
    (row,) = leaderboard(store, "long").rows
    assert (row.family, row.num_finished, row.validation) == ("red", 1, 0.5)


def test_a_study_of_an_older_store_is_found_without_the_experiments_tag(store: Store) -> None:
    tracker = StudyTracker(store, "older", {})
    client: mlflow.MlflowClient = connection.connect(store)
    assert tracking.runs_of(store, "older").study.id == tracker.parent_id
    client.delete_experiment_tag(tracker.experiment_id, tracking.STUDY_RUN)
    assert tracking.runs_of(store, "older").study.id == tracker.parent_id
