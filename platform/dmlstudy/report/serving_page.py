"""The record of a watched server as one HTML page: distances of queries over time, and the range they should keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go

from dmlstudy.html import Html, check_page, write_page
from dmlstudy.report import figures
from dmlstudy.report.page import Plot, Section, facts, page, paragraph, table
from dmlstudy.serving.watch import WatchStart, Window, read_record
from dmlstudy.text import counted

MOST_ROWS = 100
"""Windows in the table: the last ones outside the range, and the last ones of all."""

OUTSIDE, INSIDE = figures.COLORS[2], figures.COLORS[0]

LINES = (("5", "dot"), ("50", "solid"), ("95", "dash"), ("99", "dashdot"))
"""The quantiles that are drawn, and their dashes."""


class Stretch(NamedTuple):
    """A server from its start to its end: its windows have one model, one gallery and one range."""

    start: WatchStart
    windows: list[Window]


class ServingWritten(NamedTuple):
    """The page's numbers of windows, and of those outside the range."""

    num_windows: int
    num_outside: int


def write_serving_report(record: str | Path, output: str | Path) -> ServingWritten:
    """Write the page of the record that ``serve --watch`` made.

    Raises ValueError for a record that is missing, damaged or without a window, and a path that may not be written.
    """
    check_page(output)
    stretches = read_stretches(record)
    windows = [window for each in stretches for window in each.windows]
    if not windows:
        raise ValueError(f"{record}: holds no window yet; wait until one is full, or ends by its time")
    outside = [window for window in windows if window.is_outside]
    last = stretches[-1].start.served
    title = f"{last.model} with {last.gallery}: queries"
    sections = [
        Section("distances", "Distances", [_distances(stretches)]),
        Section("beyond", "Beyond the range", [_beyond(stretches)]),
        Section("windows", "Windows", [_table(windows, outside)]),
        Section("served", "What was served", [_facts(stretches)]),
    ]
    write_page(output, page(title, _top(windows, outside, stretches), sections))
    return ServingWritten(len(windows), len(outside))


def read_stretches(record: str | Path) -> list[Stretch]:
    """The record's starts that have windows, in their order. Raises ValueError as ``read_record``."""
    found: list[Stretch] = []
    for line in read_record(record):
        if isinstance(line, WatchStart):
            found.append(Stretch(line, []))
        else:
            found[-1].windows.append(line)
    return [each for each in found if each.windows]


def _top(windows: Sequence[Window], outside: Sequence[Window], stretches: Sequence[Stretch]) -> list[str]:
    if outside:
        said = (
            f"{counted(len(outside), 'window leaves', 'windows leave')} the range, of {len(windows)}; the first"
            f" ended {outside[0].end}, the last {outside[-1].end}."
        )
    else:
        said = f"None of {counted(len(windows), 'window', 'windows')} leaves the range."
    num = sum(window.queries for window in windows)
    unwatched = sum(window.unwatched for window in windows)
    lost = (
        f"; {counted(unwatched, 'more query', 'more queries')} came too fast to be watched"
        if unwatched
        else ""
    )
    learned = stretches[-1].start.range
    return [
        paragraph(said, kind="verdict"),
        paragraph(f"{counted(num, 'query', 'queries')} from {windows[0].start} to {windows[-1].end}{lost}."),
        paragraph(
            "A window leaves the range where more of its queries are beyond it than chance would have it. In all"
            " windows of the record, the chance of one false alarm is at most 5%. A window that does not leave it may"
            " still hold some new classes.",
            kind="quiet",
        ),
        *(paragraph(f"{line[0].upper()}{line[1:]}.", kind="quiet") for line in learned.lines),
    ]


def _distances(stretches: Sequence[Stretch]) -> Plot:
    figure = go.Figure()
    for number, (start, windows) in enumerate(stretches):
        first, end = windows[0].start, windows[-1].end
        low, high = start.range.quantiles["1"], start.range.upper
        figure.add_scatter(
            x=[first, end, end, first, first],
            y=[low, low, high, high, low],
            mode="lines",
            fill="toself",
            fillcolor="rgba(60,169,81,0.18)",
            line={"color": figures.COLORS[4], "width": 1},
            name="range, 1% to 99%",
            legendgroup="range",
            showlegend=number == 0,
            hoverinfo="skip",
        )
        new = start.range.new_classes
        if new is not None:
            figure.add_scatter(
                x=[first, end],
                y=[new.quantiles["50"]] * 2,
                mode="lines",
                line={"color": figures.GREY, "dash": "longdash", "width": 1.5},
                name="median of new classes",
                legendgroup="new",
                showlegend=not any(each.start.range.new_classes for each in stretches[:number]),
                hovertemplate="median of new classes %{y:.4g}<extra></extra>",
            )
        shown = _shown(windows)
        for level, dash in LINES:
            figure.add_scatter(
                x=[window.end for window in shown],
                y=[window.quantiles[level] for window in shown],
                mode="lines+markers" if len(shown) == 1 else "lines",
                line={"color": INSIDE, "dash": dash, "width": 2.5 if level == "50" else 1.2},
                name=f"{level}%",
                legendgroup=level,
                showlegend=number == 0,
                hovertemplate=f"{level}% of queries up to %{{y:.4g}}<extra></extra>",
            )
        _mark(
            figure,
            windows,
            [window.quantiles["99"] for window in windows],
            is_first=_is_first(stretches, number),
        )
    figures.styled(
        figure, x="end of the window", y=f"nearest distance, {stretches[-1].start.served.distance}"
    )
    _as_dates(figure)
    caption = (
        "Quantiles of the queries’ distances to their nearest items, window by window, and the range of the reference"
        " as a band. Crosses are windows that leave it."
    )
    return Plot(figure, caption, caption, 420)


def _beyond(stretches: Sequence[Stretch]) -> Plot:
    figure = go.Figure()
    for number, (_, windows) in enumerate(stretches):
        shown = _shown(windows)
        for name, values, dash, color in (
            ("beyond the range", [window.share_beyond for window in shown], "solid", INSIDE),
            ("accepted", [window.share_accepted for window in shown], "dot", figures.COLORS[1]),
        ):
            if all(value is None for value in values):
                continue
            figure.add_scatter(
                x=[window.end for window in shown],
                y=values,
                mode="lines+markers" if len(shown) == 1 else "lines",
                line={"color": color, "dash": dash, "width": 2},
                name=name,
                legendgroup=name,
                showlegend=number == 0,
                hovertemplate=f"{name} %{{y:.1%}}<extra></extra>",
            )
        _mark(
            figure,
            windows,
            [window.share_beyond for window in windows],
            is_first=_is_first(stretches, number),
        )
    figure.add_hline(y=0.01, line={"color": figures.GREY, "dash": "dash", "width": 1})
    figures.styled(figure, x="end of the window", y="share of queries")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    _as_dates(figure)
    caption = (
        "Share of each window’s queries beyond the range, and of those accepted where there is a threshold. The dashed"
        " line is 1%, the share beyond it of queries as the reference’s."
    )
    return Plot(figure, caption, caption, 320)


def _shown(windows: Sequence[Window]) -> Sequence[Window]:
    """Windows at equal distances where there are many; the last is among them."""
    return list(figures.spaced(list(reversed(windows))))[::-1]


def _is_first(stretches: Sequence[Stretch], number: int) -> bool:
    """True if no server before this one had a window outside the range."""
    return not any(window.is_outside for each in stretches[:number] for window in each.windows)


def _mark(figure: go.Figure, windows: Sequence[Window], values: Sequence[float], *, is_first: bool) -> None:
    marked = figures.spaced([pair for pair in zip(windows, values, strict=True) if pair[0].is_outside])
    if not marked:
        return
    figure.add_scatter(
        x=[window.end for window, _ in marked],
        y=[value for _, value in marked],
        mode="markers",
        marker={"color": OUTSIDE, "symbol": "x", "size": 9},
        name="leaves the range",
        legendgroup="outside",
        showlegend=is_first,
        text=[f"window {window.number}: {window.share_beyond:.1%} beyond" for window, _ in marked],
        hovertemplate="%{text}<extra></extra>",
    )


def _as_dates(figure: go.Figure) -> None:
    figure.update_xaxes(type="date", zeroline=False)


def _table(windows: Sequence[Window], outside: Sequence[Window]) -> Html:
    chosen = {each.number: each for each in (*outside[-MOST_ROWS // 2 :], *windows[-MOST_ROWS:])}
    shown = [chosen[number] for number in sorted(chosen, reverse=True)][:MOST_ROWS]
    caption = (
        "The last windows, and the last ones that leave the range. Chance: that so many queries, or more, lie beyond"
        " the range where they are as the reference’s; a window leaves it where this is at most what it may spend."
    )
    rows = [
        [
            str(each.number),
            each.end,
            str(each.queries),
            f"{each.quantiles['50']:.4g}",
            f"{each.quantiles['99']:.4g}",
            f"{each.share_beyond:.1%}",
            f"{each.chance:.2g}",
            f"{each.alpha:.2g}",
            "" if each.share_accepted is None else f"{each.share_accepted:.1%}",
            "leaves" if each.is_outside else "in",
        ]
        for each in shown
    ]
    head = ["window", "end", "queries", "median", "99%", "beyond", "chance", "may spend", "accepted", "range"]
    return table(caption, head, rows, "nlnnnnnnnl")


def _facts(stretches: Sequence[Stretch]) -> Html:
    rows = []
    for start, windows in stretches[-10:]:
        served, learned = start.served, start.range
        by_map = "" if served.query_map is None else f", by the map {served.query_map[:12]}"
        rows.append(
            (
                f"from {start.at}",
                f"{served.model} ({served.model_digest[:12]}) with {served.gallery} ({served.gallery_digest[:12]})"
                f"{by_map}; {served.distance}; range up to {learned.upper:.4g}, of {learned.num}"
                f" {'items of the gallery' if learned.source == 'gallery' else 'reference queries'}; windows"
                f" {windows[0].number} to {windows[-1].number}",
            )
        )
    return facts("Servers that wrote the record, the last ten at most", rows, ("start", "served"))
