"""The leaderboard: t-intervals, and an order that the test classes never see."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dmlstudy.records import BatchConfig, DataConfig, EmbedderConfig, LossConfig, TrainingConfig, TrialConfig
from dmlstudy.registry.estimates import Estimate
from dmlstudy.registry.leaderboard import Leaderboard, leaderboard
from dmlstudy.registry.runs import PLAN
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.store import Store, StoreError
from dmlstudy.verdict.sequential import Plan


@pytest.mark.parametrize(
    ("values", "mean", "half_width"),
    [
        ([1.0, 2.0, 3.0], 2.0, 4.302653 / math.sqrt(3)),  # t(0.975, 2) from the tables, deviation 1
        ([0.5, 0.7], 0.6, 12.706205 * math.sqrt(0.02) / math.sqrt(2)),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 2.776445 * math.sqrt(2.5) / math.sqrt(5)),
        ([0.25, 0.25, 0.25], 0.25, 0.0),
    ],
)
def test_estimate_is_a_t_interval(values: list[float], mean: float, half_width: float) -> None:
    estimate = Estimate.of(values)
    assert estimate.num == len(values)
    assert estimate.mean == pytest.approx(mean, abs=1e-12)
    assert estimate.half_width == pytest.approx(half_width, rel=1e-6)


def test_estimate_agrees_with_scipy() -> None:
    from scipy import stats

    values = [0.811, 0.79, 0.82, 0.805, 0.7]
    low, high = stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=stats.sem(values))
    estimate = Estimate.of(values)
    assert estimate.half_width is not None
    assert estimate.mean - estimate.half_width == pytest.approx(low)
    assert estimate.mean + estimate.half_width == pytest.approx(high)


def test_a_single_value_has_no_interval() -> None:
    assert Estimate.of([0.5]) == Estimate(mean=0.5, half_width=None, num=1)
    assert str(Estimate.of([0.5])) == "0.5000"
    assert str(Estimate(mean=0.5, half_width=0.01234, num=3)) == "0.5000 ± 0.012"


def config(family: str, phase: Any, seed: int, lr: float, dim: int = 64) -> TrialConfig:
    return TrialConfig(
        family=family,
        phase=phase,
        seed=seed,
        data=DataConfig(name="digits"),
        embedder=EmbedderConfig(dim=dim),
        batch=BatchConfig(),
        training=TrainingConfig(lr=lr),
        loss=LossConfig(name="contrastive"),
    )


def trial(tracker: StudyTracker, family: str, phase: str, seed: int, status: Any, **metrics: float) -> None:
    lr, dim, number = metrics.pop("lr", 1e-3), int(metrics.pop("dim", 64)), metrics.pop("number", None)
    found = config(family, phase, seed, lr, dim)
    run_id = tracker.start_trial("x", found, None if number is None else int(number))
    tracker.end_trial(run_id, status, [], metrics)


def test_a_row_has_what_the_folds_of_the_best_chose(store: Store) -> None:
    tracker = StudyTracker(store, "chosen", {})
    trial(tracker, "red", "search", 0, "finished", map_at_r=0.6, wise_ft=0.5, number=3)
    assert tracker.recorded_ends(3)[0].settled == {"wise_ft": 0.5}
    tracker.note_search({"red": {"finished": 1}}, {"red": 3})
    tracker.end_study("finished", {"winner": "red"})
    (row,) = leaderboard(store, "chosen").rows
    assert row.params["training.wise_ft"] == "0.5"


@pytest.fixture(scope="module")
def board(store: Store) -> Leaderboard:
    """``modest`` is best on validation, ``lucky`` on the test classes; ``broken`` never finished."""
    tracker = StudyTracker(store, "board", {})
    trial(tracker, "lucky", "search", 0, "finished", map_at_r=0.6, map_at_r_stderr=0.02, lr=0.5)
    trial(tracker, "lucky", "search", 0, "finished", map_at_r=0.5)
    trial(tracker, "broken", "search", 0, "failed")
    trial(tracker, "modest", "search", 0, "finished", map_at_r=0.65)
    trial(tracker, "modest", "search", 0, "finished", map_at_r=0.7, map_at_r_stderr=0.01, lr=0.25)
    trial(tracker, "modest", "search", 0, "pruned", map_at_r=0.9)  # after one epoch: no final score
    trial(tracker, "modest", "search", 0, "failed", map_at_r=0.95)
    for seed, score in ((1, 0.1), (2, 0.2)):
        trial(tracker, "untrained", "verdict", seed, "finished", test_map_at_r=score)
        trial(tracker, "modest", "verdict", seed, "finished", test_map_at_r=0.4 + score, test_recall_at_1=0.5)
        trial(tracker, "lucky", "verdict", seed, "finished", test_map_at_r=0.7 + score, test_recall_at_1=0.9)
    trial(tracker, "modest", "verdict", 3, "failed", test_map_at_r=0.0)
    trial(tracker, "modest", "verdict", 3, "interrupted", test_map_at_r=0.0)
    summary = {"objective": "map_at_r", "winner": "modest", "model": "m/1"}
    tracker.end_study("finished", summary)
    return leaderboard(store, "board")


def test_rows_are_ordered_by_validation_not_by_test(board: Leaderboard) -> None:
    assert [row.family for row in board.rows][:2] == ["modest", "lucky"]
    assert {row.family for row in board.rows[2:]} == {"untrained", "broken"}
    assert board.rows[0].test["test_map_at_r"].mean < board.rows[1].test["test_map_at_r"].mean
    assert (board.study, board.status, board.winner, board.model) == ("board", "finished", "modest", "m/1")


def test_a_row_counts_trials_and_shows_its_best_finished_one(board: Leaderboard) -> None:
    modest = board.rows[0]
    assert (modest.num_finished, modest.num_pruned, modest.num_failed, modest.num_judged) == (2, 1, 1, 2)
    assert (modest.validation, modest.validation_stderr) == (0.7, 0.01)
    assert modest.params["training.lr"] == "0.25"
    assert set(modest.test) == {"test_map_at_r", "test_recall_at_1"}
    expected = Estimate.of([0.5, 0.6])
    assert modest.test["test_map_at_r"].mean == pytest.approx(expected.mean)
    assert modest.test["test_map_at_r"].half_width == pytest.approx(expected.half_width)
    assert modest.test["test_recall_at_1"].half_width == 0.0


def test_rows_without_a_search_or_without_a_verdict(board: Leaderboard) -> None:
    rows = {row.family: row for row in board.rows}
    untrained, broken = rows["untrained"], rows["broken"]
    assert (untrained.validation, untrained.params, untrained.num_judged) == (None, {}, 2)
    assert untrained.test["test_map_at_r"].mean == pytest.approx(0.15)
    assert (broken.validation, broken.num_failed, broken.test) == (None, 1, {})


def test_families_are_compared_on_the_seeds_they_share(board: Leaderboard) -> None:
    pairs = {(c.first, c.second): c for c in board.comparisons}
    assert pairs.keys() == {("modest", "lucky"), ("modest", "untrained"), ("lucky", "untrained")}
    against_lucky = pairs["modest", "lucky"]
    assert against_lucky.num_seeds == 2
    assert against_lucky.effect == pytest.approx(-0.3)
    assert against_lucky.outcome == "not distinguishable"  # two seeds that agree


def test_a_family_is_compared_with_its_own_embedder_untrained(store: Store) -> None:
    tracker = StudyTracker(store, "embedders", {})
    dims = {"red": 8, "blue": 16, "green": 8, "untrained (red)": 8, "untrained (blue)": 16}
    for family, dim in dims.items():
        for seed in (1, 2, 3):
            trial(
                tracker, family, "verdict", seed, "finished", test_map_at_r=dim / 100 + seed / 1000, dim=dim
            )
    board = leaderboard(store, "embedders")
    assert {row.family: row.untrained for row in board.rows} == {
        "red": "untrained (red)",
        "blue": "untrained (blue)",
        "green": "untrained (red)",
        "untrained (red)": None,
        "untrained (blue)": None,
    }
    assert {frozenset((c.first, c.second)) for c in board.comparisons} == {
        frozenset(pair)
        for pair in [
            ("red", "blue"),
            ("red", "green"),
            ("blue", "green"),
            ("red", "untrained (red)"),
            ("green", "untrained (red)"),
            ("blue", "untrained (blue)"),
        ]
    }


def test_a_row_whose_seeds_have_not_all_the_same_scores(store: Store) -> None:
    tracker = StudyTracker(store, "uneven", {})
    trial(tracker, "red", "verdict", 1, "finished", test_map_at_r=0.5)
    trial(tracker, "red", "verdict", 2, "finished", test_map_at_r=0.6, test_recall_at_1=0.9)
    (row,) = leaderboard(store, "uneven").rows
    assert {name: estimate.num for name, estimate in row.test.items()} == {
        "test_map_at_r": 2,
        "test_recall_at_1": 1,
    }


def test_scores_of_the_shipped_model_come_before_those_of_the_folds_models(store: Store) -> None:
    tracker = StudyTracker(store, "folds-last", {})
    names = (
        "test_concatenated_map_at_r",
        "test_map_at_r",
        "test_num_queries",
        "test_recall_at_1",
        "test_separate_map_at_r",
    )
    trial(tracker, "power", "verdict", 1, "finished", **dict.fromkeys(names, 0.5))
    (row,) = leaderboard(store, "folds-last").rows
    assert list(row.test)[:3] == ["test_map_at_r", "test_recall_at_1", "test_num_queries"]
    assert set(row.test) == set(names)


@pytest.mark.parametrize(("num_test_images", "outcome"), [(10_000, "better"), (20, "not distinguishable")])
def test_seeds_that_agree_are_as_sure_as_the_test_classes_are_many(
    num_test_images: int, outcome: str, store: Store
) -> None:
    name = f"coarse-{num_test_images}"
    tracker = StudyTracker(store, name, {}, origin={"num_test_images": str(num_test_images)})
    for family, score in (("red", 0.55), ("untrained", 0.5)):
        for seed in (1, 2, 3, 4, 5):
            trial(tracker, family, "verdict", seed, "finished", test_map_at_r=score)
    (comparison,) = leaderboard(store, name).comparisons
    assert comparison.outcome == outcome
    assert comparison.low is not None
    assert comparison.low < comparison.effect


def test_with_a_second_objective_there_is_a_front(store: Store) -> None:
    """Quality decides which trial is a family's best; the front shows what smaller embedders give."""
    origin = {"objective": "map_at_r", "second_objective": "embedding_dim"}
    tracker = StudyTracker(store, "front", {}, origin=origin)
    trials = [
        ("red", 32, 0.7), ("blue", 8, 0.5), ("red", 16, 0.5), ("blue", 16, 0.6), ("red", 64, 0.7),
        ("blue", 8, 0.5), ("red", 4, 0.1), ("blue", 64, 0.8),
    ]  # fmt: skip
    for number, (family, dim, score) in enumerate(trials):
        trial(tracker, family, "search", 0, "finished", map_at_r=score, dim=dim, number=number)
    trial(tracker, "red", "search", 0, "pruned", map_at_r=0.9, dim=2, number=8)
    board = leaderboard(store, "front")
    assert board.second_objective == "embedding_dim"
    assert [(one.trial, one.family, one.size, one.validation) for one in board.front] == [
        (6, "red", 4, 0.1),
        (1, "blue", 8, 0.5),
        (5, "blue", 8, 0.5),
        (3, "blue", 16, 0.6),
        (0, "red", 32, 0.7),
        (7, "blue", 64, 0.8),
    ]
    assert [(row.family, row.validation) for row in board.rows] == [("blue", 0.8), ("red", 0.7)]


def test_latency_is_a_second_objective_too(store: Store) -> None:
    tracker = StudyTracker(
        store, "fast", {}, origin={"objective": "map_at_r", "second_objective": "latency_ms"}
    )
    for number, (latency, score) in enumerate([(0.5, 0.7), (0.25, 0.6), (0.75, 0.6), (None, 0.8)]):
        told = {} if latency is None else {"embed_ms_per_image": latency}
        trial(tracker, "red", "search", 0, "finished", map_at_r=score, number=number, **told)
    front = leaderboard(store, "fast").front
    assert [(one.trial, one.size) for one in front] == [(1, 0.25), (0, 0.5), (3, math.inf)]


def test_a_study_that_has_just_begun(store: Store) -> None:
    tracker = StudyTracker(store, "begun", {})
    tracker.start_trial("x", config("a", "search", 0, 1e-3), 0)
    board = leaderboard(store, "begun")
    assert (board.status, board.winner, board.model) == ("running", None, None)
    assert [(row.family, row.num_finished, row.validation) for row in board.rows] == [("a", 0, None)]


def test_the_objective_is_the_studys_own(store: Store) -> None:
    tracker = StudyTracker(store, "recall", {})
    trial(tracker, "a", "search", 0, "finished", map_at_r=0.9, recall_at_1=0.1)
    trial(tracker, "b", "search", 0, "finished", map_at_r=0.1, recall_at_1=0.9)
    tracker.end_study("finished", {"objective": "recall_at_1"})
    board = leaderboard(store, "recall")
    assert [(row.family, row.validation) for row in board.rows] == [("b", 0.9), ("a", 0.1)]


def test_an_unknown_study(store: Store, board: Leaderboard) -> None:
    with pytest.raises(StoreError, match=r"^no study 'bord' in the store .*; there are: .*board"):
        leaderboard(store, "bord")


def test_a_trial_begun_again_after_a_crash_counts_once(store: Store) -> None:
    """A driver killed between MLflow and Optuna runs the trial again: two runs, one trial."""
    tracker = StudyTracker(store, "twice", {})
    for score in (0.5, 0.6):
        run_id = tracker.start_trial("a #0", config("a", "search", 0, 1e-3), 0)
        tracker.end_trial(run_id, "finished", [], {"map_at_r": score})
    (row,) = leaderboard(store, "twice").rows
    assert (row.num_finished, row.validation) == (1, 0.6)


def test_the_winner_or_a_named_pair_alone_is_compared_where_the_plan_says_so(store: Store) -> None:
    """Each other pair is left out, and the intervals are for fewer pairs, so narrower."""
    boards = []
    for name, compared in {"all": "all", "winner": "winner", "named": (("third", "best"),)}.items():
        plan = Plan(looks=(3,), compare=compared, decide_on=None, give_up=0.0)
        tracker = StudyTracker(store, f"compared-{name}", {}, origin={PLAN: plan.model_dump_json()})
        for place, family in enumerate(("best", "second", "third")):
            trial(tracker, family, "search", 0, "finished", map_at_r=0.9 - 0.1 * place)
        for seed in (1, 2, 3):
            trial(tracker, "untrained", "verdict", seed, "finished", test_map_at_r=0.1 + 0.01 * seed)
            for place, family in enumerate(("best", "second", "third")):
                value = 0.5 - 0.1 * place + 0.01 * ((seed * (place + 2)) % 3)
                trial(tracker, family, "verdict", seed, "finished", test_map_at_r=value)
        tracker.end_study("finished", {"objective": "map_at_r", "winner": "best"})
        boards.append(leaderboard(store, f"compared-{name}"))
    every, alone, named = (
        {(each.first, each.second): each for each in board.comparisons} for board in boards
    )
    assert len(every) == 6
    assert named.keys() == {("third", "best")}
    assert named["third", "best"].effect == -every["best", "third"].effect
    assert named["third", "best"].adjusted_p_value == named["third", "best"].p_value
    assert alone.keys() == {("best", "second"), ("best", "third"), ("best", "untrained")}
    for pair, each in alone.items():
        assert each.effect == every[pair].effect
        assert each.p_value == every[pair].p_value
        assert (each.high or 0) < (every[pair].high or 0)
        assert each.ended is None
