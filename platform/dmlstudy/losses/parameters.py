"""Checks of what a user may pass to a loss: each error names the parameter, its value and the mend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from dmlstudy.naming import nearest

T = TypeVar("T")


def choice(parameter: str, value: str, table: Mapping[str, T]) -> T:
    """The entry of ``table`` named ``value``; raises ValueError with the nearest name and the list."""
    if value not in table:
        raise ValueError(f"{parameter}={value!r} is unknown{nearest(value, sorted(table), listed=True)}")
    return table[value]


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
