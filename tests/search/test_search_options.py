"""Ways to search: samplers, early stopping, budgets, families, repeats and warm starts; each keeps the laws."""

from __future__ import annotations

import importlib.util
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from support.tune_simulator import EPOCHS, HILL, STEPS, Tune, by_number, hill, in_memory, on_disk, study

from dmlstudy.records import TrialConfig
from dmlstudy.search import samplers
from dmlstudy.search.samplers import EndedTrials, OutsideSpaceError, Point
from dmlstudy.search.study_search import TIME_NOTED_S, StudySearch
from dmlstudy.search.waiting import WaitingTrial
from dmlstudy.spec.study_file import SpecError, StudySpec

SAMPLERS = ["tpe", "gp", "cma", "qmc", "random", "nsga2"]
TWO = {"sampler": "nsga2", "second_objective": "embedding_dim", "scheduler": "none"}
TINY = {"loss.negative_margin": {"choice": [0.3, 0.6, 1.1]}, "training.lr": 1e-5}


def options(**search: Any) -> StudySpec:
    """A study of two families that searches in another way."""
    if search.get("sampler") == "nsga2":
        search = TWO | search
    dims = {"dim": {"int": [4, 64], "default": 32}} if "second_objective" in search else {"dim": 8}
    return study(
        search={"trials_per_family": 6, "scheduler": "halving", "reduction_factor": 2, "seed": 5} | search,
        embedder={**dims, "width": 4},
    )


def tiny(trials: int, **search: Any) -> StudySpec:
    """One family with three configurations and one with as many as you like."""
    few = {"batch.classes": "all", "batch.images_per_class": 4, "training.head_lr_mult": 1}
    families = {
        "few": {"space": "contrastive", "override": few | TINY},
        "many": {"space": "contrastive", "override": few | {"training.lr": 1e-5}},
    }
    return study(
        families=families,
        search={"trials_per_family": trials, "scheduler": "halving", "reduction_factor": 2, **search},
    )


def searched(tune: Tune) -> list[TrialConfig]:
    return [config for number, config in tune.started if number is not None]


LAWFUL = [
    {"sampler": "gp", "scheduler": "none", "trials_per_family": 4},
    {"sampler": "cma", "trials_per_family": 12},
    {"sampler": "qmc"},
    {"sampler": "random"},
    {"sampler": "nsga2", "trials_per_family": 10},
    {"scheduler": "asha", "trials_per_family": 9},
    {"scheduler": "asha", "trials_per_family": 9, "generation_size": 3, "sampler": "random"},
    {"scheduler": "asha", "trials_per_family": 8, "families": "adaptive"},
    {
        "scheduler": "asha",
        "trials_per_family": 6,
        "families": "adaptive",
        "sampler": "random",
        "generation_size": 2,
    },
    {"scheduler": "hyperband", "trials_per_family": 8},
    {"scheduler": "median", "trials_per_family": 8},
    {"fold_test": 0.3, "scheduler": "none", "trials_per_family": 8},
    {"fold_test": 0.3, "scheduler": "asha", "trials_per_family": 12, "sampler": "random"},
    {"families": "adaptive", "trials_per_family": 8},
    {"generation_size": 3, "trials_per_family": 7},
    {"families": "adaptive", "sampler": "random", "generation_size": 2, "trials_per_family": 6},
]


@pytest.mark.parametrize("search", LAWFUL, ids=lambda search: " ".join(f"{k}={v}" for k, v in search.items()))
def test_neither_concurrency_nor_order_nor_interruption_changes_it(search: dict[str, Any]) -> None:
    found = options(**search)
    unbroken = Tune(in_memory(found)).run()
    expected = by_number(unbroken.search)
    assert len(expected) == 2 * found.file.search.trials_per_family
    assert all(state in ("COMPLETE", "PRUNED") for _, state, _, _ in expected)
    tune = Tune(in_memory(found), at_once=4, seed=1).run()
    assert by_number(tune.search) == expected
    assert tune.search.winner() == unbroken.search.winner()
    storage = InMemoryStorage()
    for session in range(4):  # killed without a word
        Tune(in_memory(found, storage=storage), at_once=2, seed=session).run(17 + session)
    tune = Tune(in_memory(found, storage=storage), at_once=2, seed=9).run()
    assert by_number(tune.search) == expected
    assert tune.search.best_configs() == unbroken.search.best_configs()
    assert tune.search.is_over


@pytest.mark.parametrize("scheduler", ["asha", "hyperband"])
@pytest.mark.parametrize("families", ["equal", "adaptive"])
def test_who_is_promoted_does_not_depend_on_when_the_driver_was_killed(scheduler: str, families: str) -> None:
    """Trials that were given up, and those that a fold test has stopped, keep their standing among their peers."""
    search = {"scheduler": scheduler, "families": families, "sampler": "random", "generation_size": 2}
    for seed, fold_test in ((0, 0.0), (1, 0.3), (3, 0.0), (5, 0.3)):
        found = options(**search, trials_per_family=9, seed=seed, fold_test=fold_test)
        expected = by_number(Tune(in_memory(found)).run().search)
        for num_steps in range(seed + 1, 120, 9):
            storage = InMemoryStorage()
            Tune(in_memory(found, storage=storage), at_once=2, seed=1).run(num_steps)
            tune = Tune(in_memory(found, storage=storage), at_once=2, seed=9).run()
            assert by_number(tune.search) == expected, (seed, num_steps)


@pytest.mark.parametrize("num_asked", [1, 4, 5])
def test_a_kill_while_a_generation_is_asked_for(num_asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was asked for before the kill, the generation is the same in the end."""
    found = options(generation_size=3, trials_per_family=6)
    expected = by_number(Tune(in_memory(found)).run().search)

    class KilledError(Exception):
        pass

    storage = InMemoryStorage()
    search = in_memory(found, storage=storage)
    create, left = search.study._storage.create_new_trial, [num_asked]

    def create_or_die(study_id: int, template_trial: FrozenTrial | None = None) -> int:
        if not left[0]:
            raise KilledError
        left[0] -= 1
        return create(study_id, template_trial)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "create_new_trial", create_or_die)
        with pytest.raises(KilledError):
            search.suggest("t0")
    assert len(search.study.trials) == num_asked
    tune = Tune(in_memory(found, storage=storage), at_once=3).run()
    assert by_number(tune.search) == expected


@pytest.mark.parametrize(
    ("sampler", "scheduler"),
    [(name, "none") for name in SAMPLERS] + [(name, "halving") for name in ("tpe", "cma", "qmc", "random")],
)
@pytest.mark.parametrize("space", ["graph_consistency", "pair_weighting", "triplet"])
def test_every_sampler_stays_inside_a_space_with_choices(sampler: str, scheduler: str, space: str) -> None:
    search = {"trials_per_family": 14, "sampler": sampler, "scheduler": scheduler}
    search |= {"reduction_factor": 2, "seed": 4}
    if sampler == "nsga2":
        search |= TWO
    found = study(families={"red": {"space": space}}, batch={"classes": "all"}, search=search)

    def score(config: TrialConfig, step: int) -> float:
        return -abs(math.log10(config.training.lr) + 4) + 0.1 * step

    tune = Tune(in_memory(found), score, at_once=2).run()
    trials = tune.search.study.trials
    assert len(trials) == 14
    for trial in trials:
        _, point = Point.read(trial.params, found.families["red"].sample)
        assert point.distributions == trial.distributions
    fingerprints = [config.fingerprint() for config in searched(tune)]
    assert len(set(fingerprints)) == 14


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cma"])
def test_a_model_finds_a_hill_that_chance_does_not(sampler: str) -> None:

    def score(config: TrialConfig, step: int) -> float:
        margin = float(config.loss.params["negative_margin"])
        return -((margin - 1.1) ** 2) - (math.log10(config.training.lr / 1e-3) / 3) ** 2

    def regret(name: str, seed: int) -> float:
        num = 40 if sampler == "cma" else 20
        search = {"trials_per_family": num, "scheduler": "none", "sampler": name, "seed": seed}
        found = study(
            families={"red": HILL}, search=search, training={"epochs": 1}, protocol={"num_folds": 1}
        )
        best = Tune(in_memory(found), score).run().search.best()
        assert best is not None
        return -best[0]

    model, chance = (sum(regret(name, seed) for seed in range(2)) for name in (sampler, "random"))
    assert model < 0.8 * chance


def test_samplers_without_a_rule_for_stopped_trials_see_what_they_might_have_scored() -> None:
    """Two completed trials have gained 0.4 and 0.6 since step 2, and 0.2 since step 4."""

    def trial(state: TrialState, scores: dict[int, float]) -> FrozenTrial:
        value = next(reversed(scores.values()))
        value = value if math.isfinite(value) else None
        return optuna.trial.create_trial(state=state, value=value, intermediate_values=scores)

    done, cut = TrialState.COMPLETE, TrialState.PRUNED
    completed = [trial(done, {2: 0.4, 4: 0.6, 8: 0.8}), trial(done, {2: 0.1, 4: 0.5, 8: 0.7})]
    stopped = [trial(cut, {2: 0.1}), trial(cut, {2: 0.1, 4: 0.2}), trial(cut, {2: 0.35})]
    unknown = [trial(cut, {3: 0.1}), trial(cut, {2: math.nan})]
    seen = samplers.as_finished([*completed, *stopped, *unknown])
    assert {t.state for t in seen} == {done}
    assert [t.values[0] for t in seen] == pytest.approx([0.8, 0.7, 0.6, 0.4, 0.8])
    assert [t.state for t in stopped] == [cut] * 3
    assert samplers.as_finished(stopped) == []


@pytest.mark.parametrize("sampler", ["gp", "cma"])
def test_a_model_is_asked_beside_early_stopping_too(sampler: str) -> None:
    found = study(
        families={"red": {"space": "graph_consistency"}},
        batch={"classes": "all"},
        search={
            "sampler": sampler,
            "scheduler": "halving",
            "trials_per_family": 9 if sampler == "gp" else 18,
        },
    )

    def score(config: TrialConfig, step: int) -> float:
        return -abs(math.log10(config.training.lr) + 4) + 0.1 * step

    trials = Tune(in_memory(found), score).run().search.study.trials
    memory = [key for trial in trials for key in trial.system_attrs]
    if sampler == "gp":  # after three trials at random
        assert sum("relative_params:0" in key for key in memory) >= 5
        return
    generations = [trial.system_attrs["cma:generation"] for trial in trials]  # the default point counts, too
    assert generations == sorted(generations)
    assert generations[-1] >= 2


@pytest.mark.parametrize("num_objectives", [1, 2])
def test_a_sampler_looks_back_on_the_newest_the_best_and_the_front(
    num_objectives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndedTrials, "MOST", 7)
    draw = random.Random(3)
    ended = [
        create_trial(values=[round(draw.random(), 1), draw.random()][:num_objectives]) for _ in range(120)
    ]
    for number, trial in enumerate(ended):
        trial.number = number
        if number % 3 == 0:
            trial.state, trial.values = TrialState.PRUNED, None
            trial.intermediate_values = {step: draw.random() for step in range(draw.randrange(4))}
    completed = [trial for trial in ended if trial.state == TrialState.COMPLETE]
    expected = {trial.number for trial in ended[-7:]}
    expected |= {t.number for t in sorted(completed, key=lambda t: -t.values[0])[:7]}  # the sort is stable
    if num_objectives == 2:
        expected |= {t.number for t in sorted(completed, key=lambda t: t.values[1])[:7]}
        expected |= {
            t.number
            for t in completed
            if not any(
                o.values[0] >= t.values[0] and o.values[1] <= t.values[1] and o.values != t.values
                for o in completed
            )
        }
    for _ in range(3):
        memory = EndedTrials([StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE][:num_objectives])
        for trial in ended:
            if num_objectives == 1:
                waits = create_trial(state=TrialState.PRUNED, intermediate_values={1: 1.0, 5: draw.random()})
                memory.pause(trial.number + 7, WaitingTrial(waits, step=5, number=trial.number))
                assert memory.forget(trial.number + 7) == trial.number  # it has ended
            memory.add(trial)
        assert [trial.number for trial in memory.trials()] == sorted(expected)
        draw.shuffle(ended)


def test_pruned_trials_are_remembered_by_how_far_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EndedTrials, "MOST", 2)
    memory = EndedTrials([StudyDirection.MAXIMIZE])
    scores: list[dict[int, float]] = [{1: 0.3, 4: 0.2}, {4: 0.1}, {1: 0.9}, {}, {1: math.nan}, {2: 0.0}]
    for number, values in enumerate(scores):
        trial = create_trial(state=TrialState.PRUNED, intermediate_values=values)
        trial.number = number
        memory.add(trial)
    assert [trial.number for trial in memory.trials()] == [0, 1, 4, 5]


def test_trials_that_wait_are_remembered_among_the_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EndedTrials, "MOST", 3)
    draw = random.Random(1)
    memory, alone = EndedTrials([StudyDirection.MAXIMIZE]), EndedTrials([StudyDirection.MAXIMIZE])
    for number in range(60):
        trial = create_trial(state=TrialState.PRUNED, intermediate_values={1: draw.random()})
        trial.number = number
        alone.add(trial)
        if draw.random() < 0.5:
            trial.values = list(trial.intermediate_values.values())
            memory.pause(200 - number, WaitingTrial(trial, step=1, number=number))
        else:
            memory.add(trial)
        assert memory.trials() == alone.trials()


def test_qmc_fills_the_space_more_evenly_than_chance() -> None:
    def largest_gap(sampler: str) -> float:
        override = {"training.lr": 1e-5, "loss.negative_margin": {"float": [0.0, 1.0], "default": 0.0}}
        found = study(
            families={"red": {"space": "contrastive", "override": {**override, "batch.classes": "all"}}},
            search={"trials_per_family": 33, "sampler": sampler, "scheduler": "none"},
        )
        tune = Tune(in_memory(found)).run()
        points = sorted(float(config.loss.params["negative_margin"]) for config in searched(tune))
        return max(b - a for a, b in zip([0.0, *points], [*points, 1.0], strict=True))

    assert largest_gap("qmc") < 2 / 32 < largest_gap("random")


def test_cma_without_its_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "cmaes" else find(name, *rest)
    )
    with pytest.raises(SpecError, match=r"^search\.sampler: cma needs the package cmaes; pip install cmaes$"):
        in_memory(options(sampler="cma"))


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"wall_time": "soon"}, r"^search\.wall_time: expected a time such as 90s, 30min"),
        ({"device_hours": 0}, r"^search\.device_hours: input should be greater than 0"),
        ({"scheduler": "pasha"}, r"^search\.scheduler: input should be 'asha', 'halving', 'hyperband'"),
        ({"sampler": "nsga2", "second_objective": None}, r"^search\.sampler: nsga2 and a second objective"),
        (
            {"sampler": "tpe", "second_objective": "embedding_dim"},
            r"^search\.second_objective: needs sampler nsga2, not tpe",
        ),
        ({"sampler": "nsga2", "scheduler": "halving"}, r"^search\.scheduler: halving would stop small"),
        ({"families": "adaptive", "sampler": "gp"}, r"^search\.sampler: gp cannot model .*sampler: tpe, or"),
        ({"generation_size": 2, "deterministic": False}, r"^search\.generation_size: there are no gen"),
        ({"seed": -1}, r"^search\.seed: input should be greater than or equal to 0, got -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_with_a_search(search: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        options(**search)


# Early stopping in a search


def test_hyperband_pauses_by_bracket() -> None:
    """8 steps, r = 2, eta = 2: brackets with first rungs at 2, 4 and 8, where a trial has ended."""
    search = in_memory(options(scheduler="hyperband", trials_per_family=18, sampler="random"))
    Tune(search, at_once=2).run()
    stopped: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for family in ("red", "blue"):
        own = [trial for trial in search.study.trials if trial.user_attrs["family"] == family]
        for turn, trial in enumerate(own):
            if trial.state == TrialState.PRUNED:
                stopped[turn % 3].add(len(trial.intermediate_values))
    assert min(stopped[0]) == 2
    assert min(stopped[1]) >= 4
    assert stopped[2] == set()


def test_nobody_is_stopped_when_it_has_cost_all_it_can() -> None:
    """9 steps, r = 3, eta = 3: the last rung is the last step; the faster family is the worse one."""

    def score(config: TrialConfig, step: int) -> float:
        quality = 0.9 - (float(config.loss.params["negative_margin"]) - 1.1) ** 2
        return quality * (0.7 * (1 - math.exp(-step)) if config.family == "blue" else 1 - math.exp(-step / 5))

    for seed in range(4):
        search = {"trials_per_family": 12, "families": "adaptive", "seed": seed}
        found = study(search=search, training={"epochs": 9}, protocol={"num_folds": 1, "verdict_seeds": 1})
        tune = Tune(in_memory(found), score, num_steps_of_trial=9).run()
        whole = [trial for trial in tune.search.study.trials if len(trial.intermediate_values) == 9]
        assert {trial.state for trial in whole} == {TrialState.COMPLETE}
        for family, number in tune.search.best_numbers().items():
            own = [trial for trial in whole if trial.user_attrs["family"] == family]
            assert max(own, key=lambda trial: trial.intermediate_values[9]).number == number


@pytest.mark.parametrize("scheduler", ["halving", "asha", "hyperband", "median"])
def test_a_score_that_is_not_finite_stalls_nothing(scheduler: str) -> None:
    def score(config: TrialConfig, step: int) -> float:
        is_odd = config.phase == "search" and int(config.fingerprint(), 16) % 2
        return math.nan if is_odd and step in (2, 4) else hill(config, step)

    search = in_memory(options(scheduler=scheduler, trials_per_family=12, sampler="random"))
    tune = Tune(search, score, at_once=2).run()
    assert tune.search.is_over
    trials = search.study.trials
    assert any(math.isnan(score) for trial in trials for score in trial.intermediate_values.values())
    assert all(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)


def test_median_stops_some_and_not_the_best() -> None:
    search = in_memory(options(scheduler="median", trials_per_family=14, sampler="random"))
    Tune(search, at_once=2).run()
    states = [trial.state for trial in search.study.trials]
    assert TrialState.PRUNED in states[4:]
    assert set(states[:4]) == {TrialState.COMPLETE}
    free = in_memory(options(scheduler="none", trials_per_family=14, sampler="random"))
    Tune(free).run()
    assert search.best() == free.best()


def test_asha_promotes_late_bloomers_that_halving_has_stopped() -> None:
    """The best third of each rung goes on, whenever it came there; no trial runs on for lack of peers."""
    search = {"trials_per_family": 27, "reduction_factor": 3, "sampler": "random"}
    asha = Tune(in_memory(options(scheduler="asha", **search)), at_once=2).run().search
    for family in ("red", "blue"):
        own = [trial for trial in asha.study.trials if trial.user_attrs["family"] == family]
        at_first = sorted((t.intermediate_values[1] for t in own), reverse=True)
        went_on = [trial for trial in own if len(trial.intermediate_values) > 1]
        assert len(went_on) >= 9  # the best nine of all, and who was among the best third for a while
        assert {t.number for t in own if t.intermediate_values[1] >= at_first[8]} <= {
            t.number for t in went_on
        }
        whole = [trial for trial in own if trial.state == TrialState.COMPLETE]
        assert len(whole) >= len(went_on) // 3
        assert all(len(t.user_attrs["promotions"]) == 1 + (len(t.intermediate_values) > 3) for t in went_on)


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_family_of_few_trials_has_one_that_finishes(is_adaptive: bool) -> None:
    """Two trials of a family, of which a third is none: the best of each goes on to its end."""
    found = options(
        scheduler="asha",
        reduction_factor=3,
        trials_per_family=2,
        families="adaptive" if is_adaptive else "equal",
    )
    search = Tune(in_memory(found)).run().search
    finished = [trial for trial in search.study.trials if trial.state == TrialState.COMPLETE]
    assert Counter(trial.user_attrs["family"] for trial in finished) == {"red": 1, "blue": 1}
    assert search.is_over


# Budgets


class Clock:
    """A clock that goes on by a second with each look."""

    def __init__(self, start: float = 1000.0) -> None:
        self.now = start

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_a_spent_wall_time_ends_the_search_after_its_generation() -> None:
    found = options(wall_time="30s", trials_per_family=50, scheduler="none")
    tune = Tune(in_memory(found, clock=Clock()), at_once=2).run()
    trials = tune.search.study.trials
    assert 2 <= len(trials) < 10
    assert len(trials) % 2 == 0
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert sum(number is None for number, _ in tune.started) == 6  # the verdict follows
    assert tune.search.is_over
    assert tune.search.take_notes() == ["search.wall_time is spent; no further generation is asked for"]
    assert tune.search.take_notes() == []


def test_a_spent_budget_promotes_only_what_the_verdict_needs() -> None:
    """The best that waits of each family goes on to its end, and no further trial begins."""
    found = options(scheduler="asha", reduction_factor=3, trials_per_family=50, wall_time="30s")
    search = Tune(in_memory(found, clock=Clock())).run().search
    assert [own["finished"] for own in search.counts().values()] == [1, 1]
    assert len(search.study.trials) < 20
    assert search.is_over


def test_time_is_counted_over_sessions() -> None:
    storage = InMemoryStorage()
    found = options(wall_time="300s", trials_per_family=50, scheduler="none")
    clock = Clock()
    Tune(in_memory(found, storage=storage, clock=clock), at_once=2).run(60)
    spent = in_memory(found, storage=storage).study.user_attrs["spent"][0]
    assert 50 < spent <= 110
    clock.now += 1e6  # between sessions no time passes
    tune = Tune(in_memory(found, storage=storage, clock=clock), at_once=2).run()
    assert 10 < len(tune.search.study.trials) < 50
    assert tune.search.study.user_attrs["spent"][0] >= 300
    assert tune.search.is_over
    again = in_memory(
        found, {(c.family, c.seed) for n, c in tune.started if n is None}, storage=storage, clock=clock
    )
    assert again.is_over


def test_time_passes_where_nothing_reports() -> None:
    """Twelve sessions, each killed after 3,500 seconds of an epoch of an hour."""
    storage, now = InMemoryStorage(), [0.0]
    found = options(wall_time="10h", scheduler="none")
    for _ in range(12):
        search = in_memory(found, storage=storage, clock=lambda: now[0])
        search.suggest("t")
        for _ in range(3500):
            now[0] += 1.0
            search.pass_time()  # as the scheduler does, whenever Tune looks
    spent = search.study.user_attrs["spent"][0]
    assert spent >= 36000
    assert spent >= 12 * (3500 - TIME_NOTED_S)


def test_device_hours_count_what_runs_at_once() -> None:
    def num_trials(at_once: int, **resources: Any) -> int:
        found = study(
            search={"trials_per_family": 50, "device_hours": 60 / 3600, "scheduler": "none"},
            resources=resources,
        )
        search = in_memory(found, clock=Clock())
        Tune(search, at_once=at_once).run()
        assert search.is_over
        return len(search.study.trials)

    one = num_trials(1, workers=1)
    assert num_trials(1, workers=3) < one
    assert num_trials(2, workers=1) < one
    assert num_trials(1, workers=1, gpus_per_worker=0.25) > one


def test_a_budget_in_time_that_is_not_spent_changes_nothing() -> None:
    plain = Tune(in_memory(options())).run()
    timed = Tune(in_memory(options(wall_time="9d", device_hours=1000))).run()
    assert by_number(timed.search) == by_number(plain.search)


# Families


def test_an_adaptive_search_begins_with_the_defaults_and_goes_to_the_better_family() -> None:
    def score(config: TrialConfig, step: int) -> float:
        return hill(config, step) - (config.family == "blue")

    found = options(families="adaptive", trials_per_family=20, scheduler="none")
    tune = Tune(in_memory(found), score, at_once=2).run()
    families = [config.family for config in searched(tune)]
    assert len(families) == 40
    assert families[:2] == ["red", "blue"]
    assert families[20:].count("red") > 12
    for trial in tune.search.study.trials:
        assert trial.params["family"] == trial.user_attrs["family"]
    assert tune.search.winner() == "red"
    assert set(tune.search.best_configs()) == {"red", "blue"}
    assert [c.family for n, c in tune.started if n is None] == ["untrained"] * 2 + ["red"] * 2 + ["blue"] * 2


@pytest.mark.parametrize("search", [{}, {"sampler": "gp"}, {"sampler": "qmc"}, {"generation_size": 4}])
def test_equal_budgets(search: dict[str, Any]) -> None:
    tune = Tune(in_memory(options(**search)), at_once=3).run()
    families = [config.family for config in searched(tune)]
    assert families.count("red") == families.count("blue") == 6


def test_a_family_may_be_called_all() -> None:
    families = {name: {"space": "contrastive"} for name in ("all", "blue")}
    search = in_memory(study(families=families, batch={"classes": "all"}))
    Tune(search).run()
    assert set(search.best_configs()) == {"all", "blue"}
    reasons = [t.user_attrs["reason"] for t in search.study.trials if t.state == TrialState.PRUNED]
    assert all(reason.endswith("not among its family's best there") for reason in reasons)


# Without generations


@pytest.mark.parametrize(
    "search", [{}, {"scheduler": "median"}, {"sampler": "cma"}, {"families": "adaptive"}]
)
def test_without_generations_no_place_is_idle(search: dict[str, Any]) -> None:
    found = options(deterministic=False, trials_per_family=12, **search)
    storage = InMemoryStorage()
    for session in range(4):  # killed without a word
        tune = Tune(in_memory(found, storage=storage), at_once=7, seed=session)
        tune.run(20 + session)
        assert len(tune.running) in (6, 7)  # the one that ended last has left its place
    tune = Tune(in_memory(found, storage=storage), at_once=7, seed=9).run()
    trials = tune.search.study.trials
    assert len(trials) == 24
    assert {trial.state for trial in trials} == {TrialState.COMPLETE, TrialState.PRUNED}
    families = [trial.user_attrs["family"] for trial in trials]
    assert families.count("red") == 12 or "families" in search
    assert len({str(trial.params) for trial in trials}) == 24
    assert tune.search.is_over
    again = in_memory(found, storage=storage)
    assert (again.counts(), again.best()) == (tune.search.counts(), tune.search.best())


def test_without_generations_a_trial_is_measured_by_those_that_run() -> None:
    search = in_memory(options(deterministic=False, sampler="random"))
    for trial in range(6):  # three of each family
        search.suggest(f"t{trial}")
    for trial in (0, 2):
        assert not search.observe(f"t{trial}", {"step": 2.0, "map_at_r": 0.5})
    assert not search.observe("t1", {"step": 2.0, "map_at_r": 0.4})  # of the other family
    assert search.observe("t4", {"step": 2.0, "map_at_r": 0.4})
    assert search.observe("t4", {"step": 2.0, "map_at_r": 0.9})  # said again
    resumed = in_memory(search.spec, storage=search.study._storage)
    assert [resumed.suggest(f"t{trial}") is not None for trial in range(6)] == [True] * 6
    for trial in (0, 1, 2):
        assert not resumed.observe(f"t{trial}", {"step": 2.0, "map_at_r": 0.5})
    assert resumed.observe("t4", {"step": 2.0, "map_at_r": 0.4})


def test_without_generations_a_small_space_ends_and_so_does_a_budget() -> None:
    tune = Tune(in_memory(tiny(7, deterministic=False)), at_once=4).run()
    families = [config.family for config in searched(tune)]
    assert (families.count("few"), families.count("many")) == (3, 7)
    assert tune.search.is_over
    found = options(deterministic=False, wall_time="30s", trials_per_family=50, scheduler="none")
    tune = Tune(in_memory(found, clock=Clock()), at_once=2).run()
    assert 2 <= len(tune.search.study.trials) < 10
    assert tune.search.take_notes() == ["search.wall_time is spent; no further trial is asked for"]
    assert tune.search.is_over


def test_people_are_told_of_places_that_a_generation_leaves_idle() -> None:
    search = in_memory(options())
    assert search.idle_places(2) is None
    assert search.idle_places(7) == (
        "7 trials could run at once, but a generation of the search has 2, at most 1 of each family: raise"
        " search.generation_size to 4, or set search.deterministic: false"
    )
    assert "generation_size to 6" in str(search.idle_places(1000))  # trials of a family
    assert in_memory(options(generation_size=4)).idle_places(7) is None
    assert in_memory(options(deterministic=False)).idle_places(7) is None
    Tune(search, at_once=2).run()
    assert search.idle_places(7) is None


# Repeats


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cma", "qmc", "random"])
def test_no_configuration_is_run_twice_and_a_small_space_ends(sampler: str) -> None:
    tune = Tune(in_memory(tiny(7, sampler=sampler)), at_once=2).run()
    configs = searched(tune)
    assert len({config.fingerprint() for config in configs}) == len(configs)
    assert [config.family for config in configs].count("few") == 3
    assert [config.family for config in configs].count("many") == 7
    assert tune.search.is_over
    assert tune.search.take_notes() == [
        "few: every configuration of its space was tried after 3 of 7 trials; its search ends here"
    ]


def test_an_exhausted_space_stays_so_after_an_interruption() -> None:
    expected = by_number(Tune(in_memory(tiny(7))).run().search)
    storage = InMemoryStorage()
    for session in range(5):
        Tune(in_memory(tiny(7), storage=storage), at_once=2, seed=session).run(11)
    tune = Tune(in_memory(tiny(7), storage=storage), at_once=2).run()
    assert by_number(tune.search) == expected
    assert tune.search.is_over
    assert in_memory(tiny(7), storage=storage).num_left == 6  # its verdicts


def test_a_failed_configuration_is_not_tried_again() -> None:
    def score(config: TrialConfig, step: int) -> float:
        if config.family == "few" and config.phase == "search":
            raise RuntimeError("out of memory")
        return hill(config, step)

    tune = Tune(in_memory(tiny(7)), score).run()
    assert tune.search.failure_reasons() == ["out of memory"] * 3
    assert len({c.fingerprint() for c in searched(tune)}) == 10


def test_every_point_of_a_finite_space() -> None:
    family = tiny(3).families["few"]
    points = samplers.all_points(family.sample)
    assert points is not None
    assert [point["few/loss.negative_margin"] for point in points] == [0.3, 0.6, 1.1]
    assert samplers.all_points(family.sample, most=2) is None
    assert samplers.all_points(tiny(3).families["many"].sample) is None


def test_points_outside_a_space_are_refused() -> None:
    family = tiny(3).families["few"]
    good = family.default_point()
    Point.read(good, family.sample)
    for bad in ({}, good | {"few/loss.negative_margin": 0.4}, good | {"few/training.lr": 1e-5}):
        with pytest.raises(OutsideSpaceError):
            Point.read(bad, family.sample)


# Warm starts


def two_studies(storage: InMemoryStorage, warm_start: Any, **search: Any) -> tuple[StudySearch, StudySearch]:
    """An earlier study that is over, and one that begins in the same storage."""
    old = options(trials_per_family=8, sampler="random", scheduler="none")
    Tune(in_memory(study_named(old, "earlier"), storage=storage)).run()
    new = study_named(options(trials_per_family=8, warm_start=warm_start, **search), "later")
    return in_memory(study_named(old, "earlier"), storage=storage), in_memory(new, storage=storage)


def study_named(found: StudySpec, name: str) -> StudySpec:
    return StudySpec(found.file.model_copy(update={"name": name}), found.raw)


@pytest.mark.parametrize("warm_start", ["auto", ["earlier"]], ids=["auto", "by name"])
@pytest.mark.parametrize("families", ["equal", "adaptive"])
def test_the_best_of_an_earlier_study_come_right_after_the_defaults(warm_start: Any, families: str) -> None:
    storage = InMemoryStorage()
    old, new = two_studies(storage, warm_start, families=families)
    tune = Tune(new, at_once=2).run()
    for turn, family in enumerate(("red", "blue")):
        trials = [t for t in old.study.trials if t.number % 2 == turn]
        default = trials[0].params
        best = sorted(trials, key=lambda t: -t.values[0])
        best = [t for t in best if t.params != default][:3]
        own = [t for t in new.study.trials if t.user_attrs["family"] == family]
        assert [t.user_attrs.get("warm_start") for t in own[:4]] == [None] + [
            f"earlier #{t.number}" for t in best
        ]
        for mine, theirs in zip(own[1:4], best, strict=True):
            assert {k: v for k, v in mine.params.items() if k != "family"} == theirs.params
        assert not any("warm_start" in t.user_attrs for t in own[4:])
    configs = searched(tune)
    assert len({config.fingerprint() for config in configs}) == len(configs) == 16


def test_a_warm_start_is_what_it_was_when_the_study_began() -> None:
    storage = InMemoryStorage()
    _, new = two_studies(storage, "auto")
    Tune(new).run(20)
    third = study_named(options(trials_per_family=8, sampler="random", scheduler="none", seed=77), "between")
    Tune(in_memory(third, storage=storage)).run()
    Tune(in_memory(new.spec, storage=storage), at_once=2, seed=3).run()
    _, unbroken = two_studies(InMemoryStorage(), "auto")
    Tune(unbroken).run()
    assert by_number(new) == by_number(unbroken)


def test_points_that_are_not_in_the_present_space_are_left_out() -> None:
    storage = InMemoryStorage()
    old = study_named(options(trials_per_family=8, sampler="random", scheduler="none"), "earlier")
    Tune(in_memory(old, storage=storage)).run()
    override = {"loss.negative_margin": {"float": [0.5, 0.9], "default": 0.6}, "batch.classes": "all"}
    override |= {"batch.images_per_class": 4, "training.head_lr_mult": 1}
    new = study(
        name="narrower",
        families={"red": {"space": "contrastive", "override": override}},
        search={"trials_per_family": 20, "warm_start": ["earlier"]},
    )
    search = in_memory(new, storage=storage)
    Tune(search).run()
    warm = [t for t in search.study.trials if "warm_start" in t.user_attrs]
    assert warm
    assert all(0.5 <= t.params["red/loss.negative_margin"] <= 0.9 for t in search.study.trials)
    assert len(warm) <= 5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"training.weight_decay": {"float": [0, 1e-3], "default": 0}},
            "5 of them fitted to the space of now",
        ),
        ({"training.lr": 1e-4}, "5 of them fitted to the space of now"),
        ({"loss.negative_margin": {"float": [0.3, 0.9], "default": 0.6}}, "lie outside it and are left out"),
    ],
    ids=["a name more", "a name less", "narrower"],
)
def test_a_warm_start_from_another_space_takes_what_fits(change: dict[str, Any], told: str) -> None:
    def red(name: str, own: dict[str, Any], **search: Any) -> StudySpec:
        override = {"loss.negative_margin": {"float": [0.3, 1.5], "default": 0.6}, "batch.classes": "all"}
        families = {"red": {"space": "contrastive", "override": override | own}}
        return study(name=name, families=families, search={"trials_per_family": 12, **search})

    storage = InMemoryStorage()
    Tune(in_memory(red("earlier", {}, sampler="random", scheduler="none"), storage=storage)).run()
    new = red("later", change, warm_start=["earlier"])
    search = in_memory(new, storage=storage)
    (line,) = search.take_notes()
    assert line.startswith("search.warm_start: red: ")
    assert told in line
    Tune(search).run(30)
    warm = [trial for trial in search.study.trials if "warm_start" in trial.user_attrs]
    assert warm
    if "training.weight_decay" in change:
        assert {trial.params["red/training.weight_decay"] for trial in warm} == {0.0}
    optuna.delete_study(study_name="earlier", storage=storage)
    resumed = in_memory(new, storage=storage)
    assert resumed.take_notes() == []
    Tune(resumed).run()
    assert sum("warm_start" in trial.user_attrs for trial in resumed.study.trials) == int(line.split()[2])


def test_points_that_were_not_drawn_count_for_the_sampler_too() -> None:
    """Of NSGA-II a population has four: the default and three warm starts are the first."""
    storage = InMemoryStorage()
    Tune(
        in_memory(study_named(options(sampler="random", scheduler="none"), "earlier"), storage=storage)
    ).run()
    fixed = options(sampler="nsga2", trials_per_family=10, warm_start=["earlier"])
    search = in_memory(study_named(fixed, "later"), storage=storage)
    Tune(search).run()
    own = [trial for trial in search.study.trials if trial.user_attrs["family"] == "red"]
    assert [t.user_attrs.get("warm_start", "")[:7] for t in own[:5]] == [
        "",
        "earlier",
        "earlier",
        "earlier",
        "earlier",
    ]
    assert [t.system_attrs["NSGAIISampler:generation"] for t in own] == [0] * 4 + [1] * 4 + [2] * 2


def test_a_warm_start_from_nowhere_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"^search\.warm_start: no study 'gone' in the store; there are: none$"
    ):
        on_disk(options(warm_start=["gone"]), tmp_path)
    assert optuna.get_all_study_names(f"sqlite:///{tmp_path / 'optuna.db'}") == []
    with pytest.raises(SpecError, match=r"no study 'auto' .*; for all of them write auto without brackets$"):
        in_memory(options(warm_start=["auto"]))


@pytest.mark.parametrize(
    ("warm_start", "message"),
    [
        (
            "other",
            r"search.warm_start: write auto, or a list of earlier studies, as \[first, second\], got 'other'",
        ),
        (["simulated"], "search.warm_start: simulated is this study itself; name earlier ones, or set auto"),
        (["a", 3], "search.warm_start.1: input should be a valid string, got 3"),
    ],
)
def test_what_is_wrong_with_a_warm_start(warm_start: Any, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}$"):
        options(warm_start=warm_start)


# Two objectives


def test_two_objectives_keep_a_front_of_quality_and_size(tmp_path: Path) -> None:
    def score(config: TrialConfig, step: int) -> float:
        return hill(config, step) + 0.01 * config.embedder.dim

    search = on_disk(options(sampler="nsga2", trials_per_family=12), tmp_path)
    tune = Tune(search, score, at_once=2).run()
    trials = optuna.load_study(study_name="simulated", storage=f"sqlite:///{tmp_path / 'optuna.db'}").trials
    sizes = {number: config.embedder.dim for number, config in tune.started}
    assert all(t.values == [t.intermediate_values[STEPS], sizes[t.number]] for t in trials)
    values = [t.values for t in trials]
    front = [v for v in values if not any(w[0] >= v[0] and w[1] <= v[1] and w != v for w in values)]
    assert len(front) > 1
    best = search.best()
    assert best is not None
    assert best[0] == max(v[0] for v in values)
    assert search.best_configs()["red"].training.epochs == EPOCHS


def test_latency_is_what_a_finished_trial_says_of_it() -> None:
    found = options(sampler="nsga2", second_objective="latency_ms", trials_per_family=4)
    told = Tune(in_memory(found), final={"embed_ms_per_image": 0.25}).run().search
    assert {trial.values[1] for trial in told.study.trials} == {0.25}
    untold = Tune(in_memory(found)).run().search
    assert [trial.state for trial in untold.study.trials] == [TrialState.COMPLETE] * 8
    assert {trial.values[1] for trial in untold.study.trials} == {math.inf}
    assert untold.is_over
