"""Class vectors shared out among ranks: trials, states and clipping are those of one process that has them all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, moved, steady, trial

from dmlstudy import data, distributed
from dmlstudy.records import TrainingConfig, TrialConfig
from dmlstudy.training.assembly import make_loss
from dmlstudy.training.embedder_trainer import EmbedderTrainer
from dmlstudy.training.recipe import check_class_shards
from dmlstudy.training.tasks import TASKS

WHOLE: dict[str, Any] = {
    "loss": {"name": "norm_softmax", "params": {"sample": 0.5}},
    "batch__classes": 2,
    "training__lr": 1e-3,
    "training__optimizer": "adamw",
    "training__clip_loss_norm": 0.5,
    "training__epochs": 3,
    "num_folds": 1,
}
SHARED = WHOLE | {"training__class_shards": True}


def learner(**changes: Any) -> EmbedderTrainer:
    images = data.load("digits").development
    return EmbedderTrainer(
        TrialConfig.model_validate(config(**changes)), images, torch.device("cpu"), stream=0
    )


def trained(epochs: int, changes: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, NDArray[Any]]]:
    """The shape of a rank's vectors after so many epochs, and the state."""
    one = learner(**changes)
    for epoch in range(epochs):
        one.train_epoch(epoch)
    (vectors,) = one.module.loss.parameters()
    return tuple(vectors.shape), {name: value.detach().numpy().copy() for name, value in one.state().items()}


def gone_on(state: dict[str, NDArray[Any]], changes: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The state after another epoch from there."""
    one = learner(**changes)
    one.restore({name: torch.from_numpy(value.copy()) for name, value in state.items()}, 1)
    one.train_epoch(1)
    return {name: value.detach().numpy().copy() for name, value in one.state().items()}


def assert_close(found: dict[str, NDArray[Any]], wanted: dict[str, NDArray[Any]]) -> None:
    """Up to rounding, which AdamW enlarges: it divides a small gradient by its own size."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_ranks_hold_shares_and_their_state_is_that_of_one_process(pool: GlooPool) -> None:
    """Before training to the last bit; and any number of ranks goes on from it."""
    images = data.load("digits").development
    num_classes = len(np.unique(images.labels_N))
    for epochs in (0, 1):
        _, whole = trained(epochs, WHOLE)
        answers = pool.run(2, trained, epochs, SHARED)
        assert [shape[0] for shape, _ in answers] == [num_classes // 2, num_classes - num_classes // 2]
        found = answers[0][1]
        assert len(found["loss.proxies_CD"]) == num_classes
        if epochs:
            assert_close(found, whole)
            moments = [name for name in found if re.fullmatch(r"optimizer\.\d+\.exp_avg", name)]
            assert any(len(found[name]) == num_classes for name in moments)
        else:
            assert np.array_equal(found["loss.proxies_CD"], whole["loss.proxies_CD"])
    (_, wanted) = trained(2, WHOLE)
    assert_close(pool.run(2, gone_on, whole, SHARED)[0], wanted)
    assert_close(gone_on(found, SHARED), wanted)
    assert_close(gone_on(found, WHOLE), wanted)


def test_a_broken_trial_ends_with_the_digits_of_an_unbroken_one(pool: GlooPool, tmp_path: Path) -> None:
    raw = config(**SHARED)
    plain = pool.run(2, trial, raw)
    answers = pool.run(2, broken_trial, raw, str(tmp_path), "epoch")
    for (_, result), (_, again, attempts) in zip(plain, answers, strict=True):
        assert attempts >= 2
        assert steady(again) == steady(result)
    (alone,) = pool.run(1, trial, config(**WHOLE))
    for found, wanted in zip(plain[0][0], alone[0], strict=True):
        assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-4)


def test_the_norm_to_clip_is_that_of_all_shares(pool: GlooPool) -> None:
    changes = SHARED | {"training__optimizer": "sgd", "training__lr": 1.0, "batch__per_epoch": 1}
    changes |= {"training__clip_loss_norm": 0.01}
    (alone,) = pool.run(1, moved, config(**changes | {"training__class_shards": False}))
    assert np.linalg.norm(alone["loss.proxies_CD"]) == pytest.approx(0.01, rel=1e-2)
    found = pool.run(2, moved, config(**changes))[0]["loss.proxies_CD"]
    np.testing.assert_allclose(found, alone["loss.proxies_CD"], rtol=1e-3, atol=1e-7)


def too_few() -> str:
    with pytest.raises(ValueError, match="class_shards") as refused:
        make_loss(
            TrialConfig.model_validate(config(**SHARED)),
            [3] * (distributed.world_size() - 1),
            0,
            torch.device("cpu"),
        )
    return str(refused.value)


def test_fewer_classes_than_ranks_are_refused(pool: GlooPool) -> None:
    for said in pool.run(2, too_few):
        assert said.startswith("training.class_shards: 1 classes cannot be shared out among 2 workers; set")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"training__precision": "fp16"},
            r"training\.class_shards: under training\.precision: fp16 a worker",
        ),
        ({"embedder__matryoshka": "4"}, r"training\.class_shards: embedder\.matryoshka cuts class vectors"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_class_shards(TrialConfig.model_validate(config(**SHARED | changes)))


@pytest.mark.parametrize("name", ["triplet", "proxy_anchor"])
def test_losses_without_a_softmax_over_classes_are_refused(name: str) -> None:
    given = TrialConfig.model_validate(config(**SHARED | {"loss": {"name": name}}))
    with pytest.raises(ValueError, match=rf"loss '{name}' has no class vectors to share out; set .* arcface"):
        learner(**SHARED | {"loss": {"name": name}})
    with pytest.raises(ValueError, match=r"families\.a\.loss: loss .* has no class vectors to share out"):
        TASKS["embedding"].check(given, "families.a")


def test_a_trial_without_the_key_is_written_as_it_was() -> None:
    assert "class_shards" not in TrainingConfig().model_dump()
