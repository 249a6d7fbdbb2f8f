"""Trials that share a budget and a sampler: one family's, or all families' if the sampler chooses among them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from dmlstudy.records import Scalar, TrialConfig
from dmlstudy.search import samplers
from dmlstudy.search.samplers import FAMILY, Point
from dmlstudy.spec.space import Suggester
from dmlstudy.spec.study_file import Family, StudySpec

REDRAWS = 10
"""Further draws after the sampler drew a point that was tried; then ten times as many are drawn at random."""

ALL = "all"


def subsearches_of(spec: StudySpec) -> list[Subsearch]:
    """One subsearch for each family, or one for all of them."""
    search = spec.file.search
    if search.families == "equal":
        return [
            Subsearch(family.name, [family], spec, search.trials_per_family, search.generation_size)
            for family in spec.families.values()
        ]
    width = search.generation_size * len(spec.families)
    return [Subsearch(ALL, list(spec.families.values()), spec, spec.num_search_trials, width)]


class Subsearch:
    """Trials with one budget, of which ``width`` are requested in a generation.

    ``queue`` are the points it begins with: each family's default, then those of earlier studies.
    """

    def __init__(
        self, name: str, families: Sequence[Family], spec: StudySpec, budget: int, width: int
    ) -> None:
        self.name = name
        self.budget = budget
        self.width = width
        self.chooses_family = spec.file.search.families == "adaptive"
        self.families = {family.name: family for family in families}
        self.num_asked = 0
        self.num_of_generation: dict[int, int] = {}
        self.is_exhausted = False
        self._spec = spec
        self._directions = samplers.directions_of(spec.file.search)
        self._ended = samplers.EndedTrials(self._directions)
        self._running: dict[int, FrozenTrial] = {}
        self._tried: set[str] = set()
        self._left: dict[str, dict[str, Scalar]] | None = None
        self._is_counted = False
        self.queue: deque[tuple[dict[str, Scalar], dict[str, str]]] = deque(
            (self._point(family.name, family.default_point()), {}) for family in families
        )

    def add_to_queue(self, found: Mapping[str, Sequence[tuple[str, dict[str, Any]]]], most: int) -> list[str]:
        """Queue up to ``most`` further points of each family that fit its space and are new.

        A point need not have the names of the present space (see ``completed``). Returns a line for people for each
        family.
        """
        seen = {self.config_of(point).fingerprint() for point, _ in self.queue}
        chosen: list[list[tuple[dict[str, Scalar], dict[str, str]]]] = []
        lines: list[str] = []
        for name in self.families:
            own: list[tuple[dict[str, Scalar], dict[str, str]]] = []
            num_changed = num_outside = 0
            for source, given in found.get(name, []):
                if len(own) == most:
                    break
                try:
                    point = self.completed(name, given)
                    config = self.config_of(point)
                except ValueError:
                    num_outside += 1
                    continue
                if config.fingerprint() not in seen:
                    seen.add(config.fingerprint())
                    own.append((point, {"warm_start": source}))
                    num_changed += point.keys() - {FAMILY} != given.keys()
            chosen.append(own)
            lines.append(
                f"{name}: {len(own)} configurations of earlier studies come right after the default"
                + f", {num_changed} of them fitted to the space of now" * (num_changed > 0)
                + f"; {num_outside} lie outside it and are left out" * (num_outside > 0)
            )
        in_turn = itertools.zip_longest(*chosen)
        self.queue += [item for items in in_turn for item in items if item is not None]
        return lines

    def completed(self, family: str, given: Mapping[str, Any]) -> dict[str, Scalar]:
        """The point with these values, and defaults for names that are missing; names that are not drawn go.

        Raises OutsideSpaceError where a value is outside its domain.
        """
        answers = {**self._defaults, **self._point(family, given)}
        point = Point(answers)
        self.sample(point)
        return {name: answers[name] for name in point.distributions}

    @cached_property
    def _defaults(self) -> dict[str, Scalar]:
        """A default for each name that can be drawn: among corners the one that introduces a name comes first."""
        found: dict[str, Scalar] = {}
        for family in self.families.values():
            for corner in family.corners():
                found = corner | found
        return found

    @cached_property
    def _modelled(self) -> dict[str, BaseDistribution]:
        """The parameters that every trial has or, for a sequence without a model, those of the default point."""
        (family,) = self.families.values()
        corners = family.corners()
        first, *others = [
            self._distributions(corner)
            for corner in (corners[:1] if self._spec.file.search.sampler == "qmc" else corners)
        ]
        return {
            name: first[name]
            for name in sorted(first)
            if not first[name].single() and all(name in other for other in others)
        }

    def _distributions(self, answers: Mapping[str, Scalar]) -> dict[str, BaseDistribution]:
        point = Point(answers)
        self.sample(point)
        return point.distributions

    def sample(self, trial: Suggester) -> tuple[Family, dict[str, Scalar | None]]:
        """The family of a trial and its values, drawn from it."""
        name = next(iter(self.families))
        if self.chooses_family:
            name = trial.suggest_categorical(FAMILY, list(self.families))
        family = self.families[name]
        return family, family.sample(trial)

    def config_of(self, point: Mapping[str, Any]) -> TrialConfig:
        """The configuration at a point; raises OutsideSpaceError."""
        drawn, _ = Point.read(point, self.sample)
        return self._spec.trial_config(*drawn)

    def num_missing(self, generation: int) -> int:
        """Number of a generation's trials still to be requested."""
        return max(0, min(self.width - self.num_of_generation.get(generation, 0), self.num_left))

    @property
    def num_left(self) -> int:
        """Number of trials still to be requested."""
        return 0 if self.is_exhausted else max(0, self.budget - self.num_asked)

    def next_trial(self, number: int, generation: int) -> FrozenTrial | None:
        """The next trial, ready to be stored; None if no new point is left."""
        found = self._next_point(number)
        if found is None:
            return None
        point, system_attrs, source = found
        (family, _), read = Point.read(point, self.sample)
        return create_trial(
            state=TrialState.RUNNING,
            params=point,
            distributions=read.distributions,
            user_attrs={FAMILY: family.name, "generation": generation, **source},
            system_attrs=system_attrs,
        )

    def note(self, trial: FrozenTrial, config: TrialConfig, generation: int) -> int:
        """Take into account a trial that was requested now or in an earlier session; returns its turn."""
        self._tried.add(config.fingerprint())
        self.num_of_generation[generation] = self.num_of_generation.get(generation, 0) + 1
        self.num_asked += 1
        unscored = create_trial(
            state=TrialState.RUNNING, params=dict(trial.params), distributions=dict(trial.distributions)
        )
        unscored.number = trial.number
        self._running[trial.number] = unscored
        return self.num_asked - 1

    def settle(self, trial: FrozenTrial) -> None:
        """Let the sampler see how a trial has ended; until then it sees that it runs."""
        del self._running[trial.number]
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
            self._ended.add(trial)

    def _next_point(self, number: int) -> tuple[dict[str, Scalar], dict[str, Any], dict[str, str]] | None:
        """A point, what the sampler keeps with it, and where it comes from."""
        while self.queue and self._is_tried(self.queue[0][0]):
            self.queue.popleft()
        untried = self._untried()
        if untried is not None and not untried:
            return None
        search = self._spec.file.search
        modelled = {} if self.chooses_family else self._modelled
        seen = samplers.seen_by(search.sampler, self._ended.trials(), self._running.values())
        for attempt in range(REDRAWS):
            sampler = samplers.sampler_for(search, number, self.num_asked, modelled, attempt)
            drawn = samplers.draw(sampler, self._directions, seen, number, self.sample)
            if attempt == 0:  # a point that was not drawn counts in its place, as Optuna's enqueued trials do
                memory = {k: v for k, v in drawn.system_attrs.items() if "relative_params" not in k}
                if self.queue:
                    point, source = self.queue[0]
                    return point, memory, source
            if not self._is_tried(drawn.params):
                return drawn.params, drawn.system_attrs, {}
        chance = RandomSampler(seed=samplers.seed_of(search.seed, number, REDRAWS))
        for _ in range(10 * REDRAWS):
            drawn = samplers.draw(chance, self._directions, [], number, self.sample)
            if not self._is_tried(drawn.params):
                return drawn.params, memory, {}
        if not untried:
            return None
        return untried[samplers.seed_of(search.seed, number) % len(untried)], memory, {}

    def _untried(self) -> list[dict[str, Scalar]] | None:
        """The points with a configuration that was not tried; None where they are endless."""
        if not self._is_counted:
            self._is_counted = True
            points = samplers.all_points(self.sample)
            if points is not None:
                self._left = {self.config_of(point).fingerprint(): point for point in reversed(points)}
        if self._left is None:
            return None
        return [point for fingerprint, point in self._left.items() if fingerprint not in self._tried]

    def _is_tried(self, point: Mapping[str, Any]) -> bool:
        return self.config_of(point).fingerprint() in self._tried

    def _point(self, family: str, point: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return {**point, FAMILY: family} if self.chooses_family else dict(point)
