"""Memory-flat losses: a few anchors at a time against all references, with value and gradient in one sweep.

A loss is one number, so its gradient can be found while its value is computed. For each tile of T anchors the
distances to the M references are formed, the loss's terms and their slopes are taken, and the slopes become gradients
of embeddings at once.

Only (B + M) x D numbers stay for backward, which merely scales them; no tile is formed twice. The peak is O(T x M),
with T chosen from a memory budget.

Rows and references are first sorted by (label, id). The references of a tile's own classes are then adjacent: the
band. Work on positives takes T x Q instead of T x M, and no result depends on the order of the batch or on the number
of ranks.

Shapes: B anchors on this rank, M references, D embedding size, T anchors in a tile, Q references in its band,
F features, L live references.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dmlstudy.losses.distances import Distance, full_precision
from dmlstudy.losses.forms import Bands, Form
from dmlstudy.losses.interface import Embeddings, Labels, Loss, LossSum, World
from dmlstudy.losses.plan import plan_of
from dmlstudy.losses.products import Factor, Parts, add_product, exact, factor
from dmlstudy.text import one_line
from dmlstudy.transfers import placed

BUDGET_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
"""Memory for the arrays of one tile, by kind of device: on a CPU they should stay near its caches.

A GPU that says how much memory is free gives a share of that instead.
"""

FREE_SHARE = 0.05
"""The share of a GPU's free memory that one tile may take."""

MOST_BYTES = 2 * 2**30
"""The most that it may take, however much is free: higher tiles are hardly faster."""

LOWEST = {"cpu": 1, "cuda": 128}
"""The fewest rows of a tile, by kind of device: a lower tile does little but read all references."""

ALIGNED = {"cpu": 1, "cuda": 8}
"""Features are padded by zeros to a multiple of so many, by kind of device: cuBLAS is fast on whole 16 bytes alone."""

LIVE_ARRAYS = 10
"""The most T x M arrays that a tile's terms hold at once."""

KERNEL_ARRAYS = 3
"""As many of a tile that kernels compute: its products, parts of slopes, and room for a product of matrices."""

KERNEL_ROWS = 512
"""The fewest rows of such a tile, which is small enough for that; more are a multiple of a quarter of them."""


class Side(NamedTuple):
    """Pairs of one sign: distances from T anchors to some references, and which of them are such pairs."""

    d: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class Tile:
    """A tile: some anchors, their distances to all references, and their candidate pairs.

    ``positive`` spans the band's Q references only, ``negative`` all M. Both hold the same distances.
    """

    d_TM: Tensor
    band: slice
    y_T: Tensor
    id_T: Tensor
    y_Q: Tensor
    id_Q: Tensor
    salt: Tensor
    dim: int
    most_positives: Callable[[], int]
    """The most positives of any anchor, of which the host knows all."""

    @property
    def positive(self) -> Side:
        """pos(i) = {j : y_j = y_i, id_j != id_i}, within the band (T, Q)."""
        same_TQ = (self.y_T[:, None] == self.y_Q) & (self.id_T[:, None] != self.id_Q)
        return Side(self.d_TM[:, self.band], same_TQ)

    @property
    def negative(self) -> Side:
        """neg(i) = {k : y_k != y_i}, (T, M)."""
        chosen_TM = torch.ones(self.d_TM.shape, dtype=torch.bool, device=self.d_TM.device)
        chosen_TM[:, self.band] = self.y_T[:, None] != self.y_Q
        return Side(self.d_TM, chosen_TM)

    @property
    def others(self) -> Side:
        """pos(i) and neg(i) together: all other images, (T, M)."""
        side = self.negative
        side.chosen[:, self.band] |= self.positive.chosen
        return side


class RowTerms(NamedTuple):
    """Sum of a tile's terms, their number, and the slopes of the sum by each distance.

    ``band_slope_TQ`` is added to the band's columns of ``slope_TM``; without slopes nothing flows back.
    ``parameter_slopes`` are those by the loss's parameters, one for each.
    """

    total: Tensor
    count: Tensor | float  # type: ignore[assignment]  # hides tuple.count
    slope_TM: Tensor
    band_slope_TQ: Tensor | None = None
    parameter_slopes: Sequence[Tensor] = ()


class TiledLoss(Loss):
    """A loss over pairs that goes tile by tile."""

    has_precision = True
    needs_positives: ClassVar[bool] = True
    """True if a batch without positive pairs is a mistake, of which it then warns."""

    def __init__(self) -> None:
        super().__init__()
        self._has_warned = False

    def layout(
        self, anchors: Embeddings, references: Embeddings, element_size: int, *, by_kernels: bool = False
    ) -> Layout:
        """The batch's tiles; warns, once, of a batch without positive pairs."""
        layout = Layout(anchors, references, element_size, by_kernels=by_kernels)
        if layout.has_no_positive and self.needs_positives and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "a batch holds no two images of one class, so there is no positive pair; training goes on and "
                "this is said once. Draw several images per class (batch.images_per_class)",
                stacklevel=5,
            )
        return layout


class RowLoss(TiledLoss):
    """A loss whose term of an anchor is a function of its row of distances: L_i = f(d_i., pos(i), neg(i)).

    A subclass says what the terms and their slopes by the distances are, in closed form.
    """

    accepts_memory = True
    has_kernels: ClassVar[bool] = False
    """True if kernels may compute its tiles, by a ``form``."""

    is_symmetric: ClassVar[bool] = False
    """True if a pair's term is a function of its distance and sign alone, the same from either end.

    Its count is a number of anchors, an int, or of pairs, a tensor.
    """

    only_positives: ClassVar[bool] = False
    """True if the terms look at positives alone: then tiles hold the band's Q references instead of all M."""

    def __init__(self, distance: Distance) -> None:
        super().__init__()
        self.distance = distance
        self.fused: Callable[[Tile], RowTerms] | None = None
        """``rows``, compiled (``fused``)."""
        self.kernel_devices: tuple[str, ...] = ()
        """Kinds of device where kernels compute its float32 tiles, if it has a form."""
        self.needs_kernels = False
        """True if they are asked for by name, so that it is an error where they do not run."""

    @abstractmethod
    def rows(self, rows: Tile) -> RowTerms:
        """Sum of the tile's terms, their number and the slopes by its distances; ``rows.d_TM`` is unchanged."""

    def form(self) -> Form | None:
        """The loss of the batch at hand as kernels compute it; None where they cannot."""
        return None

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum over the anchors, tile by tile, and the number of terms."""
        z_BD, z_MD = full_precision(anchors.z_ND, references.z_ND)
        live_LD = z_MD if references.live_LD is None else references.live_LD.to(z_MD.dtype)
        form = (
            self.form() if z_MD.device.type in self.kernel_devices and z_MD.dtype == torch.float32 else None
        )
        layout = self.layout(anchors, references, z_MD.element_size(), by_kernels=form is not None)
        # Square tiles have more kinds of shapes than a compiled function of a tile is compiled for.
        is_plain = self.is_symmetric and self.product is exact and self.fused is None and form is None
        are_the_same = (is_plain or form is not None) and _are_the_same(anchors, references)
        if is_plain and are_the_same:
            return in_one_sweep(
                lambda wanted: self._sweep_both_ways(layout, z_BD.detach(), wanted),
                [z_BD, *self.parameters()],
            )

        def sweep(wanted: bool) -> Swept:
            own_BD = z_BD.detach()
            return self._sweep(
                layout, own_BD, own_BD if are_the_same else z_MD.detach(), len(live_LD), form, wanted
            )

        return in_one_sweep(sweep, [z_BD, live_LD, *self.parameters()])

    def _sweep(
        self, layout: Layout, z_BD: Tensor, z_MD: Tensor, num_live: int, form: Form | None, wanted: bool
    ) -> Swept:
        """Of the references the first ``num_live`` have a gradient; kernels compute tiles where there is a form."""
        is_one = z_MD is z_BD
        z_BD = z_BD[layout.anchor_order_B]
        z_MD = z_BD if is_one else z_MD[layout.reference_order_M]
        left_BF, right_MF = self.distance.left(z_BD), self.distance.right(z_MD)
        size, is_one = left_BF.shape[1], right_MF is left_BF
        left_BF = padded(left_BF)
        right_MF = left_BF if is_one else padded(right_MF)
        left = factor(left_BF, self.product)
        right = left if is_one else factor(right_MF, self.product)
        live_L = layout.places_of_first(num_live)
        finds_live = live_L is not None and not self.only_positives  # in a band there is little to spare
        left_gradient_BF = torch.zeros_like(left_BF)
        right_gradient = right_MF.new_zeros(num_live if finds_live else len(right_MF), right_MF.shape[1])
        del left_BF, right_MF  # factors have of them what they need
        gradients = [torch.zeros_like(parameter) for parameter in self.parameters()]
        total, count = z_BD.new_zeros(()), z_BD.new_zeros(())
        for tile, band in layout.tiles:
            columns = band if self.only_positives else slice(None)
            own, others = left.rows(tile), right.rows(columns)
            product_TM = own.times(others)
            found = None
            if form is not None:
                found = self._by_kernels(form, product_TM, layout.bands(tile), others, wanted)
            if found is None:
                form = None
                found = self._by_rows(product_TM, layout, (tile, band), z_BD.shape[1], others, wanted)
            terms, parts = found
            total += terms.total
            count += terms.count
            if not wanted:
                continue
            for gradient, slope in zip(gradients, terms.parameter_slopes, strict=True):
                gradient += slope
            left_gradient_BF[tile] = others.weighted(parts)
            if finds_live:
                own.add_weighted(right_gradient, tuple(part[:, live_L] for part in parts))
            else:
                own.add_weighted(right_gradient[columns], parts)
            del product_TM, found, terms, parts  # before there are those of the next tile
        gradient_BD = torch.empty_like(z_BD)
        gradient_BD[layout.anchor_order_B] = self.distance.left_gradient(left_gradient_BF[:, :size], z_BD)
        if live_L is None:
            gradient_LD = torch.empty_like(z_MD)
            by_right_MD = self.distance.right_gradient(right_gradient[:, :size], z_MD)
            gradient_LD[layout.reference_order_M] = by_right_MD
        else:
            right_gradient_LF = right_gradient if finds_live else right_gradient[live_L]
            gradient_LD = self.distance.right_gradient(right_gradient_LF[:, :size], z_MD[live_L])
        return total, count, [gradient_BD, gradient_LD, *gradients]

    def _by_rows(
        self,
        product_TM: Tensor,
        layout: Layout,
        place: tuple[slice, slice],
        dim: int,
        others: Factor,
        wanted: bool,
    ) -> tuple[RowTerms, Parts]:
        """The terms of a tile and, where wanted, the parts of their slopes by its products, whose memory is reused."""
        rows = layout.rows(self.distance.of(product_TM), *place, dim, only_band=self.only_positives)
        terms = (self.fused or self.rows)(rows)
        return terms, others.parts(self._product_slope(terms, rows)) if wanted else ()

    def _by_kernels(
        self, form: Form, product_TM: Tensor, bands: Bands, others: Factor, wanted: bool
    ) -> tuple[RowTerms, Parts] | None:
        """The same by kernels; None, which is said once, where they do not run and are not asked for by name."""
        parts = others.room(product_TM) if wanted else ()
        try:
            from dmlstudy.losses import kernels  # needs Triton, which comes with PyTorch for CUDA alone

            total, count = kernels.sweep(form, self.distance, product_TM, bands, parts)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of many kinds: no C compiler, a GPU that Triton does not know
            if self.needs_kernels:
                raise
            self.kernel_devices = ()
            warnings.warn(
                f"{type(self).__name__} runs without its kernels, more slowly: {type(error).__name__}:"
                f" {one_line(error, 200)}",
                stacklevel=2,
            )
            return None
        return RowTerms(total, count, product_TM), parts

    def _product_slope(self, terms: RowTerms, rows: Tile) -> Tensor:
        """The slope of a tile's terms by its products; theirs by distances is reused."""
        slope_TM = terms.slope_TM
        if terms.band_slope_TQ is not None:
            slope_TM[:, rows.band] += terms.band_slope_TQ
        return self.distance.product_slope(slope_TM, rows.d_TM)

    def _sweep_both_ways(self, layout: Layout, z_BD: Tensor, wanted: bool) -> Swept:
        """The same where references are the anchors: a tile serves both of its sides, so half of them suffice."""
        z_BD = z_BD[layout.anchor_order_B]
        left_BF, right_BF = self.distance.left(z_BD), self.distance.right(z_BD)
        size = left_BF.shape[1]
        left_BF, right_BF = padded(left_BF), padded(right_BF)
        gradient_BF = torch.zeros_like(left_BF)
        gradients = [torch.zeros_like(parameter) for parameter in self.parameters()]
        total, count = z_BD.new_zeros(()), z_BD.new_zeros(())
        for tile, columns, band in layout.blocks():
            d_TM = self.distance.of(self.product(left_BF[tile], right_BF[columns].T))
            rows = layout.rows_of_block(d_TM, tile, columns, band, z_BD.shape[1])
            terms = self.rows(rows)
            times = 1 if tile == columns else 2
            total += terms.total * times
            if isinstance(terms.count, Tensor):
                count += terms.count * times
            elif tile == columns:
                count += terms.count
            if not wanted:
                continue
            for gradient, slope in zip(gradients, terms.parameter_slopes, strict=True):
                gradient += slope * times
            slope_TM = self._product_slope(terms, rows)
            # A row's gradient as a reference is that as an anchor.
            add_product(gradient_BF[tile], slope_TM, right_BF[columns], self.product, 2.0)
            if tile != columns:
                add_product(gradient_BF[columns], slope_TM.T, right_BF[tile], self.product, 2.0)
        gradient_BD = torch.empty_like(z_BD)
        gradient_BD[layout.anchor_order_B] = self.distance.left_gradient(gradient_BF[:, :size], z_BD)
        return total, count, [gradient_BD, *gradients]


def _are_the_same(anchors: Embeddings, references: Embeddings) -> bool:
    """True if references are the very anchors, so that one gradient serves both."""
    if references is anchors:
        return True
    if references.z_ND is not anchors.z_ND or references.live_LD is not None:
        return False
    known = zip(anchors.labels, references.labels, strict=True)
    return all(own is other or torch.equal(own, other) for own, other in known)


class Layout:
    """Anchors and references in the order of (label, id), and the tiles of anchors with their bands.

    It follows from labels and ids: where the host knows them, no device is waited for.
    """

    def __init__(
        self, anchors: Embeddings, references: Embeddings, element_size: int, *, by_kernels: bool = False
    ) -> None:
        device = anchors.z_ND.device
        plan = self._plan = plan_of(anchors, references)
        self.anchor_order_B = placed(plan.anchor_order_B, device)
        self.reference_order_M = placed(plan.reference_order_M, device)
        self._anchors = Labels(anchors.y_N, anchors.id_N).rows(self.anchor_order_B)
        self._references = Labels(references.y_N, references.id_N).rows(self.reference_order_M)
        self.salt = references.id_N.sum()
        num_anchors, num_references = len(plan.anchor_order_B), len(plan.reference_order_M)
        height = tile_height(num_references, element_size, device, by_kernels=by_kernels)
        self._edge = max(LOWEST[device.type], math.isqrt(tile_height(1, element_size, device)))
        starts = range(0, num_anchors, height)
        self.bands_B = [plan.lows_B, plan.highs_B]
        """The first reference of each anchor's class, and the one after the last."""
        last_of_tile = [min(start + height, num_anchors) - 1 for start in starts]
        asked = [plan.lows_B[::height], plan.highs_B[last_of_tile], plan.has_positive[None]]
        answers = torch.cat(asked).tolist()  # the one wait, where labels are known to a GPU alone
        self.has_no_positive = not answers[-1]
        bounds = answers[: 2 * len(starts)]
        self.tiles = [
            (slice(start, min(start + height, num_anchors)), slice(low, high))
            for start, low, high in zip(starts, bounds[: len(starts)], bounds[len(starts) :], strict=True)
        ]

    def places_of_first(self, number: int) -> Tensor | None:
        """The places in this order of so many first references; None for all of them."""
        if number == len(self.reference_order_M):
            return None
        return self.reference_order_M.argsort()[:number]

    def rows(self, d_TM: Tensor, tile: slice, band: slice, dim: int, *, only_band: bool = False) -> Tile:
        """The tile's anchors with their distances, to all references or, with ``only_band``, to the band's."""
        (y_B, id_B), (y_M, id_M) = self._anchors, self._references
        place = slice(0, band.stop - band.start) if only_band else band
        most = partial(self._most_positives, tile)
        return Tile(d_TM, place, y_B[tile], id_B[tile], y_M[band], id_M[band], self.salt, dim, most)

    def bands(self, tile: slice) -> Bands:
        """Places of the classes of the tile's anchors among the references, on their device."""
        lows_B, highs_B = self._bands_there
        return Bands(lows_B[tile], highs_B[tile], self._anchors.id_N[tile], self._references.id_N)

    @cached_property
    def _bands_there(self) -> tuple[Tensor, Tensor]:
        lows_B, highs_B = placed(torch.stack(self.bands_B), self._references.id_N.device)
        return lows_B, highs_B

    def blocks(self) -> Iterator[tuple[slice, slice, slice]]:
        """Square tiles on the diagonal and above it, where references are the anchors.

        Anchors, references, and the anchors' band among these references.
        """
        size = len(self._plan.anchor_order_B)
        parts = [slice(start, min(start + self._edge, size)) for start in range(0, size, self._edge)]
        lows, highs = self._plan.lows_B[:: self._edge], self._plan.highs_B[[part.stop - 1 for part in parts]]
        for number, (tile, low, high) in enumerate(zip(parts, lows.tolist(), highs.tolist(), strict=True)):
            for columns in parts[number:]:
                first, stop = (min(max(x, columns.start), columns.stop) - columns.start for x in (low, high))
                yield tile, columns, slice(first, stop)

    def rows_of_block(self, d_TM: Tensor, tile: slice, columns: slice, band: slice, dim: int) -> Tile:
        """The tile's anchors with their distances to some references."""
        (y_B, id_B), (y_M, id_M) = self._anchors, self._references
        y_Q, id_Q = y_M[columns][band], id_M[columns][band]
        most = partial(self._most_positives, tile)
        return Tile(d_TM, band, y_B[tile], id_B[tile], y_Q, id_Q, self.salt, dim, most)

    def _most_positives(self, tile: slice) -> int:
        positives_B, _ = self._plan.pair_numbers
        return int(positives_B[self._plan.anchor_order_B[tile]].max())


def tile_height(
    num_columns: int, element_size: int, device: torch.device, *, by_kernels: bool = False
) -> int:
    """Number of rows of ``num_columns`` columns that the memory budget of one tile allows, at least ``LOWEST``."""
    budget = (_free_share(device) if device.type == "cuda" else None) or BUDGET_BYTES[device.type]
    row_bytes = max(1, num_columns * element_size)
    if by_kernels:
        return max(KERNEL_ROWS, _rounded_down(budget // (KERNEL_ARRAYS * row_bytes), KERNEL_ROWS // 4))
    return max(LOWEST[device.type], budget // (LIVE_ARRAYS * row_bytes))


def _rounded_down(number: int, step: int) -> int:
    return number // step * step


@cache
def _free_share(device: torch.device) -> int | None:
    """A tile's share of a GPU's free memory, in bytes; None where that cannot be asked.

    It is asked once in a process and rounded down to a power of two, so that a trial that goes on elsewhere most likely
    has the same tiles, and with them the same order of sums.
    """
    try:
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except (RuntimeError, AssertionError):  # AssertionError: PyTorch without CUDA
        return None
    return min(MOST_BYTES, 1 << max(1, int(free * FREE_SHARE)).bit_length() - 1)


def padded(x_NF: Tensor) -> Tensor:
    """Features with zeros behind them up to a whole multiple of ``ALIGNED``."""
    missing = -x_NF.shape[1] % ALIGNED[x_NF.device.type]
    return functional.pad(x_NF, (0, missing)) if missing else x_NF


Swept: TypeAlias = tuple[Tensor, Tensor, list[Tensor]]
"""Sum, number of terms, and the sum's gradient by each leaf."""


def in_one_sweep(sweep: Callable[[bool], Swept], leaves: Sequence[Tensor]) -> LossSum:
    """The sum and count that ``sweep`` finds, with the gradients it found at the same time.

    ``sweep`` receives whether gradients are needed. Only first derivatives exist.
    """
    wanted = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    return LossSum(*_OneSweep.apply(sweep, wanted, *leaves))


Pieces: TypeAlias = Iterator[tuple[Tensor, Tensor | float]]


def in_tiles(
    pieces: Callable[[list[Tensor], list[Tensor]], Pieces],
    rows: Sequence[Tensor],
    shared: Sequence[Tensor],
    *,
    num_columns: int,
) -> LossSum:
    """A sum over rows, a tile of them at a time, with gradients by autograd inside each tile.

    ``pieces(tile's rows, shared)`` yields (sum, count) one after the other; the graph of a piece is freed before
    the next is computed. ``rows`` are cut along their first dimension; a tile's terms should hold no more than
    ``LIVE_ARRAYS`` arrays of (tile, num_columns). Gradients flow to the floating ones of rows and shared.
    """
    parts = [*rows, *shared]

    def sweep(wanted: bool) -> Swept:
        gradients = [torch.zeros_like(x) for x in parts]
        total, count = rows[0].new_zeros(()), rows[0].new_zeros(())
        for tile in cut(rows[0], num_columns):
            with torch.set_grad_enabled(wanted):
                own, common = [_leaf(x[tile]) for x in rows], [_leaf(x) for x in shared]
                for sum_of_terms, number in pieces(own, common):
                    total += sum_of_terms.detach()
                    count += number
                    if wanted:
                        slopes = _gradients(sum_of_terms, [*own, *common])
                        _accumulate(gradients, slopes, tile, len(rows))
        return total, count, gradients

    return in_one_sweep(sweep, parts)


def row_values(
    function: Callable[[list[Tensor], list[Tensor]], Tensor],
    rows: Sequence[Tensor],
    shared: Sequence[Tensor],
    *,
    num_columns: int,
) -> Tensor:
    """One value per row, (B,), a tile of rows at a time; each tile is formed again in backward.

    For results that are needed as a vector, not summed over rows, such as a row's log-sum-exp for other ranks.
    """
    value_B: Tensor = _Recomputed.apply(function, len(rows), num_columns, *rows, *shared)
    return value_B


class _OneSweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sweep: Callable[[bool], Swept], wanted: bool, *leaves: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(leaves[0].device.type, enabled=False):
            total, count, gradients = sweep(wanted)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(x * factor if x.is_floating_point() else None for x in ctx.saved_tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, num_rows: int, num_columns: int, *parts: Tensor) -> Tensor:
        ctx.function, ctx.num_rows, ctx.num_columns = function, num_rows, num_columns
        ctx.save_for_backward(*parts)
        rows, shared = list(parts[:num_rows]), list(parts[num_rows:])
        values = rows[0].new_zeros(len(rows[0]))
        with torch.autocast(values.device.type, enabled=False):
            for tile in cut(rows[0], num_columns):
                values[tile] = function([x[tile] for x in rows], shared)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor_B: Tensor) -> tuple[Tensor | None, ...]:
        parts: list[Tensor] = list(ctx.saved_tensors)
        rows, shared = parts[: ctx.num_rows], parts[ctx.num_rows :]
        gradients = [torch.zeros_like(x) for x in parts]
        with torch.autocast(factor_B.device.type, enabled=False):
            for tile in cut(rows[0], ctx.num_columns):
                with torch.enable_grad():
                    own, common = [_leaf(x[tile]) for x in rows], [_leaf(x) for x in shared]
                    weighted = (ctx.function(own, common) * factor_B[tile]).sum()
                _accumulate(gradients, _gradients(weighted, [*own, *common]), tile, len(rows))
        return None, None, None, *_only_floating(gradients)


def cut(x: Tensor, num_columns: int) -> Iterator[slice]:
    """Tiles of rows against so many columns."""
    height = tile_height(num_columns, x.element_size(), x.device)
    for start in range(0, len(x), height):
        yield slice(start, min(start + height, len(x)))


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(torch.is_grad_enabled() and x.is_floating_point())


def _gradients(total: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """The sum's gradient by each target, zeros where it does not depend on one."""
    reached = [x for x in targets if x.requires_grad] if total.requires_grad else []
    found = iter(torch.autograd.grad(total, reached, allow_unused=True)) if reached else iter(())
    slopes = [next(found) if x.requires_grad and total.requires_grad else None for x in targets]
    return [torch.zeros_like(x) if slope is None else slope for x, slope in zip(targets, slopes, strict=True)]


def _accumulate(gradients: list[Tensor], slopes: list[Tensor], tile: slice, num_rows: int) -> None:
    for number, (gradient, slope) in enumerate(zip(gradients, slopes, strict=True)):
        part = gradient[tile] if number < num_rows else gradient
        part += slope


def _only_floating(gradients: list[Tensor]) -> list[Tensor | None]:
    return [gradient if gradient.is_floating_point() else None for gradient in gradients]
