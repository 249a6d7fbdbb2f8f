"""Items of several callers are computed together, in turn, and each gets its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from dmlstudy.serving.batching import Batcher, Gone, Outputs


class Slow:
    """Doubles numbers, one batch at each ``allow``; remembers how many items each batch had."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, items_N: np.ndarray) -> Outputs:
        self.sizes.append(len(items_N))
        self.begun.release()
        assert self.allowed.acquire(timeout=120)
        if (items_N < 0).any():
            raise ValueError("negative")
        return 2 * items_N, None

    def allow(self, batches: int) -> None:
        for _ in range(batches):
            self.allowed.release()


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def batches(slow: Slow) -> Iterator[Batcher]:
    made = Batcher(slow, most=8)
    yield made
    slow.allow(100)
    made.close()


def result(future: Future[Outputs]) -> list[float]:
    doubled, missing = future.result(20)
    assert missing is None
    assert doubled is not None
    return doubled.tolist()


def test_what_waits_is_computed_together(slow: Slow, batches: Batcher) -> None:
    first = batches.submit(np.array([1.0]))
    assert slow.begun.acquire(timeout=120)
    others = [batches.submit(np.arange(n, dtype=float)) for n in (2, 3, 1)]
    slow.allow(2)
    assert result(first) == [2]
    assert [result(each) for each in others] == [[0, 2], [0, 2, 4], [0]]
    assert slow.sizes == [1, 6]


def test_a_large_call_lets_others_have_their_turn(slow: Slow, batches: Batcher) -> None:
    first = batches.submit(np.zeros(1))
    assert slow.begun.acquire(timeout=120)
    large = batches.submit(np.arange(20.0))
    small = batches.submit(np.array([7.0]))
    slow.allow(3)  # the first, 8 of the large one, the small one with 7 of it
    assert result(small) == [14]
    assert not large.done()
    slow.allow(10)
    assert result(large) == (2 * np.arange(20.0)).tolist()
    assert slow.sizes == [1, 8, 8, 5]
    result(first)


def test_only_whose_items_are_bad_is_told(slow: Slow, batches: Batcher) -> None:
    slow.allow(10)
    first = batches.submit(np.zeros(1))
    good, bad = batches.submit(np.array([1.0])), batches.submit(np.array([-1.0]))
    assert result(first) == [0]
    assert result(good) == [2]
    with pytest.raises(ValueError, match="negative"):
        bad.result(20)
    assert result(batches.submit(np.array([3.0]))) == [6]


def test_what_nobody_waits_for_is_left_out(slow: Slow, batches: Batcher) -> None:
    is_gone = threading.Event()
    first = batches.submit(np.zeros(1))
    assert slow.begun.acquire(timeout=120)
    unwanted = batches.submit(np.arange(30.0), is_gone.is_set)
    slow.allow(1)
    assert slow.begun.acquire(timeout=120)
    is_gone.set()
    slow.allow(10)
    with pytest.raises(Gone):
        unwanted.result(20)
    assert slow.sizes == [1, 8]
    result(first)


def test_items_of_another_shape_wait_for_their_own_batch(slow: Slow, batches: Batcher) -> None:
    first = batches.submit(np.zeros(1))
    assert slow.begun.acquire(timeout=120)
    flat, square = batches.submit(np.ones(2)), batches.submit(np.ones((1, 2)))
    slow.allow(3)
    assert result(flat) == [2, 2]
    assert result(square) == [[2, 2]]
    assert slow.sizes == [1, 2, 1]
    result(first)


def test_the_end_answers_nobody_more(slow: Slow) -> None:
    batches = Batcher(slow)
    slow.allow(1)
    assert result(batches.submit(np.ones(1))) == [2]
    batches.close()
    with pytest.raises(Gone):
        batches.submit(np.ones(1)).result(20)
