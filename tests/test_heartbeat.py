"""Signs of life: heard where work is done, seldom enough, and never of a call that waits."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dmlstudy import heartbeat, retrieval
from dmlstudy.records import TrialConfig
from dmlstudy.training.trial import run_trial


def test_nobody_hears_a_beat_outside_the_block_and_a_listener_hears_few_inside() -> None:
    heard: list[float] = []
    heartbeat.beat()
    with heartbeat.heard_by(lambda: heard.append(time.monotonic()), every_s=0.05):
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            heartbeat.beat()
    heartbeat.beat()
    assert 1 <= len(heard) <= 6


def test_training_and_scoring_beat_more_often_than_they_report() -> None:
    """A hang between two reports is told from a long epoch by the batches and tiles in between."""
    config = TrialConfig.model_validate(
        {
            "family": "f",
            "data": {"name": "digits"},
            "embedder": {"dim": 8, "width": 4},
            "batch": {"classes": "all", "images_per_class": 4, "per_epoch": 10},
            "training": {"epochs": 1},
            "loss": {"name": "contrastive"},
            "num_folds": 2,
        }
    )
    heard: list[int] = []
    with heartbeat.heard_by(lambda: heard.append(1), every_s=0):
        run_trial(config, lambda report: None)
    assert len(heard) >= 2 * (10 + 1), "10 batches and an embedding of each fold"


def test_a_long_ranking_beats() -> None:
    z_ND = np.random.default_rng(0).normal(size=(3000, 4)).astype(np.float32)
    heard: list[int] = []
    with heartbeat.heard_by(lambda: heard.append(1), every_s=0):
        for _ in retrieval.in_itself(z_ND, 5):
            pass
    assert len(heard) > 1


def test_a_library_that_computes_is_alive_and_one_that_waits_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LOOK_S", 0.1)
    heard: list[int] = []
    with heartbeat.heard_by(lambda: heard.append(1), every_s=0):
        with heartbeat.beating_while_it_computes():
            time.sleep(0.5)
        assert heard == []
        with heartbeat.beating_while_it_computes():
            until = time.thread_time() + 0.5
            while time.thread_time() < until:
                sum(range(1000))
        assert heard
    heard.clear()
    with heartbeat.beating_while_it_computes():  # nobody listens
        pass
    assert heard == []
