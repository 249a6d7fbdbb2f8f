"""The searcher: it decides what runs next, first the search over all families, then the verdict on each one's best.

The Optuna study in the storage is the truth about the search: every step is reported to it, a trial stopped
early is PRUNED there, a failed one is FAIL with its reason, and this object rebuilds itself from it (``ledger``).

Trials are requested in generations: ``search.generation_size`` of each family, one by default. A generation starts
when the one before has ended, and sampling and early stopping look at ended generations only. So neither the number
of trials at once nor the order in which they finish changes what is tried or what it scores.

An interruption changes nothing either: an unfinished trial goes on, makes its reports again, and is judged as it was.
A time budget is checked between generations.

With ``search.deterministic: false`` there is one endless generation. A trial is requested as soon as there is room;
the sampler knows all that has ended and what runs, the early stopping all that was reported.

With ``search.scheduler: asha`` or ``hyperband`` a trial pauses at each rung and waits to be promoted. A generation
begins with promotions, and what is left of its width are new trials.

A paused trial is PRUNED as soon as it cannot be promoted any more and one of its family has finished. Where no trial of
a family would finish, the best at its highest rung goes on.

With ``search.stop_when`` a subsearch ends before its budget when its other trials would hardly pay. That is decided
between generations, and kept before it takes effect.

The study's user attributes are ``spent`` (seconds of the time budgets, over all sessions), ``exhausted`` (subsearches
without an untried configuration), ``ended_early`` (those that have ended by ``stop_when``, and why), ``warm_start``
(points of earlier studies, as they were when this one began) and ``warm_start_rankings`` (how these rank them).
"""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from dmlstudy.metric_names import LATENCY_MS, on_test
from dmlstudy.records import TrialConfig, UnitScores, is_untrained
from dmlstudy.search import early_stopping, hub, samplers
from dmlstudy.search.early_stopping import SearchCurve
from dmlstudy.search.fold_test import FoldTest
from dmlstudy.search.ledger import Entry, Ledger, label
from dmlstudy.search.paused import PausedTrials
from dmlstudy.search.stop_rule import ENDED_EARLY, EndingSearches
from dmlstudy.search.storage import attrs_in
from dmlstudy.search.subsearch import Follower, Subsearch
from dmlstudy.search.verdict_trials import Competitors, JudgedBefore, VerdictTrials
from dmlstudy.search.warm_start import (
    MOST_PER_FAMILY,
    RANKINGS,
    WARM_START,
    PointRanks,
    earlier_best,
    point_ranks,
)
from dmlstudy.spec.budget import Clock, TimeBudget, seconds_of
from dmlstudy.spec.epochs import place
from dmlstudy.spec.pace import Trials
from dmlstudy.spec.study_file import HUB, SearchConfig, SpecError, StudySpec
from dmlstudy.training.shares import settled_of
from dmlstudy.training.tasks import task_of
from dmlstudy.trials import Status
from dmlstudy.verdict.comparison import Pair, UnitMeans
from dmlstudy.verdict.sequential import Plan, SeedScore

MOST_UNSTARTED = 3
"""After so many starts in a row that have failed a place for trials is given up."""

ENDED_KEPT = 100
"""Assignments that are remembered after their trial has ended."""

TIME_NOTED_S = 5.0
"""Seconds of a time budget that a killed driver may forget."""


@dataclass
class Assignment:
    """One trial as the study knows it: what it is, what it was given, how it stands."""

    label: str
    config: TrialConfig
    number: int | None = None
    status: Status = Status.RUNNING
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    """A report for each step, by step; a resumed trial makes the same reports again."""
    unit_scores: UnitScores | None = None
    """Of a verdict trial, before it is committed."""
    pause_after: int | None = None
    """The step at which the trial pauses to be promoted; None where it runs to its end."""
    continues_after: int = 0
    """The step at which it has paused before; 0 where it has not."""

    def note(self, report: dict[str, float]) -> None:
        """Take in a report, in the place of an earlier one on the same step."""
        step = itemgetter("step")
        at = bisect.bisect_left(self.curve, step(report), key=step)
        is_known = at < len(self.curve) and step(self.curve[at]) == step(report)
        self.curve[at : at + is_known] = [report]
        self.metrics = self.curve[-1]


class StudySearch:
    """Says what runs next and what is stopped: generation by generation of the search, then the verdict trials.

    It knows no engine: whoever runs trials calls ``suggest`` for a trial, ``observe`` with each of its reports, ``end``
    when it is over, and ``commit`` once all else of its end is written.

    ``finished_verdicts`` are the (family, seed) pairs that an earlier session has already judged, ``judged`` their
    scores where seeds are added until the verdict is decided. ``paused`` are the numbers of the trials whose pause at a
    rung is recorded. ``clock`` is that of the time budgets.

    Raises SpecError for a sampler that is not installed, and for a warm start from a study that is not there.
    """

    def __init__(
        self,
        spec: StudySpec,
        storage: optuna.storages.BaseStorage,
        finished_verdicts: set[tuple[str, int]],
        judged: JudgedBefore | None = None,
        *,
        paused: Container[int] = (),
        clock: Clock = time.monotonic,
    ) -> None:
        search, resources = spec.search, spec.file.resources
        self.metric = spec.file.protocol.objective
        samplers.check_installed(search)
        warm_points = None
        if search.warm_start and WARM_START not in attrs_in(storage, spec.name):
            warm_points = earlier_best(spec, storage)
        self.spec = spec
        self.assignments: dict[str, Assignment] = {}
        """Every trial that runs, and those that ended last, by the engine's id."""
        self._ended: deque[str] = deque()
        self._hopeless: set[str] = set()
        self._notes: list[str] = []
        self.plan = Plan.of(spec.file.protocol)
        self._verdicts = VerdictTrials(self.plan, finished_verdicts, judged)
        self.before_verdict: Callable[[], object] = lambda: None
        """Called once in a session, when the search is over and before a verdict trial is handed out."""
        self._is_verdict_begun = False
        self._budget = TimeBudget(
            seconds_of(search.wall_time) if search.wall_time else None,
            search.device_hours * 3600 if search.device_hours else None,
            resources.workers * (resources.gpus_per_worker or resources.cpus_per_worker),
            clock=clock,
        )
        self._spent_noted = 0.0
        self._stopping = early_stopping.RULES[search.scheduler](search.reduction_factor)
        self._fold_test = FoldTest(search.fold_test)
        self._paused = PausedTrials(self._stopping)
        self._at_rest: set[int] = set()
        """Trials that have paused in this generation, which sees nothing of it."""
        self.record_given_up: Callable[[Assignment], None] = lambda assignment: None
        """Called with a paused trial that is not promoted any more, before that is committed."""
        self._in_generations = search.deterministic
        self._generation = -1 if self._in_generations else 0
        self._entries: dict[int, Entry] = {}
        """The trials whose end the sampler has not seen."""
        self._waiting: list[int] = []
        self._num_lost: Counter[str] = Counter()
        self._step_at_loss: dict[str, float] = {}
        self._num_unstarted = self._num_beside = 0
        self._places: float = math.inf
        """At most so many trials run at once: fewer than there is room for where workers cannot be started."""
        self._ledger = Ledger(spec, storage)
        self._subsearches = self._ledger.subsearches
        self._ending = EndingSearches(search, self._subsearches)
        self.study = self._ledger.study
        self._check_program(search)
        if warm_points is not None:
            self._keep_warm_start(warm_points, storage)
        self._begin_subsearches(is_first=warm_points is not None)
        self._read_ledger(paused)

    def _keep_warm_start(self, points: Mapping[str, Any], storage: optuna.storages.BaseStorage) -> None:
        """Store the points of earlier studies and, with ``auto``, how these rank them, before anything is asked."""
        if self.spec.file.search.warm_start == "auto":
            ranks = {
                family: each.model_dump()
                for subsearch in self._subsearches
                for family, each in point_ranks(
                    {family: points[family] for family in subsearch.starts},
                    subsearch.starts,
                    subsearch.fitted,
                    storage,
                ).items()
            }
            self.study.set_user_attr(RANKINGS, ranks)
        self.study.set_user_attr(WARM_START, points)

    def _begin_subsearches(self, *, is_first: bool) -> None:
        attrs = self.study.user_attrs
        ranks = {name: PointRanks.model_validate(each) for name, each in attrs.get(RANKINGS, {}).items()}
        self._budget.wall, self._budget.device = attrs.get("spent", (0.0, 0.0))
        most = min(MOST_PER_FAMILY, (self.spec.file.search.trials_per_family - 1) // 2)
        for subsearch in self._subsearches:
            lines = subsearch.add_to_queue(attrs.get(WARM_START, {}), most, ranks)
            if is_first:
                self._notes += [f"search.warm_start: {line}" for line in lines]
            subsearch.is_exhausted = subsearch.name in attrs.get("exhausted", [])
            subsearch.has_ended_early = subsearch.name in attrs.get(ENDED_EARLY, {})

    def _check_program(self, search: SearchConfig) -> None:
        """Keep which program a sampler of OptunaHub is; raises SpecError where a study goes on with another."""
        if search.sampler.startswith(HUB):
            now = hub.digest_of(search)
            if self.study.user_attrs.get("sampler_sha256", now) != now:
                raise SpecError(
                    f"search.registry: the program of {search.sampler} has changed since the study began;"
                    " put the earlier one back, or begin a study with another name"
                )
            self.study.set_user_attr("sampler_sha256", now)

    def _read_ledger(self, paused: Container[int]) -> None:
        """Take in what earlier sessions have left in the storage, and what others have enqueued there."""
        last_generation, trials = self._ledger.stored()
        if self._in_generations:
            self._generation = max(self._generation, last_generation)
        for generation, trial in trials:
            self._enter(trial, generation)
            if trial.state.is_finished():
                self._ledger.count(trial)
            self._take_up(self._entries[trial.number], paused)
        for trial in self._ledger.take_in(max(0, self._generation)):
            self._generation = max(0, self._generation)
            self._enter(trial, self._generation)
            self._waiting.append(trial.number)
        if not self._in_generations:
            for number in self._waiting:
                self._learn_again(self._entries[number])

    def _take_up(self, entry: Entry, paused: Container[int]) -> None:
        """Take in a trial of an earlier session: what the generation sees of it, and whether it goes on.

        One at its rung that is not among the ``paused`` goes on to pause there, which was not recorded.
        """
        number, state = entry.trial.number, entry.trial.state
        is_seen = not self._in_generations or entry.last_generation < self._generation
        self._paused.recall(entry)
        if entry.promotions and not is_seen:
            self._paused.show(entry)
        is_recorded = (self._in_generations and is_seen) or number in paused
        if not state.is_finished() and not (is_recorded and self._paused.has_come(entry)):
            self._waiting.append(number)
        elif is_seen:
            if state.is_finished() and state != TrialState.FAIL:
                self._learn(entry.curve)
            self._settle(number)
        elif not state.is_finished():
            self._at_rest.add(number)

    def _learn_again(self, entry: Entry) -> None:
        """Learn what a trial that goes on has scored, up to its last report, which may not have been judged."""
        entry.learned = max([0, *sorted(entry.trial.intermediate_values)[:-1]])
        known = {step: score for step, score in entry.curve.scores.items() if step <= entry.learned}
        self._learn(replace(entry.curve, scores=known))

    # What an engine calls

    def suggest(self, trial_id: str) -> TrialConfig | None:
        """The trial that runs next under this id; None where none can start now, and ``may_have_more`` says whether
        later."""
        self.pass_time()
        if self._num_running() >= self._places:
            return None
        if not self._waiting:
            self._ask()
        if self._waiting:
            entry = self._entries[self._waiting.pop(0)]
            assignment = Assignment(
                label(entry.trial),
                entry.config,
                entry.trial.number,
                pause_after=self._paused.next_rung(entry),
                continues_after=self._paused.last_rung(entry),
            )
            for step, score in sorted(entry.trial.intermediate_values.items()):
                assignment.note({"step": float(step), self.metric: score})
        else:
            config = None if self._ledger.num_open else self._next_verdict()
            if config is None:
                return None
            assignment = Assignment(f"{config.family} verdict seed {config.seed}", config)
        self.assignments[trial_id] = assignment
        return assignment.config

    def _next_verdict(self) -> TrialConfig | None:
        """The next verdict trial, now that the search is over."""
        best, order = self.best_configs(), self.ranked()
        if best and not self._is_verdict_begun:
            self.before_verdict()
            self._is_verdict_begun = True
        config = self._verdicts.next(best, order)
        self._notes += self._verdicts.take_notes()
        return config

    def may_have_more(self) -> bool:
        """True if a trial may be suggested later although none is now: a running one may be lost and rerun, or the
        record of one is awaited that decides what follows."""
        return self._ledger.num_open > 0 or self._is_running() or self._verdicts.is_waiting

    def end(
        self,
        trial_id: str,
        metrics: dict[str, float] | None = None,
        *,
        failure: str = "",
        is_unstarted: bool = False,
        is_lost: bool = False,
        is_paused: bool = False,
    ) -> None:
        """Note that a trial is over; an engine may say so twice.

        It has its final ``metrics``, or a ``failure``, which ``is_unstarted`` trials wait out; or it ``is_lost``: what
        it ran on is gone; or it ``is_paused``, as it was asked to. With none of these it was interrupted, and is handed
        out again.
        """
        assignment = self.assignments[trial_id]
        if assignment.status != Status.RUNNING:
            return
        self.pass_time()
        if is_lost:  # a trial itself ends with a reason
            assignment.status = Status.FAILED
            assignment.reason = assignment.reason or "no reason given"
            self._hand_out_again(assignment)
        elif trial_id in self._hopeless:  # Tune says of these that they are done
            assignment.status = Status.PRUNED
        elif is_unstarted:
            assignment.status, assignment.reason = Status.INTERRUPTED, failure
            self._put_back(assignment)
            self._count_unstarted(assignment.reason)
        elif failure:
            assignment.status, assignment.reason = Status.FAILED, failure
        elif is_paused:
            assignment.status = Status.PAUSED
        elif metrics is not None:
            assignment.metrics = metrics
            score = metrics.get(self.metric, math.nan)
            if assignment.number is None or math.isfinite(score):
                assignment.status = Status.FINISHED
            else:
                assignment.status, assignment.reason = Status.FAILED, f"{self.metric} is {score}"
        else:
            assignment.status = Status.INTERRUPTED  # it stays RUNNING in the storage, to be handed out again
        if assignment.number is None and assignment.status in (Status.FINISHED, Status.FAILED):
            self._verdicts.end(assignment.config)

    def _hand_out_again(self, assignment: Assignment) -> None:
        """Let a lost trial go on under its number: as often as it has made progress since it was lost before, and
        else as often as a study's trials are tried again."""
        step = assignment.curve[-1]["step"] if assignment.curve else 0.0
        if step > self._step_at_loss.get(assignment.label, 0.0):
            self._num_lost[assignment.label] = 0
            self._step_at_loss[assignment.label] = step
        self._num_lost[assignment.label] += 1
        if self._num_lost[assignment.label] <= self.spec.file.resources.retries:
            assignment.status = Status.INTERRUPTED
            self._put_back(assignment)

    def hand_out_again(self, trial_id: str, reason: str) -> None:
        """Let a trial that has ended, and is not committed, run again: what it has left is lost, or what it ran on."""
        assignment = self.assignments[trial_id]
        assignment.status, assignment.reason = Status.INTERRUPTED, reason
        self._put_back(assignment)

    def _put_back(self, assignment: Assignment) -> None:
        if assignment.number is None:
            self._verdicts.put_back(assignment.config)
        else:
            self._waiting.insert(0, assignment.number)

    def _count_unstarted(self, reason: str) -> None:
        """Give up a place whose workers could not be started so many times in a row while other trials went on."""
        self._num_unstarted, self._num_beside = self._num_unstarted + 1, self._num_progressing()
        if self._num_unstarted < MOST_UNSTARTED or not self._num_beside:
            return
        self._num_unstarted = 0
        self._places = self._num_running()
        self._notes.append(
            f"workers could not be started {MOST_UNSTARTED} times in a row ({reason}); the study goes on with"
            f" {self._places} at once, and after a stop and `resume` with all again"
        )

    def _num_running(self) -> int:
        return sum(assignment.status == Status.RUNNING for assignment in self.assignments.values())

    def _num_progressing(self) -> int:
        return sum(a.status == Status.RUNNING and bool(a.curve) for a in self.assignments.values())

    def _is_running(self) -> bool:
        return self._num_running() > 0

    def has_progress(self) -> bool:
        """True if a running trial has reported anything."""
        return self._num_progressing() > 0

    def commit(self, trial_id: str) -> None:
        """Tell Optuna how the trial ended: the last thing that is written of a trial.

        So nothing that Optuna knows to be over is missing anywhere else. Where a driver is killed before this, the
        next session commits what the trial's run holds (``ledger.commit_recorded``), or runs the trial again and ends
        with the same.
        """
        assignment = self.assignments[trial_id]
        if assignment.status == Status.RUNNING:
            return
        self._forget(trial_id)
        if assignment.status == Status.INTERRUPTED:
            return
        if assignment.status == Status.PAUSED:
            assert assignment.number is not None
            self._at_rest.add(assignment.number)
            self._settle_if_alone(assignment.number)
            return
        if assignment.number is None:
            self._verdicts.keep(assignment.config, self._seed_score(assignment))
            assignment.unit_scores = None
        entry = self._entries.get(-1 if assignment.number is None else assignment.number)
        if entry is None or entry.trial.state.is_finished():
            return
        if assignment.status == Status.FINISHED:
            self._ledger.end(
                entry.trial,
                TrialState.COMPLETE,
                self.values_of(assignment),
                settled=settled_of(assignment.metrics),
            )
        else:
            state = TrialState[assignment.status.in_optuna]
            self._ledger.end(entry.trial, state, reason=assignment.reason)
        self._settle_if_alone(entry.trial.number)

    def _seed_score(self, assignment: Assignment) -> SeedScore:
        """The objective of a verdict trial that has ended."""
        name = on_test(self.metric)
        score = assignment.metrics.get(name, math.nan)
        if assignment.status != Status.FINISHED or not math.isfinite(score):
            return SeedScore(None)
        units = assignment.unit_scores
        return SeedScore(score, None if units is None else UnitMeans.of(units, name))

    def values_of(self, assignment: Assignment) -> list[float]:
        """A finished search trial's value of each objective; empty for any other trial.

        A trial without a latency counts as the slowest.
        """
        if assignment.number is None or assignment.status != Status.FINISHED:
            return []
        quality = assignment.metrics[self.metric]
        second = self.spec.file.search.second_objective
        if second == "embedding_dim":
            task = task_of(assignment.config)
            return [quality, float(task.size(task.logged_params(assignment.config)))]
        if second == "latency_ms":
            latency = assignment.metrics.get(LATENCY_MS, math.inf)
            return [quality, math.inf if math.isnan(latency) else latency]
        return [quality]

    def is_best_yet(self, assignment: Assignment) -> bool:
        """True of a finished search trial that is better, by the objective, than all of its family that have ended."""
        values = self.values_of(assignment)
        return bool(values) and self._ledger.would_be_best(
            assignment.config.family, values[0], assignment.number
        )

    def _forget(self, trial_id: str) -> None:
        """Keep the assignments of the trials that ended last only."""
        if trial_id not in self._ended:
            self._ended.append(trial_id)
        while len(self._ended) > ENDED_KEPT:
            oldest = self._ended.popleft()
            del self.assignments[oldest]
            self._hopeless.discard(oldest)

    # While a trial runs

    def observe(self, trial_id: str, metrics: dict[str, float]) -> bool:
        """Note a trial's report, for Optuna too; whether the trial should be stopped.

        A report on a step that is known already changes nothing and is judged as it was.
        """
        self.pass_time()
        assignment = self.assignments[trial_id]
        assignment.note(metrics)
        if self._num_unstarted and self._num_progressing() > self._num_beside:
            self._num_unstarted = 0  # for the place's workers are there now
        if assignment.number is None:
            return False
        entry, step = self._entries[assignment.number], int(metrics["step"])
        self._ledger.report(entry.trial, step, metrics[self.metric])
        if self._in_generations or step > entry.learned:
            curve = entry.curve
            if reason := self._why_to_stop(entry, curve, step):
                self._hopeless.add(trial_id)
                assignment.reason = reason
            if not self._in_generations:
                self._learn(curve, since=step)
                entry.learned = step
        return trial_id in self._hopeless

    def _learn(self, curve: SearchCurve, since: int = 0) -> None:
        """Take a trial's scores from a step on among those by which others are stopped."""
        self._stopping.learn(curve, since)
        self._fold_test.learn(curve)

    def _why_to_stop(self, entry: Entry, curve: SearchCurve, step: int) -> str:
        """The reason to stop the trial after this step; empty where it goes on.

        A promoted trial was judged up to its rung before.
        """
        if step <= self._paused.last_rung(entry):
            return ""
        if self._stopping.stops(curve, step):
            return self._why_stopped(entry, step)
        if self._fold_test.stops(curve, step):
            chance = f"a chance below {self._fold_test.level:g} to end above {self._whose(entry)} best"
            return f"stopped after {place(entry.config, step)}: by its folds {chance}"
        return ""

    def _why_stopped(self, entry: Entry, step: int) -> str:
        why = self._stopping.WHY.format(whose=self._whose(entry), eta=self._stopping.eta)
        return f"stopped after {place(entry.config, step)}: {why}"

    def _whose(self, entry: Entry) -> str:
        return "the search's" if entry.subsearch.chooses_family else "its family's"

    # The search

    def _ask(self) -> None:
        """Ask for what runs next, if there is budget for it and its time has come."""
        if not self._in_generations:
            self._end_early()
            self._give_up_what_waits()
            self._ask_for_one()
        elif not self._num_at_work:
            self._ask_for_generation()  # what an interruption left of it
            while not self._waiting and self._begin_generation():
                pass

    def _begin_generation(self) -> bool:
        """Settle the generation that has ended, and ask for the next; whether one may come after it without a trial.

        So it is where a space turned out to be exhausted: others may wait for the end of its search.
        """
        self._settle_all()
        self._end_early()
        self._give_up_what_waits()
        if self._is_spent() and not any(self._next_promoted(each) for each in self._subsearches):
            return False
        num_exhausted = sum(each.is_exhausted for each in self._subsearches)
        self._generation += 1
        self._ask_for_generation()
        return sum(each.is_exhausted for each in self._subsearches) > num_exhausted

    @property
    def _num_at_work(self) -> int:
        """Number of search trials that run or are to run at once."""
        return self._ledger.num_open - len(self._paused) - len(self._at_rest)

    def _ask_for_generation(self) -> None:
        for subsearch in self._subsearches if self._generation >= 0 else ():
            self._take_best(subsearch)
            while subsearch.has_place(self._generation) and self._promote(subsearch):
                pass
            while self._num_missing(subsearch) and self._ask_subsearch(subsearch):
                pass

    def _num_missing(self, subsearch: Subsearch) -> int:
        """Number of new trials of this generation still to be requested."""
        if self._paused.may_wait and self._budget.spent() is not None:
            return 0  # it may have begun for promotions alone
        return subsearch.num_missing(self._generation)

    def _end_early(self) -> None:
        """End the searches whose other trials would hardly pay."""
        for ends in self._ending.due():
            known = self.study.user_attrs.get(ENDED_EARLY, {})
            own = {name: end.model_dump() for name, end in ends.items()}
            self.study.set_user_attr(ENDED_EARLY, {**known, **own})
            for subsearch in self._subsearches:
                if subsearch.name in ends:
                    subsearch.has_ended_early = True
                    told = ends[subsearch.name].told(subsearch.name, is_whole=subsearch.chooses_family)
                    self._notes.append(told)

    # Promotion

    def _next_promoted(self, subsearch: Subsearch) -> Entry | None:
        """The paused trial of a subsearch that goes on next; None of none."""
        found = self._paused.promotable(subsearch) if self._budget.spent() is None else None
        if found is None and self._asks_no_more(subsearch):
            lacking = subsearch.families.keys() - self._ledger.best_numbers().keys()
            lacking -= {entry.config.family for entry in self._running_of(subsearch)} if lacking else set()
            found = self._paused.leading(subsearch, lacking) if lacking else None
        return found

    def _asks_no_more(self, subsearch: Subsearch) -> bool:
        """True if no new trial of a subsearch will be asked for."""
        return not subsearch.num_left or self._budget.spent() is not None

    def _running_of(self, subsearch: Subsearch) -> list[Entry]:
        """The trials of a subsearch that run, or whose end or rung is not seen yet."""
        return [
            entry
            for entry in self._entries.values()
            if entry.subsearch is subsearch and not entry.trial.state.is_finished()
        ]

    def _promote(self, subsearch: Subsearch) -> bool:
        """Let the next paused trial of a subsearch go on; whether there is one."""
        entry = self._next_promoted(subsearch)
        if entry is None:
            return False
        self._paused.leave(entry)
        self._ledger.promote(entry, self._generation)
        subsearch.note_promotion(self._generation)
        self._entries[entry.trial.number] = entry
        self._waiting.append(entry.trial.number)
        return True

    def _give_up_what_waits(self) -> None:
        """End the paused trials that cannot be promoted any more."""
        for subsearch in self._subsearches if self._paused else ():
            running = self._running_of(subsearch)
            if self._asks_no_more(subsearch) and not running and self._next_promoted(subsearch) is None:
                given_up = self._paused.of(subsearch)
            else:
                given_up = self._paused.hopeless(subsearch, running, self._ledger.best_numbers())
            for entry in given_up:
                self._give_up(entry)

    def _give_up(self, entry: Entry) -> None:
        """End a paused trial: first in its run, then in Optuna, as any other."""
        rung = self._paused.next_rung(entry)
        assert rung is not None
        given_up = Assignment(
            label(entry.trial),
            entry.config,
            entry.trial.number,
            status=Status.PRUNED,
            reason=self._why_stopped(entry, rung),
            continues_after=rung,
        )
        for step, score in sorted(entry.trial.intermediate_values.items()):
            given_up.note({"step": float(step), self.metric: score})
        self.record_given_up(given_up)
        self._paused.leave(entry)
        self._ledger.end(entry.trial, TrialState.PRUNED, reason=given_up.reason)
        entry.subsearch.settle(entry.trial, entry.turn)

    # New trials

    def _take_best(self, subsearch: Subsearch) -> None:
        """Tell a family that begins at another's best what that is, once the other's search has ended."""
        if not isinstance(subsearch, Follower) or not subsearch.needs_best:
            return
        leader = subsearch.leader.name
        best = self._ledger.best_trial(leader)
        if best is None:
            self._exhaust(subsearch, f"no trial of {leader} has finished whose values it could take")
        else:
            subsearch.take_best(best)

    def _ask_for_one(self) -> None:
        """Let a paused trial go on, or ask the subsearch that was asked least."""
        if any(self._promote(subsearch) for subsearch in self._subsearches):
            return
        while self._budget.spent() is None and not self._waiting:
            for subsearch in self._subsearches:
                self._take_best(subsearch)
            open_subsearches = [subsearch for subsearch in self._subsearches if subsearch.num_ready]
            if not open_subsearches:
                return
            self._ask_subsearch(min(open_subsearches, key=lambda subsearch: subsearch.num_asked))

    def _ask_subsearch(self, subsearch: Subsearch) -> bool:
        """Ask for a trial of a subsearch; whether there is one."""
        trial = subsearch.next_trial(self._ledger.next_number_sampled, self._generation)
        self._notes += [f"search.warm_start: {line}" for line in subsearch.take_lines()]
        if trial is None:
            self._exhaust(
                subsearch,
                f"every configuration of its space was tried after {subsearch.num_asked} of {subsearch.budget} trials;"
                " its search ends here",
            )
            return False
        self._enter(self._ledger.create(trial), self._generation)
        self._waiting.append(trial.number)
        return True

    def _enter(self, trial: FrozenTrial, generation: int) -> None:
        entry = self._ledger.enter(trial, generation)
        for promoted_in in entry.promotions:
            entry.subsearch.note_promotion(promoted_in)
        self._entries[trial.number] = entry

    def _exhaust(self, subsearch: Subsearch, why: str) -> None:
        subsearch.is_exhausted = True
        names = [other.name for other in self._subsearches if other.is_exhausted]
        self.study.set_user_attr("exhausted", names)
        self._notes.append(f"{subsearch.name}: {why}")

    def _settle_all(self) -> None:
        """Let the sampler and the early stopping see the generation, all of which has ended."""
        for number in sorted(self._entries):
            entry = self._entries[number]
            if entry.trial.state.is_finished() and entry.trial.state != TrialState.FAIL:
                self._learn(entry.curve)
            self._settle(number)

    def _settle_if_alone(self, number: int) -> None:
        """Let the sampler see a trial's end at once where there are no generations."""
        if not self._in_generations:
            self._settle(number)

    def _settle(self, number: int) -> None:
        """Let the sampler see a trial's end, or the rung that it has reached."""
        entry = self._entries.pop(number)
        self._at_rest.discard(number)
        if self._paused.has_come(entry):
            self._paused.add(entry)
            return
        entry.subsearch.settle(entry.trial, entry.turn)
        if entry.trial.state == TrialState.FAIL:
            self._paused.forget(entry)
        elif entry.trial.state == TrialState.PRUNED:
            self._paused.note_stopped(entry)

    def _is_spent(self) -> bool:
        """True if no further generation may begin."""
        return self._budget.spent() is not None or not any(
            subsearch.num_left for subsearch in self._subsearches
        )

    @property
    def _num_to_ask(self) -> int:
        """Number of search trials still to be requested."""
        if self._budget.spent() is None:
            return sum(subsearch.num_left for subsearch in self._subsearches)
        if not self._in_generations or self._generation < 0:
            return 0
        return sum(map(self._num_missing, self._subsearches))

    def pass_time(self) -> None:
        """Count the time since the last call towards the budgets; to be called often while trials run."""
        if not self._budget.is_limited:
            return
        running = sum(a.status == Status.RUNNING and a.number is not None for a in self.assignments.values())
        was_spent = self._budget.spent()
        self._budget.pass_time(running)
        if self._is_search_over:
            return
        spent = self._budget.spent()
        if spent and not was_spent:
            what = "generation" if self._in_generations else "trial"
            self._notes.append(f"search.{spent} is spent; no further {what} is asked for")
        if spent != was_spent or self._budget.wall - self._spent_noted >= TIME_NOTED_S:
            self._spent_noted = self._budget.wall
            self.study.set_user_attr("spent", [self._budget.wall, self._budget.device])

    def take_notes(self) -> list[str]:
        """Lines for people about the search's decisions since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def idle_places(self, num_at_once: int) -> str | None:
        """A line for people if a generation has fewer trials than could run at once."""
        search, num_families = self.spec.file.search, len(self.spec.families)
        num_together = sum(subsearch.width for subsearch in self._subsearches)
        size = min(math.ceil(num_at_once / num_families), search.trials_per_family)
        if not self._in_generations or self._is_search_over or search.generation_size >= size:
            return None
        return (
            f"{num_at_once} trials could run at once, but a generation of the search has {num_together},"
            f" at most {search.generation_size} of each family: raise search.generation_size to {size}, or set"
            " search.deterministic: false"
        )

    # What has come of it

    def best_configs(self) -> dict[str, TrialConfig]:
        """Each family's best finished configuration by the objective; families with none are left out."""
        return self._ledger.best_configs()

    def winner(self) -> str | None:
        """The family whose best configuration has the highest objective on the validation classes."""
        return self._ledger.winner()

    def best(self) -> tuple[float, str] | None:
        """The best objective so far and the label of its trial."""
        return self._ledger.best()

    def ranked(self) -> list[str]:
        """The families by their best configurations, the winner first."""
        return self._ledger.ranked()

    def competitors(self) -> Competitors:
        """The configurations that the verdict judges."""
        return self._verdicts.competitors(self.best_configs())

    def pairs(self) -> list[Pair]:
        """The pairs that the verdict compares."""
        return self.plan.chosen(self.competitors().pairs(self.ranked()), self.winner())

    def counts(self) -> dict[str, dict[str, int]]:
        """Counts of each family's search trials by how they ended."""
        return self._ledger.counts()

    def best_numbers(self) -> dict[str, int]:
        """The number of each family's best finished trial."""
        return self._ledger.best_numbers()

    def failure_reasons(self) -> list[str]:
        """Reasons for which search trials failed, oldest first."""
        return self._ledger.failure_reasons()

    def verdict_configs(self) -> list[TrialConfig]:
        """Verdict trials still to run: each family's best, and its embedder untrained, with every seed.

        Where seeds are added until the verdict is decided, those up to the next look.
        """
        return self._verdicts.left(self.best_configs(), self.ranked())

    @property
    def _is_search_over(self) -> bool:
        return not self._ledger.num_open and not self._num_to_ask

    @property
    def left(self) -> Trials:
        """Trials that have not ended yet; at most, while the search runs or seeds may be added."""
        if self._is_search_over:
            left = self._verdicts.left_at_most(self.best_configs(), self.ranked())
            num_untrained = sum(map(is_untrained, left))
            return Trials(0, len(left) - num_untrained, num_untrained)
        num_seeds = self.plan.most_seeds
        num_untrained = num_seeds * self.spec.num_untrained
        return Trials(
            self._ledger.num_open + self._num_to_ask, num_seeds * len(self.spec.families), num_untrained
        )

    @property
    def num_planned_of(self) -> dict[str, int]:
        """Trials of each subsearch, ended and still to come: fewer than its budget where it has ended before."""
        return {each.name: each.num_asked + each.num_left for each in self._subsearches}

    @property
    def num_left(self) -> int:
        """Trials that have not ended yet, verdict trials included; at most, while the search runs."""
        return sum(self.left)

    @property
    def num_ended(self) -> int:
        """Number of trials of the search and the verdict that have ended, where seeds are added in steps."""
        searched = sum(sum(own.values()) for own in self.counts().values())
        return searched + len(self._verdicts.ended)

    @property
    def verdict_at_most(self) -> tuple[int, int]:
        """Numbers of verdict trials where seeds are added in steps, ended and possible ones: all, and of untrained."""
        left, ended = self.left, self._verdicts.ended
        num_untrained = left.untrained + sum(map(is_untrained, ended))
        return left.verdict + left.untrained + len(ended), num_untrained

    @property
    def is_over(self) -> bool:
        """True if every trial has ended, so that there is a verdict."""
        return self.num_left == 0
