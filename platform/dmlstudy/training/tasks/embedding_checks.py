"""Checks of an embedder's configuration that need the parts it names, but no data."""

from __future__ import annotations

from dmlstudy import data, embedders
from dmlstudy.embedders.blocks import num_blocks, num_features
from dmlstudy.embedders.embedder import check_bare_head
from dmlstudy.losses import catalogue
from dmlstudy.records import AugmentationConfig, TrialConfig
from dmlstudy.training import adaptation
from dmlstudy.training.recipe import (
    check_chunk_and_share,
    check_class_shards,
    check_draw,
    check_heads,
    check_recipe,
    check_trained_parts,
    check_unfrozen,
)
from dmlstudy.training.tasks.checked import TOO_LARGE, said


def check(config: TrialConfig, key: str) -> None:
    """Raise ValueError, beginning with the family's ``key``, for what no trial could be built of."""
    embedder = config.embedder
    embedders.check_backbone(embedder.backbone, embedder.weights, embedder.fusion)
    _check_head(config, key)
    _check_loss(config, key)
    _check_augmentation(config, key)
    _check_retrieval(config, key)


def _check_head(config: TrialConfig, key: str) -> None:
    embedder = config.embedder
    if embedder.head == "linear":
        return
    side = {} if config.data.image_size is None else {"side": config.data.image_size}
    try:
        check_trained_parts(config)
        num = num_features(embedder.backbone, embedder.fusion, embedder.width, **side)
        if num is not None:
            check_bare_head(embedder.backbone, num, embedder.dim, embedder.head_depth, embedder.fusion)
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None


def _check_loss(config: TrialConfig, key: str) -> None:
    regularizer = config.regularizer
    try:
        loss = catalogue.build(
            config.loss.name,
            config.loss.params,
            regularizer=(regularizer.name, regularizer.params) if regularizer else None,
            memory=config.batch.memory_size > 0,
            num_classes=2,
            class_sizes=(1, 2),
            dim=config.embedder.size,
            share=slice(0, 2) if config.training.class_shards else None,
        )
    except (ValueError, *TOO_LARGE) as error:
        section = "regularizer" if str(error).startswith("regularizer") else "loss"
        raise ValueError(f"{key}.{section}: {said(error)}") from None
    try:
        _check_recipe(config, has_classes=catalogue.has_class_vectors(loss))
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None


def _check_recipe(config: TrialConfig, *, has_classes: bool) -> None:
    check_recipe(config.training)
    check_chunk_and_share(config)
    check_class_shards(config)
    check_heads(config)
    adaptation.check_adapter(config)
    adaptation.check_backbone(config)
    check_draw(config.batch, has_classes=has_classes)
    if last := config.training.unfreeze_last:  # 0 and all are of any backbone
        embedder = config.embedder
        side = {} if config.data.image_size is None else {"side": config.data.image_size}
        num = None if last == "all" else num_blocks(embedder.backbone, embedder.fusion, **side)
        if num is not None:
            check_unfrozen(last, num)


def _check_augmentation(config: TrialConfig, key: str) -> None:
    if config.data.name == "features" and config.augmentation != AugmentationConfig():
        raise ValueError(
            f"{key}.augmentation: features are vectors, of which there are no views; leave it out"
        )
    try:
        data.check_augmentation(
            data.Augmentation(**config.augmentation.model_dump()),
            config.data.image_size,
            config.data.resize_to,
        )
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None


def _check_retrieval(config: TrialConfig, key: str) -> None:
    regularizer = config.regularizer
    if config.retrieval.rerank == "structure" and (regularizer is None or regularizer.name != "structure"):
        raise ValueError(
            f"{key}.retrieval.rerank: structure needs structure embeddings, which the regularizer"
            " structure trains; set regularizer.name: structure, or another rerank"
        )
