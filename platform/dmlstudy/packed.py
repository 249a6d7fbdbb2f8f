"""Long lists in few large blocks of memory, for tens of thousands of trials: rows of numbers, and records of bytes."""

from __future__ import annotations

import bisect
import zlib
from array import array
from typing import TypeAlias

Row: TypeAlias = tuple[float, ...]

WINDOW = 12
"""Logarithm of the bytes that a record is compressed with: a record and the first one."""


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
    """A mapping of whole numbers to bytes, in one buffer.

    Records are alike, so each is compressed with the first one as its dictionary; what is left takes 24 bytes more. The
    place of those that are taken out is used again once they are a quarter of the buffer.
    """

    def __init__(self) -> None:
        self._first: bytes | None = None
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
        return self._unpacked(place)

    def __setitem__(self, key: int, record: bytes) -> None:
        self.pop(key)
        if self._first is None:
            self._first = record
        packer = zlib.compressobj(wbits=-WINDOW, memLevel=5, zdict=self._first)
        begin = len(self._buffer)
        self._buffer += packer.compress(record) + packer.flush()
        self._places.add((key, begin, len(self._buffer)))
        self._num_used += len(self._buffer) - begin

    def pop(self, key: int) -> bytes | None:
        """Take out a record; None where there is none."""
        place = self._place(key)
        if place is None:
            return None
        record = self._unpacked(place)
        self._places.discard((key, place.start, place.stop))
        self._num_used -= place.stop - place.start
        if self._num_used < 0.75 * len(self._buffer):
            self._close_up()
        return record

    def _unpacked(self, place: slice) -> bytes:
        assert self._first is not None
        unpacker = zlib.decompressobj(wbits=-WINDOW, zdict=self._first)
        return unpacker.decompress(self._buffer[place]) + unpacker.flush()

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
