"""Point-wise ranking (NASA, binary): each image's structure embedding keeps the order of its neighbours.

Shapes: B rows of a batch, F features, D bits, K neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy.losses.parameters import above


class PointRanking(nn.Module):
    """Neighbours by features come in the same order by weighted bits (NASA Eq. 7-9).

    n_1..n_K are the rows of the batch nearest to row i by cosine of the features, nearest first, ties by place, row
    i itself left out.

    s(i, n) = (sum_d omega_i^(d) - 2 d(i, n)) / D = (1/D) sum_d omega_i^(d) z_i^(d) z_n^(d)
    with d(i, n) = sum_d omega_i^(d) [z_i^(d) != z_n^(d)], and
    L = 1/(B(K-1)) sum_i sum_{k<K} [ s(i, n_{k+1}) - s(i, n_k) + margin ]_+.

    Gradients reach omega and the codes of both rows, none the features. A batch of B rows has at most B - 1
    neighbours, and with fewer than 2 gives 0.

    Raises ValueError unless K = ``neighbours`` >= 2, margin > 0 and (K-1) margin < 2, the range of s for weights of
    mean 1: else no order could satisfy all margins.
    """

    def __init__(self, neighbours: int = 8, margin: float = 0.03) -> None:
        super().__init__()
        if neighbours < 2:
            raise ValueError(f"neighbours={neighbours} have no order; set at least 2")
        if (neighbours - 1) * above("margin", margin, 0) >= 2:
            raise ValueError(
                f"margin={margin} times neighbours-1={neighbours - 1} is not below 2, the range of similarities; "
                "lower one of them"
            )
        self.neighbours = neighbours
        self.margin = margin

    def forward(self, x_BF: Tensor, z_BD: Tensor, omega_BD: Tensor) -> Tensor:
        """The loss of a batch's features, codes (+-1) and structure embeddings."""
        assert z_BD.shape == omega_BD.shape
        neighbour_BK = nearest_rows(x_BF, self.neighbours)
        if neighbour_BK.shape[1] < 2:
            return 0 * (z_BD.sum() + omega_BD.sum())
        s_BB = (omega_BD * z_BD) @ z_BD.T / z_BD.shape[1]
        s_BK = s_BB.gather(1, neighbour_BK)
        return (s_BK[:, 1:] - s_BK[:, :-1] + self.margin).relu().mean()


def nearest_rows(x_BF: Tensor, num: int) -> Tensor:
    """For each row the at most ``num`` other rows of highest cosine, highest first, ties by place."""
    with torch.no_grad():
        unit_BF = functional.normalize(x_BF, dim=1, eps=1e-12)
        cosine_BB = (unit_BF @ unit_BF.T).fill_diagonal_(-torch.inf)
        order_BB = cosine_BB.sort(dim=1, descending=True, stable=True).indices
        return order_BB[:, : min(num, max(0, len(x_BF) - 1))]
