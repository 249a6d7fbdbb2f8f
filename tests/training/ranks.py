"""What each rank runs in the tests of a distributed trial."""

from __future__ import annotations

from typing import Any

from dmlstudy.records import TrialConfig, TrialReport
from dmlstudy.training.trial import TrialFailed, TrialStopped, run_trial


def trial(raw: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Every report's metrics (its step among them), and the result's."""
    reports: list[TrialReport] = []
    result = run_trial(TrialConfig.model_validate(raw), reports.append)
    return [{"step": report.step, **report.metrics} for report in reports], result.metrics


def failing_trial(raw: dict[str, Any]) -> str:
    try:
        run_trial(TrialConfig.model_validate(raw), lambda report: None)
    except TrialFailed as error:
        return str(error)
    return "no failure"


def stopped_trial(raw: dict[str, Any]) -> int:
    """How many reports were made before one of them stopped the trial."""
    reports: list[TrialReport] = []

    def report(given: TrialReport) -> None:
        reports.append(given)
        if len(reports) == 2:
            raise TrialStopped

    try:
        run_trial(TrialConfig.model_validate(raw), report)
    except TrialStopped:
        return len(reports)
    return -1
