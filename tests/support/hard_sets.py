"""Sets of embeddings that make it hard to tell the nearest: ties, copies, collapses, places far off."""

from __future__ import annotations

import numpy as np


def with_copies(z: np.ndarray) -> np.ndarray:
    z = z.copy()
    z[50:120] = z[7]
    return z


def on_an_arc(z: np.ndarray) -> np.ndarray:
    """What is left where one dimension is: neighbours are nearer than rounding tells."""
    angle = np.linspace(0, 1, len(z))
    return np.stack([np.cos(angle), np.sin(angle), *np.zeros((7, len(z)))], axis=1)


HARD = {
    "spread": lambda z: z,
    "with ties": np.round,
    "with copies": with_copies,
    "far from the origin": lambda z: z + 1000,
    "far apart": lambda z: z * np.where(np.arange(len(z)) == 3, 1e6, 1)[:, None].astype(np.float32),
    "nearly collapsed": lambda z: 1 + 1e-6 * z,
    "collapsed": np.ones_like,
    "half dead": lambda z: z * (np.arange(len(z)) % 2)[:, None],  # zeros of either sign
    "few vectors": lambda z: z[np.arange(len(z)) % 11],
    "on an arc": lambda z: on_an_arc(z),
}
