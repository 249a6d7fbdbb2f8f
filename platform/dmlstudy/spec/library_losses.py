"""Losses of pytorch-metric-learning in a study: what they cost, and which of them the catalogue has itself."""

from __future__ import annotations

from collections.abc import Iterable

from dmlstudy.records import LIBRARY_PREFIX

NATIVE = {
    "AngularLoss": "angular",
    "ArcFaceLoss": "arcface",
    "CircleLoss": "circle",
    "ContrastiveLoss": "contrastive",
    "CosFaceLoss": "cosface",
    "GeneralizedLiftedStructureLoss": "generalized_lifted_structure",
    "LiftedStructureLoss": "lifted_structure",
    "MarginLoss": "margin",
    "MultiSimilarityLoss": "multi_similarity",
    "NPairsLoss": "n_pair",
    "NTXentLoss": "supcon",
    "NormalizedSoftmaxLoss": "norm_softmax",
    "ProxyAnchorLoss": "proxy_anchor",
    "ProxyNCALoss": "proxy_nca",
    "RankedListLoss": "ranked_list",
    "SoftTripleLoss": "soft_triple",
    "SubCenterArcFaceLoss": "subcenter_arcface",
    "SupConLoss": "supcon",
    "ThresholdConsistentMarginLoss": "tcm",
    "TripletMarginLoss": "triplet",
}
"""Losses of the library by class, and the same of the catalogue, which may have other parameters."""


def notes_on(losses: Iterable[str]) -> list[str]:
    """A line for each loss of the library among these names: its cost, and what has not that cost."""
    found = sorted({name.removeprefix(LIBRARY_PREFIX) for name in losses if name.startswith(LIBRARY_PREFIX)})
    return [
        f"loss.name: {LIBRARY_PREFIX}{name} is computed by every worker for the whole batch, with all its pairs or"
        " triplets in memory at once"
        + (
            f"; loss.name: {NATIVE[name]} is the same loss, in tiles shared by the workers"
            if name in NATIVE
            else ""
        )
        for name in found
    ]
