"""Items of several callers computed together, as many as wait while the last ones are computed.

Shapes: N items, D numbers of each.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Outputs: TypeAlias = tuple[NDArray[Any] | None, ...]
"""The outputs for N items: arrays of N rows, or None where the model has no such output."""

MOST = 64
"""Items computed at once."""


class Gone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(eq=False)
class _Job:
    items_N: NDArray[Any]
    is_gone: Callable[[], bool]
    future: Future[Outputs] = field(default_factory=Future)
    taken: int = 0
    done: int = 0
    parts: list[Outputs] = field(default_factory=list)


class Batcher:
    """A function of items, called by one thread for all callers.

    While it computes, what others ask for gathers, and is computed together next: a caller that is alone never
    waits for company. A call with more than ``most`` items is computed in parts, between which others have their
    turn.

    A row does not depend on what it is computed with, but for the order of sums: numbers may differ in the last
    digits.
    """

    def __init__(self, compute: Callable[[NDArray[Any]], Outputs], most: int = MOST) -> None:
        self._compute, self._most = compute, most
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def submit(self, items_N: NDArray[Any], is_gone: Callable[[], bool] = lambda: False) -> Future[Outputs]:
        """The outputs of these items, at least one, when they are there.

        ``is_gone`` is asked between two parts; once it holds, the rest is left out and the future raises ``Gone``.
        """
        assert len(items_N) > 0
        job = _Job(items_N, is_gone)
        job.future.set_running_or_notify_cancel()  # who cancels it only stops to wait
        with self._changed:
            if self._is_ending:
                job.future.set_exception(Gone())
            else:
                self._jobs.append(job)
                self._changed.notify()
        return job.future

    def close(self) -> None:
        """End the thread once what it computes is done; what still waits raises ``Gone``."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_ending)
                if self._is_ending:
                    for job in self._jobs:
                        job.future.set_exception(Gone())
                    return
                batch = self._next()
            if batch:
                self._answer(batch)

    def _next(self) -> list[tuple[_Job, NDArray[Any]]]:
        """The next items of those that wait, in turn; a job with more of them goes to the end of the line."""
        batch: list[tuple[_Job, NDArray[Any]]] = []
        room = self._most
        shape = None
        for _ in range(len(self._jobs)):
            job = self._jobs[0]
            if job.is_gone():
                self._jobs.popleft().future.set_exception(Gone())
                continue
            kind = (job.items_N.shape[1:], job.items_N.dtype)
            if room == 0 or (shape is not None and kind != shape):
                break
            shape = kind
            part_N = job.items_N[job.taken : job.taken + room]
            job.taken += len(part_N)
            room -= len(part_N)
            batch.append((job, part_N))
            self._jobs.popleft()
            if job.taken < len(job.items_N):
                self._jobs.append(job)
        return batch

    def _answer(self, batch: list[tuple[_Job, NDArray[Any]]]) -> None:
        parts_N = [part_N for _, part_N in batch]
        try:
            outputs = self._compute(parts_N[0] if len(parts_N) == 1 else np.concatenate(parts_N))
        except Exception as error:
            if len(batch) > 1:  # whose items they are shows when each is computed alone
                for each in batch:
                    self._answer([each])
            else:
                self._fail(batch[0][0], error)
            return
        start = 0
        for job, part_N in batch:
            rows = slice(start, start + len(part_N))
            start += len(part_N)
            job.parts.append(tuple(None if each is None else each[rows] for each in outputs))
            job.done += len(part_N)
            if job.done == len(job.items_N):
                job.future.set_result(_joined(job.parts))

    def _fail(self, job: _Job, error: Exception) -> None:
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
        job.future.set_exception(error)


def _joined(parts: list[Outputs]) -> Outputs:
    if len(parts) == 1:
        return parts[0]
    return tuple(
        None if column[0] is None else np.concatenate([each for each in column if each is not None])
        for column in zip(*parts, strict=True)
    )
