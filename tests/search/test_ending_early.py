"""Searches that end before their budget: decided once, kept, and the same after every death of the driver."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState
from support import tune_simulator
from support.tune_simulator import HILL, STEPS, Tune, hill, in_memory, on_disk, study

from dmlstudy.records import TrialConfig
from dmlstudy.search.stop_rule import ENDED_EARLY, FEWEST, told_of
from dmlstudy.search.study_search import StudySearch
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.store import Store

RULE = {"gain": 0.05, "probability": 0.8}
NUM_TRIALS = 30


def early(rule: Any = RULE, *, of: dict[str, Any] | None = None, **search: Any) -> StudySpec:
    """A study whose searches end before their trials by a rule that is soon fulfilled."""
    settings = {"trials_per_family": NUM_TRIALS, "reduction_factor": 2, "seed": 5, "scheduler": "none"}
    more = {"families": of, "batch": {"classes": "all"}} if of else {}
    return study(search=settings | {"stop_when": rule} | search, **more)


def choosy(config: TrialConfig, step: int) -> float:
    """``hill``, where some trials fail."""
    if config.phase == "search" and step == 3 and 4.6e-6 < config.training.lr < 9e-6:
        raise RuntimeError("loss is nan")
    return hill(config, step)


def known(search: StudySearch) -> list[Any]:
    """All that the storage knows of each trial, and of searches that have ended."""
    return [search.study.user_attrs.get(ENDED_EARLY), *tune_simulator.known(search)]


def num_of(search: StudySearch) -> Counter[str]:
    return Counter(str(trial.user_attrs["family"]) for trial in search.study.trials)


DEATHS = [("commit", 1), ("observe", 7), ("commit", 2), ("observe", 4), ("observe", 11), ("commit", 3)] * 6


@pytest.mark.parametrize(
    "search",
    [
        {"sampler": "random"},
        {"sampler": "tpe", "scheduler": "halving", "generation_size": 2, "trials_per_family": 50},
        {"sampler": "cma", "generation_size": 3},
        {"sampler": "random", "scheduler": "asha", "generation_size": 2, "trials_per_family": 60},
        {"sampler": "random", "scheduler": "asha", "trials_per_family": 60, "seed": 0},
        {"sampler": "tpe", "families": "adaptive"},
    ],
    ids=lambda search: "-".join(map(str, search.values())),
)
def test_deaths_and_trials_at_once_change_nothing(search: dict[str, Any]) -> None:
    found = early(**search)
    tune = Tune(in_memory(found), choosy).run()
    unbroken = tune.search
    ends = unbroken.study.user_attrs[ENDED_EARLY]
    assert ends.keys() <= ({"all"} if "families" in search else {"red", "blue"})
    assert "red" in ends or "all" in ends
    for name, end in ends.items():
        assert FEWEST < end["num_trials"] < end["num_trials"] + end["num_left"]
        assert end["num_trials"] == (num_of(unbroken)[name] if name != "all" else len(unbroken.study.trials))
        assert end["probability"] < RULE["probability"]
    assert all(trial.state.is_finished() for trial in unbroken.study.trials), "none waits for ever"
    assert unbroken.best_configs().keys() == {"red", "blue"}
    assert known(Tune(in_memory(found), choosy, at_once=3, seed=1).run().search) == known(unbroken)
    storage = InMemoryStorage()
    for session, death in enumerate(DEATHS):
        Tune(in_memory(found, storage=storage), choosy, at_once=2, seed=session, dies_before=death).run()
    search_again = in_memory(found, storage=storage)
    Tune(search_again, choosy).run()
    assert known(search_again) == known(unbroken)
    assert search_again.is_over
    assert search_again.num_planned_of == unbroken.num_planned_of


def test_a_kill_between_a_rung_and_the_end_of_a_promoted_trial_asks_no_more_and_no_less() -> None:
    """A trial that waited, and has finished since, changes an outcome and adds none."""
    found = early(of={"red": HILL}, scheduler="asha", trials_per_family=60, sampler="random", seed=0)
    unbroken = Tune(in_memory(found)).run().search
    for calls in range(30, 54):
        storage = InMemoryStorage()
        Tune(in_memory(found, storage=storage), dies_before=("commit", calls)).run()
        assert known(Tune(in_memory(found, storage=storage)).run().search) == known(unbroken)


def test_until_it_ends_a_search_is_the_one_without_the_rule() -> None:
    without = Tune(in_memory(early(None)), choosy).run().search
    ended = Tune(in_memory(early()), choosy).run().search
    assert num_of(without) == {"red": NUM_TRIALS, "blue": NUM_TRIALS}
    assert ENDED_EARLY not in without.study.user_attrs
    num = min(end["num_trials"] for end in ended.study.user_attrs[ENDED_EARLY].values())
    assert known(ended)[1 : 1 + 2 * num] == known(without)[1 : 1 + 2 * num]
    never = Tune(in_memory(early({"gain": 1e-6, "probability": 1e-6})), choosy).run().search
    assert known(never) == known(without)


def test_a_killed_driver_keeps_an_end_on_disk_and_tells_of_it_once(tmp_path: Path) -> None:
    found, told = early(sampler="random"), list[str]()
    for session in range(40):
        search = on_disk(found, tmp_path)
        Tune(search, choosy, seed=session, dies_before=("commit", 4 if session < 39 else 0)).run()
        told += search.take_notes()
    assert search.is_over
    ends = [line for line in told if "ended after" in line]
    assert len(ends) == 2
    end = search.study.user_attrs[ENDED_EARLY]["red"]
    line = (
        f"family red: search ended after {end['num_trials']} of {NUM_TRIALS} trials: the other {end['num_left']} would"
        f" raise {end['best']:.4f} by more than 0.05 with a probability of {100 * end['probability']:.2g}%"
    )
    assert line in ends
    assert sorted(told_of(Store(tmp_path), found.name, is_whole=False)) == sorted(ends)
    assert told_of(Store(tmp_path), "none", is_whole=False) == []
    assert told_of(Store(tmp_path / "no store"), "none", is_whole=False) == []


PAIR: dict[str, Any] = {"batch.images_per_class": 4, "training.head_lr_mult": 1}
FAMILIES: dict[str, Any] = {
    "after": {"space": "contrastive", "like": "red", "override": PAIR | {"batch.images_per_class": 6}},
    "red": {"space": "contrastive", "override": PAIR},
    "grey": {"space": "contrastive", "override": PAIR},
    "later": {"space": "contrastive", "like": "grey", "fix": "best", "override": PAIR},
}


def of_pairs(config: TrialConfig, step: int) -> float:
    """The follower's scores spread wider than its leader's, so that it alone keeps the pair going."""
    spread = 3 if config.batch.images_per_class == 6 else 1
    return 0.5 + spread * (hill(config, STEPS) - 0.8) * step / STEPS / 10


@pytest.mark.parametrize("deterministic", [True, False])
def test_pairs_end_together_and_what_begins_at_a_best_begins_then(deterministic: bool) -> None:
    found = early({"gain": 0.003, "probability": 0.5}, of=FAMILIES, deterministic=deterministic)
    search = Tune(in_memory(found), of_pairs).run().search
    ends = search.study.user_attrs[ENDED_EARLY]
    assert {"red", "after", "grey"} <= ends.keys()
    num = num_of(search)
    assert num["red"] == num["after"] < NUM_TRIALS
    assert num["grey"] < NUM_TRIALS
    assert num["later"] == 1
    assert search.is_over
    alone = {name: FAMILIES[name] for name in ("red", "grey")}
    apart = early({"gain": 0.003, "probability": 0.5}, of=alone, deterministic=deterministic)
    assert num_of(Tune(in_memory(apart), of_pairs).run().search)["red"] < num["red"]


def test_without_generations_it_ends_when_a_trial_is_asked_for() -> None:
    search = Tune(in_memory(early(deterministic=False)), choosy, at_once=3).run().search
    ends = search.study.user_attrs[ENDED_EARLY]
    assert ends.keys() == {"red", "blue"}
    assert {name: end["num_trials"] for name, end in ends.items()} == num_of(search)
    assert all(trial.state.is_finished() for trial in search.study.trials)


def test_with_promotion_the_trials_that_wait_are_settled_as_at_the_end_of_a_budget() -> None:
    found = early(scheduler="asha", trials_per_family=60, sampler="random")
    search = Tune(in_memory(found)).run().search
    num = {name: end["num_trials"] for name, end in search.study.user_attrs[ENDED_EARLY].items()}
    assert num == num_of(search)
    for family, own in num.items():
        budget = early(None, scheduler="asha", trials_per_family=own, sampler="random")
        whole = Tune(in_memory(budget)).run().search
        states = {
            each: Counter(t.state for t in s.study.trials if t.user_attrs["family"] == family)
            for each, s in (("early", search), ("budget", whole))
        }
        assert states["early"].total() == states["budget"].total() == own
        assert states["early"][TrialState.RUNNING] == 0
        assert states["early"][TrialState.COMPLETE] >= 1


def test_what_does_not_go_together_is_refused_in_one_line() -> None:
    two = {"sampler": "nsga2", "second_objective": "embedding_dim"}
    with pytest.raises(SpecError, match=r"^search\.stop_when: tells .* leave one of the two out$"):
        early(**two)
    for rule, line in [
        ({"gain": 2, "probability": 0.05}, r"^search\.stop_when\.gain: input should be less than 1, got 2$"),
        ({"gain": 0.1, "probability": 1}, r"^search\.stop_when\.probability: input should be less than 1"),
        ({"gain": 0.1}, r"^search\.stop_when\.probability: is missing; add it$"),
        ({"gain": 0, "probability": 0.1}, r"^search\.stop_when\.gain: input should be greater than 0"),
        (0.1, r"^search\.stop_when: expected a section with keys of its own"),
    ]:
        with pytest.raises(SpecError, match=line):
            early(rule)


def test_a_study_without_the_rule_keeps_its_fingerprint() -> None:
    assert "stop_when" not in early(None).meaning()["file"]["search"]
    assert early(None).fingerprint() != early().fingerprint()
