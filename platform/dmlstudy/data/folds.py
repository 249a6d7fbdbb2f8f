"""Class-disjoint folds for validation on classes the model has not seen.

Shapes: N images.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dmlstudy.data.images import Indices, Labels


class Fold(NamedTuple):
    """Image indices and classes (both sorted) of one fold's two sides."""

    train_indices: Indices
    validation_indices: Indices
    train_classes: Labels
    validation_classes: Labels


def class_disjoint_folds(labels_N: Labels, num_folds: int, seed: int) -> list[Fold]:
    """Shuffle the classes by ``seed`` and cut them in ``num_folds`` nearly equal parts, each validated once.

    ``num_folds = 1`` is a holdout: one fold with half of the classes (rounded down) for validation.
    Raises ValueError if a fold had fewer than 2 classes for training or for validation.
    """
    classes = np.unique(labels_N)
    largest = len(classes) // 2
    if len(classes) < 4:
        raise ValueError(f"num_folds: {len(classes)} development classes, folds need at least 4")
    if not 1 <= num_folds <= largest:
        raise ValueError(
            f"num_folds: {num_folds} does not leave 2 classes on each side of {len(classes)} development "
            f"classes; choose from 1 (holdout) to {largest}"
        )
    shuffled = np.random.default_rng(seed).permutation(classes)
    parts = [shuffled[:largest]] if num_folds == 1 else np.array_split(shuffled, num_folds)
    return [_fold(labels_N, classes, np.sort(part)) for part in parts]


class RowFold(NamedTuple):
    """Row indices of one fold's two sides: those trained on sorted, those held out in the order they were drawn."""

    train_indices: Indices
    validation_indices: Indices


HELD_OUT = 5
"""A single fold of rows holds a fifth of them out."""


def row_folds(num_rows: int, num_folds: int, seed: int) -> list[RowFold]:
    """Shuffle rows by ``seed`` and cut them in ``num_folds`` nearly equal parts, each held out once.

    Classes are on both sides: so codes without labels are judged. ``num_folds = 1`` holds a fifth out. Raises
    ValueError if a fold had fewer than 2 rows on either side.
    """
    num_parts = HELD_OUT if num_folds == 1 else num_folds
    if not num_folds >= 1 or num_rows < 2 * num_parts:
        raise ValueError(
            f"num_folds: {num_folds} of {num_rows} rows; choose at least 1, and folds of at least 2 rows"
        )
    shuffled = np.random.default_rng(seed).permutation(num_rows)
    parts = np.array_split(shuffled, num_parts)[:num_folds]
    return [RowFold(np.setdiff1d(np.arange(num_rows), part), part) for part in parts]


def _fold(labels_N: Labels, classes: Labels, validation_classes: Labels) -> Fold:
    is_validation_N = np.isin(labels_N, validation_classes)
    return Fold(
        train_indices=np.flatnonzero(~is_validation_N),
        validation_indices=np.flatnonzero(is_validation_N),
        train_classes=np.setdiff1d(classes, validation_classes),
        validation_classes=validation_classes,
    )
