"""Checks of embedders' configurations against their data: enough classes and images for every fold and batch."""

from __future__ import annotations

from collections.abc import Sequence

from dmlstudy import data, embedders, retrieval
from dmlstudy.records import TrialConfig
from dmlstudy.training.verification_scores import check_pairs

LEAST_CLASSES = 4
"""Classes that development needs: two are trained on, two held out."""


def check_data(configs: Sequence[tuple[str, TrialConfig]], dataset: data.ZeroShotData) -> None:
    """Raise ValueError where folds of classes leave too little to learn from, or to be judged by.

    The configurations, each with its family's key, have the same folds.
    """
    _, first = configs[0]
    development = dataset.development
    own, test = (len(set(side.labels_N.tolist())) for side in (development, dataset.test))
    counts = check_class_counts(own, test, first.num_folds)
    folds = data.class_disjoint_folds(development.labels_N, first.num_folds, first.seed)
    data.check_hits(dataset, folds)
    _check_cameras(dataset, folds)
    check_pairs(first, [development.labels_N[fold.validation_indices] for fold in folds])
    num_classes = min(len(fold.train_classes) for fold in folds)
    num_images = min(len(fold.train_indices) for fold in folds)
    counts += f", of which a fold holds {max(len(fold.validation_classes) for fold in folds)} out"
    for key in dict.fromkeys(key for key, _ in configs):
        _check_views([config for own, config in configs if own == key], key)
    for key, config in configs:
        _check_batch(config, num_classes, num_images, key, counts)
        embedders.check_input(config.embedder.backbone, takes_vectors=len(development.image_shape) == 1)
        augmentation = data.Augmentation(**config.augmentation.model_dump())
        data.check_channels(augmentation, development.image_shape[-1], f"{key}.augmentation")


def _check_cameras(dataset: data.ZeroShotData, folds: Sequence[data.Fold]) -> None:
    """Raise ValueError where no query of a side that is judged could have a hit by another camera."""
    camera_N, test_camera_N = dataset.development_camera_N, dataset.test_camera_N
    if camera_N is None or test_camera_N is None:
        return
    labels_N = dataset.development.labels_N
    roles = dataset.test_query, dataset.test_gallery
    num_relevant = {
        "the test": retrieval.num_relevant_elsewhere(dataset.test.labels_N, test_camera_N, *roles)
    }
    for number, fold in enumerate(folds, 1):
        rows = fold.validation_indices
        found_Q = retrieval.num_relevant_elsewhere(labels_N[rows], camera_N[rows])
        num_relevant[f"fold {number}'s validation"] = found_Q
    for side, found_Q in num_relevant.items():
        if not (found_Q > 0).any():
            raise ValueError(
                f"data.camera: no class of {side} of {dataset.name} has pictures by two cameras, so no query can have a"
                " hit; leave data.camera out, or set protocol.num_folds lower"
            )


def check_class_counts(own: int, test: int, num_folds: int) -> str:
    """The division of ``own + test`` classes in words; raises ValueError if they are too few for so many folds."""
    counts = f"of {own + test} classes {test} are kept for the test and {own} are to learn from"
    if own < LEAST_CLASSES or test < 2:
        raise ValueError(
            f"data.path: {counts}, which must be at least 2 and {LEAST_CLASSES}, as scores are of classes that are held"
            f" out; add classes, {2 * LEAST_CLASSES - 1} in all where half are kept for the test"
        )
    if num_folds > own // 2:
        raise ValueError(
            f"protocol.num_folds: {num_folds} folds need {2 * num_folds} classes, two to be held out by each, and"
            f" {counts}; set protocol.num_folds to at most {own // 2}, or add classes"
        )
    return counts


def _check_views(configs: Sequence[TrialConfig], key: str) -> None:
    """Raise ValueError for ``cached_views`` of a family whose images have one view, whatever is searched."""
    has_views = [not data.Augmentation(**each.augmentation.model_dump()).is_off for each in configs]
    if any(config.training.cached_views for config in configs) and not any(has_views):
        raise ValueError(
            f"{key}.training.cached_views: without augmentation an image has one view; leave it out, or set"
            " augmentation.crop or augmentation.flip"
        )


def _check_batch(config: TrialConfig, num_classes: int, num_images: int, key: str, counts: str) -> None:
    batch = config.batch
    classes = num_classes if batch.classes == "all" else batch.classes
    if batch.draw == "random":
        if classes * batch.images_per_class > num_images:
            raise ValueError(
                f"{key}.batch: up to {classes} x {batch.images_per_class} images per batch, but a fold trains on"
                f" {num_images}; set batch.classes or batch.images_per_class lower"
            )
    elif classes > num_classes:
        raise ValueError(
            f"{key}.batch.classes: up to {classes} classes per batch, but a fold trains on {num_classes} ({counts});"
            f" set batch.classes to at most {num_classes} or to all"
        )
