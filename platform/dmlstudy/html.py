"""The shell of all pages: markup that escapes what it is given, and a policy that keeps a page to itself."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from dmlstudy.files import check_output, written_whole

VOID = ("img", "br")

HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta http-equiv="Content-Security-Policy" content="'
)

NOTHING = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src "
"""Content that a page may load and run: inline pictures and styles, and the scripts listed."""

BEGINNING = f"{HEAD}{NOTHING}"
"""The start of every page; a file with this start may be replaced by another page."""


class Html(str):
    """Text that is markup already; any other is escaped where it becomes part of a page."""


def element(name: str, *content: str, **attributes: str) -> Html:
    """An element; an attribute's name loses its last ``_``, other ones become ``-``."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>" if name in VOID else f"<{name}{given}>{joined(content)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Parts behind each other, escaped unless they are markup."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def policy(scripts: Iterable[str] = ()) -> str:
    """The Content-Security-Policy of a page that loads nothing, sends nothing and runs these scripts alone."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return NOTHING + (" ".join(f"'sha256-{each}'" for each in hashes) or "'none'")


def page(title: str, style: str, *body: str, scripts: Sequence[str] = ()) -> str:
    """A whole page, with its scripts behind all else."""
    head = joined([element("title", title), element("style", Html(style))])
    last = [element("script", Html(script)) for script in scripts]
    return f'{HEAD}{policy(scripts)}">{head}</head>{element("body", *body, *last)}</html>\n'


def check_page(path: str | Path) -> Path:
    """The path, if a page may be written to it: nothing is there, or an earlier page. Raises ValueError otherwise."""
    return check_output(path, "a page by dmlstudy", BEGINNING.encode())


def write_page(path: str | Path, text: str) -> None:
    """Write a page, whole or not at all. Raises ValueError for a path that may not be written (``check_page``)."""
    with written_whole(check_page(path)) as file:
        file.write(text.encode())
