"""The gradient of a batch in chunks is that of the batch at once, whatever the embedder and the trial are made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, steady, trial
from torch import Tensor, nn

from dmlstudy import data, distributed, heartbeat
from dmlstudy.records import BatchConfig, TrialConfig
from dmlstudy.spec import study_file
from dmlstudy.training import exactness
from dmlstudy.training.embedder_trainer import EmbedderTrainer
from dmlstudy.training.gradients import InChunks, gradients_of
from dmlstudy.training.interface import TrialFailed
from dmlstudy.training.step import Step
from dmlstudy.training.tasks import embedding_checks

CASE = exactness.CASES["contrastive"]
STRUCTURED = exactness.CASES["contrastive + structure"]


def learner(**changes: Any) -> EmbedderTrainer:
    images = data.load("digits").development
    raw = config(**({"batch": {"classes": 4, "images_per_class": 5, "per_epoch": 2}} | changes))
    return EmbedderTrainer(TrialConfig.model_validate(raw), images, torch.device("cpu"), stream=0)


def gradients(step: Step) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in step.named_parameters() if p.grad is not None}


def in_float64(case: exactness.Case, backbone: nn.Module | None = None) -> Step:
    """A step of random weights, with another backbone if one is given."""
    step = exactness.step_of(case)
    if backbone is not None:
        step.embedder.backbone = backbone
    return step.double()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "memory": {"batch__memory_size": 30, "loss": {"name": "contrastive"}},
    "structure head": {"regularizer": {"name": "structure"}},
    "layers": {"embedder": {"dim": 9, "width": 4, "head_depth": 2}, "loss": {"name": "adaptive_bound"}},
    "fused heads": {"embedder": {"dim": 9, "width": 4, "fusion": "heads", "head_norm": True}},
    "no head": {"embedder": {"dim": 256, "width": 4, "head": "none"}},
    "norms": {"loss": {"name": "adaface", "params": {"t_alpha": 0.1}}},
    "norms that are trained": {"loss": {"name": "magface"}},
    "proxies": {"loss": {"name": "proxy_anchor"}, "training__loss_lr_mult": 10.0},
    "frozen first": {"training__freeze_backbone_epochs": 2},
    "channels last": {"training__channels_last": True},
    "views": {"augmentation": {"crop": "random", "padding": 1}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_ten_steps_of_adam_are_those_of_the_whole_batch(name: str) -> None:
    """After each, alpha of the layers has moved: the second pass must find that of the first."""
    batch = {"classes": 4, "images_per_class": 5, "per_epoch": 2}
    options = {"batch": batch, "training__lr": 1e-3} | OPTIONS[name]
    memory = options.pop("batch__memory_size", 0)
    whole = learner(**options | {"batch": batch | {"memory_size": memory}})
    chunked = learner(**options | {"batch": batch | {"memory_size": memory, "chunk": 7}})
    for epoch in range(5):
        expected, found = whole.train_epoch(epoch), chunked.train_epoch(epoch)
        assert steady(found).keys() == steady(expected).keys()
        assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
    for (part, a), b in zip(whole.state().items(), chunked.state().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=part)


def test_one_step_with_layers_has_the_gradient_of_the_weights_before_it() -> None:
    found = []
    for chunk in (None, 7):
        one = learner(
            embedder={"dim": 9, "width": 4, "head_depth": 2},
            loss={"name": "adaptive_bound", "params": {"beta": 0.5}},
            batch={"classes": 4, "images_per_class": 5, "per_epoch": 1, "chunk": chunk},
        )
        one.train_epoch(0)
        found.append(gradients(one.module))
        assert one.embedder.layers is not None
        assert len(set(one.embedder.layers[1])) > 1  # they have moved
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() < 1e-4 * gradient.norm(), name


def test_dropout_draws_what_encoding_chunk_by_chunk_draws() -> None:
    """One backward through all chunks is the truth; random numbers go on from where it leaves them."""
    batch, found, states = exactness.whole_batch(0), [], []
    for is_truth in (True, False):
        backbone = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh())
        with torch.no_grad():
            for number, weight in enumerate(backbone.parameters()):
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
        step = in_float64(STRUCTURED, backbone)
        torch.manual_seed(3)
        if is_truth:
            x, labels = batch
            parts = [step.encode(part) for part in x.split(7)]
            omegas = [omega for _, omega in parts if omega is not None]
            total, count, _ = step.compare((torch.cat([z for z, _ in parts]), torch.cat(omegas)), labels)
            (total / count).backward()
        else:
            gradients_of(step, 7)(*batch)
        found.append(gradients(step))
        states.append(torch.get_rng_state())
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-12, atol=1e-14, msg=name)
    assert torch.equal(*states)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_both_passes_find_the_same_embeddings_in_lower_precision(precision: str) -> None:
    one = learner(training__precision=precision, batch={"classes": 4, "images_per_class": 5, "chunk": 6})
    seen: list[Tensor] = []
    encode = one.module.encode

    def seeing(images: Tensor) -> tuple[Tensor, Tensor | None]:
        z_ND, omega_ND = encode(images)
        seen.append(z_ND.detach().clone())
        return z_ND, omega_ND

    one.module.encode = seeing  # type: ignore[method-assign]
    images = torch.from_numpy(one.images.read(np.arange(20)))
    assert one.gradients is not None
    one.gradients(images, distributed.asked(torch.arange(20) % 4, torch.arange(20)))
    first, second = seen[:4], seen[4:]
    assert torch.equal(torch.cat(first), torch.cat(second))


def test_gradients_of_fp16_carry_the_scale_once() -> None:
    found = []
    for chunk in (None, 6):
        batch = {"classes": 4, "images_per_class": 5, "per_epoch": 1, "chunk": chunk}
        one = learner(training__precision="fp16", training__optimizer="sgd", batch=batch)
        one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = one.embedder.head.get_parameter("weight").detach().clone()
        one.train_epoch(0)
        found.append(one.embedder.head.get_parameter("weight").detach() - before)
        assert one.scaler.get_scale() == 1024
        one.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
        before = one.embedder.head.get_parameter("weight").detach().clone()
        one.train_epoch(1)  # overflows, and is left out
        assert torch.equal(before, one.embedder.head.get_parameter("weight"))
        assert one.scaler.get_scale() == 2.0**125
    assert (found[0] - found[1]).norm() < 5e-3 * found[0].norm()


def test_a_study_file_gives_or_searches_the_key() -> None:
    raw: dict[str, Any] = {
        "name": "chunks",
        "data": {"name": "digits"},
        "batch": {"chunk": 16},
        "families": {
            "a": {"space": "contrastive"},
            "b": {"space": "contrastive", "override": {"batch.chunk": {"int": [8, 64], "default": 32}}},
        },
    }
    found = study_file.parse(raw)
    for name, chunk in (("a", 16), ("b", 32)):
        family = found.families[name]
        given = found.trial_config(family, study_file.default_values(family))
        assert given.batch.chunk == chunk
        assert found.task.logged_params(given)["batch.chunk"] == chunk
    with pytest.raises(study_file.SpecError, match=r"chunk: input should be greater than 0"):
        study_file.parse(raw | {"batch": {"chunk": 0}})


def test_batch_statistics_are_refused_before_a_trial_begins() -> None:
    raw = config(embedder={"backbone": "resnet18", "freeze_bn": False}, batch={"chunk": 8})
    given = TrialConfig.model_validate(raw)
    message = r"families\.x\.batch\.chunk: 8 cannot give the batch statistics.*set embedder\.freeze_bn: true, or leave"
    with pytest.raises(ValueError, match=message):
        embedding_checks.check(given, "families.x")
    with pytest.raises(ValueError, match=r"^batch\.chunk: 8 cannot"):
        learner(**raw)


class Counting(nn.Module):
    """A module that remembers something of the images it has seen in training."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor([0.0, torch.nan]))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += float(len(x) > 0)
        return x


def refused_of(split: tuple[int, ...]) -> str:
    rank = distributed.rank()
    rows = slice(sum(split[:rank]), sum(split[: rank + 1]))
    step = in_float64(CASE, nn.Sequential(nn.Linear(6, 8), Counting()))
    try:
        x, y, ids = (part[rows] for part in exactness.global_batch(0))
        gradients_of(step, 4)(x, distributed.asked(y, ids))
    except distributed.Refused as error:
        assert not gradients(step)
        return str(error)
    return "not refused"


@pytest.mark.parametrize("split", [(24,), (24, 0)])
def test_what_remembers_images_is_refused_by_all_ranks(pool: GlooPool, split: tuple[int, ...]) -> None:
    (said,) = set(pool.run(len(split), refused_of, split))
    assert said.startswith(
        "batch.chunk: 4 needs an embedder that training images change by their gradient alone, and"
    )
    assert "backbone.1.seen; set embedder.freeze_bn: true" in said
    assert "\n" not in said


def test_a_trial_of_such_a_module_fails_in_one_line() -> None:
    one = learner(batch={"classes": 4, "images_per_class": 5, "chunk": 7})
    one.embedder.backbone = nn.Sequential(one.embedder.backbone, Counting())
    with pytest.raises(TrialFailed, match=r"^epoch 1, batch 1: batch\.chunk: 7 needs .*1\.seen"):
        one.train_epoch(0)


def test_a_buffer_that_stays_not_a_number_has_not_changed() -> None:
    backbone = nn.Sequential(nn.Linear(6, 8), Counting())
    backbone[1].forward = lambda x: x
    gradients_of(in_float64(CASE, backbone), 4)(*exactness.whole_batch(0))


def test_a_frozen_backbone_sees_each_image_once_and_a_trained_one_twice() -> None:
    one = learner(
        training__freeze_backbone_epochs=1,
        batch={"classes": 4, "images_per_class": 5, "per_epoch": 1, "chunk": 6},
    )
    sizes: list[int] = []
    one.embedder.backbone.register_forward_hook(lambda _module, inputs, _out: sizes.append(len(inputs[0])))
    for epoch, expected in enumerate(([6, 6, 6, 2], [6, 6, 6, 2] * 2)):
        sizes.clear()
        one.train_epoch(epoch)
        assert sizes == expected


def test_each_chunk_is_a_sign_of_life() -> None:
    beats = []
    with heartbeat.heard_by(lambda: beats.append(1), every_s=0):
        gradients_of(in_float64(CASE), 5)(*exactness.whole_batch(0))
    assert len(beats) == 10


@pytest.mark.parametrize("chunk", [None, 4])
def test_images_stay_until_the_loss_is_read(chunk: int | None) -> None:
    # Pinned memory is copied without waiting. Nothing else keeps that memory from being filled anew.
    images_NHWC, labels = exactness.whole_batch(0)
    kept = weakref.ref(images_NHWC)
    mean = gradients_of(in_float64(CASE), chunk)(images_NHWC, labels)
    del images_NHWC
    assert mean.read() > 0
    assert kept() is not None
    del mean
    assert kept() is None


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_loss_that_is_not_finite_is_refused_where_it_is_read(chunk: int | None) -> None:
    step = in_float64(CASE)
    with torch.no_grad():
        step.embedder.backbone.get_submodule("0").get_parameter("bias").fill_(torch.nan)
    mean = gradients_of(step, chunk)(*exactness.whole_batch(0))
    with pytest.raises(distributed.Refused, match="rank 0: the embeddings of 24 of 24 images are not finite"):
        mean.read()


class Live:
    """Bytes of activations that autograd keeps for backward, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> Saved:
        return Saved(tensor.detach(), self)  # an output that is kept as it is would keep itself

    def measured(self, call: Callable[[], object]) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda saved: saved.tensor):
            call()
        return self.most


class Saved:
    """A tensor that autograd has kept, counted until it is let go of."""

    def __init__(self, tensor: Tensor, live: Live) -> None:
        self.tensor, self.live = tensor, live
        live.now += tensor.nbytes
        live.most = max(live.most, live.now)

    def __del__(self) -> None:
        self.live.now -= self.tensor.nbytes


def test_activations_are_those_of_one_chunk() -> None:
    peaks = []
    for chunk in (None, 32):
        one = learner(batch={"classes": 4, "images_per_class": 5, "chunk": chunk})
        images = torch.from_numpy(one.images.read(np.arange(256)))
        batch = images, distributed.asked(torch.arange(256) % 4, torch.arange(256))
        assert one.gradients is not None
        live = Live()
        peaks.append(live.measured(lambda one=one, batch=batch: one.gradients(*batch)))  # type: ignore[misc]
        assert live.now == 0
    assert peaks[1] < peaks[0] / 4


def of_different_starts() -> dict[str, Tensor]:
    step = in_float64(CASE)
    with torch.no_grad():
        for parameter in step.parameters():
            parameter += distributed.rank()
    assert isinstance(gradients_of(step, 4), InChunks)
    return {name: parameter.detach() for name, parameter in step.named_parameters()}


def test_ranks_begin_as_rank_0_does(pool: GlooPool) -> None:
    first, second = pool.run(2, of_different_starts)
    for name, weight in in_float64(CASE).named_parameters():
        assert torch.equal(first[name], weight)
        assert torch.equal(second[name], weight)


def averaged(bucket_bytes: int) -> list[Tensor | None]:
    distributed.BUCKET_BYTES = bucket_bytes
    shapes = [(3,), (2, 3, 4, 5), (4,), (5,), (2,)]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    parameters[1].data = parameters[1].data.to(memory_format=torch.channels_last)
    parameters[2].data = parameters[2].data.double()
    parameters[4].requires_grad_(False)
    rank = distributed.rank()
    for number in (0, 1, 2) if rank else (1, 2):
        size = torch.arange(parameters[number].numel(), dtype=parameters[number].dtype)
        parameters[number].grad = (
            size.view(parameters[number].shape).mul(1 + rank).to(memory_format=torch.channels_last)
            if number == 1
            else size * (1 + rank)
        )
    distributed.average_gradients(parameters)
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("bucket_bytes", [1, 20, 2**20])
def test_gradients_are_averaged_by_hand(pool: GlooPool, bucket_bytes: int) -> None:
    """A rank without one counts as zeros; where no rank has one, and of what is not trained, there is none."""
    for found in pool.run(2, averaged, bucket_bytes):
        assert torch.equal(found[0], torch.arange(3.0))  # 0 and 2 x
        assert torch.equal(found[1], 1.5 * torch.arange(120.0).view(2, 3, 4, 5))
        assert torch.equal(found[2], 1.5 * torch.arange(4.0, dtype=torch.float64))
        assert found[3] is None
        assert found[4] is None


def test_two_ranks_train_in_chunks_as_one_does(pool: GlooPool) -> None:
    raw = config(batch__chunk=7, training__freeze_backbone_epochs=1, num_folds=1)
    (alone,) = pool.run(1, trial, raw)
    (whole,) = pool.run(1, trial, config(training__freeze_backbone_epochs=1, num_folds=1))
    for reports, result in [alone, *pool.run(2, trial, raw)]:
        losses = [report["train_loss"] for report in reports]
        np.testing.assert_allclose(losses, [r["train_loss"] for r in whole[0]], rtol=1e-5)
        assert result["map_at_r"] == pytest.approx(whole[1]["map_at_r"], abs=5e-3)


def test_a_trial_in_chunks_that_was_broken_off_ends_with_the_same_digits(tmp_path: Path) -> None:
    raw = config(batch__chunk=9, num_folds=1)
    _, result = trial(raw)
    _, again, attempts = broken_trial(raw, str(tmp_path), "epoch")
    assert attempts > 1
    assert steady(again) == steady(result)


def test_a_batch_without_chunks_is_written_as_it_was() -> None:
    assert "chunk" not in BatchConfig().model_dump()
    assert BatchConfig(chunk=8).model_dump()["chunk"] == 8
    plain = TrialConfig.model_validate(config())
    assert plain.fingerprint() == TrialConfig.model_validate(config(batch__chunk=None)).fingerprint()
    assert plain.fingerprint() != TrialConfig.model_validate(config(batch__chunk=8)).fingerprint()


@pytest.mark.long
def test_compiled_chunks_are_the_eager_ones() -> None:
    """With a frozen epoch, so that features are compiled too."""
    options = {"training__freeze_backbone_epochs": 1}
    batch = {"classes": 4, "images_per_class": 5, "per_epoch": 2, "chunk": 7}
    eager = learner(batch=batch, **options)
    compiled = learner(batch=batch, training__compile=True, **options)
    for epoch in range(2):
        losses = [one.train_epoch(epoch)["train_loss"] for one in (eager, compiled)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for a, b in zip(eager.embedder.parameters(), compiled.embedder.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
