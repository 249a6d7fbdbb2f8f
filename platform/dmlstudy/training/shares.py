"""Choices of a search trial's validation folds for its verdict: thresholds, and one of several shares.

Thresholds (``protocol.verification``) are set on each fold's held-out classes; the median over folds is the verdict's.
Several shares of the trained weights (``training.wise_ft``) are told apart in the same way.

One training serves all: each fold's model is scored with each share after its last epoch. Nothing is chosen on unseen
classes: a verdict's configuration has the chosen share in the place of the list. Reads no torch.

Shapes: F folds, S shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dmlstudy import metric_names
from dmlstudy.records import TrialConfig
from dmlstudy.training.scores import mean

KEY = "training.wise_ft"


def shares_of(value: float | str) -> tuple[float, ...]:
    """The shares that ``training.wise_ft`` gives, in rising order; one, for most."""
    return tuple(map(float, value.split())) if isinstance(value, str) else (value,)


class Settled(NamedTuple):
    """The chosen share, and what the folds score with it."""

    share: float
    scores: list[dict[str, float]]


def settle(
    shares: Sequence[float], scores_FS: Sequence[Sequence[dict[str, float]]], objective: str
) -> Settled:
    """The share with the highest mean of the objective over the folds; of equals the largest."""
    of_shares = [list(scores) for scores in zip(*scores_FS, strict=True)]
    best = max(range(len(shares)), key=lambda place: (mean(of_shares[place])[objective], shares[place]))
    return Settled(shares[best], of_shares[best])


def told(
    shares: Sequence[float], scores_FS: Sequence[Sequence[dict[str, float]]], objective: str
) -> dict[str, float]:
    """Metrics that tell the choice: the share, and the mean objective with each."""
    share, _ = settle(shares, scores_FS, objective)
    means = {
        metric_names.of_share(each, objective): mean(scores)[objective]
        for each, scores in zip(shares, zip(*scores_FS, strict=True), strict=True)
    }
    return {metric_names.WISE_FT: share, **means}


def share_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of a finished trial's metrics the share that its folds have chosen; none, for most."""
    return {name: metrics[name] for name in (metric_names.WISE_FT,) if name in metrics}


def settled_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The same with the thresholds that its folds have set: all that its verdict takes over."""
    return share_of(metrics) | {name: value for name, value in metrics.items() if metric_names.is_tau(name)}


def params_settled(params: Mapping[str, str], metrics: Mapping[str, float]) -> dict[str, str]:
    """A finished trial's logged parameters with what its folds have chosen in the place of what they chose from."""
    return {**params} | {f"training.{name}": str(value) for name, value in share_of(metrics).items()}


def with_settled(config: TrialConfig, settled: Mapping[str, float]) -> TrialConfig:
    """The configuration with what its folds have chosen in the place of what they chose from, and their thresholds."""
    thresholds = {
        metric_names.rate_of(name): value for name, value in settled.items() if metric_names.is_tau(name)
    }
    if thresholds:
        config = config.model_copy(update={"thresholds": thresholds})
    shares = shares_of(config.training.wise_ft)
    if len(shares) == 1:
        return config
    known = settled[metric_names.WISE_FT]
    share = min(shares, key=lambda each: abs(each - known))  # whatever digits a store has kept
    return config.model_copy(update={"training": config.training.model_copy(update={"wise_ft": share})})


def check_settled(config: TrialConfig) -> None:
    """Raise ValueError for a verdict that would have to choose on the unseen classes."""
    if config.phase == "verdict" and len(shares_of(config.training.wise_ft)) > 1:
        raise ValueError(
            f"{KEY}: {config.training.wise_ft} is chosen from on validation folds, and a verdict has none; give it one"
            " of these numbers"
        )
