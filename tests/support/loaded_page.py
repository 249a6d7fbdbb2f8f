"""What a page of HTML loads and holds, as a parser finds it."""

from __future__ import annotations

from html.parser import HTMLParser


class Loads(HTMLParser):
    """What a page would load, the scripts it has, and the elements it consists of."""

    LOADING = (
        "src",
        "srcset",
        "href",
        "data",
        "poster",
        "action",
        "background",
        "cite",
        "formaction",
        "ping",
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.loaded: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.styles = ""
        self._within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._within = tag
        if tag == "script":
            self.scripts.append("")
        for name, value in attrs:
            if name in self.LOADING and not (value or "").startswith(("#", "data:image/png;base64,")):
                self.loaded.append(f"{tag} {name}={value}")
            if name == "style":
                self.styles += value or ""
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, text: str) -> None:
        if self._within == "script":
            self.scripts[-1] += text
        if self._within == "style":
            self.styles += text


def parsed(text: str) -> Loads:
    found = Loads()
    found.feed(text)
    return found
