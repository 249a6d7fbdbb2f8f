"""Trials that share a budget and a sampler: one family's, or all families' if the sampler chooses among them."""

from __future__ import annotations

import copy
import itertools
import math
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from dmlstudy.packed import Row, SortedRows
from dmlstudy.records import Scalar, TrialConfig
from dmlstudy.search import family_choice, samplers
from dmlstudy.search.samplers import FAMILY, Given, Point
from dmlstudy.search.waiting import WaitingTrial, WaitingTrials
from dmlstudy.search.warm_start import WARM_START, Candidate, PointRanks, WeighedPoints
from dmlstudy.spec.likeness import Likeness
from dmlstudy.spec.space import Suggester
from dmlstudy.spec.study_file import Family, StudySpec

REDRAWS = 10
"""Further draws after the sampler drew a point that was tried; then ten times as many are drawn at random."""

ALL = "all"

NOTHING: Mapping[str, Scalar] = {}

LIKE = "like"
"""The user attribute of a trial that takes another's values: the other's number."""


def subsearches_of(spec: StudySpec) -> list[Subsearch]:
    """One subsearch for each family, or one for all of them."""
    search = spec.file.search
    if search.families == "equal":
        found: dict[str, Subsearch] = {
            name: Subsearch(name, [family], spec, search.trials_per_family, search.generation_size)
            for name, family in spec.families.items()
            if name not in spec.likenesses
        }
        for name, likeness in spec.likenesses.items():  # each after the one it is like
            found[name] = Follower(spec.families[name], spec, likeness, found[likeness.leader])
        return list(found.values())
    width = search.generation_size * len(spec.families)
    return [Subsearch(ALL, list(spec.families.values()), spec, spec.num_search_trials, width)]


def _row_of(fingerprint: str) -> Row:
    """A fingerprint as a number, which holds its first 13 digits."""
    return (float(int(fingerprint[:13], 16)),)


class Subsearch:
    """Trials with one budget, of which ``width`` are requested in a generation.

    ``queue`` are the points it begins with: each family's default, then those of earlier studies. Where earlier studies
    are weighed, theirs are not in the queue but follow it.
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
        self.asked: list[tuple[int, dict[str, Scalar]]] | None = None
        """(number, point) of each trial, in the order in which they were asked for, where another follows."""
        self.num_of_generation: Counter[int] = Counter()
        self._num_of_family: Counter[str] = Counter()
        self.is_exhausted = False
        self.has_ended_early = False
        self.outcomes: dict[int, float] = {}
        """By number, what the search has seen the ends of: the objective of a finished trial, else minus infinity.
        Kept for ``search.stop_when`` alone."""
        self.num_seen = 0
        """The number of ends and rungs that it has seen in this session."""
        self.given: set[int] = set()
        """Numbers of trials at points that no sampler has drawn: defaults, and those of earlier studies."""
        self._points_queued: set[str] = set()
        self._spec = spec
        self._search = spec.search
        self._directions = samplers.directions_of(spec.file.search)
        self._ended = samplers.EndedTrials(self._directions)
        self._running: dict[int, FrozenTrial] = {}
        self._known: dict[tuple[str, ...], dict[str, BaseDistribution]] = {}
        """The distributions that trials with the same parameters have in common."""
        self._tried = SortedRows(width=1)
        """The fingerprints of what was tried (``_row_of``)."""
        self._left: dict[str, dict[str, Scalar]] | None = None
        self._is_counted = False
        self.queue: deque[tuple[dict[str, Scalar], dict[str, str]]] = deque(
            (self._point(family.name, family.default_point()), {}) for family in families
        )
        self._weighed: list[WeighedPoints] = []
        self._lines: list[str] = []

    @property
    def starts(self) -> dict[str, dict[str, Scalar]]:
        """The default of each family whose points of earlier studies are taken here."""
        return {name: self._point(name, family.default_point()) for name, family in self.families.items()}

    def add_to_queue(
        self,
        found: Mapping[str, Sequence[tuple[str, dict[str, Any]]]],
        most: int,
        ranks: Mapping[str, PointRanks] = {},
    ) -> list[str]:
        """Queue up to ``most`` further points of each family that fit its space and are new.

        A point need not have the names of the present space (see ``completed``). A family with ``ranks`` takes its
        points by the weights of their studies. Returns a line for people for each family.
        """
        seen = {self.config_of(point).fingerprint() for point, _ in self.queue}
        chosen: list[list[tuple[dict[str, Scalar], dict[str, str]]]] = []
        lines: list[str] = []
        for name in self.families:
            own: list[tuple[dict[str, Scalar], dict[str, str]]] = []
            num_changed = num_outside = 0
            for source, given in found.get(name, []):
                if len(own) == most and name not in ranks:
                    break
                point = self.fitted(name, given)
                if point is None:
                    num_outside += 1
                    continue
                config = self.config_of(point)
                if config.fingerprint() not in seen:
                    seen.add(config.fingerprint())
                    own.append((point, {WARM_START: source}))
                    num_changed += point.keys() - {FAMILY} != given.keys()
            if name in ranks:
                candidates = [Candidate(each[WARM_START], point) for point, each in own]
                self._weighed.append(WeighedPoints(name, ranks[name], candidates, most))
                of_which = f"{min(most, len(own))} of {len(own)}"
                how = f", by how {len(ranks[name].ranks)} earlier studies rank what is known by then"
            else:
                chosen.append(own)
                of_which, how = f"{len(own)}", ""
            lines.append(
                f"{name}: {of_which} configurations of earlier studies come right after the default{how}"
                + f", {num_changed} of them fitted to the space of now" * (num_changed > 0)
                + f"; {num_outside} lie outside it and are left out" * (num_outside > 0)
            )
        self._points_queued = seen
        in_turn = itertools.zip_longest(*chosen)
        self.queue += [item for items in in_turn for item in items if item is not None]
        return lines

    def fitted(self, family: str, given: Mapping[str, Any]) -> dict[str, Scalar] | None:
        """The point with these values in the present space (see ``completed``); None where it lies outside."""
        try:
            point = self.completed(family, given)
            self.config_of(point)
        except ValueError:
            return None
        return point

    def take_lines(self) -> list[str]:
        """Lines for people on what was taken of earlier studies, since the last call."""
        lines, self._lines = self._lines, []
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
            if not first[name].single() and self._is_own(name) and all(name in other for other in others)
        }

    def _is_own(self, name: str) -> bool:
        """True for a parameter that this subsearch's sampler draws."""
        return True

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
        return max(0, min(self.width - self.num_of_generation[generation], self.num_ready))

    @property
    def num_left(self) -> int:
        """Number of trials still to be requested."""
        is_over = self.is_exhausted or self.has_ended_early
        return 0 if is_over else max(0, self.budget - self.num_asked)

    @property
    def num_ready(self) -> int:
        """Number of those that can be requested now."""
        return self.num_left

    @property
    def is_searched(self) -> bool:
        """True if no trial is left, and the end of each has been seen."""
        return not self.num_left and not self._running and not self.waiting

    def next_trial(self, number: int, generation: int) -> FrozenTrial | None:
        """The next trial, ready to be stored; None if no new point is left.

        ``number`` is the trial's, as the sampler knows it (see ``note``).
        """
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

    def note(self, trial: FrozenTrial, config: TrialConfig, generation: int, number: int) -> int:
        """Take into account a trial that was requested now or in an earlier session; returns its turn.

        ``number`` is what its number is without the families that are like others. The sampler knows it by that, so
        that such families change nothing for the rest.
        """
        fingerprint = config.fingerprint()
        self._tried.add(_row_of(fingerprint))
        if fingerprint in self._points_queued or WARM_START in trial.user_attrs:
            self.given.add(trial.number)
        for weighed in self._weighed:
            if weighed.family == config.family:
                weighed.note(trial)
        if self.asked is not None:
            self.asked.append((trial.number, dict(trial.params)))
        self.num_of_generation[generation] += 1
        self._num_of_family[str(trial.user_attrs[FAMILY])] += 1
        self.num_asked += 1
        trial.distributions = self._shared(trial.distributions)
        unscored = create_trial(
            state=TrialState.RUNNING, params=dict(trial.params), distributions=dict(trial.distributions)
        )
        self._running[trial.number] = self._as_sampled(unscored, number)
        return self.num_asked - 1

    def _as_sampled(self, trial: FrozenTrial, number: int) -> FrozenTrial:
        """A trial as the sampler knows it."""
        if trial.number == number:
            return trial
        sampled = copy.copy(trial)
        sampled.number = number
        return sampled

    def _shared(self, distributions: dict[str, BaseDistribution]) -> dict[str, BaseDistribution]:
        """The same distributions, as trials before have them."""
        known = self._known.setdefault(tuple(distributions), distributions)
        return known if known == distributions else distributions

    @property
    def waiting(self) -> WaitingTrials:
        """The trials that wait, or went on from a rung, by turn."""
        return self._ended.waiting

    def settle(self, trial: FrozenTrial, turn: int) -> None:
        """Let the sampler see how a trial has ended; until then it sees that it runs, or where it waits."""
        number = self._ended.forget(turn)
        if number is None:
            number = self._running.pop(trial.number).number
        self._see(trial.number, trial.values[0] if trial.state == TrialState.COMPLETE else -math.inf)
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
            self._ended.add(self._as_sampled(trial, number))

    def pause(self, trial: FrozenTrial, turn: int, step: int) -> None:
        """Let the sampler see a trial at the rung ``step``, until it comes further, as one stopped there."""
        running = self._running.pop(trial.number, None)
        number = self.waiting[turn].number if running is None else running.number
        self._see(trial.number, -math.inf)
        self._ended.pause(turn, WaitingTrial(trial, step, number))

    def _see(self, number: int, outcome: float) -> None:
        self.num_seen += 1
        if self._spec.file.search.stop_when is not None:
            self.outcomes[number] = outcome

    def note_promotion(self, generation: int) -> None:
        """Count a trial that goes on among those of the generation."""
        self.num_of_generation[generation] += 1

    def has_place(self, generation: int) -> bool:
        """True if a generation may have another trial."""
        return self.num_of_generation[generation] < self.width

    def _next_point(
        self, number: int, given: Mapping[str, Scalar] = NOTHING
    ) -> tuple[dict[str, Scalar], dict[str, Any], dict[str, Any]] | None:
        """A point with these values, what the sampler keeps with it, and where it comes from."""
        queued = self._queued()
        untried = self._untried(given)
        if untried is not None and not untried:
            return None
        search = self._search
        modelled = {} if self.chooses_family else self._modelled
        seen = samplers.seen_by(search.sampler, self._ended.trials(), self._running.values())
        noise = (
            samplers.fold_noise(self._ended.trials(), self._spec.file.protocol.num_folds)
            if search.sampler == "gp"
            else 0.0
        )
        fixed = given
        if self.chooses_family and search.sampler == "tpe":
            family = self._chosen_family(seen, number)
            fixed, seen = {FAMILY: family}, [trial for trial in seen if trial.params[FAMILY] == family]
        for attempt in range(REDRAWS):
            sampler = samplers.sampler_for(search, number, self.num_asked, modelled, attempt, noise)
            drawn, point = self._drawn(sampler, seen, number, fixed)
            if attempt == 0:  # a point that was not drawn counts in its place, as Optuna's enqueued trials do
                memory = {k: v for k, v in drawn.system_attrs.items() if "relative_params" not in k}
                if queued is not None:
                    return queued[0], memory, queued[1]
            if not self._is_tried(point):
                return point, drawn.system_attrs, {}
        chance = RandomSampler(seed=samplers.seed_of(search.seed, number, REDRAWS))
        for _ in range(10 * REDRAWS):
            drawn, point = self._drawn(chance, [], number, given)
            if not self._is_tried(point):
                return point, memory, {}
        if not untried:
            return None
        return untried[samplers.seed_of(search.seed, number) % len(untried)], memory, {}

    def _queued(self) -> tuple[dict[str, Scalar], dict[str, str]] | None:
        """The point that comes before what a sampler draws, and where it comes from; None of none.

        Of the families that are weighed the one that has taken fewest comes first.
        """
        while self.queue and self._is_tried(self.queue[0][0]):
            self.queue.popleft()
        if self.queue:
            return self.queue[0]
        trials = self._ended.trials() if self._weighed else []
        for weighed in sorted(self._weighed, key=lambda each: each.num_taken):
            own = [trial for trial in trials if trial.user_attrs.get(FAMILY) == weighed.family]
            found = weighed.next(own, self._is_tried)
            if found is not None:
                return found.point, {WARM_START: found.source}
            self._lines += weighed.lines(own, self._running)
        return None

    def _chosen_family(self, seen: Sequence[FrozenTrial], number: int) -> str:
        """The family of the next trial, of whose own trials TPE then learns.

        From all families' trials together it would learn of a family only what is among the best of all.
        """
        scores: dict[str, list[float]] = {name: [] for name in self.families}
        for trial in samplers.as_finished([trial for trial in seen if trial.state.is_finished()]):
            scores[str(trial.params[FAMILY])].append(trial.values[0])
        seed = samplers.seed_of(self._search.seed, number, len(self.families))
        return family_choice.chosen(scores, self._num_of_family, seed)

    def _drawn(
        self, sampler: BaseSampler, seen: Sequence[FrozenTrial], number: int, given: Mapping[str, Scalar]
    ) -> tuple[FrozenTrial, dict[str, Scalar]]:
        """The trial that a sampler draws beside given values, and the point of both."""
        taken: dict[str, Scalar] = {}

        def sample(trial: Suggester) -> None:
            answers = Given(given, trial)
            self.sample(answers)
            taken.update(answers.taken)

        drawn = samplers.draw(sampler, self._directions, seen, number, sample)
        return drawn, {**drawn.params, **taken}

    def _untried(self, given: Mapping[str, Scalar]) -> list[dict[str, Scalar]] | None:
        """The points with a configuration that was not tried; None where they are endless."""
        assert not given
        if not self._is_counted:
            self._is_counted = True
            points = samplers.all_points(self.sample)
            if points is not None:
                self._left = {self.config_of(point).fingerprint(): point for point in reversed(points)}
        if self._left is None:
            return None
        return [point for fingerprint, point in self._left.items() if _row_of(fingerprint) not in self._tried]

    def _is_tried(self, point: Mapping[str, Any]) -> bool:
        return _row_of(self.config_of(point).fingerprint()) in self._tried

    def _point(self, family: str, point: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return {**point, FAMILY: family} if self.chooses_family else dict(point)


class Follower(Subsearch):
    """The trials of a family that is like another, its leader: they take the values of the leader's trials.

    They are asked for after the leader's, in the same generation, whatever comes of these. The leader's sampler
    sees nothing of them. With ``likeness.is_best`` they begin when the leader's search has ended, at its best.

    The follower's own parameters have a sampler with a seed of its own, which models them alone and begins at their
    defaults. A point that makes a configuration of this family again, for lack of a parameter, is left out: its trial
    would repeat the earlier one.
    """

    def __init__(self, family: Family, spec: StudySpec, likeness: Likeness, leader: Subsearch) -> None:
        budget = spec.num_trials_of(family.name)
        super().__init__(family.name, [family], spec, budget, spec.file.search.generation_size)
        self.queue.clear()
        self.leader = leader
        self._likeness = likeness
        if leader.asked is None:
            leader.asked = []
        self._leaders = leader.asked
        own_seed = samplers.seed_of(self._search.seed, zlib.crc32(family.name.encode()))
        self._search = self._search.model_copy(update={"seed": own_seed})
        self._followed: set[int] = set()
        self._num_seen = 0
        self._waiting: deque[tuple[int, dict[str, Scalar]]] = deque()
        self._best: tuple[int, dict[str, Scalar]] | None = None
        """(number, values) of the leader's best trial."""
        self._has_open: tuple[int, int, bool] | None = None

    @property
    def starts(self) -> dict[str, dict[str, Scalar]]:
        """Nothing: points of earlier studies come from the leader."""
        return {}

    def add_to_queue(
        self,
        found: Mapping[str, Sequence[tuple[str, dict[str, Any]]]],
        most: int,
        ranks: Mapping[str, PointRanks] = {},
    ) -> list[str]:
        """Nothing: points of earlier studies come from the leader."""
        return [f"{self.name}: takes the points of {self.leader.name}"]

    @property
    def is_best(self) -> bool:
        """True if only the leader's best point is taken."""
        return self._likeness.is_best

    @property
    def needs_best(self) -> bool:
        """True if the leader's search has ended and its best trial is not known here."""
        return bool(self.is_best and self._best is None and self.num_left and self.leader.is_searched)

    def take_best(self, best: FrozenTrial) -> None:
        """Begin at the leader's best trial."""
        self._best = (best.number, self._likeness.given(best.params))

    @property
    def num_left(self) -> int:
        """Number of trials still to be requested, at most."""
        if self.is_best or self.is_exhausted:
            return super().num_left
        return self.num_ready + self.leader.num_left

    @property
    def num_ready(self) -> int:
        """Number of those for which the leader's values are known."""
        if self.is_exhausted:
            return 0
        if self.is_best:
            return super().num_left if self._best is not None else 0
        self._look()
        return len(self._waiting)

    def note(self, trial: FrozenTrial, config: TrialConfig, generation: int, number: int) -> int:
        """The same. The sampler knows a follower's trials by their turn, whatever else the study holds."""
        followed = int(trial.user_attrs[LIKE])
        self._look()
        self._followed.add(followed)
        self._waiting = deque(each for each in self._waiting if each[0] != followed)
        if self.is_best and self._best is None:  # of an earlier session
            _, point = next(each for each in self._leaders if each[0] == followed)
            self._best = (followed, self._likeness.given(point))
        if followed in self.leader.given if not self.is_best else not self.num_asked:
            self.given.add(trial.number)
        return super().note(trial, config, generation, self.num_asked)

    def _as_sampled(self, trial: FrozenTrial, number: int) -> FrozenTrial:
        """A trial as the sampler of the own parameters knows it."""
        sampled = copy.copy(trial)
        sampled.number = number
        sampled.params = {name: value for name, value in trial.params.items() if self._is_own(name)}
        sampled.distributions = {
            name: each for name, each in trial.distributions.items() if self._is_own(name)
        }
        return sampled

    def _is_own(self, name: str) -> bool:
        return name in self._likeness.own

    def _next_point(
        self, number: int, given: Mapping[str, Scalar] = NOTHING
    ) -> tuple[dict[str, Scalar], dict[str, Any], dict[str, Any]] | None:
        """The leader's next values, and own ones beside them."""
        taken = self._best if self.is_best else self._waiting[0]
        assert taken is not None
        followed, given = taken
        at_defaults = self.completed(self.name, given)
        if at_defaults.keys() <= given.keys():
            return at_defaults, {}, {LIKE: followed}
        if not self.num_asked:
            self.queue.append((at_defaults, {}))
        found = super()._next_point(self.num_asked, given)
        self.queue.clear()
        return found and (found[0], found[1], {LIKE: followed})

    def _look(self) -> None:
        """Take in what the leader has asked for; leave out what would repeat a configuration."""
        for number, point in self._leaders[self._num_seen :]:
            if number not in self._followed:
                self._waiting.append((number, self._likeness.given(point)))
        self._num_seen = len(self._leaders)
        while self._waiting and not self._is_open(*self._waiting[0]):
            self._waiting.popleft()

    def _is_open(self, number: int, given: Mapping[str, Scalar]) -> bool:
        """True if there is a configuration with these values that was not tried."""
        if self._has_open is None or self._has_open[:2] != (number, self.num_asked):
            untried = self._untried(given)
            self._has_open = (number, self.num_asked, untried is None or bool(untried))
        return self._has_open[2]

    def _untried(self, given: Mapping[str, Scalar]) -> list[dict[str, Scalar]] | None:
        found: list[dict[str, Scalar]] = []

        def sample(trial: Suggester) -> None:
            answers = Given(given, trial)
            self.sample(answers)
            found.append(answers.taken)

        points = samplers.all_points(sample)
        if points is None:
            return None
        whole = [{**drawn, **taken} for drawn, taken in zip(points, found, strict=True)]
        return [point for point in whole if not self._is_tried(point)]
