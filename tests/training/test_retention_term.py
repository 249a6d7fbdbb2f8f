"""Retention: outputs are drawn to the start's, in steps at once and in chunks, whatever is frozen or kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import broken_trial, config, steady, trial
from support.worked_example import example
from torch import Tensor
from torch.nn import functional

from dmlstudy import data, distributed, embedders
from dmlstudy.losses.interface import Embeddings
from dmlstudy.losses.retention import Retention
from dmlstudy.records import TrialConfig
from dmlstudy.training import assembly
from dmlstudy.training.embedder_trainer import EmbedderTrainer, HeldOut
from dmlstudy.training.step import squared_distance

OF_FEATURES = {"regularizer": {"name": "retention", "params": {"weight": 10.0}}}
OF_EMBEDDING = {"regularizer": {"name": "retention", "params": {"weight": 10.0, "of": "embedding"}}}


@pytest.fixture
def started(tmp_path: Path) -> dict[str, Any]:
    """A trial that begins with a saved embedder, its head among it."""
    saved = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=7)
    embedders.save(saved, tmp_path / "start", {}, np.zeros((2, 8, 8, 1), np.uint8))
    return {"embedder": {"dim": 8, "width": 4, "weights": str(tmp_path / "start")}}


def learner(**changes: Any) -> EmbedderTrainer:
    dataset = data.load("digits")
    given = TrialConfig.model_validate(config(**changes))
    held_out = HeldOut(dataset.test)
    return EmbedderTrainer(given, dataset.development, torch.device("cpu"), stream=0, held_out=held_out)


def outputs(embedder: embedders.Embedder, of: str) -> Tensor:
    images = torch.from_numpy(data.load("digits").test.read(np.arange(50)))
    with torch.no_grad():
        features_NF = embedder.features(images)
        return features_NF if of == "features" else embedder.embed_features(features_NF)[0]


def test_a_worked_example() -> None:
    start_ND = [(0.96, 0.28, 0), (0.6, 0.8, 0), (0, 0.6, 0.8), (0, 0.8, 0.6), (0, 1, 0), (-1, 0, 0)]
    batch = example()
    drift_N = squared_distance(batch.z_ND, torch.tensor(start_ND, dtype=torch.float64))
    total, count = Retention()(batch._replace(drift_N=drift_N))
    assert (total / count).item() == pytest.approx(0.3066666667, abs=5e-11)


def test_a_batch_without_distances_is_refused() -> None:
    with pytest.raises(ValueError, match="retention needs each embedding's distance from the start's"):
        Retention()(example())


@pytest.mark.parametrize("of", ["features", "embedding"])
def test_the_step_finds_the_distances_from_the_start(of: str, started: dict[str, Any]) -> None:
    given = OF_FEATURES if of == "features" else OF_EMBEDDING
    one = learner(**started, **given, training__lr=0.01)
    start = outputs(one.embedder, of)
    one.train_epoch(0)
    images = torch.from_numpy(data.load("digits").test.read(np.arange(50)))
    seen: list[Embeddings] = []
    loss = one.module.loss

    def look(anchors: Embeddings, *rest: Any) -> Any:
        seen.append(anchors)
        return type(loss).forward(loss, anchors, *rest)

    loss.forward = look
    with torch.no_grad():
        one.module(images, distributed.asked(torch.arange(50) % 3, torch.arange(50)))
    now = outputs(one.embedder, of)
    wanted = (functional.normalize(now, dim=1) - functional.normalize(start, dim=1)).square().sum(1)
    assert wanted.max() > 1e-3
    assert seen[0].drift_N is not None
    torch.testing.assert_close(seen[0].drift_N, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(seen[0].z_ND, outputs(one.embedder, "embedding"), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("of", ["features", "embedding"])
def test_outputs_stay_nearer_to_the_start(of: str, started: dict[str, Any]) -> None:
    def moved(**changes: Any) -> float:
        one = learner(**started, **changes, training__lr=0.01)
        start = outputs(one.embedder, of)
        for epoch in range(2):
            one.train_epoch(epoch)
        return float(squared_distance(outputs(one.embedder, of), start).mean())

    assert moved(**(OF_FEATURES if of == "features" else OF_EMBEDDING)) < 0.5 * moved()


def test_chunks_and_resuming_change_no_digit(started: dict[str, Any], tmp_path: Path) -> None:
    raw = config(**started, **OF_FEATURES, num_folds=1)
    _, result = trial(raw)
    _, again, attempts = broken_trial(raw, str(tmp_path / "kept"), "epoch")
    assert attempts > 1
    assert steady(again) == steady(result)
    at_once, in_chunks = (
        learner(**started, **OF_EMBEDDING),
        learner(**started, **OF_EMBEDDING, batch__chunk=7),
    )
    for each in (at_once, in_chunks):
        each.train_epoch(0)
    for a, b in zip(at_once.embedder.parameters(), in_chunks.embedder.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_frozen_backbone_s_head_is_drawn_to_the_start_s(started: dict[str, Any]) -> None:
    one = learner(**started, **OF_EMBEDDING, training__unfreeze_last=0, training__feature_cache="off")
    start = outputs(one.embedder, "embedding")
    one.train_epoch(0)
    assert squared_distance(outputs(one.embedder, "embedding"), start).max() > 0


def test_what_cannot_be_retained_is_told(tmp_path: Path, started: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"regularizer\.of: features of a frozen backbone"):
        learner(**started, **OF_FEATURES, training__unfreeze_last=0)
    with pytest.raises(ValueError, match=r"regularizer\.of: embedding .* whose head is random; start from"):
        learner(**OF_EMBEDDING)
    given = TrialConfig.model_validate(config(**started, **OF_FEATURES))
    assert assembly.make_loss(given, [5] * 5, 0, torch.device("cpu")).retains == "features"
