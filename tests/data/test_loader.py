"""Reading ahead: the same batches from any number of threads, in memory that the caller provides, errors in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dmlstudy.data import Loader


class Numbers:
    """Images whose pixels are their index; ``broken`` cannot be read."""

    def __init__(self, broken: int = -1, dtype: Any = np.uint8) -> None:
        self.broken, self.dtype = broken, dtype

    def read(self, indices: np.ndarray, views: Any = None) -> np.ndarray:
        if self.broken in indices:
            raise ValueError(f"image {self.broken}: damaged")
        return np.broadcast_to(indices[:, None, None, None], (len(indices), 2, 3, 1)).astype(self.dtype)


BATCHES = [np.arange(7), np.array([9, 3]), np.array([5]), np.arange(0), np.arange(20, 33)]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("is_given", [False, True])
def test_batches_are_those_asked_for_whoever_reads_them(threads: int, dtype: Any, is_given: bool) -> None:
    made: list[np.ndarray] = []

    def empty(shape: tuple[int, ...], kind: Any) -> np.ndarray:
        made.append(np.full(shape, 255, kind))
        return made[-1]

    loader = Loader(Numbers(dtype=dtype), threads=threads, empty=empty if is_given else None)
    read = list(loader.epoch(BATCHES))
    for indices, images in zip(BATCHES, read, strict=True):
        assert images.dtype == dtype
        np.testing.assert_array_equal(images, Numbers(dtype=dtype).read(indices))
    if is_given:
        assert len(made) == len(BATCHES)
        assert all(any(images is one for one in made) for images in read)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_comes_where_its_batch_would(threads: int) -> None:
    reading = Loader(Numbers(broken=25), threads=threads).epoch(BATCHES)
    for indices in BATCHES[:-1]:
        np.testing.assert_array_equal(next(reading), Numbers().read(indices))
    with pytest.raises(ValueError, match="image 25: damaged"):
        next(reading)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_pictures_that_are_left_out_leave_no_gap(threads: int) -> None:
    class Odd(Numbers):
        def read(self, indices: np.ndarray, views: Any = None) -> np.ndarray:
            return super().read(indices[indices % 2 == 1])

    for indices, images in zip(BATCHES, Loader(Odd(), threads=threads).epoch(BATCHES), strict=True):
        np.testing.assert_array_equal(images, Odd().read(indices))
