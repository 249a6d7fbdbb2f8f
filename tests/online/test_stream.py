"""Streams: broken off by kill -9 they end as unbroken ones, bit for bit; drift is heard; bad input poisons nothing."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmlstudy.online import drift, stream
from dmlstudy.online.learner import Constraints, OnlineLearner
from dmlstudy.online.oahu import OAHU

NUM, SIZE = 6000, 12
REOPEN: dict[str, Any] = {"on_drift": "reopen", "sensitivity": 0.05, "probation": 1000}


def triplets() -> np.ndarray:
    rng = np.random.default_rng(0)
    centre = rng.normal(size=(6, SIZE))
    own, step = rng.integers(0, 6, NUM), rng.integers(1, 6, NUM)
    centres = np.stack([centre[own], centre[own], centre[(own + step) % 6]], axis=1)
    x = centres + rng.normal(size=centres.shape)
    x[NUM // 2 :] = x[NUM // 2 :, [0, 2, 1]]  # what was similar is dissimilar now
    return x / np.linalg.norm(x, axis=2, keepdims=True)


def source(x: np.ndarray, pause: float = 0) -> stream.Source:
    def since(position: int) -> Iterator[Constraints]:
        for start in range(position, len(x), stream.BLOCK):
            time.sleep(pause)
            yield Constraints(x[start : start + stream.BLOCK])

    return since


def learner() -> OAHU:
    return OAHU(SIZE, width=10, size=6, eta=0.1)


def learn_slowly(folder: str) -> None:
    """What the killed process does."""
    stream.learn(
        learner(),
        source(triplets(), 0.01),
        folder=folder,
        save_every=500,
        **REOPEN,
    )


def test_killed_again_and_again_it_ends_as_unbroken(tmp_path: Path) -> None:
    whole = learner()
    end = stream.learn(whole, source(triplets()), **REOPEN)
    assert all(drift > NUM // 2 for drift in (*end.drifts, *end.reopened))
    assert len(end.drifts) >= len(end.reopened) > 0
    begun = 0
    for wait in itertools.count():
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {here!r}); import test_stream as t; t.learn_slowly({str(tmp_path)!r})"
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
        state = tmp_path / stream.STATE
        seen = state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None and wait < 3:
            if state.exists() and state.stat().st_mtime_ns != seen:
                time.sleep(0.013 * (wait + 1))
                process.send_signal(signal.SIGKILL)
                process.wait()
                begun += 1
            time.sleep(0.002)
        if process.wait() == 0:
            break
    assert begun == 3, "it was over before it was killed"
    broken = learner()
    again = stream.learn(broken, source(triplets()), folder=tmp_path, save_every=500, **REOPEN)
    assert (again.position, again.drifts, again.reopened) == (NUM, end.drifts, end.reopened)
    for name, value in whole.state().items():
        np.testing.assert_array_equal(broken.state()[name], value)
    losses = np.fromfile(tmp_path / stream.LOSSES)
    assert len(losses) == NUM
    assert not np.isnan(losses).any()


def test_broken_off_in_a_race_it_ends_as_unbroken(tmp_path: Path) -> None:
    whole, broken = learner(), learner()
    end = stream.learn(whole, source(triplets()), **REOPEN)
    for stop in (end.drifts[0] + 240, end.drifts[0] + 720, end.reopened[0]):
        with pytest.raises(ConnectionError):
            stream.learn(
                broken, breaking(source(triplets()), stop), folder=tmp_path, save_every=240, **REOPEN
            )
        broken = learner()
    again = stream.learn(broken, source(triplets()), folder=tmp_path, save_every=240, **REOPEN)
    assert (again.drifts, again.reopened) == (end.drifts, end.reopened)
    for name, value in whole.state().items():
        np.testing.assert_array_equal(broken.state()[name], value)


def breaking(whole: stream.Source, stop: int) -> stream.Source:
    """A source that fails once it has given ``stop`` constraints."""

    def since(position: int) -> Iterator[Constraints]:
        for block in whole(position):
            if position >= stop:
                raise ConnectionError
            yield block
            position += len(block.x_BCD)

    return since


class Fixed(OnlineLearner):
    """Its losses are given; it learns nothing."""

    arity, layer_weights = 3, np.ones(1)

    def __init__(self, *losses: float) -> None:
        super().__init__(2)
        self.losses = iter(losses)

    def embed(self, x_ND: np.ndarray, side: str = "gallery") -> list[np.ndarray]:
        return [x_ND]

    def _learn(self, x_BCD: np.ndarray, *told_B: object) -> tuple[np.ndarray, np.ndarray]:
        return np.array([next(self.losses) for _ in x_BCD]), np.ones(len(x_BCD), bool)

    def _parameters(self) -> dict[str, np.ndarray]:
        return {}

    def _set_parameters(self, state: dict[str, np.ndarray]) -> None:
        pass


@pytest.mark.parametrize(
    ("new", "is_won"),
    [
        ((0.9, 0.9, 0.9, 0.125, 0.25, 0.25), True),  # what a beginner loses in the first half does not count
        ((0.0, 0.0, 0.0, 0.25, 0.5, 0.125), False),  # as good is not better
        ((0.0, 0.0, 0.0, 0.25, 0.5, 0.25), False),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 3, 6])
def test_the_second_half_of_a_race_decides(new: tuple[float, ...], is_won: bool, block: int) -> None:
    race, old = drift.Race(Fixed(*new), 6), np.array([0.9, 0.0, 0.9, 0.125, 0.25, 0.5])
    x = np.random.default_rng(0).normal(size=(6, 3, 2))
    for start in range(0, 6, block):
        assert not race.is_over
        race.follow(Constraints(x[start : start + block]), old[start : start + block])
    assert race.is_over
    assert race.is_won == is_won


def test_reports_and_counts() -> None:
    moments: list[stream.Moment] = []
    end = stream.learn(learner(), source(triplets()), moments.append, report_every=1000)
    assert [m.position for m in moments] == [1200, 2400, 3600, 4800, 6000]
    assert end.position == NUM
    assert end.utilization == 1
    assert all(0 < m.loss < 1 for m in moments)
    assert moments[2].loss > moments[1].loss  # the world has changed
    assert end.drifts == ()


def test_memory_does_not_grow_with_the_stream(tmp_path: Path) -> None:
    def blocks(position: int, num: int) -> Iterator[Constraints]:
        rng = np.random.default_rng(position)
        for _ in range(position, num, stream.BLOCK):
            yield Constraints(rng.normal(size=(stream.BLOCK, 3, SIZE)))

    def kept(num: int) -> int:
        import tracemalloc

        tracemalloc.start()
        one = OAHU(SIZE, num_hidden=1, width=4, size=4)
        stream.learn(
            one, lambda position: blocks(position, num), folder=tmp_path / str(num), on_drift="reopen"
        )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    kept(2400)
    short, long = kept(2400), kept(24_000)
    assert long < short * 1.2 + 100_000


@pytest.mark.parametrize("on_invalid", ["error", "skip"])
def test_bad_input_never_poisons_the_model(on_invalid: str) -> None:
    x = triplets()[: 4 * stream.BLOCK]
    bad = x.copy()
    bad[300, 1, 3], bad[301, 0, 0], bad[302, 2] = np.nan, np.inf, bad[302, 0]
    settings = {
        "width": 10,
        "size": 6,
        "eta": 0.01,
    }  # a small step: rounding differs between blocks, and grows with it
    one, other = OAHU(SIZE, **settings, on_invalid=on_invalid), OAHU(SIZE, **settings)  # type: ignore[arg-type]
    if on_invalid == "error":
        with pytest.raises(ValueError, match="constraint 300 is not finite"):
            stream.learn(one, source(bad))
        other.partial_fit(Constraints(bad[: stream.BLOCK]))
    else:
        end = stream.learn(one, source(bad))
        assert one.counts == (len(x), len(x) - 3, 3)
        assert end.utilization == 1
        other.partial_fit(Constraints(np.delete(bad, [300, 301, 302], axis=0)))
    for name, value in one.state().items():
        if name == "counts":
            continue
        assert np.isfinite(value).all()
        np.testing.assert_allclose(value, other.state()[name], rtol=0, atol=1e-7)


def test_what_is_refused(tmp_path: Path) -> None:
    x = triplets()[:600]
    with pytest.raises(ValueError, match="the stream is empty"):
        stream.learn(learner(), source(x[:0]))
    with pytest.raises(ValueError, match="shape"):
        stream.learn(learner(), source(x[:, :, :5]))
    with pytest.raises(ValueError, match="choose ignore or reopen"):
        stream.learn(learner(), source(x), on_drift="shut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sensitivity=1"):
        stream.learn(learner(), source(x), on_drift="reopen", sensitivity=1)
    with pytest.raises(ValueError, match="probation=1"):
        stream.learn(learner(), source(x), on_drift="reopen", probation=1)
    stream.learn(learner(), source(x), folder=tmp_path)
    with pytest.raises(ValueError, match="another learner or stream"):
        stream.learn(OAHU(SIZE, width=10, size=6, eta=0.2), source(x), folder=tmp_path)
    with pytest.raises(ValueError, match="another learner or stream"):
        stream.learn(learner(), source(x), folder=tmp_path, about={"stream": "other"})
    with (tmp_path / stream.LOSSES).open("r+b") as file:
        file.truncate(80)
    with pytest.raises(ValueError, match=r"losses\.f64: has 10 losses of 600"):
        stream.learn(learner(), source(x), folder=tmp_path)
    (tmp_path / stream.STATE).write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"stream\.safetensors: cannot be read"):
        stream.learn(learner(), source(x), folder=tmp_path)
