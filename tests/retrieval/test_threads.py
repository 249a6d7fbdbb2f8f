"""Threads that share out a call: order, errors, how far ahead they go, and what they leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import faiss
import pytest
import torch

from dmlstudy.retrieval.threads import as_many_as_torch_has


@pytest.fixture(params=[1, 3], autouse=True)
def count(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def test_results_come_in_order_from_that_many_threads(count: int) -> None:
    def slow_at_first(n: int) -> tuple[int, str]:
        time.sleep(0.02 if n < 3 else 0.001)
        return n * n, threading.current_thread().name

    with as_many_as_torch_has() as threads:
        found = list(threads.map(slow_at_first, range(50)))
    assert [square for square, _ in found] == [n * n for n in range(50)]
    assert len({name for _, name in found}) == count
    assert not [t for t in threading.enumerate() if t.name.startswith("retrieval")]


@pytest.mark.parametrize("parts", [0, 1, 2, 9])
def test_there_are_no_more_threads_than_parts(count: int, parts: int) -> None:
    begun = threading.active_count()
    with as_many_as_torch_has(parts) as threads:
        assert threads.count == max(1, min(count, parts))
        assert threading.active_count() - begun == (threads.count if threads.count > 1 else 0)
        assert list(threads.map(lambda n: n + 1, range(parts))) == list(range(1, parts + 1))
    assert torch.get_num_threads() == count


def test_each_thread_computes_alone_and_others_as_before(count: int) -> None:
    of_faiss = faiss.omp_get_max_threads()
    with as_many_as_torch_has() as threads:
        if count > 1:
            asked = list(
                threads.map(lambda _: (torch.get_num_threads(), faiss.omp_get_max_threads()), range(9))
            )
            assert set(asked) == {(1, 1)}
        assert torch.get_num_threads() == count
    begun_later: list[int] = []
    later = threading.Thread(target=lambda: begun_later.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert begun_later == [count]
    assert faiss.omp_get_max_threads() == of_faiss


def test_an_error_in_one_part_is_the_callers_and_ends_the_others(count: int) -> None:
    begun: list[int] = []

    def fails(n: int) -> int:
        begun.append(n)
        if n == 5:
            raise MemoryError("part 5")
        return n

    with pytest.raises(MemoryError, match="part 5"), as_many_as_torch_has() as threads:
        list(threads.map(fails, range(10_000)))
    assert len(begun) < 50
    assert not [t for t in threading.enumerate() if t.name.startswith("retrieval")]


def test_a_thread_that_cannot_be_started_is_an_error_and_no_wait_for_ever(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a container may have no more of them."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def only_one(self: threading.Thread) -> None:
        if self.name.startswith("retrieval"):
            if started:
                raise RuntimeError("can't start new thread")
            started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", only_one)
    if count == 1:  # the caller's own
        with as_many_as_torch_has() as threads:
            assert list(threads.map(abs, [-1])) == [1]
        assert not started
        return
    with pytest.raises(RuntimeError, match="can't start new thread"), as_many_as_torch_has():
        pass
    assert len(started) == 1
    assert not started[0].is_alive()


def test_a_reader_that_stops_leaves_no_more_than_a_few_parts_begun(count: int) -> None:
    begun: list[int] = []
    with as_many_as_torch_has() as threads:
        for n in threads.map(lambda n: begun.append(n) or n, range(10_000)):
            if n == 10:
                break
    assert 11 <= len(begun) <= 12 + 2 * count
