"""Rows and records of many trials: the same as plain lists and dictionaries, and small."""

from __future__ import annotations

import json
import math
import random

import pytest

from dmlstudy.packed import PackedRecords, SortedRows


@pytest.mark.parametrize("width", [1, 2, 3])
def test_rows_are_those_of_a_sorted_list(width: int) -> None:
    draw, rows, expected = random.Random(width), SortedRows(width), list[tuple[float, ...]]()
    levels = [-math.inf, -1.0, 0.0, 0.5, 3.0, math.inf]
    for _ in range(400):
        row = tuple(draw.choices(levels, k=width))
        if draw.random() < 0.7:
            rows.add(row)
            expected = sorted([*expected, row])
        else:
            rows.discard(row)
            if row in expected:
                expected.remove(row)
        assert [rows[at] for at in range(len(rows))] == expected
        assert list(reversed(rows)) == expected[::-1]
        assert len(rows) == len(expected)
        assert (row in rows) == (row in expected)
        assert rows.num_below(row) == sum(other < row for other in expected)
        if expected:
            assert (rows[0], rows[-1]) == (expected[0], expected[-1])
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_records_are_those_of_a_dictionary() -> None:
    draw, records, expected = random.Random(5), PackedRecords(), dict[int, bytes]()
    for _ in range(3000):
        key = draw.randrange(-3, 60)
        if draw.random() < 0.5:
            records[key] = expected[key] = draw.randbytes(draw.choice((0, 1, 3, 40)))
        else:
            assert records.pop(key) == expected.pop(key, None)
        assert len(records) == len(expected)
        for asked in (key, draw.randrange(-3, 60)):
            assert (asked in records) == (asked in expected)
            if asked in expected:
                assert records[asked] == expected[asked]
            else:
                with pytest.raises(KeyError):
                    records[asked]


def test_records_take_little_more_than_their_bytes_however_they_come_and_go() -> None:
    draw, num, size = random.Random(0), 2000, 200
    records = PackedRecords()
    for key in range(3 * num):  # each is taken out when ``num`` more have come
        records[key] = draw.randbytes(size)
        records.pop(key - num)
    assert len(records) == num
    assert len(records._buffer) < 1.4 * num * size
    for key in range(3 * num):
        records.pop(key)
    assert (len(records), len(records._buffer)) == (0, 0)


def test_records_that_are_alike_take_less() -> None:
    records = PackedRecords()
    for key in range(100):
        records[key] = json.dumps({"family": "triplet", "generation": key, "lr": 1e-3 * key}).encode()
    assert json.loads(records[42]) == {"family": "triplet", "generation": 42, "lr": 1e-3 * 42}
    assert len(records._buffer) < 0.4 * sum(len(records[key]) for key in range(100))
