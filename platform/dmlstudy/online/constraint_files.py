"""Constraints of files: tables of row numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmlstudy.data.parquet import read_columns
from dmlstudy.online.constraints import IndexedConstraints
from dmlstudy.online.enumeration import Rows
from dmlstudy.online.learner import Flags

TRIPLET = ("anchor", "positive", "negative")
PAIR = ("first", "second", "similar")


def read_constraints(path: str | Path, num_rows: int | None = None) -> IndexedConstraints:
    """Constraints of a CSV file with a header line, or a Parquet file, in the order of its lines.

    Columns anchor, positive, negative are triplets; first, second, similar are pairs, similar being 0, 1, true or
    false. All others are row numbers from 0, below ``num_rows`` if that is given.
    Raises ValueError naming the file, and for a value that cannot be used also its line and column.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    columns = {name.strip(): column for name, column in read_columns(path).items()}
    kinds = [kind for kind in (TRIPLET, PAIR) if columns.keys() >= set(kind)]
    if len(kinds) != 1:
        raise ValueError(
            f"{path}: needs either the columns {', '.join(TRIPLET)} or {', '.join(PAIR)}; it has"
            f" {', '.join(columns) or 'none'}"
        )
    if len(columns[kinds[0][0]]) == 0:
        raise ValueError(f"{path}: no constraints below its header; write one on each line")
    names = kinds[0][: 3 if kinds[0] == TRIPLET else 2]
    index_TC = np.stack([_row_numbers(path, name, columns[name], num_rows) for name in names], axis=1)
    is_similar_T = None if kinds[0] == TRIPLET else _similar_flags(path, columns["similar"])
    return IndexedConstraints(index_TC, is_similar_T)


def _row_numbers(path: Path, name: str, column: Sequence[Any], num_rows: int | None) -> Rows:
    """A column of row numbers. Raises ValueError for the first that is none."""
    limit = np.iinfo(np.int64).max if num_rows is None else num_rows
    rows = []
    for line, value in enumerate(column):
        row = _number(value)
        if row is None or not 0 <= row < limit:
            wanted = "a row number from 0" + ("" if num_rows is None else f" to {num_rows - 1}")
            raise ValueError(
                f"{_place(path, line)}: {name} is {_shown(value)}; give {wanted}, or leave the constraint out"
            )
        rows.append(row)
    return np.array(rows, dtype=np.int64)


def _number(value: object) -> int | None:
    """The whole number a value of a table is, else None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        number = float(value) if isinstance(value, (float, str)) else None
    except ValueError:
        return None
    return int(number) if number is not None and number.is_integer() else None


def _similar_flags(path: Path, column: Sequence[Any]) -> Flags:
    meanings = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
    flags = [meanings.get(str(value).strip().lower()) for value in column]
    if None in flags:
        line = flags.index(None)
        raise ValueError(
            f"{_place(path, line)}: similar is {_shown(column[line])}; give 1 or true for similar, 0 or false for not"
        )
    return np.array(flags, dtype=np.bool_)


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)


def _place(path: Path, row: int) -> str:
    """The place of a table's row in its file: of CSV the line from 1, the header and empty ones counted."""
    if path.suffix.lower() == ".parquet":
        return f"{path}, row {row}"
    with path.open(encoding="utf-8", errors="replace") as lines:
        filled = (number for number, line in enumerate(lines, 1) if line.strip("\r\n"))
        return f"{path}, line {next(itertools.islice(filled, row + 1, None))}"
