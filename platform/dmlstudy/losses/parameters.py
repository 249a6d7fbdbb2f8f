"""Checks of what a user may pass to a loss: each error names the parameter, its value and the mend."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def choice(parameter: str, value: str, table: Mapping[str, T]) -> T:
    """The entry of ``table`` named ``value``; raises ValueError with the nearest name and the list."""
    if value not in table:
        raise ValueError(f"{parameter}={value!r} is unknown; {suggestion(value, table)}")
    return table[value]


def suggestion(name: str, known: Iterable[str]) -> str:
    """'did you mean ...? choose from ...' for a name that is not among the known ones."""
    names = sorted(known)
    nearest = difflib.get_close_matches(str(name), names, n=1)
    listed = f"choose from {', '.join(names)}" if names else "there is none to choose"
    return f"did you mean {nearest[0]!r}? {listed}" if nearest else listed


def at_least(parameter: str, value: float, low: float) -> float:
    """``value`` if it is finite and >= ``low``; raises ValueError otherwise."""
    if not (math.isfinite(value) and value >= low):
        raise ValueError(f"{parameter}={value} must be a finite number >= {low}")
    return value


def above(parameter: str, value: float, low: float) -> float:
    """``value`` if it is finite and > ``low``; raises ValueError otherwise."""
    if not (math.isfinite(value) and value > low):
        raise ValueError(f"{parameter}={value} must be a finite number > {low}")
    return value
