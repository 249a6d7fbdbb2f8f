"""Verdict seeds that are added until it is decided: the same table however the study runs, and no seed too many."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import optuna
import pytest
from support.tune_simulator import ActorLost, Killed, Tune, hill, in_memory, study

from dmlstudy.records import TrialConfig, UnitScores
from dmlstudy.search.study_search import Assignment, StudySearch
from dmlstudy.search.verdict_trials import JudgedBefore
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.trials import Status
from dmlstudy.verdict.comparison import Comparison, UnitMeans
from dmlstudy.verdict.sequential import Looks, SeedScore

NUM_CLASSES, QUERIES = 12, 5
METRIC = "test_map_at_r"


def steps(**protocol: Any) -> StudySpec:
    names = ("red", "blue", "green")
    one = study().raw["families"]["red"]
    return study(
        families=dict.fromkeys(names, one),
        search={"trials_per_family": 2, "seed": 5},
        protocol={"num_folds": 2, "verdict_seeds": {"from": 3, "to": 10}, **protocol},
    )


GAINS = {"red": 0.02, "blue": 0.0, "green": 0.018, "untrained": -0.3}


def by_class(family: str, seed: int) -> UnitScores:
    """Scores by class: a gain of each family, noise of each seed, and noise of each class."""
    rng = np.random.default_rng([zlib.crc32(family.encode()), seed])
    own = np.random.default_rng(zlib.crc32(family.encode()))
    mean_C = 0.6 + GAINS[family] + 0.004 * rng.normal() + 0.01 * own.normal(size=NUM_CLASSES)
    mean_C = mean_C + 0.002 * rng.normal(size=NUM_CLASSES)
    return UnitScores(
        units=list(range(NUM_CLASSES)),
        counts=[QUERIES] * NUM_CLASSES,
        sums={"map_at_r": [float(each) for each in QUERIES * mean_C]},
    )


def score(config: TrialConfig, step: int) -> float:
    if config.phase == "search":
        return hill(config, step)
    own = by_class(config.family, config.seed)
    return sum(own.sums["map_at_r"]) / sum(own.counts)


class Store:
    """Keeps what MLflow would of the verdict trials, over sessions that may be killed."""

    def __init__(self) -> None:
        self.scores: dict[tuple[str, int], SeedScore] = {}
        self.optuna = optuna.storages.InMemoryStorage()
        self.started: list[tuple[str, int]] = []
        self.has_units = True

    def record(self, search: StudySearch) -> Any:
        def record(assignment: Assignment, _: list[float]) -> None:
            if assignment.number is not None:
                return
            key = (assignment.config.family, assignment.config.seed)
            if assignment.status != Status.FINISHED:
                self.scores[key] = SeedScore(None)
                return
            units = None
            if self.has_units:
                assignment.unit_scores = by_class(*key)
                units = UnitMeans.of(assignment.unit_scores, METRIC)
            self.scores[key] = SeedScore(assignment.metrics[METRIC], units)

        return record

    def session(self, found: StudySpec, *, score: Any = score, **more: Any) -> Tune:
        finished = {key for key, each in self.scores.items() if each.score is not None}
        judged = JudgedBefore(dict(self.scores), 1e-3)
        search = in_memory(found, finished, self.optuna, judged=judged)
        tune = Tune(search, score, record=self.record(search), **more).run()
        self.started += [(c.family, c.seed) for number, c in tune.started if number is None]
        return tune


def table(store: Store, search: StudySearch) -> list[Comparison]:
    """The comparisons as a reader of the store finds them."""
    families = list(search.competitors().configs)
    looks = Looks(search.plan, families, search.pairs(), 1e-3)
    looks.take(store.scores)
    assert looks.is_over
    return looks.comparisons()


@pytest.fixture(scope="module")
def unbroken() -> tuple[Store, Tune]:
    store = Store()
    return store, store.session(steps())


def test_trials_come_by_look_untrained_first_family_and_seed(unbroken: tuple[Store, Tune]) -> None:
    store, tune = unbroken
    first = [(family, seed) for family in ("untrained", "red", "blue", "green") for seed in (1, 2, 3)]
    assert store.started[:12] == first
    assert len(store.started) == len(set(store.started))
    later = [seed for _, seed in store.started[12:]]
    assert later == sorted(later) or max(later) > 4  # by look, then family
    assert tune.search.is_over
    assert tune.search.left == (0, 0, 0)


def test_no_seed_beyond_the_look_and_families_without_an_open_pair_stop(
    unbroken: tuple[Store, Tune],
) -> None:
    store, tune = unbroken
    found = table(store, tune.search)
    winner = tune.search.winner()
    assert all(winner in (each.first, each.second) for each in found)
    num_seeds = {family: sum(f == family for f, _ in store.scores) for family in GAINS}
    for each in found:
        assert each.ended in ("decided", "seeds", "classes", "limit")
        assert each.look == each.num_seeds <= min(num_seeds[each.first], num_seeds[each.second])
        (other,) = {each.first, each.second} - {winner}
        assert num_seeds[other] == each.look
    assert num_seeds[winner] == max(each.look for each in found)
    assert num_seeds["untrained"] == 3
    assert {each.look for each in found} > {3}


def test_each_look_is_told(unbroken: tuple[Store, Tune]) -> None:
    _, tune = unbroken
    notes = [note for note in tune.search.take_notes() if note.startswith("look at")]
    assert notes[0].startswith("look at 3 seeds: of 3 open pairs 1 decided")


@pytest.mark.parametrize(("at_once", "order"), [(4, 0), (4, 1), (2, 2), (7, 3)])
def test_several_at_once_give_the_same_table(at_once: int, order: int, unbroken: tuple[Store, Tune]) -> None:
    store = Store()
    tune = store.session(steps(), at_once=at_once, seed=order)
    assert table(store, tune.search) == table(unbroken[0], unbroken[1].search)
    assert store.started == unbroken[0].started


@pytest.mark.parametrize(("method", "calls"), [("commit", 2), ("commit", 3), ("observe", 11)])
def test_killed_at_every_trial_and_resumed_gives_the_same_table(
    method: str, calls: int, unbroken: tuple[Store, Tune]
) -> None:
    store, num_sessions = Store(), 0
    while True:
        tune = store.session(steps(), dies_before=(method, calls), at_once=2, seed=num_sessions)
        num_sessions += 1
        if tune.is_over:
            break
        assert num_sessions < 200
    assert num_sessions > 5
    assert store.scores.keys() == unbroken[0].scores.keys()
    assert table(store, tune.search) == table(unbroken[0], unbroken[1].search)


def test_a_failed_seed_leaves_its_familys_pairs() -> None:
    def fails(config: TrialConfig, step: int) -> float:
        if config.phase == "verdict" and (config.family, config.seed) == ("green", 2):
            raise RuntimeError("out of memory")
        return score(config, step)

    store = Store()
    tune = store.session(steps(), score=fails)
    assert tune.search.is_over
    assert store.scores["green", 2] == SeedScore(None)
    found = {frozenset((each.first, each.second)): each for each in table(store, tune.search)}
    winner = tune.search.winner()
    for pair, each in found.items():
        assert each.num_seeds == each.look - ("green" in pair)
    # Once a later look has begun it does not run again; before, it does, as where the number is fixed.
    assert store.session(steps()).started == []
    early = Store()
    early.scores = {
        key: each if key != (winner, 3) else SeedScore(None)
        for key, each in store.scores.items()
        if key[1] <= 3
    }
    early.optuna = store.optuna
    again = early.session(steps())
    assert early.started[0] == (winner, 3)
    assert again.search.is_over


def test_a_trial_that_is_handed_out_again_is_awaited() -> None:
    lost: list[str] = []

    def loses(config: TrialConfig, step: int) -> float:
        if config.phase == "verdict" and (config.family, config.seed) == ("red", 3) and not lost:
            lost.append("once")
            raise ActorLost("gone")
        return score(config, step)

    store, whole = Store(), Store()
    tune = store.session(steps(), score=loses, at_once=3)
    expected = whole.session(steps())
    assert lost
    assert table(store, tune.search) == table(whole, expected.search)


def test_what_is_left_is_a_bound_that_shrinks() -> None:
    found, store = steps(), Store()
    search = StudySearch(found, store.optuna, set(), JudgedBefore())
    assert search.left == (6, 30, 10)
    assert search.verdict_at_most == (40, 10)
    assert found.num_verdict_trials == 40
    lefts: list[int] = []
    record = store.record(search)

    def noting(assignment: Assignment, values: list[float]) -> None:
        lefts.append(search.num_left)
        record(assignment, values)

    Tune(search, score, record=noting).run()
    assert lefts == sorted(lefts, reverse=True)
    assert search.num_left == 0
    assert search.verdict_at_most[0] == len(store.scores)
    assert search.num_ended == 6 + len(store.scores) < 6 + 40


def test_on_these_classes_and_without_scores_by_class() -> None:
    store = Store()
    store.has_units = False
    tune = store.session(steps())
    assert tune.search.is_over
    assert all(each.like_outcome is None for each in table(store, tune.search))


def test_one_family_is_compared_with_its_untrained_embedder_alone() -> None:
    found = study(
        families={"red": study().raw["families"]["red"]},
        search={"trials_per_family": 2, "seed": 5},
        protocol={"num_folds": 2, "verdict_seeds": {"from": 3, "to": 4}},
    )
    store = Store()
    tune = store.session(found)
    (only,) = table(store, tune.search)
    assert (only.first, only.second, only.outcome, only.look) == ("red", "untrained", "better", 3)
    assert len(store.scores) == 6


def test_nothing_is_handed_out_before_the_plan_is_kept() -> None:
    found, store = steps(), Store()
    search = StudySearch(found, store.optuna, set(), JudgedBefore())
    calls: list[int] = []

    def seal() -> None:
        calls.append(sum(each.config.phase == "verdict" for each in search.assignments.values()))
        if len(calls) == 1:
            raise Killed

    search.before_verdict = seal
    Tune(search, score, record=store.record(search)).run()
    assert store.scores == {}
    again = StudySearch(found, store.optuna, set(), JudgedBefore())
    again.before_verdict = seal
    Tune(again, score, record=store.record(again)).run()
    assert calls == [0, 0]


def test_a_search_without_a_finished_trial_has_no_verdict() -> None:
    def fails(config: TrialConfig, step: int) -> float:
        raise RuntimeError("loss is nan")

    store = Store()
    tune = store.session(steps(), score=fails)
    assert tune.search.is_over
    assert store.scores == {}
    assert tune.search.verdict_configs() == []
