"""Curves of the scores of a study's verdict trials, from the runs that hold them."""

from __future__ import annotations

import re
from typing import NamedTuple

from dmlstudy.registry import tracking
from dmlstudy.store import Store


class Curve(NamedTuple):
    """One trial: what it told after each part, by metric; a value for each step it has all of them of."""

    family: str
    seed: int
    values: dict[str, list[float]]


def verdict_curves(store: Store, study: str, metrics: str) -> list[Curve]:
    """The finished verdict trials that told metrics whose names match the regular expression, by family and seed.

    Raises StoreError for an unknown study.
    """
    runs = tracking.runs_of(store, study)
    found = []
    for run in (run for family in sorted(runs.families) for run in runs.judged(family)):
        told = {name: runs.curve(run, name) for name in run.metrics if re.fullmatch(metrics, name)}
        if not told:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in told.values())))
        values = {name: [curve[step] for step in steps] for name, curve in told.items()}
        found.append(Curve(run.family, run.seed, values))
    return sorted(found, key=lambda curve: (curve.family, curve.seed))
