"""A structure head that gives all items the same weights is told wherever the leaderboard is shown."""

from __future__ import annotations

import json

import pytest
from support.verdict_trials import verdict_trial

from dmlstudy.cli.tables import show_leaderboard
from dmlstudy.registry.leaderboard import Leaderboard, leaderboard
from dmlstudy.registry.runs import ALIKE
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.report import words
from dmlstudy.store import Store


@pytest.fixture(scope="module")
def board(store: Store) -> Leaderboard:
    """``idle`` does nothing, ``busy`` does, ``edge`` just so, ``plain`` has no structure head."""
    tracker = StudyTracker(store, "structured", {}, origin={ALIKE: json.dumps({"busy": "idle's points"})})
    omegas = {"idle": (0.0004, 0.0006), "busy": (0.2, 0.3), "edge": (0.009, 0.012), "plain": None}
    for family, pair in omegas.items():
        for seed in (1, 2):
            metrics = {"test_map_at_r": 0.5 + 0.01 * seed}
            if pair is not None:
                metrics |= {"test_omega_deviation": pair[seed - 1], "test_omega_saturated": 0.97}
            run_id = tracker.start_trial("x", verdict_trial(family, seed), None)
            tracker.end_trial(run_id, "finished", [], metrics)
    tracker.end_study("finished", {"objective": "map_at_r"})
    return leaderboard(store, "structured")


LINE = (
    "the structure head of idle did nothing, giving all items the same weights (omega_deviation 0.0005 < 0.01, 97% of"
    " weights at a bound): what structure embeddings bring is not tested"
)


def test_only_heads_that_did_nothing_are_told(board: Leaderboard) -> None:
    assert board.untested == [LINE]
    assert [row.family for row in board.rows if row.untested] == ["idle"]


def test_it_is_in_json_in_the_table_and_in_the_report(
    board: Leaderboard, capsys: pytest.CaptureFixture[str]
) -> None:
    written = json.loads(board.model_dump_json())
    assert written["untested"] == [LINE]
    idle = next(row for row in written["rows"] if row["family"] == "idle")
    assert idle["test"]["test_omega_deviation"]["mean"] == pytest.approx(0.0005)
    show_leaderboard(board)
    assert LINE in " ".join(capsys.readouterr().out.split())
    assert LINE[1:].replace("<", "&lt;") in str(words.comparison_table(board))


def test_families_that_are_alike_are_told(board: Leaderboard, capsys: pytest.CaptureFixture[str]) -> None:
    line = "paired in the search too: busy has idle's points"
    assert json.loads(board.model_dump_json())["alike"] == {"busy": "idle's points"}
    show_leaderboard(board)
    assert line in capsys.readouterr().out.splitlines()
    assert board.model_copy(update={"alike": {}}).paired == ""


def test_a_study_without_such_is_written_as_before(board: Leaderboard) -> None:
    assert "untested" not in board.model_copy(update={"untested": []}).model_dump()
    assert Leaderboard.model_validate({**board.model_dump(), "untested": []}).untested == []
