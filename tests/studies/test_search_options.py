"""Ways to search: samplers, early stopping, budgets, families, repeats and warm starts; each keeps the laws."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState
from tune_simulator import EPOCHS, STEPS, Tune, by_number, hill, in_memory, on_disk, study

from dmlstudy.records import TrialConfig
from dmlstudy.studies import samplers
from dmlstudy.studies.samplers import OutsideSpaceError, Point
from dmlstudy.studies.search import StudySearch
from dmlstudy.studies.spec import SpecError, StudySpec

SAMPLERS = ["tpe", "gp", "cma", "qmc", "random", "nsga2"]
TWO = {"sampler": "nsga2", "second_objective": "embedding_dim", "scheduler": "none"}
TINY = {"loss.negative_margin": {"choice": [0.3, 0.6, 1.1]}, "training.lr": 1e-5}


def options(**search: Any) -> StudySpec:
    """A study of two families that searches in another way."""
    if search.get("sampler") == "nsga2":
        search = TWO | search
    dims = {"dim": {"int": [4, 64], "default": 32}} if "second_objective" in search else {"dim": 8}
    return study(
        search={"trials_per_family": 6, "reduction_factor": 2, "seed": 5} | search,
        embedder={**dims, "width": 4},
    )


def tiny(trials: int, **search: Any) -> StudySpec:
    """One family with three configurations and one with as many as you like."""
    few = {"batch.classes": "all", "batch.images_per_class": 4, "training.head_lr_mult": 1}
    families = {
        "few": {"space": "contrastive", "override": few | TINY},
        "many": {"space": "contrastive", "override": few | {"training.lr": 1e-5}},
    }
    return study(families=families, search={"trials_per_family": trials, "reduction_factor": 2, **search})


def searched(tune: Tune) -> list[TrialConfig]:
    return [config for number, config in tune.started if number is not None]


LAWFUL = [
    {"sampler": "gp", "scheduler": "none", "trials_per_family": 4},
    {"sampler": "cma", "trials_per_family": 12},
    {"sampler": "qmc"},
    {"sampler": "random"},
    {"sampler": "nsga2", "trials_per_family": 10},
    {"scheduler": "hyperband", "trials_per_family": 8},
    {"scheduler": "median", "trials_per_family": 8},
    {"families": "adaptive", "trials_per_family": 8},
    {"generation_size": 3, "trials_per_family": 7},
    {
        "families": "adaptive",
        "sampler": "gp",
        "generation_size": 2,
        "scheduler": "none",
        "trials_per_family": 4,
    },
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
    for sitting in range(4):  # killed without a word
        Tune(in_memory(found, storage=storage), at_once=2, seed=sitting).run(17 + sitting)
    tune = Tune(in_memory(found, storage=storage), at_once=2, seed=9).run()
    assert by_number(tune.search) == expected
    assert tune.search.best_configs() == unbroken.search.best_configs()
    assert tune.search.is_over


@pytest.mark.parametrize("num_asked", [1, 4, 5])
def test_a_kill_while_a_generation_is_asked_for(num_asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was asked for before the kill, the generation is the same in the end."""
    found = options(generation_size=3, trials_per_family=6)
    expected = by_number(Tune(in_memory(found)).run().search)

    class KilledError(Exception):
        pass

    storage = InMemoryStorage()
    search = in_memory(found, storage=storage)
    create, left = search._storage.create_new_trial, [num_asked]

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


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("space", ["graph_consistency", "pair_weighting", "triplet"])
def test_every_sampler_stays_inside_a_space_with_choices(sampler: str, space: str) -> None:
    search = {"trials_per_family": 14, "sampler": sampler, "scheduler": "none"}
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
    one = {
        "space": "contrastive",
        "override": {
            "loss.negative_margin": {"float": [0.0, 1.5], "default": 0.0},
            "training.lr": {"float": [1.0e-6, 1.0], "log": True, "default": 1.0},
            "training.head_lr_mult": 1,
            "batch.classes": "all",
            "batch.images_per_class": 4,
        },
    }

    def score(config: TrialConfig, step: int) -> float:
        margin = float(config.loss.params["negative_margin"])
        return -((margin - 1.1) ** 2) - (math.log10(config.training.lr / 1e-3) / 3) ** 2

    def regret(name: str, seed: int) -> float:
        num = 40 if sampler == "cma" else 20
        search = {"trials_per_family": num, "scheduler": "none", "sampler": name, "seed": seed}
        found = study(families={"red": one}, search=search, training={"epochs": 1}, protocol={"num_folds": 1})
        best = Tune(in_memory(found), score).run().search.best()
        assert best is not None
        return -best[0]

    model, chance = (sum(regret(name, seed) for seed in range(2)) for name in (sampler, "random"))
    assert model < 0.8 * chance


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
        ({"scheduler": "asha"}, r"^search\.scheduler: input should be 'halving', 'hyperband'"),
        ({"sampler": "nsga2", "second_objective": None}, r"^search\.sampler: nsga2 and a second objective"),
        ({"second_objective": "embedding_dim"}, r"^search\.second_objective: needs sampler nsga2, not tpe"),
        ({"sampler": "nsga2", "scheduler": "halving"}, r"^search\.scheduler: halving would stop small"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_with_a_search(search: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        options(**search)


# Early stopping in a search


def test_hyperband_stops_by_bracket() -> None:
    """8 steps, r = 2, eta = 2: brackets with first rungs at 2, 4 and 8; the third stops nobody before its end."""
    search = in_memory(options(scheduler="hyperband", trials_per_family=18, sampler="random"))
    Tune(search, at_once=2).run()
    stopped: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for trial in search.study.trials:
        if trial.state == TrialState.PRUNED:
            stopped[trial.number // 2 % 3].add(len(trial.intermediate_values))
    assert min(stopped[0]) == 2
    assert min(stopped[1]) >= 4
    assert stopped[2] <= {8}


def test_median_stops_some_and_not_the_best() -> None:
    search = in_memory(options(scheduler="median", trials_per_family=14, sampler="random"))
    Tune(search, at_once=2).run()
    states = [trial.state for trial in search.study.trials]
    assert TrialState.PRUNED in states[4:]
    assert set(states[:4]) == {TrialState.COMPLETE}
    free = in_memory(options(scheduler="none", trials_per_family=14, sampler="random"))
    Tune(free).run()
    assert search.best() == free.best()


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


def test_time_is_counted_over_sittings() -> None:
    storage = InMemoryStorage()
    found = options(wall_time="300s", trials_per_family=50, scheduler="none")
    clock = Clock()
    Tune(in_memory(found, storage=storage, clock=clock), at_once=2).run(60)
    spent = in_memory(found, storage=storage).study.user_attrs["spent"][0]
    assert 50 < spent <= 110
    clock.now += 1e6  # between sittings no time passes
    tune = Tune(in_memory(found, storage=storage, clock=clock), at_once=2).run()
    assert 10 < len(tune.search.study.trials) < 50
    assert tune.search.study.user_attrs["spent"][0] >= 300
    assert tune.search.is_over
    again = in_memory(
        found, {(c.family, c.seed) for n, c in tune.started if n is None}, storage=storage, clock=clock
    )
    assert again.is_over


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
    for sitting in range(5):
        Tune(in_memory(tiny(7), storage=storage), at_once=2, seed=sitting).run(11)
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


def test_a_warm_start_from_nowhere_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"^search\.warm_start: no study 'gone' in the store; there are: none$"
    ):
        on_disk(options(warm_start=["gone"]), tmp_path)
    assert optuna.get_all_study_names(f"sqlite:///{tmp_path / 'optuna.db'}") == []


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
