"""What shares a budget and a sampler: the trials of one family, or those of all where the sampler chooses it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.samplers import RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from dmlstudy.records import Scalar, TrialConfig
from dmlstudy.studies import samplers
from dmlstudy.studies.samplers import FAMILY, Point
from dmlstudy.studies.space import Suggester
from dmlstudy.studies.spec import Family, SearchConfig, StudySpec

REDRAWS = 10
"""How often the sampler is asked again after it drew what had been tried; then chance is, ten times as often."""

ALL = "all"


def lanes_of(spec: StudySpec) -> list[Lane]:
    """One lane for each family, or one for all of them."""
    search = spec.file.search
    if search.families == "equal":
        return [
            Lane(family.name, [family], spec, search.trials_per_family, search.generation_size)
            for family in spec.families.values()
        ]
    width = search.generation_size * len(spec.families)
    return [Lane(ALL, list(spec.families.values()), spec, spec.num_search_trials, width)]


class Lane:
    """Trials with one budget, of which ``width`` are asked for in a generation.

    ``queue`` are the points it begins with: each family's default, then those of earlier studies.
    """

    def __init__(
        self, name: str, families: Sequence[Family], spec: StudySpec, budget: int, width: int
    ) -> None:
        self.name = name
        self.budget = budget
        self.width = width
        self.num_asked = 0
        self.num_of_generation: dict[int, int] = {}
        self.is_exhausted = False
        self.settled: list[FrozenTrial] = []
        """Completed and pruned trials of earlier generations, by number."""
        self.running: list[FrozenTrial] = []
        """What was asked for since, as the sampler may know it: without scores."""
        self._families = {family.name: family for family in families}
        self._chooses = len(families) > 1 or spec.file.search.families == "adaptive"
        self._spec = spec
        self._tried: set[str] = set()
        self._left: dict[str, dict[str, Scalar]] | None = None
        self._is_counted = False
        self.queue: list[tuple[dict[str, Scalar], dict[str, str]]] = [
            (self._point(family.name, family.default_point()), {}) for family in families
        ]

    def add_to_queue(self, found: Mapping[str, Sequence[tuple[str, dict[str, Any]]]], most: int) -> None:
        """Begin with up to ``most`` points of each family besides, those that lie in its space and are new."""
        seen = {self.config_of(point).fingerprint() for point, _ in self.queue}
        chosen: list[list[tuple[dict[str, Scalar], dict[str, str]]]] = []
        for name in self._families:
            own: list[tuple[dict[str, Scalar], dict[str, str]]] = []
            for source, point in found.get(name, []):
                if len(own) == most:
                    break
                try:
                    config = self.config_of(self._point(name, point))
                except ValueError:
                    continue
                if config.fingerprint() not in seen:
                    seen.add(config.fingerprint())
                    own.append((self._point(name, point), {"warm_start": source}))
            chosen.append(own)
        in_turn = itertools.zip_longest(*chosen)
        self.queue += [item for items in in_turn for item in items if item is not None]

    def sample(self, trial: Suggester) -> tuple[Family, dict[str, Scalar | None]]:
        """The family of a trial and its values, drawn from it."""
        name = next(iter(self._families))
        if self._chooses:
            name = trial.suggest_categorical(FAMILY, list(self._families))
        family = self._families[name]
        return family, family.sample(trial)

    def config_of(self, point: Mapping[str, Any]) -> TrialConfig:
        """The configuration at a point; raises OutsideSpaceError."""
        return self._spec.trial_config(*self.read(point))

    def read(self, point: Mapping[str, Any]) -> tuple[Family, dict[str, Scalar | None]]:
        """The family at a point and its values by full names; raises OutsideSpaceError."""
        drawn, _ = Point.read(point, self.sample)
        return drawn

    def num_missing(self, generation: int) -> int:
        """How many trials of a generation are still to be asked for."""
        if self.is_exhausted:
            return 0
        own = self.num_of_generation.get(generation, 0)
        return min(self.width - own, self.budget - self.num_asked)

    def next_trial(
        self, number: int, generation: int, directions: Sequence[StudyDirection]
    ) -> tuple[FrozenTrial, TrialConfig] | None:
        """The next trial, as it is to be stored, and its configuration; None where nothing new is left."""
        attrs: dict[str, Any] = {}
        system_attrs: dict[str, Any] = {}
        if self.num_asked < len(self.queue):
            point, source = self.queue[self.num_asked]
            attrs |= source
        else:
            found = self._new_point(number, directions)
            if found is None:
                return None
            point, system_attrs = found
        (family, values), read = Point.read(point, self.sample)
        config = self._spec.trial_config(family, values)
        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict(point),
            distributions=read.distributions,
            user_attrs={"family": family.name, "generation": generation, **attrs},
            system_attrs=system_attrs,
        )
        return trial, config

    def note(self, trial: FrozenTrial, config: TrialConfig, generation: int) -> int:
        """Take a trial into account that was asked for, now or in an earlier sitting; returns its turn."""
        self._tried.add(config.fingerprint())
        self.num_of_generation[generation] = self.num_of_generation.get(generation, 0) + 1
        self.num_asked += 1
        unscored = create_trial(
            state=TrialState.RUNNING, params=dict(trial.params), distributions=dict(trial.distributions)
        )
        unscored.number = trial.number
        self.running.append(unscored)
        return self.num_asked - 1

    def _new_point(
        self, number: int, directions: Sequence[StudyDirection]
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        search: SearchConfig = self._spec.file.search
        untried = self._untried()
        if untried is not None and not untried:
            return None
        seen = self.settled
        if search.sampler in ("tpe", "gp"):  # the others do not look at what runs
            seen = self.settled + self.running
        for attempt in range(REDRAWS):
            sampler = samplers.sampler_for(search, number, self.num_asked, attempt)
            drawn = samplers.draw(sampler, directions, seen, number, self.sample)
            if not self._is_tried(drawn.params):
                return drawn.params, drawn.system_attrs
        chance = RandomSampler(seed=samplers.seed_of(search.seed, number, REDRAWS))
        for _ in range(10 * REDRAWS):
            drawn = samplers.draw(chance, directions, [], number, self.sample)
            if not self._is_tried(drawn.params):
                return drawn.params, {}
        return (untried[samplers.seed_of(search.seed, number) % len(untried)], {}) if untried else None

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
        return {FAMILY: family, **point} if self._chooses else dict(point)
