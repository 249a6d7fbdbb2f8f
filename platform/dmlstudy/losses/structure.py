"""Neighbourhood structure (NASA, real-valued): every image learns in which directions its neighbours lie.

Shapes: M references (the global batch), B anchors on this rank, N rows, D embedding size, F features, R rows
of this rank's share, T of them in a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dmlstudy.losses.distances import euclidean, full_precision
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World
from dmlstudy.losses.parameters import above, at_least, choice
from dmlstudy.losses.products import Product, differentiable, exact
from dmlstudy.losses.tiles import in_tiles, row_values

Preset: TypeAlias = Literal["official", "paper"]
EtaSource: TypeAlias = Literal["plain", "adaptive"]


class Structure(Loss):
    """A loss that draws distances in each image's own metric to the nearer of two centres (NASA Eq. 10-12).

    d_ij = sqrt( sum_d omega_i^(d) (z_i^(d) - z_j^(d))^2 ), with omega the structure embeddings.

    L = 1/(M(M-1)) sum_i sum_{j != i} [ c_ij |d_ij - eta1| + (1 - c_ij) |d_ij - eta2| ],
    c_ij = softmax_m(-alpha |d_ij - eta_m|) at m = 1, eta1 the mean of the batch's distances, theta their
    standard deviation (unbiased), eta2 = max(eta_floor eta1, eta1 - t theta).

    eta1 and theta are detached, c is not, and gradients reach omega and z.

    ``preset='official'`` is the authors' code: statistics over all M^2 pairs with the zeros of i = j among them, and
    z divided by the mean distance of two different rows, with gradient through that mean. 'paper' has statistics
    over pairs i != j and leaves z unscaled.

    The statistics are of the plain distances ||z_i - z_j|| or of the 'adaptive' d_ij, by ``eta_source``. Distances
    have the floor 1e-6, with gradient zero.

    Labels and ids are ignored: only a row with itself is no pair. A batch of one row gives 0. Rows are shared out
    among the ranks; the count is the number of rows.

    Raises ValueError without structure embeddings, unless alpha > 0
    and t, eta_floor >= 0, and for unknown names.
    """

    has_precision = True

    def __init__(
        self,
        preset: str = "official",
        eta_source: str = "plain",
        t: float = 3.0,
        alpha: float = 10.0,
        eta_floor: float = 0.2,
    ) -> None:
        super().__init__()
        presets: dict[str, Preset] = {name: name for name in get_args(Preset)}
        sources: dict[str, EtaSource] = {name: name for name in get_args(EtaSource)}
        is_official = choice("preset", preset, presets) == "official"
        self.rescale = is_official
        self.counts_self = is_official
        self.eta_source = choice("eta_source", eta_source, sources)
        self.t = at_least("t", t, 0)
        self.alpha = above("alpha", alpha, 0)
        self.eta_floor = at_least("eta_floor", eta_floor, 0)

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum over this rank's share of the rows of their mean term, and the number of these rows."""
        if anchors.structure_ND is None:
            raise ValueError(
                "the structure loss needs structure embeddings, and the embedder has no structure head; "
                "build it with structure='official' or 'paper'"
            )
        z_MD, omega_BD = full_precision(references.z_ND, anchors.structure_ND)
        with torch.autocast(z_MD.device.type, enabled=False):
            return self._terms(z_MD, world.gather(omega_BD), world)

    def _terms(self, z_MD: Tensor, omega_MD: Tensor, world: World) -> LossSum:
        num_rows = len(z_MD)
        assert len(omega_MD) == num_rows, "references must be the gathered anchors"
        share = world.share(num_rows)
        product = differentiable(self.product)
        left_RF, right_MF = adaptive_left(z_MD[share], omega_MD[share]), adaptive_right(z_MD)
        adaptive = PairBlock(left_RF, right_MF, share, world, product)
        if num_rows < 2:
            return adaptive.mean_of(torch.zeros_like)
        plain = PairBlock(euclidean.left(z_MD[share]), euclidean.right(z_MD), share, world, product)
        scale = plain.mean_distance() if self.rescale else z_MD.new_ones(())
        source = plain if self.eta_source == "plain" else adaptive
        mean, std = source.statistics(counts_self=self.counts_self)
        eta1, theta = mean / scale.detach(), std / scale.detach()
        eta2 = torch.maximum(self.eta_floor * eta1, eta1 - self.t * theta)
        far, near = eta1.to(z_MD.dtype), eta2.to(z_MD.dtype)
        return adaptive.mean_of(lambda d_TM, scale: to_centres(d_TM / scale, far, near, self.alpha), scale)


def mean_distance(z_MD: Tensor, world: World) -> Tensor:
    """The mean Euclidean distance of two different rows of the global batch, with gradient; 1 of fewer than two.

    Every rank gives all rows, and must call this.
    """
    if len(z_MD) < 2:
        return z_MD.new_ones(())
    share = world.share(len(z_MD))
    return PairBlock(euclidean.left(z_MD[share]), euclidean.right(z_MD), share, world).mean_distance()


def to_centres(d_TM: Tensor, far: Tensor, near: Tensor, alpha: float) -> Tensor:
    """c |d - far| + (1 - c) |d - near|, c the softmax weight of ``far`` (NASA Eq. 11, 12)."""
    to_far_TM, to_near_TM = (d_TM - far).abs(), (d_TM - near).abs()
    further_TM = to_far_TM - to_near_TM
    return to_near_TM + further_TM * torch.sigmoid(-alpha * further_TM)


def adaptive_left(z_ND: Tensor, omega_ND: Tensor) -> Tensor:
    """Features of an anchor: its product with ``adaptive_right`` is sum_d omega_i (z_i - z_j)^2."""
    weighted_ND = omega_ND * z_ND
    return torch.cat([-2 * weighted_ND, omega_ND, (weighted_ND * z_ND).sum(1, keepdim=True)], dim=1)


def adaptive_right(z_ND: Tensor) -> Tensor:
    """Features of the row that an anchor is compared with."""
    return torch.cat([z_ND, z_ND.square(), z_ND.new_ones(len(z_ND), 1)], dim=1)


@dataclass(frozen=True)
class PairBlock:
    """The batch's pairs of two different rows, of which the first is in this rank's share.

    Squared distances are the products of left and right features. A row itself is known by its place.
    """

    left_RF: Tensor
    right_MF: Tensor
    share: slice
    world: World
    product: Product = exact

    def mean_of(self, term: Callable[..., Tensor], *shared: Tensor) -> LossSum:
        """Sum over the share's rows of the mean of term(d_TM, *shared) over j != i, and the number of rows."""
        num_others = max(1, len(self.right_MF) - 1)

        def pieces(own: list[Tensor], common: list[Tensor]) -> Iterator[tuple[Tensor, float]]:
            d_TM, is_self_TM = self._distances(own, common)
            yield (
                torch.where(is_self_TM, 0, term(d_TM, *common[1:])).sum() / num_others,
                float(len(d_TM)),
            )

        return in_tiles(
            pieces,
            [self.left_RF, self._places()],
            [self.right_MF, *shared],
            num_columns=2 * len(self.right_MF),
        )

    def mean_distance(self) -> Tensor:
        """The mean over all ranks' pairs, with gradient."""
        distances, _ = self.mean_of(lambda d_TM: d_TM)
        return self.world.sum(distances) / len(self.right_MF)

    def statistics(self, *, counts_self: bool) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (unbiased) of the distances over all ranks' pairs, detached, float64.

        ``counts_self`` adds a zero for each row's distance to itself. Needs two rows.
        """
        num_rows = len(self.right_MF)
        num_pairs = num_rows * (num_rows if counts_self else num_rows - 1)
        mean = self._sum(lambda d_TM: d_TM) / num_pairs
        squares = self._sum(lambda d_TM: (d_TM - mean.to(d_TM.dtype)).square())
        if counts_self:
            squares = squares + num_rows * mean.square()
        return mean, (squares / (num_pairs - 1)).sqrt()

    def _sum(self, term: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum over all ranks' pairs, detached, float64."""

        def row_sums(own: list[Tensor], common: list[Tensor]) -> Tensor:
            d_TM, is_self_TM = self._distances(own, common)
            return torch.where(is_self_TM, 0, term(d_TM)).sum(1, dtype=torch.float64)

        parts = [self.left_RF.detach(), self._places()], [self.right_MF.detach()]
        sums_R = row_values(row_sums, *parts, num_columns=len(self.right_MF))
        return self.world.sum(sums_R.double().sum())

    def _places(self) -> Tensor:
        return torch.arange(len(self.right_MF), device=self.right_MF.device)[self.share]

    def _distances(self, own: list[Tensor], common: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Distances from a tile's rows to all, and which of them are of a row to itself."""
        (left_TF, place_T), right_MF = own, common[0]
        place_M = torch.arange(len(right_MF), device=right_MF.device)
        return euclidean.of(self.product(left_TF, right_MF.T)), place_T[:, None] == place_M
