"""Families that are like others: they take their points, and change nothing for them, whatever happens meanwhile."""

from __future__ import annotations

import math
import zlib
from contextlib import suppress
from typing import Any

import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState
from support.tune_simulator import Tune, in_memory, study

from dmlstudy.records import TrialConfig
from dmlstudy.search.study_search import StudySearch
from dmlstudy.spec.study_file import StudySpec

OWN = "regularizer.weight"
GC: dict[str, Any] = {
    "name": "graph_consistency",
    "term": "gc_bar",
    "weight": {"float": [1e-4, 1e-1], "log": True, "default": 2e-3},
    "sigma_mode": "fixed",
    "sigma": 1.0,
    "draw": "split",
}
ANCHOR = {"loss.normalize": "anchor"}
BASE: dict[str, Any] = {"batch.images_per_class": 4, "training.head_lr_mult": 1}
LEADERS: dict[str, Any] = {
    "red": {"space": "pair_weighting", "override": BASE | ANCHOR},
    "grey": {"space": "contrastive", "override": BASE},
}
PAIRS: dict[str, Any] = {"space": "pair_weighting", "like": "red"}
BEST: dict[str, Any] = {"space": "contrastive", "like": "grey", "fix": "best"}
FOLLOWERS: dict[str, Any] = {
    "plain": PAIRS | {"override": BASE | {"loss.normalize": "none"}},
    "own": PAIRS | {"override": BASE | ANCHOR | {"regularizer": GC}},
    "chain": PAIRS | {"override": BASE | {"regularizer": GC, "loss.normalize": "none"}, "like": "own"},
    "exponential": PAIRS | {"override": BASE | ANCHOR | {"loss.weighting": "exponential"}},
    "constant": PAIRS | {"override": BASE | ANCHOR | {"loss.weighting": "constant"}},
    "best": BEST | {"override": BASE | {"regularizer": GC | {"weight": 0.01}}},
    "best-own": BEST | {"override": BASE | {"regularizer": GC}},
    "best-chain": BEST | {"override": BASE | {"batch.images_per_class": 6}, "like": "best"},
}


def scored(config: TrialConfig, step: int) -> float:
    """Some trials fail, slow ones cross fast ones, and a regulariser moves all."""
    if config.phase == "search" and step == 3 and zlib.crc32(repr(config.training.lr).encode()) % 3 == 0:
        raise RuntimeError("loss is nan")
    pace = 2 + 3 * (config.loss.params.get("weighting") == "exponential")
    quality = 0.9 - 0.1 * abs(math.log10(config.training.lr) + 4.5)
    quality -= (
        0.05 * abs(math.log10(float(config.regularizer.params["weight"])) + 2) if config.regularizer else 0
    )
    return quality * (1 - math.exp(-step / pace))


def paired(*followers: str, sampler: str = "tpe", **search: Any) -> StudySpec:
    settings = {"trials_per_family": 6, "reduction_factor": 2, "seed": 3, "sampler": sampler}
    more: dict[str, Any] = {}
    if sampler == "nsga2":
        settings |= {"second_objective": "embedding_dim", "scheduler": "none"}
        more = {"embedder": {"dim": {"int": [4, 64], "default": 32}, "width": 4}}
    # A follower stands before its leader: the order in the file means nothing.
    families = {name: FOLLOWERS[name] for name in followers} | LEADERS
    return study(families=families, batch={"classes": "all"}, search=settings | search, **more)


def trials_of(search: StudySearch, family: str) -> list[FrozenTrial]:
    return [trial for trial in search.study.trials if trial.user_attrs.get("family") == family]


def short(trial: FrozenTrial) -> dict[str, Any]:
    return {name.partition("/")[2]: value for name, value in trial.params.items()}


def known(search: StudySearch, *families: str) -> list[Any]:
    """All that the storage knows of these families, without the numbers that others move."""
    return [
        (name, t.state.name, t.params, t.values, t.intermediate_values, t.user_attrs["generation"])
        for name in families
        for t in trials_of(search, name)
    ]


def everything(search: StudySearch) -> list[Any]:
    return [(t.number, t.state.name, t.params, t.values, t.user_attrs) for t in search.study.trials]


SAMPLERS = ("tpe", "gp", "cma", "qmc", "random", "nsga2")


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("generation_size", [1, 2])
def test_a_leader_draws_what_it_draws_alone_and_followers_take_it(sampler: str, generation_size: int) -> None:
    alone = Tune(in_memory(paired(sampler=sampler, generation_size=generation_size)), scored).run().search
    found = paired(*FOLLOWERS, sampler=sampler, generation_size=generation_size)
    search = Tune(in_memory(found), scored).run().search
    assert known(search, *LEADERS) == known(alone, *LEADERS)
    red = trials_of(search, "red")
    assert len(red) == 6
    assert len({trial.params["red/training.lr"] for trial in red}) >= 5  # one may be a bound twice
    for name in ("plain", "own"):
        theirs = trials_of(search, name)
        assert [trial.user_attrs["like"] for trial in theirs] == [trial.number for trial in red]
        for trial, leader in zip(theirs, red, strict=True):
            assert {key: value for key, value in short(trial).items() if key != OWN} == short(leader)
    own, chain = trials_of(search, "own"), trials_of(search, "chain")
    assert [short(trial) for trial in chain] == [short(trial) for trial in own]
    assert short(own[0])[OWN] == 2e-3  # its own default first
    assert len({short(trial)[OWN] for trial in own}) == 6
    assert search.is_over
    assert search.verdict_configs() == []


def test_followers_do_not_change_each_other() -> None:
    few = Tune(in_memory(paired("own")), scored).run().search
    many = Tune(in_memory(paired(*FOLLOWERS)), scored).run().search
    assert known(many, "own") == known(few, "own")


def test_options_that_a_follower_has_fixed_are_taken_where_the_leader_chose_them() -> None:
    search = (
        Tune(in_memory(paired("exponential", trials_per_family=12, sampler="random")), scored).run().search
    )
    leaders = {trial.number: short(trial) for trial in trials_of(search, "red")}
    chosen = {point["loss.weighting"] for point in leaders.values()}
    assert {"exponential", "power"} <= chosen
    for trial in trials_of(search, "exponential"):
        leader, own = leaders[trial.user_attrs["like"]], short(trial)
        common = leader.keys() & own.keys()
        assert "training.lr" in common
        if leader["loss.weighting"] == "exponential":
            assert {"loss.alpha", "loss.beta"} <= common
        assert {key: own[key] for key in common} == {key: leader[key] for key in common}


def test_a_configuration_is_not_run_twice_for_lack_of_a_parameter() -> None:
    fixed = {"training.lr": 1e-5, "batch.images_per_class": 4, "training.head_lr_mult": 1}
    families = {
        "two": {"space": "contrastive", "override": fixed | {"loss.positive_margin": 0.0}},
        "one": {
            "space": "contrastive",
            "override": fixed | {"loss.positive_margin": 0.0, "loss.negative_margin": 0.6},
            "like": "two",
        },
    }
    found = study(families=families, batch={"classes": "all"}, search__generation_size=3)
    search = Tune(in_memory(found)).run().search
    assert len(trials_of(search, "two")) == 8
    assert len(trials_of(search, "one")) == 1
    assert search.is_over
    again = in_memory(found, storage=search.study._storage)
    assert again.num_left == 2 * 2 + 2  # the simulator's verdicts are not stored
    assert again.left.search == 0


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_best_is_taken_when_the_search_has_ended(sampler: str) -> None:
    search = Tune(in_memory(paired(*FOLLOWERS, sampler=sampler)), scored, at_once=3).run().search
    best = search.best_numbers()["grey"]
    leader = search.study.trials[best]
    assert leader.value == max(
        t.values[0] for t in trials_of(search, "grey") if t.state == TrialState.COMPLETE
    )
    (taken,) = trials_of(search, "best")
    assert taken.user_attrs["like"] == best
    assert short(taken) == short(leader)
    assert taken.number > max(trial.number for trial in trials_of(search, "grey"))
    assert taken.user_attrs["generation"] > trials_of(search, "grey")[-1].user_attrs["generation"]
    own = trials_of(search, "best-own")
    assert len(own) == 6
    for trial in own:
        point = short(trial)
        assert point.pop(OWN) > 0
        assert point == short(leader)
    assert len({short(trial)[OWN] for trial in own}) == 6
    configs = search.best_configs()
    assert configs["best"].loss == configs["grey"].loss
    assert configs["best"].training.lr == configs["grey"].training.lr
    if taken.state == TrialState.COMPLETE:
        (last,) = trials_of(search, "best-chain")
        assert last.user_attrs["like"] == taken.number


def test_without_a_finished_trial_there_is_no_best_to_begin_at() -> None:
    def failing(config: TrialConfig, step: int) -> float:
        if config.family == "grey" and config.phase == "search":
            raise RuntimeError("loss is nan")
        return scored(config, step)

    storage = InMemoryStorage()
    search = in_memory(paired("best", "best-chain"), storage=storage)
    Tune(search, failing).run()
    notes = search.take_notes()
    assert "best: no trial of grey has finished whose values it could take" in notes
    assert "best-chain: no trial of best has finished whose values it could take" in notes
    assert search.counts()["best"] == {"finished": 0, "pruned": 0, "failed": 0}
    assert search.is_over
    assert in_memory(paired("best", "best-chain"), storage=storage).left.search == 0


@pytest.mark.parametrize("sampler", ["tpe", "cma", "gp"])
def test_deaths_and_several_at_once_change_nothing(sampler: str) -> None:
    found = paired(*FOLLOWERS, sampler=sampler, trials_per_family=4, generation_size=2)
    unbroken = Tune(in_memory(found), scored).run().search
    states = {trial.state for trial in unbroken.study.trials}
    assert {TrialState.COMPLETE, TrialState.FAIL} <= states
    at_once = Tune(in_memory(found), scored, at_once=4, seed=1).run().search
    assert everything(at_once) == everything(unbroken)
    storage = InMemoryStorage()
    for session in range(len(unbroken.study.trials)):  # killed after each trial
        killed = in_memory(found, storage=storage)
        Tune(killed, scored, seed=session, dies_before=("commit", 2)).run()
    search = in_memory(found, storage=storage)
    Tune(search, scored).run()
    assert everything(search) == everything(unbroken)
    assert search.best_configs() == unbroken.best_configs()


@pytest.mark.parametrize("num_created", range(1, 18))
def test_a_death_between_a_leaders_trial_and_its_followers_changes_nothing(num_created: int) -> None:
    class Dead(BaseException):
        pass

    found = paired("plain", "own", "chain", "best", trials_per_family=4)
    unbroken = Tune(in_memory(found), scored).run().search
    storage = InMemoryStorage()
    search = in_memory(found, storage=storage)
    left, create = [num_created], search._ledger.create

    def dying(trial: FrozenTrial) -> FrozenTrial:
        left[0] -= 1
        if not left[0]:
            raise Dead
        return create(trial)

    search._ledger.create = dying  # type: ignore[method-assign]
    with suppress(Dead):
        Tune(search, scored).run()
    assert not left[0]
    resumed = Tune(in_memory(found, storage=storage), scored).run().search
    assert everything(resumed) == everything(unbroken)


def test_without_generations_points_are_taken_too() -> None:
    found = paired(*FOLLOWERS, deterministic=False)
    search = Tune(in_memory(found), scored, at_once=4, seed=2).run().search
    numbers = {trial.number: short(trial) for trial in search.study.trials}
    for name in ("plain", "own"):
        theirs = trials_of(search, name)
        assert sorted(trial.user_attrs["like"] for trial in theirs) == [
            t.number for t in trials_of(search, "red")
        ]
        for trial in theirs:
            point = {key: value for key, value in short(trial).items() if key != OWN}
            assert point == numbers[trial.user_attrs["like"]]
    assert len(trials_of(search, "best")) == 1
    assert short(trials_of(search, "best")[0]) == numbers[search.best_numbers()["grey"]]
    assert search.is_over


def test_points_that_others_enqueue_are_followed_and_followers_have_none_of_their_own() -> None:
    found = paired("plain")
    storage = InMemoryStorage()
    search = in_memory(found, storage=storage)
    point = {f"red/{name}": value for name, value in short_defaults(found).items()} | {
        "red/training.lr": 3e-5
    }
    search.study.enqueue_trial(point)
    search.study.enqueue_trial({"plain/training.lr": 3e-5})
    search = Tune(in_memory(found, storage=storage), scored).run().search
    assert 3e-5 in [trial.params["plain/training.lr"] for trial in trials_of(search, "plain")]
    refused = [t for t in search.study.trials if "generation" not in t.user_attrs]
    assert [t.user_attrs["reason"] for t in refused] == [
        "was enqueued, but plain takes the points of red: enqueue it there"
    ]


def short_defaults(found: StudySpec) -> dict[str, Any]:
    return {name.partition("/")[2]: value for name, value in found.families["red"].default_point().items()}


def test_warm_points_come_from_the_leader() -> None:
    storage = InMemoryStorage()
    first = paired("plain", seed=9)
    Tune(
        in_memory(
            first.__class__(first.file.model_copy(update={"name": "earlier"}), first.raw), storage=storage
        ),
        scored,
    ).run()
    search = in_memory(paired("plain", warm_start=["earlier"]), storage=storage)
    assert "search.warm_start: plain: takes the points of red" in search.take_notes()
    Tune(search, scored).run()
    red, plain = trials_of(search, "red"), trials_of(search, "plain")
    assert any("warm_start" in trial.user_attrs for trial in red)
    assert [short(trial) for trial in plain] == [short(trial) for trial in red]


@pytest.mark.parametrize("scheduler", ["halving", "asha", "hyperband"])
def test_a_search_that_is_exhausted_ends_its_followers_too(scheduler: str) -> None:
    fixed = {"training.lr": 1e-5, "batch.images_per_class": 4, "training.head_lr_mult": 1}
    three = fixed | {"loss.positive_margin": 0.0, "loss.negative_margin": {"choice": [0.6, 0.8, 1.0]}}
    space = {"space": "contrastive"}
    draws = GC | {"weight": 0.01, "sigma": {"choice": [0.5, 1.0], "default": 1.0}}
    families = {
        "three": space | {"override": three},
        "own": space | {"override": three | {"regularizer": GC}, "like": "three"},
        "two": space | {"override": three | {"regularizer": draws}, "like": "three", "fix": "best"},
    }
    found = study(families=families, batch={"classes": "all"}, search__scheduler=scheduler)
    search = Tune(in_memory(found), at_once=2).run().search
    assert [len(trials_of(search, name)) for name in families] == [3, 3, 2]
    assert {short(trial)["regularizer.sigma"] for trial in trials_of(search, "two")} == {0.5, 1.0}
    notes = search.take_notes()
    ends = "every configuration of its space was tried after {} of 8 trials; its search ends here"
    assert notes == [f"three: {ends.format(3)}", f"two: {ends.format(2)}"]
    assert search.is_over
