"""Pictures of test classes that are nearly those of development classes: a leak that equal bytes do not tell.

A resized, recompressed or slightly cropped copy has other bytes and is the same picture. Each picture becomes a unit
vector, and each test picture's nearest development pictures are found exactly, in bounded memory (``retrieval``).

Shapes: N pictures, D numbers of a vector, B pictures read at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from dmlstudy import retrieval
from dmlstudy.data import ClosedSet, Features, LabelledImages, ZeroShotData
from dmlstudy.data.images import resize, with_channels
from dmlstudy.heartbeat import beat
from dmlstudy.retrieval.short_forms import unit
from dmlstudy.saved import Model

GREY_SIDE = 16
"""Pixels of a side of the small grey picture that stands for a picture where there is no model."""

BY_GREY, BY_MODEL = 0.98, 0.95
"""Similarities from which pictures are told, where no other is asked for."""

MOST_EACH = 5
"""Development pictures that are listed for a test picture."""

READ_AT_ONCE = 256

FLAT = 1.0
"""Grey levels: a picture whose small one deviates less from its mean, by its standard deviation, shows nothing."""

Floats = NDArray[np.float32]


class Pair(NamedTuple):
    """A test picture and a development picture that it is nearly."""

    similarity: float
    test: str
    test_class: str
    development: str
    development_class: str


class NearDuplicates(NamedTuple):
    """The pairs of a data set, most similar first."""

    pairs: list[Pair]
    """At most ``MOST_EACH`` of each test picture."""
    num_test: int
    """Test pictures that have one."""
    num_searched: int
    """All test pictures that are no flat surface."""
    num_flat: int
    """Pictures of either side that are, and so are like all or none."""
    threshold: float
    by: str

    def lines(self) -> list[str]:
        """The counts in words."""
        line = (
            f"near-duplicates: {self.num_test} of {self.num_searched} test images nearly one of development"
            f" (similarity of {self.threshold:g} or more by {self.by})"
        )
        flat = f"; {self.num_flat} images without any contrast are not compared" if self.num_flat else ""
        return [line + flat]

    def facts(self) -> dict[str, Any]:
        """The same for programs, with all pairs."""
        rest = {name: value for name, value in self._asdict().items() if name != "pairs"}
        return rest | {"pairs": [pair._asdict() for pair in self.pairs]}


def near_duplicates(
    dataset: ZeroShotData | ClosedSet,
    threshold: float | None = None,
    model: Model | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> NearDuplicates:
    """The test pictures that have a development picture whose cosine with them is at least the ``threshold``.

    Vectors are the ``model``'s embeddings, or without one those of ``grey_vectors``; of a set of features these
    themselves. Pictures are seen as for evaluation, and resized to what the model takes.

    Raises ValueError for a threshold outside (0, 1], and a model of another kind of input or geometry.
    """
    is_grey = model is None and not isinstance(dataset.test, Features)
    threshold = (BY_GREY if model is None else BY_MODEL) if threshold is None else threshold
    if not 0 < threshold <= 1:
        raise ValueError(f"a similarity of {threshold:g}: give a number above 0, and 1 at most, as 0.95")
    if model is not None:
        _check(model, dataset)
    vectors = []
    for side, images in (("development", dataset.development), ("test", dataset.test)):
        tell(f"looking at {len(images)} {side} images")
        vectors.append(_vectors(images, model))
    (own_ND, is_own_N), (test_ND, is_test_N) = vectors
    own, test = np.flatnonzero(is_own_N), np.flatnonzero(is_test_N)
    by = f"cosine of {model.name}" if model is not None else "small grey images" if is_grey else "cosine"
    num_flat = len(own_ND) + len(test_ND) - len(own) - len(test)
    if not len(own) or not len(test):
        return NearDuplicates([], 0, len(test), num_flat, threshold, by)
    pairs: list[Pair] = []
    num_test = 0
    tell(f"searching near-duplicates of {len(test)} test images among {len(own)} of development")
    for part in retrieval.in_gallery(test_ND[test], own_ND[own], MOST_EACH):
        cosine_QK = 1 - part.distance_QK.astype(np.float64) ** 2 / 2
        is_near_QK = (cosine_QK >= threshold - _ROUNDING) & (part.index_QK >= 0)
        num_test += int(is_near_QK.any(axis=1).sum())
        for place, rank in zip(*np.nonzero(is_near_QK), strict=True):
            row, other = int(test[part.row_Q[place]]), int(own[part.index_QK[place, rank]])
            pairs.append(_pair(dataset, min(1.0, float(cosine_QK[place, rank])), row, other))
    pairs.sort(key=lambda pair: -pair.similarity)
    return NearDuplicates(pairs, num_test, len(test), num_flat, threshold, by)


_ROUNDING = 1e-6  # of a cosine from a float32 distance


def grey_vectors(images_BHWC: NDArray[np.uint8]) -> tuple[Floats, NDArray[np.bool_]]:
    """Unit vectors of the pictures as 16 x 16 grey ones, by area, without their mean; False for a flat one.

    Their cosine is the correlation of the small pictures: brightness and contrast do not matter, position does.
    """
    grey_BHW = with_channels(images_BHWC, 1)[..., 0].astype(np.float32)
    small = functional.adaptive_avg_pool2d(torch.from_numpy(grey_BHW)[:, None], (GREY_SIDE, GREY_SIDE))
    small_BD = small.flatten(1).numpy().astype(np.float64)
    small_BD = small_BD - small_BD.mean(axis=1, keepdims=True)
    is_seen_B = small_BD.std(axis=1) >= FLAT
    return unit(small_BD), is_seen_B


def _vectors(images: LabelledImages, model: Model | None) -> tuple[Floats, NDArray[np.bool_]]:
    found = []
    for start in range(0, len(images), READ_AT_ONCE):
        beat()
        read = images.read(np.arange(start, min(start + READ_AT_ONCE, len(images))))
        if model is None and read.ndim == 4:
            found.append(grey_vectors(read.astype(np.uint8, copy=False)))
            continue
        if model is not None:
            if read.ndim == 4:
                fitted = resize(read.astype(np.uint8, copy=False), model.takes.image_size)
                read = with_channels(fitted, model.takes.channels)
            read = model.compute(read)
        norms_B = np.linalg.norm(read.astype(np.float64), axis=1)
        found.append((unit(read.astype(np.float64)), norms_B > 0))
    if not found:
        return np.empty((0, 1), np.float32), np.empty(0, np.bool_)
    return np.concatenate([z for z, _ in found]), np.concatenate([seen for _, seen in found])


def _check(model: Model, dataset: ZeroShotData | ClosedSet) -> None:
    shape = dataset.test.image_shape
    if model.kind != "embedder" or model.curvature is not None:
        raise ValueError(
            f"{model.name}: similarity is a cosine, of an embedder on the sphere; name such a model"
        )
    takes_vectors = bool(model.takes.num_features)
    if takes_vectors != (len(shape) == 1) or (takes_vectors and model.takes.num_features != shape[0]):
        kind = f"vectors of {model.takes.num_features} numbers" if takes_vectors else "images"
        raise ValueError(f"{model.name}: takes {kind}, and {dataset.name} has {shape}; name another model")


def _pair(dataset: ZeroShotData | ClosedSet, similarity: float, row: int, other: int) -> Pair:
    sides = dataset.development, dataset.test
    own_class, test_class = (
        side.class_names[int(side.labels_N[number])] for side, number in zip(sides, (other, row), strict=True)
    )
    places = dataset.places
    if places is None:
        return Pair(similarity, f"test image {row}", test_class, f"development image {other}", own_class)
    return Pair(similarity, places(len(sides[0]) + row), test_class, places(other), own_class)
