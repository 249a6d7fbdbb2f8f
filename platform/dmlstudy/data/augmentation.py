"""Random views of training images that depend on (seed, epoch, image) alone: a crop, a mirror image, further ops.

Shapes: H height, W width of what is cut from, in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dmlstudy.data.view_ops import ViewOps

CROPS = ("none", "random", "random_resized")
VIEWS = 0x7669657773  # "views" in ASCII
"""The domain of draws for views, so that none is that of a batch, which is drawn from (seed, epoch, number)."""

TRIES = 10
"""Boxes of random area and shape that are drawn before the largest fitting one is taken."""


class RandomView(NamedTuple):
    """One random view of an image: the draws that decide its crop and whether it is mirrored."""

    augmentation: Augmentation
    seed: tuple[int, ...]

    def of(self, picture: Any, size: tuple[int, int]) -> Any:
        """The view of a picture, (height, width) = ``size``."""
        seen = self.augmentation.view(picture, size, np.random.default_rng(self.seed))
        return self.augmentation.changed(seen, self.seed)


@dataclass(frozen=True)
class Augmentation(ViewOps):
    """Random crops and mirror images of what ``data.resize_to`` leaves of a picture, and then the ops of ``ViewOps``.

    ``crop``: 'random' cuts a box of the final size, after ``padding`` black pixels on each side; 'none' cuts the
    centre; 'random_resized' cuts a box and resizes it to the final size. With probability ``flip``, left and right
    are then exchanged.

    The box of 'random_resized' has an area uniform in [scale_min, scale_max] of the whole and an aspect ratio
    log-uniform in [ratio_min, 1 / ratio_min] (Szegedy et al. 2015, section 6). After 10 boxes that do not fit it is
    the largest centred one of a ratio in these bounds.
    """

    crop: str = "none"
    flip: float = 0.0
    padding: int = 0
    scale_min: float = 0.16
    scale_max: float = 1.0
    ratio_min: float = 0.75

    @property
    def is_off(self) -> bool:
        return self.crop == "none" and self.flip == 0 and not self.has_ops

    @property
    def only_cuts(self) -> bool:
        """True if a view is made of a box within the picture alone."""
        return self.crop == "random_resized" or (self.crop == "random" and self.padding == 0)

    def views(self, seed: int, epoch: int) -> Callable[[int], RandomView]:
        """``random_view`` of each image in an epoch."""
        return partial(self.random_view, seed, epoch)

    def random_view(self, seed: int, epoch: int, index: int) -> RandomView:
        """The view of the image ``index`` in an epoch, the same on every rank and in every batch."""
        return RandomView(self, (seed, epoch, index, VIEWS))

    def view(self, picture: Any, size: tuple[int, int], rng: np.random.Generator) -> Any:
        """The crop and the flip of a view; draws are taken in one order, so that a flip does not change the crop.

        The picture is only asked for a box of it where ``only_cuts``.
        """
        from PIL import Image, ImageOps

        height, width = size
        if self.crop == "random":
            picture = ImageOps.expand(picture, self.padding) if self.padding else picture
            top = int(rng.integers(max(picture.height - height, 0) + 1))
            left = int(rng.integers(max(picture.width - width, 0) + 1))
            seen = picture.crop((left, top, left + width, top + height))
        elif self.crop == "random_resized":
            left, top, box_width, box_height = self._box(picture.height, picture.width, rng)
            seen = picture.crop((left, top, left + box_width, top + box_height))
            seen = seen.resize((width, height), Image.Resampling.BILINEAR)
        else:
            seen = centred(picture, size)
        if rng.random() < self.flip:
            seen = seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return seen

    def _box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """(left, top, width, height) of a box within the picture."""
        bound = math.log(1 / self.ratio_min)
        for _ in range(TRIES):
            area = height * width * rng.uniform(self.scale_min, self.scale_max)
            ratio = math.exp(rng.uniform(-bound, bound))
            box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < box_width <= width and 0 < box_height <= height:
                top = int(rng.integers(height - box_height + 1))
                left = int(rng.integers(width - box_width + 1))
                return left, top, box_width, box_height
        box_width = max(1, min(width, round(height / self.ratio_min)))
        box_height = max(1, min(height, round(width / self.ratio_min)))
        return (width - box_width) // 2, (height - box_height) // 2, box_width, box_height


def centred(picture: Any, size: tuple[int, int]) -> Any:
    """The box of (height, width) = ``size`` in the middle of a picture; the picture itself if it has that size."""
    height, width = size
    if (picture.height, picture.width) == size:
        return picture
    left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
    return picture.crop((left, top, left + width, top + height))


def check_augmentation(
    augmentation: Augmentation, image_size: int | None, resize_to: int | None, path: str = "augmentation"
) -> None:
    """Raise ValueError where a random crop would have no room, or bounds are crossed."""
    if augmentation.crop not in CROPS:
        raise ValueError(f"{path}.crop: {augmentation.crop!r}, choose one of {', '.join(CROPS)}")
    if augmentation.scale_min > augmentation.scale_max:
        raise ValueError(
            f"{path}.scale_min: {augmentation.scale_min:g} is above scale_max {augmentation.scale_max:g}"
        )
    has_room = resize_to is not None and image_size is not None and resize_to > image_size
    if augmentation.crop == "random" and not has_room and augmentation.padding == 0:
        raise ValueError(
            f"{path}.crop: a random crop of the whole image is always the same; set {path}.padding, or"
            " data.resize_to above data.image_size"
        )
