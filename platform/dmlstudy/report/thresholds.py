"""The shipped thresholds of a study: what they do on the test classes, and the curve of both errors."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from dmlstudy.records import PairCounts
from dmlstudy.registry.leaderboard import Leaderboard
from dmlstudy.report import figures
from dmlstudy.report.page import Plot, in_plot, paragraph, table
from dmlstudy.verdict.thresholds import Errors, said, shipped

HEIGHT, OF_LEGEND = 360, 16
"""Pixels of the picture, and what each family adds to its legend on a phone."""


def parts(board: Leaderboard, counts: Mapping[str, PairCounts]) -> list[str | Plot]:
    """A sentence on the winner's threshold, a table of all families' and the curve of both errors."""
    order = {row.family: place for place, row in enumerate(board.rows)}
    own = {name: counts[name] for name in sorted(counts, key=lambda name: order.get(name, len(order)))}
    found = {name: errors for name, each in own.items() if (errors := shipped(each)) is not None}
    told: list[str | Plot] = []
    winner = found.get(board.winner or "")
    if winner is not None:
        told.append(paragraph(f"{board.winner}: {winner}. {winner.on_new_classes}".rstrip()))
        told += [paragraph(f"{each[0].upper()}{each[1:]}.", kind="notice") for each in winner.warnings]
    if found:
        caption = (
            "FMR: pairs of two classes that the threshold accepts; FNMR: pairs of one class it rejects; in brackets"
            " 95% intervals for classes like these (each left out once). Of the model of the verdict’s first seed."
        )
        rows = [[name, f"{each.tau:.3g}", str(each.fmr), str(each.fnmr)] for name, each in found.items()]
        told.append(table(caption, ["family", "threshold", "FMR", "FNMR"], rows, "lnll"))
    drawn = {name: each for name, each in own.items() if each.curve}
    if drawn:
        caption = (
            "Pairs of one class that are rejected against pairs of two classes that are accepted, on the test classes,"
            " as the threshold moves; nearer to the corner is better. Marks, and the dashed line of the winner, are the"
            " shipped thresholds. Scores are cosines of embeddings, without re-ranking."
        )
        label = "; ".join(
            f"{name}: FMR {said(each.fmr.rate)}, FNMR {said(each.fnmr.rate)}" for name, each in found.items()
        )
        picture = errors_against_each_other(drawn, found, order, board.winner)
        told.append(Plot(picture, caption, label, HEIGHT + OF_LEGEND * len(drawn)))
    return told


def errors_against_each_other(
    counts: Mapping[str, PairCounts],
    found: Mapping[str, Errors],
    order: Mapping[str, int],
    winner: str | None,
) -> go.Figure:
    """FNMR against FMR on logarithmic axes, a line for each family; what is 0 has no place on them."""
    figure = go.Figure()
    for name, each in counts.items():
        look, text = figures.look(order.get(name, len(order))), in_plot(name)
        points = [(fmr, fnmr, score) for score, fmr, fnmr in each.curve if fmr > 0 and fnmr > 0]
        figure.add_scatter(
            x=[fmr for fmr, _, _ in points],
            y=[fnmr for _, fnmr, _ in points],
            mode="lines",
            name=text,
            line={"color": look.color, "dash": look.dash, "width": 2},
            customdata=[score for _, _, score in points],
            hovertemplate=f"{text}: threshold %{{customdata:.3f}}, FMR %{{x:.2g}}, FNMR %{{y:.2g}}<extra></extra>",
        )
        own = found.get(name)
        if own is None or not own.fmr.num or not own.fnmr.num:
            continue
        figure.add_scatter(
            x=[own.fmr.rate],
            y=[own.fnmr.rate],
            mode="markers",
            name=text,
            showlegend=False,
            marker={"color": look.color, "symbol": look.symbol, "size": 10},
            hovertemplate=f"{text}: shipped threshold {own.tau:.3f}<extra></extra>",
        )
        if name == winner:
            figure.add_vline(x=own.fmr.rate, line={"color": figures.GREY, "dash": "dash", "width": 1})
    figures.styled(figure, x="FMR", y="FNMR")
    figure.update_xaxes(type="log", exponentformat="power", dtick=1)
    figure.update_yaxes(type="log", exponentformat="power")
    return figure
