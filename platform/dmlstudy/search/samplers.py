"""Optuna's samplers by name, which choose the next point; each is a function of ended trials and a seed.

Every trial gets a new sampler with its own seed. It sees the trials that it is given: ended ones, and
the points of running ones. State between trials (of CMA-ES, of NSGA-II) lies in their system attributes, so in the
storage. So neither an interruption nor the order in which a generation finishes changes anything.

Spaces with parameters under choices: ``tpe`` models the groups of parameters that occur together (multivariate,
grouped). ``gp``, ``cma`` and ``nsga2`` model the parameters that every trial has; ``qmc`` those of the default
point; ``cma`` no categories at all. What they do not model they draw at random, independently of the results.

Trials stopped early: ``tpe`` ranks them below the others by a rule of its own. ``gp`` and ``cma`` take them as if
they had run to their end (see ``as_finished``). ``nsga2`` never meets any; the others do not look at scores.
"""

from __future__ import annotations

import bisect
import copy
import importlib.util
import math
import statistics
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseSampler,
    CmaEsSampler,
    GPSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from dmlstudy.packed import Row, SortedRows
from dmlstudy.records import Scalar
from dmlstudy.search import hub
from dmlstudy.search.fold_test import FEWEST_TRIALS, fold_scores, noise_variance
from dmlstudy.search.waiting import WaitingTrial, WaitingTrials
from dmlstudy.spec.space import Suggester
from dmlstudy.spec.study_file import HUB, SearchConfig, SpecError

T = TypeVar("T")

FAMILY = "family"
"""The parameter that names the family where the sampler chooses it."""

MOST_NOISE = 0.9
"""Of the variance of all scores, 1, the largest part that the Gaussian process is told to be noise."""

MOST_ENUMERATED = 1000
"""A space with more points than these counts as endless."""


def check_installed(search: SearchConfig) -> None:
    """Raises SpecError where the sampler needs a package that is not there."""
    if search.sampler.startswith(HUB):
        hub.made(search, search.seed)
    if search.sampler == "cma" and importlib.util.find_spec("cmaes") is None:
        raise SpecError("search.sampler: cma needs the package cmaes; pip install cmaes")


def sampler_for(
    search: SearchConfig,
    number: int,
    turn: int,
    modelled: Mapping[str, BaseDistribution],
    attempt: int = 0,
    noise: float = 0.0,
) -> BaseSampler:
    """The study's sampler for one trial.

    ``number`` is the trial's, ``turn`` its place among the trials of its space, ``attempt`` counts how often
    it was drawn before and found to have been tried.

    ``modelled`` are the parameters that a sampler models which cannot do with missing ones. ``noise``, for the Gaussian
    process, is the least variance of a score's noise where that of all scores is 1.
    """
    seed = seed_of(search.seed, number, *([attempt] if attempt else []))
    startup = min(10, max(2, search.trials_per_family // 3))
    if search.sampler == "random":
        return RandomSampler(seed=seed)
    if search.sampler.startswith(HUB):
        return hub.made(search, seed)
    if search.sampler == "tpe":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # of the groups
            return TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=startup)
    sampler: BaseSampler
    if search.sampler == "gp":
        sampler = _NoisyGP(noise, seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
    elif search.sampler == "cma":
        sampler = CmaEsSampler(seed=seed, n_startup_trials=0, warn_independent_sampling=False)
        modelled = {k: d for k, d in modelled.items() if not isinstance(d, CategoricalDistribution)}
    elif search.sampler == "qmc":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            sampler = _Sequence(search.seed, turn + attempt, RandomSampler(seed=seed))
    else:
        sampler = NSGAIISampler(seed=seed, population_size=min(50, max(4, search.trials_per_family // 4)))
    # Optuna would take what the trials so far have in common, which changes as trials end.
    sampler.infer_relative_search_space = lambda study, trial: dict(modelled)  # type: ignore[method-assign]
    return sampler


def directions_of(search: SearchConfig) -> list[StudyDirection]:
    """Each objective's direction: the metric is maximised, a second objective minimised."""
    return [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE][: 2 if search.second_objective else 1]


class EndedTrials:
    """The ended trials of a space that a sampler looks back on, so that a draw costs the same after ten thousand.

    They are the newest, the best by each objective, ``MOST`` of each kind, and the front of several objectives.
    Among them are the trials that samplers use: the 25 that TPE counts as good, the newest generations of
    CMA-ES, the elite of NSGA-II. The order in which trials have ended does not matter.

    Paused trials count as stopped where they wait. For their sake no ended one is forgotten, for they may go on and
    fail.
    """

    MOST = 250

    def __init__(self, directions: Sequence[StudyDirection]) -> None:
        self._signs = [1.0 if direction == StudyDirection.MAXIMIZE else -1.0 for direction in directions]
        self._orders: list[Callable[[FrozenTrial], Any]] = [lambda trial: trial.number]
        self._orders += [partial(self._standing, objective=at) for at in range(len(directions))]
        self._ended: list[list[FrozenTrial]] = [[] for _ in self._orders]
        """By each order the last ``MOST``."""
        self.waiting = WaitingTrials()
        """Those that wait, and that went on from a rung and have not ended, by turn."""
        self._unpacked: dict[int, FrozenTrial] = {}
        self._waiting_by_number = SortedRows(width=2)
        """(number, turn)."""
        self._waiting_by_standing = SortedRows(width=4)
        """The same by each objective: (step, score, minus the number, turn)."""
        self._front: list[FrozenTrial] = []

    def add(self, trial: FrozenTrial) -> None:
        """Remember a completed or pruned trial; others that it makes less worth remembering are forgotten."""
        for ended, order in zip(self._ended, self._orders, strict=True):
            bisect.insort(ended, trial, key=order)
            del ended[: max(0, len(ended) - self.MOST)]
        if len(self._signs) > 1 and not any(self._dominates(other, trial) for other in self._front):
            self._front = [other for other in self._front if not self._dominates(trial, other)] + [trial]

    def pause(self, turn: int, waiting: WaitingTrial) -> None:
        """Remember a trial that waits, as one stopped there; in the place of itself at an earlier rung."""
        self.forget(turn)
        self.waiting[turn] = waiting
        self._waiting_by_number.add((waiting.number, turn))
        self._waiting_by_standing.add(self._row(turn, waiting))

    def forget(self, turn: int) -> int | None:
        """Forget a trial that has waited; its number, or None where none has."""
        if turn not in self.waiting:
            return None
        waiting = self.waiting[turn]
        self._waiting_by_number.discard((waiting.number, turn))
        self._waiting_by_standing.discard(self._row(turn, waiting))
        del self.waiting[turn]
        self._unpacked.pop(turn, None)
        return waiting.number

    def trials(self) -> list[FrozenTrial]:
        """All of them, by number."""
        kept = {trial.number: trial for trial in self._front}
        newest, best = map(self._last, (self._waiting_by_number, self._waiting_by_standing))
        self._unpacked = {
            turn: self._unpacked.get(turn) or self.waiting[turn].stopped() for turn in {*newest, *best}
        }
        for ended, order, turns in zip(
            self._ended, self._orders, [newest] + [best] * len(self._signs), strict=True
        ):
            stopped = [self._unpacked[turn] for turn in turns]
            last = sorted(ended + stopped, key=order)[-self.MOST :] if stopped else ended
            kept |= {trial.number: trial for trial in last}
        return [kept[number] for number in sorted(kept)]

    def _last(self, waiting: SortedRows) -> list[int]:
        """The turns of the last ``MOST``."""
        return [int(waiting[at][-1]) for at in range(max(0, len(waiting) - self.MOST), len(waiting))]

    def _row(self, turn: int, waiting: WaitingTrial) -> Row:
        _, *standing = self._standing(waiting.stopped(), objective=0)
        return (*standing, turn)

    def _standing(self, trial: FrozenTrial, objective: int) -> tuple[bool, float, float, int]:
        """Completed trials by their value, below them pruned ones by how far they came, then by their score."""
        if trial.state == TrialState.COMPLETE:
            return True, 0.0, self._signs[objective] * trial.values[objective], -trial.number
        step = -1 if trial.last_step is None else trial.last_step
        score = trial.intermediate_values.get(step, math.nan)
        return False, step, score if math.isfinite(score) else -math.inf, -trial.number

    def _dominates(self, one: FrozenTrial, other: FrozenTrial) -> bool:
        each = [self._standing(one, at)[:3] for at in range(len(self._signs))]
        others = [self._standing(other, at)[:3] for at in range(len(self._signs))]
        return each != others and all(a >= b for a, b in zip(each, others, strict=True))


def seen_by(
    sampler: str, ended: Sequence[FrozenTrial], running: Iterable[FrozenTrial]
) -> Sequence[FrozenTrial]:
    """The trials as a sampler looks at them: completed and pruned ones by number, and what runs."""
    if sampler == "tpe":
        return [*ended, *running]
    if sampler == "gp":
        return [*as_finished(ended), *running]
    return as_finished(ended) if sampler == "cma" else ended


def as_finished(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials with the pruned ones as completed, at what they might have scored in the end.

    That is the last score plus what the completed trials have gained from that step on, in their mean, and not
    more than the best of them has: so an early score is compared with late ones at the same step. Pruned trials
    without either are left out.
    """
    completed = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    best = max((trial.values[0] for trial in completed), default=math.nan)
    gains: dict[int, float] = {}
    found: list[FrozenTrial] = []
    for trial in trials:
        step = trial.last_step
        if trial.state == TrialState.COMPLETE:
            found.append(trial)
        elif step is not None and math.isfinite(trial.intermediate_values[step]):
            if step not in gains:
                each = [t.values[0] - t.intermediate_values.get(step, math.nan) for t in completed]
                each = [gain for gain in each if math.isfinite(gain)]
                gains[step] = statistics.fmean(each) if each else math.nan
            if math.isfinite(gains[step]):
                finished = copy.copy(trial)
                finished.state = TrialState.COMPLETE
                finished.values = [min(best, trial.intermediate_values[step] + gains[step])]
                found.append(finished)
    return found


def seed_of(*numbers: int) -> int:
    """A seed that depends on these numbers only."""
    return int(np.random.SeedSequence(list(numbers)).generate_state(1)[0])


def fold_noise(trials: Sequence[FrozenTrial], num_folds: int) -> float:
    """The variance of a score's noise, by the folds of the completed trials, as a share of that of all scores.

    A score is the mean over F folds, so its noise has the variance v / F (``fold_test.noise_variance``). It is 0 where
    fewer than ``FEWEST_TRIALS`` tell, or all scores are equal, and at most ``MOST_NOISE``.
    """
    completed = [
        trial for trial in trials if trial.state == TrialState.COMPLETE and trial.intermediate_values
    ]
    of_each = [
        fold_scores(t.intermediate_values, (t.last_step or 0) // num_folds, num_folds) for t in completed
    ]
    whole = [scores_F for scores_F in of_each if len(scores_F) == num_folds and np.isfinite(scores_F).all()]
    variance = float(np.var([trial.values[0] for trial in completed])) if completed else 0.0
    if num_folds == 1 or len(whole) < FEWEST_TRIALS or not variance > 0:
        return 0.0
    return min(MOST_NOISE, noise_variance(np.stack(whole)) / num_folds / variance)


class _NoisyGP(GPSampler):
    """A Gaussian process that takes no score to be more certain than its folds say."""

    def __init__(self, noise: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._minimum_noise = max(self._minimum_noise, noise)


class _Sequence(QMCSampler):
    """The point with a given index in a scrambled Sobol sequence, which all trials of a space share."""

    def __init__(self, seed: int, index: int, independent: BaseSampler) -> None:
        super().__init__(
            scramble=True, seed=seed, independent_sampler=independent, warn_independent_sampling=False
        )
        self._index = index

    def _find_sample_id(self, study: optuna.Study, search_space: dict[str, BaseDistribution]) -> int:
        return self._index


class SharedTrials(InMemoryStorage):
    """Trials that a sampler may look at, shared and not copied, beside the one it draws."""

    def __init__(self, trials: Sequence[FrozenTrial]) -> None:
        super().__init__()
        self._trials = trials

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        seen = [trial for trial in self._trials if states is None or trial.state in states]
        own: list[FrozenTrial] = super().get_all_trials(study_id, deepcopy, states)
        return seen + own


def draw(
    sampler: BaseSampler,
    directions: Sequence[StudyDirection],
    trials: Sequence[FrozenTrial],
    number: int,
    sample: Callable[[Suggester], object],
) -> FrozenTrial:
    """The sampler's answers to ``sample`` (a function of an Optuna trial), given these trials."""
    storage = SharedTrials(trials)
    study = optuna.create_study(storage=storage, sampler=sampler, directions=list(directions))
    trial_id = storage.create_new_trial(study._study_id)
    storage.get_trial(trial_id).number = number
    sample(optuna.trial.Trial(study, trial_id))
    return storage.get_trial(trial_id)


class OutsideSpaceError(ValueError):
    """A point that lacks a parameter of the space, has one outside its domain or one too many."""


class Point:
    """A suggester that answers with a given point and keeps the requested distributions."""

    def __init__(self, values: Mapping[str, Scalar]) -> None:
        self.values = values
        self.distributions: dict[str, BaseDistribution] = {}

    @classmethod
    def read(cls, values: Mapping[str, Scalar], sample: Callable[[Suggester], T]) -> tuple[T, Point]:
        """(what ``sample`` makes of the point, the point); raises OutsideSpaceError."""
        point = cls(values)
        drawn = sample(point)
        if point.distributions.keys() != values.keys():
            raise OutsideSpaceError(f"not in the space: {sorted(values.keys() - point.distributions.keys())}")
        return drawn, point

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        return float(self._answer(name, FloatDistribution(low, high, log=log)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return int(self._answer(name, IntDistribution(low, high, log=log, step=step)))

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self._answer(name, CategoricalDistribution(choices))

    def _answer(self, name: str, distribution: BaseDistribution) -> Any:
        if name not in self.values:
            raise OutsideSpaceError(f"{name} is missing")
        value = self.values[name]
        try:
            inside = distribution._contains(distribution.to_internal_repr(value))
        except ValueError:
            inside = False
        if not inside:
            raise OutsideSpaceError(f"{name}={value!r} is outside {distribution}")
        self.distributions[name] = distribution
        return value


class Given:
    """A suggester that answers with given values, and lets another draw the rest.

    ``taken`` are the given values that were asked for.
    """

    def __init__(self, values: Mapping[str, Scalar], rest: Suggester) -> None:
        self._values = values
        self._rest = rest
        self.taken: dict[str, Scalar] = {}

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        if name in self._values:
            return float(self._take(name))
        return self._rest.suggest_float(name, low, high, log=log)

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        if name in self._values:
            return int(self._take(name))
        return self._rest.suggest_int(name, low, high, step=step, log=log)

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        if name in self._values:
            return self._take(name)
        return self._rest.suggest_categorical(name, choices)

    def _take(self, name: str) -> Scalar:
        self.taken[name] = self._values[name]
        return self._values[name]


def all_points(
    sample: Callable[[Suggester], object], most: int = MOST_ENUMERATED
) -> list[dict[str, Scalar]] | None:
    """Every point that ``sample`` can be given; None where there are more than ``most``."""
    points: list[dict[str, Scalar]] = []
    path: list[int] = []
    while len(points) < most:
        walk = _Walk(path)
        try:
            sample(walk)
        except _EndlessError:
            return None
        points.append(walk.point)
        path = walk.path
        while path and path[-1] + 1 == walk.widths[len(path) - 1]:
            path.pop()
        if not path:
            return points
        path[-1] += 1
    return None


class _EndlessError(Exception):
    """A real interval was met."""


class _Walk:
    """A suggester that answers with the options at these places, and the first one beyond them."""

    def __init__(self, path: Sequence[int]) -> None:
        self.path = list(path)
        self.widths: list[int] = []
        self.point: dict[str, Scalar] = {}

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        if low < high:
            raise _EndlessError
        return float(self._answer(name, [low]))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return int(self._answer(name, range(low, high + 1, step)))

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self._answer(name, choices)

    def _answer(self, name: str, options: Sequence[Any]) -> Any:
        if len(self.widths) == len(self.path):
            self.path.append(0)
        self.point[name] = options[self.path[len(self.widths)]]
        self.widths.append(len(options))
        return self.point[name]
