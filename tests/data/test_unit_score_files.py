"""Files of scores by class: what is written is read again digit for digit, and foreign files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from dmlstudy import data
from dmlstudy.records import UnitScores

ONE = UnitScores(
    units=[3, 7], counts=[2, 5], sums={"map_at_r": [0.1 + 0.2, 1 / 3], "recall_at_1": [1.0, 4.0]}
)
OTHER = UnitScores(units=[4], counts=[1], sums={"map_at_r": [0.0], "first_stage_map_at_r": [1.0]})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "f.parquet"
    file.write_bytes(data.unit_scores_as_bytes(ONE))
    assert data.read_unit_scores(file) == ONE
    assert pq.read_table(file).column_names == ["unit", "count", "sum_map_at_r", "sum_recall_at_1"]
    file.write_bytes(data.unit_scores_as_bytes(None))
    assert data.read_unit_scores(file) is None
    file.write_bytes(data.fold_scores_as_bytes([ONE, OTHER]))
    assert data.read_fold_scores(file) == [ONE, OTHER]
    file.write_bytes(data.verdict_scores_as_bytes({("b", 1): ONE, ("a", 10): OTHER}))
    assert data.read_verdict_scores(file) == {("b", 1): ONE, ("a", 10): OTHER}
    assert pq.read_table(file)["sum_recall_at_1"].to_pylist() == [1.0, 4.0, None]


GOOD: dict[str, Any] = {
    "unit": pa.array([1, 2], pa.int64()),
    "count": pa.array([1, 2], pa.int64()),
    "sum_map": pa.array([0.5, 1.0], pa.float64()),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"unit": None},
            r"columns count int64, sum_map double; expected unit int64, count int64 and sum_METRIC",
        ),
        ({"label": pa.array([1, 2])}, "columns .*, label int64; expected"),
        ({"count": pa.array([1.0, 2.0])}, "count double"),
        ({"sum_map": pa.array([1, 2])}, "sum_map int64"),
        ({"unit": pa.array([1, None], pa.int64())}, "no null"),
        ({"count": pa.array([1, 0], pa.int64())}, "a count below 1"),
        ({"sum_map": pa.array([0.5, None], pa.float64())}, "sum_map is null in some rows"),
    ],
)
def test_a_foreign_file_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "f.parquet"
    columns = {name: column for name, column in (GOOD | changes).items() if column is not None}
    pq.write_table(pa.table(columns), file)
    with pytest.raises(ValueError, match=rf"^{file}: .*{message}"):
        data.read_unit_scores(file)


def test_no_file_and_no_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        data.read_unit_scores(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("unit,count\n1,2\n")
    with pytest.raises(ValueError, match=r"text\.parquet: "):
        data.read_fold_scores(tmp_path / "text.parquet")
