"""Clustering metrics: converged k-means with a fixed seed, and how well its clusters are the classes.

Shapes: N items, D embedding size.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import faiss
import numpy as np
import torch

from dmlstudy.heartbeat import beating_while_it_computes
from dmlstudy.retrieval.neighbours import Floats, Ints, checked

Mean: TypeAlias = Literal["arithmetic", "geometric"]

MAX_STEPS = 300
"""Steps after which a restart of k-means ends, converged or not; most need fewer than 50."""


def k_means(
    z_ND: Floats,
    num_clusters: int,
    *,
    seed: int = 0,
    num_restarts: int = 10,
    num_steps: int = MAX_STEPS,
    device: torch.device | None = None,
) -> Ints:
    """The cluster of each L2-normalised embedding (a zero one stays zero), by the restart of least cost.

    Each restart begins with random items and runs until its cost no longer falls, which is when no item changes its
    cluster, or for ``num_steps``. The best of ten is near the least cost, not always at it.

    A GPU as ``device`` measures the distances, where faiss sees it: from the same random items, but its rounding is
    another, and so may be some clusters.

    The same seed, device and number of threads give the same clusters. Raises ValueError for embeddings that are not
    finite and unless 1 <= num_clusters <= N.
    """
    z_ND = checked("clustered", z_ND)
    num_items, dim = z_ND.shape
    if not 1 <= num_clusters <= num_items:
        raise ValueError(f"{num_clusters} clusters of {num_items} items: needs from 1 to as many as items")
    norm_N1 = np.linalg.norm(z_ND, axis=1, keepdims=True)
    unit_ND = np.ascontiguousarray(z_ND / np.where(norm_N1 > 0, norm_N1, 1), dtype=np.float32)
    means = faiss.Kmeans(
        dim,
        num_clusters,
        niter=num_steps,
        nredo=num_restarts,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=math.ceil(num_items / num_clusters),  # never a sample
    )
    means.index = _placed(means.index, device)
    with beating_while_it_computes():
        means.train(unit_ND)
    _, cluster_N1 = means.index.search(unit_ND, 1)
    return np.asarray(cluster_N1[:, 0], dtype=np.int64)


def _placed(index: Any, device: torch.device | None) -> Any:
    """The index on this GPU, or as it is where there is none, or none that faiss sees."""
    if device is None or device.type != "cuda" or not hasattr(faiss, "StandardGpuResources"):
        return index
    number = device.index or 0
    if number >= faiss.get_num_gpus():
        return index
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), number, index)


def nmi(label_N: Ints, cluster_N: Ints, mean: Mean = "arithmetic") -> float:
    """I / mean(H(classes), H(clusters)), which is 2I/(H + H) for the arithmetic mean; one class and cluster: 1.

    Song et al. 2016 have the arithmetic mean, ProxyNCA++ the geometric one.
    """
    from sklearn.metrics import normalized_mutual_info_score  # type: ignore[import-untyped]

    return float(normalized_mutual_info_score(label_N, cluster_N, average_method=mean))


def pair_f1(label_N: Ints, cluster_N: Ints) -> float:
    """F = 2PR/(P + R) over pairs of items (Song et al. 2016); no pair of both kinds gives 0.

    TP = pairs of one class in one cluster, P = TP / pairs in one cluster, R = TP / pairs of one class.
    """

    def num_pairs(size_G: Ints) -> int:
        return sum(size * (size - 1) // 2 for size in size_G.tolist())

    _, class_N, class_size = np.unique(label_N, return_inverse=True, return_counts=True)
    _, group_N, group_size = np.unique(cluster_N, return_inverse=True, return_counts=True)
    _, both_size = np.unique(class_N * np.int64(len(group_size)) + group_N, return_counts=True)
    sides = num_pairs(class_size) + num_pairs(group_size)
    return 2 * num_pairs(both_size) / sides if sides else 0.0


def evaluate_clusters(
    z_ND: Floats,
    label_N: Ints,
    *,
    seed: int = 0,
    num_restarts: int = 10,
    device: torch.device | None = None,
) -> dict[str, float]:
    """``nmi``, ``nmi_geometric`` and ``f1`` of k-means with as many clusters as there are classes."""
    if len(label_N) != len(z_ND) or not np.issubdtype(label_N.dtype, np.integer):
        raise ValueError(f"{len(z_ND)} embeddings, {len(label_N)} labels: needs one integer label each")
    num_classes = len(np.unique(label_N))
    cluster_N = k_means(z_ND, num_classes, seed=seed, num_restarts=num_restarts, device=device)
    return {
        "nmi": nmi(label_N, cluster_N),
        "nmi_geometric": nmi(label_N, cluster_N, "geometric"),
        "f1": pair_f1(label_N, cluster_N),
    }
