"""The data of trials, read once by a process that runs many."""

from __future__ import annotations

import functools

from dmlstudy import data
from dmlstudy.data import ClosedSet, ZeroShotData
from dmlstudy.records import DataConfig


@functools.lru_cache(maxsize=1)
def zero_shot(config: DataConfig) -> ZeroShotData:
    """``data.load`` of the configuration."""
    return data.load(**config.model_dump())


@functools.lru_cache(maxsize=1)
def closed(config: DataConfig) -> ClosedSet:
    """``data.load_closed`` of the configuration."""
    return data.load_closed(**config.model_dump())


def forget() -> None:
    """Give the memory back, and have the files read again when they are asked for next."""
    zero_shot.cache_clear()
    closed.cache_clear()
