"""The scores that a study's families keep elsewhere: a sentence, a table and a picture of both scores of each row."""

from __future__ import annotations

import plotly.graph_objects as go

from dmlstudy import metric_names
from dmlstudy.html import element
from dmlstudy.registry.leaderboard import Leaderboard
from dmlstudy.report import figures, words
from dmlstudy.report.page import Plot, in_plot, paragraph, table

HEIGHT = 330
"""Pixels of the picture."""


def parts(board: Leaderboard) -> list[str | Plot]:
    """The part of a page on the retention data; empty for a study without such."""
    if board.retention is None:
        return []
    found: list[str | Plot] = [element("h3", "Retention"), paragraph(sentence(board))]
    if board.lost:
        rows = [
            [each.first, words.difference(each, each.first), f"{each.outcome}, {words.p_value(each)}"]
            for each in board.lost
        ]
        caption = (
            f"Retention {board.objective} less that of the same embedder before training, paired by seed; better or"
            " worse is what has p ≤ 0.05 adjusted for these families (Holm), and intervals hold for all at once (95%)."
        )
        found.append(table(caption, ["family", "less untrained", "verdict"], rows, "lnl"))
    test, kept = metric_names.on_test(board.objective), metric_names.on_retention(board.objective)
    shown = [row for row in board.rows if test in row.test and kept in row.retention]
    if shown:
        caption = (
            "Right is better on the study’s own test classes, up is better on the retention data: mean over seeds with"
            " 95% t-intervals. What was trained and stands below its untrained embedder has lost something elsewhere."
        )
        label = "; ".join(
            f"{row.family}: test {row.test[test].mean:.4f}, retention {row.retention[kept].mean:.4f}"
            for row in shown
        )
        found.append(Plot(test_against_retention(board), caption, label, HEIGHT))
    return found


def sentence(board: Leaderboard) -> str:
    """The retention data, what the study has seen of them, and what its winner has lost or gained there."""
    assert board.retention is not None
    text = f"Each row’s models were also scored on other data, {board.retention}, of no part in the search."
    if board.retention.seen:
        text += f" But {board.retention.seen}."
    each = board.lost_by(board.winner) if board.winner else None
    if each is None:
        return text
    said = {"worse": "loses there", "better": "gains there"}.get(
        each.outcome, "does not measurably change there"
    )
    return f"{text} {each.first} {said}: {words.difference(each, each.first)} {board.objective}, {words.p_value(each)}."


def test_against_retention(board: Leaderboard) -> go.Figure:
    """Each judged row as a point: its score on the test classes, and on the retention data."""
    test, kept = metric_names.on_test(board.objective), metric_names.on_retention(board.objective)
    figure = go.Figure()
    for number, row in enumerate(board.rows):
        own, other = row.test.get(test), row.retention.get(kept)
        if own is None or other is None:
            continue
        look, name = figures.look(number), in_plot(row.family)
        figure.add_scatter(
            x=[own.mean],
            y=[other.mean],
            error_x={"type": "data", "array": [own.half_width or 0.0], "thickness": 1},
            error_y={"type": "data", "array": [other.half_width or 0.0], "thickness": 1},
            mode="markers",
            name=name,
            marker={"color": look.color, "symbol": look.symbol, "size": 10},
            hovertemplate=f"{name}: test {own.mean:.4f}, retention {other.mean:.4f}<extra></extra>",
        )
    return figures.styled(figure, x=metric_names.for_people(test), y=metric_names.for_people(kept))
