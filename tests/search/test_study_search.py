"""The search without Ray: what is asked, what is stopped, what the storage knows, and what an interruption costs."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from support.tune_simulator import (
    EPOCHS,
    HILL,
    STEPS,
    ActorLost,
    Score,
    Tune,
    by_number,
    hill,
    in_memory,
    on_disk,
    study,
)

from dmlstudy.records import UNTRAINED, TrialConfig
from dmlstudy.search.study_search import StudySearch


def test_equal_budget_and_each_family_begins_at_its_default(tmp_path: Path) -> None:
    found = study()
    tune = Tune(on_disk(found, tmp_path)).run()
    searched = [config for number, config in tune.started if number is not None]
    assert [c.family for c in searched] == ["red", "blue"] * 8
    for config in searched[:2]:
        assert config.loss.params == {"positive_margin": 0.0, "negative_margin": 0.6}
        assert config.training.lr == 1e-5
    assert len({config.fingerprint() for config in searched}) == 16
    assert [number for number, _ in tune.started if number is not None] == list(range(16))
    assert {config.seed for config in searched} == {5}


def test_the_storage_tells_the_whole_search(tmp_path: Path) -> None:
    def score(config: TrialConfig, step: int) -> float:
        if 0.9 < float(config.loss.params["negative_margin"]) < 1.0 and config.phase == "search":
            raise RuntimeError("TrialFailed: loss is nan in epoch 1, batch 2")
        return hill(config, step)

    search = on_disk(study(), tmp_path)
    Tune(search, score, at_once=2).run()
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    trials = optuna.load_study(study_name="simulated", storage=url).trials
    assert len(trials) == 16
    states = {state: [t for t in trials if t.state == state] for state in TrialState}
    assert not states[TrialState.RUNNING]
    assert not states[TrialState.WAITING]
    assert states[TrialState.COMPLETE]
    assert states[TrialState.PRUNED]
    assert states[TrialState.FAIL]
    for trial in trials:
        family = ["red", "blue"][trial.number % 2]
        assert trial.user_attrs["family"] == family
        assert all(name.startswith(f"{family}/") for name in trial.params)
        assert list(trial.intermediate_values) == list(range(1, len(trial.intermediate_values) + 1))
    for trial in states[TrialState.COMPLETE]:
        assert len(trial.intermediate_values) == STEPS
        assert trial.value == trial.intermediate_values[STEPS]
        assert "reason" not in trial.user_attrs
    for trial in states[TrialState.PRUNED]:
        last = len(trial.intermediate_values)
        assert last in (2, 4)
        assert trial.user_attrs["reason"] == (
            f"stopped after fold 1 of 2, epoch {last} of 4: not among its family's best there"
        )
    for trial in states[TrialState.FAIL]:
        assert trial.user_attrs["reason"] == "TrialFailed: loss is nan in epoch 1, batch 2"
    assert search.failure_reasons() == ["TrialFailed: loss is nan in epoch 1, batch 2"] * len(
        states[TrialState.FAIL]
    )


def test_a_trial_whose_actor_is_lost_goes_on_under_its_number() -> None:
    """Once, as ``resources.retries`` says, wherever it is lost; one that is lost each time has failed."""
    lost: set[str] = set()

    def score(config: TrialConfig, step: int) -> float:
        which = f"{config.phase} {config.family} {config.seed} {config.fingerprint()}"
        is_cursed = config.phase == "search" and config.family == "blue" and config.training.lr == 1e-5
        if step == 2 and (is_cursed or which not in lost):
            lost.add(which)
            raise ActorLost("its actor was lost")
        return hill(config, step)

    whole, broken = in_memory(study()), in_memory(study())
    Tune(whole, at_once=2).run()
    Tune(broken, score, at_once=2).run()
    assert broken.is_over
    states = {trial.number: trial.state for trial in broken.study.trials}
    cursed = [number for number, state in states.items() if state == TrialState.FAIL]
    assert cursed == [1]
    assert broken.study.trials[1].user_attrs["reason"] == "its actor was lost"
    assert len(states) == len(whole.study.trials)
    reds = [[t for t in search.study.trials if t.user_attrs["family"] == "red"] for search in (whole, broken)]
    for expected, kept in zip(*reds, strict=True):
        assert (kept.number, kept.state, kept.value) == (expected.number, expected.state, expected.value)


def test_a_cluster_without_room_costs_no_trial() -> None:
    search = in_memory(study())
    assert search.suggest("a") is not None
    search.end("a", {}, failure="no room", is_unstarted=True)
    search.commit("a")
    assert not search.has_progress()
    assert search.suggest("b") is not None
    assert search.assignments["b"].number == 0
    assert search.counts()["red"] == {"finished": 0, "pruned": 0, "failed": 0}


def unstarted(search: StudySearch, trial_id: str) -> None:
    assert search.suggest(trial_id) is not None
    search.end(trial_id, {}, failure="node 10.0.0.3 is broken", is_unstarted=True)
    search.commit(trial_id)


def test_a_place_whose_workers_never_start_is_given_up_and_the_others_go_on() -> None:
    search = in_memory(study())
    search.suggest("good")
    search.observe("good", {"step": 1.0, search.metric: 0.5})
    for number in range(3):
        assert search.take_notes() == []
        unstarted(search, f"bad {number}")
    (note,) = search.take_notes()
    assert note == (
        "workers could not be started 3 times in a row (node 10.0.0.3 is broken); the study goes on with 1 at once,"
        " and after a stop and `resume` with all again"
    )
    assert search.suggest("bad 3") is None
    search.end("good", {search.metric: 0.5})
    search.commit("good")
    assert search.suggest("next") is not None
    assert search.suggest("bad 4") is None
    assert search.counts()["red"]["failed"] == 0


def test_a_place_whose_workers_start_at_last_is_kept() -> None:
    search = in_memory(study())
    search.suggest("good")
    search.observe("good", {"step": 1.0, search.metric: 0.5})
    for number in range(2):
        unstarted(search, f"bad {number}")
    search.suggest("slow")
    search.observe("slow", {"step": 1.0, search.metric: 0.5})
    search.hand_out_again("slow", "its embedder was lost")
    search.commit("slow")
    unstarted(search, "bad 2")
    assert search.take_notes() == []
    assert search.suggest("again") is not None


def test_pruned_are_those_below_the_best_of_earlier_generations(tmp_path: Path) -> None:
    search = in_memory(study())
    Tune(search, at_once=2, seed=3).run()
    trials = search.study.trials
    eta, num_judged = 2, 0
    for trial in trials:
        earlier = [t for t in trials if t.number < trial.number and t.number % 2 == trial.number % 2]
        for rung in (2, 4):
            if rung not in trial.intermediate_values:
                continue
            own = trial.intermediate_values[rung]
            peers = [t.intermediate_values[rung] for t in earlier if rung in t.intermediate_values]
            place = 1 + sum(peer > own for peer in peers)
            bad = len(peers) >= eta and place > (len(peers) + 1) / eta
            num_judged += len(peers) >= eta
            assert bad == (trial.state == TrialState.PRUNED and max(trial.intermediate_values) == rung), (
                trial.number
            )
    assert num_judged > 10


def test_without_a_scheduler_nothing_is_stopped() -> None:
    search = in_memory(study(search__scheduler="none"))
    Tune(search, at_once=3).run()
    assert {t.state for t in search.study.trials} == {TrialState.COMPLETE}


@pytest.fixture(scope="module")
def unbroken() -> Tune:
    return Tune(in_memory(study())).run()


@pytest.mark.parametrize(("at_once", "order"), [(2, 0), (2, 1), (4, 2), (4, 3), (7, 4)])
def test_neither_concurrency_nor_order_changes_the_study(at_once: int, order: int, unbroken: Tune) -> None:
    tune = Tune(in_memory(study()), at_once=at_once, seed=order).run()
    assert by_number(tune.search) == by_number(unbroken.search)
    assert {state for _, state, _, _ in by_number(tune.search)} == {"COMPLETE", "PRUNED"}
    assert tune.started == unbroken.started
    assert tune.search.best_configs() == unbroken.search.best_configs()
    assert tune.search.winner() == unbroken.search.winner()


def test_another_seed_is_another_study(unbroken: Tune) -> None:
    tune = Tune(in_memory(study(search__seed=6))).run()
    assert [row[2] for row in by_number(tune.search)[:2]] == [
        row[2] for row in by_number(unbroken.search)[:2]
    ]
    assert [row[2] for row in by_number(tune.search)[2:]] != [
        row[2] for row in by_number(unbroken.search)[2:]
    ]


@pytest.mark.parametrize(("at_once", "num_steps"), [(1, 3), (2, 29), (4, 50), (2, 77)])
def test_an_interrupted_search_goes_on_where_it_was(
    at_once: int, num_steps: int, tmp_path: Path, unbroken: Tune
) -> None:
    found = study()
    first = Tune(on_disk(found, tmp_path), at_once=at_once, seed=1).run(num_steps)
    open_numbers = [first.search.assignments[trial_id].number for trial_id in first.running]
    for trial_id in first.running:  # as Tune does when it is stopped
        first.search.end(trial_id)
        assert first.search.assignments[trial_id].status == "interrupted"
    waiting = [t.number for t in first.search.study.trials if t.state == TrialState.RUNNING]
    ended = [row for row in by_number(first.search) if row[1] not in ("RUNNING", "WAITING")]
    assert set(open_numbers) - {None} <= set(waiting)
    del first.search

    second = Tune(on_disk(found, tmp_path), at_once=at_once, seed=2).run()
    handed_out = [number for number, _ in second.started]
    assert sorted(handed_out[: len(waiting)]) == waiting
    assert not {row[0] for row in ended} & set(handed_out)
    assert by_number(second.search) == by_number(unbroken.search)
    assert second.search.best_configs() == unbroken.search.best_configs()
    assert second.search.winner() == unbroken.search.winner()
    assert second.search.is_over
    again = {number: config for number, config in second.started if number is not None}
    assert all(dict(unbroken.started)[number] == config for number, config in again.items())


def test_a_kill_without_a_word_loses_nothing(tmp_path: Path, unbroken: Tune) -> None:
    for session in range(6):
        Tune(on_disk(study(), tmp_path), at_once=2, seed=session).run(25)
    search = Tune(on_disk(study(), tmp_path), at_once=2).run().search
    assert by_number(search) == by_number(unbroken.search)


def test_a_kill_between_enqueue_and_ask_leaves_no_hole(tmp_path: Path, unbroken: Tune) -> None:
    search = on_disk(study(), tmp_path)
    point = search.spec.families["red"].default_point()
    search.study.enqueue_trial(point, user_attrs={"family": "red"})
    search = Tune(on_disk(study(), tmp_path), at_once=2).run().search
    assert by_number(search) == by_number(unbroken.search)


def test_verdict_of_the_untrained_and_of_each_best_with_every_seed(unbroken: Tune) -> None:
    verdicts = [config for number, config in unbroken.started if number is None]
    assert [(c.family, c.seed) for c in verdicts] == [
        (family, seed) for family in (UNTRAINED, "red", "blue") for seed in (1, 2)
    ]
    assert unbroken.started[-6:] == [(None, config) for config in verdicts]
    assert {c.phase for c in verdicts} == {"verdict"}
    assert [c.training.epochs for c in verdicts] == [0, 0, EPOCHS, EPOCHS, EPOCHS, EPOCHS]
    trials = unbroken.search.study.trials
    for config in verdicts[2:]:
        number_in_turn = ["red", "blue"].index(config.family)
        own = [t for t in trials if t.number % 2 == number_in_turn and t.state == TrialState.COMPLETE]
        best = max(own, key=lambda t: t.value or -1)
        assert config.training.lr == best.params[f"{config.family}/training.lr"]
        assert config.loss.params["negative_margin"] == best.params[f"{config.family}/loss.negative_margin"]
    value, label = unbroken.search.best() or (0, "")
    assert value == max(t.value for t in trials if t.state == TrialState.COMPLETE and t.value)
    assert label.startswith(f"{unbroken.search.winner()} #")


def test_an_untrained_row_for_each_embedder() -> None:
    found = study()
    two = {name: dict(entry) for name, entry in found.raw["families"].items()}
    two["green"] = {**two["red"], "override": {**two["red"]["override"], "embedder.dim": 32}}
    found = study(families=two, search__trials_per_family=2)
    assert (found.num_untrained, found.num_verdict_trials) == (2, 2 * (3 + 2))
    tune = Tune(in_memory(found), at_once=2).run()
    untrained = {c.family: c for n, c in tune.started if n is None and c.training.epochs == 0}
    assert {name: config.embedder.dim for name, config in untrained.items()} == {
        "untrained (red)": 64,
        "untrained (green)": 32,
    }
    assert len([n for n, _ in tune.started if n is None]) == found.num_verdict_trials
    assert tune.search.is_over


def test_a_searched_embedder_may_need_an_untrained_row_of_its_own() -> None:
    dims = {"dim": {"choice": [8, 16]}, "width": 4}
    found = study(embedder=dims, search__trials_per_family=4)
    assert found.num_untrained == 2
    tune = Tune(in_memory(found)).run()
    best = tune.search.best_configs()
    num = len({config.embedder for config in best.values()})
    assert len([n for n, _ in tune.started if n is None]) == 2 * (2 + num)


def test_counts_of_what_is_left(tmp_path: Path) -> None:
    found = study(search__trials_per_family=2)
    search = in_memory(found)
    assert (search.num_left, search.is_over, search.winner(), search.best()) == (10, False, None, None)
    tune = Tune(search).run(STEPS + 1)  # one trial has ended
    assert (search.num_left, search.is_over) == (9, False)
    tune.run()
    assert (search.num_left, search.is_over) == (0, True)


def test_verdicts_of_an_earlier_session_are_not_run_again(tmp_path: Path) -> None:
    found = study(search__trials_per_family=2)
    Tune(on_disk(found, tmp_path)).run()
    done = {(UNTRAINED, 1), (UNTRAINED, 2), ("red", 2)}
    search = on_disk(found, tmp_path, done)
    assert (search.num_left, search.is_over) == (3, False)
    tune = Tune(search).run()
    assert [(n, c.family, c.seed) for n, c in tune.started] == [
        (None, "red", 1),
        (None, "blue", 1),
        (None, "blue", 2),
    ]
    assert (search.num_left, search.is_over) == (0, True)
    everything = done | {("red", 1), ("blue", 1), ("blue", 2)}
    search = on_disk(found, tmp_path, everything)
    assert (search.num_left, search.is_over) == (0, True)
    assert search.suggest("t") is None
    assert not search.may_have_more()


def test_a_family_whose_trials_all_failed_is_left_out() -> None:
    def score(config: TrialConfig, step: int) -> float:
        if config.family == "blue":
            raise RuntimeError("CUDA out of memory")
        return hill(config, step)

    search = in_memory(study())
    tune = Tune(search, score, at_once=2).run()
    assert set(search.best_configs()) == {"red"}
    assert search.winner() == "red"
    assert {c.family for n, c in tune.started if n is None} == {UNTRAINED, "red"}
    assert search.failure_reasons() == ["CUDA out of memory"] * 8
    assert search.is_over


def test_a_study_whose_trials_all_failed_ends() -> None:
    def score(config: TrialConfig, step: int) -> float:
        raise RuntimeError("no data")

    search = in_memory(study(search__trials_per_family=2))
    tune = Tune(search, score).run()
    assert len(tune.started) == 4
    assert (search.best_configs(), search.winner(), search.is_over) == ({}, None, True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_final_score_that_is_not_finite_is_a_failure(value: float) -> None:
    def score(config: TrialConfig, step: int) -> float:
        return value if step == STEPS and config.family == "red" else hill(config, step)

    search = in_memory(study(search__trials_per_family=2, search__scheduler="none"))
    Tune(search, score).run()
    states = [t.state.name for t in search.study.trials]
    assert states == ["FAIL", "COMPLETE"] * 2
    assert search.failure_reasons() == [f"map_at_r is {value}"] * 2
    assert {
        a.status for a in search.assignments.values() if a.config.family == "red" and a.number is not None
    } == {"failed"}


def test_failed_trials_do_not_stop_others(unbroken: Tune) -> None:
    """A failed trial has no place among the peers, and its family goes on."""

    def score(config: TrialConfig, step: int) -> float:
        if step == 3 and config.loss.params["negative_margin"] == 0.6 and config.phase == "search":
            raise RuntimeError("node lost")
        return hill(config, step)

    search = in_memory(study())
    Tune(search, score, at_once=2).run()
    states = [t.state.name for t in search.study.trials]
    assert states[:2] == ["FAIL", "FAIL"]
    assert states[2:6] == ["COMPLETE"] * 4  # the first with two ended peers is in the fourth generation


def regret(sampler: str, seed: int) -> float:
    search = in_memory(
        study(
            families={"red": HILL},
            search={"trials_per_family": 30, "scheduler": "none", "sampler": sampler, "seed": seed},
            training={"epochs": 1},
        )
    )

    def score(config: TrialConfig, step: int) -> float:
        margin = float(config.loss.params["negative_margin"])
        return -((margin - 1.1) ** 2) - (math.log10(config.training.lr / 1e-3) / 3) ** 2

    Tune(search, score).run()
    best = search.best()
    assert best is not None
    return -best[0]


def test_random_search_never_draws_a_point_twice() -> None:
    search = in_memory(study(search={"trials_per_family": 8, "sampler": "random"}))
    tune = Tune(search).run()
    assert len({config.fingerprint() for number, config in tune.started if number is not None}) == 16


def test_tpe_beats_random_search_on_a_hill() -> None:
    tpe, chance = ([regret(sampler, seed) for seed in range(5)] for sampler in ("tpe", "random"))
    assert statistics.fmean(tpe) < 0.7 * statistics.fmean(chance)


def test_random_search_does_not_look_at_results_but_tpe_does() -> None:
    def params(sampler: str, score: Score) -> list[dict[str, Any]]:
        search = in_memory(study(search={"trials_per_family": 6, "scheduler": "none", "sampler": sampler}))
        Tune(search, score).run()
        return [t.params for t in search.study.trials]

    def valley(config: TrialConfig, step: int) -> float:
        return 1 - hill(config, step)

    assert params("random", hill) == params("random", valley)
    assert params("tpe", hill) != params("tpe", valley)


def test_a_search_over_losses_with_parameters_of_one_name(tmp_path: Path) -> None:
    families = {name: {"space": "graph_consistency"} for name in ("red", "blue")}
    changes = {"families": families, "batch": {"classes": "all"}, "search__trials_per_family": 20}

    def score(config: TrialConfig, step: int) -> float:
        return float(config.loss.params.get("alpha", 0)) - (config.loss.name == "multi_similarity")

    Tune(on_disk(study(**changes), tmp_path), score, at_once=2).run(60)
    tune = Tune(on_disk(study(**changes), tmp_path), score, at_once=2).run()
    unbroken = Tune(in_memory(study(**changes)), score, at_once=3, seed=1).run()
    assert by_number(tune.search) == by_number(unbroken.search)
    searched = [config for number, config in unbroken.started if number is not None]
    assert len({config.loss.name for config in searched}) == 4
    drawn = {name for trial in tune.search.study.trials for name in trial.params}
    assert {f"red/loss.alpha@{loss}" for loss in ("binomial_deviance", "multi_similarity")} <= drawn
    for name, config in tune.search.best_configs().items():
        best = max(score(other, 1) for other in searched if other.family == name)
        assert score(config, 1) == best
