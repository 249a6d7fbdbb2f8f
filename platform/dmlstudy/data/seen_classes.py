"""Closed sets: training and test rows of the same classes, as hashing of frozen features is judged on.

Adding a data set is a branch of ``_sides``. Shapes: N rows, F features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dmlstudy.data import datasets, layouts
from dmlstudy.data.cameras import check_none
from dmlstudy.data.datasets import FEATURES, Arrays
from dmlstudy.data.images import (
    Fit,
    ImageSet,
    LabelledImages,
    Labels,
    fingerprint_with,
    num_shared,
    resize,
)
from dmlstudy.data.layouts import EXPECTED_CLOSED, Concepts, Expected, PartSize, check_counts, count
from dmlstudy.data.pictures import Files, Listing, image_sets, joined
from dmlstudy.data.source import Source, taking
from dmlstudy.data.tables import Features
from dmlstudy.text import nearest

CONCEPTS: Mapping[str, tuple[Callable[[Path], Concepts], int]] = {
    "flickr25k": (layouts.flickr25k, 2000),
    "nuswide21": (layouts.nuswide21, 2100),
}
"""Pictures with several concepts each: their layout, and how many of them are queries (``data/README.md``)."""

CLOSED = ("digits", "image_folder", "hf_parquet", *datasets.TORCHVISION, *CONCEPTS, FEATURES)
"""Data sets with training and test rows of the same classes."""

EVERY = 5
"""Of the digits, which come without a split, every fifth is a test image."""


@dataclass(frozen=True, eq=False)
class ClosedSet:
    """Training rows, which are the database in use, and test rows, the queries; labels number the same classes.

    ``concepts``, where items have several, is what each side's rows show, (rows, concepts); relevant is then what
    shares a concept.
    """

    name: str
    development: LabelledImages | Features
    test: LabelledImages | Features
    concepts: tuple[NDArray[np.bool_], NDArray[np.bool_]] | None = None
    places: Callable[[int], str] | None = None
    """As of ``ZeroShotData``."""

    @property
    def relevance(self) -> tuple[Labels | NDArray[np.bool_], Labels | NDArray[np.bool_]]:
        """Relevance of items to each other: concepts or, if there are none, labels."""
        return self.concepts or (self.development.labels_N, self.test.labels_N)

    @cached_property
    def development_fingerprint(self) -> str:
        """The SHA-256 (hex) over training rows: their contents, classes and, if they have them, concepts."""
        return fingerprint_with(
            self.development.fingerprint(), None if self.concepts is None else self.concepts[0]
        )

    @cached_property
    def test_fingerprint(self) -> str:
        """The same over test rows."""
        return fingerprint_with(self.test.fingerprint(), None if self.concepts is None else self.concepts[1])

    @cached_property
    def num_shared_images(self) -> int:
        """Test rows whose content occurs in training too: a leak in the data is reported, not hidden."""
        return num_shared(self.development, self.test)

    @cached_property
    def num_shared_between_folds(self) -> int:
        """Training rows whose content occurs in another one too, and so may be on both sides of a fold of rows."""
        counts = Counter(self.development.content_hashes())
        return sum(count for count in counts.values() if count > 1)


@taking(Source)
def load_closed(source: Source) -> ClosedSet:
    """Load both sides of a closed set; the parameters are those of ``Source``.

    Raises ValueError for a set that has no such sides or whose test classes are not those of training, for pictures
    to be left out, and as ``load``.
    """
    name, image_size = source.name, source.image_size
    if name not in CLOSED:
        raise ValueError(f"data.name: no closed set {name!r}{nearest(name, CLOSED, listed=True)}")
    if source.on_corrupt != "error":
        raise ValueError("data.on_corrupt: a closed set has no way to leave pictures out; set error")
    if source.canvas != "none":
        raise ValueError("data.canvas: of a closed set each picture is read once; leave it out")
    check_none(name, source.camera, "is judged by all rows of its classes")
    datasets.check_sizes(source)
    fit = source.fit
    expected = EXPECTED_CLOSED if source.expected is None else source.expected
    if name == "digits":
        whole = datasets.digits(None, None)
        is_test_N = np.arange(len(whole.labels_N)) % EVERY == EVERY - 1
        images_NHWC = resize(whole.images_NHWC, image_size)
        train, test = (
            ImageSet(images_NHWC[rows_N], whole.labels_N[rows_N], whole.class_names)
            for rows_N in (~is_test_N, is_test_N)
        )
        return ClosedSet(name, train, test)
    found = datasets.existing_folder(name, source.place)
    if name == FEATURES:
        return _features(found)
    if name in CONCEPTS:
        layout, num_queries = CONCEPTS[name]
        pictures = layout(found)
        num_pictures, num_concepts = pictures.shows_NL.shape
        check_counts(name, {layouts.CONCEPTS: PartSize(num_concepts, num_pictures)}, expected[name])
        return _of_concepts(name, pictures, num_queries, fit)
    if name in datasets.TORCHVISION and not datasets.has_parquet(found):
        sides = datasets.torchvision_sides(name, found)
        _check_sides(name, sides, expected)
        train, test = (
            ImageSet(resize(side.images_NHWC, image_size), side.labels_N, side.class_names) for side in sides
        )
        return ClosedSet(name, train, test)
    listings = _class_folders(found) if name == "image_folder" else datasets.parquet_sides(found)
    _check_sides(name, listings, expected)
    _check_classes(name, listings[0].class_names, listings[1].class_names)
    development, queries = image_sets(_numbered_alike(listings), fit)
    return ClosedSet(name, development, queries, places=datasets.places(listings))


def _class_folders(folder: Path) -> list[Listing]:
    sides = [folder / side for side in ("train", "test")]
    for side in sides:
        if not side.is_dir():
            raise ValueError(
                f"data.path: {folder} has no folder {side.name}; a closed set needs train and test, with a sub-folder"
                " per class in each"
            )
    return [datasets.class_folders(side) for side in sides]


def _check_sides(name: str, sides: Sequence[Listing | Arrays], expected: Mapping[str, Expected]) -> None:
    """Raise ValueError where a set whose counts are known has others."""
    if name in expected:
        training, test = (count(side.labels_N) for side in sides)
        check_counts(name, {"training": training, "test": test}, expected[name])


def _of_concepts(name: str, whole: Concepts, num_queries: int, fit: Fit) -> ClosedSet:
    """Pictures without any concept are left out; queries are drawn of the others by a seed that never changes."""
    shown_N = np.flatnonzero(whole.shows_NL.any(axis=1))
    if len(shown_N) <= num_queries:
        raise ValueError(
            f"data.path: {name} has {len(shown_N)} pictures with a concept; needs over {num_queries}"
        )
    drawn = np.random.default_rng(0).permutation(shown_N)
    parts = np.sort(drawn[num_queries:]), np.sort(drawn[:num_queries])
    pictures = Files(whole.paths)
    first_concept_N = whole.shows_NL.argmax(axis=1)
    development, queries = image_sets(
        [Listing(pictures, part, first_concept_N[part], whole.names) for part in parts], fit
    )
    return ClosedSet(name, development, queries, (whole.shows_NL[parts[0]], whole.shows_NL[parts[1]]))


def as_features(rows: LabelledImages | Features) -> NDArray[np.float32]:
    """``x_NF``: vectors unchanged, images as their pixels over 255."""
    if isinstance(rows, Features):
        return rows.x_ND
    height, width, channels = rows.image_shape
    x_NF = np.empty((len(rows), height * width * channels), np.float32)
    for start in range(0, len(rows), 1024):
        part = np.arange(start, min(start + 1024, len(rows)))
        x_NF[part] = rows.read(part).reshape(len(part), -1)
    x_NF /= 255
    return x_NF


def _features(folder: Path) -> ClosedSet:
    train, test = datasets.feature_sides(folder)
    _check_classes(FEATURES, train.class_names, test.class_names)
    place = {each: number for number, each in enumerate(train.class_names)}
    renumbered_C = np.array([place[each] for each in test.class_names], dtype=np.int64)
    return ClosedSet(FEATURES, train, Features(test.x_ND, renumbered_C[test.labels_N], train.class_names))


def _check_classes(name: str, train: Sequence[str], test: Sequence[str]) -> None:
    if strange := sorted(set(test) - set(train)):
        raise ValueError(
            f"data.name: {name} has {len(strange)} test classes that are not trained on, as {strange[0]!r}: it is"
            " no closed set; hashing is judged on queries of the database's classes"
        )


def _numbered_alike(listings: Sequence[Listing]) -> list[Listing]:
    """Both with the classes of both, in the order of the first's."""
    whole = joined(*listings)
    num_first = len(listings[0].labels_N)
    return [
        Listing(whole.pictures, whole.row_N[rows], whole.labels_N[rows], whole.class_names)
        for rows in (slice(num_first), slice(num_first, None))
    ]
