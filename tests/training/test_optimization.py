"""A recipe's keys in training: groups and rates, partial unfreezing, clipping on any number of ranks, resuming."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, failing_trial, moved, steady, trial
from torch import Tensor, nn

from dmlstudy import data, embedders
from dmlstudy.losses import catalogue
from dmlstudy.losses.class_softmax import NormSoftmax
from dmlstudy.losses.interface import Embeddings
from dmlstudy.records import BatchConfig, TrainingConfig, TrialConfig
from dmlstudy.training.embedder_trainer import EmbedderTrainer
from dmlstudy.training.interface import TrialFailed
from dmlstudy.training.optimization import Optimization, RowSteps, Unfrozen
from dmlstudy.training.recipe import check_draw, check_recipe

RECIPE: dict[str, Any] = {
    "training__epochs": 3,
    "training__schedule": "cosine",
    "training__warmup_epochs": 0.7,
    "training__layer_decay": 0.5,
    "training__decay_norms": False,
    "training__weight_decay": 0.1,
    "training__clip_norm": 0.05,
    "training__freeze_backbone_epochs": 1,
    "training__unfreeze_last": 2,
    "training__checkpointing": True,
    "num_folds": 1,
}


def learner(**changes: Any) -> EmbedderTrainer:
    raw = config(**({"training__optimizer": "sgd", "training__lr": 1e-2} | changes))
    images = data.load("digits").development
    return EmbedderTrainer(TrialConfig.model_validate(raw), images, torch.device("cpu"), stream=0)


def optimization(
    embedder: embedders.Embedder, loss: nn.Module | None = None, **training: Any
) -> Optimization:
    config = TrainingConfig.model_validate(training)
    return Optimization(config, embedder, loss or nn.Identity(), 10, torch.device("cpu"))


def embedder_of(backbone: str, side: int = 64) -> embedders.Embedder:
    """Without data: its shapes alone."""
    with torch.device("meta"):
        return embedders.build(backbone, 8, in_channels=3, image_size=side, seed=0)


def rates(of: Optimization, embedder: embedders.Embedder) -> dict[str, float]:
    lr_of = {id(p): group["lr"] for group in of.optimizer.param_groups for p in group["params"]}
    return {name: lr_of[id(p)] for name, p in embedder.named_parameters() if id(p) in lr_of}


def test_without_a_recipe_groups_are_those_of_earlier_states() -> None:
    loss = catalogue.build("proxy_anchor", {}, num_classes=5, dim=8)
    embedder = embedders.build(
        "small_conv", 8, width=4, in_channels=1, image_size=8, seed=0, structure="official"
    )
    found = optimization(
        embedder, loss, lr=1e-3, head_lr_mult=2, loss_lr_mult=100, weight_decay=0.1
    ).optimizer
    heads = [*embedder.head.parameters(), *embedder.structure_head.parameters()]  # type: ignore[union-attr]
    expected = [[*embedder.backbone.parameters()], heads, [*loss.parameters()]]
    assert [[id(p) for p in group["params"]] for group in found.param_groups] == [
        [*map(id, e)] for e in expected
    ]
    assert [group["lr"] for group in found.param_groups] == [1e-3, 2e-3, 0.1]
    assert [group["weight_decay"] for group in found.param_groups] == [0.1, 0.1, 0.0]
    assert not any(group["fused"] for group in found.param_groups)


@pytest.mark.parametrize(
    ("backbone", "exponents"),
    [
        ("resnet18", {"conv1.weight": 9, "layer1.0.conv1.weight": 8, "layer4.1.bn2.bias": 1}),
        (
            "vit_b_32",
            {"class_token": 13, "encoder.layers.encoder_layer_0.ln_1.bias": 12, "encoder.ln.weight": 0}
            | {"encoder.layers.encoder_layer_11.mlp.3.weight": 1},
        ),
        (
            "convnext_tiny",
            {"features.0.0.weight": 19, "features.2.1.weight": 15, "features.3.0.layer_scale": 15}
            | {"features.7.2.block.5.weight": 1, "classifier.0.weight": 0},
        ),
        ("timm:vit_tiny_patch16_224", {"pos_embed": 13, "blocks.0.norm1.weight": 12, "norm.weight": 1}),
    ],
)
def test_rates_fall_with_the_distance_from_the_head(backbone: str, exponents: dict[str, int]) -> None:
    embedder = embedder_of(backbone)
    found = rates(optimization(embedder, lr=1e-3, layer_decay=0.5, head_lr_mult=3), embedder)
    assert set(found) == {name for name, _ in embedder.named_parameters()}
    for name, exponent in exponents.items():
        assert found[f"backbone.{name}"] == pytest.approx(1e-3 * 0.5**exponent)
    assert found["head.weight"] == found["head.bias"] == pytest.approx(3e-3)


def test_every_groups_rate_follows_the_schedule() -> None:
    embedder = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=0)
    found = optimization(
        embedder, lr=1e-3, head_lr_mult=10, layer_decay=0.5, epochs=10, schedule="cosine", warmup_steps=10
    )
    before = rates(found, embedder)
    for u in (55, 0, 99):
        found.start_step(u)
        factor = found.schedule.factor(u)
        assert rates(found, embedder) == pytest.approx({name: lr * factor for name, lr in before.items()})


def test_a_schedule_counts_batches_through_all_epochs_also_frozen_ones() -> None:
    one = learner(
        training__epochs=4,
        training__schedule="linear",
        training__freeze_backbone_epochs=1,
        batch__per_epoch=2,
    )
    seen: list[float] = []
    one.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    for epoch in (0, 1):
        one.train_epoch(epoch)
    assert seen == pytest.approx([1e-2 * (1 - u / 8) for u in range(4)])


def test_the_losss_own_rate_may_be_absolute() -> None:
    one = learner(loss={"name": "proxy_anchor"}, training__loss_lr=0.5)
    assert [group["lr"] for group in one.optimizer.param_groups] == [1e-2, 1e-2, 0.5]


def test_norms_and_biases_need_not_decay() -> None:
    embedder = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=0)
    found = optimization(embedder, weight_decay=0.1, decay_norms=False).optimizer
    decay = {id(p): group["weight_decay"] for group in found.param_groups for p in group["params"]}
    named = dict(embedder.named_parameters())
    assert {name for name, p in named.items() if decay[id(p)]} == {
        name for name, p in named.items() if p.ndim > 1
    }
    assert set(decay) == {id(p) for p in named.values()}


def test_only_the_last_blocks_are_trained() -> None:
    one = learner(
        embedder={"backbone": "small_conv", "dim": 8, "width": 4},
        training__unfreeze_last=1,
        training__freeze_backbone_epochs=1,
        training__weight_decay=0.1,
    )
    before = {name: value.clone() for name, value in one.embedder.state_dict().items()}
    one.train_epoch(0)
    assert all(p.grad is None for p in one.embedder.backbone.parameters())
    one.train_epoch(1)
    changed = {n for n, value in one.embedder.state_dict().items() if not torch.equal(value, before[n])}
    last = {name for name in before if name.startswith("backbone.2.")}
    assert changed == last | {"head.weight", "head.bias"}
    assert one.embedder.backbone[2].training  # type: ignore[index]
    assert not any(m.training for m in one.embedder.backbone[0].modules())  # type: ignore[index, union-attr]


def test_a_frozen_backbone_keeps_its_batch_statistics_too() -> None:
    one = learner(
        embedder={"backbone": "batch_normed", "dim": 8, "width": 4, "freeze_bn": False},
        training__unfreeze_last=0,
    )
    before = {name: value.clone() for name, value in one.embedder.backbone.state_dict().items()}
    for epoch in (0, 1):
        one.train_epoch(epoch)
    after = one.embedder.backbone.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert len(one.optimizer.param_groups) == 1


def test_what_follows_the_last_block_is_trained_with_it() -> None:
    network = embedder_of("vit_b_32").backbone
    names = Unfrozen(network, 1).names
    assert {name.partition("mlp")[0] for name in names} >= {"encoder.ln.weight"}
    assert not any("encoder_layer_10" in name or name == "class_token" for name in names)
    with pytest.raises(
        ValueError, match=r"unfreeze_last: 13 blocks, but the backbone has 12; set it to at most 12"
    ):
        Unfrozen(network, 13)


def gradient_norm(one: EmbedderTrainer, part: nn.Module) -> float:
    """Of the one SGD step with rate 1 that an epoch of one batch takes, whose change is the gradient."""
    before = [parameter.detach().clone() for parameter in part.parameters()]
    one.train_epoch(0)
    changes = [(a - b.detach()).flatten() for a, b in zip(before, part.parameters(), strict=True)]
    return float(torch.cat(changes).double().norm())


def test_gradients_are_clipped_by_their_global_norm() -> None:
    options = {
        "training__lr": 1.0, "batch__per_epoch": 1, "loss": {"name": "proxy_anchor"}, "training__precision": "float32"
    }  # fmt: skip
    plain = [learner(**options) for _ in range(2)]
    free = [gradient_norm(plain[0], plain[0].embedder), gradient_norm(plain[1], plain[1].module.loss)]
    for factor in (0.5, 2.0):
        limits = {"training__clip_norm": factor * free[0], "training__clip_loss_norm": factor * free[1]}
        one, other = learner(**options, **limits), learner(**options, **limits)
        assert gradient_norm(one, one.embedder) == pytest.approx(min(factor, 1) * free[0], rel=1e-4)
        assert gradient_norm(other, other.module.loss) == pytest.approx(min(factor, 1) * free[1], rel=1e-4)


def test_a_clipped_step_is_the_same_on_any_number_of_ranks(pool: GlooPool) -> None:
    raw = config(
        training__clip_norm=0.01, training__clip_loss_norm=0.01, training__optimizer="sgd", training__lr=1.0,
        loss={"name": "proxy_anchor"}, batch__per_epoch=1,
    )  # fmt: skip
    (alone,) = pool.run(1, moved, raw)
    for part in ("embedder.", "loss."):
        change = np.concatenate([v.ravel() for name, v in alone.items() if name.startswith(part)])
        assert np.linalg.norm(change) == pytest.approx(0.01, rel=1e-2)
    for ranked in pool.run(2, moved, raw):
        for name, value in alone.items():
            np.testing.assert_allclose(ranked[name], value, rtol=1e-3, atol=1e-7)


def test_a_norm_that_is_not_finite_ends_the_trial_in_one_line() -> None:
    one = learner(training__clip_norm=1.0)
    one.embedder.head.weight.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[operator, union-attr]
    with pytest.raises(
        TrialFailed, match=r"^epoch 1, batch 1: the norm of the embedder's gradient is \w+; set"
    ):
        one.train_epoch(0)


KINDS: dict[str, Any] = {
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.1, weight_decay=0.3),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.3),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, weight_decay=0.3, momentum=0.9),
}
STEPS: list[list[int]] = [[0, 3], [3], [], [1, 3, 4], [0, 4]]
"""Rows with a gradient in each of some steps; row 2 never has one."""


def stepped(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows after these steps, with what the optimiser knows of them."""
    weight = nn.Parameter(torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0)).double())
    optimizer = KINDS[kind]([weight])
    optimizer.register_step_pre_hook(RowSteps())
    for number, rows in enumerate(STEPS):
        values = gradient_of(number)[rows]
        weight.grad = torch.sparse_coo_tensor(
            torch.tensor([rows], dtype=torch.int64), values, weight.shape, check_invariants=True
        )
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def gradient_of(number: int) -> Tensor:
    return torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1 + number)).double()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_gradient_rest_and_others_step_as_they_would_alone(kind: str) -> None:
    """Of Adam the bias correction counts all steps, by the formula; SGD of a row knows of no other row's steps."""
    found, state = stepped(kind)
    begun = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal(found[2], begun[2])
    for row in range(5):
        w, m, v = begun[row].clone(), torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
        for number, rows in enumerate(STEPS):
            if row not in rows:
                continue
            g = gradient_of(number)[row]
            if kind == "adamw":
                w = w * (1 - 0.1 * 0.3)
            else:
                g = g + 0.3 * w
            if kind == "sgd":
                m = 0.9 * m + g
                w = w - 0.1 * m
                continue
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            u = number + 1
            w = w - 0.1 * (m / (1 - 0.9**u)) / ((v / (1 - 0.999**u)).sqrt() + 1e-8)
        torch.testing.assert_close(found[row], w, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(state["momentum_buffer" if kind == "sgd" else "exp_avg"][row], m)


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_step_as_a_whole_parameter_does(kind: str) -> None:
    weights = [
        nn.Parameter(torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))) for _ in range(2)
    ]
    optimizers = [KINDS[kind]([weight]) for weight in weights]
    optimizers[0].register_step_pre_hook(RowSteps())
    for number in range(3):
        gradient = gradient_of(number).float()
        weights[0].grad, weights[1].grad = gradient.to_sparse(1), gradient
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(*weights)
        states = [optimizer.state[weight] for optimizer, weight in zip(optimizers, weights, strict=True)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def sampled_loss(**training: Any) -> tuple[NormSoftmax, Optimization]:
    """A loss whose batch has taken a backward, beside an embedder that has none."""
    embedder = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=0)
    loss = NormSoftmax(60, 8, sample=0.2, seed=1)
    found = optimization(embedder, loss, loss_lr=1.0, weight_decay=0.1, **training)
    z_BD = nn.functional.normalize(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))
    loss(Embeddings(z_BD, torch.arange(6), torch.arange(6))).total.backward()
    return loss, found


def test_vectors_of_no_sampled_class_rest() -> None:
    loss, found = sampled_loss(optimizer="adamw")
    drawn, before = loss.proxies_CD.grad.coalesce().indices()[0], loss.proxies_CD.detach().clone()  # type: ignore[union-attr]
    found.step(torch.amp.GradScaler("cpu", enabled=False))
    changed = (loss.proxies_CD != before).any(1).nonzero()[:, 0]
    assert torch.equal(changed, drawn)
    assert 6 < len(drawn) < 30


@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**127])
def test_sampled_rows_are_clipped_unscaled_and_left_out_like_others(scale: float) -> None:
    loss, found = sampled_loss(optimizer="sgd", clip_loss_norm=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
    before = loss.proxies_CD.detach().clone()
    assert loss.proxies_CD.grad is not None
    loss.proxies_CD.grad = loss.proxies_CD.grad * scale
    scaler.scale(torch.ones(()))
    found.step(scaler)
    moved_by = (loss.proxies_CD.detach() - before).norm().item()
    assert moved_by == pytest.approx(0 if scale > 1e30 else 0.01, rel=1e-3)


def test_fp16_leaves_out_a_step_whose_gradients_overflow() -> None:
    one = learner(training__precision="fp16", training__clip_norm=1.0, batch__per_epoch=1)
    one.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    before = one.embedder.head.weight.detach().clone()  # type: ignore[operator, union-attr]
    one.train_epoch(0)
    assert torch.equal(before, one.embedder.head.weight)  # type: ignore[arg-type]
    assert one.scaler.get_scale() == 2.0**125


def test_fp16_clips_what_it_has_unscaled() -> None:
    """Both step by a gradient of norm 0.01; scaled by 1024 unscaled gradients would be clipped another way."""
    norms = []
    for precision in ("float32", "fp16"):
        options = {"training__precision": precision, "training__clip_norm": 0.01, "training__lr": 1.0}
        one = learner(**options, batch__per_epoch=1)
        if precision == "fp16":
            one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        norms.append(gradient_norm(one, one.embedder))
    assert norms == pytest.approx([0.01, 0.01], rel=1e-3)


def test_a_recipes_trial_that_was_broken_off_ends_with_the_same_digits(tmp_path: Path) -> None:
    raw = config(**RECIPE)
    reports, result = trial(raw)
    _, again, attempts = broken_trial(raw, str(tmp_path), "epoch")
    assert attempts > 1
    assert steady(again) == steady(result)
    assert reports


def test_two_ranks_train_a_recipe_as_one_does(pool: GlooPool) -> None:
    raw = config(**RECIPE)
    (alone,) = pool.run(1, trial, raw)
    for reports, _ in pool.run(2, trial, raw):
        losses = [report["train_loss"] for report in reports]
        np.testing.assert_allclose(losses, [r["train_loss"] for r in alone[0]], rtol=1e-4)


def test_recomputed_blocks_leave_the_digits() -> None:
    plain, recomputed = (learner(training__checkpointing=flag) for flag in (False, True))
    assert plain.train_epoch(0)["train_loss"] == recomputed.train_epoch(0)["train_loss"]
    for name, value in plain.state().items():
        assert torch.equal(recomputed.state()[name], value), name


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (
            {"warmup_epochs": 1, "warmup_steps": 5},
            "warmup_steps: stands beside training.warmup_epochs; leave one",
        ),
        ({"warmup_epochs": 20}, "warmup_epochs: 20 is not shorter than training.epochs: 20; lower it"),
        ({"lr_floor": 0.1}, "lr_floor: 0.1 is not used by training.schedule: constant; leave it out"),
        (
            {"step_factor": 0.2, "schedule": "cosine"},
            "step_factor: 0.2 is not used by training.schedule: cosine",
        ),
        ({"step_at": "0.5", "schedule": "linear"}, "step_at: 0.5 is not used by training.schedule: linear"),
        ({"step_at": "soon", "schedule": "step"}, "step_at: 'soon' is neither a share of the epochs"),
        ({"loss_lr": 1.0, "loss_lr_mult": 100}, "loss_lr: 1 is the rate of the loss's own parameters, and"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(training: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"training.{said}")) as caught:
        check_recipe(TrainingConfig.model_validate(training))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=re.escape(said)):
        learner(training=training)


def test_a_recipe_of_the_untrained_row_is_none() -> None:
    check_recipe(TrainingConfig.model_validate({"epochs": 0, "warmup_epochs": 3, "schedule": "cosine"}))


def test_one_image_of_a_class_needs_class_vectors_or_a_memory() -> None:
    single = {"batch__images_per_class": 1}
    assert learner(loss={"name": "cosface"}, **single).train_epoch(0)["train_loss"] > 0
    contrastive = {"name": "contrastive", "params": {"negative_margin": 1.5}}
    with pytest.warns(UserWarning, match="no two images of one class"):  # the first, before there is a memory
        assert learner(loss=contrastive, batch__memory_size=50, **single).train_epoch(0)["train_loss"] > 0
    for name in ("contrastive", "margin"):
        with pytest.raises(
            ValueError, match=r"batch\.images_per_class: 1 leaves this loss without a pair of one class"
        ):
            learner(loss={"name": name}, **single)
    check_draw(BatchConfig(images_per_class=1, draw="two_draws"), has_classes=False)


def test_a_trial_of_too_long_a_warm_up_fails_with_its_line() -> None:
    with pytest.raises(
        ValueError, match=r"training\.warmup_steps: 6 is not shorter than the 6 batches of 2 epochs"
    ):
        failing_trial(config(training__warmup_steps=6))
