"""The plan of a verdict, sealed by its digest before the first test image is read.

It says what is compared, on which data, with which seeds and by which rule. Whoever changes one of these later, or adds
a trial, is found out by ``studies.sealing``; whoever rewrites the whole store is found out by a digest noted elsewhere.
"""

from __future__ import annotations

import hashlib
from typing import Any

from dmlstudy.records import Record
from dmlstudy.verdict.comparison import ALPHA, Pair
from dmlstudy.verdict.sequential import Plan

PLAN_FILE = "verdict_plan.json"
"""The file that holds it, in the study's folder and with the study's run."""


class SealedPlan(Record):
    """All that is fixed before a test image is read."""

    study: str
    sealed: float
    """Seconds since 1970."""
    code_version: str
    study_sha256: str
    """Of ``meaning``."""
    meaning: dict[str, Any]
    """The study file with defaults and spaces resolved."""
    folds_sha256: str
    data: dict[str, str]
    """Digests and sizes of the data, by their names among the tags of the study's run."""
    objective: str
    level: float = ALPHA
    rule: Plan
    weights: tuple[float, ...]
    winner: str
    """The family that is best on the validation classes."""
    trials: dict[str, list[str]]
    """The fingerprint of each verdict trial's configuration, by family and then seed, in the order they run."""
    pairs: list[Pair]
    power: dict[str, Any]
    """The smallest differences that the plan can see, and the pilot that says so."""

    @property
    def text(self) -> str:
        """The plan as it is kept."""
        return f"{self.model_dump_json(indent=1)}\n"

    @property
    def digest(self) -> str:
        """The SHA-256 of ``text``."""
        return digest_of(self.text)


def digest_of(text: str) -> str:
    """The SHA-256 of a plan as it is kept."""
    return hashlib.sha256(text.encode()).hexdigest()
