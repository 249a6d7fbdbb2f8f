"""Graph consistency (CGML): two sub-batches of the same classes should have the same similarity graph.

Shapes: M references (the global batch), D embedding size, U different images among them, n rows in each
sub-batch, T rows in a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dmlstudy.losses.distances import full_precision, squared_euclidean
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World
from dmlstudy.losses.mining import scrambled
from dmlstudy.losses.parameters import above, choice
from dmlstudy.losses.plan import order_of
from dmlstudy.losses.products import differentiable
from dmlstudy.losses.tiles import in_tiles
from dmlstudy.transfers import placed

Term: TypeAlias = Literal["gc_bar", "gc_bar_squared", "gc"]
SigmaMode: TypeAlias = Literal["fixed", "median"]
Draw: TypeAlias = Literal["split", "two_draws"]

MEDIAN_ROWS = 2048
"""Rows of each sub-batch whose pairs the median is taken over; of larger ones every k-th row is."""

MEDIAN_FLOOR = 1e-6
"""The least sigma a median gives: where over half of the pairs coincide, the median says nothing of scale."""


class GraphConsistency(Loss):
    """Distance between the similarity graphs of two sub-batches X', X'' with the same classes row by row.

    S_ij = exp(-||x_i - x_j||^2 / sigma), a row x_i per image, and the value is, by ``term``,
    'gc_bar': ||S'X' - S''X''||_F (CGML Eq. 3; 0 with gradient 0 where it is 0), 'gc_bar_squared': its
    square, 'gc': ||S' - S''||_F^2 (Eq. 1).

    Gradients flow through S and X of both. ``sigma_mode='median'`` takes for sigma the median of the squared
    distances of two different rows of one sub-batch, over both of them, detached, the lower of two middle ones, of at
    most ``MEDIAN_ROWS`` evenly spaced rows of either; ``sigma`` is then ignored.

    ``draw='split'`` cuts a batch of any kind: from a class with n_c images in the global batch, n_c // 2 go into
    either sub-batch, disjoint random halves. An image drawn into the batch several times counts once, by its first
    row.

    The halves depend on ``seed`` and the batch's ids alone. Without two images of any class it is 0 and counts
    0.

    ``draw='two_draws'`` takes the batch as ``data.TwoDraws`` has drawn it: the first half of the global batch's rows
    is X', the last half X'', so that an image drawn twice is in both. Within a class, rows are compared in the
    order in which they were drawn. An empty batch gives 0 and counts 0.

    Rows are shared out among the ranks, each of which counts its part of 1. Raises ValueError unless sigma > 0, for
    unknown names, and where 'two_draws' meets a batch whose halves differ in their classes.
    """

    has_precision = True

    def __init__(
        self,
        term: str = "gc_bar",
        sigma_mode: str = "fixed",
        sigma: float = 1.0,
        draw: str = "split",
        seed: int = 0,
    ) -> None:
        super().__init__()
        terms: dict[str, Term] = {name: name for name in get_args(Term)}
        modes: dict[str, SigmaMode] = {name: name for name in get_args(SigmaMode)}
        draws: dict[str, Draw] = {name: name for name in get_args(Draw)}
        self.term = choice("term", term, terms)
        self.sigma_mode = choice("sigma_mode", sigma_mode, modes)
        self.sigma = above("sigma", sigma, 0)
        self.draw = choice("draw", draw, draws)
        self.seed = seed

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """This rank's part of the value, and that part of 1."""
        (z_MD,) = full_precision(references.z_ND)
        with torch.autocast(z_MD.device.type, enabled=False):
            halves = two_draws(references) if self.draw == "two_draws" else split(references, self.seed)
            first_n, second_n = (placed(place_n, z_MD.device) for place_n in halves)
            return self._value(z_MD[first_n], z_MD[second_n], world)

    def _value(self, x1_nD: Tensor, x2_nD: Tensor, world: World) -> LossSum:
        num_rows = len(x1_nD)
        share, product = world.share(num_rows), differentiable(self.product)
        sigma = x1_nD.new_full((), self.sigma) if self.sigma_mode == "fixed" else _median(x1_nD, x2_nD)

        def pieces(own: list[Tensor], common: list[Tensor]) -> Iterator[tuple[Tensor, float]]:
            edges = [
                torch.exp(squared_euclidean.of(product(left_TF, right_nF.T)) / -sigma)
                for left_TF, right_nF in zip(own, common[:2], strict=True)
            ]
            if self.term != "gc":
                edges = [product(s_Tn, x_nD) for s_Tn, x_nD in zip(edges, common[2:], strict=True)]
            yield (edges[0] - edges[1]).square().sum(), float(len(own[0]))

        squared, num_own = in_tiles(
            pieces,
            [squared_euclidean.left(x_nD[share]) for x_nD in (x1_nD, x2_nD)],
            [*(squared_euclidean.right(x_nD) for x_nD in (x1_nD, x2_nD)), x1_nD, x2_nD],
            num_columns=2 * num_rows,
        )
        part = num_own / max(1, num_rows)
        if self.term != "gc_bar":
            return LossSum(squared, part)
        squared = world.sum(squared)
        norm = torch.where(squared > 0, squared, 1).sqrt()
        return LossSum(torch.where(squared > 0, norm, 0) * part, part)


def two_draws(references: Embeddings) -> tuple[Tensor, Tensor]:
    """Places in the batch of the rows of X', its first half, and of X'', its last: each sorted by class.

    Raises ValueError unless the halves have the same classes, each as often.
    """
    y_M, _ = references.labels
    num_rows = len(y_M)
    first_n = y_M[: num_rows // 2].argsort(stable=True)
    second_n = y_M[num_rows // 2 :].argsort(stable=True) + num_rows // 2
    if not torch.equal(y_M[first_n], y_M[second_n]):
        raise ValueError(
            f"draw='two_draws': the first and the last half of a batch of {num_rows} rows differ in their classes; "
            "draw batches with batch.draw: two_draws, or set draw='split'"
        )
    return first_n, second_n


def split(references: Embeddings, seed: int) -> tuple[Tensor, Tensor]:
    """Places in the batch of the rows of X' and of X'': sorted by class, in random order within a class."""
    order_U = order_of(references)
    y_U, id_U = references.labels.rows(order_U)
    is_first_U = torch.ones_like(y_U, dtype=torch.bool)
    is_first_U[1:] = (y_U[1:] != y_U[:-1]) | (id_U[1:] != id_U[:-1])
    order_U, y_U, id_U = order_U[is_first_U], y_U[is_first_U], id_U[is_first_U]
    start_U, end_U = torch.searchsorted(y_U, y_U), torch.searchsorted(y_U, y_U, right=True)
    place_U, num_U = torch.arange(len(y_U), device=y_U.device) - start_U, (end_U - start_U) // 2

    salt = scrambled(scrambled(id_U.sum() + seed))
    by_key_U = scrambled(scrambled(id_U + salt)).argsort()
    shuffled_U = by_key_U[y_U[by_key_U].argsort(stable=True)]
    first_n = shuffled_U[place_U < num_U]
    second_n = shuffled_U[(place_U >= num_U) & (place_U < 2 * num_U)]
    assert torch.equal(y_U[first_n], y_U[second_n]), "the sub-batches differ in their classes"
    return order_U[first_n], order_U[second_n]


def _median(x1_nD: Tensor, x2_nD: Tensor) -> Tensor:
    """The median squared distance of two different rows of one sub-batch, detached; 1 without any two."""
    num_rows = len(x1_nD)
    if num_rows < 2:
        return x1_nD.new_ones(())
    num_kept = min(num_rows, MEDIAN_ROWS)
    kept_K = torch.arange(num_kept, device=x1_nD.device) * num_rows // num_kept
    first_P, second_P = torch.triu_indices(num_kept, num_kept, 1, device=x1_nD.device)
    x1_KD, x2_KD = x1_nD.detach()[kept_K], x2_nD.detach()[kept_K]
    squares = [squared_euclidean(x_KD, x_KD)[first_P, second_P] for x_KD in (x1_KD, x2_KD)]
    return torch.cat(squares).median().clamp(min=MEDIAN_FLOOR)
