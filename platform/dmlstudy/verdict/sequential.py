"""Seeds that are added until a verdict is decided: when it is looked at, what is decided then, and who goes on.

Look k is taken after t_k seeds and has the weight w_k; the weights sum to 1. A pair's p-values of the first t_k seeds
are divided by w_k, and the sequential p is the least so far:

    p = min_k p_k / w_k

By the union bound over looks P(p <= a) <= a where there is no difference, however it is stopped and however pairs
depend on one another.

Holm's test runs over the sequential p of all pairs. The interval is that of the pair's last
look, at level w_k ALPHA / m for m pairs: these hold at once over pairs and looks. An outcome has the sign of the look
at which p was least, which may be an earlier one.

A look is a pure function of the stored scores of its seeds. Nothing else is kept, so a resumed study looks again and
finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

from dmlstudy.records import Compared, Record, SeedRange, Unit
from dmlstudy.spec.study_file import ProtocolConfig
from dmlstudy.verdict.comparison import (
    ALPHA,
    NOT_KEPT,
    Comparison,
    Ending,
    Others,
    Outcome,
    Pair,
    Sample,
    UnitMeans,
    comparison,
    holm,
)
from dmlstudy.verdict.two_sources import FEW_UNITS

LOOKS = (3, 4, 5, 7, 10, 14, 20, 28, 40)
"""Seeds after which a verdict is looked at, until the last seed."""

LAST_WEIGHT = 0.8
"""The weight of the last look; the others share the rest in proportion to their seeds."""

Population = Literal["classes_like_these", "these_classes"]
Values = NDArray[np.float64]


class Plan(Record):
    """The rule by which a verdict is decided, fixed before a test image is read."""

    looks: tuple[int, ...]
    """Numbers of seeds, ascending; a single one where the number is fixed."""
    compare: Compared
    decide_on: Population | None
    """None: as ``Looks`` resolves it from the number of units."""
    give_up: float
    first_seed: int = 1
    """The first of the seeds; another than 1 for a search that is done again."""

    @classmethod
    def of(cls, protocol: ProtocolConfig) -> Plan:
        """The plan of a study file."""
        seeds = protocol.verdict_seeds
        if not isinstance(seeds, SeedRange):
            first = protocol.replicate_of.first_seed if protocol.replicate_of else 1
            return cls(looks=(seeds,), compare=protocol.pairs, decide_on=None, give_up=0.0, first_seed=first)
        between = [each for each in LOOKS if seeds.fewest < each < seeds.most]
        return cls(
            looks=(seeds.fewest, *between, seeds.most),
            compare=protocol.pairs,
            decide_on=protocol.decide_on,
            give_up=protocol.give_up,
        )

    @property
    def most_seeds(self) -> int:
        """Seeds of the last look."""
        return self.looks[-1]

    @property
    def seeds(self) -> range:
        """All seeds that may be trained by."""
        return range(self.first_seed, self.first_seed + self.most_seeds)

    @property
    def is_in_steps(self) -> bool:
        """True if seeds are added until the verdict is decided."""
        return len(self.looks) > 1

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each look; they sum to 1."""
        *before, _ = self.looks
        if not before:
            return (1.0,)
        return (*((1 - LAST_WEIGHT) * each / sum(before) for each in before), LAST_WEIGHT)

    def chosen(self, pairs: Iterable[Pair], winner: str | None) -> list[Pair]:
        """The pairs that are compared, of all that may be; those that the plan names as it names them."""
        if isinstance(self.compare, str):
            return [pair for pair in pairs if self.compare == "all" or winner in pair]
        possible = {frozenset(pair) for pair in pairs}
        return [pair for pair in self.compare if frozenset(pair) in possible]


class SeedScore(NamedTuple):
    """The objective of a verdict trial on the test data; ``score`` is None of one that failed."""

    score: float | None
    units: UnitMeans | None = None


FAILED = SeedScore(None)

Scores = Mapping[tuple[str, int], SeedScore]
"""By family and seed, of the verdict trials that have ended."""


def chance_left(t: ArrayLike, num: float, num_last: float, critical: float) -> Values:
    """The predictive chance that a paired t-statistic of ``num`` seeds passes ``critical`` with ``num_last``.

    stdtr(num - 1, (|t| sqrt(num_last / num) - critical) / sqrt((num_last - num) / num))
    """
    reached = np.abs(t) * math.sqrt(num_last / num) - critical
    return np.asarray(stdtr(num - 1, reached / math.sqrt((num_last - num) / num)))


class _State(NamedTuple):
    """A pair after its last look: sequential p-values with the effect's sign at the look of each, and the samples."""

    sample: Sample
    others: Others
    place: int
    p_here: float = math.inf
    p_like: float = math.inf
    sign_here: float = 0.0
    sign_like: float = 0.0
    ended: Ending = "open"

    def with_look(self, sample: Sample, others: Others, place: int, weight: float) -> _State:
        """The state after another look."""
        here, like = sample.p_value / weight, others.p_value / weight
        new = self._replace(sample=sample, others=others, place=place)
        if here < self.p_here:
            new = new._replace(p_here=here, sign_here=sample.mean)
        if like < self.p_like:
            new = new._replace(p_like=like, sign_like=sample.mean)
        return new


class Looks:
    """The looks at a verdict, judged as far as their trials have ended.

    ``families`` are in the order in which their trials run. A pair without a common seed is never decided, and counts
    among the m all the same. ``resolution`` is the smallest difference that a score can show, ``overlap`` as of
    ``comparison.compare``.
    """

    def __init__(
        self,
        plan: Plan,
        families: Sequence[str],
        pairs: Sequence[Pair],
        resolution: float,
        *,
        overlap: float | None = None,
    ) -> None:
        self.plan = plan
        self.pairs = list(pairs)
        self._families = list(families)
        self._resolution = resolution
        self._overlap = overlap
        self._num_judged = 0
        self._states: dict[Pair, _State] = {}
        self._open: list[Pair] = list(pairs)
        self._decides_on = plan.decide_on
        self.asked: list[tuple[str, int]] = []
        """Family and seed of each trial of the looks that were judged."""
        self.notes: list[str] = []
        """A line on each look that was judged."""

    @property
    def is_over(self) -> bool:
        """True if no further seed is needed."""
        is_last = self._num_judged == len(self.plan.looks)
        return is_last or (self._num_judged > 0 and not self._open)

    @property
    def seeds(self) -> range:
        """Seeds that the next look adds; none where the verdict is over."""
        if self.is_over:
            return range(0)
        looks = (0, *self.plan.looks)
        return range(looks[self._num_judged] + 1, looks[self._num_judged + 1] + 1)

    @property
    def going_on(self) -> list[str]:
        """Families whose seeds of the next look are run: all before the first one, then those of open pairs."""
        if self.is_over:
            return []
        open_families = {family for pair in self._open for family in pair}
        return [each for each in self._families if not self._num_judged or each in open_families]

    @property
    def wanted(self) -> list[tuple[str, int]]:
        """Family and seed of each trial of the next look, in their order."""
        return [(family, seed) for family in self.going_on for seed in self.seeds]

    @property
    def at_most(self) -> list[tuple[str, int]]:
        """The same of all looks that may still come."""
        first, last = self.seeds.start, self.plan.most_seeds
        return [(family, seed) for family in self.going_on for seed in range(first, last + 1)]

    def take(self, scores: Scores) -> None:
        """Judge every look whose trials have all ended."""
        while not self.is_over and all(each in scores for each in self.wanted):
            self._judge(scores)

    def _judge(self, scores: Scores) -> None:
        self.asked += self.wanted
        place, weight = self._num_judged, self.plan.weights[self._num_judged]
        num_seeds = self.plan.looks[place]
        for pair in self._open:
            sample, others = self._samples(pair, scores, num_seeds)
            before = self._states.get(pair, _State(sample, others, place))
            self._states[pair] = before.with_look(sample, others, place, weight)
        if self._decides_on is None:
            self._decides_on = self._by_units()
        self._num_judged += 1
        was_open = self._open
        decided = {
            pair
            for pair, adjusted in zip(
                self.pairs, self._adjusted(self._decides_on or "these_classes"), strict=True
            )
            if adjusted <= ALPHA
        }
        for pair in was_open:
            ended: Ending = "decided" if pair in decided else self._why_given_up(pair, len(decided))
            self._states[pair] = self._states[pair]._replace(ended=ended)
        self._open = [pair for pair in was_open if self._states[pair].ended == "open"]
        self._note(num_seeds, was_open)

    def _by_units(self) -> Population | None:
        """The population decided on where the plan leaves it open: units like these, where there are enough of them.

        None until a pair has a seed in common: none can be decided before.
        """
        states = [state for state in self._states.values() if state.sample.num]
        if not states:
            return None
        has_units = self._overlap is not None or max(each.others.num_units for each in states) >= FEW_UNITS
        return "classes_like_these" if has_units else "these_classes"

    def _samples(self, pair: Pair, scores: Scores, num_seeds: int) -> tuple[Sample, Others]:
        """Paired differences of the first seeds, in all and by unit; a seed that failed for one is left out."""
        of_seeds = [
            tuple(scores.get((family, seed), FAILED) for family in pair) for seed in range(1, num_seeds + 1)
        ]
        common = [(a, b) for a, b in of_seeds if a.score is not None and b.score is not None]
        differences = [(a.score or 0.0) - (b.score or 0.0) for a, b in common]
        sample = Sample.of(differences, self._resolution)
        if self._overlap is not None:
            return sample, Others.of_shuffles(sample, self._overlap)
        return sample, Others.of([(a.units, b.units) for a, b in common], sample, self._resolution, NOT_KEPT)

    def _adjusted(self, population: Population) -> list[float]:
        """Holm's p-values over the sequential ones of all pairs."""
        is_here = population == "these_classes"
        states = [self._states[pair] for pair in self.pairs]
        return holm([min(1.0, each.p_here if is_here else each.p_like) for each in states])

    def _why_given_up(self, pair: Pair, num_decided: int) -> Ending:
        """The reason why an undecided pair gets no more seeds; "open" where it does."""
        if self._num_judged == len(self.plan.looks):
            return "limit"
        sample, sources = self._states[pair].sample, self._states[pair].others.sources
        if not self.plan.give_up or sample.stderr is None:
            return "open"
        half_level = ALPHA / (2 * (len(self.pairs) - num_decided))
        by_units = 0.0
        if self._decides_on == "classes_like_these" and sources is not None:
            by_units = sources.half_width_of_units(2 * half_level)
        if abs(sample.mean) + 2 * sample.stderr < by_units:
            return "classes"
        # Seeds that have failed are missing at the end too.
        num_last = sample.num + self.plan.most_seeds - self.plan.looks[self._num_judged - 1]
        critical = float(stdtrit(num_last - 1, 1 - half_level * self.plan.weights[-1]))
        chance = chance_left(sample.mean / sample.stderr, sample.num, num_last, critical)
        return "seeds" if chance < self.plan.give_up else "open"

    def _note(self, num_seeds: int, was_open: Sequence[Pair]) -> None:
        if not self.plan.is_in_steps:
            return
        ended = [self._states[pair].ended for pair in was_open]
        counts = {
            "decided": ended.count("decided"),
            "given up (seeds)": ended.count("seeds"),
            "given up (classes)": ended.count("classes"),
            "not decided with all seeds": ended.count("limit"),
        }
        told = ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "none decided"
        more = f"; {self.seeds.stop - 1} seeds next for {', '.join(self.going_on)}" if self._open else ""
        self.notes.append(f"look at {num_seeds} seeds: of {len(was_open)} open pairs {told}{more}")

    def comparisons(self, unit: Unit = "class", unknown: str = NOT_KEPT) -> list[Comparison]:
        """Each pair as its last look has left it; none before the first look, and of pairs without a common seed.

        ``unknown`` says why nothing is known of units like these, where their scores are not.
        """
        if not self._num_judged:
            return []
        found = []
        here, like = self._adjusted("these_classes"), self._adjusted("classes_like_these")
        is_here = self._decides_on == "these_classes"
        for pair, of_these, of_others in zip(self.pairs, here, like, strict=True):
            state = self._states[pair]
            if not state.sample.num:
                continue
            level = ALPHA * self.plan.weights[state.place] / len(self.pairs)
            known = state.others
            known = known._replace(unknown=unknown) if known.unknown == NOT_KEPT else known
            others = known.told(of_others, level, unit)
            if others.get("like_outcome") is not None:
                others |= {
                    "like_outcome": _outcome(of_others, state.sign_like),
                    "like_p_value": min(1.0, state.p_like),
                }
            # Perhaps only after its last look, by Holm.
            decided = (of_these if is_here else of_others) <= ALPHA
            # Better on units like these is better on these, though other seeds once said the opposite of these.
            sign_here = state.sign_like if of_others <= ALPHA else state.sign_here
            found.append(
                comparison(pair, state.sample, of_these, level).model_copy(
                    update={
                        "unit": unit,
                        **others,
                        "p_value": min(1.0, state.p_here),
                        "outcome": _outcome(of_these, sign_here),
                        "look": self.plan.looks[state.place],
                        "most_seeds": self.plan.most_seeds,
                        "ended": "decided" if decided else state.ended,
                    }
                )
            )
        return found


def _outcome(adjusted: float, sign: float) -> Outcome:
    if adjusted > ALPHA:
        return "not distinguishable"
    return "better" if sign > 0 else "worse"
