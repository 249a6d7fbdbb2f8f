"""Trials that train adapters: what moves, what is kept, how they go on, and what they cannot stand beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, moved, saving_trial, steady, trial
from torch import Tensor

from dmlstudy import data, embedders
from dmlstudy.embedders.adapters import depths, merged
from dmlstudy.records import TrialConfig
from dmlstudy.spec import study_file
from dmlstudy.studies import checks
from dmlstudy.training.embedder_trainer import EmbedderTrainer, HeldOut
from dmlstudy.training.feature_cache import is_frozen_throughout, note
from dmlstudy.training.tasks import embedding_checks

LORA: dict[str, Any] = {"training__adapter": "lora", "training__lora_rank": 2, "num_folds": 1}


def learner(**changes: Any) -> EmbedderTrainer:
    dataset = data.load("digits")
    given = TrialConfig.model_validate(config(**changes))
    test = HeldOut(dataset.test)
    return EmbedderTrainer(given, dataset.development, torch.device("cpu"), stream=0, held_out=test)


def state(of: EmbedderTrainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in of.state().items()}


def close(one: dict[str, Tensor], other: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=rtol, atol=atol, msg=name)


def test_a_trial_begins_as_without() -> None:
    adapted, plain = learner(**LORA), learner()
    assert torch.equal(adapted.outputs()["embeddings"], plain.outputs()["embeddings"])
    assert adapted.score() == plain.score()


def test_adapters_the_head_and_the_loss_are_trained_alone() -> None:
    one = learner(**LORA, loss={"name": "proxy_anchor"}, training__weight_decay=0.1)
    before = state(one)
    one.train_epoch(0)
    changed = {name for name, value in before.items() if not torch.equal(one.state()[name], value)}
    of_adapters = {f"embedder.backbone.{name}" for name in depths(one.embedder.backbone)}
    assert changed == of_adapters | {"embedder.head.weight", "embedder.head.bias", "loss.proxies_CD"}
    known = {name for name in one.state() if name.startswith("optimizer") and name.endswith("exp_avg")}
    assert len(known) == len(changed)
    assert [group["weight_decay"] for group in one.optimizer.param_groups] == [0.0, 0.1, 0.0]


def test_rates_are_those_of_the_blocks() -> None:
    one = learner(**LORA, training__layer_decay=0.5, training__head_lr_mult=3)
    assert [group["lr"] for group in one.optimizer.param_groups] == pytest.approx(
        [1e-2 / 8, 1e-2 / 4, 1e-2 / 2, 3e-2]
    )
    named = dict(one.embedder.backbone.named_parameters())
    for name, depth in depths(one.embedder.backbone).items():
        group = one.optimizer.param_groups[3 - depth]
        assert any(each is named[name] for each in group["params"]), name


def test_what_is_scored_and_kept_is_merged(tmp_path: Path) -> None:
    one = learner(**LORA)
    one.train_epoch(0)
    pictures = data.load("digits").test.read(np.arange(20))
    one.save(tmp_path / "model", {})
    saved = embedders.load(tmp_path / "model")
    assert set(saved.state_dict()) == set(learner().embedder.state_dict())
    expected = embedders.embed(saved, pictures)
    assert np.array_equal(one.outputs()["embeddings"][:20].numpy(), expected)
    assert abs(embedders.embed(one.embedder, pictures) - expected).max() <= 1e-6
    assert abs(embedders.embed(learner().embedder, pictures) - expected).max() > 1e-2


def test_a_kept_model_can_be_the_next_start(tmp_path: Path) -> None:
    first = saving_trial(config(**LORA) | {"phase": "verdict"}, str(tmp_path / "model"))
    start = {"embedder": {"dim": 8, "width": 4, "weights": str(tmp_path / "model")}}
    again = learner(**LORA, **start)
    assert again.score()["map_at_r"] == first["test_map_at_r"]
    again.train_epoch(0)
    assert again.score()["map_at_r"] != first["test_map_at_r"]


def test_before_training_there_is_no_adapter() -> None:
    """The row of the untrained embedder is the start, tensor for tensor."""
    adapted, plain = learner(**LORA, training__epochs=0), learner(training__epochs=0)
    assert adapted.kept() is adapted.embedder
    close(state(adapted), state(plain), rtol=0, atol=0)


def test_the_gradient_of_adapters_and_head_is_clipped_as_one() -> None:
    one = learner(**LORA, training__optimizer="sgd", training__clip_norm=1e-3, batch__per_epoch=1)
    before = state(one)
    one.train_epoch(0)
    moves = [
        (one.state()[name] - value).flatten() for name, value in before.items() if name[:8] == "embedder"
    ]
    assert torch.cat(moves).norm().item() == pytest.approx(1e-2 * 1e-3, rel=1e-2)


def test_a_frozen_epoch_trains_the_head_first() -> None:
    one = learner(**LORA, training__freeze_backbone_epochs=1)
    before = state(one)
    for epoch in (0, 1):
        one.train_epoch(epoch)
        changed = {name for name, value in before.items() if not torch.equal(one.state()[name], value)}
        assert any("backbone" in name for name in changed) == (epoch == 1)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"training__ema_decay": 0.9, "training__layer_decay": 0.5},
        {"training__precision": "fp16", "training__clip_norm": 1, "batch__chunk": 7},
    ],
)
def test_a_trial_that_was_broken_off_ends_with_the_same_digits(more: dict[str, Any], tmp_path: Path) -> None:
    raw = config(**LORA, **more)
    _, result = trial(raw)
    _, again, attempts = broken_trial(raw, str(tmp_path), "epoch")
    assert attempts > 1
    assert steady(again) == steady(result)


def test_two_ranks_train_as_one_does(pool: GlooPool) -> None:
    raw = config(**LORA, training__optimizer="sgd")
    (alone,) = pool.run(1, moved, raw)
    for found in pool.run(2, moved, raw):
        assert found.keys() == alone.keys()
        for name, change in found.items():
            np.testing.assert_allclose(change, alone[name], rtol=1e-3, atol=1e-6, err_msg=name)
    assert all(alone[name].any() for name in alone if "up_OR" in name)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch__chunk": 7},
        {"training__checkpointing": True},
        {"training__channels_last": True},
        pytest.param({"training__compile": True}, marks=pytest.mark.long),
    ],
)
def test_faster_or_smaller_steps_are_the_same(changes: dict[str, Any]) -> None:
    options = LORA | {"training__optimizer": "sgd", "training__epochs": 1}
    one, other = learner(**options), learner(**options, **changes)
    for each in (one, other):
        each.train_epoch(0)
    close(state(other), state(one))
    assert other.score()["map_at_r"] == pytest.approx(one.score()["map_at_r"], abs=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains_adapters_too(precision: str) -> None:
    one, exact = learner(**LORA, training__precision=precision), learner(**LORA)
    before = state(one)
    for each in (one, exact):
        each.train_epoch(0)
    for name in depths(one.embedder.backbone):
        own = f"embedder.backbone.{name}"
        assert not torch.equal(one.state()[own], before[own])
        assert one.state()[own].dtype is torch.float32
    assert one.score()["map_at_r"] == pytest.approx(exact.score()["map_at_r"], abs=0.05)


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_the_mean_with_the_start_is_of_merged_weights(ema_decay: float, tmp_path: Path) -> None:
    embedder = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=7)
    torch.save(embedder.backbone.state_dict(), tmp_path / "start.pt")
    start = {"embedder": {"dim": 8, "width": 4, "weights": str(tmp_path / "start.pt")}}
    one = learner(**LORA, **start, training__wise_ft=0.25, training__ema_decay=ema_decay)
    first = dict(merged(one.embedder).named_parameters())
    one.train_epoch(0)
    trained = one.embedder if one.average is None else one.average.embedder
    last = dict(merged(trained).named_parameters())
    kept = dict(one.kept().named_parameters())
    assert kept.keys() == first.keys()
    for name, weight in kept.items():
        share = 1 if name.startswith("head") else 0.25
        torch.testing.assert_close(weight, torch.lerp(first[name], last[name], share), rtol=1e-6, atol=1e-8)
    assert not torch.equal(last["backbone.0.0.weight"], first["backbone.0.0.weight"])


def test_an_average_is_of_the_adapters() -> None:
    one = learner(**LORA, training__ema_decay=0.5, batch__per_epoch=1)
    assert one.average is not None
    average = dict(one.average.embedder.named_parameters())
    names = [f"backbone.{name}" for name in depths(one.embedder.backbone)]
    expected = {name: average[name].detach().clone() for name in names}
    for step in (1, 2):
        one.train_epoch(step - 1)
        own, decay = dict(one.embedder.named_parameters()), min(0.5, (1 + step) / (10 + step))
        for name in names:
            expected[name] = decay * expected[name] + (1 - decay) * own[name].detach()
            torch.testing.assert_close(average[name], expected[name], rtol=1e-5, atol=1e-8)


def test_features_of_an_adapted_backbone_are_not_kept() -> None:
    given = TrialConfig.model_validate(config(**LORA, training__feature_cache="auto"))
    assert not is_frozen_throughout(given.training)
    assert note(given) is None
    assert learner(**LORA, training__feature_cache="auto").features is None


def study(**training: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "data": {"name": "digits"},
        "embedder": {"dim": 8, "width": 4},
        "batch": {"classes": "all", "images_per_class": 4},
        "training": {"epochs": 2, **training},
        "families": {"contrastive": {"space": "contrastive"}},
        "protocol": {"num_folds": 2},
        "resources": {"workers": 1},
    }


def test_every_key_can_be_searched() -> None:
    keys = {
        "lora_rank": {"int": [2, 64], "log": True, "default": 8},
        "lora_alpha": {"float": [1, 64], "log": True, "default": 16},
        "lora_blocks": {"choice": [1, 2, "all"], "default": "all"},
    }
    spec = study_file.given(study(adapter={"choice": {"none": {}, "lora": keys}, "default": "lora"}))
    checks.check_parts(spec)
    family = spec.families["contrastive"]
    configs = [spec.trial_config(family, values).training for values in spec.corners(family)]
    assert {each.adapter for each in configs} == {"none", "lora"}
    assert {each.lora_rank for each in configs} == {2, 8, 64}
    assert {each.lora_blocks for each in configs} == {1, "all"} | {2} & {each.lora_blocks for each in configs}
    assert {each.lora_alpha for each in configs if each.adapter == "lora"} >= {1, 16, 64}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"training__lora_rank": 4},
        r"training\.lora_rank: 4 is not used by training\.adapter: none; leave it out, or put it under",
    ),
    ({"training__lora_alpha": 4}, r"training\.lora_alpha: 4\.0 is not used by training\.adapter: none"),
    (
        {"training__lora_targets": "mlp"},
        r"training\.lora_targets: mlp is not used by training\.adapter: none",
    ),
    ({"training__lora_blocks": 1}, r"training\.lora_blocks: 1 is not used by training\.adapter: none"),
    (
        LORA | {"training__unfreeze_last": 1},
        r"training\.unfreeze_last: 1 stands beside training\.adapter: lora, .*; leave it out, and set training\.lora_b",
    ),
    (
        LORA | {"training__freeze_backbone_epochs": 2},
        r"training\.freeze_backbone_epochs: 2 of 2 epochs leave training\.adapter: lora untrained; set it lower",
    ),
    (
        LORA | {"embedder": {"width": 4, "freeze_bn": False}},
        r"training\.adapter: lora leaves the backbone's batch norm as it is, .*; set embedder\.freeze_bn: true",
    ),
    (
        LORA | {"training__lora_targets": "attention"},
        r"training\.lora_targets: attention matches no layer .* set it",
    ),
    (
        LORA | {"training__lora_blocks": 4},
        r"training\.lora_blocks: 4 blocks, but the backbone has 3; set it to at",
    ),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    given = TrialConfig.model_validate(config(**changes))
    with pytest.raises(ValueError, match=f"^families.x.{said}") as before:
        embedding_checks.check(given, "families.x")
    assert "\n" not in str(before.value)
    with pytest.raises(ValueError, match=f"^{said}"):
        learner(**changes)
