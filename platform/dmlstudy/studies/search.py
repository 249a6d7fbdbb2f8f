"""What runs next: the search over all families, then the verdict on each family's best.

The Optuna study in the storage is the truth about the search: every step is reported to it, a trial stopped
early is PRUNED there, a failed one is FAIL with its reason, and this object rebuilds itself from it. It reads
the storage once, when it is made; from then on it keeps an index of its own, so that the time for a trial does
not grow with their number.

Trials are asked for in generations: ``search.generation_size`` of each family, one by default. A generation
starts when the one before has ended, and both the sampler and the early stopping look at ended generations
only. So neither the number of trials at once nor the order in which they finish changes what is tried or what
it scores. A budget in time is looked at between generations.

What the study's user attributes keep: ``spent`` (seconds of the time budgets, over all sittings), ``exhausted``
(lanes without a configuration that was not tried) and ``warm_start`` (points of earlier studies, as they were
when this one began). A trial's: ``family``, ``generation``, ``reason`` and where it comes from (``warm_start``).
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import optuna
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial, TrialState
from ray.tune.search import Searcher

from dmlstudy.records import EmbedderConfig, TrialConfig, untrained_name
from dmlstudy.studies import early_stopping, samplers
from dmlstudy.studies.budget import Clock, TimeBudget, seconds_of
from dmlstudy.studies.early_stopping import Curve
from dmlstudy.studies.lanes import ALL, Lane, lanes_of
from dmlstudy.studies.spec import StudySpec
from dmlstudy.studies.warm_start import MOST_PER_FAMILY, earlier_best

SHIPPED_SEED = 1
"""The verdict seed whose embedder is kept: the first, never the one that did best on the test classes."""

ENDED_KEPT = 100
"""Assignments that are remembered after their trial has ended."""

TIME_NOTED_S = 5.0
"""How much of a time budget a killed driver may forget."""

STATUS_OF = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
Status = Literal["running", "finished", "pruned", "failed", "interrupted"]


@dataclass
class Assignment:
    """One trial as the study knows it: what it is, what it was given, how it stands."""

    label: str
    config: TrialConfig
    number: int | None = None
    status: Status = "running"
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)


def metrics_of(result: Mapping[str, Any] | None) -> dict[str, float]:
    """The trial's own metrics in a result as Tune hands it on, flattened."""
    return {
        key.removeprefix("metrics/"): float(value)
        for key, value in (result or {}).items()
        if key.startswith("metrics/")
    }


def _rank(trial: FrozenTrial) -> tuple[float, int]:
    """The better trial has the higher rank; of equals the first."""
    return trial.values[0], -trial.number


def _generation_of(trial: FrozenTrial, num_families: int) -> int:
    return int(trial.user_attrs.get("generation", trial.number // num_families))


@dataclass
class _Asked:
    """What is known of a trial of the search until its generation has ended."""

    trial: FrozenTrial
    lane: Lane
    turn: int
    config: TrialConfig


class StudySearch(Searcher):
    """The searcher Tune asks: generation by generation of the search, then the verdict trials.

    ``finished_verdicts`` are the (family, seed) pairs that an earlier sitting has already judged; ``clock`` is
    that of the time budgets. Raises SpecError for a sampler that is not installed, and for a warm start from a
    study that is not there.
    """

    def __init__(
        self,
        spec: StudySpec,
        storage: optuna.storages.BaseStorage,
        finished_verdicts: set[tuple[str, int]],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        search, resources = spec.file.search, spec.file.resources
        super().__init__(metric=spec.file.protocol.objective, mode="max")
        samplers.check_installed(search.sampler)
        warm_points = earlier_best(spec, storage) if search.warm_start else {}
        self.spec = spec
        self.assignments: dict[str, Assignment] = {}
        """Every trial that runs, and those that ended last, by Tune's id."""
        self._ended: deque[str] = deque()
        self._hopeless: set[str] = set()
        self._notes: list[str] = []
        self._judged = set(finished_verdicts)
        self._verdicts: list[TrialConfig] | None = None
        self._budget = TimeBudget(
            seconds_of(search.wall_time) if search.wall_time else None,
            search.device_hours * 3600 if search.device_hours else None,
            resources.workers * (resources.gpus_per_worker or resources.cpus_per_worker),
            clock=clock,
        )
        self._spent_noted = 0.0
        self._stopping = early_stopping.RULES[search.scheduler](search.reduction_factor)
        self._lanes = lanes_of(spec)
        self._trials: list[FrozenTrial] = []
        self._asked: dict[int, _Asked] = {}
        self._waiting: list[int] = []
        self._best: dict[str, FrozenTrial] = {}
        self._counts = {family: dict.fromkeys(STATUS_OF.values(), 0) for family in spec.families}
        self._generation = -1
        self._num_open = 0
        self.study = optuna.create_study(
            study_name=spec.name,
            storage=storage,
            sampler=RandomSampler(seed=search.seed),
            pruner=optuna.pruners.NopPruner(),
            directions=["maximize", "minimize"] if search.second_objective else ["maximize"],
            load_if_exists=True,
        )
        self._storage: optuna.storages.BaseStorage = self.study._storage
        self._read_storage(warm_points)

    def _read_storage(self, warm_points: Mapping[str, Any]) -> None:
        """Take in what earlier sittings have left in the study."""
        attrs = self.study.user_attrs
        if self.spec.file.search.warm_start and "warm_start" not in attrs:
            self.study.set_user_attr("warm_start", warm_points)
            attrs = self.study.user_attrs
        self._budget.wall, self._budget.device = attrs.get("spent", (0.0, 0.0))
        most = min(MOST_PER_FAMILY, (self.spec.file.search.trials_per_family - 1) // 2)
        for lane in self._lanes:
            lane.add_to_queue(attrs.get("warm_start", {}), most)
            lane.is_exhausted = lane.name in attrs.get("exhausted", [])
        for frozen in self.study.get_trials(deepcopy=False):
            trial = frozen
            if frozen.state == TrialState.WAITING:  # enqueued by others
                waiting = self.study.ask()
                self._lane_of(frozen).sample(waiting)
                trial = self._storage.get_trial(waiting._trial_id)
            if not trial.state.is_finished():  # it goes on, so it is ours to change
                trial = copy.deepcopy(trial)
            generation = _generation_of(trial, len(self.spec.families))
            if generation > self._generation:
                self._settle()
                self._generation = generation
            config = self.spec.trial_config(*self._lane_of(trial).read(trial.params))
            self._note(trial, self._lane_of(trial), config)
            if trial.state.is_finished():
                self._end(trial)
            else:  # what an earlier sitting left unfinished is handed out again, under its old number
                self._waiting.append(trial.number)

    # What Tune calls

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        self._pass_time()
        if not self._num_open:
            self._ask()
        if self._waiting:
            asked = self._asked[self._waiting.pop(0)]
            number, config = asked.trial.number, asked.config
            self.assignments[trial_id] = Assignment(f"{config.family} #{number}", config, number)
            return {"trial": config.model_dump(mode="json")}
        if self._num_open:
            return None
        if self._verdicts is None:
            self._verdicts = self.verdict_configs()
        if not self._verdicts:
            return str(Searcher.FINISHED)
        config = self._verdicts.pop(0)
        self.assignments[trial_id] = Assignment(f"{config.family} verdict seed {config.seed}", config)
        return {"trial": config.model_dump(mode="json")}

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Nothing: the scheduler, which sees each result first, tells it to ``observe``."""

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        assignment = self.assignments[trial_id]
        if assignment.status != "running":
            return
        self._pass_time()
        if error:
            assignment.status = "failed"
            assignment.reason = assignment.reason or "no reason given"
        elif trial_id in self._hopeless:  # Tune says of these that they are done
            assignment.status = "pruned"
        elif result and result.get("failure"):
            assignment.status, assignment.reason = "failed", str(result["failure"])
        elif result and result.get("done"):
            assignment.metrics = metrics_of(result)
            score = assignment.metrics.get(self.metric, math.nan)
            if assignment.number is None or math.isfinite(score):
                assignment.status = "finished"
            else:
                assignment.status, assignment.reason = "failed", f"{self.metric} is {score}"
        else:
            assignment.status = "interrupted"  # it stays RUNNING in the storage, to be handed out again
        if assignment.number is None and assignment.status in ("finished", "failed"):
            self._judged.add((assignment.config.family, assignment.config.seed))

    def commit(self, trial_id: str) -> None:
        """Tell Optuna how the trial ended: the last thing that is written of a trial.

        A driver killed before this runs the trial again, and ends with the same; so nothing that Optuna
        knows to be over is missing anywhere else.
        """
        assignment = self.assignments[trial_id]
        if assignment.status in ("running", "interrupted"):
            return
        self._forget(trial_id)
        if assignment.number is None:
            return
        trial = self._trials[assignment.number]
        if trial.state.is_finished():
            return
        values: list[float] | None = None
        if assignment.status == "finished":
            state, values = TrialState.COMPLETE, [assignment.metrics[self.metric]]
            if self.spec.file.search.second_objective:
                values.append(float(assignment.config.embedder.dim))
        elif assignment.status == "pruned":  # as Optuna does, its last score is its value
            state = TrialState.PRUNED
            last = trial.intermediate_values[trial.last_step] if trial.last_step is not None else math.nan
            values = [last] if math.isfinite(last) and len(self.study.directions) == 1 else None
        else:
            state = TrialState.FAIL
        if assignment.reason:
            self._storage.set_trial_user_attr(trial._trial_id, "reason", assignment.reason)
            trial.user_attrs["reason"] = assignment.reason
        self._storage.set_trial_state_values(trial._trial_id, state, values)
        trial.state, trial.values = state, values
        self._end(trial)

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
        """Note a trial's report, for Optuna too; whether the trial should be stopped."""
        self._pass_time()
        assignment = self.assignments[trial_id]
        assignment.curve.append(metrics)
        assignment.metrics = metrics
        if assignment.number is None:
            return False
        asked = self._asked[assignment.number]
        trial, step, score = asked.trial, int(metrics["step"]), metrics[self.metric]
        if step not in trial.intermediate_values:
            self._storage.set_trial_intermediate_value(trial._trial_id, step, score)
            trial.intermediate_values[step] = score
        if self._stopping.stops(self._curve(asked), step):
            self._hopeless.add(trial_id)
            whose = "its family's" if asked.lane.name != ALL else "the search's"
            assignment.reason = f"stopped after epoch {step}: {self._stopping.WHY.format(whose=whose)}"
        return trial_id in self._hopeless

    def _curve(self, asked: _Asked) -> Curve:
        config, scores = asked.config, asked.trial.intermediate_values
        return Curve(
            group=asked.lane.name,
            turn=asked.turn,
            epochs=config.training.epochs,
            num_folds=config.num_folds,
            scores={step: score for step, score in scores.items() if math.isfinite(score)},
        )

    # The search

    def _ask(self) -> None:
        """Ask for what an interruption left of the generation, or for the next one if there is budget for it."""
        if self._generation >= 0:
            self._ask_generation()
        if self._waiting or self._is_spent():
            return
        self._settle()
        self._generation += 1
        self._ask_generation()

    def _ask_generation(self) -> None:
        for lane in self._lanes:
            for _ in range(lane.num_missing(self._generation)):
                found = lane.next_trial(len(self._trials), self._generation, self.study.directions)
                if found is None:
                    self._exhaust(lane)
                    break
                trial, config = found
                trial._trial_id = self._storage.create_new_trial(self.study._study_id, trial)
                trial.number = len(self._trials)
                self._note(trial, lane, config)
                self._waiting.append(trial.number)

    def _note(self, trial: FrozenTrial, lane: Lane, config: TrialConfig) -> None:
        """Take a trial into the index that the storage holds."""
        assert trial.number == len(self._trials)
        self._trials.append(trial)
        turn = lane.note(trial, config, self._generation)
        self._asked[trial.number] = _Asked(trial, lane, turn, config)
        self._num_open += 1

    def _exhaust(self, lane: Lane) -> None:
        lane.is_exhausted = True
        names = [other.name for other in self._lanes if other.is_exhausted]
        self.study.set_user_attr("exhausted", names)
        self._notes.append(
            f"{lane.name}: every configuration of its space was tried after {lane.num_asked} of"
            f" {lane.budget} trials; its search ends here"
        )

    def _settle(self) -> None:
        """Let the sampler and the early stopping see the generation, all of which has ended."""
        for number in sorted(self._asked):
            asked = self._asked.pop(number)
            if asked.trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                asked.lane.settled.append(asked.trial)
                self._stopping.learn(self._curve(asked))
        for lane in self._lanes:
            lane.running.clear()

    def _family_of(self, trial: FrozenTrial) -> str:
        """The family a trial belongs to; where it does not say so, families take turns."""
        names = list(self.spec.families)
        return str(trial.user_attrs.get("family", names[trial.number % len(names)]))

    def _lane_of(self, trial: FrozenTrial) -> Lane:
        return next(lane for lane in self._lanes if lane.name in (self._family_of(trial), ALL))

    def _is_spent(self) -> bool:
        """Whether no further generation may begin."""
        return self._budget.spent() is not None or not any(
            lane.num_missing(self._generation + 1) for lane in self._lanes
        )

    @property
    def _num_to_ask(self) -> int:
        """How many trials of the search are still to be asked for."""
        if self._budget.spent() is not None:
            return sum(lane.num_missing(self._generation) for lane in self._lanes if self._generation >= 0)
        return sum(lane.budget - lane.num_asked for lane in self._lanes if not lane.is_exhausted)

    def _pass_time(self) -> None:
        running = (
            sum(a.status == "running" and a.number is not None for a in self.assignments.values())
            if self._budget.is_limited
            else 0
        )
        was_spent = self._budget.spent()
        self._budget.pass_time(running)
        if not self._budget.is_limited or self._is_search_over:
            return
        spent = self._budget.spent()
        if spent and not was_spent:
            self._notes.append(f"search.{spent} is spent; no further generation is asked for")
        if spent != was_spent or self._budget.wall - self._spent_noted >= TIME_NOTED_S:
            self._spent_noted = self._budget.wall
            self.study.set_user_attr("spent", [self._budget.wall, self._budget.device])

    def take_notes(self) -> list[str]:
        """Lines for people about what the search has decided since it was last asked."""
        notes, self._notes = self._notes, []
        return notes

    # The verdict

    def _end(self, trial: FrozenTrial) -> None:
        """Take into account how a trial ended."""
        self._num_open -= 1
        family = self._family_of(trial)
        self._counts[family][STATUS_OF[trial.state]] += 1
        if trial.state != TrialState.COMPLETE:
            return
        best = self._best.get(family)
        if best is None or _rank(trial) > _rank(best):
            self._best[family] = trial

    def best_configs(self) -> dict[str, TrialConfig]:
        """Each family's best finished configuration by the objective; families with none are left out."""
        return {
            name: self.spec.trial_config(*self._lane_of(self._best[name]).read(self._best[name].params))
            for name in self.spec.families
            if name in self._best
        }

    def _best_family(self) -> str | None:
        return max(self._best, key=lambda name: _rank(self._best[name]), default=None)

    def winner(self) -> str | None:
        """The family whose best configuration has the highest objective on the validation classes."""
        return self._best_family()

    def best(self) -> tuple[float, str] | None:
        """The best objective so far and the label of its trial."""
        family = self._best_family()
        if family is None:
            return None
        return self._best[family].values[0], f"{family} #{self._best[family].number}"

    def counts(self) -> dict[str, dict[str, int]]:
        """How many trials of each family's search ended how."""
        return {family: dict(own) for family, own in self._counts.items()}

    def best_numbers(self) -> dict[str, int]:
        """The number of each family's best finished trial."""
        return {family: trial.number for family, trial in self._best.items()}

    def verdict_configs(self) -> list[TrialConfig]:
        """What is still to be retrained: each family's best, and its embedder untrained, with every seed.

        Families whose bests have the same embedder share an untrained one.
        """
        best = self.best_configs()
        first_with: dict[EmbedderConfig, TrialConfig] = {}
        for config in best.values():
            first_with.setdefault(config.embedder, config)
        untrained = [
            config.model_copy(
                update={
                    "family": untrained_name(config.family if len(first_with) > 1 else None),
                    "training": config.training.model_copy(update={"epochs": 0}),
                }
            )
            for config in first_with.values()
        ]
        seeds = range(1, self.spec.file.protocol.verdict_seeds + 1)
        return [
            config.model_copy(
                update={"phase": "verdict", "seed": seed, "keep_embedder": seed == SHIPPED_SEED}
            )
            for config in [*untrained, *best.values()]
            for seed in seeds
            if (config.family, seed) not in self._judged
        ]

    @property
    def _is_search_over(self) -> bool:
        return not self._num_open and not self._num_to_ask

    @property
    def num_left(self) -> int:
        """Trials that have not ended yet, verdict trials included; at most, while the search goes on."""
        if self._is_search_over:
            return len(self.verdict_configs())
        return self._num_open + self._num_to_ask + self.spec.num_verdict_trials

    @property
    def is_over(self) -> bool:
        """Whether every trial has ended, so that there is a verdict."""
        return self.num_left == 0

    def failure_reasons(self) -> list[str]:
        """Why trials of the search failed, oldest first."""
        return [str(t.user_attrs.get("reason", "")) for t in self._trials if t.state == TrialState.FAIL]

    # Tune would pickle the searcher; the storage holds the state instead.

    def save(self, checkpoint_path: str) -> None:
        with open(checkpoint_path, "w", encoding="utf-8") as file:
            file.write("the state of this search is in its Optuna storage\n")

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a search is rebuilt from its Optuna storage")

    def __getstate__(self) -> dict[str, Any]:
        return {}
