"""Reading ahead: the same batches from any number of threads, in memory that the caller provides, errors in place."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from dmlstudy.data import Loader, processes


class Numbers:
    """Images whose pixels are their index; ``broken`` cannot be read."""

    def __init__(self, broken: int = -1, dtype: Any = np.uint8) -> None:
        self.broken, self.dtype = broken, dtype

    def read(self, indices: np.ndarray, views: Any = None) -> np.ndarray:
        if self.broken in indices:
            raise ValueError(f"image {self.broken}: damaged")
        return np.broadcast_to(indices[:, None, None, None], (len(indices), 2, 3, 1)).astype(self.dtype)


BATCHES = [np.arange(7), np.array([9, 3]), np.array([5]), np.arange(0), np.arange(20, 33)]


readers = pytest.mark.parametrize(
    ("threads", "processes"), [(1, False), (2, False), (5, False), (1, True), (2, True)]
)


@readers
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("is_given", [False, True])
def test_batches_are_those_asked_for_whoever_reads_them(
    threads: int, processes: bool, dtype: Any, is_given: bool
) -> None:
    made: list[np.ndarray] = []

    def empty(shape: tuple[int, ...], kind: Any) -> np.ndarray:
        made.append(np.full(shape, 255, kind))
        return made[-1]

    loader = Loader(
        Numbers(dtype=dtype), threads=threads, empty=empty if is_given else None, processes=processes
    )
    read = list(loader.epoch(BATCHES))
    for indices, images in zip(BATCHES, read, strict=True):
        assert images.dtype == dtype
        np.testing.assert_array_equal(images, Numbers(dtype=dtype).read(indices))
    if is_given:
        assert len(made) == len(BATCHES)
        assert all(any(images is one for one in made) for images in read)


@readers
def test_an_error_comes_where_its_batch_would(threads: int, processes: bool) -> None:
    reading = Loader(Numbers(broken=25), threads=threads, processes=processes).epoch(BATCHES)
    for indices in BATCHES[:-1]:
        np.testing.assert_array_equal(next(reading), Numbers().read(indices))
    with pytest.raises(ValueError, match="image 25: damaged"):
        next(reading)


@readers
def test_pictures_that_are_left_out_leave_no_gap(threads: int, processes: bool) -> None:
    class Odd(Numbers):
        def read(self, indices: np.ndarray, views: Any = None) -> np.ndarray:
            return super().read(indices[indices % 2 == 1])

    loader = Loader(Odd(), threads=threads, processes=processes)
    for indices, images in zip(BATCHES, loader.epoch(BATCHES), strict=True):
        np.testing.assert_array_equal(images, Odd().read(indices))


def test_processes_live_through_epochs_that_are_left_early() -> None:
    loader = Loader(Numbers(), threads=2, processes=True)
    own, seen = psutil.Process(), set()
    others = set(own.children())
    for epoch in range(3):
        reading = loader.epoch(BATCHES * 5, epoch)
        np.testing.assert_array_equal(next(reading), Numbers().read(BATCHES[0]))
        seen.add(frozenset(set(own.children()) - others))
        reading.close()
    read = list(loader.epoch(BATCHES))
    assert [len(images) for images in read] == [len(indices) for indices in BATCHES]
    assert len(seen) == 1
    assert loader.rates.images_per_second > 0


def test_processes_end_at_once_with_their_loader() -> None:
    """Also where an error's traceback holds all of it in a cycle."""
    own = psutil.Process()
    others = set(own.children())
    loader = Loader(Numbers(broken=25), threads=2, processes=True)
    with pytest.raises(ValueError, match="damaged"):
        list(loader.epoch(BATCHES))
    assert len(set(own.children()) - others) == 2
    started = time.monotonic()
    del loader
    gc.collect()
    assert not set(own.children()) - others
    assert time.monotonic() - started < 4  # PyTorch waits 5 s for each process that it cannot tell to end


def test_processes_take_no_number_of_those_that_training_draws() -> None:
    import torch

    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(Loader(Numbers(), threads=2, processes=True).epoch(BATCHES))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("threads", "free", "are_processes"), [(4, 2**40, False), (5, 2**40, True), (5, 2**26, False)]
)
def test_many_threads_that_decode_are_processes(
    threads: int, free: int, are_processes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pictures(Numbers):
        decodes = True

    monkeypatch.setattr(processes.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert Loader(Numbers(), threads=threads)._processes is None
    assert (Loader(Pictures(), threads=threads)._processes is not None) == are_processes


KILLED = """
import numpy as np
from dmlstudy.data import Loader
class Numbers:
    def read(self, indices, views=None):
        return np.zeros((len(indices), 2, 2, 1), np.uint8)
reading = Loader(Numbers(), threads=2, processes=True).epoch([np.arange(4)] * 1000)
next(reading)
print("began", flush=True)
while True:
    next(reading, None)
"""


@pytest.mark.timeout(60)
def test_processes_end_when_their_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "began\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
        assert len(children) >= 2
        _, left = psutil.wait_procs(children, timeout=30)
    assert not left
