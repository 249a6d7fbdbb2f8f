"""Words of messages to users: the hint after an unknown name, values and lines that stay short, durations."""

from __future__ import annotations

import difflib
import itertools
import reprlib
from collections.abc import Iterable

from pydantic import ValidationError

LINE = 500
"""Characters of a message, at most."""

VALUE = 80
"""Characters of a value that a message repeats, at most."""

FIRST = 200
"""Characters of another's message of which only the first line is repeated, at most."""

REASON = 300
"""Characters of a reason in an error's line, at most."""

SQLALCHEMYS_OWN = "(raised as a result of Query-invoked autoflush"
"""The beginning of a line that SQLAlchemy puts before a database's message."""

LISTED = 240
"""Characters of the known names that a hint lists where none is near, at most."""


def nearest(word: object, known: Iterable[str], *, listed: bool = False) -> str:
    """``; did you mean 'x'?`` or, where no known name is near, ``; known: a, b`` in alphabetical order.

    ``listed`` appends `` known are: a, b``, in the order given, in both cases.
    """
    names = list(known)
    if not names:
        return "; there is none to choose"
    match = difflib.get_close_matches(str(word)[:VALUE], sorted(names), n=1, cutoff=0.55)
    if listed:
        return f"; {f'did you mean {match[0]!r}? ' if match else ''}known are: {', '.join(names)}"
    return f"; did you mean {match[0]!r}?" if match else f"; known: {_first_of(sorted(names))}"


def _first_of(names: list[str]) -> str:
    """The names, or as many as have room, and the number of the others."""
    ends = itertools.accumulate(len(name) + 2 for name in names)
    num = max(1, sum(end <= LISTED for end in ends))
    more = f" and {len(names) - num} more" if num < len(names) else ""
    return ", ".join(names[:num]) + more


def shown(value: object, limit: int = VALUE) -> str:
    """``repr`` of a value in at most ``limit`` characters, whatever the value's size; three dots stand for the rest."""
    text = _SHORT.repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def one_line(message: object, limit: int = LINE) -> str:
    """A message without line breaks, in at most ``limit`` characters: both ends, where the key and the fix stand.

    What a terminal would obey instead of showing it is written as its escape.
    """
    text = str(message)
    if len(text) > 4 * limit:
        text = f"{text[: 2 * limit]} {text[-2 * limit :]}"
    text = " ".join(text.split())
    if not text.isprintable():
        text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    if len(text) <= limit:
        return text
    end = limit * 2 // 5
    return f"{text[: limit - end - 5]} ... {text[-end:]}"


def counted(number: int, one: str, many: str) -> str:
    """``1 query``, ``2 queries``."""
    return f"{number} {one if number == 1 else many}"


def first_line(error: object) -> str:
    """The first line of an error's message, as ``one_line`` writes it, or the error's type where it has none."""
    lines = [line for line in str(error).strip().splitlines() if not line.startswith(SQLALCHEMYS_OWN)]
    return one_line(lines[0], FIRST) if lines else type(error).__name__


def reason(error: BaseException, limit: int = REASON) -> str:
    """The reason of an error, for parentheses in a line; of fields that pydantic refuses, the first by its name."""
    if not isinstance(error, ValidationError):
        return one_line(str(error) or type(error).__name__, limit)
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(each) for each in first["loc"])
    return one_line(f"{field}: {first['msg']}" if field else first["msg"], limit)


def last_line(error: object) -> str:
    """The last line of an error's message, where one that holds a traceback says why; else as ``first_line``."""
    return one_line(str(error).strip().rpartition("\n")[2]) or type(error).__name__


def duration(seconds: float) -> str:
    """``42 s``, ``3:07 min`` or ``2:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"


def energy(watt_hours: float) -> str:
    """``0.42 Wh``, ``3.1 kWh``: two digits at least."""
    if watt_hours < 1000:
        return f"{watt_hours:.2g} Wh" if watt_hours < 10 else f"{watt_hours:.0f} Wh"
    return f"{watt_hours / 1000:.1f} kWh"


def money(amount: float) -> str:
    """``0.0042``, ``3.10``, ``1,250``: no currency, for that is the reader's."""
    if amount < 0.01:
        return f"{amount:.2g}"
    return f"{amount:.2f}" if amount < 1000 else f"{amount:,.0f}"


class _Short(reprlib.Repr):
    """``reprlib``'s, which looks at no more of a value than it shows, with our lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8
        self.maxstring = self.maxlong = self.maxother = VALUE
        self.maxlevel = 3

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """In the order given, which the base sorts."""
        pairs = (
            f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
            for key, value in itertools.islice(x.items(), self.maxdict)
        )
        return f"{{{', '.join(pairs)}{', ...' if len(x) > self.maxdict else ''}}}" if level > 0 else "{...}"

    def repr_int(self, x: int, level: int) -> str:
        """Without the digits of a number that Python refuses to write out."""
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()
