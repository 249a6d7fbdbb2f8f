"""A search whose driver dies, and whose trials go on from their checkpoints, is the search it would have been."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState
from support.tune_simulator import EPOCHS, FOLDS, STEPS, Tune, by_number, in_memory, known, pauses_in, study

from dmlstudy.records import RecordedEnd, TrialConfig
from dmlstudy.search import storage as databases
from dmlstudy.search.ledger import commit_recorded
from dmlstudy.search.samplers import EndedTrials
from dmlstudy.search.storage import open_storage
from dmlstudy.search.study_search import Assignment
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.store import Store

SEED = 0
"""With it every sampler meets trials that fail and trials that are stopped."""


def choosy(config: TrialConfig, step: int) -> float:
    """Scores over losses with parameters of their own; some trials fail, and slow ones cross fast ones."""
    if config.phase == "search" and step == 3 and zlib.crc32(repr(config.training.lr).encode()) % 3 == 0:
        raise RuntimeError("loss is nan")
    pace = 2 + 3 * (config.loss.name == "multi_similarity")
    quality = 0.9 - 0.1 * abs(math.log10(config.training.lr) + 4.5)
    return quality * (1 - math.exp(-step / pace)) - 0.01 * len(config.loss.params)


def choices(sampler: str, scheduler: str, **search: Any) -> StudySpec:
    more: dict[str, Any] = {}
    if sampler == "nsga2":
        search |= {"second_objective": "embedding_dim"}
        more = {"embedder": {"dim": {"int": [4, 64], "default": 32}, "width": 4}}
    settings = {
        "trials_per_family": 6 if sampler == "gp" else 12,
        "reduction_factor": 2,
        "generation_size": 2,
        "fold_test": 0.3 if scheduler == "none" and sampler != "nsga2" else 0.0,
    }
    return study(
        families={"red": {"space": "graph_consistency"}},
        batch={"classes": "all"},
        search=settings | {"sampler": sampler, "scheduler": scheduler, "seed": SEED} | search,
        **more,
    )


DEATHS = [("commit", 1), ("observe", 7), ("commit", 2), ("observe", 4), ("observe", 11), ("commit", 3)] * 3


COMBINATIONS = [
    (name, rule) for name in ("tpe", "cma", "qmc", "random") for rule in ("halving", "asha", "median")
]
COMBINATIONS += [("gp", "halving"), ("gp", "asha"), ("nsga2", "none"), ("random", "none")]


@pytest.mark.parametrize(
    ("sampler", "scheduler", "remembered"),
    [(*both, EndedTrials.MOST) for both in COMBINATIONS]
    + [(*both, 2) for both in COMBINATIONS[::2] + COMBINATIONS[-1:]],
)
def test_deaths_checkpoints_and_failures_change_nothing(
    sampler: str, scheduler: str, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndedTrials, "MOST", remembered)
    found = choices(sampler, scheduler)
    unbroken = Tune(in_memory(found), choosy).run().search
    states = [trial.state for trial in unbroken.study.trials]
    assert len(states) == found.file.search.trials_per_family
    assert TrialState.FAIL in states
    assert TrialState.PRUNED in states or scheduler == "none"
    at_once = Tune(in_memory(found), choosy, at_once=2, seed=1).run().search
    assert known(at_once) == known(unbroken)
    for knows_pauses in (True, False):  # without them a trial at its rung goes there again
        storage = InMemoryStorage()
        for session, death in enumerate(DEATHS):
            if not knows_pauses:
                pauses_in(storage, found).clear()
            Tune(in_memory(found, storage=storage), choosy, at_once=2, seed=session, dies_before=death).run()
        search = in_memory(found, storage=storage)
        Tune(search, choosy).run()
        assert known(search) == known(unbroken)
        assert search.counts() == unbroken.counts()
        assert search.best() == unbroken.best()
        assert search.best_configs() == unbroken.best_configs()
        assert search.failure_reasons() == unbroken.failure_reasons()
        assert search.is_over


@pytest.mark.parametrize("families", ["equal", "adaptive"])
def test_what_a_database_gives_in_pages_goes_on_as_it_was(
    families: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "PAGE", 3)
    found = choices("tpe", "asha", families=families)
    unbroken = Tune(in_memory(found), choosy).run().search
    storage = open_storage(Store(tmp_path))
    for session, death in enumerate(DEATHS[:9]):
        Tune(in_memory(found, storage=storage), choosy, at_once=2, seed=session, dies_before=death).run()
    search = in_memory(found, storage=storage)
    assert search._entries
    Tune(search, choosy).run()
    assert known(search) == known(unbroken)
    assert search.best_configs() == unbroken.best_configs()


def test_what_was_to_be_stopped_when_the_driver_died_goes_on_and_is_stopped_as_it_was() -> None:
    """So its run has all of its reports, of which the storage holds the objective alone."""
    unbroken = Tune(in_memory(study())).run().search
    first = next(t for t in unbroken.study.trials if t.state == TrialState.PRUNED)
    storage = InMemoryStorage()
    num_ended = first.number + 1  # one at a time, so they end by number
    killed = Tune(in_memory(study(), storage=storage), dies_before=("commit", num_ended)).run()
    assert killed.search.study.trials[first.number].state == TrialState.RUNNING
    search = in_memory(study(), storage=storage)
    ended: list[Assignment] = []
    tune = Tune(search, record=lambda assignment, _: ended.append(assignment)).run()
    assert (tune.started[0][0], ended[0].number) == (first.number, first.number)
    assert ended[0].reason == first.user_attrs["reason"]
    assert [report["map_at_r"] for report in ended[0].curve] == list(first.intermediate_values.values())
    assert by_number(search) == by_number(unbroken)


def test_a_report_that_is_known_is_judged_as_it_was_and_leaves_one_point_of_the_curve() -> None:
    unbroken = Tune(in_memory(study())).run().search
    stopped = next(t for t in unbroken.study.trials if t.state == TrialState.PRUNED)
    search = in_memory(study())
    for number in range(stopped.number):
        search.suggest(f"t{number}")
        for step, score in unbroken.study.trials[number].intermediate_values.items():
            assert not search.observe(f"t{number}", {"step": float(step), "map_at_r": score})
        search.end(f"t{number}", {"map_at_r": score})
        search.commit(f"t{number}")
    assert search.suggest("t") is not None
    reports = [{"step": float(s), "map_at_r": v} for s, v in stopped.intermediate_values.items()]
    decisions = [search.observe("t", report) for report in reports]
    assert decisions == [False] * (len(reports) - 1) + [True]
    again = [search.observe("t", {**report, "map_at_r": 0.99}) for report in reports]
    assert again == [True] * len(reports)  # it stays stopped, whatever is said later
    assert [report["step"] for report in search.assignments["t"].curve] == [r["step"] for r in reports]
    assert search.study.trials[stopped.number].intermediate_values == stopped.intermediate_values


def test_a_trial_that_goes_on_has_a_whole_curve() -> None:
    found = study(search__scheduler="none")
    storage = InMemoryStorage()
    Tune(in_memory(found, storage=storage)).run(STEPS - 2)
    tune = Tune(in_memory(found, storage=storage))
    tune.run(1)
    first = tune.search.assignments["t0"]
    assert [report["step"] for report in first.curve] == [float(s) for s in range(1, STEPS - 1)]
    assert first.metrics == first.curve[-1]
    tune.run()
    assert [report["step"] for report in first.curve] == [float(s) for s in range(1, EPOCHS * FOLDS + 1)]


# Recorded, but not committed


class Runs:
    """What the runs of a study hold, as ``StudyTracker`` tells it."""

    def __init__(self, *, has_values: bool = True) -> None:
        self.has_values = has_values
        self.ends: dict[int, list[RecordedEnd]] = {}
        self.superseded: list[str] = []

    def record(self, assignment: Assignment, values: list[float]) -> None:
        if assignment.number is not None and assignment.status != "interrupted":
            kept = json.loads(json.dumps(values)) if self.has_values else []
            run_id = f"{assignment.number}-{len(self.of(assignment.number))}"
            end = RecordedEnd(run_id, assignment.status, assignment.reason, kept)
            self.ends.setdefault(assignment.number, []).append(end)

    def of(self, number: int) -> list[RecordedEnd]:
        return self.ends.get(number, [])

    def recorded_ends(self, number: int) -> list[RecordedEnd]:
        return [end for end in self.of(number) if end.run_id not in self.superseded]

    def supersede(self, run_id: str) -> None:
        self.superseded.append(run_id)


@pytest.mark.parametrize("has_values", [True, False], ids=["whole", "of an older version"])
@pytest.mark.parametrize(("sampler", "scheduler"), [("tpe", "halving"), ("nsga2", "none")])
def test_a_trial_that_was_recorded_but_not_committed_is_not_run_again(
    sampler: str, scheduler: str, has_values: bool
) -> None:
    found = choices(sampler, scheduler)
    unbroken = Tune(in_memory(found), choosy).run().search
    storage, runs, started = InMemoryStorage(), Runs(has_values=has_values), list[int]()
    for session in range(10):
        commit_recorded(storage, found.name, runs)
        search = in_memory(found, storage=storage)
        death = ("commit", 1 + session % 2) if session < 9 else ("", 0)
        tune = Tune(search, choosy, seed=session, dies_before=death, record=runs.record).run()
        started += [number for number, _ in tune.started if number is not None]
    assert search.is_over
    assert known(search) == known(unbroken)
    assert search.best_configs() == unbroken.best_configs()
    counted = {number: len(runs.recorded_ends(number)) for number in runs.ends}
    assert set(counted.values()) == {1}, "no trial counts twice"
    if has_values:
        assert runs.superseded == []
        assert sorted(started) == sorted(set(started)), "no trial is begun again"
    else:
        assert runs.superseded != []


# What others put into the study


def test_points_enqueued_by_others_are_run_or_fail_with_a_reason() -> None:
    storage = InMemoryStorage()
    tune = Tune(in_memory(study(), storage=storage)).run(20)
    theirs = tune.search.study
    good = {"red/loss.negative_margin": 1.25}
    theirs.enqueue_trial(good)  # its learning rate is the default
    theirs.enqueue_trial({"red/loss.negative_margin": 9.0, "red/training.lr": 1e-5})
    theirs.enqueue_trial({"blue/training.lr": 1e-5, "blue/loss.temperature": 1.0})
    theirs.enqueue_trial({"lr": 1e-5}, user_attrs={"family": "blue"})
    theirs.enqueue_trial({})
    enqueued = {trial.number for trial in theirs.get_trials(states=(TrialState.WAITING,))}
    tune.run(40)
    ours = [t for t in theirs.trials if t.number not in enqueued]
    for trial in ours:  # what is written of a trial is its own
        if trial.state == TrialState.COMPLETE:
            assert trial.value == trial.intermediate_values[STEPS]
    assert {number for number, _ in tune.started} <= {trial.number for trial in ours}
    search = in_memory(study(), storage=storage)
    failed = [theirs.trials[number] for number in sorted(enqueued)][1:]
    assert [trial.state for trial in failed] == [TrialState.FAIL] * 4
    reasons = [trial.user_attrs["reason"] for trial in failed]
    for reason, word in zip(
        reasons, ("9.0 is outside", "loss.temperature", "blue and lr", "no family"), strict=True
    ):
        assert reason.startswith("was enqueued, but ")
        assert word in reason
    Tune(search, at_once=2).run()
    added = theirs.trials[min(enqueued)]
    assert added.state in (TrialState.COMPLETE, TrialState.PRUNED)
    assert added.params == {**good, "red/training.lr": 1e-5}
    assert (
        sum(map(sum, (own.values() for own in search.counts().values()))) == 16
    )  # of the budget, like the others
    assert search.is_over
    assert in_memory(study(), storage=storage).best_numbers() == search.best_numbers()


def test_dashboards_are_told_what_the_objectives_are() -> None:
    storage = InMemoryStorage()
    search = in_memory(choices("nsga2", "none"), storage=storage)
    assert search.study.metric_names == ["map_at_r", "embedding_dim"]
    about = search.study.user_attrs
    assert (about["data"], about["families"], about["sampler"]) == ("digits", "red", "nsga2")
    assert about["objective"] == "map_at_r and embedding_dim"
    assert in_memory(choices("nsga2", "none"), storage=storage).study.user_attrs == about
