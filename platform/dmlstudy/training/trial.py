"""One trial: train an embedder with one configuration and say how good it is, fold by fold, epoch by epoch.

``run_trial`` knows no Ray and no MLflow: ``report`` is a callable, so a test runs a trial with a lambda.
It runs on every rank alike; what is global (batches, losses, scores) is the same number on each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from dmlstudy import data, distributed, embedders, metric_names, retrieval
from dmlstudy.data import LabelledImages, ZeroShotData
from dmlstudy.data.images import Indices, Labels
from dmlstudy.records import (
    RetrievalConfig,
    TrialConfig,
    TrialReport,
    TrialResult,
)
from dmlstudy.training import dataset_cache
from dmlstudy.training.checkpoint import MIN_SECONDS_BETWEEN, Checkpoint
from dmlstudy.training.codes import run_hashing_trial
from dmlstudy.training.determinism import repeatable
from dmlstudy.training.learner import Embedded, Learner, TrialFailed
from dmlstudy.training.scores import mean, spread
from dmlstudy.training.streams import run_online_trial

OF_FOLDS = ("fold_embeddings", "fold_structure")
"""What a verdict trial's state calls the test embeddings of the folds' models."""

Report = Callable[[TrialReport], None]


class TrialStopped(Exception):
    """Raised by ``report``, on every rank at once, to end a trial early."""


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
    Phase ``verdict``: train on all development classes and evaluate once, at the end, on the test classes.

    With ``fold_models`` a model is trained for each fold as well, and scored on the test classes twice: each by
    itself ('test_separate_', the mean over folds), and all together as one embedding, the concatenation
    ('test_concatenated_').

    Rank 0 writes the embedder of a verdict trial to ``save_to``. Raises TrialFailed when the loss or an
    embedding stops being finite, and lets TrialStopped from ``report`` pass.

    In the folder ``checkpoint``, a path or a URI, which belongs to this trial alone and is seen by all ranks, rank 0
    keeps the trial's state, after the report of an epoch and at most every ``min_seconds_between`` (0: always). A
    call that finds it there makes its reports again, as they were, goes on from it and gives, on as many ranks,
    the further reports and the result of an unbroken trial, bit for bit.

    The state after the last epoch is always kept, and none is removed here, however the trial ends: so the caller may
    be killed until it has recorded the result, and call again for it. Raises ValueError for the state of another
    configuration.

    A configuration with ``hashing`` is ``codes.run_hashing_trial``'s, and one with ``online`` is
    ``streams.run_online_trial``'s; these keep no state: their trials are short.

    Losses and all that is scored are computed in full float32, whatever PyTorch was told (``embedders.precision``).
    """
    device = device or torch.device("cpu")
    try:
        with embedders.full_products(), repeatable(config.training.deterministic, device):
            if config.online is not None:
                return run_online_trial(config, report, save_to=save_to)
            if config.hashing is not None:
                return run_hashing_trial(config, report, device=device, save_to=save_to)
            kept = Checkpoint(checkpoint, config.fingerprint(), min_seconds_between)
            return _run_embedder_trial(config, report, device, save_to, kept)
    finally:
        if (
            device.type == "cuda"
        ):  # the next trial of this process, or another's on this GPU, needs other sizes
            torch.cuda.empty_cache()


def _run_embedder_trial(
    config: TrialConfig, report: Report, device: torch.device, save_to: Path | None, kept: Checkpoint
) -> TrialResult:
    dataset = dataset_cache.zero_shot(config.data)
    _agree_on(dataset)
    if config.phase == "verdict":
        return _verdict(config, dataset, report, device, save_to, kept)
    return _cross_validate(config, dataset, report, device, kept)


def _agree_on(dataset: ZeroShotData) -> None:
    """Raise TrialFailed, on every rank, where ranks have left out different damaged pictures."""
    if distributed.world_size() == 1:
        return
    own = hashlib.sha256(repr(dataset.damaged).encode()).digest()[:8]
    seen_W2 = torch.tensor([[int.from_bytes(own, "little", signed=True), dataset.num_damaged]])
    digest_W, num_damaged_W = distributed.gather_rows(seen_W2).T.tolist()
    if len(set(digest_W)) > 1:
        raise TrialFailed(
            f"workers see different data: {', '.join(map(str, num_damaged_W))} pictures cannot be decoded on ranks 0 to"
            f" {len(num_damaged_W) - 1}; give all nodes the same files"
        )


def _damaged(config: TrialConfig, dataset: ZeroShotData) -> dict[str, float]:
    """How many pictures were left out, where any may be."""
    return {"num_damaged_images": float(dataset.num_damaged)} if config.data.on_corrupt == "skip" else {}


def _judge(
    learner: Learner,
    images: LabelledImages,
    query: Indices | None = None,
    gallery: Indices | None = None,
) -> dict[str, float]:
    """Retrieval among the images by the learner's embeddings; each is query and gallery item, or as told."""
    embedded = learner.embed(images, structure=learner.config.retrieval.rerank == "structure")
    return _score(embedded, images.labels_N, query, gallery, learner.config)


def _score(
    embedded: Embedded, labels_N: Labels, query: Indices | None, gallery: Indices | None, config: TrialConfig
) -> dict[str, float]:
    """What ``_scores`` says, computed by rank 0 for all: every rank must call this."""
    return distributed.computed_once(lambda: _scores(embedded, labels_N, query, gallery, config))


def _scores(
    embedded: Embedded, labels_N: Labels, query: Indices | None, gallery: Indices | None, config: TrialConfig
) -> dict[str, float]:
    """Metrics of the retrieval that the configuration asks for.

    With re-ranking the plain names are of its order and 'first_stage_' of the one before; a verdict has the wall
    time of both stages too, which no two runs measure alike, and scores of clusters if wished for.
    """
    rerankers = _rerankers(embedded, config.retrieval)
    found = retrieval.compare(
        embedded.z_ND,
        labels_N,
        rerankers,
        config.retrieval.first if rerankers else 1,
        config.recall_at,
        query=query,
        gallery=gallery,
        map_at=[(k, denominator) for k in config.map_at for denominator in get_args(retrieval.Denominator)],
        full_map=config.full_map,
        macro=config.macro,
    )
    first_stage = found["none"]
    search_ms = first_stage.pop("ms_per_query")
    clusters: dict[str, float] = {}
    if config.clusters and config.phase == "verdict":
        clusters = retrieval.evaluate_clusters(embedded.z_ND, labels_N)
    if not rerankers:
        return first_stage | clusters
    scores = found[config.retrieval.rerank]
    rerank_ms = scores.pop("ms_per_query")
    scores |= {
        f"first_stage_{name}": score for name, score in first_stage.items() if not name.startswith("num_")
    }
    if config.phase == "verdict":
        scores |= {"search_ms_per_query": search_ms, "rerank_ms_per_query": rerank_ms}
    return scores | clusters


def _rerankers(embedded: Embedded, how: RetrievalConfig) -> dict[str, retrieval.Reranker]:
    """The one that is wished for, by its name."""
    z_ND, omega_ND = embedded
    if how.rerank == "k_reciprocal":
        encodings = retrieval.KReciprocal(z_ND, how.k1, how.k2, how.distance_weight)
        return {how.rerank: lambda row_Q, index_QK: encodings.order(row_Q, index_QK, how.first)}
    if omega_ND is not None:
        return {
            how.rerank: lambda row_Q, index_QK: retrieval.by_structure(
                z_ND[row_Q], omega_ND[row_Q], z_ND, index_QK, how.first
            )
        }
    return {}


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
        learner = Learner(config, development.select(fold.train_indices), device, stream=number)
        validation = development.select(fold.validation_indices)
        scores: dict[str, float] = {}
        if first_epoch:
            learner.restore(tensors, first_epoch)
        for epoch in range(first_epoch, num_epochs):
            progress = learner.train_epoch(epoch)
            scores = _judge(learner, validation)
            step = number * num_epochs + epoch + 1
            reports.make(step, mean([*finished, scores]) | progress)
            if epoch + 1 < num_epochs:
                kept.offer(number, epoch + 1, finished, learner.state, reports.made)
        finished.append(scores)
        kept.offer(number + 1, 0, finished, dict, reports.made, is_last=number + 1 == len(folds))
        first_epoch = 0
    metrics = mean(finished) | spread(finished, config.objective)
    if config.measure_latency:
        learner = Learner(config, development.select(folds[0].train_indices), device, stream=0)
        if distributed.rank() == 0:  # alone, for ranks of one machine would share its cores
            image_HWC = development.read(np.arange(1))[0]
            metrics[metric_names.LATENCY_MS] = embedders.latency_ms(learner.embedder, image_HWC, device)
    return TrialResult(metrics=metrics | _damaged(config, dataset))


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
    of_folds = [_kept_embeddings(tensors, number) for number in range(first_model)]
    has_structure = config.retrieval.rerank == "structure"

    def train(learner: Learner, model: int) -> None:
        """All its epochs, or those that are left; ``model`` counts the folds' models, and the last is of all."""

        def state() -> dict[str, Tensor]:
            done = {
                f"{name}.{number}": torch.from_numpy(columns)
                for number, embedded in enumerate(of_folds)
                for name, columns in zip(OF_FOLDS, embedded, strict=True)
                if columns is not None
            }
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
        learner = Learner(config, development.select(fold.train_indices), device, stream=number + 1)
        train(learner, number)
        of_folds.append(learner.embed(test, structure=has_structure))
    sides = dataset.test_query, dataset.test_gallery
    if folds:
        separate = [_score(embedded, test.labels_N, *sides, config) for embedded in of_folds]
        ensemble = _score(_concatenated(of_folds), test.labels_N, *sides, config)
        of_each = {metric_names.separate(name): score for name, score in mean(separate).items()}
        of_all = {metric_names.concatenated(name): score for name, score in ensemble.items()}
        metrics |= metric_names.all_on_test(of_each | of_all)
    learner = Learner(config, development, device, stream=0)
    train(learner, len(folds))
    scores = _judge(learner, test, *sides)
    metrics |= metric_names.all_on_test(scores) | _damaged(config, dataset)
    if save_to is not None and distributed.rank() == 0:
        provenance: dict[str, Any] = {
            "family": config.family,
            "trained_on": dataset.name,
            "development_fingerprint": dataset.development_fingerprint,
            "test_fingerprint": dataset.test_fingerprint,
            "num_shared_images": dataset.num_shared_images,
            "workers": distributed.world_size(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "config": config.model_dump(mode="json"),
        }
        embedders.save(
            learner.embedder,
            save_to,
            provenance,
            test.read(np.arange(min(dataset_cache.NUM_EXAMPLES, len(test)))),
            fit=dataset_cache.fit_of(config.data),
        )
    return TrialResult(metrics=metrics, embedder_folder=None if save_to is None else str(save_to))


def _kept_embeddings(tensors: Mapping[str, Tensor], number: int) -> Embedded:
    """The test embeddings of a fold's model, from the trial's state."""
    z_ND, omega_ND = (tensors.get(f"{name}.{number}") for name in OF_FOLDS)
    assert z_ND is not None
    return Embedded(z_ND.numpy(), None if omega_ND is None else omega_ND.numpy())


def _concatenated(of_folds: Sequence[Embedded]) -> Embedded:
    """All models' embeddings as one of unit norm, with all structure embeddings beside each other."""
    omegas = [embedded.omega_ND for embedded in of_folds if embedded.omega_ND is not None]
    z_NE = np.concatenate([embedded.z_ND for embedded in of_folds], axis=1) / math.sqrt(len(of_folds))
    return Embedded(z_NE.astype(np.float32), np.concatenate(omegas, axis=1) if omegas else None)


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
