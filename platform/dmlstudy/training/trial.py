"""One trial: train an embedder with one configuration and say how good it is, fold by fold, epoch by epoch.

``run_trial`` knows no Ray and no MLflow: ``report`` is a callable, so a test runs a trial with a lambda.
It runs on every rank alike; what is global (batches, losses, scores) is the same number on each.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
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

NUM_EXAMPLES = 8
"""Test images whose embeddings are kept with a saved embedder, as proof of what it computed in training."""

Report = Callable[[TrialReport], None]


class TrialStopped(Exception):
    """Raised by ``report``, on every rank at once, to end a trial early."""


class TrialFailed(RuntimeError):
    """A trial that cannot go on, with the reason; raised on every rank at once."""


def run_trial(
    config: TrialConfig, report: Report, *, device: torch.device | None = None, save_to: Path | None = None
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
    """
    device = device or torch.device("cpu")
    dataset = _dataset(config.data.name, config.data.path, config.data.image_size)
    if config.phase == "verdict":
        return _verdict(config, dataset, report, device, save_to)
    return _cross_validate(config, dataset, report, device)


@functools.lru_cache(maxsize=1)
def _dataset(name: str, path: str | None, image_size: int | None) -> ZeroShotData:
    return data.load(name, path, image_size)


def _cross_validate(
    config: TrialConfig, dataset: ZeroShotData, report: Report, device: torch.device
) -> TrialResult:
    development = dataset.development
    folds = data.class_disjoint_folds(development.labels_N, config.num_folds, config.seed)
    finished: list[dict[str, float]] = []
    for number, fold in enumerate(folds):
        learner = _Learner(config, development.select(fold.train_indices), device, stream=number)
        validation = development.select(fold.validation_indices)
        scores: dict[str, float] = {}
        for epoch in range(max(config.training.epochs, 1)):
            progress = learner.train_epoch(epoch)
            scores = learner.evaluate(validation, config.recall_at)
            step = number * max(config.training.epochs, 1) + epoch + 1
            report(TrialReport(step=step, metrics=_mean([*finished, scores]) | progress))
        finished.append(scores)
    return TrialResult(metrics=_mean(finished) | _spread(finished, config.objective))


def _verdict(
    config: TrialConfig, dataset: ZeroShotData, report: Report, device: torch.device, save_to: Path | None
) -> TrialResult:
    development, test = dataset.development, dataset.test
    folds = (
        data.class_disjoint_folds(development.labels_N, config.num_folds, config.seed)
        if config.fold_models
        else []
    )
    metrics: dict[str, float] = {}
    fold_embeddings: list[NDArray[np.float32]] = []
    for number, fold in enumerate(folds):
        learner = _Learner(config, development.select(fold.train_indices), device, stream=number + 1)
        _train(learner, config, report, first_step=number * config.training.epochs)
        fold_embeddings.append(learner.embed(test))
    if folds:
        separate = [retrieval.evaluate(z_ND, test.labels_N, config.recall_at) for z_ND in fold_embeddings]
        together_NE = np.concatenate(fold_embeddings, axis=1) / math.sqrt(len(folds))
        ensemble = retrieval.evaluate(together_NE, test.labels_N, config.recall_at)
        metrics |= {f"test_separate_{name}": score for name, score in _mean(separate).items()}
        metrics |= {f"test_concatenated_{name}": score for name, score in ensemble.items()}
    learner = _Learner(config, development, device, stream=0)
    _train(learner, config, report, first_step=len(folds) * config.training.epochs)
    metrics |= {f"test_{name}": score for name, score in learner.evaluate(test, config.recall_at).items()}
    if save_to is not None and distributed.rank() == 0:
        provenance: dict[str, Any] = {
            "family": config.family,
            "trained_on": dataset.name,
            "development_fingerprint": development.fingerprint(),
            "config": config.model_dump(mode="json"),
        }
        embedders.save(learner.embedder, save_to, provenance, test.images_NHWC[:NUM_EXAMPLES])
    return TrialResult(metrics=metrics, embedder_folder=None if save_to is None else str(save_to))


def _train(learner: _Learner, config: TrialConfig, report: Report, *, first_step: int) -> None:
    for epoch in range(config.training.epochs):
        report(TrialReport(step=first_step + epoch + 1, metrics=learner.train_epoch(epoch)))


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
            except ValueError as error:  # a loss refuses what it is given, on every rank at once
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
        share = distributed.own_slice(len(images.labels_N))
        local_ND = embedders.embed(self.embedder, images.images_NHWC[share], device=self.device)
        z_ND: NDArray[np.float32] = (
            distributed.gather_rows(torch.from_numpy(local_ND).to(self.device)).cpu().numpy()
        )
        if not np.isfinite(z_ND).all():
            raise TrialFailed(f"embeddings are not finite after epoch {self.num_epochs}")
        return z_ND


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
