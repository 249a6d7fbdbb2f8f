"""The end of a search whose other trials would hardly pay (``search.stop_when``).

A search ends when the probability that one of the trials which are left raises its best score by more than ``gain`` is
below ``probability`` (``verdict.tuning_tail``). Asked are the ends that the sampler has seen, those of ended
generations, so the answer is the same in every session.

* The sample are the trials that the sampler has drawn: the default and points of earlier studies are none, though the
  best may be among them. One that failed, was stopped, or waits to be promoted has not exceeded the best.

* ``random`` and ``qmc`` draw all trials alike. Other samplers learn, so their later trials are better than the earlier
  ones: the sample is the newest half, and each trial that is left counts as two.

* Nothing ends before ``FEWEST`` trials of the sample are there.
* A family ends together with those that take its points trial by trial, when the rule holds for each of them: pairs
  stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scipy.stats import kendalltau

from dmlstudy.records import Record
from dmlstudy.search.storage import user_attrs_of
from dmlstudy.search.subsearch import Follower, Subsearch
from dmlstudy.spec.study_file import SearchConfig, StopRule
from dmlstudy.store import Store
from dmlstudy.verdict.tuning_tail import chance_of_gain

ENDED_EARLY = "ended_early"
"""The attribute of the Optuna study with the searches that have ended so, by name."""

FEWEST = 10
"""Trials of a sample, below which no search ends."""

INDEPENDENT = ("random", "qmc")
"""Samplers whose later trials are no better than the earlier ones."""

DRIFT = 2
"""So many trials each of those that are left counts as where the sampler learns."""

RISING = 0.1
"""Significance from which the newest scores of a sampler that learns count as rising."""

SHARE = 1.0
"""No objective is higher, unless a score was."""


class EarlyEnd(Record):
    """A search that has ended before its number of trials: its best score, and why."""

    num_trials: int
    num_left: int
    best: float
    gain: float
    probability: float

    def told(self, name: str, *, is_whole: bool) -> str:
        """The line for people; ``is_whole`` where all families share the search."""
        whose = "the search of all families" if is_whole else f"family {name}: search"
        others = f"other {self.num_left}" if self.num_left > 1 else "other one"
        return (
            f"{whose} ended after {self.num_trials} of {self.num_trials + self.num_left} trials: the {others} would"
            f" raise {self.best:.4f} by more than {self.gain:g} with a probability of {100 * self.probability:.2g}%"
        )


class EndingSearches:
    """Says which searches end now; none without a rule."""

    def __init__(self, search: SearchConfig, subsearches: Sequence[Subsearch]) -> None:
        self._rule = search.stop_when
        self._learns = search.sampler not in INDEPENDENT
        self._groups: dict[str, list[Subsearch]] = {}
        """A search, and those that follow it trial by trial, in their order."""
        self._asked: dict[str, int] = {}
        for each in subsearches if self._rule else ():
            head = each
            while isinstance(head, Follower) and not head.is_best:
                head = head.leader
            self._groups.setdefault(head.name, []).append(each)

    def due(self) -> Iterator[Mapping[str, EarlyEnd]]:
        """Searches that end now, with their followers; one that goes on is asked again when it has seen more."""
        for name, members in self._groups.items():
            num_seen = sum(each.num_seen for each in members)
            if self._rule is None or not members[0].num_left or self._asked.get(name) == num_seen:
                continue
            self._asked[name] = num_seen
            found: dict[str, EarlyEnd] = {}
            for each in members:
                end = self._end_of(each, self._rule)
                if end.probability >= self._rule.probability:
                    break
                found[each.name] = end
            else:
                yield found

    def _end_of(self, subsearch: Subsearch, rule: StopRule) -> EarlyEnd:
        best = max(subsearch.outcomes.values(), default=-math.inf)
        probability = 1.0 if best == -math.inf else self._chance(subsearch, rule, best)
        return EarlyEnd(
            num_trials=subsearch.num_asked,
            num_left=subsearch.num_left,
            best=best,
            gain=rule.gain,
            probability=probability,
        )

    def _chance(self, subsearch: Subsearch, rule: StopRule, best: float) -> float:
        """The probability that one of the trials that are left is better by more than the gain."""
        given, num_left = subsearch.given, subsearch.num_left
        drawn = [score for number, score in sorted(subsearch.outcomes.items()) if number not in given]
        if len(drawn) < FEWEST:
            return 1.0
        if self._learns:
            drawn, num_left = drawn[-max(FEWEST, math.ceil(len(drawn) / 2)) :], DRIFT * num_left
            if _rises(drawn):
                return 1.0
        finished = [score for score in drawn if score > -math.inf]
        highest = SHARE if best <= SHARE else math.inf
        return chance_of_gain(finished, len(drawn), best, rule.gain, num_left, highest=highest)


def _rises(scores: Sequence[float]) -> bool:
    """True if finished scores still rise from trial to trial, by Kendall's rank correlation (one-sided)."""
    finished = [(place, score) for place, score in enumerate(scores) if score > -math.inf]
    if len(finished) < 3:
        return False
    found = kendalltau(*zip(*finished, strict=True), alternative="greater")
    return bool(found.pvalue < RISING)


def early_ends(attrs: Mapping[str, Any]) -> dict[str, EarlyEnd]:
    """The searches that have ended early, by name, from the attributes of the Optuna study."""
    return {name: EarlyEnd.model_validate(each) for name, each in attrs.get(ENDED_EARLY, {}).items()}


def told_of(store: Store, study: str, *, is_whole: bool) -> list[str]:
    """A line on each search of a study that has ended early."""
    return [
        end.told(name, is_whole=is_whole) for name, end in early_ends(user_attrs_of(store, study)).items()
    ]
