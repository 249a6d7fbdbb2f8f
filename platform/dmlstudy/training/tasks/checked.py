"""One line, beginning with the key, on a part that could not be built in a trial construction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dmlstudy.text import one_line

TOO_LARGE = (MemoryError, OverflowError, RuntimeError)
"""Errors of numbers that ask for more than this machine can hold."""


@contextmanager
def refused(key: str) -> Iterator[None]:
    """Turn what is wrong with a part that is built in the block into a ValueError with its key."""
    try:
        yield
    except (ValueError, *TOO_LARGE) as error:
        raise ValueError(f"{key}: {said(error)}") from None


def said(error: Exception) -> str:
    if isinstance(error, TOO_LARGE):
        return (
            f"cannot be built on this machine ({one_line(error, 160) or 'too large'}); set its numbers lower"
        )
    return str(error)


def check_features(features: str, key: str) -> None:
    """Raise ValueError for features that are made by an embedder whose folder is not sound."""
    from dmlstudy import embedders
    from dmlstudy.training.dataset_cache import GREY, PIXELS

    if features in (PIXELS, GREY):
        return
    try:
        embedders.verify(features)
    except (ValueError, OSError) as error:
        raise ValueError(f"{key}: {error}") from None
