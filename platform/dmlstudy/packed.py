"""Long lists in few large blocks of memory, for tens of thousands of trials: rows of numbers, and records of bytes."""

from __future__ import annotations

import bisect
from array import array
from typing import TypeAlias

Row: TypeAlias = tuple[float, ...]


class SortedRows:
    """Rows of ``width`` numbers that rise, as tuples do; a number takes 8 bytes. None may be NaN."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._numbers = array("d")

    def __len__(self) -> int:
        return len(self._numbers) // self._width

    def __getitem__(self, at: int) -> Row:
        at = range(len(self))[at]
        return tuple(self._numbers[at * self._width : (at + 1) * self._width])

    def __contains__(self, row: Row) -> bool:
        at = self.num_below(row)
        return at < len(self) and self[at] == row

    def num_below(self, row: Row) -> int:
        """The number of rows below a row."""
        return bisect.bisect_left(range(len(self)), row, key=self.__getitem__)

    def add(self, row: Row) -> None:
        """Take in a row."""
        at = self.num_below(row) * self._width
        self._numbers[at:at] = array("d", row)

    def discard(self, row: Row) -> None:
        """Take out a row, if it is there."""
        at = self.num_below(row)
        if at < len(self) and self[at] == row:
            del self._numbers[at * self._width : (at + 1) * self._width]


class PackedRecords:
    """A mapping of whole numbers to bytes, in one buffer; a record takes 24 bytes and its own.

    The place of those that are taken out is used again once they are a quarter of the buffer.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._places = SortedRows(width=3)
        """(key, begin, end) in the buffer."""
        self._num_used = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: int) -> bool:
        return self._place(key) is not None

    def __getitem__(self, key: int) -> bytes:
        place = self._place(key)
        if place is None:
            raise KeyError(key)
        return bytes(self._buffer[place])

    def __setitem__(self, key: int, record: bytes) -> None:
        self.pop(key)
        begin = len(self._buffer)
        self._buffer += record
        self._places.add((key, begin, begin + len(record)))
        self._num_used += len(record)

    def pop(self, key: int) -> bytes | None:
        """Take out a record; None where there is none."""
        place = self._place(key)
        if place is None:
            return None
        record = bytes(self._buffer[place])
        self._places.discard((key, place.start, place.stop))
        self._num_used -= len(record)
        if self._num_used < 0.75 * len(self._buffer):
            self._close_up()
        return record

    def _place(self, key: int) -> slice | None:
        at = self._places.num_below((key,))
        if at == len(self._places):
            return None
        found, begin, end = self._places[at]
        return slice(int(begin), int(end)) if found == key else None

    def _close_up(self) -> None:
        buffer, places = self._buffer, self._places
        self._buffer, self._places = bytearray(), SortedRows(width=3)
        for at in range(len(places)):
            key, begin, end = places[at]
            start = len(self._buffer)
            self._buffer += buffer[int(begin) : int(end)]
            self._places.add((key, start, len(self._buffer)))
