"""Paired comparisons of families on equal seeds, corrected for how many there are (PROTOCOL, verdict)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Literal

from scipy.special import stdtr, stdtrit

from dmlstudy.records import Record

ALPHA = 0.05
"""Chance of one false difference or more among all comparisons of a study."""

Outcome = Literal["better", "worse", "not distinguishable"]


class Comparison(Record):
    """Family ``first`` against ``second`` on the seeds both were judged with.

    ``effect`` is the mean over seeds of first's score minus second's; ``low`` and ``high`` its interval at the level
    at which Holm's procedure judged this pair, so it leaves out 0 exactly where the outcome is not 'not
    distinguishable'. ``p_value`` is that of the two-sided paired t-test, ``adjusted_p_value`` Holm's. With fewer than
    two seeds nothing can be told: no interval, p-values 1.
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
        return f"{self.first} {self.outcome} {self.preposition} {self.second}: {self.effect:+.4f}{interval}"

    @property
    def preposition(self) -> str:
        """The word between outcome and the second family."""
        return "from" if self.outcome == "not distinguishable" else "than"


def compare(scores: Mapping[str, Mapping[int, float]]) -> list[Comparison]:
    """All pairs of families, in the order given, from each family's scores by seed.

    Holm 1979: with p-values p_(1) <= ... <= p_(m), p_(k) is judged at ALPHA / (m - k + 1) until one fails.
    """
    pairs = list(itertools.combinations(scores, 2))
    differences = {
        (a, b): [scores[a][seed] - scores[b][seed] for seed in sorted(scores[a].keys() & scores[b].keys())]
        for a, b in pairs
    }
    p_values = {pair: _p_value(values) for pair, values in differences.items()}
    judged: dict[tuple[str, str], Comparison] = {}
    adjusted, level, rejecting = 0.0, ALPHA / max(1, len(pairs)), True
    for rank, pair in enumerate(sorted(pairs, key=lambda pair: p_values[pair])):
        num_left = len(pairs) - rank
        adjusted = max(adjusted, min(1.0, p_values[pair] * num_left))
        if rejecting:
            level = ALPHA / num_left
            rejecting = p_values[pair] <= level
        judged[pair] = _comparison(pair, differences[pair], p_values[pair], adjusted, level, rejecting)
    return [judged[pair] for pair in pairs]


def _comparison(
    pair: tuple[str, str],
    differences: list[float],
    p_value: float,
    adjusted: float,
    level: float,
    differs: bool,
) -> Comparison:
    effect = statistics.fmean(differences) if differences else 0.0
    n = len(differences)
    low = high = None
    if n >= 2:
        half_width = float(stdtrit(n - 1, 1 - level / 2)) * statistics.stdev(differences) / math.sqrt(n)
        low, high = effect - half_width, effect + half_width
    outcome: Outcome = "not distinguishable"
    if differs and effect != 0:
        outcome = "better" if effect > 0 else "worse"
    return Comparison(
        first=pair[0],
        second=pair[1],
        num_seeds=n,
        effect=effect,
        low=low,
        high=high,
        p_value=p_value,
        adjusted_p_value=adjusted,
        outcome=outcome,
    )


def _p_value(differences: list[float]) -> float:
    """Two-sided paired t-test; equal differences on all seeds leave no doubt, or none of a difference."""
    n = len(differences)
    if n < 2:
        return 1.0
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stdtr(n - 1, -abs(mean) / (deviation / math.sqrt(n))))
