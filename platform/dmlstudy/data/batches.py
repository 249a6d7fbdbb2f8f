"""PK batches: P classes with K images each, drawn globally so that every world size sees the same ones.

Shapes: N images, B = P*K images per global batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dmlstudy.data.images import Indices, Labels


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

    def epoch(self, epoch: int) -> Iterator[Indices]:
        """Yield the epoch's batches of B global indices, each class's K images side by side."""
        for number in range(self._num_batches):
            rng = np.random.default_rng([self._seed, epoch, number])
            drawn_P = rng.choice(len(self._members), size=self._classes, replace=False)
            yield np.concatenate([self._draw(rng, self._members[c]) for c in drawn_P])

    def _draw(self, rng: np.random.Generator, members: Indices) -> Indices:
        num_missing = self._images_per_class - len(members)
        if num_missing <= 0:
            return rng.choice(members, size=self._images_per_class, replace=False)
        return np.concatenate([rng.permutation(members), rng.choice(members, size=num_missing)])
