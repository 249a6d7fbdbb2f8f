"""Options of a trial's training step: precision, frozen epochs, memory layout, compilation, fused heads and codes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, steady, trial

from dmlstudy import data, distributed, embedders
from dmlstudy.embedders.precision import PRECISIONS
from dmlstudy.losses import catalogue
from dmlstudy.losses.tiles import RowLoss
from dmlstudy.records import TrialConfig
from dmlstudy.training.embedder_trainer import EmbedderTrainer
from dmlstudy.training.step import Step


def learner(**changes: Any) -> EmbedderTrainer:
    images = data.load("digits").development
    raw = config(**({"training__optimizer": "sgd", "training__lr": 1e-2} | changes))
    return EmbedderTrainer(TrialConfig.model_validate(raw), images, torch.device("cpu"), stream=0)


def test_a_draw_of_batches_that_does_not_fit_the_regularizer_is_refused() -> None:
    consistency = {"name": "graph_consistency", "params": {"draw": "two_draws"}}
    with pytest.raises(ValueError, match=r"two_draws needs batches of two draws, not batch\.draw: pk"):
        learner(regularizer=consistency)
    with pytest.raises(ValueError, match=r"split would mix the two draws of batch\.draw"):
        learner(regularizer={"name": "graph_consistency"}, batch__draw="two_draws")


def parameters(of: EmbedderTrainer, part: str) -> dict[str, torch.Tensor]:
    module = of.embedder.get_submodule(part)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_frozen_backbone_stays_as_it_is_and_starts_with_a_fresh_optimizer(optimizer: str) -> None:
    one = learner(
        embedder={"backbone": "batch_normed", "dim": 8, "width": 4, "freeze_bn": False},
        training__optimizer=optimizer,
        training__freeze_backbone_epochs=1,
        training__weight_decay=0.1,
    )
    backbone, head = parameters(one, "backbone"), parameters(one, "head")
    one.train_epoch(0)
    assert same(backbone, parameters(one, "backbone"))  # batch statistics too
    assert not same(head, parameters(one, "head"))
    assert all(p.grad is None for p in one.embedder.backbone.parameters())
    assert {id(p) for p in one.optimizer.state} <= {id(p) for p in one.embedder.head.parameters()}
    one.train_epoch(1)
    assert not same(backbone, parameters(one, "backbone"))
    if optimizer == "adam":
        steps = {name: one.optimizer.state[p]["step"] for name, p in one.embedder.named_parameters()}
        assert {int(step) for name, step in steps.items() if name.startswith("backbone")} == {3}
        assert int(steps["head.weight"]) == 6


def test_two_ranks_thaw_as_one_does(pool: GlooPool) -> None:
    raw = config(training__freeze_backbone_epochs=1, training__epochs=3, num_folds=1)
    (alone,) = pool.run(1, trial, raw)
    for reports, _ in pool.run(2, trial, raw):
        losses = [report["train_loss"] for report in reports]
        np.testing.assert_allclose(losses, [r["train_loss"] for r in alone[0]], rtol=1e-5)


def test_a_frozen_trial_that_was_broken_off_ends_with_the_same_digits(tmp_path: Path) -> None:
    raw = config(
        training__freeze_backbone_epochs=1, training__epochs=3, num_folds=1, training__precision="bf16"
    )
    reports, result = trial(raw)
    _, again, attempts = broken_trial(raw, str(tmp_path), "epoch")
    assert attempts > 1
    assert steady(again) == steady(result)
    assert reports


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), ("fp16", 5e-3)])
def test_lower_precision_is_close_and_losses_are_float32(precision: str, tolerance: float) -> None:
    exact, lower = learner(), learner(training__precision=precision)
    dtypes: list[torch.dtype] = []
    inner: list[torch.dtype] = []
    lower.module.loss.register_forward_pre_hook(lambda _m, inputs: dtypes.append(inputs[0].z_ND.dtype))
    lower.embedder.head.register_forward_hook(lambda _m, _i, out: inner.append(out.dtype))
    losses = [one.train_epoch(0)["train_loss"] for one in (exact, lower)]
    assert set(dtypes) == {torch.float32}
    assert set(inner) == {PRECISIONS[precision]}
    assert 0 < abs(losses[0] - losses[1]) < tolerance * losses[0]
    for (name, a), b in zip(exact.embedder.named_parameters(), lower.embedder.parameters(), strict=True):
        assert b.dtype == torch.float32, name
        assert (a - b).abs().max() < tolerance, name


def test_the_scale_of_fp16_gradients_travels() -> None:
    one = learner(training__precision="fp16")
    one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    one.train_epoch(0)
    state = {name: value.clone() for name, value in one.state().items()}
    other = learner(training__precision="fp16")
    other.restore(state, 1)
    assert other.scaler.state_dict() == one.scaler.state_dict()
    assert one.scaler.get_scale() == 1024
    assert one.train_epoch(1)["train_loss"] == other.train_epoch(1)["train_loss"]
    assert not any(name.startswith("scaler") for name in learner().state())


def test_gradients_that_overflow_are_left_out() -> None:
    one = learner(training__precision="fp16", batch__per_epoch=1)
    one.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    before = parameters(one, "head")
    one.train_epoch(0)
    assert same(before, parameters(one, "head"))
    assert one.scaler.get_scale() == 2.0**125


def test_channels_last_and_compilation_change_no_more_than_rounding() -> None:
    expected = learner().train_epoch(0)["train_loss"]
    one = learner(training__channels_last=True)
    weight = one.embedder.backbone.get_submodule("1.0").weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert one.train_epoch(0)["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_compiled_embedder_is_the_eager_one() -> None:
    embedder = embedders.build("mlp1", 4, width=8, in_channels=6, image_size=(), seed=0, code="sign")
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    gradients = []
    for is_compiled in (False, True):
        step = Step(
            embedder, catalogue.build("contrastive", {}, num_classes=2, dim=4), None, "float32", is_compiled
        )
        assert isinstance(step.loss, RowLoss)
        assert (step.loss.fused is not None) == is_compiled
        total, *_ = step(x, distributed.asked(torch.tensor([0, 0, 1, 1, 1]), torch.arange(5)))
        embedder.zero_grad()
        total.backward()
        gradients.append([total.detach(), *(p.grad.clone() for p in embedder.parameters())])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)


def test_whatever_a_process_has_served_before_the_next_architecture_is_compiled_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By itself PyTorch compiles a function for 8 of them, then runs it uncompiled, which one line of a log tells."""
    num_compiled = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting))
    counts = []
    for dim in range(2, 14):
        before = num_compiled
        embedder = embedders.build("mlp1", dim, width=8, in_channels=6, image_size=(), seed=0)
        loss = catalogue.build("contrastive", {}, num_classes=2, dim=dim)
        step = Step(embedder, loss, None, "float32", True)
        step(torch.randn(4, 6), distributed.asked(torch.tensor([0, 0, 1, 1]), torch.arange(4)))
        counts.append(num_compiled - before)
    assert counts == [1] * 12


@pytest.mark.long
def test_a_compiled_trial_is_the_eager_one() -> None:
    """With a frozen epoch, so that it is compiled for both."""
    frozen = {"training__freeze_backbone_epochs": 1, "batch__per_epoch": 2}
    eager, compiled = learner(**frozen), learner(training__compile=True, **frozen)
    for epoch in range(2):
        losses = [one.train_epoch(epoch)["train_loss"] for one in (eager, compiled)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert set(compiled.state()) == set(eager.state())
    for a, b in zip(eager.embedder.parameters(), compiled.embedder.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_fused_heads_and_codes_are_trained() -> None:
    reports, result = trial(
        config(
            embedder={"dim": 9, "width": 4, "fusion": "heads", "head_norm": True, "code": "tanh"},
            num_folds=1,
        )
    )
    assert reports[-1]["train_loss"] > 0
    assert 0 < result["map_at_r"] < 1
