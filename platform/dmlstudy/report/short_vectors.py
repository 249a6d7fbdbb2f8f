"""A study's embeddings in short forms: a sentence, a picture of score by bytes, and a table."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from dmlstudy import metric_names
from dmlstudy.html import element
from dmlstudy.registry.leaderboard import Leaderboard
from dmlstudy.report import figures, words
from dmlstudy.report.page import Plot, folded, in_plot, paragraph, table
from dmlstudy.verdict.comparison import Comparison

HEIGHT = 360
"""Pixels of the picture."""

MARGIN = 0.1
"""Room beside the outermost points, in powers of ten."""

SYMBOLS = {32: "circle", 8: "square", 1: "x"}
"""Marks by bits of a number."""


def parts(board: Leaderboard) -> list[str | Plot]:
    """The part of a page on short vectors; empty for a study that scored none."""
    if not board.short:
        return []
    rows = [
        [
            each.family,
            each.form,
            str(each.num_bytes),
            words.interval(each.score),
            *_told(each.beside_whole),
            *_told(each.beside_winner),
        ]
        for each in board.short
    ]
    caption = (
        f"Test {board.objective} of each short form, less that of the same models’ whole embeddings, and less that of"
        " the winner in the same form, paired by seed; worse is what has p ≤ 0.05 adjusted for these pairs (Holm), and"
        " intervals hold for all at once (95%)."
    )
    beside = ["less the whole’s", "verdict", "less the winner’s", "verdict"]
    columns = ["family", "numbers x bits", "bytes", "score", *beside]
    label = "; ".join(f"{each.family} {each.num_bytes} bytes: {each.score.mean:.4f}" for each in board.short)
    shown = (
        "Left is shorter, up is better: mean over seeds with 95% t-intervals. Circles have 32 bits a number, squares 8,"
        " crosses 1. The rightmost circle of a family is its whole embedding."
    )
    return [
        element("h3", "Short vectors"),
        paragraph(sentence(board)),
        Plot(score_by_bytes(board), shown, label, HEIGHT),
        folded("Each short form beside the whole embedding", table(caption, columns, rows, "llnnnlnl")),
    ]


def sentence(board: Leaderboard) -> str:
    """The shortest form of the winner that cannot be told from its whole embedding, in words."""
    own = [each for each in board.short if each.family == board.winner]
    alike = [each for each in own if each.beside_whole is not None and each.beside_whole.outcome != "worse"]
    text = "Each judged model’s embeddings were also cut to their first numbers, and rounded to 8 bits and to signs."
    if not own:
        return text
    if not alike:
        return f"{text} Each short form of {board.winner} is worse than its whole embedding."
    shortest = min(alike, key=lambda each: each.num_bytes)
    assert shortest.beside_whole is not None
    amount = words.difference(shortest.beside_whole, shortest.beside_whole.first)
    unit = "byte" if shortest.num_bytes == 1 else "bytes"
    return (
        f"{text} Of {board.winner}, {shortest.form} ({shortest.num_bytes} {unit} instead of {shortest.whole_bytes}) is"
        f" the shortest that is not measurably worse than the whole: {amount}."
    )


def score_by_bytes(board: Leaderboard) -> go.Figure:
    """The objective of each short form and of the whole by bytes of a vector, a line for each family and bits."""
    test, figure = metric_names.on_test(board.objective), go.Figure()
    for number, row in enumerate(board.rows):
        own = [each for each in board.short if each.family == row.family]
        if not own:
            continue
        name, color = in_plot(row.family), figures.look(number).color
        for bits, symbol in SYMBOLS.items():
            points = [(each.num_bytes, each.score) for each in own if each.bits == bits]
            if bits == max(SYMBOLS) and test in row.test:
                points.insert(0, (own[0].whole_bytes, row.test[test]))
            figure.add_scatter(
                x=[num_bytes for num_bytes, _ in points],
                y=[score.mean for _, score in points],
                error_y={
                    "type": "data",
                    "array": [score.half_width or 0.0 for _, score in points],
                    "thickness": 1,
                },
                mode="lines+markers",
                name=name,
                legendgroup=name,
                showlegend=bits == max(SYMBOLS),
                line={"color": color, "width": 1},
                marker={"color": color, "symbol": symbol, "size": 8},
                hovertemplate=f"{name}, {bits} bit: %{{x}} bytes, %{{y:.4f}}<extra></extra>",
            )
    figure = figures.styled(figure, x="bytes of a vector", y=metric_names.for_people(test))
    sizes = sorted({num_bytes for each in board.short for num_bytes in (each.num_bytes, each.whole_bytes)})
    ends = [math.log10(sizes[0]) - MARGIN, math.log10(sizes[-1]) + MARGIN]
    figure.update_xaxes(type="log", range=ends, tickvals=sizes, ticktext=list(map(str, sizes)))
    return figure


def _told(each: Comparison | None) -> list[str]:
    """A difference and its outcome; two empty cells where there is none."""
    if each is None:
        return ["", ""]
    return [words.difference(each, each.first), f"{each.outcome}{each.where}, {words.p_value(each)}"]
