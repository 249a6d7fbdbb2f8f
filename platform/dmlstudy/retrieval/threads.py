"""Threads that share out the parts of one call: numpy, torch and faiss release the interpreter's lock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import faiss
import torch

from dmlstudy.heartbeat import beat

T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """``count`` threads, each of which computes alone: torch and faiss start no helpers in it."""

    def __init__(self, count: int, pool: ThreadPoolExecutor | None) -> None:
        self.count, self._pool = count, pool

    def map(self, function: Callable[[T], R], each: Iterable[T]) -> Iterator[R]:
        """The results in order. What is begun ahead of the reader just keeps every thread busy."""
        if self._pool is None:
            for item in each:
                yield function(item)
                beat()
            return
        under_way: deque[Future[R]] = deque()
        try:
            for item in each:
                under_way.append(self._pool.submit(function, item))
                if len(under_way) > 2 * self.count:
                    yield under_way.popleft().result()
                    beat()
            while under_way:
                yield under_way.popleft().result()
                beat()
        finally:
            for future in under_way:
                future.cancel()


@contextmanager
def as_many_as_torch_has(parts: int | None = None) -> Iterator[Threads]:
    """``torch.get_num_threads()`` threads, or as few as there are ``parts``; for one the caller's own, as it is."""
    torch_has = torch.get_num_threads()
    count = torch_has if parts is None else max(1, min(torch_has, parts))
    if count == 1:
        yield Threads(1, None)
        return
    all_compute_alone = threading.Barrier(count + 1)

    def compute_alone() -> None:
        torch.get_num_threads()  # a thread's first call gives it the number of all: not to come after the next
        torch.set_num_threads(1)  # of this thread; and of threads begun later, until the caller sets it back
        faiss.omp_set_num_threads(1)
        all_compute_alone.wait()

    with ThreadPoolExecutor(count, "retrieval") as pool:
        try:
            for _ in range(count):
                pool.submit(compute_alone)
            all_compute_alone.wait()
        except BaseException:  # no further thread can be started: those that were would wait for it for ever
            all_compute_alone.abort()
            raise
        finally:
            torch.set_num_threads(torch_has)
        yield Threads(count, pool)
