"""Multi-level distance regularisation (MDR): distances gather around a few learned levels.

Shapes: M references (the global batch), D embedding size, L levels, T rows in a tile.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

from dmlstudy.losses.distances import euclidean, full_precision
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World
from dmlstudy.losses.parameters import at_least
from dmlstudy.losses.products import differentiable
from dmlstudy.losses.structure import PairBlock

INITIAL_LEVELS = (-3.0, 0.0, 3.0)

STD_FLOOR = 1e-3
"""A smaller standard deviation counts as this: such embeddings have collapsed, and their distances are noise."""


class DistanceLevels(Loss):
    """A loss that draws each normalised distance to its nearest level (Kim & Park, AAAI 2021).

    L = 1/(M(M-1)) sum_{i != j} min_l | (d_ij - mu)/sigma - s_l |, d_ij = ||z_i - z_j||.

    mu and sigma are running estimates of the mean and the standard deviation (unbiased) of the batch's d_ij,
    detached: those of the first batch, then mu <- momentum mu + (1 - momentum) mu_batch, and likewise sigma.
    They are over pairs i != j, while copies of the authors' code count the zeros of i = j too.

    The levels s_l are learned from (-3, 0, 3) on. The estimates, this batch included, move in training mode with
    gradients enabled, and else stay; before any such batch those of the current batch are used. Labels and ids are
    ignored: only a row with itself is no pair.

    A batch of one row gives 0 and moves nothing. Rows are shared out among the ranks; the count is the number of
    rows. Raises ValueError unless 0 <= momentum < 1.
    """

    has_precision = True
    running_mean: Tensor
    running_std: Tensor
    num_batches: Tensor

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        if at_least("momentum", momentum, 0) >= 1:
            raise ValueError(
                f"momentum={momentum} must be below 1, or the first batch's statistics stay for ever"
            )
        self.momentum = momentum
        self.levels_L = nn.Parameter(torch.tensor(INITIAL_LEVELS))
        self.register_buffer("running_mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("running_std", torch.ones((), dtype=torch.float64))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum over this rank's share of the rows of their mean term, and the number of these rows."""
        (z_MD,) = full_precision(references.z_ND)
        levels_L = self.levels_L.to(z_MD.dtype)
        with torch.autocast(z_MD.device.type, enabled=False):
            share = world.share(len(z_MD))
            left_RF, right_MF = euclidean.left(z_MD[share]), euclidean.right(z_MD)
            pairs = PairBlock(left_RF, right_MF, share, world, differentiable(self.product))
            if len(z_MD) < 2:
                return pairs.mean_of(lambda d_TM, levels_L: 0 * d_TM, levels_L)
            mean, std = self._estimates(*pairs.statistics(counts_self=False))
            mean, std = mean.to(z_MD.dtype), std.clamp(min=STD_FLOOR).to(z_MD.dtype)
            return pairs.mean_of(lambda d_TM, levels_L: to_nearest((d_TM - mean) / std, levels_L), levels_L)

    def _estimates(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """The running mean and standard deviation, after taking in the batch's where they may move."""
        is_first = self.num_batches == 0
        if not (self.training and torch.is_grad_enabled()):
            return torch.where(is_first, mean, self.running_mean), torch.where(
                is_first, std, self.running_std
            )
        for running, of_batch in ((self.running_mean, mean), (self.running_std, std)):
            mixed = self.momentum * running + (1 - self.momentum) * of_batch
            running.copy_(torch.where(is_first, of_batch, mixed))
        self.num_batches += 1
        return self.running_mean, self.running_std


def to_nearest(x_TM: Tensor, levels_L: Tensor) -> Tensor:
    """min_l |x - s_l|."""
    return reduce(torch.minimum, [(x_TM - level).abs() for level in levels_L.unbind()])
