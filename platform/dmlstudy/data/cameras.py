"""The camera of each picture, from a column or from its name: what a query's own class is not to be found by.

Shapes: N pictures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmlstudy.data.images import Indices
from dmlstudy.data.pictures import HasColumns, Listing
from dmlstudy.text import first_line

RULES: Mapping[str, str] = {
    "market1501": r"_c(\d)s",
    "msmt17": r"(?:^|/)\d+_\d+_(\d+)_[^/]*$",
    "veri776": r"_c(\d{3})_",
}
"""Of data sets that have cameras of their own, where in a picture's name it stands."""

UNKNOWN = -1
"""The camera of a picture of which none is known; it is equal to no other."""


def cameras(name: str, rule: str | None, root: Path | None, sides: Sequence[Listing]) -> list[Indices] | None:
    """The camera of each picture of each side, numbered alike on all; None where nothing is asked for.

    The ``rule`` names a column, or is a regular expression with one group that is sought in a picture's path below
    ``root``. An empty value is ``UNKNOWN``.

    Raises ValueError for a set with cameras of its own, a column that is missing or empty, an expression that is none,
    and a picture that it does not fit.
    """
    if name in RULES:
        if rule is not None:
            raise ValueError(f"data.camera: {name} has cameras of its own; leave it out")
        rule = RULES[name]
    if rule is None:
        return None
    values = [
        _matched(side, _expression(rule), root) if "(" in rule else _of_column(side, rule) for side in sides
    ]
    texts = ["" if value is None else str(value).strip() for of_side in values for value in of_side]
    known = {text: number for number, text in enumerate(sorted(set(texts) - {""}))}
    if not known:
        raise ValueError(f"data.camera: {rule!r} is empty for all pictures of {name}; leave it out")
    whole = np.array([known.get(text, UNKNOWN) for text in texts], dtype=np.int64)
    return np.split(whole, np.cumsum([len(of_side) for of_side in values])[:-1])


def check_none(name: str, rule: str | None, what: str) -> None:
    """Raise ValueError where cameras are asked for of what has none."""
    if rule is not None:
        raise ValueError(f"data.camera: {name} {what}; leave it out")


def _of_column(side: Listing, name: str) -> list[Any]:
    pictures = side.pictures
    column = pictures.column(name) if isinstance(pictures, HasColumns) else None
    if column is None:
        raise ValueError(
            f"data.camera: no column {name!r} beside the pictures; name one that is there, or write a regular"
            r" expression of their paths with one group, as '_c(\d+)s'"
        )
    return [column[row] for row in side.row_N.tolist()]


def _expression(rule: str) -> re.Pattern[str]:
    try:
        expression = re.compile(rule)
    except re.error as error:
        raise ValueError(f"data.camera: {rule!r} is no regular expression ({first_line(error)})") from None
    if expression.groups != 1:
        raise ValueError(
            f"data.camera: {rule!r} has {expression.groups} groups; put the camera, and nothing else, in parentheses"
        )
    return expression


def _matched(side: Listing, expression: re.Pattern[str], root: Path | None) -> list[str]:
    below = "" if root is None else f"{root if root.is_dir() else root.parent}/"
    found = []
    for row in side.row_N.tolist():
        place = side.pictures.place(row)
        match = expression.search(place.removeprefix(below))
        if match is None:
            raise ValueError(
                f"data.camera: {expression.pattern!r} does not fit {place}; mend it, or the name"
            )
        found.append(match[1] or "")
    return found
