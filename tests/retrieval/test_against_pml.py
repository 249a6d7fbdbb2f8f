"""Our metrics and pytorch-metric-learning's AccuracyCalculator's, of one ranking: the definitions agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor

from dmlstudy import retrieval

SAME = {
    "recall_at_1": "precision_at_1",
    "map_at_r": "mean_average_precision_at_r",
    "r_precision": "r_precision",
    "map": "mean_average_precision",
}


def neighbours(query: Tensor, k: int, reference: Tensor, ref_includes_query: bool) -> tuple[Tensor, Tensor]:
    assert ref_includes_query
    index, distance = retrieval.retrieve(
        query.numpy(), reference.numpy(), k, self_index=np.arange(len(query))
    )
    return torch.from_numpy(distance), torch.from_numpy(index)


@pytest.mark.parametrize("mean", ["micro", "macro"])
@pytest.mark.parametrize("num_classes", [10, 300])
def test_the_same_numbers_of_one_ranking(num_classes: int, mean: str) -> None:
    """Classes of unequal sizes, none alone: a query without a positive counts as 0 here and is left out there."""
    rng = np.random.default_rng(num_classes)
    label_N = np.concatenate([np.repeat(np.arange(num_classes), 2), rng.integers(0, num_classes, 900)])
    z_ND = rng.normal(size=(num_classes, 8))[label_N] + 1.2 * rng.normal(size=(len(label_N), 8))
    z_ND = (z_ND / np.linalg.norm(z_ND, axis=1, keepdims=True)).astype(np.float32)
    ours = retrieval.evaluate(z_ND, label_N, full_map=True, macro=True)
    settings: dict[str, Any] = {"knn_func": neighbours, "avg_of_avgs": mean == "macro"}
    at_r = AccuracyCalculator(include=tuple(SAME.values())[:3], k="max_bin_count", **settings)
    whole = AccuracyCalculator(include=("mean_average_precision",), k=len(label_N) - 1, **settings)
    theirs = at_r.get_accuracy(z_ND, label_N) | whole.get_accuracy(z_ND, label_N)
    for name, other in SAME.items():
        own = ours[name if mean == "micro" else f"macro_{name}"]
        assert own == pytest.approx(theirs[other], abs=1e-6), name
        assert 0.02 < own < 0.98
