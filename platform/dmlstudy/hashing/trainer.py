"""A hashing model in training on frozen features; knows no Ray and no labels.

Shapes: N rows, F features.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from dmlstudy.hashing.model import HashingModel, build, check_features
from dmlstudy.heartbeat import beat
from dmlstudy.metric_names import TRAIN_LOSS
from dmlstudy.records import HashingConfig, TrainingConfig, TrialReport


class HashingFailed(RuntimeError):
    """Training that cannot go on, with the reason."""


class HashingTrainer:
    """A hashing model in training on frozen features: ``model``, its ``optimizer``, its random ``generator``.

    A pass takes the rows in an order drawn from (seed, epoch), in batches of ``hashing.batch_size`` and without the
    rest (all rows as one batch where there are fewer). Equal configurations and features on one machine give equal
    models, bit for bit. Raises ValueError for fewer than 2 rows, wrong features or a setting that has no meaning.
    """

    def __init__(
        self, config: HashingConfig, x_NF: NDArray[np.float32], device: torch.device | None = None
    ) -> None:
        check_features("training features", x_NF, x_NF.shape[-1])
        if len(x_NF) < 2:
            raise ValueError(f"training features: {len(x_NF)} rows; needs at least 2")
        self.config = config
        term = config.regularizer
        device = device or torch.device("cpu")
        self.model = build(
            config.loss.name,
            config.hashing.num_bits,
            x_NF.shape[1],
            config.loss.params,
            term=(term.name, term.params) if term else None,
            seed=config.seed,
        ).to(device)
        self._x_NF = torch.from_numpy(x_NF).to(device)
        self.model.prepare(self._x_NF, standardize=config.hashing.standardize)
        self.optimizer = _optimizer(config.training, self.model)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.model.eval()

    def train_epoch(self, epoch: int) -> dict[str, float]:
        """One pass: ``train_loss``, its parts ``method_loss`` and ``ranking_loss``, and ``rows_per_second``.

        The losses are means over the batches. Raises HashingFailed when the loss stops being finite.
        """
        num_rows = len(self._x_NF)
        batch_size = min(self.config.hashing.batch_size, num_rows)
        order_N = np.random.default_rng([self.config.seed, epoch]).permutation(num_rows)
        losses: list[list[float]] = []
        self.model.train()
        started = time.perf_counter()
        for start in range(0, num_rows - batch_size + 1, batch_size):
            rows = torch.from_numpy(order_N[start : start + batch_size]).to(self._x_NF.device)
            loss = self.model(self._x_NF[rows], self.generator)
            losses.append([value.item() for value in loss])
            beat()
            if not math.isfinite(losses[-1][0]):
                raise HashingFailed(f"epoch {epoch + 1}, batch {len(losses)}: the loss is {losses[-1][0]}")
            self.optimizer.zero_grad(set_to_none=True)
            loss.total.backward()
            self.optimizer.step()
        elapsed = time.perf_counter() - started
        self.model.eval()
        means = [statistics.fmean(values) for values in zip(*losses, strict=True)]
        metrics = dict(zip((TRAIN_LOSS, "method_loss", "ranking_loss"), means, strict=True))
        return metrics | {"rows_per_second": len(losses) * batch_size / elapsed}


def train_hashing(
    config: HashingConfig,
    x_NF: NDArray[np.float32],
    report: Callable[[TrialReport, HashingModel], None],
    *,
    device: torch.device | None = None,
) -> HashingModel:
    """The model after ``training.epochs`` passes over the features; after each it is handed to ``report`` too.

    What ``report`` raises ends the training. Raises as ``HashingTrainer``.
    """
    trainer = HashingTrainer(config, x_NF, device)
    for epoch in range(config.training.epochs):
        report(TrialReport(step=epoch + 1, metrics=trainer.train_epoch(epoch)), trainer.model)
    return trainer.model


def check_training(training: TrainingConfig) -> None:
    """Raise ValueError for a key of a recipe that is of networks alone."""
    for key in TrainingConfig.LATER:
        if key != "deterministic" and getattr(training, key) != TrainingConfig.model_fields[key].default:
            raise ValueError(f"training.{key}: belongs to the training of embedders; leave it out")


def _optimizer(training: TrainingConfig, model: HashingModel) -> torch.optim.Optimizer:
    if training.freeze_backbone_epochs or training.loss_lr_mult != 1:
        raise ValueError(
            "training.freeze_backbone_epochs and training.loss_lr_mult mean nothing on frozen features; leave them out"
        )
    check_training(training)
    groups = [{"params": list(model.method.parameters()), "lr": training.lr}]
    if model.structure is not None:
        head = list(model.structure.parameters())
        groups.append({"params": head, "lr": training.lr * training.head_lr_mult})
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=training.lr, momentum=0.9, weight_decay=training.weight_decay)
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=training.lr, weight_decay=training.weight_decay)
