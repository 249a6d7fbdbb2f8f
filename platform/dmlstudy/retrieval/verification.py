"""Verification of pairs: are two items of one class? Errors at thresholds, and how alike the classes' thresholds are.

Accept a pair if its score, the cosine, is at least theta. FMR(theta) is the share of impostors that are accepted,
FNMR(theta) the share of genuine pairs that are rejected; which pairs there are says ``pairs``. theta_f lets at most
the share f of impostors through (``OrderStatistics``).

Shapes: N items, D embedding size, C classes ascending, T thresholds ascending.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy.metric_names import fmr_at_tau, fnmr_at_tau, rate_name
from dmlstudy.retrieval.neighbours import Ints
from dmlstudy.retrieval.pairs import OrderStatistics, Pairs, count_by_class

RATES = (1e-1, 1e-2, 1e-3, 1e-4)
"""False match rates at which thresholds are set."""
REPORTED = RATES[1:]
"""Those at which FNMR is told."""
FEWEST_MATCHES = 10
"""A rate f needs f N- of at least this: of fewer impostors its threshold is chance."""
OPIS_RATES = (1e-2, 1e-1)
"""Thresholds of OPIS lie between those of these rates."""
OPIS_STEPS = 101
WORST_AT = 1e-2
"""The rate whose threshold the worst classes are told at."""
WORST_SHARE = 10
"""One class in so many is among the worst."""
MOST_CLASS_PAIRS = 5
"""Different pairs of classes among accepted impostors are counted up to here."""
MOST_POINTS = 200
"""Of the curve."""

Values = NDArray[np.float64]


class ErrorPoint(NamedTuple):
    """A point of the curve of both errors."""

    theta: float
    fmr: float
    fnmr: float


class Told(NamedTuple):
    """Pairs that given thresholds accept and reject, by class: M, P, G and Q of ``verdict.thresholds``."""

    unit_C: Ints
    impostors_C: Ints
    genuine_C: Ints
    accepted: dict[float, Ints]
    """By wanted rate, impostors of each class at or above the threshold."""
    rejected: dict[float, Ints]
    """Genuine pairs of each class below it."""
    class_pairs: dict[float, int]
    """Different pairs of classes among accepted impostors, up to ``MOST_CLASS_PAIRS``."""


class Verification(NamedTuple):
    """Metrics of a test set's pairs, the curve of both errors and, where thresholds were given, what these do."""

    metrics: dict[str, float]
    curve: list[ErrorPoint]
    told: Told | None


def is_measurable(rate: float, num_impostors: int) -> bool:
    """True if there are enough impostors for a threshold at this rate."""
    return num_impostors * rate >= FEWEST_MATCHES * (1 - 1e-12)


def fewest_impostors(rate: float) -> int:
    """The number of impostors from which a rate is measurable."""
    return math.ceil(FEWEST_MATCHES / rate * (1 - 1e-12))


def thresholds(pairs: Pairs, rates: Sequence[float]) -> dict[float, float]:
    """theta_f of the rates that are measurable, in two sweeps."""
    rates = [rate for rate in rates if is_measurable(rate, pairs.num_impostors)]
    return {rate: cut.theta for rate, cut in OrderStatistics(pairs, rates).cuts.items()} if rates else {}


def verify(pairs: Pairs, taus: Mapping[float, float] | None = None) -> Verification:
    """The metrics of verification; ``taus`` are thresholds set elsewhere, by the rate they were set for.

    ``fnmr_at_fmr_1e-3``     FNMR(theta_f), also as ``macro_``, the mean over the classes with a genuine pair
    ``eer``                  (FMR + FNMR) / 2 at the observed score where the two differ least
    ``opis``                 how unlike the classes are at one threshold (``opis``)

    ``fmr_at_tau_1e-3``, ``fnmr_at_tau_1e-3``  both errors at the threshold that was given for this rate
    ``worst_fmr_at_fmr_1e-2``, ``worst_fnmr_at_fmr_1e-2``  mean of the worst tenth of the classes at theta_1e-2

    Left out: what is at a rate f with f N- < 10; of sets without a genuine pair or without an impostor all but the two
    counts ``num_genuine_pairs`` and ``num_impostor_pairs``.

    Three sweeps.
    """
    num_genuine, num_impostors = pairs.num_genuine, pairs.num_impostors
    metrics = {"num_genuine_pairs": float(num_genuine), "num_impostor_pairs": float(num_impostors)}
    if not num_genuine or not num_impostors:
        return Verification(metrics, [], None)
    rates = [rate for rate in RATES if is_measurable(rate, num_impostors)]
    found = OrderStatistics(pairs, rates, with_equal_errors=True)
    assert found.equal_errors is not None
    metrics["eer"] = found.equal_errors
    reported = [rate for rate in REPORTED if rate in rates]
    for rate in reported:
        metrics[f"fnmr_at_fmr_{rate_name(rate)}"] = (num_genuine - found.cuts[rate].num_genuine) / num_genuine
    taus = dict(taus or {})
    grid = opis_grid(*(found.cuts[rate].theta for rate in OPIS_RATES)) if WORST_AT in rates else np.empty(0)
    wanted = np.array([*(found.cuts[rate].theta for rate in reported), *taus.values(), *grid])
    if not len(wanted):
        return Verification(metrics, _curve(found, pairs), None)
    order_T = np.argsort(wanted, kind="stable")
    counts = count_by_class(pairs, wanted[order_T], MOST_CLASS_PAIRS)
    place = np.argsort(order_T)  # of each that is wanted, among those counted
    has_genuine_C = pairs.genuine_C > 0
    fnmr_TC = counts.rejected_TC[:, has_genuine_C] / pairs.genuine_C[has_genuine_C]
    for rate, row in zip(reported, place, strict=False):
        metrics[f"macro_fnmr_at_fmr_{rate_name(rate)}"] = float(fnmr_TC[row].mean())
        if rate == WORST_AT:
            fmr_C = counts.accepted_TC[row] / np.maximum(pairs.impostors_C, 1)
            metrics[f"worst_fmr_at_fmr_{rate_name(rate)}"] = _worst(fmr_C)
            metrics[f"worst_fnmr_at_fmr_{rate_name(rate)}"] = _worst(fnmr_TC[row])
    if len(grid):
        rows = place[len(wanted) - len(grid) :]
        metrics["opis"] = opis(pairs, counts.accepted_TC[rows], counts.rejected_TC[rows])
    if not taus:
        return Verification(metrics, _curve(found, pairs), None)
    row_of = dict(zip(taus, place[len(reported) :], strict=False))
    for rate, row in row_of.items():
        metrics[fmr_at_tau(rate)] = float(counts.accepted_TC[row].sum()) / 2 / num_impostors
        metrics[fnmr_at_tau(rate)] = float(counts.rejected_TC[row].sum()) / num_genuine
    told = Told(
        pairs.unit_C,
        pairs.impostors_C,
        pairs.genuine_C,
        {rate: counts.accepted_TC[row] for rate, row in row_of.items()},
        {rate: counts.rejected_TC[row] for rate, row in row_of.items()},
        {rate: int(counts.class_pairs_T[row]) for rate, row in row_of.items()},
    )
    return Verification(metrics, _curve(found, pairs), told)


def opis_grid(strict: float, lax: float) -> Values:
    """The scores of OPIS_STEPS distances at equal steps between those of two thresholds; d^2 = 2 - 2 score."""
    first, last = (math.sqrt(max(0.0, 2 - 2 * theta)) for theta in (strict, lax))
    distance_T: Values = np.linspace(first, last, OPIS_STEPS)
    return np.asarray(1 - distance_T**2 / 2)


def opis(pairs: Pairs, accepted_TC: Ints, rejected_TC: Ints) -> float:
    """The operating-point-inconsistency score: the mean over thresholds and classes of (U_c - mean_c U)^2.

    U_c = 2ab / (a + b), 0 where both are 0; a is the share of the class's genuine pairs that are accepted, b that of
    its impostors that are rejected. Of the classes with a genuine pair. Reference: Zhang et al. 2024.
    """
    has_both_C = (pairs.genuine_C > 0) & (pairs.impostors_C > 0)
    a_TC = 1 - rejected_TC[:, has_both_C] / pairs.genuine_C[has_both_C]
    b_TC = 1 - accepted_TC[:, has_both_C] / pairs.impostors_C[has_both_C]
    sum_TC = a_TC + b_TC
    use_TC = np.where(sum_TC > 0, 2 * a_TC * b_TC / np.where(sum_TC > 0, sum_TC, 1), 0.0)
    return float(((use_TC - use_TC.mean(axis=1, keepdims=True)) ** 2).mean())


def _worst(rate_C: Values) -> float:
    """The mean of the largest tenth, of one class at least."""
    return float(np.sort(rate_C)[::-1][: -(-len(rate_C) // WORST_SHARE)].mean())


def _curve(found: OrderStatistics, pairs: Pairs) -> list[ErrorPoint]:
    """Points at about equal steps of log FMR, thresholds ascending."""
    theta_T, impostors_T, genuine_T = found.curve()
    fmr_T, fnmr_T = impostors_T / pairs.num_impostors, 1 - genuine_T / pairs.num_genuine
    with_match_T = fmr_T > 0
    step_T = np.zeros(len(theta_T))
    step_T[with_match_T] = np.log(fmr_T[with_match_T])
    step_T = np.floor(step_T / min(step_T.min(), -1e-9) * (MOST_POINTS - 1))
    kept = np.flatnonzero(with_match_T & np.append(True, np.diff(step_T) != 0))
    return [ErrorPoint(float(theta_T[t]), float(fmr_T[t]), float(fnmr_T[t])) for t in kept]
