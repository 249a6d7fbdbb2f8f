"""What a leaderboard shows of retention: a column everywhere, what is lost, and nothing in studies without it."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path

import pytest
from support.verdict_trials import verdict_trial

from dmlstudy import metric_names
from dmlstudy.cli.tables import show_leaderboard
from dmlstudy.interface import Study
from dmlstudy.records import DataConfig, TrainingConfig
from dmlstudy.registry import leaderboard_file, mlflow_view
from dmlstudy.registry.card import card
from dmlstudy.registry.leaderboard import Leaderboard, leaderboard
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.report import retention as report_retention
from dmlstudy.report import words
from dmlstudy.report.page import Plot
from dmlstudy.store import Store
from dmlstudy.verdict.comparison import compare

TAGS = {
    "objective": "map_at_r",
    "num_test_images": "896",
    "retention": "hf_parquet, base",
    "num_retention_images": "2500",
    "num_retention_queries": "2500",
    "num_retention_classes": "10",
    "retention_seen": "the study trains on 1 of the 10 classes",
}
SCORES = {  # test, retention, by seed
    "red": ((0.60, 0.62, 0.61), (0.20, 0.21, 0.19)),
    "blue": ((0.50, 0.53, 0.50), (0.33, 0.29, 0.31)),
    "untrained": ((0.10, 0.20, 0.15), (0.30, 0.31, 0.30)),
}


def made(store: Store, name: str, origin: dict[str, str], *, has_retention: bool = True) -> Leaderboard:
    tracker = StudyTracker(store, name, {}, origin=origin)
    for family, (tests, kept) in SCORES.items():
        if family != "untrained":
            search = verdict_trial(family).model_copy(update={"phase": "search"})
            run_id = tracker.start_trial("x", search, 0)
            tracker.end_trial(run_id, "finished", [], {"map_at_r": tests[0]})  # type: ignore[arg-type]
        for seed, (test, elsewhere) in enumerate(zip(tests, kept, strict=True), 1):
            config = verdict_trial(family, seed).model_copy(
                update={"training": TrainingConfig(epochs=0 if family == "untrained" else 2)}
            )
            scores = metric_names.all_on_test({"map_at_r": test, "recall_at_1": test})
            if has_retention:
                scores |= metric_names.all_on_retention(
                    {"num_queries_without_positive": 0.0, "map_at_r": elsewhere, "recall_at_1": elsewhere}
                )
            run_id = tracker.start_trial("x", config, None)
            tracker.end_trial(run_id, "finished", [], scores)  # type: ignore[arg-type]
    tracker.end_study("finished", {"winner": "red", "model": "m/1"})
    return leaderboard(store, name)


@pytest.fixture(scope="module")
def board(store: Store) -> Leaderboard:
    return made(store, "keeping", TAGS)


@pytest.fixture(scope="module")
def plain(store: Store) -> Leaderboard:
    own = {name: value for name, value in TAGS.items() if "retention" not in name}
    return made(store, "plain", own, has_retention=False)


def test_each_row_has_its_estimates_and_what_is_lost(board: Leaderboard, plain: Leaderboard) -> None:
    for row in board.rows:
        kept = row.retention["retention_map_at_r"]
        assert kept.mean == pytest.approx(statistics.fmean(SCORES[row.family][1]))
        assert kept.num == 3
        assert not any("retention" in name for name in row.test)
        assert next(reversed(row.retention)) == "retention_num_queries_without_positive"
    by_seed = {family: dict(enumerate(kept, 1)) for family, (_, kept) in SCORES.items()}
    pairs = [("red", "untrained"), ("blue", "untrained")]
    assert board.lost == compare(by_seed, pairs=pairs, resolution=1 / 2500)
    red, blue = board.lost_by("red"), board.lost_by("blue")
    assert red is not None
    assert blue is not None
    assert (red.outcome, blue.outcome) == ("worse", "not distinguishable")
    assert board.lost_by("untrained") is None
    # The verdict's own comparisons and order are those of the same study without retention data.
    assert board.comparisons == plain.comparisons
    assert [row.family for row in board.rows] == [row.family for row in plain.rows]


def test_a_study_without_it_shows_nothing_of_it(
    plain: Leaderboard, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    show_leaderboard(plain)
    shown = [
        capsys.readouterr().out,
        plain.model_dump_json(),
        leaderboard_file.csv_text(plain),
        mlflow_view.note(plain, {}, "1"),
        json.dumps(mlflow_view.view(plain)),
        words.leaderboard_table(plain),
        Study(store, "plain")._repr_html_(),
        carded(plain),
    ]
    assert [text for text in shown if "retention" in text.lower()] == []
    assert "lost" not in json.loads(plain.model_dump_json())
    assert report_retention.parts(plain) == []


def test_the_terminal_has_a_column_and_says_what_is_lost(
    board: Leaderboard, capsys: pytest.CaptureFixture[str]
) -> None:
    show_leaderboard(board)
    lines = capsys.readouterr().out.splitlines()
    assert "retention map_at_r" in lines[1]
    assert "0.2000 ± 0.025" in next(line for line in lines if line.lstrip().startswith("red"))
    assert any("hf_parquet, base: 2500 images of 10 classes" in line for line in lines)
    assert "  but the study trains on 1 of the 10 classes" in lines
    assert any(line.startswith("  red worse than untrained on these classes: -0.1033 [") for line in lines)


def test_files_and_frames_have_columns_of_it(board: Leaderboard, store: Store) -> None:
    found = {row["family"]: row for row in csv.DictReader(io.StringIO(leaderboard_file.csv_text(board)))}
    assert float(found["red"]["retention_map_at_r_estimate"]) == pytest.approx(0.2)
    assert found["red"]["retention_map_at_r_n"] == "3"
    assert found["red"]["retention_verdict"] == "worse"
    assert float(found["red"]["retention_effect"]) == pytest.approx(-0.31 / 3)
    assert float(found["red"]["retention_effect_high"]) < 0
    assert found["untrained"]["retention_effect"] == ""
    frame = Study(store, "keeping").leaderboard().set_index("family")
    assert frame.loc["blue", "retention_map_at_r_estimate"] == pytest.approx(0.31)
    assert "<th>retention map_at_r</th>" in Study(store, "keeping")._repr_html_()
    again = Leaderboard.model_validate_json(board.model_dump_json())
    assert again == board


def test_mlflow_shows_it(board: Leaderboard) -> None:
    assert "metrics.`retention_map_at_r`" in mlflow_view.view(board)["selectedColumns"]
    table = [line for line in mlflow_view.note(board, {}, "1").splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {7}
    assert "on hf_parquet, base (retention)" in table[0]
    assert "0.2000 ± 0.025" in next(line for line in table if line.startswith("| red |"))


def carded(board: Leaderboard) -> str:
    return card(
        board,
        board.rows[0],
        limits="Scores are of unseen classes.",
        data=DataConfig(name="image_folder", path="/home/someone/birds"),
        trained="2026-01-31",
        origin={},
        protocol={"num_folds": 4}
        | ({"retention": {"name": "hf_parquet", "path": "/home/someone/base"}} if board.retention else {}),
        name="m",
    )


def test_the_card_has_it_and_no_folder(board: Leaderboard) -> None:
    text = carded(board)
    assert "* retention: hf_parquet, base: 2500 images of 10 classes, for scores alone" in text
    assert "; the study trains on 1 of the 10 classes" in text
    assert "| retention map_at_r | 0.2000 | 0.1752 to 0.2248 |" in text
    assert "| retention recall_at_1 | 0.2000 |" in text
    assert "* red worse than untrained on these classes: -0.1033 [" in text
    assert "Beyond them only the retention data were looked at." in text
    assert "someone" not in text


def test_the_report_has_a_sentence_a_table_and_a_picture(board: Leaderboard) -> None:
    assert "retention map_at_r" in words.leaderboard_table(board)
    *texts, plot = report_retention.parts(board)
    assert isinstance(plot, Plot)
    assert [trace.name for trace in plot.figure.data] == ["red", "blue", "untrained"]
    assert [trace.y[0] for trace in plot.figure.data] == pytest.approx([0.2, 0.31, 0.91 / 3])
    shown = " ".join(map(str, texts))
    assert "But the study trains on 1 of the 10 classes." in shown
    assert "red loses there: −0.1033 [" in shown
    assert "worse, p" in shown


def test_the_card_is_of_a_study_with_one_seed_too(store: Store, tmp_path: Path) -> None:
    tracker = StudyTracker(store, "one seed", {}, origin=TAGS)
    for family, score in (("red", 0.2), ("untrained", 0.3)):
        run_id = tracker.start_trial("x", verdict_trial(family, 1), None)
        scores = metric_names.all_on_test({"map_at_r": 0.5})
        scores |= metric_names.all_on_retention({"map_at_r": score})
        tracker.end_trial(run_id, "finished", [], scores)  # type: ignore[arg-type]
    found = leaderboard(store, "one seed")
    (lost,) = found.lost
    assert (lost.effect, lost.low, lost.p_value) == (pytest.approx(-0.1), None, 1.0)
    assert "| retention map_at_r | 0.2000 | one seed |" in carded(found)
