"""What the search keeps of trials by the ten thousand: in tens or hundreds of bytes, not in thousands."""

from __future__ import annotations

import bisect
import pickle
from array import array
from collections.abc import Iterator
from typing import TypeAlias

from optuna.trial import FrozenTrial, TrialState

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

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    def __reversed__(self) -> Iterator[Row]:
        return map(self.__getitem__, reversed(range(len(self))))

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


class PackedTrial:
    """A trial in some 400 bytes; its distributions are shared with others', as they were before."""

    __slots__ = ("_bytes", "_distributions", "family")

    def __init__(self, trial: FrozenTrial, family: str = "") -> None:
        self.family = family
        self._distributions = trial.distributions
        values = [trial.params[name] for name in self._distributions]
        times = (trial.datetime_start, trial.datetime_complete)
        attrs = (trial.user_attrs, trial.system_attrs, trial.intermediate_values)
        self._bytes = pickle.dumps(
            (trial.number, trial._trial_id, int(trial.state), trial.values, *times, values, *attrs)
        )

    def unpacked(self) -> FrozenTrial:
        """A copy of the trial."""
        number, trial_id, state, scores, begun, ended, values, *attrs = pickle.loads(self._bytes)
        user_attrs, system_attrs, reports = attrs
        return FrozenTrial(
            number=number,
            state=TrialState(state),
            value=None,
            values=scores,
            datetime_start=begun,
            datetime_complete=ended,
            params=dict(zip(self._distributions, values, strict=True)),
            distributions=self._distributions,
            user_attrs=user_attrs,
            system_attrs=system_attrs,
            intermediate_values=reports,
            trial_id=trial_id,
        )
