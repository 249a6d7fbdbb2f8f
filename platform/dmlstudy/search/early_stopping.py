"""Early stopping by name: a trial is judged by what its peers have scored so far.

``halving``: asynchronous successive halving in the variant that stops, as Ray's and Optuna's schedulers do: at rungs
r, r*eta, r*eta^2, ... a trial continues if its score is among the best floor(n/eta) of the n trials that have reached
it, itself included.

``asha``: the same with promotion (Li et al. 2020, algorithm 2). A trial pauses at each rung. Of the n trials that
have reached a rung, the best floor(n/eta) are promoted to the next one, whenever they become so. Promotions come
before new trials, those at higher rungs first.

``hyperband``: brackets s = 0, 1, ... of ``asha`` whose first rungs are r*eta^s, the last of which pauses no trial;
a trial's bracket is its place in the search modulo their number (Li et al. 2018, with equal numbers of trials).

``median``: a trial is stopped at any step from r on where its best score is below the median of its peers'
running averages there (Golovin et al. 2017, section 3.2.1).

``none``: every trial runs to its end.

r is the epochs of one fold divided by eta, at least 1. Peers are the trials with a score at that step: of equal
planned epochs, of the same bracket and, where families have equal budgets, of the same family. The search decides
whether running trials count as well as ended ones.

``halving`` and ``median`` take eta peers to judge.
No trial is stopped at its last step, where nothing is left to save, or where its score is not finite. With promotion
such a score is the lowest, and a failed trial counts nowhere.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from dmlstudy.packed import Row, SortedRows

Key: TypeAlias = tuple[str, int, int, int]
"""(whose peers, planned epochs, bracket, step or number of promotions)."""

SPARE = 2
"""Paused trials are kept for so many failures among those before them."""


@dataclass(frozen=True)
class SearchCurve:
    """A trial as its peers see it: its group, its place in the search, its length, its finite scores by step."""

    group: str
    turn: int
    epochs: int
    num_folds: int
    scores: Mapping[int, float]
    num_promotions: int = 0

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

    def pause_after(self, trial: SearchCurve) -> int | None:
        """The step at which the trial pauses next; None where it runs to its end."""
        return None

    def _key(self, trial: SearchCurve, step: int) -> Key:
        return trial.group, trial.epochs, self._bracket(trial), step

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


def _no_standings() -> SortedRows:
    return SortedRows(width=2)


def _turn(standing: Row) -> int:
    return -int(standing[1])


class Asha(EarlyStopping):
    """Promotes from rung to rung whoever is among the best 1/eta there; stops nobody that runs.

    A trial that has reached its next rung is handed in by ``pause``. ``promotable`` gives back, one by one, those that
    go on; who will never be promoted any more is told by ``hopeless``.
    """

    WHY = "not among {whose} best 1/{eta} there"

    def __init__(self, eta: int) -> None:
        super().__init__(eta)
        self._standings: defaultdict[Key, SortedRows] = defaultdict(_no_standings)
        """Of each rung (score, minus the turn) of those that have reached it: the best last, of equals the first."""
        self._paused: defaultdict[str, defaultdict[Key, SortedRows]] = defaultdict(
            lambda: defaultdict(_no_standings)
        )
        """Of each group and rung those that wait there."""

    def pause_after(self, trial: SearchCurve) -> int | None:
        rung = int(self._first_rung(trial) * self.eta**trial.num_promotions)
        return rung if rung < trial.last_step else None

    def pause(self, trial: SearchCurve) -> None:
        """Take in a trial that has reached its next rung, where it waits."""
        key, standing = self._at_rung(trial)
        self._standings[key].add(standing)
        self._paused[trial.group][key].add(standing)

    def leave(self, trial: SearchCurve) -> None:
        """Take a trial from those that wait, to be called with its curve as it was; it counts among its peers."""
        key, standing = self._at_rung(trial)
        self._paused[trial.group][key].discard(standing)

    def forget(self, trial: SearchCurve) -> None:
        """Take out a trial that has failed: at each rung it leaves its place to the next."""
        for num_promotions in range(trial.num_promotions + 1):
            then = replace(trial, num_promotions=num_promotions)
            key, standing = self._at_rung(then)
            self._standings[key].discard(standing)
            self._paused[trial.group][key].discard(standing)

    def promotable(self, group: str) -> int | None:
        """The turn of the trial that goes on next: the best at the highest rung where one may; None of none."""
        for key in self._rungs(group):
            reached, waiting = self._standings[key], self._paused[group][key]
            num_best = len(reached) // self.eta
            if num_best and waiting[-1] >= reached[-num_best]:
                return _turn(waiting[-1])
        return None

    @property
    def num_waiting(self) -> int:
        return sum(len(waiting) for rungs in self._paused.values() for waiting in rungs.values())

    def waiting(self, group: str) -> list[int]:
        """The turns of all that wait: those at higher rungs first, at each the best first."""
        return [_turn(each) for key in self._rungs(group) for each in reversed(self._paused[group][key])]

    def hopeless(self, group: str, num_new: int, running: Iterable[SearchCurve] = ()) -> list[int]:
        """The turns of those that wait and cannot be promoted, whatever ``num_new`` trials and the running ones score.

        Of at most n trials that ever reach a rung, only the best floor(n/eta) can be promoted. Each of these may be,
        and each that has yet to come: the next rung has so many more, at most.
        """
        coming = Counter(self._at_rung(curve)[0] for curve in running)
        found: list[int] = []
        num_more: dict[tuple[int, int], int] = {}
        for key in sorted(self._paused[group]):  # of each ladder the lowest rung first
            _, epochs, bracket, _ = key
            reached, waiting = self._standings[key], self._paused[group][key]
            num_coming = num_more.get((epochs, bracket), num_new) + coming[key]
            num_most = max(1, (len(reached) + num_coming) // self.eta) + SPARE
            cut = reached[-num_most] if len(reached) >= num_most else (-math.inf, -math.inf)
            num_hopeless = waiting.num_below(cut)
            found += [_turn(waiting[at]) for at in range(num_hopeless)]
            num_more[epochs, bracket] = num_coming + len(waiting) - num_hopeless
        return sorted(found)

    def _rungs(self, group: str) -> list[Key]:
        """The rungs at which trials wait, the highest first."""
        rungs = [key for key, waiting in self._paused[group].items() if waiting]
        return sorted(rungs, key=lambda key: (-key[2] - key[3], key))

    def _at_rung(self, trial: SearchCurve) -> tuple[Key, Row]:
        """The rung that the trial pauses at next, and its standing there."""
        rung = int(self._first_rung(trial) * self.eta**trial.num_promotions)
        key = (trial.group, trial.epochs, self._bracket(trial), trial.num_promotions)
        return key, (trial.scores.get(rung, -math.inf), -trial.turn)


class Hyperband(Asha):
    """Brackets of ``asha``; the last one has its first rung at a trial's end or beyond."""

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
    "asha": Asha,
    "halving": Halving,
    "hyperband": Hyperband,
    "median": Median,
    "none": EarlyStopping,
}
