"""The report's page: its style, its tables and its plots, which need no network."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dmlstudy.html import Html, element, joined
from dmlstudy.html import page as whole_page

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--quiet:#5b6470;--line:#d9dde2;--soft:#f4f6f8;
--accent:#2f57c4;--right:#1a7f37;--wrong:#c0392b;--warn:#fff4d6}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e4e7eb;--quiet:#9aa4b0;--line:#333a42;--soft:#1d2228;
--accent:#8aa8ff;--right:#5cc878;--wrong:#ff8a7a;--warn:#3a3216}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:62rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:.5rem 0 .75rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.75rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.75rem 0 .5rem;overflow-wrap:anywhere}
p,ul{margin:.5rem 0;max-width:46rem;overflow-wrap:anywhere}
a{color:var(--accent)}
nav{font-size:.9rem;margin:1rem 0}
nav ol{display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;margin:0;padding:0;list-style:none}
.verdict{font-size:1.15rem;border-left:4px solid var(--accent);padding:.1rem 0 .1rem .9rem;margin:1rem 0}
.notice{background:var(--warn);border:1px solid var(--line);border-radius:6px;padding:.6rem .8rem;margin:1rem 0}
.quiet,caption,figcaption{color:var(--quiet);font-size:.88rem}
.scroll{overflow:auto;max-height:60rem;margin:.75rem 0;border:1px solid var(--line);border-radius:6px}
.scroll:focus-visible{outline:2px solid var(--accent)}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:.5rem .7rem}
caption span{display:block;position:sticky;left:.7rem;max-width:calc(min(62rem,100vw) - 4rem)}
th,td{text-align:left;padding:.35rem .7rem;border-top:1px solid var(--line);white-space:nowrap;vertical-align:top}
thead th{background:var(--soft);font-weight:600;position:sticky;top:0}tbody th{font-weight:600}
td.number,th.number{text-align:right}
tbody th{white-space:normal;overflow-wrap:anywhere;min-width:9.5rem}
.interval{display:block;color:var(--quiet);font-size:.92em}
details{margin:.75rem 0}summary{cursor:pointer;color:var(--accent);font-size:.95rem;padding:.3rem 0}
.facts th,.facts td{white-space:normal;overflow-wrap:anywhere}
.facts th{width:36%}
pre{overflow-x:auto;background:var(--soft);border:1px solid var(--line);border-radius:6px;padding:.7rem;
font-size:.82rem;line-height:1.45;margin:.75rem 0}
figure{margin:1.25rem 0}figcaption{margin-top:.5rem;max-width:46rem}
.plot{position:relative;width:100%;overflow:hidden}
.examples{display:flex;flex-wrap:wrap;gap:.6rem;padding:.8rem 0;border-top:1px solid var(--line);break-inside:avoid}
.examples figure{margin:0;width:5.2rem}
.examples img{display:block;width:100%;height:auto;border:3px solid var(--line);border-radius:4px;background:#fff}
.examples .right img{border:3px solid var(--right)}.examples .wrong img{border:3px dashed var(--wrong)}
.examples figcaption{font-size:.74rem;line-height:1.3;overflow-wrap:anywhere;margin-top:.2rem}
.right b{color:var(--right)}.wrong b{color:var(--wrong)}
.js-plotly-plot .infolayer text,.js-plotly-plot .cartesianlayer text{fill:var(--ink)!important}
.js-plotly-plot .gridlayer path,.js-plotly-plot .zerolinelayer path{stroke:var(--line)!important}
@media (max-width:40rem){main{padding:.75rem .75rem 3rem}h1{font-size:1.4rem}.verdict{font-size:1.05rem}
.cards,.cards caption,.cards tbody{display:block}.cards thead{display:none}
.cards tr{display:grid;grid-template-columns:1fr 1fr;gap:.35rem .8rem;padding:.6rem .7rem;
border-top:1px solid var(--line)}
.cards th,.cards td,.cards td.number{display:block;border:0;padding:0;text-align:left;white-space:normal;
overflow-wrap:anywhere}
.cards tbody th{grid-column:1/-1;font-size:1rem}
.cards td:last-child:nth-child(even){grid-column:1/-1}.scroll{max-height:none}
.cards td::before{content:attr(data-label);display:block;color:var(--quiet);font-size:.78rem}
.interval{white-space:nowrap}}
@media print{:root{--paper:#fff;--ink:#000;--quiet:#444;--line:#bbb;--soft:#f6f6f6;--accent:#000;--warn:#fff}
main{max-width:none;padding:0}nav{display:none}body{font-size:10pt}h2,h3{break-after:avoid}
figure,tr,.examples{break-inside:avoid}pre{white-space:pre-wrap}.scroll{overflow:visible;max-height:none;border:0}
table{font-size:8.5pt}thead th{position:static}
th,td{white-space:normal;padding:.2rem .35rem}.plot{zoom:.72}}
"""

DRAW = (
    "for(const [id,figure] of Object.entries(PLOTS))"
    "Plotly.newPlot(id,figure.data,figure.layout,{responsive:true,displayModeBar:false})"
)


class Plot(NamedTuple):
    """A figure with the sentence below it; ``label`` is what is read out in its place.

    One whose axes have the same scale is no higher than the page is wide, where it would be drawn amid empty space.
    """

    figure: go.Figure
    caption: str
    label: str
    height: int = 380
    has_one_scale: bool = False


class Section(NamedTuple):
    """A part of a page, by which it is found."""

    id: str
    title: str
    content: Sequence[str | Plot]


def paragraph(*content: str, kind: str = "") -> Html:
    """A paragraph, of a class of the style; `p = 0.5` stays in one line."""
    whole = (each if isinstance(each, Html) else each.replace(" = ", "\u00a0=\u00a0") for each in content)
    return element("p", *whole, **({"class_": kind} if kind else {}))


def with_commands(text: str) -> Html:
    """Text in which what stands between backticks is code."""
    pieces = text.split("`")
    return joined(element("code", each) if place % 2 else each for place, each in enumerate(pieces))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: str = "") -> Html:
    """A table that scrolls in a box of its own; the first cell of a row is its header.

    One of three columns and more is a list of rows on a phone, each cell below its column's name. ``numbers`` says
    of each column by a letter whether it is set to the right (n) or the left; the left is what is meant where it ends.
    """
    kinds = [{"class_": "number"} if letter == "n" else {} for letter in numbers.ljust(len(head))]
    top = [element("th", name, scope="col", **kind) for name, kind in zip(head, kinds, strict=True)]
    is_list = len(head) > 2
    of_cells = [
        kind | ({"data_label": name} if is_list else {}) for name, kind in zip(head, kinds, strict=True)
    ]
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, **own) for cell, own in zip(row[1:], of_cells[1:], strict=True)),
        )
        for row in rows
    ]
    whole = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", element("tr", *top)),
        element("tbody", *body),
        **({"class_": "cards"} if is_list else {}),
    )
    return element("div", whole, class_="scroll", role="region", aria_label=caption, tabindex="0")


def facts(caption: str, known: Iterable[tuple[str, str]], head: tuple[str, str] = ("what", "value")) -> Html:
    """A table of names and values, which are broken into lines where there is no room."""
    return element("div", table(caption, head, known), class_="facts")


def folded(summary: str, *content: str) -> Html:
    """A part that is shown when its summary is clicked."""
    return element("details", element("summary", summary), *content)


def in_plot(text: str) -> str:
    """A name as it must be given to a plot, which takes text for markup."""
    return html.escape(text, quote=False)


def page(title: str, top: Sequence[str], sections: Sequence[Section]) -> str:
    """A whole page: its title, what stands above, a list of the sections where there are several, and these."""
    plots: dict[str, go.Figure] = {}

    def placed(part: str | Plot) -> Html:
        if isinstance(part, str):
            return joined([part])
        name = f"plot-{len(plots) + 1}"
        plots[name] = part.figure
        place = element(
            "div",
            id=name,
            class_="plot",
            style=f"height:{f'min({part.height}px,100vw)' if part.has_one_scale else f'{part.height}px'}",
            role="img",
            aria_label=part.label,
        )
        return element("figure", place, element("figcaption", part.caption))

    body = [
        element("section", element("h2", each.title), *map(placed, each.content), id=each.id)
        for each in sections
    ]
    links = [element("li", element("a", each.title, href=f"#{each.id}")) for each in sections]
    silent = [element("noscript", paragraph("The plots need JavaScript; the tables and sentences do not."))]
    contents = [element("nav", element("ol", *links), aria_label="Contents")] if len(sections) > 1 else []
    scripts = [get_plotlyjs(), f"const PLOTS={_as_json(plots)};{DRAW}"] if plots else []
    main = element("main", element("h1", title), *top, *(silent if plots else []), *contents, *body)
    return whole_page(title, STYLE, main, scripts=[f"{script.strip()}\n" for script in scripts])


def _as_json(plots: dict[str, go.Figure]) -> str:
    """The figures by their places; ``<``, ``>`` and ``/`` within texts are written as escapes."""
    return "{" + ",".join(f"{json.dumps(name)}:{figure.to_json()}" for name, figure in plots.items()) + "}"
