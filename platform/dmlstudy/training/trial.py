"""One trial: train an embedder with one configuration and say how good it is, fold by fold, epoch by epoch.

``run_trial`` knows no Ray and no MLflow: ``report`` is a callable, so a test runs a trial with a lambda.
It runs on every rank alike; what is global (batches, losses, scores) is the same number on each.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmlstudy import data, distributed, embedders, retrieval
from dmlstudy.data import ImageSet, PKBatches, ZeroShotData
from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings, Loss, LossSum
from dmlstudy.losses.memory import CrossBatchMemory
from dmlstudy.records import LossConfig, TrainingConfig, TrialConfig, TrialReport, TrialResult
from dmlstudy.training.checkpoint import MIN_SECONDS_BETWEEN, Checkpoint

NUM_EXAMPLES = 8
"""Test images whose embeddings are kept with a saved embedder, as proof of what it computed in training."""

Report = Callable[[TrialReport], None]


class TrialStopped(Exception):
    """Raised by ``report``, on every rank at once, to end a trial early."""


class TrialFailed(RuntimeError):
    """A trial that cannot go on, with the reason; raised on every rank at once."""


def run_trial(
    config: TrialConfig,
    report: Report,
    *,
    device: torch.device | None = None,
    save_to: Path | None = None,
    checkpoint: str | Path | None = None,
    min_seconds_between: float = MIN_SECONDS_BETWEEN,
) -> TrialResult:
    """Train and evaluate one configuration.

    Phase ``search``: for each class-disjoint fold of the development classes, train from scratch and
    evaluate on the fold's validation classes after every epoch. The reported objective after epoch e of
    fold f is the mean of the finished folds' last scores and this epoch's, so its fidelity only grows.
    Phase ``verdict``: train on all development classes and evaluate once, at the end, on the test classes. With
    ``fold_models`` a model is trained for each fold as well, and scored on the test classes twice: each by itself
    ('test_separate_', the mean over folds), and all together as one embedding, the concatenation
    ('test_concatenated_').

    Rank 0 writes the embedder of a verdict trial to ``save_to``. Raises TrialFailed when the loss or an
    embedding stops being finite, and lets TrialStopped from ``report`` pass.

    In the folder ``checkpoint``, a path or a URI, which belongs to this trial alone and is seen by all ranks, rank 0
    keeps the trial's state, after the report of an epoch and at most every ``min_seconds_between`` (0: always). A
    call that finds it there makes its reports again, as they were, goes on from it and gives, on as many ranks,
    the further reports and the result of an unbroken trial, bit for bit. The state after the last epoch
    is always kept, and none is removed here, however the trial ends: so the caller may be killed until it has
    recorded the result, and call again for it. Raises ValueError for the state of another configuration.
    """
    device = device or torch.device("cpu")
    kept = Checkpoint(checkpoint, config.fingerprint(), min_seconds_between)
    dataset = _dataset(config.data.name, config.data.path, config.data.image_size)
    if config.phase == "verdict":
        return _verdict(config, dataset, report, device, save_to, kept)
    return _cross_validate(config, dataset, report, device, kept)


@functools.lru_cache(maxsize=1)
def _dataset(name: str, path: str | None, image_size: int | None) -> ZeroShotData:
    return data.load(name, path, image_size)


def _cross_validate(
    config: TrialConfig, dataset: ZeroShotData, report: Report, device: torch.device, kept: Checkpoint
) -> TrialResult:
    development = dataset.development
    folds = data.class_disjoint_folds(development.labels_N, config.num_folds, config.seed)
    num_epochs = max(config.training.epochs, 1)
    first_fold, first_epoch, scores_of_finished, tensors, reported = kept.load()
    reports = _Reports(report, reported)
    finished = list(scores_of_finished)
    for number, fold in enumerate(folds[first_fold:], first_fold):
        learner = _Learner(config, development.select(fold.train_indices), device, stream=number)
        validation = development.select(fold.validation_indices)
        scores: dict[str, float] = {}
        if first_epoch:
            learner.restore(tensors, first_epoch)
        for epoch in range(first_epoch, num_epochs):
            progress = learner.train_epoch(epoch)
            scores = learner.evaluate(validation, config.recall_at)
            step = number * num_epochs + epoch + 1
            reports.make(step, _mean([*finished, scores]) | progress)
            if epoch + 1 < num_epochs:
                kept.offer(number, epoch + 1, finished, learner.state, reports.made)
        finished.append(scores)
        kept.offer(number + 1, 0, finished, dict, reports.made, is_last=number + 1 == len(folds))
        first_epoch = 0
    metrics = _mean(finished) | _spread(finished, config.objective)
    if config.measure_latency:
        learner = _Learner(config, development.select(folds[0].train_indices), device, stream=0)
        if distributed.rank() == 0:  # alone, for ranks of one machine would share its cores
            image_HWC = development.images_NHWC[0]
            metrics["embed_ms_per_image"] = embedders.latency_ms(learner.embedder, image_HWC, device)
    return TrialResult(metrics=metrics)


def _verdict(
    config: TrialConfig,
    dataset: ZeroShotData,
    report: Report,
    device: torch.device,
    save_to: Path | None,
    kept: Checkpoint,
) -> TrialResult:
    development, test = dataset.development, dataset.test
    folds = (
        data.class_disjoint_folds(development.labels_N, config.num_folds, config.seed)
        if config.fold_models
        else []
    )
    metrics: dict[str, float] = {}
    num_epochs = config.training.epochs
    first_model, first_epoch, _, tensors, reported = kept.load()
    reports = _Reports(report, reported)
    fold_embeddings: list[NDArray[np.float32]] = [
        tensors[f"fold_embeddings.{number}"].numpy() for number in range(first_model)
    ]

    def train(learner: _Learner, model: int) -> None:
        """All its epochs, or those that are left; ``model`` counts the folds' models, and the last is of all."""

        def state() -> dict[str, Tensor]:
            done = {f"fold_embeddings.{i}": torch.from_numpy(z) for i, z in enumerate(fold_embeddings)}
            return learner.state() | done

        start = first_epoch if model == first_model else 0
        if start:
            learner.restore(tensors, start)
        for epoch in range(start, num_epochs):
            step = model * num_epochs + epoch + 1
            reports.make(step, learner.train_epoch(epoch))
            is_last = model == len(folds) and epoch + 1 == num_epochs
            kept.offer(model, epoch + 1, [], state, reports.made, is_last=is_last)

    for number, fold in enumerate(folds[first_model:], first_model):
        learner = _Learner(config, development.select(fold.train_indices), device, stream=number + 1)
        train(learner, number)
        fold_embeddings.append(learner.embed(test))
    if folds:
        separate = [retrieval.evaluate(z_ND, test.labels_N, config.recall_at) for z_ND in fold_embeddings]
        together_NE = np.concatenate(fold_embeddings, axis=1) / math.sqrt(len(folds))
        ensemble = retrieval.evaluate(together_NE, test.labels_N, config.recall_at)
        metrics |= {f"test_separate_{name}": score for name, score in _mean(separate).items()}
        metrics |= {f"test_concatenated_{name}": score for name, score in ensemble.items()}
    learner = _Learner(config, development, device, stream=0)
    train(learner, len(folds))
    metrics |= {f"test_{name}": score for name, score in learner.evaluate(test, config.recall_at).items()}
    if save_to is not None and distributed.rank() == 0:
        provenance: dict[str, Any] = {
            "family": config.family,
            "trained_on": dataset.name,
            "development_fingerprint": development.fingerprint(),
            "test_fingerprint": test.fingerprint(),
            "num_shared_images": dataset.num_shared_images,
            "workers": distributed.world_size(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "config": config.model_dump(mode="json"),
        }
        embedders.save(learner.embedder, save_to, provenance, test.images_NHWC[:NUM_EXAMPLES])
    return TrialResult(metrics=metrics, embedder_folder=None if save_to is None else str(save_to))


class _Reports:
    """What a trial has reported; what it has reported before it was broken off is reported again at once."""

    def __init__(self, report: Report, earlier: Sequence[TrialReport]) -> None:
        self._report = report
        self.made: list[TrialReport] = []
        for each in earlier:
            self.make(each.step, each.metrics)

    def make(self, step: int, metrics: dict[str, float]) -> None:
        self.made.append(TrialReport(step=step, metrics=metrics))
        self._report(self.made[-1])


def _mean(scores: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(score[name] for score in scores) for name in scores[0]}


def _spread(scores: list[dict[str, float]], objective: str) -> dict[str, float]:
    """The objective per fold and, with two folds or more, its standard error over them."""
    values = [score[objective] for score in scores]
    spread = {f"fold_{number}_{objective}": value for number, value in enumerate(values)}
    if len(values) > 1:
        spread[f"{objective}_stderr"] = statistics.stdev(values) / math.sqrt(len(values))
    return spread


class _Step(nn.Module):
    """Images of this rank to the sum of its loss terms: embed, gather the global batch, compare."""

    def __init__(self, embedder: embedders.Embedder, loss: Loss, memory: CrossBatchMemory | None) -> None:
        super().__init__()
        self.embedder = embedder
        self.loss = loss
        # In a tuple, data parallel does not see it: it is the same on all ranks and need not be sent to them.
        self.memory = (memory,)

    def forward(self, images_NHWC: Tensor, y_N: Tensor, id_N: Tensor) -> tuple[Tensor, Tensor]:
        z_ND, structure_ND = self.embedder.embed_with_structure(images_NHWC)
        anchors = Embeddings(z_ND, y_N, id_N, structure_ND)
        references = distributed.gather(anchors)
        (memory,) = self.memory
        if memory is not None:
            references = memory.references(references)
        total, count = self.loss(anchors, references, distributed.world())
        return total, count


class _Learner:
    """An embedder in training on one set of classes."""

    def __init__(self, config: TrialConfig, train: ImageSet, device: torch.device, *, stream: int) -> None:
        self.config = config
        self.device = device
        self.seed = _derived_seed(config.seed, stream)
        present, labels_N = np.unique(train.labels_N, return_inverse=True)
        self.images_NHWC = train.images_NHWC
        self.labels_N = labels_N.astype(np.int64)
        _, height, width, channels = train.images_NHWC.shape
        regularizer = config.regularizer
        self.embedder = embedders.build(
            config.embedder.backbone,
            config.embedder.dim,
            width=config.embedder.width,
            weights=config.embedder.weights,
            freeze_bn=config.embedder.freeze_bn,
            in_channels=channels,
            image_size=(height, width),
            structure=_structure_head(regularizer),
            seed=self.seed,
        ).to(device)
        batch = config.batch
        loss = catalogue.build(
            config.loss.name,
            config.loss.params,
            regularizer=(regularizer.name, regularizer.params) if regularizer else None,
            memory=batch.memory_size > 0,
            num_classes=len(present),
            dim=config.embedder.dim,
            seed=self.seed,
        ).to(device)
        self.batches = PKBatches(
            self.labels_N,
            len(present) if batch.classes == "all" else batch.classes,
            batch.images_per_class,
            batch.per_epoch,
            self.seed,
        )
        memory = (
            CrossBatchMemory(batch.memory_size, config.embedder.dim, batch.memory_warmup).to(device)
            if batch.memory_size
            else None
        )
        self.parts = {"embedder": self.embedder, "loss": loss} | ({"memory": memory} if memory else {})
        step = _Step(self.embedder, loss, memory)
        self.optimizer = _optimizer(config.training, self.embedder, loss)
        self.step = distributed.data_parallel(step)
        self.num_epochs = 0

    def train_epoch(self, epoch: int) -> dict[str, float]:
        """One pass of PK batches; the mean loss and the images per second over all ranks."""
        if self.config.training.epochs == 0:
            return {}
        self.num_epochs = epoch + 1
        self.embedder.train()
        backbone_frozen = epoch < self.config.training.freeze_backbone_epochs
        losses: list[float] = []
        num_images = 0
        started = time.perf_counter()
        for number, batch in enumerate(self.batches.epoch(epoch)):
            local = batch[distributed.own_slice(len(batch))]
            images_NHWC = torch.from_numpy(self.images_NHWC[local]).to(self.device)
            y_N = torch.from_numpy(self.labels_N[local]).to(self.device)
            id_N = torch.from_numpy(local.astype(np.int64)).to(self.device)
            try:
                total, count = self.step(images_NHWC, y_N, id_N)
            except ValueError as error:
                if distributed.world_size() > 1 and not isinstance(error, distributed.Refused):
                    raise  # other ranks may know nothing of it, and wait for this one
                raise TrialFailed(f"epoch {epoch + 1}, batch {number + 1}: {error}") from None
            objective, mean = distributed.scaled_for_mean(LossSum(total, count))
            if not math.isfinite(mean):
                raise TrialFailed(f"epoch {epoch + 1}, batch {number + 1}: the loss is {mean}")
            self.optimizer.zero_grad(set_to_none=True)
            objective.backward()  # type: ignore[no-untyped-call]
            if backbone_frozen:
                for parameter in self.embedder.backbone.parameters():
                    parameter.grad = None
            self.optimizer.step()
            losses.append(mean)
            num_images += len(batch)
        elapsed = time.perf_counter() - started
        return {"train_loss": statistics.fmean(losses), "images_per_second": num_images / elapsed}

    def evaluate(self, images: ImageSet, recall_at: tuple[int, ...]) -> dict[str, float]:
        """Retrieval within ``images``; equal on each rank."""
        return retrieval.evaluate(self.embed(images), images.labels_N, recall_at)

    def embed(self, images: ImageSet) -> NDArray[np.float32]:
        """Embeddings of the images, found in shares by the ranks; all of them on each rank."""
        self._agree_on_statistics()
        share = distributed.own_slice(len(images.labels_N))
        local_ND = embedders.embed(self.embedder, images.images_NHWC[share], device=self.device)
        z_ND: NDArray[np.float32] = (
            distributed.gather_rows(torch.from_numpy(local_ND).to(self.device)).cpu().numpy()
        )
        if not np.isfinite(z_ND).all():
            raise TrialFailed(f"embeddings are not finite after epoch {self.num_epochs}")
        return z_ND

    def state(self) -> dict[str, Tensor]:
        """Everything that training has changed, by name; the tensors themselves, not copies."""
        state = dict(self._tensors())
        for index, of_parameter in self.optimizer.state_dict()["state"].items():
            for name, value in of_parameter.items():
                if value is not None:  # SGD's momentum before a parameter's first gradient
                    state[f"optimizer.{index}.{name}"] = value
        return state

    def restore(self, state: Mapping[str, Tensor], num_epochs: int) -> None:
        """Take over the ``state`` of a learner of the same configuration after that many epochs.

        Raises ValueError if its tensors are not this learner's.
        """
        own = dict(self._tensors())
        saved = {name: value for name, value in state.items() if name.partition(".")[0] in self.parts}
        differing = {name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape}
        if wrong := sorted(differing | (own.keys() ^ saved.keys())):
            raise ValueError(f"a trial's state does not fit its configuration: {', '.join(wrong[:5])}")
        with torch.no_grad():
            for name, value in own.items():
                if value.dtype == saved[name].dtype:  # in place: data parallel and the optimizer hold them
                    value.copy_(saved[name])
                else:  # a buffer that its module has replaced (pml:LargeMarginSoftmaxLoss)
                    part, _, path = name.partition(".")
                    owner, _, leaf = path.rpartition(".")
                    setattr(self.parts[part].get_submodule(owner), leaf, saved[name].to(value.device))
        of_parameters: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, value in state.items():
            part, _, rest = name.partition(".")
            if part == "optimizer":
                index, _, key = rest.partition(".")
                of_parameters[int(index)][key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": dict(of_parameters), "param_groups": groups})
        self.num_epochs = num_epochs

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers, also those that a state_dict leaves out."""
        for part, module in self.parts.items():
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                yield f"{part}.{name}", value

    def _agree_on_statistics(self) -> None:
        """Rank 0's batch statistics on every rank, as in the next step, and as they are kept and saved."""
        if distributed.world_size() == 1 or self.config.embedder.freeze_bn:
            return
        with torch.no_grad():
            for buffer in self.embedder.buffers():
                own = buffer if distributed.rank() == 0 else torch.zeros_like(buffer)
                buffer.copy_(distributed.sum_over_ranks(own))


def _derived_seed(seed: int, stream: int) -> int:
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])


def _structure_head(regularizer: LossConfig | None) -> str:
    """The structure head a regulariser trains: its preset, or none."""
    if regularizer is None or regularizer.name != "structure":
        return "none"
    return str((catalogue.parameters_of("structure") | regularizer.params)["preset"])


def _optimizer(training: TrainingConfig, embedder: embedders.Embedder, loss: Loss) -> torch.optim.Optimizer:
    heads = list(embedder.head.parameters())
    if embedder.structure_head is not None:
        heads += embedder.structure_head.parameters()
    groups = [
        {"params": list(embedder.backbone.parameters()), "lr": training.lr},
        {"params": heads, "lr": training.lr * training.head_lr_mult},
        {
            "params": list(loss.parameters()),
            "lr": training.lr * training.loss_lr_mult,
            "weight_decay": 0.0,
        },
    ]
    groups = [group for group in groups if group["params"]]
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=training.lr, momentum=0.9, weight_decay=training.weight_decay)
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=training.lr, weight_decay=training.weight_decay)
