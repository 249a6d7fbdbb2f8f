"""The parts of an embedder's training, made from a trial's configuration by functions that each make one.

``EmbedderTrainer`` calls them in one order: checks, embedder, loader, loss, batches, step. Random numbers are drawn in
this order, and of several mistakes the first in it is told.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch

from dmlstudy import data, distributed, embedders
from dmlstudy.data import Batches, Features, ImageSet, LabelledImages, Loader, PKBatches
from dmlstudy.data.images import Labels
from dmlstudy.embedders import Embedder
from dmlstudy.embedders.recomputation import recompute_blocks
from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Loss
from dmlstudy.losses.memory import CrossBatchMemory
from dmlstudy.records import BatchConfig, LossConfig, TrialConfig, draw_mismatch
from dmlstudy.training import canvases, feature_cache, short_vectors, started
from dmlstudy.training.adaptation import adapt, check_adapter
from dmlstudy.training.recipe import (
    check_chunk_and_share,
    check_class_shards,
    check_draw,
    check_heads,
    check_recipe,
)
from dmlstudy.training.step import Step


def check(config: TrialConfig, train: LabelledImages) -> None:
    """Refuse what can be told before anything is built, and have the pictures' canvases made; on all ranks at once.

    Raises ValueError for keys that do not go together or not with the images, TrialFailed where there is no room.
    """
    augmentation = data.Augmentation(**config.augmentation.model_dump())
    data.check_augmentation(augmentation, config.data.image_size, config.data.resize_to)
    data.check_channels(augmentation, train.image_shape[-1])
    canvases.prepare(train, config.data)
    if problem := draw_mismatch(config.batch, config.regularizer):
        raise ValueError(problem)
    check_recipe(config.training)
    check_chunk_and_share(config)
    check_class_shards(config)
    check_heads(config)
    short_vectors.check(config)
    check_adapter(config)


def make_embedder(
    config: TrialConfig, image_shape: tuple[int, ...], seed: int, device: torch.device
) -> Embedder:
    """The embedder as training begins: new, or with the weights that the trial starts from."""
    *height_width, channels = image_shape
    own, training = config.embedder, config.training
    embedder = embedders.build(
        own.backbone,
        own.size,
        width=own.width,
        weights=started.weights_of(config),
        freeze_bn=own.freeze_bn,
        in_channels=channels,
        image_size=tuple(height_width),
        structure=_structure_head(config.regularizer),
        structure_input=own.structure_input,
        unit_norm=own.unit_norm,
        space=own.space,
        curvature=own.curvature,
        clip_radius=own.clip_radius,
        fusion=own.fusion,
        pooling=own.pooling,
        head_norm=own.head_norm,
        code=own.code,
        head_depth=own.head_depth,
        head_width=own.head_width,
        head=own.head,
        seed=seed,
        make_backbone=feature_cache.backbone_maker(config),
    ).to(device)
    started.check(config, embedder)
    if training.channels_last:
        embedder.backbone.to(memory_format=torch.channels_last)
    if training.checkpointing and not feature_cache.applies(config):
        recompute_blocks(embedder.backbone)
    adapt(embedder, training, seed)
    return embedder


def make_loader(
    config: TrialConfig,
    embedder: Embedder,
    train: LabelledImages,
    sides: feature_cache.WholeSides | None,
    seed: int,
    device: torch.device,
) -> Loader | None:
    """The loader of the training images; None where they lie in memory as they are trained on.

    Images in memory are read ahead too for a GPU, which copies from pinned memory alone without a wait.
    """
    augmentation = data.Augmentation(**config.augmentation.model_dump())
    is_ready = isinstance(train, ImageSet) and augmentation.is_off and device.type == "cpu"
    if isinstance(train, Features) or is_ready:
        return None
    fill = data.fill_for(embedder.mean_C.tolist(), train.image_shape[-1])
    empty = data.pinned if device.type == "cuda" else None
    return feature_cache.loader(config, sides, train, replace(augmentation, fill=fill), seed, empty=empty)


def make_loss(config: TrialConfig, class_sizes: Sequence[int], seed: int, device: torch.device) -> Loss:
    """The loss, with its regulariser, for training images of which each class has so many.

    Raises ValueError where batches of one image per class would leave it without a pair, and where classes are shared
    out that are fewer than the ranks.
    """
    regularizer, share = config.regularizer, None
    if config.training.class_shards:
        share = distributed.own_slice(len(class_sizes))
        if len(class_sizes) < distributed.world_size():
            raise ValueError(
                f"training.class_shards: {len(class_sizes)} classes cannot be shared out among"
                f" {distributed.world_size()} workers; set resources.workers to at most {len(class_sizes)}, or leave"
                " training.class_shards out"
            )
    loss = catalogue.build(
        config.loss.name,
        config.loss.params,
        regularizer=(regularizer.name, regularizer.params) if regularizer else None,
        memory=config.batch.memory_size > 0,
        leading=config.embedder.parts,
        num_classes=len(class_sizes),
        class_sizes=class_sizes,
        dim=config.embedder.size,
        num_layers=config.embedder.head_depth + 1,
        curvature=config.embedder.curvature,
        seed=seed,
        share=share,
    ).to(device)
    check_draw(config.batch, has_classes=catalogue.has_class_vectors(loss))
    return loss


def make_memory(config: TrialConfig, device: torch.device) -> CrossBatchMemory | None:
    """The memory of earlier batches' embeddings, where there is one."""
    batch = config.batch
    if not batch.memory_size:
        return None
    return CrossBatchMemory(batch.memory_size, config.embedder.size, batch.memory_warmup).to(device)


def make_batches(batch: BatchConfig, labels_N: Labels, num_classes: int, seed: int) -> Batches:
    """The batches of each epoch, as ``batch.draw`` says."""
    classes = num_classes if batch.classes == "all" else batch.classes
    if batch.draw == "random":
        return data.RandomBatches(len(labels_N), classes * batch.images_per_class, batch.per_epoch, seed)
    if batch.draw == "two_draws":
        return data.TwoDraws(labels_N, classes, batch.images_per_class, batch.per_epoch, seed)
    return PKBatches(labels_N, classes, batch.images_per_class, batch.per_epoch, seed)


def make_step(
    config: TrialConfig,
    embedder: Embedder,
    loss: Loss,
    memory: CrossBatchMemory | None,
    *,
    has_features: bool,
) -> Step:
    """The training step: of images, or of the backbone's features where these are kept."""
    training, is_rescaled = config.training, not config.embedder.unit_norm
    start = None
    if loss.retains:
        if loss.retains == "embedding" and "head" not in embedder.begun_parts:
            raise ValueError(
                "regularizer.of: embedding draws embeddings to those of the start, whose head is random; start from a"
                " model with a head (embedder.weights: models:/NAME), or set regularizer.of: features"
            )
        start = copy.deepcopy(embedder)
    if has_features:
        heads = feature_cache.HeadOnly(embedder)
        begun = None if start is None else feature_cache.HeadOnly(start)
        return Step(heads, loss, memory, training.precision, is_rescaled=is_rescaled, start=begun)
    return Step(
        embedder, loss, memory, training.precision, training.compile, is_rescaled=is_rescaled, start=start
    )


def _structure_head(regularizer: LossConfig | None) -> str:
    """The structure head a regulariser trains: its preset, or none."""
    if regularizer is None or regularizer.name != "structure":
        return "none"
    return str((catalogue.parameters_of_regularizer("structure") | regularizer.params)["preset"])
