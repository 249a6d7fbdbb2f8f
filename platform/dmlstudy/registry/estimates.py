"""A mean over seeds and how sure it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.special import stdtrit

from dmlstudy.records import Record


class Estimate(Record):
    """Mean over n values and the half-width of its 95% t-interval; none for a single value."""

    mean: float
    half_width: float | None
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        n = len(values)
        if n < 2:
            return cls(mean=values[0], half_width=None, num=n)
        quantile = float(stdtrit(n - 1, 0.975))
        half_width = quantile * statistics.stdev(values) / math.sqrt(n)
        return cls(mean=statistics.fmean(values), half_width=half_width, num=n)

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width

    def __str__(self) -> str:
        width = "" if self.half_width is None else f" ± {self.half_width:.3f}"
        return f"{self.mean:.4f}{width}"
