"""Runs of folds: the scores of single folds come back out of the means that a trial reports."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from dmlstudy.records import BatchConfig, DataConfig, EmbedderConfig, LossConfig, TrainingConfig, TrialConfig
from dmlstudy.registry import tracking
from dmlstudy.registry.folds import fold_curves, publish_folds
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.registry.runs import raw_runs
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.store import Store

FOLDS, EPOCHS = 4, 3
SCORE_FE = np.random.default_rng(0).uniform(size=(FOLDS, EPOCHS))


def reported(score_FE: np.ndarray[Any, Any]) -> dict[int, float]:
    """As a trial reports: the mean of the ended folds' last scores and the present one's."""
    return {
        fold * EPOCHS + epoch + 1: statistics.fmean([*score_FE[:fold, -1], score_FE[fold, epoch]])
        for fold in range(FOLDS)
        for epoch in range(EPOCHS)
    }


def test_the_folds_come_back_out_of_the_means() -> None:
    curves = fold_curves(reported(SCORE_FE), FOLDS)
    assert [list(curve) for curve in curves] == [[1, 2, 3]] * FOLDS
    np.testing.assert_allclose([list(curve.values()) for curve in curves], SCORE_FE, atol=1e-14)


def test_what_is_missing_is_left_out() -> None:
    means = reported(SCORE_FE)
    del means[2]
    curves = fold_curves(means, FOLDS)
    assert [list(curve) for curve in curves] == [[1, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]]
    np.testing.assert_allclose([curve[3] for curve in curves], SCORE_FE[:, -1], atol=1e-14)
    del means[6]  # of the fold after it, only sums with it are known
    assert [list(curve) for curve in fold_curves(means, FOLDS)] == [[1, 3], [1, 2], [], [1, 2, 3]]
    assert fold_curves({}, 2) == [{}, {}]


def test_the_best_trial_of_each_family_has_a_run_for_each_fold(store: Store) -> None:
    tracker = StudyTracker(store, "folds", {}, trial_tags={"code_version": "abc", "test_sha256": "f00"})
    best = {}
    for number, (family, scale) in enumerate((("good", 1.0), ("good", 0.5), ("alone", 1.0))):
        config = TrialConfig(
            family=family,
            phase="search",
            seed=3,
            data=DataConfig(name="digits"),
            embedder=EmbedderConfig(),
            batch=BatchConfig(),
            training=TrainingConfig(lr=0.1),
            loss=LossConfig(name="contrastive"),
        )
        score_FE = scale * SCORE_FE
        run_id = tracker.start_trial(f"{family} #{number}", config, number)
        curve = [{"step": float(step), "map_at_r": mean} for step, mean in reported(score_FE).items()]
        last = {f"fold_{fold}_map_at_r": float(score) for fold, score in enumerate(score_FE[:, -1])}
        last = last if family == "good" else {"fold_0_map_at_r": 0.5}
        tracker.end_trial(run_id, "finished", curve, {"map_at_r": curve[-1]["map_at_r"], **last})
        best.setdefault(family, run_id)
    read = leaderboard(store, "folds")
    for _ in range(2):  # as after a kill
        publish_folds(
            tracker.client, tracker.experiment_id, ["good", "alone"], "map_at_r", tracker.trial_tags
        )
    runs = list(raw_runs(tracker.client, tracker.experiment_id, "tags.dmlstudy_kind = 'fold'"))
    assert {run.data.tags[tracking.PARENT] for run in runs} == {best["good"]}, (
        "of another trial than the best"
    )
    assert sorted(run.data.tags["fold"] for run in runs) == ["0", "1", "2", "3"]
    for run in runs:
        fold, tags = int(run.data.tags["fold"]), run.data.tags
        kept = ("study", "family", "seed", "trial_number", "status", "code_version", "test_sha256")
        assert [tags[name] for name in kept] == ["folds", "good", "3", "0", "finished", "abc", "f00"]
        assert (run.info.status, run.info.run_name) == ("FINISHED", f"good #0 fold {fold}")
        points = tracker.client.get_metric_history(run.info.run_id, "map_at_r")
        known = {point.step: point.value for point in points}
        assert len(points) == len(known), "an epoch was written twice"
        assert known == pytest.approx(dict(enumerate(SCORE_FE[fold], 1)), abs=1e-14)
    assert leaderboard(store, "folds") == read
