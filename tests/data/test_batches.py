"""The law of PK batches: exactly P classes with K images, a function of (seed, epoch, number) only."""

from __future__ import annotations

import numpy as np
import pytest

from dmlstudy.data import PKBatches, RandomBatches, TwoDraws

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


KINDS = {
    "pk": lambda: PKBatches(LABELS, 4, 3, 7, seed=5),
    "two_draws": lambda: TwoDraws(LABELS, 4, 3, 7, seed=5),
    "random": lambda: RandomBatches(len(LABELS), 13, 7, seed=5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_goes_on_from_any_batch(kind: str) -> None:
    whole = list(KINDS[kind]().epoch(2))
    assert len(whole) == len(KINDS[kind]()) == 7
    for first in range(8):
        rest = list(KINDS[kind]().epoch(2, first))
        assert len(rest) == 7 - first
        for found, expected in zip(rest, whole[first:], strict=True):
            np.testing.assert_array_equal(found, expected)
    assert any((a != b).any() for a, b in zip(whole, KINDS[kind]().epoch(3), strict=True))


def test_two_draws_have_the_same_classes_in_the_same_order() -> None:
    overlaps = []
    for batch in TwoDraws(LABELS, 4, 3, 50, seed=1).epoch(0):
        first, second = np.split(batch, 2)
        np.testing.assert_array_equal(LABELS[first], LABELS[second])
        assert len(np.unique(LABELS[first])) == 4
        for half in (first, second):  # repeats only in classes that are too small
            for label in np.unique(LABELS[half]):
                of_class = half[LABELS[half] == label]
                assert len(np.unique(of_class)) == min(3, np.count_nonzero(label == LABELS))
        overlaps.append(len(np.intersect1d(first, second)))
    assert min(overlaps) < max(overlaps)
    assert len(TwoDraws(LABELS, 2, 4)) == len(LABELS) // 16


@pytest.mark.parametrize(
    ("num_images", "size", "per_epoch"),
    [(12, 4, 7), (13, 4, None), (13, 4, 5), (13, 8, 2), (13, 12, 3), (13, 13, 1), (5, 1, None)],
)
def test_random_batches_show_every_image_before_any_comes_again(
    num_images: int, size: int, per_epoch: int | None
) -> None:
    batches = RandomBatches(num_images, size, per_epoch, seed=1)
    drawn = [batch for epoch in range(40) for batch in batches.epoch(epoch)]
    for batch in drawn:
        assert len(set(batch.tolist())) == size
    num_passes = len(drawn) * size // num_images
    passes = np.concatenate(drawn)[: num_passes * num_images].reshape(num_passes, num_images)
    np.testing.assert_array_equal(np.sort(passes, axis=1), np.tile(np.arange(num_images), (num_passes, 1)))
    assert (passes[0] != passes[1]).any()
    for epoch in (17, 3):  # also where an object is asked for it first, or goes back
        anew = RandomBatches(num_images, size, per_epoch, seed=1)
        for found in (anew.epoch(epoch), batches.epoch(epoch)):
            expected = drawn[epoch * len(batches) : (epoch + 1) * len(batches)]
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)


def test_random_batches_favour_no_image_and_no_place() -> None:
    batches = RandomBatches(7, 4, 4000, seed=0)
    drawn = np.stack(list(batches.epoch(0)))
    for place in range(4):
        counts = np.bincount(drawn[:, place], minlength=7)
        np.testing.assert_allclose(counts / counts.sum(), 1 / 7, atol=0.02)


def test_random_batches_have_a_length_and_a_largest_size() -> None:
    assert len(RandomBatches(13, 4)) == 3
    with pytest.raises(ValueError, match="14 images per batch, but training has 13"):
        RandomBatches(13, 14)
