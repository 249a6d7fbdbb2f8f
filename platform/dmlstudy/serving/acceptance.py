"""The threshold from which a match is accepted: the one that ships with a model, or another that is given.

A match is accepted if its score is at least the threshold; a query if any match in its answer is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy.description import ThresholdDescription
from dmlstudy.saved import Model


class Acceptance(NamedTuple):
    """The least score that is accepted; ``shipped`` is what is known of it where it is the model's own."""

    at: float
    shipped: ThresholdDescription | None

    @classmethod
    def of(cls, model: Model, accept_at: float | None = None) -> Acceptance | None:
        """The threshold of a model, or ``accept_at`` in its place; None of a model that has none.

        Raises ValueError for an ``accept_at`` that is no number.
        """
        if accept_at is not None:
            if not math.isfinite(accept_at):
                raise ValueError(f"--accept-at {accept_at}: give a score, as 0.6")
            return cls(accept_at, None)
        shipped = model.threshold
        return None if shipped is None else cls(shipped.tau, shipped)

    def each(self, score_K: NDArray[np.float64]) -> list[bool]:
        """True for each score that is accepted."""
        accepted: list[bool] = (score_K >= self.at).tolist()
        return accepted

    @property
    def facts(self) -> dict[str, Any]:
        """The threshold for programs, with what it does on unseen classes where that is known."""
        if self.shipped is None:
            return {"accept_at": self.at}
        known = self.shipped.model_dump(exclude={"tau"})
        return {"accept_at": self.at, **known}

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        if self.shipped is None:
            return [f"accepts scores of at least {self.at:g}; no errors are known of this threshold"]
        more = [self.shipped.on_new_classes] if self.shipped.on_new_classes else []
        return [self.shipped.words, *more, *(f"warning: {each}" for each in self.shipped.warnings)]
