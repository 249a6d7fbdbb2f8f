"""The law of PK batches: exactly P classes with K images, a function of (seed, epoch, number) only."""

from __future__ import annotations

import numpy as np
import pytest

from dmlstudy.data import PKBatches

LABELS = np.random.default_rng(0).permutation(np.repeat([3, 8, 11, 20, 21, 40], [9, 5, 2, 7, 4, 30]))


@pytest.mark.parametrize(("classes", "images_per_class"), [(2, 2), (4, 4), (6, 5), (1, 40)])
def test_every_batch_has_p_classes_with_k_images(classes: int, images_per_class: int) -> None:
    batches = PKBatches(LABELS, classes, images_per_class, 8, seed=1)
    assert len(batches) == 8
    seen = list(batches.epoch(0))
    assert len(seen) == 8
    for batch in seen:
        assert batch.shape == (classes * images_per_class,)
        assert np.issubdtype(batch.dtype, np.integer)
        found, counts = np.unique(LABELS[batch], return_counts=True)
        assert len(found) == classes
        assert (counts == images_per_class).all()
        for label in found:
            size = np.count_nonzero(label == LABELS)
            chosen = batch[LABELS[batch] == label]
            assert len(np.unique(chosen)) == min(size, images_per_class)  # repeats only where needed


def test_a_batch_depends_on_seed_epoch_and_number_only() -> None:
    def epoch(seed: int, number: int, length: int = 6) -> np.ndarray:
        return np.stack(list(PKBatches(LABELS, 3, 3, length, seed=seed).epoch(number)))

    np.testing.assert_array_equal(epoch(1, 4), epoch(1, 4))
    np.testing.assert_array_equal(epoch(1, 4, 3), epoch(1, 4)[:3])
    assert (epoch(1, 4) != epoch(1, 5)).any()
    assert (epoch(1, 4) != epoch(2, 4)).any()
    batches = PKBatches(LABELS, 3, 3, 6, seed=1)
    list(batches.epoch(0))  # no state is carried over
    np.testing.assert_array_equal(np.stack(list(batches.epoch(4))), epoch(1, 4))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_slice_one_global_batch(world_size: int) -> None:
    whole = list(PKBatches(LABELS, 4, 3, 5, seed=7).epoch(2))
    ranks = [list(PKBatches(LABELS, 4, 3, 5, seed=7).epoch(2)) for _ in range(world_size)]
    for number, batch in enumerate(whole):
        slices = [np.array_split(ranks[r][number], world_size)[r] for r in range(world_size)]
        np.testing.assert_array_equal(np.concatenate(slices), batch)


def test_classes_and_images_come_up_equally_often() -> None:
    drawn = np.concatenate(list(PKBatches(LABELS, 3, 2, 2000, seed=0).epoch(0)))
    _, counts = np.unique(LABELS[drawn], return_counts=True)
    np.testing.assert_allclose(counts / counts.sum(), 1 / 6, atol=0.01)
    _, counts = np.unique(drawn[LABELS[drawn] == 40], return_counts=True)
    assert len(counts) == 30
    np.testing.assert_allclose(counts / counts.sum(), 1 / 30, atol=0.012)


def test_length_by_default() -> None:
    assert len(PKBatches(LABELS, 2, 4)) == len(LABELS) // 8
    assert len(PKBatches(LABELS, 6, 30)) == 1


def test_too_many_classes() -> None:
    with pytest.raises(ValueError, match=r"batch\.classes: 7 .* at most 6"):
        PKBatches(LABELS, 7, 2)
