"""Labelled images: in memory or not, the zero-shot pair of sets, and how pictures become images of one size.

Shapes: N images, B images read at once, H height, W width, C channels (1 grey, 3 RGB).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmlstudy.data.augmentation import RandomView, centred
from dmlstudy.data.decoding import Reading, opened

Images: TypeAlias = NDArray[np.uint8]
Inputs: TypeAlias = NDArray[np.uint8] | NDArray[np.float32]
"""Inputs of an embedder: images of uint8, or vectors of float32."""

Labels: TypeAlias = NDArray[np.int64]
Indices: TypeAlias = NDArray[np.int64]
RandomViews: TypeAlias = Callable[[int], RandomView]
"""From an image's index to how it is seen."""

CHANNELS = 3


class LabelledImages(Protocol):
    """Images, or vectors, with a class each, of one size when they are read; ``labels_N`` indexes ``class_names``."""

    @property
    def labels_N(self) -> Labels: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Height, width and channels of what ``read`` gives; of vectors their length."""

    def __len__(self) -> int: ...

    def select(self, indices: Indices) -> Self:
        """The images at ``indices``; labels and class names stay as they are."""

    def of_classes(self, classes: Sequence[int] | Labels) -> Self:
        """The images of ``classes`` in their present order, labels renumbered in the order of ``classes``."""

    def read(self, indices: Indices, views: RandomViews | None = None) -> Inputs:
        """``images_BHWC`` at ``indices``; each through its view, or as for evaluation."""

    def content_hashes(self) -> list[bytes]:
        """One per image, equal for equal contents."""

    def fingerprint(self) -> str:
        """The SHA-256 (hex) over sizes, labels and contents."""


class Fit(NamedTuple):
    """The way pictures of any size become images of one size, before anything is left to chance.

    Without ``resize_to`` a picture is resized to a square of ``image_size``, or left unchanged for None. With it, the
    shorter side (``keep_aspect``), or both sides, become ``resize_to``; evaluation sees the centre of that, training
    what augmentation cuts from it. Resizing is antialiased and bilinear. ``reading`` says what comes before.
    """

    image_size: int | tuple[int, int] | None = None
    resize_to: int | None = None
    keep_aspect: bool = True
    reading: Reading = Reading()

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of all images, None for that of the pictures."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    def canvas(self, picture: Any) -> Any:
        """The picture that views are cut from."""
        width, height = self.canvas_size(picture.size)
        return _resized(picture, (height, width))

    def canvas_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) of what views are cut from, by those of a picture."""
        if self.resize_to is None:
            return size if self.size is None else (self.size[1], self.size[0])
        if not self.keep_aspect:
            return self.resize_to, self.resize_to
        scale = self.resize_to / min(size)
        width, height = (max(self.resize_to, round(side * scale)) for side in size)
        return width, height


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

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        _, height, width, channels = self.images_NHWC.shape
        return height, width, channels

    def read(self, indices: Indices, views: RandomViews | None = None) -> Images:
        """``images_BHWC`` at ``indices``; each through its view if given."""
        if views is None:
            return self.images_NHWC[indices]
        size = self.image_shape[:2]
        images_BHWC = np.empty((len(indices), *self.image_shape), dtype=np.uint8)
        for position, index in enumerate(indices.tolist()):
            images_BHWC[position] = as_array(views(index).of(as_picture(self.images_NHWC[index]), size))
        return images_BHWC

    def select(self, indices: Indices) -> ImageSet:
        """Return the images at ``indices``; labels and class names stay as they are."""
        return ImageSet(self.images_NHWC[indices], self.labels_N[indices], self.class_names)

    def of_classes(self, classes: Sequence[int] | Labels) -> ImageSet:
        """Return the images of ``classes`` in their present order, labels renumbered 0, 1, ... in the
        order of ``classes``."""
        kept_N, labels_N = relabelled(self.labels_N, len(self.class_names), classes)
        names = tuple(self.class_names[c] for c in classes)
        return ImageSet(self.images_NHWC[kept_N], labels_N[kept_N], names)

    def content_hashes(self) -> list[bytes]:
        """One per image, of its pixels and their shape; found once."""
        return self._content_hashes

    @cached_property
    def _content_hashes(self) -> list[bytes]:
        return [_content_hash(image_HWC) for image_HWC in self.images_NHWC]

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) over shapes, labels and pixels."""
        digest = hashlib.sha256(repr((self.images_NHWC.shape, self.labels_N.shape)).encode())
        digest.update(np.ascontiguousarray(self.labels_N, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self.images_NHWC).data)
        return digest.hexdigest()


def relabelled(
    labels_N: Labels, num_classes: int, classes: Sequence[int] | Labels
) -> tuple[NDArray[np.bool_], Labels]:
    """The images of ``classes``, and all images' positions in ``classes``, -1 for those of other classes."""
    new_label_C = np.full(num_classes, -1, dtype=np.int64)
    new_label_C[np.asarray(classes, dtype=np.int64)] = np.arange(len(classes))
    renumbered_N: Labels = new_label_C[labels_N]
    return renumbered_N >= 0, renumbered_N


@dataclass(frozen=True, eq=False)
class ZeroShotData:
    """Development and test images whose classes are disjoint.

    Test images are both queries and gallery, unless ``test_query`` and ``test_gallery`` say which are which: indices
    of test images, sorted; an image that is both is left out of its own ranking.

    ``damaged`` has the pictures that could not be decoded and were left out: their numbers among the development and
    then the test pictures there were, sorted. Readers of one source, on whatever machine, have equal data if these
    are equal. ``places`` names an image by its number among development's and then test's.

    Raises ValueError if a class name is on both sides, a side has fewer than 2 classes, the sizes differ, or no query
    has another image of its class in the gallery.
    """

    name: str
    development: LabelledImages
    test: LabelledImages
    test_query: Indices | None = None
    test_gallery: Indices | None = None
    damaged: tuple[int, ...] = ()
    places: Callable[[int], str] | None = None
    development_camera_N: Indices | None = None
    """Of each image, -1 where it is unknown; given on both sides, or on none."""
    test_camera_N: Indices | None = None
    left_out: tuple[str, ...] = ()
    """Lines on what the data set's files hold and is not used."""

    def __post_init__(self) -> None:
        shared = sorted(set(self.development.class_names) & set(self.test.class_names))
        if shared:
            raise ValueError(
                f"{self.name}: {len(shared)} classes are in development and test, as {shared[0]!r}"
            )
        own, test = (len(side.class_names) for side in (self.development, self.test))
        if min(own, test) < 2:
            raise ValueError(
                f"{self.name}: of {own + test} classes {test} is kept for the test and {own} to learn from, and"
                " retrieval needs at least 2 on each side; add classes (half are kept for the test; a study needs 7 in"
                " all)"
            )
        if self.development.image_shape != self.test.image_shape:
            raise ValueError(
                f"{self.name}: development images are {self.development.image_shape} (HWC), test images"
                f" {self.test.image_shape}; set data.image_size to resize them"
            )
        assert (self.test_query is None) == (self.test_gallery is None)
        assert (self.development_camera_N is None) == (self.test_camera_N is None)
        if self.test_query is not None and self.test_gallery is not None:
            labels_N = self.test.labels_N
            queried, found = labels_N[self.test_query], labels_N[self.test_gallery]
            if len(queried) == 0 or len(found) < 2 or not np.isin(queried, found).any():
                raise ValueError(
                    f"{self.name}: {len(queried)} queries and {len(found)} gallery images have no class in"
                    " common; mark them by is_query and is_gallery"
                )

    @property
    def num_damaged(self) -> int:
        """Number of pictures that could not be decoded and were left out."""
        return len(self.damaged)

    @cached_property
    def development_fingerprint(self) -> str:
        """The SHA-256 (hex) over all that training and folds see of development."""
        return fingerprint_with(self.development.fingerprint(), self.development_camera_N)

    @cached_property
    def test_fingerprint(self) -> str:
        """The SHA-256 (hex) over all that judging sees of test, with queries, gallery and cameras where given."""
        roles = fingerprint_with(self.test.fingerprint(), self.test_query, self.test_gallery)
        return fingerprint_with(roles, self.test_camera_N)

    @cached_property
    def num_shared_images(self) -> int:
        """Test images whose content occurs in development too: a leak in the data is reported, not hidden."""
        return num_shared(self.development, self.test)

    @cached_property
    def num_shared_between_folds(self) -> int:
        """Development images whose content occurs in another development class too, and so may be on both sides of a
        fold."""
        classes_of: dict[bytes, set[int]] = {}
        contents, labels = self.development.content_hashes(), self.development.labels_N.tolist()
        for content, label in zip(contents, labels, strict=True):
            classes_of.setdefault(content, set()).add(label)
        return sum(len(classes_of[content]) > 1 for content in contents)


def fingerprint_with(fingerprint: str, *further: NDArray[Any] | None) -> str:
    """A fingerprint over further arrays too, in their order; unchanged where all are None."""
    if all(each is None for each in further):
        return fingerprint
    digest = hashlib.sha256(fingerprint.encode())
    for each in further:
        assert each is not None
        digest.update(f"{each.shape} {each.dtype.kind}".encode())
        digest.update(np.ascontiguousarray(each, dtype=each.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


class _Hashed(Protocol):
    def content_hashes(self) -> list[bytes]: ...


def num_shared(development: _Hashed, test: _Hashed) -> int:
    """Number of test items that have the content of one that is trained on."""
    known = set(development.content_hashes())
    return sum(each in known for each in test.content_hashes())


def _content_hash(image_HWC: Images) -> bytes:
    return hashlib.blake2b(image_HWC.tobytes() + repr(image_HWC.shape).encode(), digest_size=16).digest()


def first_half(num_classes: int) -> int:
    """Number of development classes of data without a split: the first half, rounded up."""
    return (num_classes + 1) // 2


def halves(name: str, images: LabelledImages) -> ZeroShotData:
    """Cut by class: the first half of the classes (rounded up) is development, the rest is test."""
    num_classes = len(images.class_names)
    cut = first_half(num_classes)
    return ZeroShotData(name, images.of_classes(range(cut)), images.of_classes(range(cut, num_classes)))


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


def decode(encoded: bytes, name: str, fit: Fit) -> Images:
    """Decode one picture to ``image_HWC`` as evaluation sees it: C=1 for black-and-white and grey modes, else 3;
    errors as ``opened`` has them.
    """
    canvas = fit.canvas(opened(encoded, name, fit.reading))
    if fit.resize_to is None or fit.size is None:
        return as_array(canvas)
    return as_array(centred(canvas, fit.size))


def resize(images_NHWC: Images, image_size: int | tuple[int, int] | None) -> Images:
    """Resize to a square, or to (height, width), antialiased and bilinear; None leaves them unchanged."""
    size = Fit(image_size).size
    if size is None or images_NHWC.shape[1:3] == size:
        return images_NHWC
    resized = [as_array(_resized(as_picture(x), size)) for x in images_NHWC]
    return np.stack(resized) if resized else np.empty((0, *size, 1), np.uint8)


def _resized(picture: Any, size: tuple[int, int] | None) -> Any:
    from PIL import Image

    if size is None or (picture.height, picture.width) == size:
        return picture
    return picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)


def as_picture(image_HWC: Images) -> Any:
    """Pixels as a picture of Pillow's."""
    from PIL import Image

    return Image.fromarray(image_HWC[..., 0] if image_HWC.shape[2] == 1 else image_HWC)


def in_rgb(picture: Any) -> Any:
    """A picture in RGB; one that is already is not copied."""
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def as_array(picture: Any) -> Images:
    """The pixels of a grey or RGB picture, ``image_HWC``."""
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
