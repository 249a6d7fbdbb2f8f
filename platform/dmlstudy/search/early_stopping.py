"""Early stopping by name: a trial is judged by what its peers have scored so far.

``halving``: asynchronous successive halving in the variant that stops, as Ray's and Optuna's schedulers do (in
algorithm 2 of ASHA, Li et al. 2020, trials are paused and promoted later): at rungs r, r*eta, r*eta^2, ... a trial
continues if its score is among the best floor(n/eta) of the n trials that have reached it, itself included.

``hyperband``: brackets s = 0, 1, ... of halving whose first rungs are r*eta^s, the last of which stops no trial;
a trial's bracket is its place in the search modulo their number (Li et al. 2018, with equal numbers of trials).

``median``: a trial is stopped at any step from r on where its best score is below the median of its peers'
running averages there (Golovin et al. 2017, section 3.2.1).

``none``: every trial runs to its end.

r is the epochs of one fold divided by eta, at least 1. Peers are the trials with a score at that step: of the same
bracket and, where families have equal budgets, of the same family. The search decides whether running trials count
as well as ended ones. It takes eta peers to judge.

No trial is stopped at its last step, where nothing is left to save, or where its score is not finite.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Key: TypeAlias = tuple[str, int, int]
"""(whose peers, bracket, step)."""


@dataclass(frozen=True)
class SearchCurve:
    """A trial as its peers see it: its group, its place in the search, its length, its finite scores by step."""

    group: str
    turn: int
    epochs: int
    num_folds: int
    scores: Mapping[int, float]

    @property
    def last_step(self) -> int:
        return self.epochs * self.num_folds


class EarlyStopping:
    """No early stopping, and what the rules have in common; ``WHY`` is the reason logged for a stopped trial."""

    WHY = "not among {whose} best there"

    def __init__(self, eta: int) -> None:
        self.eta = eta
        self._peers: defaultdict[Key, list[float]] = defaultdict(list)

    def learn(self, trial: SearchCurve, since: int = 0) -> None:
        """Take a trial's scores from a step on among those of the peers."""
        for step, score in self._standards(trial):
            if step >= since:
                bisect.insort(self._peers[self._key(trial, step)], score)

    def stops(self, trial: SearchCurve, step: int) -> bool:
        """True if the trial, whose score at ``step`` has not been learned, should be stopped there."""
        if step not in trial.scores or step >= trial.last_step or not self._judges(trial, step):
            return False
        peers = self._peers.get(self._key(trial, step), [])
        return len(peers) >= self.eta and self._is_below(trial, step, peers)

    def _key(self, trial: SearchCurve, step: int) -> Key:
        return trial.group, self._bracket(trial), step

    def _bracket(self, trial: SearchCurve) -> int:
        return 0

    def _first_rung(self, trial: SearchCurve) -> int:
        return max(1, trial.epochs // self.eta)

    def _standards(self, trial: SearchCurve) -> Iterator[tuple[int, float]]:
        """The steps and scores by which a trial judges its peers."""
        return iter(())

    def _judges(self, trial: SearchCurve, step: int) -> bool:
        return False

    def _is_below(self, trial: SearchCurve, step: int, peers: list[float]) -> bool:
        """``peers`` rise."""
        return False


class Halving(EarlyStopping):
    """Stops at a rung whoever is not among the best 1/eta there."""

    def _standards(self, trial: SearchCurve) -> Iterator[tuple[int, float]]:
        return ((step, score) for step, score in trial.scores.items() if self._judges(trial, step))

    def _judges(self, trial: SearchCurve, step: int) -> bool:
        rung = self._first_rung(trial)
        while rung < step:
            rung *= self.eta
        return rung == step

    def _is_below(self, trial: SearchCurve, step: int, peers: list[float]) -> bool:
        return trial.scores[step] < peers[-((len(peers) + 1) // self.eta)]


class Hyperband(Halving):
    """Brackets of halving; the last one has its first rung at a trial's end or beyond."""

    def _bracket(self, trial: SearchCurve) -> int:
        rung, num_brackets = super()._first_rung(trial), 1
        while rung < trial.last_step:
            rung, num_brackets = rung * self.eta, num_brackets + 1
        return trial.turn % num_brackets

    def _first_rung(self, trial: SearchCurve) -> int:
        return int(super()._first_rung(trial) * self.eta ** self._bracket(trial))


class Median(EarlyStopping):
    """Stops whoever's best is below the median of the running averages."""

    WHY = "below {whose} median there"

    def _standards(self, trial: SearchCurve) -> Iterator[tuple[int, float]]:
        total = 0.0
        for count, (step, score) in enumerate(sorted(trial.scores.items()), start=1):
            total += score
            yield step, total / count

    def _judges(self, trial: SearchCurve, step: int) -> bool:
        return step >= self._first_rung(trial)

    def _is_below(self, trial: SearchCurve, step: int, peers: list[float]) -> bool:
        return max(score for at, score in trial.scores.items() if at <= step) < statistics.median(peers)


RULES: dict[str, type[EarlyStopping]] = {
    "halving": Halving,
    "hyperband": Hyperband,
    "median": Median,
    "none": EarlyStopping,
}
