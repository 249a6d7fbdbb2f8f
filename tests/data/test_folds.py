"""Class-disjoint folds: every class validated once, sides disjoint, both usable."""

from __future__ import annotations

import numpy as np
import pytest

from dmlstudy.data import class_disjoint_folds


@pytest.mark.parametrize("num_classes", [4, 5, 9, 20])
@pytest.mark.parametrize("num_folds", [1, 2, 3, 4])
def test_sides_are_disjoint_and_every_class_is_validated_once(num_classes: int, num_folds: int) -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(num_classes) * 3 + 2, 4))
    if num_folds > num_classes // 2:
        with pytest.raises(ValueError, match=rf"to {num_classes // 2}$"):
            class_disjoint_folds(labels, num_folds, 0)
        return
    folds = class_disjoint_folds(labels, num_folds, 0)
    assert len(folds) == num_folds
    for fold in folds:
        assert not set(fold.train_classes) & set(fold.validation_classes)
        assert min(len(fold.train_classes), len(fold.validation_classes)) >= 2
        np.testing.assert_array_equal(np.unique(labels[fold.train_indices]), fold.train_classes)
        np.testing.assert_array_equal(np.unique(labels[fold.validation_indices]), fold.validation_classes)
        everything = np.sort(np.concatenate([fold.train_indices, fold.validation_indices]))
        np.testing.assert_array_equal(everything, np.arange(len(labels)))
    validated = np.concatenate([fold.validation_classes for fold in folds])
    if num_folds == 1:
        assert len(validated) == num_classes // 2
    else:
        np.testing.assert_array_equal(np.sort(validated), np.unique(labels))
        sizes = [len(fold.validation_classes) for fold in folds]
        assert max(sizes) - min(sizes) <= 1


def test_the_seed_decides() -> None:
    labels = np.repeat(np.arange(30), 2)
    first, again, other = (class_disjoint_folds(labels, 3, seed)[0] for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.validation_classes, again.validation_classes)
    assert set(first.validation_classes) != set(other.validation_classes)


def test_too_few_classes() -> None:
    with pytest.raises(ValueError, match="3 development classes, folds need at least 4"):
        class_disjoint_folds(np.array([0, 1, 2]), 1, 0)
    with pytest.raises(ValueError, match="choose from 1"):
        class_disjoint_folds(np.arange(8), 0, 0)
