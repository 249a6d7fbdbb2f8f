"""Curves of the scores of a study's verdict trials, and of their errors, from the runs that hold them."""

from __future__ import annotations

import re
from typing import NamedTuple

from dmlstudy.records import PairCounts, is_untrained
from dmlstudy.registry import tracking
from dmlstudy.search.verdict_trials import SHIPPED_SEED
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


def last_told(store: Store, study: str, metrics: str) -> list[Curve]:
    """The finished verdict trials with the last values of metrics whose names match, one of each, by family and seed.

    Raises StoreError for an unknown study.
    """
    runs = tracking.runs_of(store, study)
    found = []
    for run in (run for family in sorted(runs.families) for run in runs.judged(family)):
        told = {name: [value] for name, value in run.metrics.items() if re.fullmatch(metrics, name)}
        if told:
            found.append(Curve(run.family, run.seed, told))
    return sorted(found, key=lambda curve: (curve.family, curve.seed))


def pair_counts(store: Store, study: str) -> dict[str, PairCounts]:
    """Pairs that the thresholds of each family's shipped model accept; of families whose models have thresholds.

    Raises StoreError for an unknown study.
    """
    runs = tracking.runs_of(store, study)
    shipped = {
        family: [run for run in runs.judged(family) if run.seed == SHIPPED_SEED]
        for family in runs.families
        if not is_untrained(family)
    }
    found = {family: runs.pair_counts(own[-1]) for family, own in shipped.items() if own}
    return {family: counts for family, counts in found.items() if counts is not None}
