"""Reading ahead: the next batches' images are decoded while the present one is trained on.

Few threads suffice, for Pillow lets go of Python's lock while it decodes and resizes. Many wait for that lock, and so
does whoever trains: beyond ``MOST_THREADS`` pictures are decoded by processes.

Shapes: B images of one batch on this rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np

from dmlstudy.data.augmentation import Augmentation
from dmlstudy.data.images import Indices, Inputs, RandomViews
from dmlstudy.data.processes import SHARES, Processes, can_share_memory
from dmlstudy.data.view_ops import one_thread
from dmlstudy.heartbeat import beat

Empty: TypeAlias = Callable[[tuple[int, ...], Any], Inputs]
"""Makes an array of a shape and dtype."""

T = TypeVar("T")
U = TypeVar("U")

PIECE = 64
"""Items that a thread takes at once."""

MOST_THREADS = 4
"""The most threads that decode pictures."""

AHEAD = 3
"""Batches that are read or wait to be taken, beyond the one in use."""


def num_threads() -> int:
    """OMP_NUM_THREADS if it is set (as Ray does per worker), else the cores of this process."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(work: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """The work on each item, in the order of the items; memory grows with the results alone."""
    pieces = [items[start : start + PIECE] for start in range(0, len(items), PIECE)]

    def on_piece(piece: Sequence[T]) -> list[U]:
        return [work(item) for item in piece]

    with ThreadPoolExecutor(num_threads()) as pool:
        found: list[U] = []
        for results in pool.map(on_piece, pieces):
            found += results
            beat()
        return found


def ahead(work: Callable[[T], U], items: Iterable[T]) -> Generator[U]:
    """The work on each item, in order, by one thread that is AHEAD items ahead of whoever takes them.

    Items are taken by the caller's thread. An error is raised where its item's result would have been given.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        waiting: deque[Future[U]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class Rates(NamedTuple):
    """The speed the loader could have given, and the time it was waited for."""

    images_per_second: float
    waited_seconds: float


class Readable(Protocol):
    """Images that several threads can read at once."""

    def read(self, indices: Indices, views: RandomViews | None = None) -> Inputs: ...


class Loader:
    """Batches of images read ahead in order, by ``threads`` threads; nothing but speed depends on their number.

    They are as many processes instead where there are more than ``MOST_THREADS`` and pictures are decoded, if
    ``processes`` does not say otherwise.

    With an augmentation the image ``index`` is seen in an epoch as (seed, epoch, index) says. An error of a
    picture is raised where its batch would have been given. Memory: AHEAD + 1 batches; the threads fill them, each
    made by ``empty`` if given, as by ``pinned``.
    """

    def __init__(
        self,
        images: Readable,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        threads: int | None = None,
        *,
        empty: Empty | None = None,
        processes: bool | None = None,
    ) -> None:
        self._images = images
        self._augmentation = None if augmentation is None or augmentation.is_off else augmentation
        self._seed = seed
        self._threads = threads or num_threads()
        self._empty = empty
        self._lock = threading.Lock()
        if processes is None:
            decodes = getattr(images, "decodes", False)
            processes = decodes and self._threads > MOST_THREADS and can_share_memory()
        self._processes = Processes(images, self._augmentation, seed, self._threads) if processes else None
        self._start()

    @property
    def rates(self) -> Rates:
        """Of the last pass: images per second that all threads together can read, seconds waited for them."""
        rate = self._threads * self._num_read / self._busy if self._busy else 0.0
        return Rates(rate, self._waited)

    def epoch(self, batches: Iterable[Indices], epoch: int = 0) -> Iterator[Inputs]:
        """``images_BHWC`` of each batch of indices, in order."""
        self._start()
        if self._processes is None:
            return self._by_threads(batches, epoch)
        shares = [[own for _, own in _shares(each, max(1, min(SHARES, len(each))))] for each in batches]
        return self._by_processes(self._processes, shares, epoch)

    def _by_processes(
        self, processes: Processes, shares: Sequence[Sequence[Indices]], epoch: int
    ) -> Iterator[Inputs]:
        """Batches put together of their shares by one thread that is ahead."""
        read = processes.read((epoch, share) for own in shares for share in own)

        def together(own: Sequence[Indices]) -> _Batch:
            batch, first = _Batch(sum(map(len, own)), self._empty), 0
            for share in own:
                images, seconds = next(read)
                batch.put(first, images)
                first += len(share)
                self._busy += seconds
                self._num_read += len(share)
            return batch

        taken = ahead(together, shares)
        try:
            for _ in shares:
                started = time.perf_counter()
                batch = next(taken)
                self._waited += time.perf_counter() - started
                yield batch.images
        finally:
            taken.close()
            read.close()

    def _by_threads(self, batches: Iterable[Indices], epoch: int) -> Iterator[Inputs]:
        augmentation = self._augmentation
        views = None if augmentation is None else augmentation.views(self._seed, epoch)
        has_ops = augmentation is not None and augmentation.has_ops
        with ThreadPoolExecutor(self._threads, initializer=one_thread if has_ops else None) as pool:
            waiting: deque[tuple[_Batch, list[Future[None]]]] = deque()
            try:
                for indices in batches:
                    num_shares = max(1, min(self._threads, len(indices)))
                    batch = _Batch(len(indices), self._empty)
                    shares = _shares(indices, num_shares)
                    reading = [pool.submit(self._read, batch, first, own, views) for first, own in shares]
                    waiting.append((batch, reading))
                    if len(waiting) > AHEAD:
                        yield self._take(*waiting.popleft())
                while waiting:
                    yield self._take(*waiting.popleft())
            finally:
                for _, reading in waiting:
                    for share in reading:
                        share.cancel()

    def _start(self) -> None:
        self._busy, self._waited, self._num_read = 0.0, 0.0, 0

    def _read(self, batch: _Batch, first: int, indices: Indices, views: RandomViews | None) -> None:
        started = time.perf_counter()
        batch.put(first, self._images.read(indices, views))
        elapsed = time.perf_counter() - started
        with self._lock:
            self._busy += elapsed
            self._num_read += len(indices)

    def _take(self, batch: _Batch, reading: list[Future[None]]) -> Inputs:
        started = time.perf_counter()
        for share in reading:
            share.result()
        self._waited += time.perf_counter() - started
        return batch.images


class _Batch:
    """A batch that several threads fill, each with its share, from a position on.

    A share may come back shorter, as without pictures that are left out; what is missing leaves no gap.
    """

    def __init__(self, num_images: int, empty: Empty | None) -> None:
        self._num_images, self._empty = num_images, empty
        self._images: Inputs | None = None
        self._filled: dict[int, int] = {}
        """Positions at which shares begin, and the images that each has."""
        self._lock = threading.Lock()

    @property
    def images(self) -> Inputs:
        assert self._images is not None
        if sum(self._filled.values()) == len(self._images):
            return self._images
        parts = [self._images[first : first + length] for first, length in sorted(self._filled.items())]
        together: Any = np.concatenate(parts)
        return cast("Inputs", together)

    def put(self, first: int, images: Inputs) -> None:
        """Take images over, as they are if they are the whole batch."""
        with self._lock:
            self._filled[first] = len(images)
            if len(images) == self._num_images and self._empty is None:
                self._images = images
                return
            if self._images is None:
                shape = (self._num_images, *images.shape[1:])
                self._images = (self._empty or np.empty)(shape, images.dtype)
        self._images[first : first + len(images)] = images


def _shares(indices: Indices, num_shares: int) -> Iterator[tuple[int, Indices]]:
    """Consecutive parts of about one length, and where each begins."""
    first = 0
    for own in np.array_split(indices, num_shares):
        yield first, own
        first += len(own)


def pinned(shape: tuple[int, ...], dtype: Any) -> Inputs:
    """An array in memory from which a CUDA device copies by itself.

    torch gives the memory to another batch only when the copy that was begun is over.
    """
    import torch

    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    return cast("Inputs", torch.empty(shape, dtype=kind, pin_memory=True).numpy())
