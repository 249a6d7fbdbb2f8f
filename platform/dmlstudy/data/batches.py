"""Batches of indices, drawn globally so that every world size sees the same ones, each a function of its number.

Shapes: N images, P classes and K images of each in a batch, B = P*K images per global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from dmlstudy.data.images import Indices, Labels


class Batches(Protocol):
    """The batches of an epoch."""

    def __len__(self) -> int:
        """Number of batches per epoch."""

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Indices]:
        """The epoch's batches of global indices, from number ``first`` on, as an unbroken epoch has them."""


class PKBatches:
    """Global index batches of ``classes`` (P) classes with ``images_per_class`` (K) images each.

    A batch is a function of (seed, epoch, its number) only. Classes are drawn without replacement, and
    images within a class too; a class with n < K images gives all n and K - n of them again, with the same
    index, so that a loss can leave out pairs of one image.

    ``batches_per_epoch`` defaults to max(1, N // (P*K)).
    Raises ValueError if there are fewer than P classes.
    """

    def __init__(
        self,
        labels_N: Labels,
        classes: int,
        images_per_class: int,
        batches_per_epoch: int | None = None,
        seed: int = 0,
    ) -> None:
        _, class_N = np.unique(labels_N, return_inverse=True)
        num_classes = int(class_N.max()) + 1 if len(labels_N) else 0
        if not 1 <= classes <= num_classes:
            raise ValueError(
                f"batch.classes: {classes} classes per batch, but training has {num_classes}; "
                f"set batch.classes to at most {num_classes}"
            )
        if images_per_class < 1:
            raise ValueError(f"batch.images_per_class: {images_per_class}, expected at least 1")
        order_N = np.argsort(class_N, kind="stable")
        self._members = np.split(order_N, np.cumsum(np.bincount(class_N))[:-1])
        self._classes = classes
        self._images_per_class = images_per_class
        self._seed = seed
        self._num_batches = batches_per_epoch or max(1, len(labels_N) // (classes * images_per_class))

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self._num_batches

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Indices]:
        """Yield the epoch's batches of B global indices from number ``first`` on, a class's K images side by side."""
        for number in range(first, self._num_batches):
            yield self._batch(np.random.default_rng([self._seed, epoch, number]))

    def _batch(self, rng: np.random.Generator) -> Indices:
        drawn_P = rng.choice(len(self._members), size=self._classes, replace=False)
        return np.concatenate([self._draw(rng, self._members[c]) for c in drawn_P])

    def _draw(self, rng: np.random.Generator, members: Indices) -> Indices:
        num_missing = self._images_per_class - len(members)
        if num_missing <= 0:
            return rng.choice(members, size=self._images_per_class, replace=False)
        return np.concatenate([rng.permutation(members), rng.choice(members, size=num_missing)])


class TwoDraws(PKBatches):
    """Two sub-batches of the same P classes in the same order, K images of each class in each.

    The K images of a class are drawn again for the second sub-batch, so an image may be in both. The batch is the
    first and then the second, 2*P*K images; CGML has 2 x 13 x 10. Graph consistency with ``draw='two_draws'`` takes
    its first half as X' and its second as X''.

    ``batches_per_epoch`` defaults to max(1, N // (2*P*K)).
    """

    def __init__(
        self,
        labels_N: Labels,
        classes: int,
        images_per_class: int,
        batches_per_epoch: int | None = None,
        seed: int = 0,
    ) -> None:
        length = batches_per_epoch or max(
            1, len(labels_N) // (2 * max(classes, 1) * max(images_per_class, 1))
        )
        super().__init__(labels_N, classes, images_per_class, length, seed)

    def _batch(self, rng: np.random.Generator) -> Indices:
        drawn_P = rng.choice(len(self._members), size=self._classes, replace=False)
        return np.concatenate([self._draw(rng, self._members[c]) for _ in range(2) for c in drawn_P])


class RandomBatches:
    """Global batches of ``batch_size`` images of any class; no image comes up again before all others have.

    The batches of all epochs are cut from one sequence of passes, each an order of all N images drawn from (seed, its
    number). Orders are uniform, except that a pass whose first images complete a batch begins with images which are
    not in that batch, so that no batch holds an image twice.

    A batch is thus a function of (seed, batches per epoch, epoch, its number) only.

    ``batches_per_epoch`` defaults to max(1, N // batch_size). Raises ValueError if there are fewer images than a
    batch takes.
    """

    def __init__(
        self, num_images: int, batch_size: int, batches_per_epoch: int | None = None, seed: int = 0
    ) -> None:
        if not 1 <= batch_size <= num_images:
            raise ValueError(
                f"batch: {batch_size} images per batch, but training has {num_images};"
                " set batch.classes or batch.images_per_class lower"
            )
        self._num_images = num_images
        self._batch_size = batch_size
        self._seed = seed
        self._num_batches = batches_per_epoch or num_images // batch_size
        self._first = 0, np.random.default_rng([seed, 0]).permutation(num_images)  # a pass and its order
        self._last = self._first

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self._num_batches

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Indices]:
        """Yield the epoch's batches of global indices from number ``first`` on."""
        for number in range(epoch * self._num_batches + first, (epoch + 1) * self._num_batches):
            number_of_pass, start = divmod(number * self._batch_size, self._num_images)
            batch = self._order(number_of_pass)[start : start + self._batch_size]
            if num_missing := self._batch_size - len(batch):
                batch = np.concatenate([batch, self._order(number_of_pass + 1)[:num_missing]])
            yield batch

    def _order(self, number: int) -> Indices:
        """The order of a pass, computed from the last one requested, or from the first."""
        last, order_N = self._last if self._last[0] <= number else self._first
        for each in range(last + 1, number + 1):
            order_N = self._after(order_N, each)
        self._last = number, order_N
        return order_N

    def _after(self, before_N: Indices, number: int) -> Indices:
        """The order of pass ``number``, before which comes ``before_N``."""
        rng = np.random.default_rng([self._seed, number])
        order_N = rng.permutation(self._num_images)
        # What the pass before gives to the batch that lies in both.
        num_given = number * self._num_images % self._batch_size
        if num_given == 0:
            return order_N
        is_given_N = np.isin(order_N, before_N[-num_given:])
        beginning = order_N[~is_given_N][: self._batch_size - num_given]
        rest = np.setdiff1d(order_N, beginning)
        return np.concatenate([beginning, rng.permutation(rest)])
