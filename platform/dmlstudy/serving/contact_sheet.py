"""A contact sheet: queries with their nearest items as pictures, in one HTML page that loads nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dmlstudy.html import Html, element, page, write_page

LEAST_SIDE = 96
"""Pixels of a picture's shorter side on the page; smaller ones are enlarged without smoothing."""

STYLE = """
:root{color-scheme:light dark}
body{font-family:system-ui,sans-serif;margin:1rem auto;max-width:80rem;padding:0 1rem}
h1{font-size:1.4rem}
section{display:grid;grid-template-columns:repeat(auto-fill,minmax(6rem,1fr));gap:.6rem;align-items:start;
border-top:1px solid #8886;padding:.75rem 0;break-inside:avoid}
figure{margin:0;font-size:.75rem}
figure img{box-sizing:border-box;width:100%;border:3px solid #8886;border-radius:4px}
figure.query img{border-color:#4269d0}figure.right img{border-color:#3ca951}
figure.wrong img{border:3px dashed #ff725c}
figcaption{word-break:break-all}
"""

SIGNS = {"query": "query ", "right": "✓ ", "wrong": "✗ ", "found": ""}
"""Signs that tell pictures apart where colours do not."""


class Shown(NamedTuple):
    """A picture with what stands below it; ``is_right`` is None where nobody knows."""

    image_HWC: NDArray[np.uint8]
    caption: str
    is_right: bool | None = None


def write_sheet(path: str | Path, title: str, rows: Sequence[tuple[Shown, Sequence[Shown]]]) -> None:
    """Write queries, each with its results in their order, to ``path``, whole or not at all.

    Raises ValueError for a path that may not be written (``html.check_page``).
    """
    sections = [
        element("section", _figure(query, "query"), *(_figure(each, _judged(each)) for each in results))
        for query, results in rows
    ]
    told = "Each query is followed by its nearest items, with their distances. ✓: of the query's label, ✗: of another."
    write_page(path, page(title, STYLE, element("h1", title), element("p", told), *sections))


def _judged(shown: Shown) -> str:
    return {None: "found", True: "right", False: "wrong"}[shown.is_right]


def _figure(shown: Shown, kind: str) -> Html:
    picture = element("img", alt=shown.caption, src=data_uri(shown.image_HWC))
    sign = [element("b", SIGNS[kind])] if SIGNS[kind] else []
    caption = element("figcaption", *sign, shown.caption)
    return element("figure", picture, caption, class_=kind)


def data_uri(image_HWC: NDArray[Any]) -> str:
    """A picture as PNG within the page."""
    picture = Image.fromarray(image_HWC[..., 0] if image_HWC.shape[2] == 1 else image_HWC)
    scale = -(-LEAST_SIDE // min(picture.size))
    if scale > 1:
        picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
