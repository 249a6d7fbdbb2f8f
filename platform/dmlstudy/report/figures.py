"""Figures of a study, drawn from plain values; the page's style colours what is text and grid.

A family has the same colour and mark in all of them, by its place in the leaderboard.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from dmlstudy import metric_names
from dmlstudy.records import Scalar
from dmlstudy.registry.curves import Curve
from dmlstudy.registry.leaderboard import Row
from dmlstudy.report.page import in_plot
from dmlstudy.search.history import Parameter, Searched, Tried
from dmlstudy.trials import Status, rank

T = TypeVar("T")

COLORS = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#b5cf3b"
)  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SCALE = "Viridis"
GREY = "#8b949e"
MOST_LINES = 200
"""Trials drawn as lines; of more the best."""
MOST_POINTS = 500
"""Trials of a family drawn as points; of more some at equal distances."""
STRENGTHS = 5
"""Number of strengths that lines through parameters have."""
MOST_CHARACTERS = 22
"""Of a name on an axis."""
MOST_TICKS = 12
"""Epochs that are numbered on an axis; of more some at equal distances."""
BINS = 60


class Look(NamedTuple):
    """The look that distinguishes a family, or a class, from others: never by colour alone."""

    color: str
    symbol: str
    dash: str


def look(number: int) -> Look:
    """The look of the family at this place."""
    turn = number // len(COLORS)
    symbol = SYMBOLS[(number + turn) % len(SYMBOLS)]
    return Look(COLORS[number % len(COLORS)], symbol, DASHES[turn % len(DASHES)])


def styled(figure: go.Figure, x: str = "", y: str = "") -> go.Figure:
    """The figure without colours of its own, with the legend above, so that it suits any width and either theme."""
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12},
        margin={"l": 60, "r": 12, "t": 12, "b": 52},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "xanchor": "left"},
        hoverlabel={"align": "left"},
        dragmode=False,
    )
    axis = {
        "gridcolor": GREY,
        "zerolinecolor": GREY,
        "showgrid": True,
        "automargin": True,
        "title_standoff": 10,
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    if x:
        figure.update_xaxes(title_text=in_plot(x))
    if y:
        figure.update_yaxes(title_text=in_plot(y))
    return figure


def shortened(name: str) -> str:
    """A name for an axis, where a long one would leave no room; ready for a plot."""
    return in_plot(name if len(name) <= MOST_CHARACTERS else f"{name[: MOST_CHARACTERS - 1]}…")


def scores(rows: Sequence[Row], metric: str) -> go.Figure:
    """Each judged family's mean with its 95% t-interval, in the leaderboard's order from the top."""
    figure = go.Figure()
    for number, row in enumerate(rows):
        estimate = row.test.get(metric)
        if estimate is None:
            continue
        own = look(number)
        figure.add_scatter(
            x=[estimate.mean],
            y=[number],
            error_x={"type": "data", "array": [estimate.half_width or 0.0], "thickness": 2},
            mode="markers",
            name=in_plot(row.family),
            marker={"color": own.color, "symbol": own.symbol, "size": 10},
            hovertemplate=f"{in_plot(row.family)}: {in_plot(str(estimate))}<extra></extra>",
            showlegend=False,
        )
    styled(figure, x=metric_names.for_people(metric))
    names = [shortened(row.family) for row in rows]
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=names,
        range=[len(rows) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
    )
    return figure


def history(families: Sequence[Searched], order: Mapping[str, int], objective: str) -> go.Figure:
    """Each trial's objective in the order of its family's search, and the best so far; open marks: stopped early."""
    figure = go.Figure()
    for family in families:
        own, name = look(order[family.family]), in_plot(family.family)
        for status, symbol in ((Status.FINISHED, own.symbol), (Status.PRUNED, f"{own.symbol}-open")):
            points = [
                (place, trial)
                for place, trial in spaced(list(enumerate(family.trials, 1)))
                if trial.status == status and trial.score is not None
            ]
            figure.add_scatter(
                x=[place for place, _ in points],
                y=[trial.score for _, trial in points],
                mode="markers",
                marker={"color": own.color, "symbol": symbol, "size": 7, "opacity": 0.75},
                text=[_described(trial) for _, trial in points],
                hovertemplate=f"{name} %{{text}}<extra></extra>",
                legendgroup=name,
                showlegend=False,
            )
        best = changes(running_best(family.trials))
        figure.add_scatter(
            x=[place for place, _ in best],
            y=[score for _, score in best],
            mode="lines",
            line={"color": own.color, "shape": "hv", "width": 2, "dash": own.dash},
            name=name,
            legendgroup=name,
            hovertemplate=f"{name}: best so far %{{y:.4f}}<extra></extra>",
        )
    styled(figure, x="trial of the family's search", y=f"validation {objective}")
    figure.update_xaxes(
        tickformat="d", dtick=max(1, max(len(f.trials) for f in families) // 8), zeroline=False
    )
    return figure


def running_best(trials: Sequence[Tried]) -> list[tuple[int, float]]:
    """(place from 1, best finished objective up to there), from the first finished trial on."""
    best, found = -math.inf, []
    for place, trial in enumerate(trials, 1):
        if trial.status == Status.FINISHED and trial.score is not None:
            best = max(best, trial.score)
        if best > -math.inf:
            found.append((place, best))
    return found


def changes(best: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points at which a line of steps rises, and its last one."""
    return [
        point
        for number, point in enumerate(best)
        if number in (0, len(best) - 1) or point[1] != best[number - 1][1]
    ]


def spaced(each: Sequence[T]) -> Sequence[T]:
    """All, or ``MOST_POINTS`` at equal distances from the first on."""
    return each if len(each) <= MOST_POINTS else each[:: -(-len(each) // MOST_POINTS)]


def parallel(family: Searched, objective: str) -> go.Figure:
    """A line for each finished trial through its parameters' values, coloured by its objective, the best on top.

    Parameters lie below each other, each from its least to its largest value, so that a narrow screen shows them too.
    A parameter that a trial does not have is left out of its line.
    """
    finished = sorted(
        (t for t in family.of(Status.FINISHED) if t.score is not None),
        key=lambda t: rank(t.score or 0.0, t.number),
    )
    finished = finished[-MOST_LINES:]
    values = [trial.score or 0.0 for trial in finished]
    low, high = min(values), max(values)
    rows = [*family.parameters, Parameter(name=objective, low=low, high=high)]
    figure = go.Figure()
    for strength in range(STRENGTHS):
        x: list[float | None] = []
        y: list[float | None] = []
        told: list[str] = []
        for trial, score in zip(finished, values, strict=True):
            share = (score - low) / (high - low) if high > low else 1.0
            if min(int(share * STRENGTHS), STRENGTHS - 1) != strength:
                continue
            places = [
                (each.place(trial.params[each.name]), number)
                for number, each in enumerate(rows[:-1])
                if each.name in trial.params
            ]
            places.append((share, len(rows) - 1))
            x += [*(place for place, _ in places), None]
            y += [*(number for _, number in places), None]
            told += [_described(trial)] * (len(places) + 1)
        own = strength / (STRENGTHS - 1)
        figure.add_scatter(
            x=x,
            y=y,
            mode="lines+markers",
            line={"color": _scaled(own), "width": 1.5 + 1.5 * own},
            marker={"size": 5},
            opacity=0.85,
            text=told,
            hovertemplate="%{text}<extra></extra>",
            showlegend=False,
        )
    styled(figure)
    for number, each in enumerate(rows):
        ticks = _ticks(each)
        for at, text in (ticks[0], ticks[-1]) if each.choices is None else ticks:
            most = max(6, 36 // max(2, len(ticks)))  # of choices side by side on a phone
            figure.add_annotation(
                x=at,
                y=number,
                text=_in_lines(text, most),
                showarrow=False,
                xanchor="left" if at == 0 else "right" if at == 1 else "center",
                yanchor="top",
                yshift=-2,
                font={"size": 10},
            )
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[shortened(each.name) for each in rows],
        range=[len(rows) - 0.6, -0.25],
        zeroline=False,
    )
    figure.update_xaxes(range=[-0.04, 1.04], showticklabels=False, showgrid=False, zeroline=False)
    figure.update_layout(margin={"b": 8})
    return figure


def importance(family: Searched) -> go.Figure:
    """Each parameter's share of importance, the largest on top."""
    known = [each for each in family.parameters if each.importance is not None]
    figure = go.Figure(
        go.Bar(
            x=[each.importance for each in known],
            y=list(range(len(known))),
            orientation="h",
            marker={"color": COLORS[0]},
            text=[f"{each.importance:.2f}" for each in known],
            textposition="outside",
            cliponaxis=False,
            hovertext=[in_plot(each.name) for each in known],
            hovertemplate="%{hovertext}: %{x:.3f}<extra></extra>",
        )
    )
    styled(figure, x="share of importance")
    figure.update_xaxes(range=[0, 1.12])
    figure.update_yaxes(
        tickvals=list(range(len(known))),
        ticktext=[shortened(each.name) for each in known],
        range=[len(known) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
    )
    return figure


def slices(family: Searched) -> go.Figure:
    """The objective of each finished trial against each parameter by itself, coloured by the trial's number.

    All have one scale of the objective, also where a parameter has been drawn once only.
    """
    parameters = family.parameters
    columns = slice_columns(family)
    num_rows = -(-len(parameters) // columns)
    most_lines = 1 + max(_in_lines(text).count("<br>") for each in parameters for _, text in _ticks(each))
    figure = make_subplots(
        rows=num_rows,
        cols=columns,
        shared_yaxes="all",
        vertical_spacing=(0.25 + 0.05 * most_lines) / num_rows,
        horizontal_spacing=0.12,
        subplot_titles=[shortened(each.name) for each in parameters],
    )
    last = max(trial.number for trial in family.trials)
    styled(figure)
    for number, each in enumerate(parameters):
        own = spaced([trial for trial in family.of(Status.FINISHED) if each.name in trial.params])
        row, column = number // columns + 1, number % columns + 1
        figure.add_scatter(
            x=[each.place(trial.params[each.name]) for trial in own],
            y=[trial.score for trial in own],
            mode="markers",
            marker={
                "size": 8,
                "color": [trial.number for trial in own],
                "colorscale": SCALE,
                "cmin": 0,
                "cmax": max(last, 1),
                "line": {"width": 1, "color": GREY},
            },
            text=[_described(trial) for trial in own],
            hovertemplate="%{text}<extra></extra>",
            showlegend=False,
            row=row,
            col=column,
        )
        ticks = _ticks(each)
        beside = 0.06 if each.choices is None else 0.15  # room for half of the first and last choice's name
        figure.update_xaxes(
            tickvals=[at for at, _ in ticks],
            ticktext=[_in_lines(text) for _, text in ticks],
            tickangle=0,
            range=[-beside, 1 + beside],
            zeroline=False,
            row=row,
            col=column,
        )
    figure.update_annotations(font={"size": 12})
    figure.update_layout(margin={"l": 48, "t": 28, "b": 40})
    return figure


def slice_columns(family: Searched) -> int:
    """Number of parameters side by side; one where the names of choices need the room."""
    letters = [sum(len(str(choice)) for choice in each.choices or []) for each in family.parameters]
    return 1 if max(letters) > MOST_CHARACTERS else min(2, len(letters))


def _in_lines(text: str, most: int = MOST_CHARACTERS) -> str:
    """A tick's text, broken where words meet, each line of so many characters at most; ready for a plot."""
    parts = re.split(r"(?<=[_+-])(?=[A-Za-z])", text)
    return "<br>".join(in_plot(part if len(part) <= most else f"{part[: most - 1]}…") for part in parts)


def validation_curves(
    families: Sequence[Searched], order: Mapping[str, int], objective: str, epochs: int | None = None
) -> go.Figure:
    """The objective after each epoch of each family's best finished trial; fold after fold of ``epochs`` each."""
    figure = go.Figure()
    last = 1
    for family in families:
        own, best = look(order[family.family]), family.best
        if best is None or not best.curve:
            continue
        steps = sorted(best.curve)
        last = max(last, steps[-1])
        figure.add_scatter(
            x=steps,
            y=[best.curve[step] for step in steps],
            mode="lines+markers",
            name=in_plot(f"{family.family} #{best.number}"),
            line={"color": own.color, "dash": own.dash},
            marker={"symbol": own.symbol, "size": 7},
        )
    epochs = epochs or last
    num_folds = -(-last // epochs)
    styled(figure, x="epoch of each fold" if num_folds > 1 else "epoch", y=f"validation {objective}")
    apart = -(-last // MOST_TICKS)
    ticks = [step for step in range(1, last + 1) if apart == 1 or (step - 1) % epochs % apart == 0]
    if len(ticks) > 2 * MOST_TICKS:  # many folds: each by its last epoch
        ticks = list(range(epochs, last + 1, epochs))
    figure.update_xaxes(
        tickvals=ticks,
        ticktext=[str((step - 1) % epochs + 1) for step in ticks],
        range=[0.5, last + 0.5],
        zeroline=False,
    )
    if num_folds == 1:
        return figure
    for fold in range(num_folds):
        if fold:
            figure.add_vline(x=fold * epochs + 0.5, line={"color": GREY, "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=fold * epochs + 0.5,
            y=1,
            yref="paper",
            text=f"fold {fold + 1}" if num_folds <= MOST_TICKS // 2 else str(fold + 1),
            showarrow=False,
            xanchor="left",
            yanchor="bottom",
            font={"size": 11},
        )
    figure.update_layout(legend={"y": 1.1}, margin={"t": 28})
    return figure


def training_loss(curves: Sequence[Curve], order: Mapping[str, int], epochs: int | None = None) -> go.Figure:
    """Mean training loss over the verdict's seeds by epoch, a line for each family, on a log scale if it can be.

    A trial of the verdict trains the shipped model for ``epochs`` and then, where it does, a model on each fold: these
    are thin lines over the same epochs.
    """
    figure = go.Figure()
    most = 1
    is_positive = True
    for family in sorted({curve.family for curve in curves}, key=lambda name: order.get(name, len(order))):
        own = look(order.get(family, len(order)))
        losses = [curve.values[metric_names.TRAIN_LOSS] for curve in curves if curve.family == family]
        length = min(map(len, losses))
        mean = np.mean([loss[:length] for loss in losses], axis=0)
        is_positive = is_positive and bool((mean > 0).all())
        of_model = epochs or max(length, 1)
        most = max(most, min(of_model, length))
        for start in range(0, length, of_model):
            of_epoch = mean[start : start + of_model].tolist()
            figure.add_scatter(
                x=list(range(1, len(of_epoch) + 1)),
                y=of_epoch,
                mode="lines" if start else "lines+markers",
                name=in_plot(family),
                legendgroup=in_plot(family),
                showlegend=start == 0,
                opacity=0.45 if start else 1,
                line={"color": own.color, "dash": own.dash, "width": 1 if start else 2},
                marker={"symbol": own.symbol, "size": 6},
                hovertemplate=f"{in_plot(family)}, {_model(start // of_model)}: %{{y:.4g}}<extra></extra>",
            )
    styled(figure, x="epoch", y="training loss (mean over seeds)")
    figure.update_xaxes(dtick=max(1, -(-most // MOST_TICKS)), tick0=1, tickformat="d", zeroline=False)
    if is_positive:
        figure.update_yaxes(type="log")
    return figure


def _model(number: int) -> str:
    """A model of a verdict's trial, in the order in which they are trained."""
    return f"model of fold {number}" if number else "model on all classes"


def embedding_map(point_N2: NDArray[np.float64], labels: Sequence[str], shown: Sequence[str]) -> go.Figure:
    """Points of a plane; those of the classes ``shown`` by colour and mark, all others small and grey."""
    figure = go.Figure()
    label_N = np.array(labels, dtype=object)
    others = ~np.isin(label_N, list(shown))
    groups = [("other classes", others, Look(GREY, "circle", "solid"), 4, 0.45)] if others.any() else []
    groups += [(name, label_N == name, look(number), 8, 0.9) for number, name in enumerate(shown)]
    for name, is_own_N, own, size, opacity in groups:
        figure.add_scatter(
            x=point_N2[is_own_N, 0].tolist(),
            y=point_N2[is_own_N, 1].tolist(),
            mode="markers",
            name=shortened(name),
            marker={"color": own.color, "symbol": own.symbol, "size": size, "opacity": opacity},
            text=[in_plot(label) for label in label_N[is_own_N]],
            hovertemplate="%{text}<extra></extra>",
        )
    styled(figure)
    figure.update_xaxes(showticklabels=False, zeroline=False, showgrid=False)
    figure.update_yaxes(showticklabels=False, zeroline=False, showgrid=False, scaleanchor="x")
    figure.update_layout(margin={"l": 8, "r": 8, "t": 8, "b": 8})
    return figure


class PairDistances(NamedTuple):
    """Distances of pairs that belong together, and of pairs that do not."""

    positive_P: NDArray[np.float64]
    negative_P: NDArray[np.float64]


def histograms(sides: Sequence[tuple[str, PairDistances]], unit: str) -> go.Figure:
    """Shares of positive and of negative pairs by distance, in equal bins: a panel for each side, on one scale."""
    figure = make_subplots(
        rows=len(sides),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.12,
        subplot_titles=[in_plot(name) for name, _ in sides] if len(sides) > 1 else None,
    )
    edges = bins([pairs for _, pairs in sides])
    for row, (_, pairs) in enumerate(sides, 1):
        for name, distances, color, pattern in (
            ("positive pairs", pairs.positive_P, COLORS[4], ""),
            ("negative pairs", pairs.negative_P, COLORS[2], "/"),
        ):
            figure.add_bar(
                x=((edges[:-1] + edges[1:]) / 2).tolist(),
                y=shares(distances, edges).tolist(),
                width=np.diff(edges).tolist(),
                name=name,
                legendgroup=name,
                showlegend=row == 1,
                opacity=0.6,
                marker={"color": color, "pattern": {"shape": pattern, "fillmode": "overlay", "size": 5}},
                hovertemplate=f"{name}, %{{x:.3f}}: %{{y:.2%}}<extra></extra>",
                row=row,
                col=1,
            )
    styled(figure, y="share of pairs")
    figure.update_xaxes(title_text=in_plot(unit), row=len(sides), col=1)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    figure.update_layout(barmode="overlay", bargap=0, margin={"t": 28}, legend={"y": 1.1})
    return figure


def bins(sides: Sequence[PairDistances]) -> NDArray[np.float64]:
    """Edges of equal bins over all sides' distances; of whole numbers, bits, there is none that lies across."""
    every = np.concatenate([distances for pairs in sides for distances in pairs])
    low, high = float(every.min()), float(every.max())
    if not np.mod(every, 1).any():
        step = max(1, math.ceil((high - low + 1) / BINS))
        return np.arange(low, high + step + 1, step) - 0.5
    return np.linspace(low, high, BINS + 1)


def shares(distances: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of the distances in each bin."""
    counts = np.histogram(distances, edges)[0]
    return np.asarray(counts / max(len(distances), 1))


def overlap(pairs: PairDistances, edges: NDArray[np.float64]) -> float:
    """The overlap of two histograms: the sum over bins of the smaller share."""
    return float(np.minimum(shares(pairs.positive_P, edges), shares(pairs.negative_P, edges)).sum())


def shown(value: Scalar | None) -> str:
    """A parameter's value for people."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e7 else f"{value:.4g}"


def _described(trial: Tried) -> str:
    score = "" if trial.score is None else f" {trial.score:.4f}"
    state = " (stopped early)" if trial.status == Status.PRUNED else ""
    params = "".join(f"<br>{in_plot(f'{name} = {shown(value)}')}" for name, value in trial.params.items())
    return f"#{trial.number}{score}{state}{params}"


def _ticks(each: Parameter) -> list[tuple[float, str]]:
    """Ticks of an axis from 0 to 1: the range's ends and middle, or each choice."""
    if each.choices is not None:
        last = max(len(each.choices) - 1, 1)
        return [(number / last, str(choice)[:MOST_CHARACTERS]) for number, choice in enumerate(each.choices)]
    middle = math.sqrt(each.low * each.high) if each.is_log else (each.low + each.high) / 2
    return [(0.0, shown(each.low)), (0.5, f"{middle:.2g}"), (1.0, shown(each.high))]


def _scaled(share: float) -> str:
    """A colour from dull to strong; the width of the line says the same."""
    low, high = (151, 160, 175), (66, 105, 208)
    mixed = [round(a + (b - a) * share) for a, b in zip(low, high, strict=True)]
    return f"rgb({', '.join(map(str, mixed))})"
