"""A leaderboard as Parquet: a typed row for each family, with how it compares with the winner from its own side."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmlstudy import cli
from dmlstudy.registry import leaderboard as boards
from dmlstudy.registry import leaderboard_file
from dmlstudy.registry.estimates import Estimate
from dmlstudy.registry.leaderboard import Leaderboard, Row
from dmlstudy.verdict.comparison import compare

SCORES = {
    "red": {1: 0.6, 2: 0.61, 3: 0.62, 4: 0.6},
    "blue": {1: 0.5, 2: 0.53, 3: 0.5},
    "alone": {1: 0.4},
    "untrained": {1: 0.49, 2: 0.53, 3: 0.52, 4: 0.5},
}


def board(winner: str | None = "red") -> Leaderboard:
    rows = [
        Row(
            family=family,
            num_finished=3,
            num_pruned=2,
            num_failed=1,
            num_judged=len(scores),
            validation=None if family == "untrained" else 0.7,
            validation_stderr=None,
            params={} if family == "untrained" else {"training.lr": "0.1", f"loss.{family}": "7"},
            untrained=None if family == "untrained" else "untrained",
            test={"test_map_at_r": Estimate.of(list(scores.values()))}
            | ({"test_recall_at_1": Estimate.of([0.5, 0.7])} if family == "red" else {}),
        )
        for family, scores in SCORES.items()
    ]
    return Leaderboard(
        study="s",
        objective="map_at_r",
        second_objective=None,
        status="finished",
        winner=winner,
        model=None,
        rows=rows,
        front=[],
        comparisons=compare(SCORES, resolution=1e-3),
    )


def test_columns_are_typed_and_a_row_is_a_family(tmp_path: Path) -> None:
    leaderboard_file.write(board(), tmp_path / "b.parquet", "parquet")
    table = pq.read_table(tmp_path / "b.parquet")
    types = {field.name: field.type for field in table.schema}
    assert types == {
        **dict.fromkeys(("study", "family", "untrained", "verdict"), pa.string()),
        **dict.fromkeys(
            ("param.training.lr", "param.loss.red", "param.loss.blue", "param.loss.alone"), pa.string()
        ),
        **dict.fromkeys(
            ("num_finished", "num_pruned", "num_failed", "num_judged", "num_paired_seeds"), pa.int64()
        ),
        **dict.fromkeys(("test_map_at_r_n", "test_recall_at_1_n"), pa.int64()),
        **dict.fromkeys(
            [
                f"test_{name}_{part}"
                for name in ("map_at_r", "recall_at_1")
                for part in ("estimate", "low", "high")
            ],
            pa.float64(),
        ),
        **dict.fromkeys(("validation_map_at_r", "validation_map_at_r_stderr"), pa.float64()),
        **dict.fromkeys(("effect", "effect_low", "effect_high", "p_value", "adjusted_p_value"), pa.float64()),
        "is_winner": pa.bool_(),
    }
    rows = {row["family"]: row for row in table.to_pylist()}
    assert list(rows) == list(SCORES)
    red = rows["red"]
    estimate = Estimate.of(list(SCORES["red"].values()))
    assert estimate.half_width is not None
    assert red["test_map_at_r_estimate"] == pytest.approx(estimate.mean)
    assert red["test_map_at_r_low"] == pytest.approx(estimate.mean - estimate.half_width)
    assert red["test_map_at_r_high"] == pytest.approx(estimate.mean + estimate.half_width)
    assert (red["test_map_at_r_n"], red["num_pruned"], red["param.training.lr"]) == (4, 2, "0.1")
    assert (red["is_winner"], red["verdict"], red["effect"]) == (True, None, None)
    assert (rows["alone"]["test_map_at_r_low"], rows["alone"]["test_map_at_r_n"]) == (None, 1)
    assert (rows["blue"]["test_recall_at_1_estimate"], rows["blue"]["test_recall_at_1_n"]) == (None, 0)
    assert (rows["untrained"]["validation_map_at_r"], rows["untrained"]["param.loss.red"]) == (None, None)


def test_the_verdict_is_from_the_family_s_side() -> None:
    columns = {column.name: column.values for column in leaderboard_file.columns(board())}
    place = list(SCORES).index("untrained")
    (pair,) = [each for each in board().comparisons if {each.first, each.second} == {"red", "untrained"}]
    assert pair.first == "red"
    assert pair.outcome == "better"
    assert pair.low is not None
    assert pair.high is not None
    assert columns["verdict"][place] == "worse"
    assert columns["effect"][place] == pytest.approx(-pair.effect)
    assert columns["effect_low"][place] == pytest.approx(-pair.high)
    assert columns["effect_high"][place] == pytest.approx(-pair.low)
    assert columns["adjusted_p_value"][place] == pair.adjusted_p_value
    assert columns["num_paired_seeds"][place] == 4
    from_below = {column.name: column.values for column in leaderboard_file.columns(board("untrained"))}
    assert from_below["verdict"][0] == "better"
    assert from_below["effect"][0] == pytest.approx(pair.effect)


def test_without_a_winner_there_is_no_verdict() -> None:
    columns = {column.name: column.values for column in leaderboard_file.columns(board(None))}
    assert set(columns["verdict"]) == {None}
    assert set(columns["is_winner"]) == {False}


def test_the_command_writes_each_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(boards, "leaderboard", lambda store, study: board())

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dmlstudy", "leaderboard", "s", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capfd.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err.strip()

    code, shown, _ = call("--format", "table")
    assert (code, "paired by seed" in shown) == (0, True)
    for arguments in (("--json",), ("--format", "json")):
        code, shown, _ = call(*arguments)
        assert (code, json.loads(shown)["winner"]) == (0, "red")
    code, shown, _ = call("--against", "red", "--json")
    tallies = json.loads(shown)
    assert (code, set(tallies["untrained"])) == (0, {"wins", "ties", "losses"})
    assert call("--format", "json", "-o", tmp_path / "b.json")[0] == 0
    assert json.loads((tmp_path / "b.json").read_text()) == board().model_dump(mode="json")
    for _ in range(2):  # an earlier one is replaced
        assert call("--format", "parquet", "-o", tmp_path / "b.parquet")[0] == 0
    assert pq.read_table(tmp_path / "b.parquet").num_rows == 4
    for _ in range(2):
        assert call("--format", "csv", "-o", tmp_path / "b.csv")[0] == 0
    code, shown, _ = call("--format", "csv")
    assert (code, shown) == (0, (tmp_path / "b.csv").read_text())
    rows = list(csv.DictReader(shown.splitlines()))
    assert [row["family"] for row in rows] == pq.read_table(tmp_path / "b.parquet")["family"].to_pylist()
    assert float(rows[0]["validation_map_at_r"]) == board().rows[0].validation
    (tmp_path / "thesis.tex").write_text("years of work")
    for arguments, message in (
        (("--format", "xml"), "--format xml: choose from table, json, csv, parquet"),
        (("--format", "parquet"), "--format parquet is a file: name it with -o"),
        (("-o", tmp_path / "x"), "-o is for a study's leaderboard in --format json, csv or parquet"),
        (("--format", "json", "--against", "red", "-o", tmp_path / "x"), "-o is for a study's leaderboard"),
        (
            ("--format", "parquet", "-o", tmp_path / "thesis.tex"),
            "thesis.tex: exists already and is not a leaderboard",
        ),
        (
            ("--format", "json", "-o", tmp_path / "thesis.tex"),
            "thesis.tex: exists already and is not a JSON object",
        ),
        (
            ("--format", "csv", "-o", tmp_path / "thesis.tex"),
            "thesis.tex: exists already and is not a leaderboard in CSV",
        ),
        (("--format", "parquet", "-o", tmp_path / "none" / "x"), "none: no such folder"),
    ):
        code, shown, said = call(*arguments)
        assert (code, shown) == (2, ""), arguments
        assert message in said, said
        assert "\n" not in said
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.csv", "b.json", "b.parquet", "thesis.tex"]
