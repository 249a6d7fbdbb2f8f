"""Checks of retention data: images as the study's, and enough classes among which retrieval can be judged."""

from __future__ import annotations

import numpy as np

from dmlstudy.data import ZeroShotData
from dmlstudy.retrieval import num_relevant_elsewhere

LEAST_CLASSES = 2
"""Test classes with two pictures or more."""


def check(retention: ZeroShotData, own: ZeroShotData, key: str) -> None:
    """Raise ValueError, which begins with ``key``, where a model of the study's data cannot be scored on these."""
    shape, other = own.development.image_shape, retention.test.image_shape
    if shape != other:
        raise ValueError(
            f"{key}: {retention.name} has {_said(other)}, but the study's embedders take {_said(shape)};"
            f" {_fix(shape, other, key)}"
        )
    num = _num_judged(retention)
    if num < LEAST_CLASSES:
        raise ValueError(
            f"{key}: {num} of the {len(retention.test.class_names)} test classes of {retention.name} can have a hit,"
            f" and scores need {LEAST_CLASSES}; give classes two images or more, or name other data"
        )


def _num_judged(dataset: ZeroShotData) -> int:
    """Number of test classes of which a query can find another image."""
    labels_N, query, gallery = dataset.test.labels_N, dataset.test_query, dataset.test_gallery
    num_classes = len(dataset.test.class_names)
    if dataset.test_camera_N is not None:
        found_Q = num_relevant_elsewhere(labels_N, dataset.test_camera_N, query, gallery)
        asked_N = labels_N if query is None else labels_N[query]
        return len(np.unique(asked_N[found_Q > 0]))
    if query is None or gallery is None:
        return int((np.bincount(labels_N, minlength=num_classes) > 1).sum())
    queried_C, found_C = (np.bincount(labels_N[side], minlength=num_classes) for side in (query, gallery))
    # No query is its own hit.
    self_C = np.bincount(labels_N[np.intersect1d(query, gallery)], minlength=num_classes)
    return int((queried_C * found_C > self_C).sum())


def _said(shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return f"vectors of {shape[0]} numbers"
    height, width, channels = shape
    return f"{'grey' if channels == 1 else 'RGB'} images of {height} x {width}"


def _fix(shape: tuple[int, ...], other: tuple[int, ...], key: str) -> str:
    is_of_size = len(shape) == len(other) == 3 and shape[2] == other[2] and shape[0] == shape[1]
    return f"set {key}.image_size: {shape[0]}" if is_of_size else "name data of the same kind"
