"""Items of all forms as a model takes them: arrays, and whatever files ``dmlstudy embed`` reads.

Shapes: N items, F features.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmlstudy import data
from dmlstudy.data import Inputs
from dmlstudy.data.images import resize, with_channels
from dmlstudy.saved.model import Model

Items: TypeAlias = "NDArray[Any] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""An array, the path of anything that ``dmlstudy embed`` reads, or several such paths."""


def batches(model: Model, items: Items) -> Iterator[NDArray[Any]]:
    """The items as the model takes them, in their order; an array in one piece.

    Raises ValueError for items of another kind or size, naming the file at fault.
    """
    if isinstance(items, np.ndarray):
        yield _checked(model, items)
        return
    paths = [items] if isinstance(items, str | os.PathLike) else list(items)
    if not paths or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise ValueError(
            f"{model.name}: embeds an array, a path or a list of paths, not {type(items).__name__}; for arrays"
            " np.stack them"
        )
    for path in paths:
        inputs = of_files(model, Path(path).expanduser())
        for start in range(0, len(inputs), model.batch_size):
            yield inputs.read(range(start, min(start + model.batch_size, len(inputs))))


def of_files(model: Model, inputs: str | Path, max_pixels: int | None = None) -> Inputs:
    """The content of files as the model takes it: images prepared as in its training, or vectors of its size.

    Raises ValueError naming what is missing, or of another kind.
    """
    fit = model.fit
    if fit is None:
        return data.open_vectors(inputs, model.takes.num_features)
    if max_pixels is not None:
        fit = fit._replace(reading=fit.reading._replace(max_pixels=max_pixels))
    return data.open_images(inputs, fit, model.takes.channels)


def _checked(model: Model, items: NDArray[Any]) -> NDArray[Any]:
    """An array as the model takes it."""
    if model.fit is None:
        if items.ndim != 2 or items.shape[1] != model.takes.num_features:
            raise ValueError(
                f"{model.name}: takes vectors (N, {model.takes.num_features}), not an array {items.shape}"
            )
        return np.ascontiguousarray(items, dtype=np.float32)
    images = items[..., None] if items.ndim == 3 else items
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
        raise ValueError(
            f"{model.name}: takes images, uint8 NHW or NHWC with 1 or 3 channels, not {items.dtype} {items.shape}"
        )
    return with_channels(resize(images, model.fit.image_size), model.takes.channels)
