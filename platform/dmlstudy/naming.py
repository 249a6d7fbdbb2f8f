"""The hint that ends every message about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: object, known: Iterable[str], *, listed: bool = False) -> str:
    """``; did you mean 'x'?`` or, where no known name is near, ``; known: a, b`` in alphabetical order.

    ``listed`` appends `` known are: a, b``, in the order given, in both cases.
    """
    names = list(known)
    if not names:
        return "; there is none to choose"
    match = difflib.get_close_matches(str(word), sorted(names), n=1, cutoff=0.55)
    if listed:
        return f"; {f'did you mean {match[0]!r}? ' if match else ''}known are: {', '.join(names)}"
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(sorted(names))}"
