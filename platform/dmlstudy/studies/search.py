"""What runs next: the search over all families with equal budget, then the verdict on each family's best.

The Optuna study in the storage is the truth about the search: every step is reported to it, a trial stopped
early is PRUNED there, a failed one is FAIL with its reason, and this object rebuilds itself from it.

Trials are asked for in generations of one trial per family. A generation starts when the one before has
ended, and both the sampler and the early stopping look at ended generations only. So neither the number of
trials at once nor the order in which they finish changes what is tried or what it scores.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from dmlstudy.records import Scalar, TrialConfig
from dmlstudy.studies.spec import UNTRAINED, Family, StudySpec

SHIPPED_SEED = 1
"""The verdict seed whose embedder is kept: the first, never the one that did best on the test classes."""

FINISHED_STATES = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
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


def _score(frozen: FrozenTrial) -> float:
    assert frozen.value is not None
    return frozen.value


class StudySearch(OptunaSearch):
    """The searcher Tune asks: families in turn, TPE within each family, then the verdict trials.

    ``finished_verdicts`` are the (family, seed) pairs that an earlier sitting has already judged.
    """

    def __init__(
        self,
        spec: StudySpec,
        storage: optuna.storages.BaseStorage,
        finished_verdicts: set[tuple[str, int]],
    ) -> None:
        self.spec = spec
        self.assignments: dict[str, Assignment] = {}
        self._finished_verdicts = finished_verdicts
        self._verdicts: list[TrialConfig] | None = None
        self._values: dict[str, Scalar | None] = {}
        super().__init__(
            space=self._define_by_run,
            metric=spec.file.protocol.objective,
            mode="max",
            sampler=RandomSampler(seed=spec.file.search.seed),
            study_name=spec.name,
            storage=storage,
        )
        self.study: optuna.Study = cast(Any, self._ot_study)
        self._hopeless: set[str] = set()
        # What an earlier sitting left unfinished is handed out again, under its old number.
        self._waiting: list[Trial] = [
            Trial(self.study, frozen._trial_id) for frozen in self._frozen(TrialState.RUNNING)
        ]
        self._waiting += [self.study.ask() for _ in self._frozen(TrialState.WAITING)]

    # What Tune calls

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        if not self._waiting and self._num_asked < self.spec.num_search_trials:
            if self._num_finished < self._num_asked:
                return None
            self._ask_generation()
        if self._waiting:
            trial = self._waiting.pop(0)
            self._ot_trials[trial_id] = trial
            super().suggest(trial_id)
            family = self._family_of(trial.number)
            config = self.spec.trial_config(family, self._values)
            self.assignments[trial_id] = Assignment(f"{family.name} #{trial.number}", config, trial.number)
            return {"trial": config.model_dump(mode="json")}
        if self._num_finished < self.spec.num_search_trials:
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
        if error:
            assignment.status = "failed"
            assignment.reason = assignment.reason or "no reason given"
        elif trial_id in self._hopeless:  # Tune says of these that they are done
            assignment.status = "pruned"
            assignment.reason = (
                f"stopped after epoch {len(assignment.curve)}: not among its family's best there"
            )
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

    def commit(self, trial_id: str) -> None:
        """Tell Optuna how the trial ended: the last thing that is written of a trial.

        A driver killed before this runs the trial again, and ends with the same; so nothing that Optuna
        knows to be over is missing anywhere else.
        """
        assignment = self.assignments[trial_id]
        if assignment.number is None or assignment.status in ("running", "interrupted"):
            return
        trial = self._ot_trials[trial_id]
        if assignment.reason:
            trial.set_user_attr("reason", assignment.reason)
        if assignment.status == "finished":
            self.study.tell(trial, assignment.metrics[self.metric])
        elif assignment.status == "pruned":
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, state=TrialState.FAIL)

    # While a trial runs

    def observe(self, trial_id: str, metrics: dict[str, float]) -> bool:
        """Note a trial's report, for Optuna too; whether the trial should be stopped."""
        assignment = self.assignments[trial_id]
        assignment.curve.append(metrics)
        assignment.metrics = metrics
        if assignment.number is None:
            return False
        trial, step = self._ot_trials[trial_id], int(metrics["step"])
        if step not in trial.storage.get_trial(trial._trial_id).intermediate_values:
            trial.report(metrics[self.metric], step)
        if self._is_hopeless(assignment, step, metrics[self.metric]):
            self._hopeless.add(trial_id)
        return trial_id in self._hopeless

    def _is_hopeless(self, assignment: Assignment, step: int, score: float) -> bool:
        """Successive halving against ended generations of the same family.

        At rungs r, r*eta, r*eta^2, ... epochs (r = the epochs of one fold divided by eta, at least 1) a trial
        is stopped when its score is below the best 1/eta of the scores that ended trials of its family had
        there. It takes eta such trials to judge.
        """
        search, number = self.spec.file.search, assignment.number
        assert number is not None
        eta = search.reduction_factor
        rung = max(1, assignment.config.training.epochs // eta)
        while rung < step:
            rung *= eta
        if search.scheduler == "none" or rung != step:
            return False
        peers = sorted(
            frozen.intermediate_values[step]
            for frozen in self._frozen(TrialState.COMPLETE, TrialState.PRUNED)
            if self._is_earlier(frozen, number) and step in frozen.intermediate_values
        )
        return len(peers) >= eta and score < peers[-(len(peers) // eta)]

    def _is_earlier(self, frozen: FrozenTrial, number: int) -> bool:
        size = len(self.spec.families)
        return frozen.number // size < number // size and self._family_of(frozen.number) is self._family_of(
            number
        )

    # The search

    def _define_by_run(self, trial: optuna.Trial) -> None:
        self._values = self._family_of(trial.number).sample(trial)

    def _ask_generation(self) -> None:
        first = self._num_asked
        size = len(self.spec.families)
        for number in range(first, (first // size + 1) * size):
            family = self._family_of(number)
            point = (
                family.default_point() if number < len(self.spec.families) else self._sampled(family, number)
            )
            self.study.enqueue_trial(point, user_attrs={"family": family.name})
            trial = self.study.ask()
            family.sample(trial)
            self._waiting.append(trial)

    def _sampled(self, family: Family, number: int) -> dict[str, Any]:
        """The sampler's next point for a family, given that family's ended trials only."""
        scratch = optuna.create_study(direction="maximize", sampler=self._sampler_for(number))
        scratch.add_trials(
            [
                frozen
                for frozen in self._frozen(TrialState.COMPLETE, TrialState.PRUNED)
                if self._is_earlier(frozen, number)
            ]
        )
        trial = scratch.ask()
        family.sample(trial)
        return dict(trial.params)

    def _sampler_for(self, number: int) -> BaseSampler:
        """A sampler whose randomness depends on the study's seed and the trial's number only."""
        search = self.spec.file.search
        seed = int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])
        if search.sampler == "random":
            return RandomSampler(seed=seed)
        startup = min(10, max(2, search.trials_per_family // 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # of `group`, without which TPE samples
            # parameters under a choice independently of each other
            return TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=startup)

    def _family_of(self, number: int) -> Family:
        """Families take turns, so their budgets are equal."""
        return list(self.spec.families.values())[number % len(self.spec.families)]

    def _frozen(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states)

    @property
    def _num_asked(self) -> int:
        return len(self.study.get_trials(deepcopy=False))

    @property
    def _num_finished(self) -> int:
        return len(self._frozen(*FINISHED_STATES))

    # The verdict

    def best_configs(self) -> dict[str, TrialConfig]:
        """Each family's best finished configuration by the objective; families with none are left out."""
        best: dict[str, FrozenTrial] = {}
        for frozen in self._frozen(TrialState.COMPLETE):
            name = self._family_of(frozen.number).name
            if name not in best or _score(frozen) > _score(best[name]):
                best[name] = frozen
        return {
            name: self.spec.trial_config(
                self.spec.families[name],
                self.spec.families[name].sample(optuna.trial.FixedTrial(best[name].params)),
            )
            for name in self.spec.families
            if name in best
        }

    def winner(self) -> str | None:
        """The family whose best configuration has the highest objective on the validation classes."""
        frozen = self._frozen(TrialState.COMPLETE)
        return self._family_of(max(frozen, key=_score).number).name if frozen else None

    def verdict_configs(self) -> list[TrialConfig]:
        """What is still to be retrained: the untrained embedder and each family's best, with every seed."""
        best = self.best_configs()
        if not best:
            return []
        template = next(iter(best.values()))
        untrained = template.model_copy(
            update={"family": UNTRAINED, "training": template.training.model_copy(update={"epochs": 0})}
        )
        seeds = range(1, self.spec.file.protocol.verdict_seeds + 1)
        return [
            config.model_copy(
                update={"phase": "verdict", "seed": seed, "keep_embedder": seed == SHIPPED_SEED}
            )
            for config in [untrained, *best.values()]
            for seed in seeds
            if (config.family, seed) not in self._finished_verdicts
        ]

    @property
    def num_left(self) -> int:
        """Trials that have not ended yet, verdict trials included."""
        search_left = self.spec.num_search_trials - self._num_finished
        if search_left:
            return search_left + self.spec.num_verdict_trials
        return len(self._verdicts_left())

    @property
    def is_over(self) -> bool:
        """Whether every trial has ended, so that there is a verdict."""
        return self.num_left == 0

    def _verdicts_left(self) -> list[TrialConfig]:
        ended = {
            (a.config.family, a.config.seed)
            for a in self.assignments.values()
            if a.number is None and a.status in ("finished", "failed")
        }
        return [config for config in self.verdict_configs() if (config.family, config.seed) not in ended]

    def failure_reasons(self) -> list[str]:
        """Why trials of the search failed, oldest first."""
        return [str(frozen.user_attrs.get("reason", "")) for frozen in self._frozen(TrialState.FAIL)]

    def best(self) -> tuple[float, str] | None:
        """The best objective so far and the label of its trial."""
        frozen = self._frozen(TrialState.COMPLETE)
        if not frozen:
            return None
        top = max(frozen, key=_score)
        return _score(top), f"{self._family_of(top.number).name} #{top.number}"

    # Tune would pickle the searcher; the storage holds the state instead.

    def save(self, checkpoint_path: str) -> None:
        with open(checkpoint_path, "w", encoding="utf-8") as file:
            file.write("the state of this search is in its Optuna storage\n")

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a search is rebuilt from its Optuna storage")

    def __getstate__(self) -> dict[str, Any]:
        return {}
