"""Checks of what a user may pass to a loss: each error names the parameter, its value and the mend."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from dmlstudy.records import Scalar
from dmlstudy.text import nearest, one_line, shown

T = TypeVar("T")

LARGEST = 10_000
"""The most units, layers or centres of a loss or learner, lest a typing error fill the memory."""


def choice(parameter: str, value: str, table: Mapping[str, T]) -> T:
    """The entry of ``table`` named ``value``; raises ValueError with the nearest name and the list."""
    if value not in table:
        raise ValueError(f"{parameter}={shown(value)} is unknown{nearest(value, sorted(table), listed=True)}")
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


def part(parameter: str, value: Any, kind: Any, wanted: str, tried: Callable[[T], str | None]) -> T:
    """The object that was passed for a loss's ``parameter``, if it is of this kind (a Protocol) and works.

    ``tried`` runs a small test and returns what is wrong, if anything. Raises ValueError, also where the object
    itself fails in the test.
    """
    if isinstance(value, type) or not isinstance(value, kind):
        raise ValueError(f"{parameter}={shown(value)} is no {kind.__name__}; pass {wanted}")
    try:
        problem = tried(value)
    except Exception as error:
        problem = f"{type(error).__name__}: {one_line(error, 200)}"
    if problem is not None:
        raise ValueError(f"{parameter}={shown(value)} fails on a small batch: {problem}; pass {wanted}")
    found: T = value
    return found


def constructed(
    role: str,
    name: str,
    table: Mapping[str, Callable[..., T]],
    params: Mapping[str, Scalar],
    given: Mapping[str, Any],
    parts: Mapping[str, Any] | None = None,
) -> T:
    """The entry ``name`` of a catalogue, built from these parameters and those of ``given`` that it asks for.

    ``parts`` are objects that stand where a parameter has a name. Raises ValueError for an unknown entry or parameter
    (with the nearest name and the list), and for a value whose type is not its default's.
    """
    kind = choice(role, name, table)
    defaults = hyperparameters(kind, given)
    parts = parts or {}
    for key in (*params, *parts):
        if key not in defaults:
            raise ValueError(f"{role} {name!r} has no parameter {key!r}{nearest(key, defaults, listed=True)}")
    for key, value in params.items():
        if not _fits(value, defaults[key]):
            wanted = "number" if isinstance(defaults[key], float) else type(defaults[key]).__name__
            raise ValueError(
                f"{role} {name!r}: {key}={shown(value)} must be of type {wanted}, like {defaults[key]!r}"
            )
        if type(defaults[key]) is int and isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{role} {name!r}: {key} is {shown(value)}, and at most {LARGEST}; set it lower")
    asked = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {key: value for key, value in given.items() if key in asked}
    return kind(**arguments, **params, **parts)


def hyperparameters(kind: Callable[..., Any], given: Collection[str]) -> dict[str, Scalar]:
    """A catalogue entry's parameters with their defaults, without the names ``given`` to it."""
    parameters = inspect.signature(kind).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name not in given}


def _fits(value: Scalar, default: Scalar) -> bool:
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)
