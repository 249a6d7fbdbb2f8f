"""Paired comparisons on equal seeds, corrected for their number (``search/README.md``).

Each has an outcome and an interval. The outcome is Holm's test, the sharper one: over all pairs together the chance of
one or more false differences is at most ALPHA. The intervals are Bonferroni's: all hold at once with confidence
1 - ALPHA.

No interval that fits Holm's test both does that and says how large a difference is. So an interval may just reach
over 0 where the test finds a difference, never the other way round.

All this is told of two populations, each with its own Holm: other seeds on these test classes, and other seeds on other
classes like these (``two_sources``). Better on classes like these implies better on these.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from dmlstudy import metric_names
from dmlstudy.records import Grown, Record, Unit, UnitScores
from dmlstudy.verdict.two_sources import (
    FEW_UNITS,
    FEWEST_UNITS,
    OneSeed,
    Shuffles,
    TwoSources,
    Weights,
)

ALPHA = 0.05
"""Chance of one false difference or more among all comparisons of a study."""

FEWEST_ALIKE = 3
"""Seeds it takes to compare where their differences agree within the resolution."""

UNKNOWN_RESOLUTION = 1e-3
"""Of scores on test classes where nobody noted how many queries they have."""

ROUNDING = 1e-9
"""Two means over queries differ by more than this, if they differ."""

Outcome = Literal["better", "worse", "not distinguishable"]
OPPOSITES: dict[Outcome, Outcome] = {
    "better": "worse",
    "worse": "better",
    "not distinguishable": "not distinguishable",
}
Pair = tuple[str, str]
Ending = Literal["decided", "seeds", "classes", "limit", "open"]
"""The reason why a pair got no further seeds: decided, given up for want of seeds or of classes, or all were used.

"open": it gets more.
"""


PLURALS: dict[Unit, str] = {"class": "classes", "image": "images", "row": "rows"}

SAME: dict[Unit, str] = {
    "class": "",
    "image": ", of the same classes and in the same database",
    "row": ", of the same classes",
}
"""Words on the things that stay as they are where other units are meant."""

MOST_NAMED = 3
"""Pairs that a remark names."""

FEW_MOVED = 10
"""Intervals for others may be too narrow where families differ in fewer units than this."""

ENDINGS: dict[Ending, str] = {
    "decided": "decided",
    "seeds": "given up, for all seeds would hardly have decided",
    "classes": "given up, for {units} limit and not seeds",
    "limit": "not decided with all seeds",
    "open": "not decided yet",
}
NOT_KEPT = "no scores by {unit} were kept"
NO_MEAN = "{metric} is no mean over queries"
UNEQUAL = "they were not judged by the same {units}"
TOO_FEW = f"fewer than {FEWEST_UNITS} {{units}}"
TOO_FEW_SEEDS = "too few seeds"


class UnitMeans(NamedTuple):
    """A metric of one verdict trial by unit."""

    key: str
    """Equal for trials that were judged by the same units and queries."""
    counts: list[int]
    """The units' weights in the metric, in proportion: their queries, or ones for a macro mean."""
    mean_C: NDArray[np.float64]

    @classmethod
    def of(cls, scores: UnitScores, name: str) -> UnitMeans | None:
        """The metric of this name, as on test classes; None of one that is no mean over queries."""
        metric = metric_names.metric_of(name)
        sum_C = scores.sums.get(metric_names.micro(metric))
        if sum_C is None:
            return None
        counts = scores.counts if metric == metric_names.micro(metric) else [1] * len(scores.counts)
        return cls(scores.digest(), counts, np.array(sum_C) / np.array(scores.counts))


class Comparison(Grown):
    """Family ``first`` against ``second`` on the seeds both were judged with.

    ``effect`` is the mean over seeds of first's score minus second's. ``low`` and ``high`` hold for all pairs of the
    study at once with confidence 1 - ALPHA: t-intervals at level ALPHA / m, for m pairs (Bonferroni).

    ``p_value`` is that of the two-sided paired t-test and ``adjusted_p_value`` Holm's, for all pairs: there is a
    difference if it is at most ALPHA. With one seed, or with two that agree, there is no interval, and the p-values
    are 1.

    These are of other seeds on the same test classes. Those named ``like_`` are the same of other seeds on other
    classes like these, None where nothing is known of them; ``like_unknown`` says why. ``num_moved`` counts the
    classes in which any seed shows a difference. Both numbers are 0 where scores by class are not known.

    Where seeds are added until the pair is decided (``sequential``), the p-values and intervals are corrected for the
    looks. ``look`` is the pair's last, in seeds, ``ended`` says why it was the last, ``most_seeds`` is the limit.

    ``class_share`` is the share of classes in the uncertainty, which no further seed removes. The deviations are those
    of one paired seed, of one class and of their interaction. ``like_is_rough`` marks intervals of few classes.
    """

    LATER = (
        "unit",
        "num_classes",
        "num_moved",
        "like_outcome",
        "like_low",
        "like_high",
        "like_p_value",
        "like_adjusted_p_value",
        "like_is_rough",
        "like_unknown",
        "class_share",
        "seed_deviation",
        "class_deviation",
        "both_deviation",
        "look",
        "most_seeds",
        "ended",
    )

    first: str
    second: str
    num_seeds: int
    effect: float
    low: float | None
    high: float | None
    p_value: float
    adjusted_p_value: float
    outcome: Outcome
    unit: Unit = "class"
    num_classes: int = 0
    num_moved: int = 0
    like_outcome: Outcome | None = None
    like_low: float | None = None
    like_high: float | None = None
    like_p_value: float | None = None
    like_adjusted_p_value: float | None = None
    like_is_rough: bool = False
    like_unknown: str = ""
    class_share: float | None = None
    seed_deviation: float | None = None
    class_deviation: float | None = None
    both_deviation: float | None = None
    look: int = 0
    most_seeds: int = 0
    ended: Ending | None = None

    def __str__(self) -> str:
        return (
            f"{self.first} {self.outcome} {self.preposition} {self.second}{self.where}: {self.effect:+.4f}"
            f" {'; '.join(self.populations)}"
        )

    def told_effect(self) -> str:
        """The difference with its interval and outcome, of the population that the outcome is of."""
        interval = "" if self.interval is None else f" [{self.interval[0]:+.4f}, {self.interval[1]:+.4f}]"
        return f"{self.effect:+.4f}{interval} {self.outcome}"

    @property
    def where(self) -> str:
        """The population that the outcome holds for, in words; nothing where no difference was found."""
        if self.outcome == "not distinguishable":
            return ""
        if self.holds_for_others:
            return f" on {self.like_these}"
        return f" on {self.these}{'' if self.like_outcome is None else ' only'}"

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the population that the outcome is of; None where there is none."""
        low, high = (self.like_low, self.like_high) if self.holds_for_others else (self.low, self.high)
        return None if low is None or high is None else (low, high)

    @property
    def p(self) -> float:
        """Holm's p-value of the same population."""
        if self.holds_for_others and self.like_adjusted_p_value is not None:
            return self.like_adjusted_p_value
        return self.adjusted_p_value

    @property
    def like_these(self) -> str:
        """Other test classes of the same kind, in words; images and rows are of the same classes."""
        return f"{PLURALS[self.unit]} like these"

    @property
    def these(self) -> str:
        """The test classes in words."""
        return f"these {self.num_classes or ''} {PLURALS[self.unit]}".replace("  ", " ")

    @property
    def holds_for_others(self) -> bool:
        """True if there is a difference on classes like these too."""
        return self.like_outcome in ("better", "worse")

    @property
    def populations(self) -> list[str]:
        """The interval and Holm's p-value of either population; first that which the outcome is of.

        Brackets belong to the population named before them.
        """
        here = _shown(self.low, self.high, self.adjusted_p_value)
        if self.like_adjusted_p_value is None:
            return [here]
        like = _shown(self.like_low, self.like_high, self.like_adjusted_p_value)
        if self.holds_for_others:
            return [like, f"on {self.these} {here}"]
        share = ""
        if self.outcome != "not distinguishable" and self.class_share is not None:
            share = f", {self.class_share:.0%} of it {PLURALS[self.unit]}"
        return [here, f"on {self.like_these} {like}{share}"]

    @property
    def opposite(self) -> Outcome:
        """The outcome from the second family's side."""
        return OPPOSITES[self.outcome]

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
                "like_low": None if self.like_high is None else -self.like_high,
                "like_high": None if self.like_low is None else -self.like_low,
                "like_outcome": self.like_outcome and OPPOSITES[self.like_outcome],
            }
        )

    @property
    def preposition(self) -> str:
        """The word between outcome and the second family."""
        return "from" if self.outcome == "not distinguishable" else "than"


def compare(
    scores: Mapping[str, Mapping[int, float]],
    *,
    pairs: Iterable[Pair] | None = None,
    resolution: float,
    by_unit: Mapping[str, Mapping[int, UnitMeans]] = {},
    unit: Unit = "class",
    unknown: str = NOT_KEPT,
    overlap: float | None = None,
) -> list[Comparison]:
    """These pairs of families (all, in the order given), from each family's scores by seed.

    Holm 1979: with p-values p_(1) <= ... <= p_(m), the adjusted p_(k) is the largest of (m - j + 1) p_(j) over j <= k.

    ``resolution`` is the smallest difference that a score can show. It replaces a smaller deviation over seeds: on a
    coarse score, differences can agree on every seed without being certain.

    ``by_unit`` are the same scores by test class, or whatever the ``unit``: without them nothing is said of classes
    like these, for the reason that ``unknown`` names. Where each seed has shuffled the rows anew, ``overlap`` is the
    number of test rows over that of rows to learn from, and no scores by row are needed.
    """
    assert resolution > 0
    chosen = list(itertools.combinations(scores, 2) if pairs is None else pairs)
    seeds = {(a, b): sorted(scores[a].keys() & scores[b].keys()) for a, b in chosen}
    samples = {
        (a, b): Sample.of([scores[a][seed] - scores[b][seed] for seed in seeds[a, b]], resolution)
        for a, b in chosen
    }
    others = {
        (a, b): Others.of(
            [(by_unit.get(a, {}).get(seed), by_unit.get(b, {}).get(seed)) for seed in seeds[a, b]],
            samples[a, b],
            resolution,
            unknown,
        )
        if overlap is None
        else Others.of_shuffles(samples[a, b], overlap)
        for a, b in chosen
    }
    here = holm([samples[pair].p_value for pair in chosen])
    like = holm([others[pair].p_value for pair in chosen])
    level = ALPHA / max(len(chosen), 1)
    return [
        comparison(pair, samples[pair], adjusted, level).model_copy(
            update={"unit": unit, **others[pair].told(adjusted_like, level, unit)}
        )
        for pair, adjusted, adjusted_like in zip(chosen, here, like, strict=True)
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[place] * (len(p_values) - rank)))
        adjusted[place] = largest
    return adjusted


def remarks(comparisons: Sequence[Comparison]) -> list[str]:
    """Lines on the two populations of these comparisons, and on what is not known or not sure of them."""
    if not comparisons:
        return []
    unit = comparisons[0].unit
    units, unknown = PLURALS[unit], [each for each in comparisons if each.like_outcome is None]
    reasons = ", ".join(dict.fromkeys(each.like_unknown for each in unknown))
    if len(unknown) == len(comparisons):
        alone = f"all of this is of these {units}, with other seeds; of others nothing is known: {reasons}"
        return [alone, *_looks_told(comparisons)]
    found = [
        f"on these {units}: with other seeds; on {units} like these: with other {units} of the same kind too, as many"
        f" of them{SAME[unit]}"
    ]
    if unknown:
        found.append(f"{len(unknown)} of {len(comparisons)} pairs are of these {units} alone: {reasons}")
    if any(each.like_is_rough for each in comparisons):
        found.append(
            f"few {units}, or one with most queries: intervals for {units} like these are rough, mostly too wide"
        )
    if moved := [
        each for each in comparisons if each.like_outcome and each.num_moved < FEW_MOVED <= each.num_classes
    ]:
        shown = ", ".join(
            f"{each.first} and {each.second} in {each.num_moved} of {each.num_classes}"
            for each in moved[:MOST_NAMED]
        )
        more = f" and {len(moved) - MOST_NAMED} more pairs" if len(moved) > MOST_NAMED else ""
        found.append(
            f"differing in few {units} only, so that the interval for {units} like these may be too narrow:"
            f" {shown}{more}"
        )
    return [*found, *_looks_told(comparisons)]


def _looks_told(comparisons: Sequence[Comparison]) -> list[str]:
    """Lines on when pairs were decided or given up, where seeds were added until they were."""
    ends: dict[tuple[int, Ending], list[str]] = {}
    for each in sorted(comparisons, key=lambda each: each.look):
        if each.ended is not None:
            ends.setdefault((each.look, each.ended), []).append(f"{each.first} - {each.second}")
    if not ends:
        return []
    units = PLURALS[comparisons[0].unit]
    told = [
        f"after {look} seeds {ENDINGS[ended].format(units=units)}: {', '.join(pairs[:MOST_NAMED])}"
        + (f" and {len(pairs) - MOST_NAMED} more" if len(pairs) > MOST_NAMED else "")
        for (look, ended), pairs in ends.items()
    ]
    return [
        f"seeds were added until the pairs were decided, {comparisons[0].most_seeds} at most; p-values and intervals"
        f" are corrected for the looks ({'; '.join(told)})"
    ]


class ModelComparison(Record):
    """Two models, one seed each, on other classes like those of the test; ``outcome`` is the first's at ALPHA.

    Unlike families they need no common seeds. How another training of either would do, it does not say.
    """

    effect: float
    low: float
    high: float
    p_value: float
    outcome: Outcome
    unit: Unit
    num_classes: int
    num_moved: int

    def __str__(self) -> str:
        units = f"{self.num_moved} of {self.num_classes} {PLURALS[self.unit]} differ"
        return f"{self.effect:+.4f} {_shown(self.low, self.high, self.p_value)}, {units}"


def compare_models(first: UnitMeans, second: UnitMeans, unit: Unit) -> ModelComparison | str:
    """The comparison of two models by their scores on the same units, or the reason why there is none.

    With S = 1: half-width t(V_C, nu), nothing is subtracted.
    """
    words = {"unit": unit, "units": PLURALS[unit]}
    if first.key != second.key:
        return UNEQUAL.format(**words)
    if len(first.counts) < FEW_UNITS:
        return f"fewer than {FEW_UNITS} {PLURALS[unit]}"
    d_C = first.mean_C - second.mean_C
    found = OneSeed.of(d_C, Weights.of(first.counts))
    p_value, half_width = found.p_value, found.half_width(ALPHA)
    outcome: Outcome = "not distinguishable"
    if p_value <= ALPHA:
        outcome = "better" if found.effect > 0 else "worse"
    return ModelComparison(
        effect=found.effect,
        low=found.effect - half_width,
        high=found.effect + half_width,
        p_value=p_value,
        outcome=outcome,
        unit=unit,
        num_classes=len(d_C),
        num_moved=_num_moved(d_C[None]),
    )


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


class Sample(Record):
    """Paired differences: their number, their mean, and its standard error (None where nothing can be told)."""

    num: int
    mean: float
    stderr: float | None

    @classmethod
    def of(cls, differences: list[float], resolution: float) -> Sample:
        if not all(map(math.isfinite, differences)):
            raise ValueError("a score is not a finite number; leave out the seeds of trials that failed")
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


class Others(NamedTuple):
    """A pair of families on other units like those of the test; ``sources`` is None where nothing is known."""

    sample: Sample
    sources: TwoSources | Shuffles | None
    num_units: int
    num_moved: int
    unknown: str

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[UnitMeans | None, UnitMeans | None]],
        sample: Sample,
        resolution: float,
        unknown: str,
    ) -> Others:
        """From both families' scores by unit of each common seed."""
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not known or len(known) < len(pairs):
            return cls(sample, None, 0, 0, unknown)
        counts = known[0][0].counts
        if len({each.key for pair in known for each in pair}) > 1:
            return cls(sample, None, 0, 0, UNEQUAL)
        d_SC = np.array([a.mean_C - b.mean_C for a, b in known])
        num_moved = _num_moved(d_SC)
        if len(counts) < FEWEST_UNITS:
            return cls(sample, None, len(counts), num_moved, TOO_FEW)
        if sample.stderr is None:
            return cls(sample, None, len(counts), num_moved, TOO_FEW_SEEDS)
        sources = TwoSources.of(d_SC, Weights.of(counts), resolution)
        return cls(sample, sources, len(counts), num_moved, "")

    @classmethod
    def of_shuffles(cls, sample: Sample, overlap: float) -> Others:
        """From scores whose seeds have shuffled the rows."""
        if sample.stderr is None:
            return cls(sample, None, 0, 0, TOO_FEW_SEEDS)
        deviation = sample.stderr * math.sqrt(sample.num)
        return cls(sample, Shuffles(sample.mean, sample.num, deviation, overlap), 0, 0, "")

    @property
    def p_value(self) -> float:
        """The p-value for units like these, never below that for these; 1 where nothing is known."""
        return 1.0 if self.sources is None else max(self.sources.p_value, self.sample.p_value)

    def told(self, adjusted: float, level: float, unit: Unit) -> dict[str, Any]:
        """The fields of a ``Comparison``."""
        found: dict[str, Any] = {"num_classes": self.num_units, "num_moved": self.num_moved}
        if self.sources is None:
            return found | {"like_unknown": self.unknown.format(unit=unit, units=PLURALS[unit])}
        mean, stderr = self.sample.mean, self.sample.stderr
        assert stderr is not None
        here = float(stdtrit(self.sample.num - 1, 1 - level / 2)) * stderr
        half_width = max(here, self.sources.half_width(level))
        outcome: Outcome = "not distinguishable"
        if adjusted <= ALPHA:
            outcome = "better" if mean > 0 else "worse"
        of_seed, of_unit, of_both = self.sources.deviations
        return found | {
            "like_outcome": outcome,
            "like_low": mean - half_width,
            "like_high": mean + half_width,
            "like_p_value": self.p_value,
            "like_adjusted_p_value": adjusted,
            "like_is_rough": self.sources.is_rough,
            "class_share": self.sources.share_of_units,
            "seed_deviation": of_seed,
            "class_deviation": of_unit,
            "both_deviation": of_both,
        }


def _num_moved(d_SC: NDArray[np.float64]) -> int:
    return int((np.abs(d_SC) > ROUNDING).any(axis=0).sum())


def _shown(low: float | None, high: float | None, p_value: float) -> str:
    interval = "" if low is None else f"[{low:+.4f}, {high:+.4f}] "
    return interval + ("p < 0.001" if p_value < 0.001 else f"p {p_value:.3f}")


def comparison(pair: Pair, sample: Sample, adjusted: float, level: float) -> Comparison:
    """The comparison on these units; ``adjusted`` is Holm's p-value, ``level`` the interval's."""
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
