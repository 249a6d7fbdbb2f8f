"""A cheap digest of a data set's files, by which two machines see whether they have the same."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence

import numpy as np

from dmlstudy.data.images import ZeroShotData
from dmlstudy.data.loader import in_threads
from dmlstudy.data.pictures import LazyImages
from dmlstudy.data.seen_classes import ClosedSet

NUM_SIZED = 2**16
"""Number of pictures, spread evenly over the set, whose file sizes are read."""

EDGE_BYTES = 2**16
"""So much of a file of many pictures is read at its beginning and at its end."""

MANY = ", row "
"""The separator of file and row in the place of a picture that has no file of its own."""


def files_digest(dataset: ZeroShotData | ClosedSet, root: str | None) -> str:
    """A digest of which pictures there are: equal for copies of the same files, at other places and times too.

    It is over all names below the data's ``root`` (or beside it, where it is a file), labels and classes, and over the
    file sizes of up to ``NUM_SIZED`` pictures; of a file with many pictures over its size, beginning and end. Arrays
    and vectors, which are in memory, count with all they hold.

    Different pictures are noticed; one that was repainted among millions may not be.

    1.3 million pictures take 3 s of a processor, and no picture is read.
    """
    digest = hashlib.blake2b(digest_size=16)
    sides = (dataset.development, dataset.test)
    for side in sides:
        digest.update(repr(side.class_names).encode())
        digest.update(np.ascontiguousarray(side.labels_N, dtype="<i8").data)
    for concepts_NC in getattr(dataset, "concepts", None) or ():
        digest.update(np.ascontiguousarray(concepts_NC).data)
    for name in ("development_camera_N", "test_camera_N"):
        if (camera_N := getattr(dataset, name, None)) is not None:
            digest.update(np.ascontiguousarray(camera_N, dtype="<i8").data)
    places = _places(dataset)
    if not places:
        for side in sides:
            digest.update(side.fingerprint().encode())
        return digest.hexdigest()
    folder = root if root is None or os.path.isdir(root) else os.path.dirname(root)
    below = os.path.join(folder, "") if folder else ""
    for place in places:
        digest.update(place.removeprefix(below).encode(errors="surrogateescape") + b"\0")
    spread = np.unique(np.linspace(0, len(places) - 1, min(len(places), NUM_SIZED)).astype(int))
    digest.update("".join(_signs([places[number] for number in spread])).encode())
    return digest.hexdigest()


def _places(dataset: ZeroShotData | ClosedSet) -> list[str]:
    """The place of each picture, development's and then test's; empty where it is not known."""
    if dataset.places is not None:
        return [dataset.places(number) for number in range(len(dataset.development) + len(dataset.test))]
    sides = [side for side in (dataset.development, dataset.test) if isinstance(side, LazyImages)]
    return [side.pictures.place(row) for side in sides for row in side.row_N.tolist()]


def _signs(places: Sequence[str]) -> list[str]:
    """A sign of each picture's file, the same for its copy."""
    edges = functools.cache(_edges)

    def of(number: int) -> str:
        path, is_one_of_many, _ = places[number].rpartition(MANY)
        return edges(path) if is_one_of_many else f"{_size(places[number])} "

    return list(in_threads(of, list(range(len(places)))))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _edges(path: str) -> str:
    """The size of a file and a digest of its beginning and end."""
    size = _size(path)
    try:
        with open(path, "rb") as file:
            begins = file.read(EDGE_BYTES)
            file.seek(max(0, size - EDGE_BYTES))
            content = begins + file.read(EDGE_BYTES)
    except OSError:
        content = b""
    return f"{size} {hashlib.blake2b(content, digest_size=16).hexdigest()} "
