"""Trials that wait at a rung, packed: there may be tens of thousands."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass

from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from dmlstudy.packed import PackedRecords


@dataclass(frozen=True)
class WaitingTrial:
    """A trial with a score at the rung ``step``; ``number`` is the one that its sampler knows it by."""

    trial: FrozenTrial
    step: int
    number: int

    def stopped(self) -> FrozenTrial:
        """The trial as one that was stopped at the rung, as the sampler sees it."""
        trial = copy.copy(self.trial)
        reports = {step: score for step, score in trial.intermediate_values.items() if step <= self.step}
        score = reports.get(self.step, math.nan)
        trial.number, trial.state, trial.intermediate_values = self.number, TrialState.PRUNED, reports
        trial.values = [score] if math.isfinite(score) else None
        return trial


class WaitingTrials:
    """Such trials by their turns, in some 100 bytes each; what is taken in comes back as a copy.

    Their distributions are shared.
    """

    def __init__(self) -> None:
        self._records = PackedRecords()
        self._distributions: list[dict[str, BaseDistribution]] = []
        """All that differ."""

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, turn: int) -> bool:
        return turn in self._records

    def __setitem__(self, turn: int, waiting: WaitingTrial) -> None:
        trial = waiting.trial
        if trial.distributions not in self._distributions:
            self._distributions.append(trial.distributions)
        which = self._distributions.index(trial.distributions)
        # An equal one may have another order: a storage has its own.
        values = [trial.params[name] for name in self._distributions[which]]
        times = trial.datetime_start, trial.datetime_complete
        state = int(trial.state), trial.values, *times, which, values
        attrs = trial.user_attrs, trial.system_attrs, trial.intermediate_values
        own = waiting.step, waiting.number, trial.number, trial._trial_id
        self._records[turn] = pickle.dumps((*own, *state, *attrs))

    def __getitem__(self, turn: int) -> WaitingTrial:
        step, number, *kept = pickle.loads(self._records[turn])
        own_number, trial_id, state, scores, begun, ended, which, values, *attrs = kept
        user_attrs, system_attrs, reports = attrs
        distributions = self._distributions[which]
        trial = FrozenTrial(
            number=own_number,
            state=TrialState(state),
            value=None,
            values=scores,
            datetime_start=begun,
            datetime_complete=ended,
            params=dict(zip(distributions, values, strict=True)),
            distributions=distributions,
            user_attrs=user_attrs,
            system_attrs=system_attrs,
            intermediate_values=reports,
            trial_id=trial_id,
        )
        return WaitingTrial(trial, step, number)

    def __delitem__(self, turn: int) -> None:
        self._records.pop(turn)
