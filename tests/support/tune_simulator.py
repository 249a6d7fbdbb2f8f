"""A small simulator that plays Tune, trial by trial and epoch by epoch, and the studies it plays."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import optuna
from ray.tune.search import Searcher

from dmlstudy.engine.tune_adapter import TuneSearch, metrics_of
from dmlstudy.records import TrialConfig
from dmlstudy.search.storage import open_storage
from dmlstudy.search.study_search import Assignment, StudySearch
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.store import Store
from dmlstudy.trials import Status

optuna.logging.set_verbosity(optuna.logging.WARNING)

Score = Callable[[TrialConfig, int], float]
"""What a trial scores after an epoch; an exception is a failure."""

EPOCHS, FOLDS = 4, 2
STEPS = EPOCHS * FOLDS


def study(**changes: Any) -> StudySpec:
    override = {"loss.negative_margin": {"float": [0.3, 1.5], "default": 0.6}, "batch.classes": "all"}
    override |= {"batch.images_per_class": 4, "training.head_lr_mult": 1}
    raw: dict[str, Any] = {
        "name": "simulated",
        "data": {"name": "digits"},
        "training": {"epochs": EPOCHS},
        "families": {name: {"space": "contrastive", "override": override} for name in ("red", "blue")},
        "search": {
            "trials_per_family": 8,
            "sampler": "tpe",
            "scheduler": "halving",
            "reduction_factor": 2,
            "seed": 5,
        },
        "protocol": {"num_folds": FOLDS, "verdict_seeds": 2},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            raw[section] = {**raw[section], key: value}
        else:
            raw[section] = value
    return study_file.parse(raw)


def hill(config: TrialConfig, step: int) -> float:
    """Best at margin 1.1 and lr 1e-5; learning curves of different families cross."""
    margin = float(config.loss.params["negative_margin"])
    quality = 0.9 - (margin - 1.1) ** 2 - 0.02 * math.log10(config.training.lr / 1e-5) ** 2
    return quality * (1 - math.exp(-step / (2 if config.family == "red" else 4)))


HILL: dict[str, Any] = {
    "space": "contrastive",
    "override": {
        "loss.negative_margin": {"float": [0.0, 1.5], "default": 0.0},
        "training.lr": {"float": [1.0e-6, 1.0], "log": True, "default": 1.0},
        "training.head_lr_mult": 1,
        "batch.classes": "all",
        "batch.images_per_class": 4,
    },
}
"""A family whose default lies far from the top of ``hill``."""


class ActorLost(Exception):
    """The actor of a trial, and its workers with it, is gone."""


class Killed(BaseException):
    """The driver dies."""


class Tune:
    """Does with a search as Tune would: up to ``at_once`` trials, which advance in an order of their own.

    A trial that goes on makes its earlier reports again. The driver dies before the so-many-th call of a method of the
    search, as in ``dies_before=("commit", 3)``, or of ``record``, which comes before it; ``run`` ends then.
    Pauses are recorded then, too, and known to the next session on the storage (``in_memory``).
    """

    def __init__(
        self,
        search: StudySearch,
        score: Score = hill,
        at_once: int = 1,
        seed: int = 0,
        *,
        dies_before: tuple[str, int] = ("", 0),
        final: Mapping[str, float] | None = None,
        num_steps_of_trial: int = STEPS,
        record: Callable[[Assignment, list[float]], object] = lambda *_: None,
    ) -> None:
        self.search = search
        self.adapter = TuneSearch(search)
        self.score = score
        self.at_once = at_once
        self.order = random.Random(seed)
        self.paused = pauses_in(search.study._storage, search.spec)
        self.dies_before, self.calls_left = dies_before
        self.final = final or {}
        self.num_steps_of_trial = num_steps_of_trial
        self.record = record
        self.running: dict[str, tuple[TrialConfig, int]] = {}
        self.started: list[tuple[int | None, TrialConfig]] = []
        self.num_steps = 0
        self.is_over = False

    def run(self, num_steps: int | None = None) -> Tune:
        """Play until the search is over, or for this many epochs of any trial."""
        try:
            while not self.is_over and (num_steps is None or self.num_steps < num_steps):
                self._fill()
                if not self.running:
                    assert self.is_over, "the search waits for a trial, but none is running"
                    break
                self._advance(self.order.choice(sorted(self.running)))
        except Killed:
            pass
        return self

    def _calls(self, method: str) -> None:
        if method == self.dies_before:
            self.calls_left -= 1
            if not self.calls_left:
                raise Killed

    def _fill(self) -> None:
        while len(self.running) < self.at_once:
            trial_id = f"t{len(self.started)}"
            answer = self.adapter.suggest(trial_id)
            if answer == Searcher.FINISHED:
                self.is_over = not self.running
                return
            if answer is None:
                return
            assert isinstance(answer, Mapping)
            config = TrialConfig.model_validate(answer["trial"])
            assert self.search.assignments[trial_id].config == config
            number = self.search.assignments[trial_id].number
            self.started.append((number, config))
            self.paused.discard(-1 if number is None else number)
            self.running[trial_id] = (config, 0)

    def _advance(self, trial_id: str) -> None:
        config, step = self.running[trial_id]
        self.num_steps += 1
        is_verdict = config.phase == "verdict"
        num_steps = config.training.epochs if is_verdict else self.num_steps_of_trial
        name = "test_map_at_r" if is_verdict else "map_at_r"
        try:
            if step == num_steps:
                final = {name: self.score(config, step), **self.final}
                self._end(
                    trial_id, {f"metrics/{key}": value for key, value in final.items()} | {"done": True}
                )
                return
            score = self.score(config, step + 1)
        except ActorLost as error:
            self.search.assignments[trial_id].reason = str(error)
            del self.running[trial_id]
            self.adapter.on_trial_complete(trial_id, None, error=True)
            self.search.commit(trial_id)
            return
        except Exception as error:
            self._end(trial_id, {"failure": str(error), "done": True})
            return
        self.running[trial_id] = (config, step + 1)
        self._calls("observe")
        metrics = {"step": step + 1.0} | ({"train_loss": score} if is_verdict else {name: score})
        result = {f"metrics/{key}": value for key, value in metrics.items()} | {"done": False}
        self.adapter.on_trial_result(trial_id, result)
        if self.search.observe(trial_id, metrics_of(result)):
            self._end(trial_id, result | {"done": True})
        elif step + 1 == self.search.assignments[trial_id].pause_after:
            self._end(trial_id, {"done": True, "paused": True})

    def _end(self, trial_id: str, result: dict[str, Any]) -> None:
        del self.running[trial_id]
        self.adapter.on_trial_complete(trial_id, result)
        self.adapter.on_trial_complete(trial_id, result)  # Tune may say so twice
        assignment = self.search.assignments[trial_id]
        self._calls("record")
        self.record(assignment, self.search.values_of(assignment))
        if assignment.number is not None and assignment.status == Status.PAUSED:
            self.paused.add(assignment.number)
        self._calls("commit")
        self.search.commit(trial_id)


def in_memory(
    found: StudySpec,
    verdicts: set[tuple[str, int]] | None = None,
    storage: optuna.storages.BaseStorage | None = None,
    **more: Any,
) -> StudySearch:
    storage = storage or optuna.storages.InMemoryStorage()
    _reorder(storage)
    return StudySearch(found, storage, verdicts or set(), paused=pauses_in(storage, found), **more)


def _reorder(storage: optuna.storages.BaseStorage) -> None:
    """Let an earlier session's trials have their parameters in another order, as a database may give them."""
    for about in storage.get_all_studies():
        for trial in storage.get_all_trials(about._study_id, deepcopy=False):
            trial.params = dict(reversed(trial.params.items()))
            trial.distributions = dict(reversed(trial.distributions.items()))


RECORDED: WeakKeyDictionary[optuna.storages.BaseStorage, dict[str, set[int]]] = WeakKeyDictionary()


def pauses_in(storage: optuna.storages.BaseStorage, found: StudySpec) -> set[int]:
    """The numbers of a study's trials whose pause was recorded: it plays the runs of the study."""
    return RECORDED.setdefault(storage, {}).setdefault(found.name, set())


def on_disk(
    found: StudySpec, folder: Path, verdicts: set[tuple[str, int]] | None = None, **more: Any
) -> StudySearch:
    storage = open_storage(Store(folder))
    return StudySearch(found, storage, verdicts or set(), **more)


def by_number(search: StudySearch) -> list[tuple[int, str, dict[str, Any], dict[int, float]]]:
    """What the storage knows of each trial of the search."""
    return [(t.number, t.state.name, t.params, t.intermediate_values) for t in search.study.trials]


def known(search: StudySearch) -> list[Any]:
    """All that the storage knows of each trial of the search."""
    return [
        (t.number, t.state.name, t.params, t.values, t.intermediate_values, t.user_attrs)
        for t in search.study.trials
    ]
