"""A saved model in memory, for Python: arrays or files in, embeddings out.

Shapes: N items, D embedding size, F features.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmlstudy import data
from dmlstudy.data.images import resize, with_channels
from dmlstudy.models import saved

Items: TypeAlias = "NDArray[Any] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""An array, the path of anything that ``dmlstudy embed`` reads, or several such paths."""


class LoadedModel:
    """An embedder, a hashing model or an online learner, loaded from its folder after each file was checked."""

    def __init__(self, folder: str | Path, device: str = "auto", batch_size: int = 256) -> None:
        self.name = str(folder)
        self.kind = saved.kind_of(folder).name
        self.takes = saved.takes(folder)
        self._fit = saved.fit_of(folder)
        self._batch_size = batch_size
        self._compute = saved.verified(folder, device=device, batch_size=batch_size)

    def embed(self, items: Items) -> NDArray[Any]:
        """The embeddings (N, D), or codes, of the items in their order.

        An array holds images, uint8 NHW or NHWC, which become what the model was trained on; or vectors (N, F). Raises
        ValueError for items of another kind or size, naming the file at fault.
        """
        if isinstance(items, str | os.PathLike):
            return self._of_file(items)
        if isinstance(items, np.ndarray):
            return self._compute(self._checked(items))
        paths = list(items)
        if not paths or not all(isinstance(path, str | os.PathLike) for path in paths):
            raise ValueError(
                f"{self.name}: embeds an array, a path or a list of paths, not {type(items).__name__}; for arrays"
                " np.stack them"
            )
        return np.concatenate([self._of_file(path) for path in paths])

    def __repr__(self) -> str:
        size, channels, num_features = self.takes
        what = (
            f"images {size} x {size} x {channels}" if size else f"vectors of {num_features or 'any'} numbers"
        )
        return f"<{self.kind} {self.name} of {what}>"

    def _of_file(self, path: str | os.PathLike[str]) -> NDArray[Any]:
        place = Path(path).expanduser()
        if self._fit is None:
            inputs = data.open_vectors(place, self.takes.num_features)
        else:
            inputs = data.open_images(place, self._fit, self.takes.channels)
        starts = range(0, len(inputs), self._batch_size)
        parts = [range(start, min(start + self._batch_size, len(inputs))) for start in starts]
        return np.concatenate([self._compute(inputs.read(part)) for part in parts])

    def _checked(self, items: NDArray[Any]) -> NDArray[Any]:
        """The array as the model takes it."""
        if self._fit is None:
            if items.ndim != 2 or items.shape[1] != self.takes.num_features:
                raise ValueError(
                    f"{self.name}: takes vectors (N, {self.takes.num_features}), not an array {items.shape}"
                )
            return np.ascontiguousarray(items, dtype=np.float32)
        images = items[..., None] if items.ndim == 3 else items
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
            raise ValueError(
                f"{self.name}: takes images, uint8 NHW or NHWC with 1 or 3 channels, not {items.dtype} {items.shape}"
            )
        return with_channels(resize(images, self._fit.image_size), self.takes.channels)
