"""The data of trials, read once by a process that runs many."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dmlstudy import data, embedders
from dmlstudy.data import ClosedSet, Features, Fit, LabelledImages, ZeroShotData
from dmlstudy.data.images import with_channels
from dmlstudy.records import DataConfig

NUM_EXAMPLES = 8
"""Test items that are kept with a saved model, and what it computed of them in training."""

EMBEDDED = 256
"""Images that are read and embedded at once, where an embedder makes the features."""

PIXELS, GREY = "pixels", "grey"
"""Features of images that need no embedder: their numbers over 255, of all channels or of luma alone."""


def found_from(config: DataConfig, cwd: str | None) -> DataConfig:
    """Data with their path as it is found: from here, or from ``cwd``, where the study was started."""
    if config.path is None or cwd is None or Path(config.path).exists():
        return config
    moved = Path(cwd, config.path)
    return config.model_copy(update={"path": str(moved)}) if moved.exists() else config


@functools.lru_cache(maxsize=1)
def zero_shot(config: DataConfig) -> ZeroShotData:
    """``data.load`` of the configuration."""
    return data.load(**config.model_dump())


@functools.lru_cache(maxsize=1)
def retention(config: DataConfig) -> ZeroShotData:
    """``data.load`` of the retention data, kept beside the study's own."""
    return data.load(**config.model_dump())


@functools.lru_cache(maxsize=1)
def closed(config: DataConfig) -> ClosedSet:
    """``data.load_closed`` of the configuration."""
    return data.load_closed(**config.model_dump())


def fit_of(config: DataConfig) -> Fit:
    """The conversion of a data set's pictures to its images."""
    return data.Source(**config.model_dump()).fit


def features_of(
    rows: LabelledImages | Features, name: str, device: torch.device | None = None
) -> NDArray[np.float32]:
    """``x_NF``: vectors as they are; of images pixels, grey pixels, or what the embedder in the folder ``name`` says.

    Raises ValueError for an embedder's folder that is not sound.
    """
    if isinstance(rows, Features) or name == PIXELS:
        return data.as_features(rows)
    embedder = None if name == GREY else embedders.load(name).to(device)
    parts = []
    for start in range(0, len(rows), EMBEDDED):
        images_NHWC = rows.read(np.arange(start, min(start + EMBEDDED, len(rows))))
        if embedder is not None:
            parts.append(embedders.embed(embedder, images_NHWC, device=device))
        else:
            grey_NHW1 = with_channels(images_NHWC.astype(np.uint8, copy=False), 1)
            parts.append(grey_NHW1.reshape(len(grey_NHW1), -1).astype(np.float32) / np.float32(255))
    return np.concatenate(parts)


def forget() -> None:
    """Give the memory back, and have the files read again when they are asked for next."""
    zero_shot.cache_clear()
    retention.cache_clear()
    closed.cache_clear()
