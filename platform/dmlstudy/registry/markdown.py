"""Text of users, as names of files and folders, in Markdown: shown as it is, never read as markup."""

from __future__ import annotations

import re

from dmlstudy.text import one_line

HARMLESS = re.compile(r"(?!.*www\.)[A-Za-z0-9]([A-Za-z0-9 .,-]*[A-Za-z0-9])?", re.IGNORECASE)
"""Text that no reader of Markdown takes for more than itself."""

MOST = 300
"""Characters of a text that are shown."""


def code(text: str) -> str:
    """The text as code in a line, between as many backticks as none of its own can end."""
    shown = one_line(text, MOST)
    longest = max((len(each) for each in re.findall("`+", shown)), default=0)
    fence, pad = "`" * (longest + 1), " " if "`" in shown else ""
    return f"{fence}{pad}{shown}{pad}{fence}" if shown else ""


def verbatim(text: str) -> str:
    """The text as it is where that is harmless, else as code."""
    return text if HARMLESS.fullmatch(text) else code(text)
