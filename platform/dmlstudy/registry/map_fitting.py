"""Maps between the spaces of two embedders, learned from the same items seen by both.

Shapes: N items, D size of the source's embeddings, E of the target's, H hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dmlstudy.saved.space_map import FORMAT_VERSION, MapDescription, MapKind, SpaceMap

Floats = NDArray[np.float64]
Weights = dict[str, NDArray[np.float32]]

SHARES = tuple(10.0**power for power in range(-6, 2))
"""Ridge penalties that are tried, in shares of the embeddings' mean variance times N."""

MOST_HIDDEN = 512
STEPS, ROWS = 600, 512
LEARNING_RATE, DECAY = 2e-3, 1e-4
SEED = 0


def fit_map(
    kind: MapKind,
    source_ND: NDArray[Any],
    target_NE: NDArray[Any],
    labels_N: NDArray[np.int64],
    *,
    names: tuple[str, str],
    fingerprints: tuple[str, str],
    is_unit: bool,
    told: dict[str, Any] | None = None,
) -> SpaceMap:
    """The map of a kind from the source's embeddings to the target's of the same items; same call, same map.

    The ridge penalty is the best of ``SHARES`` on items of held-out classes, halves of all, by mean squared error; then
    all items are fitted. Where there are fewer than 4 classes items are halved. 'orthogonal' has nothing to choose.

    Raises ValueError for fewer than 2 items.
    """
    if len(source_ND) < 2:
        raise ValueError(f"{len(source_ND)} development items; a map needs at least 2")
    x_ND, y_NE = source_ND.astype(np.float64), target_NE.astype(np.float64)
    if kind == "orthogonal":
        weights = {"A": procrustes(x_ND, y_NE).astype(np.float32)}
    else:
        share = _best_share(x_ND, y_NE, _is_held_out(labels_N))
        mean_D, a_DE, b_E = ridge(x_ND, y_NE, share)
        weights = {"A": a_DE.astype(np.float32), "m": mean_D.astype(np.float32), "b": b_E.astype(np.float32)}
        if kind == "mlp":
            weights |= _on_what_is_left(x_ND - mean_D, y_NE - ((x_ND - mean_D) @ a_DE + b_E))
    described = MapDescription(
        format_version=FORMAT_VERSION,
        kind=kind,
        source=fingerprints[0],
        target=fingerprints[1],
        source_name=names[0],
        target_name=names[1],
        source_dim=source_ND.shape[1],
        target_dim=target_NE.shape[1],
        is_unit=is_unit,
        told=told or {},
    )
    return SpaceMap(described, weights)


def ridge(x_ND: Floats, y_NE: Floats, share: float) -> tuple[Floats, Floats, Floats]:
    """m, A and b that minimise |(x - m) A + b - y|^2 + l |A|^2; l is ``share`` of N times x's mean variance.

    m and b are the means: A = (X'X + l I)^-1 X'Y of centred X and Y.
    """
    mean_D: Floats = np.asarray(x_ND.mean(axis=0), np.float64)
    mean_E: Floats = np.asarray(y_NE.mean(axis=0), np.float64)
    x_ND, y_NE = x_ND - mean_D, y_NE - mean_E
    gram_DD = x_ND.T @ x_ND
    penalty = share * max(float(np.trace(gram_DD)) / len(gram_DD), np.finfo(np.float64).tiny)
    a_DE: Floats = np.asarray(
        np.linalg.solve(gram_DD + penalty * np.eye(len(gram_DD)), x_ND.T @ y_NE), np.float64
    )
    return mean_D, a_DE, mean_E


def procrustes(x_ND: Floats, y_NE: Floats) -> Floats:
    """A of orthonormal columns (rows, where D < E) that maximises tr(A' X'Y): U V' of X'Y = U S V' (Schönemann 1966).

    Where D = E it minimises |X A - Y|.
    """
    u_DR, _, v_RE = np.linalg.svd(x_ND.T @ y_NE, full_matrices=False)
    return np.asarray(u_DR @ v_RE, np.float64)


def _is_held_out(labels_N: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Half of the classes; of fewer than 4 classes every other item."""
    classes = np.unique(labels_N)
    if len(classes) < 4:
        return np.asarray(np.arange(len(labels_N)) % 2 == 1, np.bool_)
    held = np.random.default_rng(SEED).permutation(classes)[: len(classes) // 2]
    is_held_N: NDArray[np.bool_] = np.isin(labels_N, held)
    return is_held_N


def _best_share(x_ND: Floats, y_NE: Floats, is_held_N: NDArray[np.bool_]) -> float:
    errors = {}
    for share in SHARES:
        error = 0.0
        for is_out_N in (is_held_N, ~is_held_N):
            mean_D, a_DE, b_E = ridge(x_ND[~is_out_N], y_NE[~is_out_N], share)
            error += float(((((x_ND[is_out_N] - mean_D) @ a_DE + b_E) - y_NE[is_out_N]) ** 2).sum())
        errors[share] = error
    return min(errors, key=lambda each: errors[each])


def _on_what_is_left(x_ND: Floats, left_NE: Floats) -> Weights:
    """W, c and V of max(0, x W + c) V, by AdamW on the mean squared error; V begins at 0, so nothing is lost.

    Numbers of items, steps and hidden units are small: this is a correction of the ridge map, and no new embedder.
    """
    num, dim = x_ND.shape
    hidden = min(MOST_HIDDEN, 2 * max(dim, left_NE.shape[1]))
    rng = torch.Generator().manual_seed(SEED)
    scale = float(np.sqrt((x_ND**2).mean())) or 1.0
    x, left = torch.from_numpy(x_ND / scale).float(), torch.from_numpy(left_NE).float()
    w = (torch.randn(dim, hidden, generator=rng) / dim**0.5).requires_grad_()
    c = torch.zeros(hidden, requires_grad=True)
    v = torch.zeros(hidden, left.shape[1], requires_grad=True)
    optimizer = torch.optim.AdamW([w, c, v], lr=LEARNING_RATE, weight_decay=DECAY)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * step / STEPS))
        rows = torch.randint(num, (min(ROWS, num),), generator=rng)
        loss = ((torch.relu(x[rows] @ w + c) @ v - left[rows]) ** 2).sum(dim=1).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {
        "W": (w.detach() / scale).numpy(),
        "c": c.detach().numpy(),
        "V": v.detach().numpy(),
    }
