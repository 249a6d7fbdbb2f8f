"""Trials with a structure head: its rate, its input, and whether it does anything; heads of dim numbers each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, saving_trial, steady, trial

from dmlstudy import data, embedders
from dmlstudy.embedders.structure import RunningInput, deviation, saturated_share
from dmlstudy.records import EmbedderConfig, TrainingConfig, TrialConfig
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError
from dmlstudy.studies import checks
from dmlstudy.training.embedder_trainer import EmbedderTrainer
from dmlstudy.training.tasks import TASKS, task_of, untrained_key

NASA: dict[str, Any] = {
    "loss": {"name": "triplet", "params": {}},
    "regularizer": {"name": "structure", "params": {"weight": 4.0}},
    "training": {"epochs": 2, "lr": 3e-3},
}
STANDARDIZED = {"dim": 8, "width": 4, "structure_input": "standardize"}


def nasa(**changes: Any) -> dict[str, Any]:
    return config(**(NASA | changes))


def learner(raw: dict[str, Any]) -> EmbedderTrainer:
    images = data.load("digits").development
    return EmbedderTrainer(TrialConfig.model_validate(raw), images, torch.device("cpu"), stream=0)


def running_input(one: EmbedderTrainer) -> RunningInput:
    head = one.embedder.structure_head
    assert head is not None
    assert head.input is not None
    return head.input


def test_omega_deviation_is_the_definition() -> None:
    """Two items of three dimensions: one differs by 1 between them, two not at all."""
    omega_ND = np.array([[0.5, 1.5, 0.505], [1.5, 1.5, 0.505]], np.float32)
    assert deviation(omega_ND) == pytest.approx(0.5 / 3)
    assert saturated_share(omega_ND, "official", 3) == 1.0
    assert saturated_share(np.array([[0.52, 1.0, 1.495]]), "official", 3) == pytest.approx(1 / 3)
    assert saturated_share(np.array([[0.005, 2.99, 0.005], [1.0, 1.0, 1.0]]), "paper", 3) == pytest.approx(
        3 / 6
    )
    same_for_all = np.tile(np.array([0.5, 1.5, 1.5], np.float32), (100, 1))
    assert deviation(same_for_all) == 0  # far from 1, and yet nothing of any one item


@pytest.mark.parametrize("rerank", ["none", "structure"])
def test_every_structure_trial_records_what_its_head_did(rerank: str, tmp_path: Path) -> None:
    raw = nasa(retrieval={"rerank": rerank, "first": 12})
    reports, found = trial(raw)
    assert all({"omega_deviation", "omega_saturated"} <= report.keys() for report in reports)
    assert 0 < found["omega_deviation"] < 0.5
    judged = saving_trial(raw | {"phase": "verdict"}, str(tmp_path / "model"))
    saved = embedders.load(tmp_path / "model")
    _, omega = embedders.embed_with_structure(saved, data.load("digits").test.images_NHWC)
    assert omega is not None
    assert judged["test_omega_deviation"] == pytest.approx(deviation(omega), rel=1e-5)
    assert judged["test_omega_saturated"] == pytest.approx(saturated_share(omega, "official", 8))
    without = trial(config(loss=NASA["loss"], training=NASA["training"]))[1]
    assert not [name for name in without if "omega" in name]


def test_a_structure_head_may_have_a_rate_of_its_own() -> None:
    def rates(**training: float) -> dict[str, float]:
        one = learner(nasa(training={"epochs": 1, "lr": 1e-2, "head_lr_mult": 3} | training))
        lr_of = {id(p): group["lr"] for group in one.optimizer.param_groups for p in group["params"]}
        parts = {"backbone", "head", "structure_head"}
        return {part: lr_of[id(next(one.embedder.get_submodule(part).parameters()))] for part in parts}

    assert rates() == pytest.approx({"backbone": 1e-2, "head": 3e-2, "structure_head": 3e-2})
    assert rates(structure_lr_mult=5e-3) == pytest.approx(
        {"backbone": 1e-2, "head": 3e-2, "structure_head": 5e-5}
    )
    found = learner(nasa(training={"epochs": 1, "structure_lr_mult": 1.0, "decay_norms": False}))
    decay = {id(p): g["weight_decay"] for g in found.optimizer.param_groups for p in g["params"]}
    assert decay.keys() >= {id(p) for p in found.embedder.parameters()}


def test_keys_at_their_defaults_are_not_written() -> None:
    """So the fingerprints of earlier studies stay."""
    assert not {"dim_per", "structure_input"} & EmbedderConfig().model_dump().keys()
    assert "structure_lr_mult" not in TrainingConfig().model_dump()
    given = EmbedderConfig(structure_input="center", fusion="heads", dim_per="head", dim=8)
    assert given.model_dump()["structure_input"] == "center"
    assert given.size == 24
    found, plain = (
        TrialConfig.model_validate(nasa(embedder=each)) for each in (STANDARDIZED, {"dim": 8, "width": 4})
    )
    assert found.fingerprint() != plain.fingerprint()
    assert untrained_key(found) == untrained_key(plain)  # no embedding depends on it


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            {"training.structure_lr_mult": 0.05},
            r"training\.structure_lr_mult: 0\.05 is of a structure head, which",
        ),
        (
            {"embedder.structure_input": "center"},
            r"embedder\.structure_input: center is of a structure head, which",
        ),
        (
            {"embedder.dim_per": "head"},
            r"embedder\.dim_per: head needs a head for each stage, and embedder\.fusion: none",
        ),
        ({"embedder.structure_input": "centre"}, r"structure_input: .*'center'"),
        ({"training.structure_lr_mult": 0.0}, r"structure_lr_mult: .*greater than 0"),
    ],
)
def test_keys_that_nothing_would_read_are_refused(override: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        checks.check_parts(study("triplet", override))
    assert "\n" not in str(caught.value)


def study(space: str, override: dict[str, Any]) -> study_file.StudySpec:
    return study_file.parse(
        {
            "name": "structured",
            "data": {"name": "digits"},
            "protocol": {"num_folds": 2},
            "families": {"one": {"space": space, "override": {"batch.classes": "all"} | override}},
        }
    )


def test_the_keys_are_searched() -> None:
    wishes = {
        "training.structure_lr_mult": {"float": [0.01, 1.0], "log": True, "default": 0.05},
        "embedder.structure_input": {"choice": ["none", "center", "standardize"], "default": "none"},
        "embedder.fusion": "heads",
        "embedder.dim_per": {"choice": ["whole", "head"]},
        "embedder.dim": 9,
    }
    found = study("structure", wishes)
    checks.check_parts(found)
    family = found.families["one"]
    points = [found.trial_config(family, values) for values in found.corners(family)]
    assert {point.embedder.structure_input for point in points} == {"none", "center", "standardize"}
    assert {point.training.structure_lr_mult for point in points} >= {0.01, 0.05, 1.0}
    assert {point.embedder.size for point in points} == {9, 27}
    for point in points:
        assert task_of(point).size(task_of(point).logged_params(point)) == point.embedder.size
    assert TASKS["embedding"].size({"embedder.dim": "64"}) == 64  # a run of before there was dim_per


@pytest.mark.parametrize("loss", ["triplet", "proxy_anchor"])
def test_each_head_may_have_the_dim(loss: str, tmp_path: Path) -> None:
    fused = {"dim": 5, "width": 4, "fusion": "heads", "dim_per": "head"}
    raw = config(
        embedder=fused, loss={"name": loss}, batch={"classes": 4, "images_per_class": 5, "memory_size": 0}
    )
    one = learner(raw)
    assert [head.out_features for head in one.embedder.head.heads] == [5, 5, 5]
    saving_trial(raw | {"phase": "verdict"}, str(tmp_path / "model"))
    saved = embedders.load(tmp_path / "model")
    assert saved.architecture.dim == 15
    assert embedders.embed(saved, data.load("digits").test.images_NHWC[:3]).shape == (3, 15)


def test_an_input_has_statistics_from_the_first_step_on() -> None:
    one = learner(nasa(embedder=STANDARDIZED))
    input = running_input(one)
    assert input.num_batches == 0
    one.train_epoch(0)
    assert input.num_batches == 1 + len(one.batches)  # the first batch's own, before it is trained on
    assert input.mean_F.abs().max() > 0.01
    assert 0 < input.variance != 1


@pytest.mark.parametrize(
    "training", [{}, {"ema_decay": 0.9}, {"freeze_backbone_epochs": 2, "feature_cache": "auto"}]
)
def test_a_trial_that_was_broken_off_ends_with_the_same_digits(
    training: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    raw = nasa(
        embedder=STANDARDIZED,
        training=NASA["training"] | {"structure_lr_mult": 0.05} | training,
        retrieval={"rerank": "structure", "first": 12},
    )
    reports, unbroken = trial(raw)
    more, found, attempts = broken_trial(raw, str(tmp_path / "state"), "epoch")
    assert attempts > 2
    assert steady(found) == steady(unbroken)
    assert steady(more[-1]) == steady(reports[-1])


def test_chunks_have_the_same_statistics() -> None:
    batch = {"classes": 4, "images_per_class": 5, "per_epoch": 2}
    whole, chunked = (learner(nasa(embedder=STANDARDIZED, batch=batch | own)) for own in ({}, {"chunk": 7}))
    for epoch in range(3):
        whole.train_epoch(epoch)
        chunked.train_epoch(epoch)
    for (name, expected), found in zip(whole.state().items(), chunked.state().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_two_ranks_find_the_same(pool: GlooPool) -> None:
    raw = nasa(embedder=STANDARDIZED, num_folds=1)
    (_, result), (_, other) = pool.run(2, trial, raw)
    assert other == result
    _, alone = trial(raw)
    for name in ("map_at_r", "omega_deviation"):
        assert result[name] == pytest.approx(alone[name], abs=2e-3)


def test_compiled_steps_see_the_same() -> None:
    plain, compiled = (
        learner(nasa(embedder=STANDARDIZED, training=NASA["training"] | own))
        for own in ({}, {"compile": True})
    )
    plain.train_epoch(0)
    compiled.train_epoch(0)
    torch.testing.assert_close(
        running_input(compiled).mean_F, running_input(plain).mean_F, rtol=1e-3, atol=1e-4
    )
    assert running_input(compiled).num_batches == running_input(plain).num_batches


def test_a_saved_head_is_begun_with_if_its_input_is_the_same(tmp_path: Path) -> None:
    saving_trial(nasa(embedder=STANDARDIZED, phase="verdict"), str(tmp_path / "model"))
    saved = embedders.load(tmp_path / "model")
    assert saved.architecture.structure_input == "standardize"
    arguments: dict[str, Any] = {
        "dim": 8, "width": 4, "weights": str(tmp_path / "model"), "in_channels": 1, "image_size": 8,
        "structure": "official", "seed": 3,
    }  # fmt: skip
    same, other = (
        embedders.build("small_conv", structure_input=input, **arguments) for input in ("standardize", "none")
    )
    assert same.begun_parts == ("backbone", "head", "structure_head")
    assert other.begun_parts == ("backbone", "head")
    images = data.load("digits").test.images_NHWC[:4]
    for own, expected in zip(
        embedders.embed_with_structure(same, images),
        embedders.embed_with_structure(saved, images),
        strict=True,
    ):
        np.testing.assert_array_equal(own, expected)


def test_mixed_weights_would_not_fit_the_statistics() -> None:
    raw = nasa(embedder=STANDARDIZED | {"weights": "some.pt"}, training={"epochs": 1, "wise_ft": 0.5})
    with pytest.raises(
        ValueError, match=re.escape("embedder.structure_input: standardize is of; leave one of")
    ):
        learner(raw)
