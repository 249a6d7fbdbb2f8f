"""A leaderboard as a file: JSON, or Parquet with a row for each family."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dmlstudy import data, metric_names
from dmlstudy.data import Column
from dmlstudy.files import check_output, written_whole
from dmlstudy.registry.estimates import Estimate
from dmlstudy.registry.leaderboard import Leaderboard
from dmlstudy.verdict.comparison import Comparison

KINDS: dict[str, Literal["string", "int64"]] = {
    "outcome": "string",
    "like_outcome": "string",
    "num_seeds": "int64",
    "num_classes": "int64",
    "num_moved": "int64",
}
"""Of the properties of a comparison those that are no float64."""


def write(board: Leaderboard, path: str | Path, form: str) -> None:
    """Write 'json', 'csv' or 'parquet' to ``path``, whole or not at all, an earlier one being replaced.

    Raises ValueError for a path that may not be written (``files.check_output``).
    """
    if form == "parquet":
        path = data.check_table_output(path, "a leaderboard", ("study", "family", "verdict"))
        data.write_table(path, columns(board))
        return
    if form == "csv":
        path, text = check_output(path, "a leaderboard in CSV", b"study,"), csv_text(board)
    else:
        path, text = check_output(path, "a JSON object", b"{"), f"{board.model_dump_json(indent=1)}\n"
    with written_whole(path) as file:
        file.write(text.encode())


def csv_text(board: Leaderboard) -> str:
    """The columns of ``columns`` as CSV with a head; what is not known is empty."""
    table = columns(board)
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow([column.name for column in table])
    lines.writerows(zip(*(column.values for column in table), strict=True))
    return text.getvalue()


def columns(board: Leaderboard) -> list[Column]:
    """A family's row: its search, then of each test metric, and each on the retention data, estimate, low, high (95%
    t-interval) and n, then how it compares with the winner by the objective, then the best configuration (``param.``).

    ``effect`` is the family's mean score less the winner's, paired by seed, ``effect_low`` and ``effect_high`` hold for
    all pairs at once, ``verdict`` says what the family is beside the winner. Those named ``like_`` are of other classes
    like those of the test, and there are none where nothing is known of such.

    What is not known is null: intervals of one seed, the winner's own comparison, and all comparisons before there is
    a winner.

    With retention data ``retention_effect`` and those after it are the same there, against the untrained embedder.
    """
    rows = board.rows
    against = [_beside(board, row.family) for row in rows]
    metrics = [
        *sorted({name for row in rows for name in row.test}),
        *sorted({name for row in rows for name in row.retention}),
    ]
    params = sorted({name for row in rows for name in row.params})
    validation = f"{metric_names.VALIDATION}_{board.objective}"
    estimates = {name: [(row.test | row.retention).get(name) for row in rows] for name in metrics}
    return [
        Column("study", "string", [board.study] * len(rows)),
        Column("family", "string", [row.family for row in rows]),
        Column("is_winner", "bool", [row.family == board.winner for row in rows]),
        Column("untrained", "string", [row.untrained for row in rows]),
        *(
            Column(name, "int64", [getattr(row, name) for row in rows])
            for name in ("num_finished", "num_pruned", "num_failed", "num_judged")
        ),
        Column(validation, "float64", [row.validation for row in rows]),
        Column(metric_names.stderr(validation), "float64", [row.validation_stderr for row in rows]),
        *(
            column
            for name, own in estimates.items()
            for column in (
                Column(f"{name}_estimate", "float64", _each(own, "mean")),
                Column(metric_names.low(name), "float64", _each(own, "low")),
                Column(metric_names.high(name), "float64", _each(own, "high")),
                Column(f"{name}_n", "int64", [each.num if each else 0 for each in own]),
            )
        ),
        *_facts(
            against,
            {
                "verdict": "outcome",
                "effect": "effect",
                "effect_low": "low",
                "effect_high": "high",
                "p_value": "p_value",
                "adjusted_p_value": "adjusted_p_value",
                "num_paired_seeds": "num_seeds",
            },
        ),
        *_on_others(against),
        *_lost(board),
        *(Column(f"param.{name}", "string", [row.params.get(name) for row in rows]) for name in params),
    ]


def _on_others(against: Sequence[Comparison | None]) -> list[Column]:
    """Each family beside the winner on classes like these; no column where nothing is known of such."""
    if not any(each and each.like_outcome for each in against):
        return []
    return _facts(
        against,
        {
            "like_verdict": "like_outcome",
            "like_effect_low": "like_low",
            "like_effect_high": "like_high",
            "like_p_value": "like_p_value",
            "like_adjusted_p_value": "like_adjusted_p_value",
            "num_classes": "num_classes",
            "num_moved": "num_moved",
            "class_share": "class_share",
        },
    )


def _lost(board: Leaderboard) -> list[Column]:
    """Each family on the retention data, beside its untrained embedder; no column in a study without such data."""
    if board.retention is None:
        return []
    effect = metric_names.on_retention("effect")
    return _facts(
        [board.lost_by(row.family) for row in board.rows],
        {
            metric_names.on_retention("verdict"): "outcome",
            effect: "effect",
            metric_names.low(effect): "low",
            metric_names.high(effect): "high",
            metric_names.on_retention("p_value"): "p_value",
            metric_names.on_retention("adjusted_p_value"): "adjusted_p_value",
        },
    )


def _facts(compared: Sequence[Comparison | None], properties: Mapping[str, str]) -> list[Column]:
    """A column for each of these properties of comparisons, by its name."""
    return [
        Column(name, KINDS.get(each, "float64"), _each(compared, each)) for name, each in properties.items()
    ]


def _each(values: Sequence[Estimate | Comparison | None], name: str) -> list[Any]:
    """This property of each; None of what is not known."""
    return [None if each is None else getattr(each, name) for each in values]


def _beside(board: Leaderboard, family: str) -> Comparison | None:
    """The family against the winner, from the family's side."""
    for each in board.comparisons:
        if (each.first, each.second) == (family, board.winner):
            return each
        if (each.first, each.second) == (board.winner, family):
            return each.turned
    return None
