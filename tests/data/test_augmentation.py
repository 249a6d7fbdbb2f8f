"""Random views: within their bounds, of the right size, and a function of (seed, epoch, image) alone."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dmlstudy.data import Augmentation, ImageSet, Loader, check_augmentation

PIXELS = np.random.default_rng(0).integers(1, 256, (9, 10, 12, 3), dtype=np.uint8)
IMAGES = ImageSet(PIXELS, np.arange(9) % 3, ("a", "b", "c"))
KINDS = [
    Augmentation("random_resized", flip=0.5),
    Augmentation("random", flip=0.5, padding=2),
    Augmentation(flip=0.5),
]


def epoch(augmentation: Augmentation, batches: list[list[int]], number: int = 0, seed: int = 0) -> np.ndarray:
    loader = Loader(IMAGES, augmentation, seed, threads=2)
    return np.concatenate(list(loader.epoch([np.array(batch) for batch in batches], number)))


@pytest.mark.parametrize("augmentation", KINDS, ids=["random_resized", "random", "flip"])
def test_a_view_depends_on_seed_epoch_and_image_only(augmentation: Augmentation) -> None:
    whole = epoch(augmentation, [list(range(9))])
    in_ranks = epoch(augmentation, [[0, 1, 2], [3, 4], [5, 6, 7, 8]])
    np.testing.assert_array_equal(whole, in_ranks)
    np.testing.assert_array_equal(whole[::-1], epoch(augmentation, [[8, 7, 6], list(range(5, -1, -1))]))
    assert (whole != epoch(augmentation, [list(range(9))], 1)).any()
    assert (whole != epoch(augmentation, [list(range(9))], 0, 1)).any()
    assert (whole != PIXELS).any()


def test_a_view_shares_no_draws_with_a_batch() -> None:
    """Batch n is drawn from (seed, epoch, n); image n is not seen by these draws too."""
    look = Augmentation("random").random_view(3, 2, 1)
    own, of_batch = (np.random.default_rng(seed).random(4) for seed in (look.seed, [3, 2, 1]))
    assert (own != of_batch).all()


def test_nothing_is_changed_when_it_is_off() -> None:
    np.testing.assert_array_equal(epoch(Augmentation(), [list(range(9))]), PIXELS)


def test_flips_come_as_often_as_asked_and_are_mirror_images() -> None:
    rate = np.mean(
        [
            (epoch(Augmentation(flip=0.3), [list(range(9))], e) != PIXELS).any((1, 2, 3)).mean()
            for e in range(120)
        ]
    )
    assert abs(rate - 0.3) < 0.05
    np.testing.assert_array_equal(epoch(Augmentation(flip=1.0), [[4]])[0], PIXELS[4][:, ::-1])


def test_a_random_crop_is_a_box_of_the_padded_image() -> None:
    padded = np.pad(PIXELS[3], ((2, 2), (2, 2), (0, 0)))
    boxes = [padded[t : t + 10, l : l + 12] for t in range(5) for l in range(5)]  # noqa: E741
    seen = {
        next(i for i, box in enumerate(boxes) if (box == view).all())
        for e in range(200)
        for view in epoch(Augmentation("random", padding=2), [[3]], e)
    }
    assert len(seen) == 25


def test_a_resized_crop_has_an_area_and_shape_in_the_bounds() -> None:
    augmentation = Augmentation("random_resized", scale_min=0.3, scale_max=0.6, ratio_min=0.5)
    rng = np.random.default_rng(0)
    shares, ratios = [], []
    for _ in range(500):
        left, top, width, height = augmentation._box(200, 300, rng)
        assert left >= 0
        assert top >= 0
        assert left + width <= 300
        assert top + height <= 200
        shares.append(width * height / 60000)
        ratios.append(width / height)
    assert 0.295 < min(shares) < 0.32
    assert 0.58 < max(shares) < 0.605
    assert 0.49 < min(ratios) < 0.6
    assert 1.8 < max(ratios) < 2.02
    # Where no such box fits, the largest of a ratio in the bounds.
    assert Augmentation("random_resized", scale_min=1.0)._box(10, 100, rng) == (43, 0, 13, 10)


def test_a_resized_crop_is_pillow_s() -> None:
    augmentation = Augmentation("random_resized")
    left, top, width, height = augmentation._box(
        10, 12, np.random.default_rng(augmentation.random_view(7, 1, 2).seed)
    )
    box = Image.fromarray(PIXELS[2]).crop((left, top, left + width, top + height))
    expected = np.asarray(box.resize((12, 10), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(epoch(augmentation, [[2]], 1, 7)[0], expected)


def test_what_cannot_be_is_refused() -> None:
    for size, resize_to in ((None, None), (8, None), (8, 8)):
        with pytest.raises(
            ValueError, match=r"augmentation\.crop: a random crop .*set augmentation\.padding"
        ):
            check_augmentation(Augmentation("random"), size, resize_to)
    check_augmentation(Augmentation("random"), 8, 9)
    check_augmentation(Augmentation("random", padding=1), None, None)
    with pytest.raises(ValueError, match=r"scale_min: 0\.5 is above scale_max 0\.2"):
        check_augmentation(Augmentation("random_resized", scale_min=0.5, scale_max=0.2), 8, None)
    with pytest.raises(ValueError, match=r"'rnd', choose one of none, random, random_resized"):
        check_augmentation(Augmentation("rnd"), 8, None)
