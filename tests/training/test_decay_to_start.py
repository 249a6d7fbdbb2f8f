"""Decay towards the start's weights: the optimiser's own decay of what training has added to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import broken_trial, config, steady, trial
from torch import Tensor, nn

from dmlstudy import embedders
from dmlstudy.records import TrainingConfig, TrialConfig
from dmlstudy.training.optimization import DecayToStart, Optimization
from dmlstudy.training.recipe import check_chunk_and_share


@pytest.fixture
def started(tmp_path: Path) -> dict[str, Any]:
    """A trial whose backbone begins with weights from a file."""
    embedder = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=7)
    file = tmp_path / "start.pt"
    torch.save(embedder.backbone.state_dict(), file)
    return {"embedder": {"dim": 8, "width": 4, "weights": str(file)}}


def slope(weight: Tensor, step: int) -> Tensor:
    return torch.sin(3 * weight + step)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_it_is_the_optimiser_s_own_decay_of_the_difference(name: str) -> None:
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    start = torch.linspace(-1, 1, 5, dtype=torch.float64)
    moved, added = nn.Parameter(start.clone()), nn.Parameter(torch.zeros_like(start))
    with_hook = kinds[name]([moved], lr=0.05, weight_decay=0.0)
    with_hook.register_step_pre_hook(DecayToStart([moved], 0.3, is_decoupled=name == "adamw"))
    with_decay = kinds[name]([added], lr=0.05, weight_decay=0.3)
    for step in range(20):
        moved.grad = slope(moved.detach(), step)
        added.grad = slope(start + added.detach(), step)
        with_hook.step()
        with_decay.step()
    assert added.abs().max() > 0.05
    torch.testing.assert_close(moved, start + added, rtol=1e-12, atol=1e-12)


def test_what_came_from_a_file_has_no_other_decay() -> None:
    embedder = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=7)
    training = TrainingConfig(optimizer="adamw", weight_decay=0.1, l2_sp=0.5)
    optimizer = Optimization(training, embedder, nn.Module(), 5, torch.device("cpu")).optimizer
    decay = {weight: group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    assert {decay[weight] for weight in embedder.backbone.parameters()} == {0.0}
    assert {decay[weight] for weight in embedder.head.parameters()} == {0.1}


def test_a_trial_keeps_nearer_to_its_start_and_resumes(started: dict[str, Any], tmp_path: Path) -> None:
    raw = config(**started, num_folds=1, training__epochs=3, training__l2_sp=5.0, training__lr=0.01)
    _, result = trial(raw)
    _, again, attempts = broken_trial(raw, str(tmp_path), "epoch")
    assert attempts > 1
    assert steady(again) == steady(result)
    raw["training"]["l2_sp"] = 0.0
    assert steady(trial(raw)[1]) != steady(result)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"training\.l2_sp: 0\.1 draws weights to those they began as, and these are random; set"),
        (
            {"embedder": {"weights": "x.pt"}, "training__adapter": "lora"},
            "and adapters leave them as they are; set training.adapter: none",
        ),
    ],
)
def test_it_needs_weights_that_are_trained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_chunk_and_share(TrialConfig.model_validate(config(**changes, training__l2_sp=0.1)))


def test_earlier_studies_keep_their_fingerprints() -> None:
    assert "l2_sp" not in TrainingConfig().model_dump()
