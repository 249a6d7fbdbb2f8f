"""Verification in trials: a search trial sets thresholds on its held-out classes, a verdict tells what they do.

Scores are cosines of the embeddings, also where results are re-ranked or a structure head is trained.

Shapes: N items, D embedding size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dmlstudy import metric_names, retrieval
from dmlstudy.data.images import Indices, Labels
from dmlstudy.records import PairCounts, TrialConfig


def rates_of(config: TrialConfig) -> list[float]:
    """The rates of accepted impostors that thresholds are set for: the usual four, and the one that is wished for."""
    return sorted({*retrieval.RATES, config.fmr}, reverse=True)


def verification_scores(
    z_ND: NDArray[np.float32],
    labels_N: Labels,
    query: Indices | None,
    gallery: Indices | None,
    config: TrialConfig,
) -> tuple[dict[str, float], PairCounts | None]:
    """Of a search trial its thresholds; of a verdict the metrics of verification, and what given thresholds do."""
    pairs = retrieval.Pairs(z_ND, labels_N, query, gallery)
    if config.phase == "search":
        found = retrieval.thresholds(pairs, rates_of(config))
        return {metric_names.tau_at(rate): theta for rate, theta in found.items()}, None
    names = {float(name): name for name in config.thresholds}
    measured = retrieval.verify(pairs, {rate: config.thresholds[name] for rate, name in names.items()})
    metrics = measured.metrics | retrieval.open_set(z_ND, labels_N, query, gallery)
    told = measured.told
    if told is None:
        return metrics, None
    return metrics, PairCounts(
        units=told.unit_C.tolist(),
        impostors=told.impostors_C.tolist(),
        genuine=told.genuine_C.tolist(),
        shipped=metric_names.rate_name(config.fmr),
        thresholds=config.thresholds,
        accepted={names[rate]: of_C.tolist() for rate, of_C in told.accepted.items()},
        rejected={names[rate]: of_C.tolist() for rate, of_C in told.rejected.items()},
        class_pairs={names[rate]: num for rate, num in told.class_pairs.items()},
        curve=[(point.theta, point.fmr, point.fnmr) for point in measured.curve],
    )


def check_pairs(config: TrialConfig, labels_of_folds: list[Labels]) -> None:
    """Raise ValueError where held-out classes of a fold, whose labels these are, have too few impostors."""
    if not config.verification:
        return
    num = min(num_impostors(labels_N) for labels_N in labels_of_folds)
    if retrieval.is_measurable(config.fmr, num):
        return
    possible = next((rate for rate in retrieval.RATES[::-1] if retrieval.is_measurable(rate, num)), None)
    fix = "leave protocol.verification out" if possible is None else f"set protocol.fmr: {possible:g}"
    raise ValueError(
        f"protocol.fmr: {config.fmr:g} is set on {retrieval.fewest_impostors(config.fmr)} pairs of two classes or more,"
        f" and a fold holds {num} out; {fix}, or set protocol.num_folds lower"
    )


def notes(config: TrialConfig, labels_N: Labels, query: Indices | None, gallery: Indices | None) -> list[str]:
    """A line on the metrics that the test items, with these labels, have too few pairs for."""
    if not config.verification:
        return []
    num = num_impostors(labels_N, query, gallery)
    lacking = [rate for rate in retrieval.RATES[1:] if not retrieval.is_measurable(rate, num)]
    if not lacking:
        return []
    names = ", ".join(f"fnmr_at_fmr_{metric_names.rate_name(rate)}" for rate in lacking)
    needed = retrieval.fewest_impostors(lacking[0])
    return [
        f"protocol.verification: no {names}, for the test classes have {num} pairs of two classes and {needed}"
        " are needed"
    ]


def num_impostors(labels_N: Labels, query: Indices | None = None, gallery: Indices | None = None) -> int:
    """The number of pairs of two classes among items with these labels."""
    none_ND = np.zeros((len(labels_N), 1), np.float32)
    return retrieval.Pairs(none_ND, labels_N, query, gallery).num_impostors
