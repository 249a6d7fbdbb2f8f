"""Errors of a shipped threshold on classes that it was not set on, with intervals over classes.

Pairs of items are not independent of one another, nor are pairs of classes, two of which share a class. So classes are
left out one by one, a class with all pairs that it is in (jackknife), in the logit of the rate.

Of class c: M_c impostors at or above the threshold with an item of c in them, P_c all of these; G_c genuine pairs of c
below it, Q_c all of these.

Shapes: C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit, stdtrit

from dmlstudy.records import PairCounts

LEAST_RATE = 1e-12
"""A rate without a class is held at least so far from 0 and 1."""
MOST_OF_ONE = 0.2
"""A class that is in more of the accepted impostors is warned of."""
FEW_CLASS_PAIRS = 5
"""Fewer pairs of classes that hold all accepted impostors are warned of."""
FEW_CLASSES = 50
"""With fewer the interval of FNMR is too narrow where classes differ much: 86 to 90% instead of 95%."""

Values = NDArray[np.float64]


class Rate(NamedTuple):
    """A share of pairs, ``num`` of ``total``, with its 95% interval for other classes like these.

    ``low`` and ``high`` are of the rate that the kind of classes has; ``new_low`` and ``new_high`` of the rate that as
    many new classes will show. None where no pair, or every pair, is counted, where classes are too few, and where all
    show the same rate.
    """

    num: int
    total: int
    num_classes: int
    low: float | None = None
    high: float | None = None
    new_low: float | None = None
    new_high: float | None = None

    @property
    def rate(self) -> float:
        return self.num / self.total

    def __str__(self) -> str:
        """``1.3e-3 [0.7e-3, 2.6e-3]``, or without an interval ``0 of 4950 pairs``."""
        if self.low is None or self.high is None:
            return f"{self.num} of {self.total} pairs"
        return f"{said(self.rate)} [{said(self.low, self.rate)}, {said(self.high, self.rate)}]"


class Errors(NamedTuple):
    """Errors of a threshold on unseen classes, and warnings about their intervals."""

    tau: float
    wanted_fmr: float
    fmr: Rate
    fnmr: Rate
    warnings: list[str]

    @property
    def num_classes(self) -> int:
        return self.fmr.num_classes

    def __str__(self) -> str:
        """The card's line."""
        return (
            f"tau {self.tau:.3g}, set for FMR {said(self.wanted_fmr)} on held-out development classes; on"
            f" {self.num_classes} unseen classes FMR {self.fmr}, FNMR {self.fnmr}"
        )

    @property
    def on_new_classes(self) -> str:
        """A sentence on what as many new classes will show; empty where there is no interval."""
        if self.fmr.new_low is None or self.fmr.new_high is None:
            return ""
        low, high = (said(each, self.fmr.rate) for each in (self.fmr.new_low, self.fmr.new_high))
        return f"{self.num_classes} new classes of the kind will show a FMR from {low} to {high} (95%)."


def fields(found: Errors) -> dict[str, Any]:
    """The errors as a model's folder keeps them (``description.ThresholdDescription``)."""
    return {
        "tau": found.tau,
        "wanted_fmr": found.wanted_fmr,
        "num_classes": found.num_classes,
        "fmr": _rate_fields(found.fmr),
        "fnmr": _rate_fields(found.fnmr),
        "words": str(found),
        "on_new_classes": found.on_new_classes,
        "warnings": found.warnings,
    }


def _rate_fields(found: Rate) -> dict[str, Any]:
    return {
        **{name: value for name, value in found._asdict().items() if name != "num_classes"},
        "rate": found.rate,
    }


def errors(counts: PairCounts, rate: str) -> Errors:
    """The errors at the threshold that was set for this rate, a name as ``1e-3``.

    Left out are classes without a pair of the kind. Raises ValueError for counts without an impostor or a genuine pair.
    """
    accepted_C, impostors_C = counts.accepted[rate], counts.impostors
    own = [(g, q) for g, q in zip(counts.rejected[rate], counts.genuine, strict=True) if q]
    if not own or not sum(impostors_C):
        raise ValueError("a threshold's errors need impostors and genuine pairs")
    fmr = rate_over_classes(accepted_C, impostors_C, classes_in_pair=2)
    fnmr = rate_over_classes([g for g, _ in own], [q for _, q in own], classes_in_pair=1)
    warnings = []
    if fmr.num:
        most = max(accepted_C) / fmr.num
        if most > MOST_OF_ONE:
            warnings.append(
                f"one class is in {most:.0%} of the {fmr.num} accepted impostors; without it FMR would be another"
            )
        if (held := counts.class_pairs[rate]) < FEW_CLASS_PAIRS:
            pairs = "one pair" if held == 1 else f"{held} pairs"
            warnings.append(
                f"{pairs} of classes hold all {fmr.num} accepted impostors; the interval of FMR is a guess"
            )
    else:
        warnings.append(f"no impostor of {fmr.total} was accepted, so FMR has no interval")
    if fnmr.num_classes < FEW_CLASSES:
        warnings.append(
            f"{fnmr.num_classes} classes have genuine pairs; below {FEW_CLASSES} the interval of FNMR may be too narrow"
        )
    return Errors(counts.thresholds[rate], float(rate), fmr, fnmr, warnings)


def shipped(counts: PairCounts | None) -> Errors | None:
    """The errors at the threshold that ships; None where there is none, or no pairs to judge it by."""
    if counts is None or counts.shipped not in counts.thresholds:
        return None
    return errors(counts, counts.shipped) if sum(counts.genuine) and sum(counts.impostors) else None


def rate_over_classes(hit_C: Sequence[int], total_C: Sequence[int], *, classes_in_pair: int) -> Rate:
    """The rate of pairs of ``classes_in_pair`` classes, with the jackknife interval over classes.

    r = hit / total, r_c the same without class c; x_c = logit r_c - mean; V = (C - 1)/C sum x_c^2 with
    df = clip(3 (sum x_c^2)^2 / sum x_c^4 - 1, 1, C - 1).

    The interval is expit(logit r -+ t_df sqrt(V)); for the rate
    that C' new classes will show, here as many, V is multiplied by 1 + C / C'.
    """
    hits, totals = np.array(hit_C, np.float64), np.array(total_C, np.float64)
    hit, total = sum(hit_C) // classes_in_pair, sum(total_C) // classes_in_pair
    num_classes = len(hits)
    found = Rate(hit, total, num_classes)
    # Of pairs of two classes there must be a pair left without any one class.
    if not 0 < hit < total or num_classes < classes_in_pair + 1 or (totals >= total).any():
        return found
    rate_C = np.clip((hit - hits) / (total - totals), LEAST_RATE, 1 - LEAST_RATE)
    x_C = logit(rate_C)
    x_C -= x_C.mean()
    square_C = x_C**2
    variance = (num_classes - 1) / num_classes * float(square_C.sum())
    if not variance:
        return found
    df = min(max(3 * float(square_C.sum()) ** 2 / float((square_C**2).sum()) - 1, 1.0), num_classes - 1.0)
    half = float(stdtrit(df, 0.975)) * math.sqrt(variance)
    centre = float(logit(found.rate))
    low, high, new_low, new_high = (
        float(expit(centre + turn * half * wider)) for wider in (1, math.sqrt(2)) for turn in (-1, 1)
    )
    return found._replace(low=low, high=high, new_low=new_low, new_high=new_high)


def said(rate: float, beside: float | None = None) -> str:
    """A rate as people read it: two digits, with the power of ten of a rate ``beside`` it that is little larger."""
    if rate == 0:
        return "0"
    power = _power(rate)
    if power >= -2:
        return f"{rate:.2f}"
    if beside is not None and power < _power(beside) < -2 and rate >= 0.3 * 10.0 ** _power(beside):
        power = _power(beside)
    digits = f"{rate / 10.0**power:.1f}".removesuffix(".0")
    return f"{digits}e{power}"


def _power(rate: float) -> int:
    """The power of ten of a rate, once it is rounded to two digits."""
    return math.floor(math.log10(float(f"{rate:.1e}")))
