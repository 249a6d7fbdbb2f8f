"""Verdict trials: each family's best, and its embedder untrained, with every seed on the test classes.

They are numbered by look, untrained first, family and seed. No seed of a look begins before the look before is judged,
which needs the stored scores of all its trials. A fixed number of seeds is one look.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from dmlstudy.records import RetrievalConfig, TrialConfig, untrained_name
from dmlstudy.training.tasks import task_of, untrained_key
from dmlstudy.verdict.comparison import UNKNOWN_RESOLUTION, Pair
from dmlstudy.verdict.sequential import Looks, Plan, Scores, SeedScore

SHIPPED_SEED = 1
"""The verdict seed whose embedder is kept: the first, never the one that did best on the test classes."""


class JudgedBefore(NamedTuple):
    """The part of a verdict in steps that earlier sessions and the data tell."""

    scores: Scores = {}
    """Of the verdict trials that have ended, failed ones included."""
    resolution: float = UNKNOWN_RESOLUTION
    """The smallest difference that a mean over the test queries can show."""
    num_rows: int = 0
    """Of development and test, as ``Task.overlap`` takes it."""


class Competitors(NamedTuple):
    """The configurations that a verdict judges, and the pairs that it may compare."""

    untrained: dict[str, TrialConfig]
    best: dict[str, TrialConfig]
    own_untrained: dict[str, str]
    """Family to the row of its own embedder untrained."""

    @classmethod
    def of(cls, best: Mapping[str, TrialConfig]) -> Competitors:
        """Of the families' bests; those with the same embedder share an untrained one."""
        first_with: dict[Hashable, TrialConfig] = {}
        for config in best.values():
            first_with.setdefault(untrained_key(config), config)
        names = {
            key: untrained_name(config.family if len(first_with) > 1 else None)
            for key, config in first_with.items()
        }
        untrained = {
            names[key]: config.model_copy(
                update={
                    "family": names[key],
                    "training": config.training.model_copy(update={"epochs": 0}),
                    "retrieval": RetrievalConfig(),
                    "thresholds": {},
                    **task_of(config).changes_untrained,
                }
            )
            for key, config in first_with.items()
        }
        own = {family: names[untrained_key(config)] for family, config in best.items()}
        return cls(untrained, dict(best), own)

    @property
    def configs(self) -> dict[str, TrialConfig]:
        """By name, untrained first."""
        return self.untrained | self.best

    def pairs(self, order: Iterable[str]) -> list[Pair]:
        """All pairs of families in this order, and each family with its own embedder untrained."""
        families = list(order)
        among = [(a, b) for place, a in enumerate(families) for b in families[place + 1 :]]
        return among + [(family, self.own_untrained[family]) for family in families]


class VerdictTrials:
    """Hands out the verdict trials; ``judged`` are the (family, seed) pairs of those that have ended.

    ``before`` is needed where seeds are added in steps. A trial that failed in an earlier session runs again unless
    later looks have begun, which were judged without it.
    """

    def __init__(
        self, plan: Plan, judged: Iterable[tuple[str, int]], before: JudgedBefore | None = None
    ) -> None:
        self.plan = plan
        self._judged = set() if plan.is_in_steps else set(judged)
        self._before = before or JudgedBefore()
        self._scores = dict(self._before.scores)
        last = max((seed for _, seed in self._scores), default=0)
        num_in_look = next((each for each in plan.looks if last <= each), plan.most_seeds)
        begun = max((each for each in (0, *plan.looks) if each < num_in_look), default=0)
        for key, (score, _) in list(self._scores.items()):
            if score is None and key[1] > begun:
                del self._scores[key]
        self._looks: Looks | None = None
        self._queue: list[TrialConfig] | None = None
        self._queued_from = 0
        self._competitors: Competitors | None = None

    def competitors(self, best: Mapping[str, TrialConfig]) -> Competitors:
        """The configurations that are judged, of the families' ``best``, which stay once the search is over."""
        if self._competitors is None or self._competitors.best != dict(best):
            self._competitors = Competitors.of(best)
            self._looks = None
        return self._competitors

    def left(self, best: Mapping[str, TrialConfig], order: Iterable[str] = ()) -> list[TrialConfig]:
        """Verdict trials of the present look that have not ended, in their order.

        ``order`` are the families, the winner first.
        """
        configs = self.competitors(best).configs
        if not best:
            return []
        if not self.plan.is_in_steps:
            wanted = [(family, seed) for family in configs for seed in self.plan.seeds]
            return [
                verdict_trial(configs[family], seed)
                for family, seed in wanted
                if (family, seed) not in self._judged
            ]
        looks = self._looks_at(best, order)
        return [
            verdict_trial(configs[family], seed)
            for family, seed in looks.wanted
            if (family, seed) not in self._scores
        ]

    def left_at_most(self, best: Mapping[str, TrialConfig], order: Iterable[str] = ()) -> list[str]:
        """The family of each verdict trial that may still have to run."""
        if not best or not self.plan.is_in_steps:
            return [config.family for config in self.left(best)]
        looks = self._looks_at(best, order)
        return [family for family, seed in looks.at_most if (family, seed) not in self._scores]

    def _looks_at(self, best: Mapping[str, TrialConfig], order: Iterable[str]) -> Looks:
        found = self.competitors(best)
        if self._looks is None:
            families = list(order)
            pairs = self.plan.chosen(found.pairs(families), families[0])
            config = next(iter(found.configs.values()))
            task = task_of(config)
            overlap = task.overlap(task.logged_params(config), self._before.num_rows)
            self._looks = Looks(
                self.plan, list(found.configs), pairs, self._before.resolution, overlap=overlap
            )
        self._looks.take(self._scores)
        return self._looks

    def next(self, best: Mapping[str, TrialConfig], order: Iterable[str] = ()) -> TrialConfig | None:
        """The next one to run in this session; None where all of the present look were handed out."""
        if best and self.plan.is_in_steps:
            first = self._looks_at(best, order).seeds.start
            if first != self._queued_from:
                self._queue, self._queued_from = None, first
        if self._queue is None:
            self._queue = self.left(best, order)
        return self._queue.pop(0) if self._queue else None

    def put_back(self, config: TrialConfig) -> None:
        """Let one that was handed out, or has ended, be the next one again."""
        assert self._queue is not None
        self._judged.discard((config.family, config.seed))
        self._queue.insert(0, config)

    def end(self, config: TrialConfig) -> None:
        """Take into account that one has ended."""
        self._judged.add((config.family, config.seed))

    def keep(self, config: TrialConfig, score: SeedScore) -> None:
        """Take in the score of one whose record is complete."""
        self._scores[config.family, config.seed] = score

    @property
    def ended(self) -> list[str]:
        """The family of each trial whose score is known."""
        return [family for family, _ in self._scores]

    @property
    def is_waiting(self) -> bool:
        """True if a trial has ended whose record is not complete, so that more may follow."""
        return self.plan.is_in_steps and any(key not in self._scores for key in self._judged)

    def take_notes(self) -> list[str]:
        """A line on each look that was judged since the last call."""
        if self._looks is None:
            return []
        notes, self._looks.notes = self._looks.notes, []
        return notes


def verdict_trial(config: TrialConfig, seed: int) -> TrialConfig:
    """The verdict trial of a configuration with this seed."""
    return config.model_copy(update={"phase": "verdict", "seed": seed, "keep_embedder": seed == SHIPPED_SEED})
