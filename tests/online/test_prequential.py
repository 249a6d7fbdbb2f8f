"""Test, then train: rows against a plain loop, windows of streams of any length, and empty ones."""

from __future__ import annotations

import numpy as np
import pytest

from dmlstudy.online.constraints import IndexedConstraints
from dmlstudy.online.prequential import NUM_WINDOWS, RECENT, Prequential
from dmlstudy.online.stream import BLOCK


@pytest.mark.parametrize("num_points", [1, 2, 3])
def test_rows_are_told_once_when_they_are_first_named_and_never_in_the_first_block(num_points: int) -> None:
    index_TC = np.random.default_rng(0).integers(0, 2500, (1300, num_points))
    curve = Prequential(IndexedConstraints(index_TC))
    known: list[int] = []
    for start in range(0, 1300, BLOCK):
        stop = min(start + BLOCK, 1300)
        new: list[int] = []
        for row in index_TC[start:stop].ravel().tolist():
            if row not in known and row not in new:
                new.append(row)
        found = curve.newcomers(start, stop)
        assert found.new.tolist() == (new if start else [])
        assert found.known.tolist() == known[-RECENT:]
        known += new


def test_errors_are_those_of_windows_of_whole_blocks() -> None:
    num = 60 * BLOCK + 7  # two blocks a window
    curve = Prequential(IndexedConstraints(np.arange(num)[:, None]))
    assert curve.width == 2 * BLOCK
    is_wrong = np.random.default_rng(0).random(num) < 0.4
    for start in range(BLOCK, num, BLOCK):
        curve.add(start, is_wrong[start : start + BLOCK])
    assert curve.error_W[0] == pytest.approx(is_wrong[BLOCK : 2 * BLOCK].mean())
    assert curve.error_W[5] == pytest.approx(is_wrong[10 * BLOCK : 12 * BLOCK].mean())
    assert curve.error_W[30] == pytest.approx(is_wrong[60 * BLOCK :].mean())
    assert np.isnan(curve.error_W[31:]).all()
    assert curve.error == pytest.approx(is_wrong[BLOCK:].mean())
    metrics = curve.metrics()
    assert metrics["prequential_width"] == 2 * BLOCK
    assert metrics["prequential_error_05"] == curve.error_W[5]
    assert "prequential_error_31" not in metrics


@pytest.mark.parametrize("num", [1, 240, 241, 12_000, 12_001, 1_000_003])
def test_a_curve_is_as_large_of_any_stream(num: int) -> None:
    curve = Prequential(IndexedConstraints(np.zeros((num, 1), np.int64)))
    assert curve.width % BLOCK == 0
    assert (num - 1) // curve.width < NUM_WINDOWS
    assert curve.count_W2.shape == (NUM_WINDOWS, 2)
    assert curve.width == BLOCK or num > NUM_WINDOWS * (curve.width - BLOCK)


def test_where_nothing_was_told_there_is_no_error() -> None:
    curve = Prequential(IndexedConstraints(np.arange(100)[:, None]))
    assert np.isnan(curve.error)
    assert curve.metrics() == {}
    with pytest.raises(ValueError, match=r"counts of windows have the shape \(3, 2\)"):
        curve.restore(np.zeros((3, 2), np.int64))
