"""The best trial of a family, where several have the same score: whoever is asked names the search's own."""

from __future__ import annotations

import time

import pytest
from support.tune_simulator import study

from dmlstudy.records import TrialConfig
from dmlstudy.registry import connection, tracking
from dmlstudy.registry.folds import publish_folds
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.registry.runs import NOTE, RunKind, StudyRuns
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.search.history import searched
from dmlstudy.search.storage import open_storage
from dmlstudy.search.study_search import StudySearch
from dmlstudy.search.warm_start import earlier_best
from dmlstudy.store import Store, sole_driver
from dmlstudy.studies.status import study_status

SCORES = (0.5, 0.7, 0.7, 0.6, 0.7, 0.7, 0.2, 0.7)
"""By trial number; even ones are of the family red, odd ones of blue."""
BEST = {"red": 2, "blue": 1}
WINNER = "blue"
FOUND = study(search__scheduler="none", search__trials_per_family=4, protocol__num_folds=2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("ties") / "store")
    made.prepare()
    return made


@pytest.fixture(scope="module")
def search(store: Store) -> StudySearch:
    """A search with ties, of which MLflow has begun the later trials first, as several at once may."""
    with sole_driver(store, FOUND.name):
        store.write_state(
            FOUND.name,
            "finished",
            started=time.time(),
            spec={"families": {"red": {}, "blue": {}}},
            num_search_trials=8,
            num_verdict_trials=0,
        )
    search = StudySearch(FOUND, open_storage(store), set())
    configs: list[TrialConfig] = []
    for number, score in enumerate(SCORES):
        config = search.suggest(str(number))
        assert config is not None
        configs.append(config)
        search.observe(str(number), {"step": 1.0, "map_at_r": score})
        search.end(str(number), {"map_at_r": score})
        search.commit(str(number))
    tracker = StudyTracker(store, FOUND.name, {})
    for number, score in reversed(list(enumerate(SCORES))):
        run_id = tracker.start_trial(f"#{number}", configs[number], number)
        scores = {"map_at_r": score, "fold_0_map_at_r": score, "fold_1_map_at_r": score}
        tracker.end_trial(run_id, "finished", [{"step": 2.0, **scores}], scores)  # type: ignore[arg-type]
        time.sleep(0.002)  # MLflow orders runs by milliseconds
    return search


@pytest.fixture(params=["every run", "note"])
def runs(request: pytest.FixtureRequest, store: Store, search: StudySearch) -> StudyRuns:
    """The study's runs, with the search's own note of its best trials, and before there is one."""
    tracker = StudyTracker(store, FOUND.name, {})
    tracker.client.set_tag(tracker.parent_id, NOTE, "")
    if request.param == "note":
        tracker.note_search(search.counts(), search.best_numbers())
    runs = tracking.runs_of(store, FOUND.name)
    assert (runs.study.noted is not None) == (request.param == "note")
    return runs


def test_the_search_takes_the_first_of_equals(search: StudySearch) -> None:
    assert search.best_numbers() == BEST
    assert search.winner() == WINNER
    assert search.best() == (0.7, "blue #1")


def test_another_session_reads_the_same(store: Store, search: StudySearch) -> None:
    assert StudySearch(FOUND, open_storage(store), set()).best_numbers() == search.best_numbers()


def test_runs_and_leaderboard_say_the_same(store: Store, runs: StudyRuns) -> None:
    best = {family: runs.best(family) for family in BEST}
    assert {family: run.number for family, run in best.items() if run} == BEST
    rows = leaderboard(store, FOUND.name).rows
    assert [row.family for row in rows] == [WINNER, "red"]
    assert [row.params for row in rows] == [run.params for run in (best["blue"], best["red"]) if run]


def test_report_and_status_say_the_same(store: Store, search: StudySearch) -> None:
    tried = searched(store, FOUND.name)
    assert {family: each.best.number for family, each in tried.items() if each.best} == BEST
    status = study_status(store, FOUND.name)
    assert {each.family: each.best_trial for each in status.families} == BEST
    assert status.best is not None
    assert (status.best.family, status.best.best) == (WINNER, 0.7)


def test_folds_are_shown_of_the_same_trials(runs: StudyRuns, search: StudySearch, store: Store) -> None:
    client = connection.connect(store)
    publish_folds(client, runs.experiment_id, BEST, "map_at_r")
    assert {run.family: run.number for run in runs.every(RunKind.FOLD)} == BEST


def test_a_later_study_begins_with_the_same(store: Store, search: StudySearch) -> None:
    later = study(name="later", search__warm_start=[FOUND.name])
    points = earlier_best(later, open_storage(store))
    assert {family: own[0][0] for family, own in points.items()} == {
        family: f"{FOUND.name} #{number}" for family, number in BEST.items()
    }
