"""Averages of weights: over steps, and of the end with the start; scored and kept in the place of the trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, saving_trial, steady, trial
from torch import Tensor

from dmlstudy import data, embedders, hashing
from dmlstudy.records import HashingConfig, LossConfig, TrainingConfig, TrialConfig
from dmlstudy.spec import study_file
from dmlstudy.training.embedder_trainer import EmbedderTrainer, HeldOut
from dmlstudy.training.tasks import embedding_checks

EMA = {"training__ema_decay": 0.9}


def learner(**changes: Any) -> EmbedderTrainer:
    dataset = data.load("digits")
    given = TrialConfig.model_validate(config(**changes))
    test = HeldOut(dataset.test)
    return EmbedderTrainer(given, dataset.development, torch.device("cpu"), stream=0, held_out=test)


def weights(of: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in of.named_parameters()}


@pytest.fixture
def started(tmp_path: Path) -> dict[str, Any]:
    """A trial whose backbone begins with weights from a file."""
    embedder = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=7)
    file = tmp_path / "start.pt"
    torch.save(embedder.backbone.state_dict(), file)
    return {"embedder": {"dim": 8, "width": 4, "weights": str(file)}}


@pytest.mark.parametrize("decay", [0.3, 0.9])
def test_the_average_is_that_of_a_plain_loop(decay: float) -> None:
    one = learner(training__ema_decay=decay, batch__per_epoch=1)
    expected = {name: weight.double() for name, weight in weights(one.embedder).items()}
    for step in range(1, 8):
        one.train_epoch(step - 1)
        kept = min(decay, (1 + step) / (10 + step))
        for name, weight in weights(one.embedder).items():
            expected[name] = kept * expected[name] + (1 - kept) * weight.double()
    for name, average in weights(one.kept()).items():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-7, msg=name)
        assert average.dtype == torch.float32
    assert not any(torch.equal(expected[n].float(), w) for n, w in weights(one.embedder).items())


def test_buffers_are_copied() -> None:
    one = learner(embedder={"backbone": "batch_normed", "dim": 8, "width": 4, "freeze_bn": False}, **EMA)
    one.train_epoch(0)
    average = dict(one.kept().named_buffers())
    for name, buffer in one.embedder.named_buffers():
        assert torch.equal(average[name], buffer), name
    assert average["backbone.1.running_mean"].any()


def test_what_is_scored_given_out_and_saved_is_the_average(tmp_path: Path) -> None:
    one, plain = learner(**EMA), learner()
    for each in (one, plain):
        each.train_epoch(0)
    images = data.load("digits").test.read(np.arange(5))
    for a, b in zip(one.embedder.parameters(), plain.embedder.parameters(), strict=True):
        assert torch.equal(a, b)  # training itself is as without
    expected = embedders.embed(one.kept(), images)
    assert not np.array_equal(expected, embedders.embed(one.embedder, images))
    given_out = one.outputs()["embeddings"][:5].numpy()  # in larger batches: the last digits may differ
    np.testing.assert_allclose(given_out, embedders.embed(one.kept(), images), rtol=1e-4, atol=1e-5)
    assert not np.allclose(given_out, embedders.embed(one.embedder, images), rtol=1e-4, atol=1e-5)
    one.save(tmp_path / "model", {})
    assert np.array_equal(embedders.embed(embedders.load(tmp_path / "model"), images), expected)
    assert one.score() != plain.score()


def test_an_average_goes_on_from_where_it_was(tmp_path: Path) -> None:
    raw = config(**EMA, num_folds=1, training__epochs=3)
    _, result = trial(raw)
    _, again, attempts = broken_trial(raw, str(tmp_path), "epoch")
    assert attempts > 1
    assert steady(again) == steady(result)
    one, other = learner(**EMA), learner(**EMA)
    one.train_epoch(0)
    other.restore({name: value.clone() for name, value in one.state().items()}, 1)
    one.train_epoch(1)
    other.train_epoch(1)
    assert all(torch.equal(value, other.state()[name]) for name, value in one.state().items())
    assert int(one.state()["average.num_steps"]) == 6


def test_two_ranks_average_as_one_does(pool: GlooPool, started: dict[str, Any]) -> None:
    raw = config(**EMA, **started, training__wise_ft=0.5, num_folds=1)
    (alone,) = pool.run(1, trial, raw)
    for reports, result in pool.run(2, trial, raw):
        for found, expected in zip(reports, alone[0], strict=True):
            assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
            assert found["map_at_r"] == pytest.approx(expected["map_at_r"], abs=5e-3)
        assert result["map_at_r"] == pytest.approx(alone[1]["map_at_r"], abs=5e-3)


def test_batch_statistics_are_agreed_on_before_they_are_averaged(pool: GlooPool) -> None:
    backbone = {"backbone": "batch_normed", "dim": 8, "width": 4, "freeze_bn": False}
    first, second = pool.run(2, trial, config(embedder=backbone, **EMA, num_folds=1))
    assert steady(first[1]) == steady(second[1])


def test_without_the_keys_there_is_no_average() -> None:
    one = learner()
    assert one.kept() is one.embedder
    assert not any(name.startswith("average") for name in one.state())
    assert not {"ema_decay", "wise_ft"} & TrainingConfig().model_dump().keys()
    plain = TrialConfig.model_validate(config())
    for key, value in (("ema_decay", 0.0), ("wise_ft", 1.0)):
        assert TrialConfig.model_validate(config(**{f"training__{key}": value})) == plain
    assert plain.fingerprint() != TrialConfig.model_validate(config(**EMA)).fingerprint()


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_end_is_mixed_with_the_start(started: dict[str, Any], share: float, ema_decay: float) -> None:
    one = learner(**started, training__wise_ft=share, training__ema_decay=ema_decay)
    start = weights(one.embedder)
    one.train_epoch(0)
    end = weights(one.embedder if one.average is None else one.average.embedder)
    for name, weight in weights(one.kept()).items():
        if name.startswith("head") or share == 1:
            assert torch.equal(weight, end[name]), name
        elif share == 0:
            assert torch.equal(weight, start[name]), name
        else:
            mean = (1 - share) * start[name] + share * end[name]
            torch.testing.assert_close(weight, mean, rtol=1e-5, atol=1e-7, msg=name)


def test_no_share_of_the_end_is_the_start_with_the_trained_head(started: dict[str, Any]) -> None:
    one = learner(**started, training__wise_ft=0.0)
    start = learner(**started)
    one.train_epoch(0)
    start.embedder.head.load_state_dict(one.embedder.head.state_dict())
    assert one.score() == start.score()


def test_of_a_saved_embedder_the_head_is_mixed_too(tmp_path: Path) -> None:
    saved = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=7)
    embedders.save(saved, tmp_path / "start", {}, np.zeros((2, 8, 8, 1), np.uint8))
    one = learner(embedder={"dim": 8, "width": 4, "weights": str(tmp_path / "start")}, training__wise_ft=0.0)
    one.train_epoch(0)
    assert not torch.equal(weights(one.embedder)["head.weight"], weights(saved)["head.weight"])
    assert all(torch.equal(weight, weights(saved)[name]) for name, weight in weights(one.kept()).items())


def test_all_of_the_end_is_the_trial_without_the_key(started: dict[str, Any]) -> None:
    raw = config(**started, num_folds=1)
    assert steady(trial(raw)[1]) == steady(trial(raw | {"training": raw["training"] | {"wise_ft": 1.0}})[1])


def test_a_mixed_trial_that_was_broken_off_ends_with_the_same_digits(
    started: dict[str, Any], tmp_path: Path
) -> None:
    raw = config(**started, training__wise_ft=0.5, num_folds=1)
    _, result = trial(raw)
    _, again, attempts = broken_trial(raw, str(tmp_path / "kept"), "epoch")
    assert attempts > 1
    assert steady(again) == steady(result)


def test_a_verdict_keeps_the_embedder_that_it_scored(started: dict[str, Any], tmp_path: Path) -> None:
    raw = config(**started, **EMA, training__wise_ft=0.5, num_folds=1) | {"phase": "verdict"}
    found = saving_trial(raw, str(tmp_path / "model"))
    test = data.load("digits").test
    one = learner(**started, **EMA, training__wise_ft=0.5)
    for epoch in range(2):
        one.train_epoch(epoch)
    again = embedders.embed(embedders.load(tmp_path / "model"), test.read(np.arange(len(test))))
    assert np.array_equal(one.outputs()["embeddings"].numpy(), again)
    assert one.score()["map_at_r"] == found["test_map_at_r"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"training__wise_ft": 0.5},
            r"training\.wise_ft: 0\.5 mixes the trained weights with those they began as, and these are random; set"
            r" embedder\.weights, or leave training\.wise_ft out",
        ),
        (
            {"training__wise_ft": 0.5, "embedder": {"weights": "some.pt", "freeze_bn": False}},
            r"training\.wise_ft: 0\.5 would mix weights of different batch statistics; set embedder\.freeze_bn: true,"
            r" or leave training\.wise_ft out",
        ),
    ],
)
def test_shares_that_mean_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    given = TrialConfig.model_validate(config(**changes))
    with pytest.raises(ValueError, match=f"^families.x.{message}$"):
        embedding_checks.check(given, "families.x")
    with pytest.raises(ValueError, match=f"^{message}$"):
        learner(**changes)


def test_a_study_file_searches_both() -> None:
    domains = {
        "training.ema_decay": {"choice": [0.0, 0.999], "default": 0.999},
        "training.wise_ft": {"float": [0, 1], "default": 0.5},
    }
    found = study_file.parse(
        {
            "name": "averages",
            "data": {"name": "digits"},
            "embedder": {"weights": "default", "backbone": "resnet18"},
            "families": {"a": {"space": "contrastive", "override": domains}},
        }
    )
    family = found.families["a"]
    given = found.trial_config(family, study_file.default_values(family))
    assert (given.training.ema_decay, given.training.wise_ft) == (0.999, 0.5)
    logged = found.task.logged_params(given)
    assert (logged["training.ema_decay"], logged["training.wise_ft"]) == (0.999, 0.5)


@pytest.mark.parametrize("training", [{"ema_decay": 0.9}, {"wise_ft": 0.5}])
def test_codes_of_frozen_features_have_no_such_weights(training: dict[str, Any]) -> None:
    given = HashingConfig(loss=LossConfig(name="greedyhash"), training=TrainingConfig(**training))
    with pytest.raises(ValueError, match=r"training\.\w+: belongs to the training of embedders"):
        hashing.HashingTrainer(given, np.ones((4, 3), np.float32))
