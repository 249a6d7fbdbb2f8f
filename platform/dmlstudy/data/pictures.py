"""Labelled pictures that are decoded when they are read, so that memory does not grow with their number.

Shapes: N images of the set, B images read at once, H, W, C height, width and channels.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dmlstudy.data.augmentation import RandomView, centred
from dmlstudy.data.canvas import GIB, Canvas, Decoder, Kind, Sheet, key_of
from dmlstudy.data.decoding import DamagedImage, Reading, header_size, marks, opened
from dmlstudy.data.images import (
    CHANNELS,
    Fit,
    Images,
    ImageSet,
    Indices,
    Labels,
    RandomViews,
    as_array,
    as_picture,
    first_half,
    in_rgb,
    relabelled,
    stack,
)
from dmlstudy.data.loader import in_threads

IN_MEMORY_BYTES = 2**30
"""Pictures that take no more than this once they are decoded are kept decoded, if all have one size."""

DIGEST_BYTES = 16


class Pictures(Protocol):
    """Encoded pictures by number; threads may read them at once."""

    def __len__(self) -> int: ...

    def place(self, row: int) -> str:
        """The picture's name for people: its file, or its file and row."""

    def encoded(self, row: int) -> bytes:
        """The picture as it is stored; OSError or ValueError where it cannot be read."""


@dataclass(frozen=True)
class Files:
    """Pictures in files of their own."""

    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def place(self, row: int) -> str:
        return str(self.paths[row])

    def encoded(self, row: int) -> bytes:
        return self.paths[row].read_bytes()


@runtime_checkable
class HasColumns(Protocol):
    """Pictures of which more is known than their class."""

    def column(self, name: str) -> Sequence[Any] | None:
        """A value of each picture, None where it has none; None if there is no such column."""


@dataclass(frozen=True)
class TabledFiles(Files):
    """Pictures in files of their own that a table lists, with the table's columns."""

    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def column(self, name: str) -> Sequence[Any] | None:
        return self.columns.get(name)


@dataclass(frozen=True)
class Joined:
    """Two sources one after the other."""

    first: Pictures
    second: Pictures

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def place(self, row: int) -> str:
        source, own = self._of(row)
        return source.place(own)

    def encoded(self, row: int) -> bytes:
        source, own = self._of(row)
        return source.encoded(own)

    def column(self, name: str) -> Sequence[Any] | None:
        both = [
            each.column(name) if isinstance(each, HasColumns) else None for each in (self.first, self.second)
        ]
        if all(values is None for values in both):
            return None
        sizes = (len(self.first), len(self.second))
        return [
            value
            for values, size in zip(both, sizes, strict=True)
            for value in (values if values is not None else [None] * size)
        ]

    def _of(self, row: int) -> tuple[Pictures, int]:
        split = len(self.first)
        return (self.first, row) if row < split else (self.second, row - split)


@dataclass(frozen=True)
class Listing:
    """Pictures with a class each, before anyone has decided whether they are kept decoded."""

    pictures: Pictures
    row_N: Indices
    labels_N: Labels
    class_names: tuple[str, ...]

    def part(self, keep_N: NDArray[np.bool_]) -> Listing:
        """The pictures kept, with the classes that are left, renumbered in their order."""
        classes, labels_N = np.unique(self.labels_N[keep_N], return_inverse=True)
        names = tuple(self.class_names[c] for c in classes)
        return Listing(self.pictures, self.row_N[keep_N], labels_N.astype(np.int64), names)


def listing(pictures: Pictures, labels: Sequence[int] | Labels, class_names: Sequence[str]) -> Listing:
    """All pictures of a source, labelled."""
    labels_N = np.asarray(labels, dtype=np.int64)
    assert len(pictures) == len(labels_N)
    return Listing(pictures, np.arange(len(labels_N)), labels_N, tuple(class_names))


def by_name(pictures: Pictures, names: Sequence[str]) -> Listing:
    """All pictures of a source, labelled by names; classes are numbered as their names first come up."""
    return by_listed_name(pictures, names, list(dict.fromkeys(names)))


def by_listed_name(pictures: Pictures, names: Sequence[str], class_names: Sequence[str]) -> Listing:
    """All pictures of a source, labelled by names; classes are numbered as ``class_names`` lists them."""
    position = {name: number for number, name in enumerate(class_names)}
    return listing(pictures, [position[name] for name in names], class_names)


def in_order(labels: Iterable[str]) -> list[str]:
    """The different labels by their numbers, if all are whole numbers, else by their names."""
    names = sorted(set(labels))
    is_number = all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names)
    return sorted(names, key=lambda name: (int(name), name)) if is_number else names


def joined(first: Listing, second: Listing) -> Listing:
    """Both, where classes of one name are one class."""
    names = tuple(dict.fromkeys(first.class_names + second.class_names))
    position = {name: number for number, name in enumerate(names)}
    renumbered_C = np.array([position[name] for name in second.class_names], dtype=np.int64)
    return Listing(
        Joined(first.pictures, second.pictures),
        np.concatenate([first.row_N, second.row_N + len(first.pictures)]),
        np.concatenate([first.labels_N, renumbered_C[second.labels_N]]),
        names,
    )


def halved(whole: Listing) -> tuple[Listing, Listing]:
    """Cut by class: the first half of the classes (rounded up), and the rest."""
    is_first_N = whole.labels_N < first_half(len(whole.class_names))
    return whole.part(is_first_N), whole.part(~is_first_N)


def class_disjoint(place: str, train: Listing, test: Listing) -> tuple[Listing, Listing]:
    """Development and test pictures of a source that comes with a training and a test split.

    Classes are the same where their names are, and names are the class ids where a source has no others. Splits
    without a common class are zero-shot already and stay as they are. Splits of the same set of classes, as are made
    for classification, are merged and halved by class, in the order of training's class ids.

    Raises ValueError, which begins with ``place``, where only some classes are in both: which side such a class is
    for is not known, and ids alone may well mean other classes on the other side.
    """
    of_train, of_test = set(train.class_names), set(test.class_names)
    shared = [name for name in train.class_names if name in of_test]
    if not shared:
        return train, test
    if of_train != of_test:
        raise ValueError(
            f"{place}: {len(shared)} of {len(of_train)} training and {len(of_test)} test classes are"
            f" in both splits, as {shared[0]!r}; give the splits other classes (or other ids), or the same ones, which"
            " are then cut in half"
        )
    return halved(joined(train, test))


@dataclass(frozen=True, eq=False)
class LazyImages:
    """Pictures decoded as they are read, with the interface of ``ImageSet``; always RGB.

    Reading raises ValueError that names the picture where it is damaged, missing, or of another size than the
    first one and ``data.image_size`` is not given. The fingerprint is over the stored bytes, in their order.
    ``way_out`` is what else the error of a damaged picture says that can be done.

    ``canvas``, once it is open, has the pictures decoded; what is read is the same.
    """

    decodes: ClassVar[bool] = True
    """Reading is work for a processor, which a loader may leave to processes."""

    pictures: Pictures
    row_N: Indices
    labels_N: Labels
    class_names: tuple[str, ...]
    fit: Fit
    image_shape: tuple[int, int, int]
    digests: dict[int, bytes] = field(default_factory=dict)  # of pictures' rows; shared by selections
    way_out: str = ""
    canvas: Canvas | None = None

    def __len__(self) -> int:
        return len(self.labels_N)

    def select(self, indices: Indices) -> LazyImages:
        """The pictures at ``indices``; labels and class names stay as they are."""
        return self._with(self.row_N[indices], self.labels_N[indices], self.class_names)

    def of_classes(self, classes: Sequence[int] | Labels) -> LazyImages:
        """The pictures of ``classes`` in their present order, labels renumbered in the order of ``classes``."""
        kept_N, labels_N = relabelled(self.labels_N, len(self.class_names), classes)
        names = tuple(self.class_names[c] for c in classes)
        return self._with(self.row_N[kept_N], labels_N[kept_N], names)

    def read(self, indices: Indices, views: RandomViews | None = None) -> Images:
        """``images_BHWC`` at ``indices``; each through its view, or as for evaluation."""
        images_BHWC = np.empty((len(indices), *self.image_shape), dtype=np.uint8)
        for position, index in enumerate(indices.tolist()):
            images_BHWC[position] = self._one(index, views(index) if views else None)
        return images_BHWC

    def content_hashes(self) -> list[bytes]:
        """The BLAKE2b of each picture as it is stored, and of how it is turned or made opaque, if it is; found once."""
        rows = self.row_N.tolist()
        new = [row for row in dict.fromkeys(rows) if row not in self.digests]
        self.digests.update(zip(new, in_threads(self._digest, new), strict=True))
        return [self.digests[row] for row in rows]

    def fingerprint(self) -> str:
        """The SHA-256 (hex) over sizes, labels and the contents of all pictures."""
        # How pictures are read is in the contents' digests, where it makes a difference.
        sizes = (self.fit.image_size, self.fit.resize_to, self.fit.keep_aspect)
        digest = hashlib.sha256(repr((len(self), self.image_shape, sizes)).encode())
        digest.update(np.ascontiguousarray(self.labels_N, dtype="<i8").data)
        for each in self.content_hashes():
            digest.update(each)
        return digest.hexdigest()

    def _digest(self, row: int) -> bytes:
        content = encoded(self.pictures, row)
        digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES)
        digest.update(marks(content, self.fit.reading))
        return digest.digest()

    def _with(self, row_N: Indices, labels_N: Labels, names: tuple[str, ...]) -> LazyImages:
        return LazyImages(
            self.pictures,
            row_N,
            labels_N,
            names,
            self.fit,
            self.image_shape,
            self.digests,
            self.way_out,
            self.canvas,
        )

    def _one(self, index: int, view: RandomView | None) -> Images:
        row = int(self.row_N[index])
        kept_HWC = None if self.canvas is None else self.canvas.read(row)
        if kept_HWC is None:
            picture = self.fit.canvas(in_rgb(_decode(self.pictures, row, self.fit, self.way_out)))
        elif view is not None and view.augmentation.only_cuts:
            picture = Sheet(kept_HWC)
        else:
            picture = as_picture(kept_HWC)
        size = self.image_shape[:2]
        if self.fit.image_size is None and (picture.height, picture.width) != size:
            raise ValueError(
                f"{self.pictures.place(row)}: image is {(picture.height, picture.width)}, the first one is {size};"
                " set data.image_size to resize them"
            )
        seen = view.of(picture, size) if view else centred(picture, size)
        return as_array(seen)


def prepare(images: object) -> None:
    """Have the pictures' canvases made and mapped, where ``data.canvas`` asks for them and they are not yet.

    Raises ValueError where there is no room for them.
    """
    if isinstance(images, LazyImages) and images.canvas is not None:
        images.canvas.open()


def _canvas(images: LazyImages, kind: Kind, most_gib: float) -> Canvas:
    """The canvases of all pictures of a set; those of its selections are among them."""
    row_N, first_N = np.unique(images.row_N, return_index=True)
    fit = images.fit

    def key() -> str:
        contents = images.content_hashes()
        return key_of([contents[position] for position in first_N.tolist()], fit)

    def num_bytes(row: int) -> int:
        try:
            size = header_size(encoded(images.pictures, row), images.pictures.place(row))
        except ValueError:
            return 0
        width, height = fit.canvas_size(size)  # in either order, if it is turned
        return CHANNELS * width * height

    def pixels(row: int) -> Images:
        return as_array(fit.canvas(in_rgb(_decode(images.pictures, row, fit, images.way_out))))

    return Canvas(row_N, Decoder(key, num_bytes, pixels), kind, most_gib * GIB)


def encoded(pictures: Pictures, row: int) -> bytes:
    """The picture as it is stored; raises ValueError naming it where it cannot be read."""
    try:
        return pictures.encoded(row)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{pictures.place(row)}: not readable ({reason}); repair or remove it") from None


def _decode(pictures: Pictures, row: int, fit: Fit, way_out: str) -> Any:
    """A decoded picture; raises ValueError naming one that cannot be read, of a damaged one with the ``way_out``."""
    try:
        return opened(encoded(pictures, row), pictures.place(row), fit.reading)
    except DamagedImage as error:
        raise (DamagedImage(f"{error}, or {way_out}") if way_out else error) from error.__cause__


def image_sets(
    listings: Sequence[Listing],
    fit: Fit,
    way_out: str = "",
    *,
    canvas: Kind = "none",
    canvas_gib: float = 0.0,
) -> list[ImageSet] | list[LazyImages]:
    """The listings as sets with one interface, kept decoded if they are small together and of one size each.

    Decoded sets are grey if all their pictures are, else all are RGB; lazy ones are RGB. ``way_out`` is as of
    ``LazyImages``. Lazy ones have a ``canvas`` of this kind, one in memory of at most ``canvas_gib``.

    Raises ValueError naming a picture that is damaged, or whose size differs where ``data.image_size`` is not
    given; a lazy set's pictures are checked when they are read.
    """
    num_images = sum(len(each.labels_N) for each in listings)
    shape = _shape_of_first(next(each for each in listings if len(each.labels_N)), fit, way_out)
    if fit.resize_to is None and num_images * shape[0] * shape[1] * CHANNELS <= IN_MEMORY_BYTES:
        return _decoded(listings, fit, way_out)
    found = [
        LazyImages(
            each.pictures,
            each.row_N,
            each.labels_N,
            each.class_names,
            fit,
            (*shape, CHANNELS),
            shared,
            way_out,
        )
        for each, shared in _with_shared_digests(listings)
    ]
    if canvas == "none":
        return found
    return [replace(each, canvas=_canvas(each, canvas, canvas_gib)) for each in found]


def _with_shared_digests(listings: Sequence[Listing]) -> list[tuple[Listing, dict[int, bytes]]]:
    shared: dict[int, dict[int, bytes]] = {}
    return [(each, shared.setdefault(id(each.pictures), {})) for each in listings]


def _decoded(listings: Sequence[Listing], fit: Fit, way_out: str) -> list[ImageSet]:
    def pictures() -> Iterator[tuple[str, Images]]:
        for each in listings:
            for row in each.row_N.tolist():
                read = _decode(each.pictures, row, fit, way_out)
                yield each.pictures.place(row), as_array(fit.canvas(read))

    sizes = [len(each.labels_N) for each in listings]
    parts = np.split(stack(pictures(), sum(sizes)), np.cumsum(sizes)[:-1])
    return [
        ImageSet(images_NHWC, each.labels_N, each.class_names)
        for images_NHWC, each in zip(parts, listings, strict=True)
    ]


def _shape_of_first(first: Listing, fit: Fit, way_out: str) -> tuple[int, int]:
    if fit.size is not None:
        return fit.size
    picture = _decode(first.pictures, int(first.row_N[0]), fit, way_out)
    return (picture.height, picture.width)


def sound(each: Listing, reading: Reading) -> NDArray[np.bool_]:
    """The pictures that can be decoded; every one is, once.

    Raises ValueError naming a picture whose bytes cannot be read: that says nothing of the picture, and may pass, or
    be so on one machine only.
    """

    def is_sound(row: int) -> bool:
        try:
            opened(encoded(each.pictures, row), each.pictures.place(row), reading)
        except DamagedImage:
            return False
        return True

    return np.array(in_threads(is_sound, each.row_N.tolist()), dtype=np.bool_)
