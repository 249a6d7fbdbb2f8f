"""Six unit vectors of three classes whose losses were worked out elsewhere, to ten digits."""

from __future__ import annotations

import torch

from dmlstudy.losses.interface import Embeddings


def example() -> Embeddings:
    """The six rows in float64, with gradient; the last one is alone in its class."""
    z_ND = [(1, 0, 0), (0.8, 0.6, 0), (0.6, 0, 0.8), (0, 0.6, 0.8), (0, 0.96, -0.28), (-0.6, 0.8, 0)]
    return Embeddings(
        torch.tensor(z_ND, dtype=torch.float64, requires_grad=True),
        torch.tensor([0, 0, 0, 1, 1, 2]),
        torch.arange(6),
    )
