"""Images in memory: a labelled set, a zero-shot pair of sets, and the one way pixels are decoded.

Shapes: N images, H height, W width, C channels (1 grey, 3 RGB).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Images: TypeAlias = NDArray[np.uint8]
Labels: TypeAlias = NDArray[np.int64]
Indices: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images of one size with a class each; ``labels_N`` indexes ``class_names``."""

    images_NHWC: Images
    labels_N: Labels
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.images_NHWC.dtype == np.uint8
        assert self.images_NHWC.ndim == 4
        assert self.images_NHWC.shape[3] in (1, 3)
        assert self.labels_N.dtype == np.int64
        assert self.labels_N.shape == self.images_NHWC.shape[:1]
        assert len(set(self.class_names)) == len(self.class_names)
        if len(self.labels_N):
            assert self.labels_N.min() >= 0
            assert self.labels_N.max() < len(self.class_names)

    def __len__(self) -> int:
        return len(self.labels_N)

    def select(self, indices: Indices) -> ImageSet:
        """Return the images at ``indices``; labels and class names stay as they are."""
        return ImageSet(self.images_NHWC[indices], self.labels_N[indices], self.class_names)

    def of_classes(self, classes: Sequence[int] | Labels) -> ImageSet:
        """Return the images of ``classes`` in their present order, labels renumbered 0, 1, ... in the
        order of ``classes``."""
        new_label_C = np.full(len(self.class_names), -1, dtype=np.int64)
        new_label_C[np.asarray(classes, dtype=np.int64)] = np.arange(len(classes))
        labels_N = new_label_C[self.labels_N]
        kept_N = labels_N >= 0
        names = tuple(self.class_names[c] for c in classes)
        return ImageSet(self.images_NHWC[kept_N], labels_N[kept_N], names)

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) over shapes, labels and pixels."""
        digest = hashlib.sha256(repr((self.images_NHWC.shape, self.labels_N.shape)).encode())
        digest.update(np.ascontiguousarray(self.labels_N, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self.images_NHWC).data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ZeroShotData:
    """Development and test images whose classes are disjoint.

    ``num_shared_images`` counts the test images that occur pixel for pixel in development: a leak that
    the data set brings along is reported, not hidden.
    Raises ValueError if a class name is on both sides, or a side has fewer than 2 classes.
    """

    name: str
    development: ImageSet
    test: ImageSet
    num_shared_images: int = field(init=False)

    def __post_init__(self) -> None:
        shared = sorted(set(self.development.class_names) & set(self.test.class_names))
        if shared:
            raise ValueError(
                f"{self.name}: {len(shared)} classes are in development and test, as {shared[0]!r}"
            )
        for side, images in (("development", self.development), ("test", self.test)):
            if len(images.class_names) < 2:
                raise ValueError(
                    f"{self.name}: {side} has {len(images.class_names)} classes, retrieval needs at least 2"
                )
        known = _content_hashes(self.development.images_NHWC)
        num_shared = sum(h in known for h in map(_content_hash, self.test.images_NHWC))
        object.__setattr__(self, "num_shared_images", num_shared)


def _content_hash(image_HWC: Images) -> bytes:
    return hashlib.blake2b(image_HWC.tobytes() + repr(image_HWC.shape).encode(), digest_size=16).digest()


def _content_hashes(images_NHWC: Images) -> set[bytes]:
    return set(map(_content_hash, images_NHWC))


def halves(name: str, images: ImageSet) -> ZeroShotData:
    """Cut by class: the first half of the classes (rounded up) is development, the rest is test."""
    num_classes = len(images.class_names)
    cut = (num_classes + 1) // 2
    return ZeroShotData(name, images.of_classes(range(cut)), images.of_classes(range(cut, num_classes)))


def zero_shot(name: str, train: ImageSet, test: ImageSet) -> ZeroShotData:
    """Take two files as development and test; if they share a class, cut the union of classes in half."""
    names = tuple(dict.fromkeys(train.class_names + test.class_names))
    if len(names) == len(train.class_names) + len(test.class_names):
        return ZeroShotData(name, train, test)
    channels = max(train.images_NHWC.shape[3], test.images_NHWC.shape[3])
    if train.images_NHWC.shape[1:3] != test.images_NHWC.shape[1:3]:
        raise ValueError(
            f"{name}: train images are {train.images_NHWC.shape[1:3]}, test images "
            f"{test.images_NHWC.shape[1:3]}; set data.image_size to resize them"
        )
    position = {class_name: i for i, class_name in enumerate(names)}
    test_labels_C = np.array([position[c] for c in test.class_names], dtype=np.int64)
    union = ImageSet(
        np.concatenate([with_channels(s.images_NHWC, channels) for s in (train, test)]),
        np.concatenate([train.labels_N, test_labels_C[test.labels_N]]),
        names,
    )
    return halves(name, union)


def with_channels(images_NHWC: Images, channels: int) -> Images:
    """Turn grey into RGB by repetition, or RGB into grey by ITU-R 601 luma (the rule of Pillow)."""
    present = images_NHWC.shape[-1]
    if present == channels:
        return images_NHWC
    if channels == 3:
        return np.repeat(images_NHWC, 3, axis=-1)
    assert (present, channels) == (3, 1)
    luma_3 = np.array([19595, 38470, 7471], dtype=np.uint32)
    grey_NHW = (images_NHWC.astype(np.uint32) @ luma_3 + 0x8000) >> 16
    return grey_NHW.astype(np.uint8)[..., None]


def decode(source: Path | bytes, name: str, image_size: int | None) -> Images:
    """Decode one picture to ``image_HWC``: C=1 for black-and-white and grey modes, else 3 (alpha is
    dropped), resized to a square by antialiased bilinear interpolation if ``image_size`` is given.

    Raises ValueError naming the picture if it cannot be read or has more than 8 bits per channel.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as picture:
            mode = picture.mode
            pixels = picture.convert("L" if mode in ("1", "L", "LA") else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name}: not a readable image ({error}); repair or remove it") from error
    if mode.startswith(("I", "F")):
        raise ValueError(f"{name}: image mode {mode} has more than 8 bits per channel; convert it to 8")
    return _to_array(_resized(pixels, image_size))


def resize(images_NHWC: Images, image_size: int | None) -> Images:
    """Resize to squares by antialiased bilinear interpolation; None leaves the images as they are."""
    if image_size is None or images_NHWC.shape[1:3] == (image_size, image_size):
        return images_NHWC
    from PIL import Image

    pictures = (Image.fromarray(x[..., 0] if x.shape[2] == 1 else x) for x in images_NHWC)
    resized = [_to_array(_resized(p, image_size)) for p in pictures]
    return np.stack(resized) if resized else np.empty((0, image_size, image_size, 1), np.uint8)


def _resized(picture: Any, image_size: int | None) -> Any:
    from PIL import Image

    if image_size is None or picture.size == (image_size, image_size):
        return picture
    return picture.resize((image_size, image_size), Image.Resampling.BILINEAR)


def _to_array(picture: Any) -> Images:
    image = np.asarray(picture, dtype=np.uint8)
    return image[..., None] if image.ndim == 2 else image


def stack(pictures: Iterable[tuple[str, Images]], num_images: int) -> Images:
    """Stack ``num_images`` named images of one size; if any is RGB, all become RGB.

    Raises ValueError naming the first image whose size differs from the one before it.
    """
    assert num_images > 0
    images_NHWC: Images | None = None
    for i, (name, image_HWC) in enumerate(pictures):
        if images_NHWC is None:
            images_NHWC = np.empty((num_images, *image_HWC.shape), dtype=np.uint8)
        height_width = images_NHWC.shape[1:3]
        if image_HWC.shape[:2] != height_width:
            raise ValueError(
                f"{name}: image is {image_HWC.shape[:2]}, the ones before it are {height_width}; "
                "set data.image_size to resize them"
            )
        channels = max(images_NHWC.shape[3], image_HWC.shape[2])
        images_NHWC = with_channels(images_NHWC, channels)
        images_NHWC[i] = with_channels(image_HWC, channels)
    assert images_NHWC is not None
    return images_NHWC
