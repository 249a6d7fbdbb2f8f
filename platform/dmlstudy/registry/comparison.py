"""Paired comparisons on equal seeds, corrected for their number (``search/README.md``).

Each has an outcome and an interval. The outcome is Holm's test, the sharper one: over all pairs together the chance of
one or more false differences is at most ALPHA. The intervals are Bonferroni's: all hold at once with confidence
1 - ALPHA.

No interval that fits Holm's test both does that and says how large a difference is. So an interval may just reach
over 0 where the test finds a difference, never the other way round.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Literal

from scipy.special import stdtr, stdtrit

from dmlstudy.records import Record

ALPHA = 0.05
"""Chance of one false difference or more among all comparisons of a study."""

FEWEST_ALIKE = 3
"""Seeds it takes to compare where their differences agree within the resolution."""

Outcome = Literal["better", "worse", "not distinguishable"]
Pair = tuple[str, str]


class Comparison(Record):
    """Family ``first`` against ``second`` on the seeds both were judged with.

    ``effect`` is the mean over seeds of first's score minus second's. ``low`` and ``high`` hold for all pairs of the
    study at once with confidence 1 - ALPHA: t-intervals at level ALPHA / m, for m pairs (Bonferroni).

    ``p_value`` is that of the two-sided paired t-test and ``adjusted_p_value`` Holm's, for all pairs: there is a
    difference if it is at most ALPHA. With one seed, or with two that agree, there is no interval, and the p-values
    are 1.
    """

    first: str
    second: str
    num_seeds: int
    effect: float
    low: float | None
    high: float | None
    p_value: float
    adjusted_p_value: float
    outcome: Outcome

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:+.4f}, {self.high:+.4f}]"
        p = "p < 0.001" if self.adjusted_p_value < 0.001 else f"p {self.adjusted_p_value:.3f}"
        return (
            f"{self.first} {self.outcome} {self.preposition} {self.second}: {self.effect:+.4f}{interval} {p}"
        )

    @property
    def opposite(self) -> Outcome:
        """The outcome from the second family's side."""
        opposites: dict[Outcome, Outcome] = {"better": "worse", "worse": "better"}
        return opposites.get(self.outcome, self.outcome)

    @property
    def turned(self) -> Comparison:
        """The same from the second family's side."""
        return self.model_copy(
            update={
                "first": self.second,
                "second": self.first,
                "effect": -self.effect,
                "low": None if self.high is None else -self.high,
                "high": None if self.low is None else -self.low,
                "outcome": self.opposite,
            }
        )

    @property
    def preposition(self) -> str:
        """The word between outcome and the second family."""
        return "from" if self.outcome == "not distinguishable" else "than"


def compare(
    scores: Mapping[str, Mapping[int, float]], *, pairs: Iterable[Pair] | None = None, resolution: float
) -> list[Comparison]:
    """These pairs of families (all, in the order given), from each family's scores by seed.

    Holm 1979: with p-values p_(1) <= ... <= p_(m), the adjusted p_(k) is the largest of (m - j + 1) p_(j) over j <= k.

    ``resolution`` is the smallest difference that a score can show. It replaces a smaller deviation over seeds: on a
    coarse score, differences can agree on every seed without being certain.
    """
    assert resolution > 0
    chosen = list(itertools.combinations(scores, 2) if pairs is None else pairs)
    samples = {
        (a, b): _Sample.of(
            [scores[a][seed] - scores[b][seed] for seed in sorted(scores[a].keys() & scores[b].keys())],
            resolution,
        )
        for a, b in chosen
    }
    compared: dict[Pair, Comparison] = {}
    adjusted = 0.0
    for rank, pair in enumerate(sorted(chosen, key=lambda pair: samples[pair].p_value)):
        adjusted = max(adjusted, min(1.0, samples[pair].p_value * (len(chosen) - rank)))
        compared[pair] = _comparison(pair, samples[pair], adjusted, ALPHA / len(chosen))
    return [compared[pair] for pair in chosen]


class Tally(Record):
    """In how many studies a family was better than a rival, not distinguishable from it, and worse."""

    wins: int = 0
    ties: int = 0
    losses: int = 0

    def __str__(self) -> str:
        return f"{self.wins}/{self.ties}/{self.losses}"


def tallied(studies: Iterable[Iterable[Comparison]], family: str) -> dict[str, Tally]:
    """Win/tie/loss of ``family`` against each rival it was compared with, over studies; by their outcomes."""
    counts: dict[str, list[int]] = {}
    for comparisons in studies:
        for each in comparisons:
            if family not in (each.first, each.second):
                continue
            rival, outcome = (
                (each.second, each.outcome) if family == each.first else (each.first, each.opposite)
            )
            place = ("better", "not distinguishable", "worse").index(outcome)
            counts.setdefault(rival, [0, 0, 0])[place] += 1
    return {rival: Tally(wins=w, ties=t, losses=n) for rival, (w, t, n) in counts.items()}


class _Sample(Record):
    """Paired differences: their number, their mean, and its standard error (None where nothing can be told)."""

    num: int
    mean: float
    stderr: float | None

    @classmethod
    def of(cls, differences: list[float], resolution: float) -> _Sample:
        n = len(differences)
        mean = statistics.fmean(differences) if differences else 0.0
        if n < 2:
            return cls(num=n, mean=mean, stderr=None)
        deviation = statistics.stdev(differences)
        if deviation < resolution and n < FEWEST_ALIKE:
            return cls(num=n, mean=mean, stderr=None)
        return cls(num=n, mean=mean, stderr=max(deviation, resolution) / math.sqrt(n))

    @property
    def p_value(self) -> float:
        """Two-sided paired t-test."""
        if self.stderr is None:
            return 1.0
        return float(2 * stdtr(self.num - 1, -abs(self.mean) / self.stderr))

    def interval(self, level: float) -> tuple[float, float] | tuple[None, None]:
        """The t-interval that misses with probability ``level``."""
        if self.stderr is None:
            return None, None
        half_width = float(stdtrit(self.num - 1, 1 - level / 2)) * self.stderr
        return self.mean - half_width, self.mean + half_width


def _comparison(pair: Pair, sample: _Sample, adjusted: float, level: float) -> Comparison:
    outcome: Outcome = "not distinguishable"
    if adjusted <= ALPHA:
        outcome = "better" if sample.mean > 0 else "worse"
    low, high = sample.interval(level)
    return Comparison(
        first=pair[0],
        second=pair[1],
        num_seeds=sample.num,
        effect=sample.mean,
        low=low,
        high=high,
        p_value=sample.p_value,
        adjusted_p_value=adjusted,
        outcome=outcome,
    )
