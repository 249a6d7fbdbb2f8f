"""Long lists of trials in little memory: standings in rows of numbers, and trials that wait, packed."""

from __future__ import annotations

import bisect
import math
import pickle
from array import array
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


class WaitingTrial:
    """A trial with a score at the rung ``step``, in some 350 bytes.

    Its distributions are shared with those of other trials, as they were before.
    """

    __slots__ = ("_bytes", "_distributions", "family", "step")

    def __init__(self, trial: FrozenTrial, family: str, step: int) -> None:
        self.family = family
        self.step = step
        self._distributions = trial.distributions
        values = [trial.params[name] for name in self._distributions]
        times = (trial.datetime_start, trial.datetime_complete)
        attrs = (trial.user_attrs, trial.system_attrs, trial.intermediate_values)
        self._bytes = pickle.dumps(
            (trial.number, trial._trial_id, int(trial.state), trial.values, *times, values, *attrs)
        )

    def trial(self) -> FrozenTrial:
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

    def stopped(self) -> FrozenTrial:
        """The trial as one that was stopped at the rung."""
        trial = self.trial()
        reports = {step: score for step, score in trial.intermediate_values.items() if step <= self.step}
        score = reports.get(self.step, math.nan)
        trial.state, trial.intermediate_values = TrialState.PRUNED, reports
        trial.values = [score] if math.isfinite(score) else None
        return trial
