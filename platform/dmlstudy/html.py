"""Markup of pages: elements that escape what they are given, and the policy that keeps a page to itself."""

from __future__ import annotations

import html
from collections.abc import Iterable

VOID = ("img", "br")


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
    """The Content-Security-Policy of a page that loads nothing; ``scripts`` are SHA-256 (base64) of its own scripts.

    Pictures stand in the page as data, styles too; a form has nowhere to go.
    """
    allowed = " ".join(f"'sha256-{digest}'" for digest in scripts) or "'none'"
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"


def page(title: str, style: str, *body: str) -> str:
    """A whole page without scripts."""
    head = [
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'),
        element("title", title),
        element("style", Html(style)),
    ]
    whole = element("html", element("head", *head), element("body", *body), lang="en")
    return f"<!doctype html>\n{whole}\n"
