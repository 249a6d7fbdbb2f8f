"""Optuna's storage of a search, written through, and an index of it.

The storage is read once, when a session begins, and only written to from then on, so the time for a trial does not
grow with the number of trials.

Trials of the search have ``generation`` and ``family`` among their user attributes, once they have ended ``reason``,
``settled`` if their folds have chosen a value (``training.shares``), ``warm_start`` if they come from an earlier
study, ``like`` (a number) if they take another trial's values, and ``promotions``, the generations in which they were
promoted to a further rung.

Trials that others have enqueued (``enqueue_trial``, Optuna's dashboard) are taken in when a session begins; one outside
each family's space fails with a reason.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import optuna
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial, TrialState

from dmlstudy.records import RecordedEnd, TrialConfig
from dmlstudy.search.early_stopping import SearchCurve
from dmlstudy.search.rows import end_trial
from dmlstudy.search.samplers import FAMILY, OutsideSpaceError, Point, directions_of
from dmlstudy.search.storage import in_pages, marks, number_of, to_disk
from dmlstudy.search.subsearch import Follower, Subsearch, subsearches_of
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.training.shares import with_settled
from dmlstudy.trials import ENDED, Status, rank

SETTLED = "settled"
"""The user attribute of what a finished trial's folds have chosen."""

PROMOTIONS = "promotions"
"""The user attribute of the generations in which a trial was promoted."""


@dataclass
class Entry:
    """An open trial of the search: one whose end the sampler has not seen."""

    trial: FrozenTrial
    subsearch: Subsearch
    turn: int
    config: TrialConfig
    learned: int = 0
    """Without generations, the last step whose score others are judged by."""

    @classmethod
    def of(cls, trial: FrozenTrial, subsearch: Subsearch, turn: int) -> Entry:
        """The entry of a trial whose turn is known."""
        return cls(trial, subsearch, turn, subsearch.config_of(trial.params))

    @property
    def curve(self) -> SearchCurve:
        return SearchCurve(
            group=self.subsearch.name,
            turn=self.turn,
            epochs=self.config.training.epochs,
            num_folds=self.config.num_folds,
            scores={s: score for s, score in self.trial.intermediate_values.items() if math.isfinite(score)},
            num_promotions=len(self.promotions),
        )

    @property
    def promotions(self) -> Sequence[int]:
        """The generations in which it was promoted, one for each rung that it has left behind."""
        found: Sequence[int] = self.trial.user_attrs.get(PROMOTIONS, ())
        return found

    @property
    def last_generation(self) -> int:
        """The last generation in which it was to run."""
        return int([self.trial.user_attrs["generation"], *self.promotions][-1])


class Ledger:
    """Optuna's study of a search, written through, with an index of counts, best trials and reasons."""

    def __init__(self, spec: StudySpec, storage: optuna.storages.BaseStorage) -> None:
        self._spec = spec
        self.subsearches = subsearches_of(spec)
        self.subsearch_of = {
            family: subsearch for subsearch in self.subsearches for family in subsearch.families
        }
        self.study = optuna.create_study(
            study_name=spec.name,
            storage=storage,
            sampler=RandomSampler(seed=spec.file.search.seed),
            pruner=optuna.pruners.NopPruner(),
            directions=directions_of(spec.file.search),
            load_if_exists=True,
        )
        self._name_for_dashboards()
        self._following: list[int] = []
        """Numbers of trials that take another's values, in order."""
        self.num_open = 0
        self.next_number = 0
        """The next trial's, unless others put trials into the study meanwhile."""
        self._storage = storage
        """Without the cache that Optuna's study puts before it, which keeps every trial."""
        self._failed: dict[int, str] = {}
        self._best: dict[str, FrozenTrial] = {}
        self._counts = {family: dict.fromkeys(map(str, ENDED), 0) for family in spec.families}

    def _name_for_dashboards(self) -> None:
        """Give Optuna's dashboard the names of the objectives, and what the search is about."""
        search, protocol = self._spec.file.search, self._spec.file.protocol
        names = [protocol.objective, *([search.second_objective] if search.second_objective else [])]
        about = {
            "objective": " and ".join(names),
            "data": self._spec.data.name,
            "families": ", ".join(self._spec.families),
            "sampler": search.sampler,
            "early_stopping": search.scheduler,
            "num_folds": protocol.num_folds,
        }
        known = self.study.user_attrs
        for name, value in about.items():
            if known.get(name) != value:
                self.study.set_user_attr(name, value)
        if self.study.metric_names != names:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.set_metric_names(names)

    # What earlier sessions and others have left

    def stored(self) -> tuple[int, Iterator[tuple[int, FrozenTrial]]]:
        """The search's trials in the storage.

        Returns the last generation in which a trial was to run, -1 of none, and (generation, trial) in this order. A
        page of the trials is in memory at a time.
        """
        study_id = self.study._study_id
        found = [
            each
            for each in marks(self._storage, study_id, "generation", PROMOTIONS)
            if "generation" in each.attrs and each.state != TrialState.WAITING
        ]
        found.sort(key=lambda each: (int(each.attrs["generation"]), each.number))
        generations = [int(each.attrs["generation"]) for each in found]
        last = max(
            itertools.chain(generations, *(each.attrs.get(PROMOTIONS, ()) for each in found)), default=-1
        )
        trials = in_pages(self._storage, study_id, [each.trial_id for each in found])
        return last, zip(generations, trials, strict=True)

    def take_in(self, generation: int) -> Iterator[FrozenTrial]:
        """Make what others have enqueued part of a generation, or fail it."""
        enqueued = self._storage.get_all_trials(self.study._study_id, states=(TrialState.WAITING,))
        for waiting in enqueued:
            trial_id, given = waiting._trial_id, dict(waiting.system_attrs.get("fixed_params", {}))
            try:
                family = self._family_named(waiting, given)
                subsearch = self.subsearch_of[family]
                if isinstance(subsearch, Follower):
                    leader = subsearch.leader.name
                    raise OutsideSpaceError(f"{family} takes the points of {leader}: enqueue it there")
                point = subsearch.completed(family, given)
                unknown = sorted(given.keys() - point.keys())
                if unknown:
                    raise OutsideSpaceError(f"not in the space: {', '.join(unknown)}")
                _, read = Point.read(point, subsearch.sample)
            except ValueError as error:
                why = _attrs_of_end(f"was enqueued, but {error}")
                end_trial(self._storage, trial_id, TrialState.FAIL, None, why)
                continue
            for name, distribution in read.distributions.items():
                internal = distribution.to_internal_repr(point[name])
                self._storage.set_trial_param(trial_id, name, internal, distribution)
            self._storage.set_trial_user_attr(trial_id, FAMILY, family)
            self._storage.set_trial_user_attr(trial_id, "generation", generation)
            self._storage.set_trial_state_values(trial_id, TrialState.RUNNING)
            yield copy.deepcopy(self._storage.get_trial(trial_id))

    def _family_named(self, waiting: FrozenTrial, given: dict[str, Any]) -> str:
        """The family that an enqueued trial names, or its parameters do; raises OutsideSpaceError."""
        named = {str(name).partition("/")[0] for name in given if name != FAMILY}
        named |= {str(there[FAMILY]) for there in (waiting.user_attrs, given) if FAMILY in there}
        if len(named) != 1 or not named <= self._spec.families.keys():
            raise OutsideSpaceError(f"it names {' and '.join(sorted(named)) or 'no family'}")
        return named.pop()

    # Writing

    def create(self, trial: FrozenTrial) -> FrozenTrial:
        """Store a new trial, from which it gets its number."""
        trial._trial_id = self._storage.create_new_trial(self.study._study_id, trial)
        for name in [name for name in trial.system_attrs if "relative_params" in name]:
            del trial.system_attrs[name]  # a copy of the parameters
        trial.number = number_of(self._storage, trial._trial_id)
        to_disk(self._storage)  # before MLflow, which outlasts a loss of power, knows its number
        return trial

    def enter(self, trial: FrozenTrial, generation: int) -> Entry:
        """Take a stored trial into the index; raises OutsideSpaceError."""
        subsearch = self.subsearch_of[trial.user_attrs[FAMILY]]
        config = subsearch.config_of(trial.params)
        self.next_number = max(self.next_number, trial.number + 1)
        self.num_open += 1
        if isinstance(subsearch, Follower):
            bisect.insort(self._following, trial.number)
        number = trial.number - bisect.bisect_left(self._following, trial.number)
        return Entry(trial, subsearch, subsearch.note(trial, config, generation, number), config)

    @property
    def next_number_sampled(self) -> int:
        """The next trial's number as samplers know it: what it is without families that are like others."""
        return self.next_number - len(self._following)

    def report(self, trial: FrozenTrial, step: int, score: float) -> None:
        """Store a score, unless there is one at the step already."""
        if step not in trial.intermediate_values:
            self._storage.set_trial_intermediate_value(trial._trial_id, step, score)
            trial.intermediate_values[step] = score

    def promote(self, entry: Entry, generation: int) -> None:
        """Store that a trial goes on to its next rung."""
        promotions = [*entry.promotions, generation]
        self._storage.set_trial_user_attr(entry.trial._trial_id, PROMOTIONS, promotions)
        entry.trial.user_attrs[PROMOTIONS] = promotions

    def end(
        self,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None = None,
        reason: str = "",
        settled: Mapping[str, float] = {},
    ) -> None:
        """Store how a trial ended. As in Optuna, the value of a pruned one is its last score."""
        if state == TrialState.PRUNED:
            values = _last_value(trial, len(self.study.directions))
        attrs = _attrs_of_end(reason, settled)
        end_trial(self._storage, trial._trial_id, state, values, attrs)
        trial.user_attrs.update(attrs)
        to_disk(self._storage)
        trial.state, trial.values = state, values
        self.count(trial)

    def count(self, trial: FrozenTrial) -> None:
        """Take into account how a trial ended."""
        family = trial.user_attrs[FAMILY]
        self.num_open -= 1
        self._counts[family][Status.of_optuna(trial.state.name)] += 1
        if trial.state == TrialState.FAIL:
            self._failed[trial.number] = str(trial.user_attrs.get("reason", ""))
        elif trial.state == TrialState.COMPLETE:
            best = self._best.get(family)
            if best is None or _rank(trial) > _rank(best):
                self._best[family] = trial

    # What is asked

    def best_configs(self) -> dict[str, TrialConfig]:
        """Each family's best finished configuration by the objective; families with none are left out."""
        return {
            name: with_settled(
                self.subsearch_of[name].config_of(self._best[name].params),
                self._best[name].user_attrs.get(SETTLED, {}),
            )
            for name in self._spec.families
            if name in self._best
        }

    def winner(self) -> str | None:
        """The family whose best configuration has the highest objective on the validation classes."""
        return next(iter(self.ranked()), None)

    def ranked(self) -> list[str]:
        """The families by their best configurations, the winner first; those without one are left out."""
        return sorted(self._best, key=lambda name: _rank(self._best[name]), reverse=True)

    def best_trial(self, family: str) -> FrozenTrial | None:
        """A family's best finished trial."""
        return self._best.get(family)

    def best(self) -> tuple[float, str] | None:
        """The best objective so far and the label of its trial."""
        family = self.winner()
        if family is None:
            return None
        return self._best[family].values[0], label(self._best[family])

    def counts(self) -> dict[str, dict[str, int]]:
        """Counts of each family's search trials by how they ended."""
        return {family: dict(own) for family, own in self._counts.items()}

    def would_be_best(self, family: str, score: float, number: int | None) -> bool:
        """True if a trial with this objective were the family's best, were it to end now."""
        best = self._best.get(family)
        return best is None or rank(score, number) >= _rank(best)

    def best_numbers(self) -> dict[str, int]:
        """The number of each family's best finished trial."""
        return {family: trial.number for family, trial in self._best.items()}

    def failure_reasons(self) -> list[str]:
        """Reasons for which search trials failed, oldest first."""
        return [self._failed[number] for number in sorted(self._failed)]


class Recorded(Protocol):
    """The view of a study's runs on its search trials (``tracking.StudyTracker``)."""

    def recorded_ends(self, number: int) -> Sequence[RecordedEnd]: ...

    def supersede(self, run_id: str) -> None: ...


def commit_recorded(
    storage: optuna.storages.BaseStorage, study: str, recorded: Recorded, paused: Container[int] = ()
) -> list[int]:
    """Record in Optuna the ends of trials that only their runs hold; returns the trials' numbers.

    A driver writes the end of a trial into its run first, and into Optuna's storage last; one that was killed in
    between leaves such a trial. A run that does not hold all that Optuna is to know is superseded, for its trial runs
    again.

    The runs of trials that have ``paused`` hold no end; there may be thousands of these.
    """
    try:
        study_id = storage.get_study_id_from_name(study)
    except KeyError:
        return []
    directions = storage.get_study_directions(study_id)
    committed = []
    running = [
        mark.trial_id
        for mark in marks(storage, study_id)
        if mark.state == TrialState.RUNNING and mark.number not in paused
    ]
    for trial in in_pages(storage, study_id, running):
        ends = list(recorded.recorded_ends(trial.number)) if "generation" in trial.user_attrs else []
        taken = next(
            (end for end in ends if end.status != Status.FINISHED or len(end.values) == len(directions)), None
        )
        for end in ends:
            if end is not taken:
                recorded.supersede(end.run_id)
        if taken is None:
            continue
        state = TrialState[taken.status.in_optuna]
        values = taken.values if taken.status == Status.FINISHED else None
        if state == TrialState.PRUNED:
            values = _last_value(trial, len(directions))
        end_trial(storage, trial._trial_id, state, values, _attrs_of_end(taken.reason, taken.settled))
        committed.append(trial.number)
    return committed


def _attrs_of_end(reason: str, settled: Mapping[str, float] = {}) -> dict[str, Any]:
    """The user attributes of a trial that has ended so."""
    return {**({"reason": reason} if reason else {}), **({SETTLED: dict(settled)} if settled else {})}


def _last_value(trial: FrozenTrial, num_objectives: int) -> list[float] | None:
    """Optuna's value of a pruned trial: its last score, if there is one objective."""
    last = trial.intermediate_values[trial.last_step] if trial.last_step is not None else math.nan
    return [last] if math.isfinite(last) and num_objectives == 1 else None


def label(trial: FrozenTrial) -> str:
    """The name of a search trial in messages."""
    return f"{trial.user_attrs[FAMILY]} #{trial.number}"


def _rank(trial: FrozenTrial) -> tuple[float, int]:
    return rank(trial.values[0], trial.number)
