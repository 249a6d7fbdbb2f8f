"""Softmax over classes: one engine for losses that tell an image's own class from all others by one vector of each.

The logit of anchor i is s T(o_i) at its own class and s N(S_ic) at any other: S_ic = z_i.w_c, o_i = S_iy, s a scale.
A loss is its T and N. With several vectors of a class, S_ic is that of the nearest.

    L_i = log( e^{s T(o_i)} + sum_{c != y} e^{s N(S_ic)} ) - s T(o_i)

Its slopes are s (p_iy - 1) T'(o_i) by o_i and s p_ic N'(S_ic) by S_ic, p the softmax.

No matrix of all anchors and all classes exists. Where there are more classes than anchors a tile holds some classes:
a first pass finds each anchor's sum of exponentials, and backward forms each tile again and writes its classes'
gradient once. So what is added to the vectors and their gradient is O((B + T) D + B T).

With ``sample`` below 1 a training step's softmax is over some classes alone: those of the global batch, and each other
class with that probability. Their vectors get a sparse gradient, which is that of all ranks, and no others do.

With a ``share`` of the classes a rank holds their vectors alone, against which it takes the anchors of all ranks. Ranks
exchange three numbers of each anchor: its own cosine, the largest logit, and the sum of exponentials.

Shapes: B anchors on this rank, M references (the global batch), D embedding size, C classes, S sampled ones, K vectors
of one class, T classes or anchors of a tile.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmlstudy.losses.distances import SQUARED_FLOOR
from dmlstudy.losses.interface import ALONE, Embeddings, LossSum, World, per_anchor
from dmlstudy.losses.mining import scrambled, unit_interval
from dmlstudy.losses.parameters import above, at_least
from dmlstudy.losses.plan import order_of
from dmlstudy.losses.products import Product, add_product, factor_last, write_product
from dmlstudy.losses.proxies import ProxyLoss, unit_vectors
from dmlstudy.losses.tiles import Swept, in_one_sweep, tile_height
from dmlstudy.transfers import placed

Others: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(S of some anchors and classes, these anchors) -> N(S), whose memory may be S's, and N'(S)."""


class Transforms(NamedTuple):
    """A loss's T for each anchor and its N, in which the state of this very batch is a constant.

    Without ``others`` N(S) = S. Where T depends on the norm before normalising, ``norm_slope_B`` is its slope by it;
    ``term_B``, of slope ``term_norm_slope_B``, is then added to each anchor's loss.
    """

    own_B: Tensor
    own_slope_B: Tensor
    others: Others | None = None
    norm_slope_B: Tensor | None = None
    term_B: Tensor | None = None
    term_norm_slope_B: Tensor | None = None


class ClassSoftmax(ProxyLoss):
    """The mean over anchors of L_i; a subclass has one parameter, its vectors, and says what T and N are.

    With one class L_i = 0. References are no part of it, so there is no memory.

    With ``sample`` < 1 the classes of a training step are those of the references, and any other whose hash of
    (``seed``, the number of the step, the class) is below it. The softmax is over them alone, without correction (An et
    al. 2022, Partial FC).

    The vectors' gradient is then sparse. The number of steps is saved. In eval mode all classes take part.

    With ``share``, this rank's part of the classes (``World.share``), it has their vectors alone; value and gradients
    are the same.

    Raises ValueError unless 0 < ``sample`` <= 1.
    """

    num_steps: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float,
        sample: float = 1.0,
        seed: int = 0,
        share: slice | None = None,
    ) -> None:
        super().__init__(num_classes, dim)
        self.scale = scale
        if above("sample", sample, 0) > 1:
            raise ValueError(f"sample={sample} must be at most 1: it is the share of classes in a step")
        self.sample, self.seed, self.share = sample, seed, share
        self.finds_whole_gradients = sample < 1 or share is not None
        if sample < 1:
            self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))
        self._has_seen_norms = False

    def observe(self, own_B: Tensor, references: Embeddings, world: World) -> None:  # most have no state
        """Take a training batch into the loss's state, before it is used; alike on every rank, without gradient."""

    @abstractmethod
    def transforms(self, own_B: Tensor, anchors: Embeddings, references: Embeddings) -> Transforms:
        """T and N for anchors with these cosines o to their own classes; no gradient is recorded."""

    def _terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        if self.uses_norms:
            self._check_norms(references)
        if self.share is not None:
            return self._terms_of_share(self.share, anchors, references, world)
        (vectors,) = self.parameters()
        is_training = self.training and torch.is_grad_enabled()
        class_S = self._classes_of_step(references.y_N)
        num_classes = len(vectors) if class_S is None else len(class_S)
        num_vectors = num_classes * math.prod(vectors.shape[1:-1])
        num_anchors, size, device = len(anchors.y_N), anchors.z_ND.element_size(), anchors.z_ND.device
        is_by_anchors = num_vectors <= num_anchors or tile_height(num_vectors, size, device) >= num_anchors
        if not is_by_anchors:
            anchors = anchors.rows(order_of(anchors))  # a tile's own classes are then those of adjacent rows
        z_BD, y_B, norm_B = anchors.z_ND, anchors.y_N, anchors.norm_N
        labels_B = anchors.labels.y_N
        if class_S is not None:
            vectors, y_B = _Rows.apply(vectors, class_S, world), torch.searchsorted(class_S, y_B)
            labels_B = y_B
        w_CKD = vectors if vectors.ndim == 3 else vectors[:, None]
        with torch.no_grad():
            units = _unit(w_CKD.to(z_BD.dtype)) if is_by_anchors else None
            own_BKD = _unit(w_CKD[y_B].to(z_BD.dtype))[0] if units is None else units[0][y_B]
            own_B = torch.linalg.vecdot(own_BKD, z_BD[:, None]).amax(1)
            if is_training:
                self.observe(own_B, references, world)
            transforms = self.transforms(own_B, anchors, references)
        leaves = [z_BD, w_CKD]
        if transforms.norm_slope_B is not None and norm_B is not None:
            leaves.append(norm_B)
        batch = _Batch(y_B, labels_B, self.scale, transforms, self.product)
        if units is not None:
            unit_CKD, size_CK1 = units
            total, _ = in_one_sweep(
                lambda wanted: _by_anchors(batch, z_BD.detach(), unit_CKD, size_CK1, w_CKD.dtype, wanted),
                leaves,
            )
        else:
            total = factor_last(partial(_ByClasses.apply, batch), self.product, *leaves)
        return per_anchor(total, anchors)

    def _terms_of_share(
        self, share: slice, anchors: Embeddings, references: Embeddings, world: World
    ) -> LossSum:
        """The sum over this rank's anchors, whose backward gives what this rank's classes say of all ranks' anchors."""
        order_M = order_of(references)
        given = references.rows(order_M)
        z_MD, y_M = given.z_ND, given.labels.y_N
        device = z_MD.device
        (vectors,) = self.parameters()
        is_training = self.training and torch.is_grad_enabled()
        class_S = self._classes_of_step(given.y_N)
        if class_S is None:
            own_S = torch.arange(share.start, share.stop, device=y_M.device)
        else:
            y_M = given.y_N
            own_S = class_S[(class_S >= share.start) & (class_S < share.stop)]
            vectors = _Rows.apply(vectors, own_S - share.start, ALONE)
        # Where another rank has the class: before the own ones, or behind them.
        place_M = torch.where(y_M < share.start, -1, torch.searchsorted(own_S, y_M))
        row_R = ((place_M >= 0) & (place_M < len(own_S))).nonzero()[:, 0]
        place_R, row_R = placed(place_M[row_R], device), placed(row_R, device)
        w_SKD = vectors if vectors.ndim == 3 else vectors[:, None]
        with torch.no_grad():
            unit_RKD, _ = _unit(w_SKD[place_R].to(z_MD.dtype))
            own_M = z_MD.new_zeros(len(z_MD))
            own_M[row_R] = (unit_RKD @ z_MD[row_R, :, None])[:, :, 0].amax(1)
            own_M = world.sum(own_M)
            if is_training:
                self.observe(own_M, references, world)
            transforms = self.transforms(own_M, given, references)
            mine_B = placed(_places_of_own(order_M, len(anchors.y_N), world), device)
        leaves = [z_MD, w_SKD]
        if transforms.norm_slope_B is not None and anchors.norm_N is not None:
            leaves.append(anchors.norm_N)
        places = placed(place_M, device), place_M
        batch = _Batch(*places, self.scale, transforms, self.product, world, mine_B)
        total = factor_last(partial(_ByClasses.apply, batch), self.product, *leaves)
        return per_anchor(total, anchors)

    def _classes_of_step(self, y_M: Tensor) -> Tensor | None:
        """The classes of a training step, where they are a sample, (S,); with gradients it is over with this."""
        if self.sample == 1 or not self.training:
            return None
        class_S = self.drawn(y_M)
        if torch.is_grad_enabled():
            self.num_steps += 1
        return class_S

    def drawn(self, y_M: Tensor) -> Tensor:
        """The classes of the next training step, in order, for a global batch of these labels; (S,)."""
        class_C = torch.arange(self.num_classes, device=y_M.device)
        step = scrambled(self.num_steps + scrambled(torch.full_like(self.num_steps, self.seed)))
        is_drawn_C = unit_interval(scrambled(scrambled(class_C + step))) < self.sample
        is_drawn_C[y_M] = True
        return class_C[is_drawn_C]

    def why_not_cut(self) -> str:
        """As for all losses; sampled classes would be others for each part, and shares of classes are not cut."""
        if self.sample < 1:
            return "a loss of sampled classes"
        return (
            super().why_not_cut() if self.share is None else "a loss whose classes are shared out among ranks"
        )

    def _check_norms(self, references: Embeddings) -> None:
        """Raises ValueError without norms, and for a first batch whose norms are all the same: they say nothing."""
        if references.norm_N is None:
            raise ValueError("this loss needs norms: give embeddings as they are before they are normalised")
        norm_M = references.norm_N.detach()
        if not self._has_seen_norms and len(norm_M) > 1:
            if norm_M.max() - norm_M.min() <= 1e-4 * norm_M.max():
                raise ValueError(
                    f"all embeddings have the norm {float(norm_M[0]):.4g}, and this loss looks at norms; give it"
                    " embeddings as they are before they are normalised, and no codes or heads of unit norm"
                )
            self._has_seen_norms = True


class _Rows(torch.autograd.Function):
    """Some rows of a parameter that all ranks have alike; its gradient is sparse, and the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, class_S: Tensor, world: World) -> Tensor:
        ctx.class_S, ctx.shape, ctx.world = class_S, vectors.shape, world
        return vectors[class_S]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        mean = gradient if ctx.world.size == 1 else ctx.world.sum(gradient) / ctx.world.size
        whole = torch.sparse_coo_tensor(
            ctx.class_S[None], mean, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return whole, None, None


def _places_of_own(order_M: Tensor, num_own: int, world: World) -> Tensor:
    """The places of this rank's rows in an order of all ranks' rows, in the rows' own order, (B,)."""
    rank = world.share(world.size).start
    number_W = torch.zeros(world.size, dtype=torch.int64, device=order_M.device)
    number_W[rank] = num_own
    first = world.sum(number_W)[:rank].sum()
    return order_M.argsort()[first + torch.arange(num_own, device=order_M.device)]


class _Batch(NamedTuple):
    """A batch as a sweep needs it, whose anchors are in the order of their labels, beside embeddings and vectors.

    With shares of classes, B are the anchors of all ranks, ``y_B`` their classes' places among the own ones (or
    outside), and ``mine`` the places of this rank's anchors.
    """

    y_B: Tensor
    labels_B: Tensor
    """The same where they are read best."""

    scale: float
    transforms: Transforms
    product: Product
    world: World = ALONE
    mine: Tensor | None = None

    def logits(
        self, z_TD: Tensor, unit_CKD: Tensor, rows: slice, memory_TC: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """s N(S_TC), N'(S_TC) (None: 1), and the number of the nearest of each class's vectors (None: of the one).

        S_TC lies in ``memory_TC``, where given.
        """
        others = self.transforms.others
        if others is None:
            s_TC, nearest_TC = _similarities(self.scale * z_TD, unit_CKD, self.product, memory_TC)
            return s_TC, None, nearest_TC
        s_TC, nearest_TC = _similarities(z_TD, unit_CKD, self.product, memory_TC)
        n_TC, slope_TC = others(s_TC, rows)
        return n_TC * self.scale, slope_TC, nearest_TC

    def norm_slopes(self, share_B: Tensor) -> list[Tensor]:
        """The slope by each anchor's norm, if T has one, from the ``share`` 1 - p_iy of the other classes."""
        transforms = self.transforms
        if transforms.norm_slope_B is None:
            return []
        slope_B = -self.scale * share_B * transforms.norm_slope_B
        if transforms.term_norm_slope_B is not None:
            slope_B = slope_B + transforms.term_norm_slope_B
        return [self._of_mine(slope_B)]

    def total(self, loss_B: Tensor) -> Tensor:
        term_B = self.transforms.term_B
        return self._of_mine(loss_B if term_B is None else loss_B + term_B).sum()

    def _of_mine(self, x_B: Tensor) -> Tensor:
        return x_B if self.mine is None else x_B[self.mine]


def _by_anchors(
    batch: _Batch, z_BD: Tensor, unit_CKD: Tensor, size_CK1: Tensor, dtype: torch.dtype, wanted: bool
) -> Swept:
    """Some anchors at a time, each against all classes, whose vectors' ``dtype`` the gradient has; in one pass."""
    z_gradient_BD, unit_gradient_CKD = torch.empty_like(z_BD), torch.empty_like(unit_CKD)
    of_tiles: list[tuple[Tensor, Tensor]] = []
    # Each tile adds to all of the vectors' gradient, so a very low one would do little else.
    height = max(128, tile_height(unit_CKD[:, :, 0].numel(), z_BD.element_size(), z_BD.device))
    for start in range(0, max(1, len(z_BD)), height):
        rows = slice(start, min(start + height, len(z_BD)))
        z_TD, own_T1 = z_BD[rows], batch.y_B[rows, None]
        logits_TC, slope_TC, nearest_TC = batch.logits(z_TD, unit_CKD, rows)
        logits_TC.scatter_(1, own_T1, -math.inf)
        own_T = batch.scale * batch.transforms.own_B[rows]
        highest_T = torch.maximum(own_T, logits_TC.amax(1))
        p_TC = logits_TC.sub_(highest_T[:, None]).exp_()
        loss_T, share_T, sum_T = _cross_entropy(own_T, highest_T, p_TC.sum(1))
        of_tiles.append((loss_T, share_T))
        if not wanted:
            continue
        p_TC.mul_((batch.scale / sum_T)[:, None])
        if slope_TC is not None:
            p_TC.mul_(slope_TC)
        own_slope_T = share_T * batch.transforms.own_slope_B[rows]
        p_TC.scatter_(1, own_T1, own_slope_T.mul_(-batch.scale)[:, None])
        for k, slope_k_TC in _of_each_vector(p_TC, nearest_TC, unit_CKD.shape[1]):
            into_z = write_product if k == 0 else add_product
            into_z(z_gradient_BD[rows], slope_k_TC, unit_CKD[:, k], batch.product)
            into_unit = write_product if start == 0 else add_product
            into_unit(unit_gradient_CKD[:, k], slope_k_TC.T, z_TD, batch.product)
    loss_B, share_B = (
        torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*of_tiles, strict=True)
    )
    w_gradient_CKD = (
        _through_unit(unit_gradient_CKD, unit_CKD, size_CK1).to(dtype) if wanted else unit_gradient_CKD
    )
    gradients = [z_gradient_BD, w_gradient_CKD, *batch.norm_slopes(share_B)]
    return batch.total(loss_B), z_BD.new_full((), len(z_BD)), gradients


class _ByClasses(torch.autograd.Function):
    """Some classes at a time, each against all anchors; backward forms each tile again."""

    @staticmethod
    def forward(ctx: Any, batch: _Batch, z_BD: Tensor, w_CKD: Tensor, *norms: Tensor) -> Tensor:
        ctx.batch = batch
        with torch.autocast(z_BD.device.type, enabled=False):
            own_B = batch.scale * batch.transforms.own_B
            highest_B, others_B = own_B, torch.zeros_like(own_B)
            for tile in _tiles(batch, z_BD, w_CKD):
                logits_BT, _, _ = batch.logits(z_BD, tile.unit_TKD, slice(None), tile.memory_BT)
                logits_BT[tile.rows].scatter_(1, tile.column_R1, -math.inf)
                higher_B = torch.maximum(highest_B, logits_BT.amax(1))
                of_tile_B = logits_BT.sub_(higher_B[:, None]).exp_().sum(1)
                others_B = others_B * (highest_B - higher_B).exp_() + of_tile_B
                highest_B = higher_B
            if batch.mine is not None:
                higher_B = batch.world.max(highest_B)
                others_B = batch.world.sum(others_B * (highest_B - higher_B).exp())
                highest_B = higher_B
            loss_B, share_B, sum_B = _cross_entropy(own_B, highest_B, others_B)
            ctx.save_for_backward(z_BD, w_CKD, highest_B + sum_B.log(), share_B)
            return batch.total(loss_B)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        batch: _Batch = ctx.batch
        z_BD, w_CKD, log_sum_B, share_B = ctx.saved_tensors
        own_slope_B1 = -(share_B * batch.transforms.own_slope_B)[:, None]
        z_gradient_BD, w_gradient_CKD = torch.zeros_like(z_BD), torch.empty_like(w_CKD)
        with torch.autocast(z_BD.device.type, enabled=False):
            scaled_BD = batch.scale * factor * z_BD
            for tile in _tiles(batch, z_BD, w_CKD):
                unit_TKD = tile.unit_TKD
                logits_BT, slope_BT, nearest_BT = batch.logits(z_BD, unit_TKD, slice(None), tile.memory_BT)
                p_BT = logits_BT.sub_(log_sum_B[:, None]).exp_()
                if slope_BT is not None:
                    p_BT.mul_(slope_BT)
                p_BT[tile.rows].scatter_(1, tile.column_R1, own_slope_B1[tile.rows])
                of_tile_TKD = w_gradient_CKD[tile.classes]
                is_own = of_tile_TKD.dtype == unit_TKD.dtype
                unit_gradient_TKD = of_tile_TKD if is_own else torch.empty_like(unit_TKD)
                for k, slope_k_BT in _of_each_vector(p_BT, nearest_BT, unit_TKD.shape[1]):
                    add_product(z_gradient_BD, slope_k_BT, unit_TKD[:, k], batch.product)
                    write_product(unit_gradient_TKD[:, k], slope_k_BT.T, scaled_BD, batch.product)
                # A share's gradient is that of all anchors, whose objectives are W times their part of the mean. In a
                # factor of the product 1 / W would be rounded with it.
                if batch.world.size > 1:
                    unit_gradient_TKD.div_(batch.world.size)
                gradient_TKD = _through_unit(unit_gradient_TKD, unit_TKD, tile.size_TK1)
                if not is_own:
                    of_tile_TKD.copy_(gradient_TKD)
            z_gradient_BD.mul_(batch.scale * factor)
            norms = [factor * slope_B for slope_B in batch.norm_slopes(share_B)]
        return None, z_gradient_BD, w_gradient_CKD, *norms


class _ClassTile(NamedTuple):
    """Some classes, the R anchors whose own class is among them, and the place of that class.

    Tiles share the memory of their vectors, and that for their cosines: fresh memory costs a fault for each page.
    """

    classes: slice
    rows: slice
    column_R1: Tensor
    unit_TKD: Tensor
    size_TK1: Tensor
    memory_BT: Tensor


def _tiles(batch: _Batch, z_BD: Tensor, w_CKD: Tensor) -> Iterator[_ClassTile]:
    num_classes, num_vectors, dim = w_CKD.shape
    num_anchors = len(z_BD)
    # Half as many arrays live as a tile of pairs has.
    width = 2 * tile_height(num_vectors * (num_anchors + dim), z_BD.element_size(), z_BD.device)
    width = max(1, min(width, num_classes))  # of a share that drew no class too
    for_unit, for_cosines = z_BD.new_empty(width, num_vectors, dim), z_BD.new_empty(num_anchors * width)
    starts = torch.arange(0, num_classes + width, width, device=batch.labels_B.device).clamp(max=num_classes)
    bounds = torch.searchsorted(batch.labels_B, starts).tolist()
    for number, start in enumerate(range(0, num_classes, width)):
        rows = slice(bounds[number], bounds[number + 1])
        classes = slice(start, min(start + width, num_classes))
        length = classes.stop - start
        unit_TKD, size_TK1 = _unit(w_CKD[classes].to(z_BD.dtype), for_unit[:length])
        memory_BT = for_cosines[: num_anchors * length].view(num_anchors, length)
        yield _ClassTile(classes, rows, batch.y_B[rows, None] - start, unit_TKD, size_TK1, memory_BT)


def _cross_entropy(own_B: Tensor, highest_B: Tensor, others_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L_i, 1 - p_iy, and the sum of exponentials relative to the highest logit.

    They keep their digits where p_iy is near 1. ``own`` is the own logit, and ``others`` the other classes' sum of
    exponentials relative to the highest.
    """
    relative_B = (own_B - highest_B).exp()
    sum_B = relative_B + others_B
    return (highest_B - own_B) + torch.log1p(relative_B - 1 + others_B), others_B / sum_B, sum_B


def _unit(w_TKD: Tensor, out_TKD: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The vectors on the sphere, in the memory of ``out`` if given, and their norms."""
    size_TK1 = w_TKD.norm(dim=-1, keepdim=True).clamp_(min=SQUARED_FLOOR)
    return torch.div(w_TKD, size_TK1, out=out_TKD), size_TK1


def _through_unit(gradient_TKD: Tensor, unit_TKD: Tensor, size_TK1: Tensor) -> Tensor:
    """The gradient by vectors from that by their directions, whose memory is reused."""
    along_TK1 = (gradient_TKD * unit_TKD).sum(-1, keepdim=True)
    return gradient_TKD.addcmul_(unit_TKD, along_TK1, value=-1).div_(size_TK1)


def _similarities(
    z_BD: Tensor, unit_TKD: Tensor, product: Product, memory_BT: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """max_k z_i.w_ck of each anchor and class, and the first k that has it (None where there is but one)."""
    s_BT = z_BD.new_empty(len(z_BD), len(unit_TKD)) if memory_BT is None else memory_BT
    write_product(s_BT, z_BD, unit_TKD[:, 0].T, product)
    if unit_TKD.shape[1] == 1:
        return s_BT, None
    nearest_BT = torch.zeros(s_BT.shape, dtype=torch.int16, device=s_BT.device)
    for k in range(1, unit_TKD.shape[1]):
        s_k_BT = product(z_BD, unit_TKD[:, k].T)
        nearest_BT.masked_fill_(s_k_BT > s_BT, k)
        torch.maximum(s_BT, s_k_BT, out=s_BT)
    return s_BT, nearest_BT


def _of_each_vector(
    slope_BT: Tensor, nearest_BT: Tensor | None, num_vectors: int
) -> Iterator[tuple[int, Tensor]]:
    """The slopes by the products with the k-th vector of each class, for each k."""
    if nearest_BT is None:
        yield 0, slope_BT
        return
    for k in range(num_vectors):
        yield k, slope_BT * (nearest_BT == k)


def widened(cos_B: Tensor, margin_B: Tensor) -> tuple[Tensor, Tensor]:
    """cos(theta + m) and its slope sin(theta + m) / sin(theta) by cos(theta), m in radians, with ArcFace's seam.

    Where theta + m > pi, cos would rise again; there it is cos(theta) - m sin(m), with slope 1. 1 - cos^2 is kept >=
    1e-12, with gradient zero below.
    """
    value_B, slope_B = cos_of_sum(cos_B, margin_B)
    is_before_B = cos_B >= -margin_B.cos()
    beyond_B = cos_B - margin_B * margin_B.sin()
    return torch.where(is_before_B, value_B, beyond_B), torch.where(is_before_B, slope_B, 1.0)


def cos_of_sum(cos_B: Tensor, margin_B: Tensor) -> tuple[Tensor, Tensor]:
    """cos(theta + m) and its slope by cos(theta), without a seam."""
    square_B = (1 - cos_B) * (1 + cos_B)
    sin_B = square_B.clamp(min=SQUARED_FLOOR).sqrt()
    slope_B = torch.where(square_B >= SQUARED_FLOOR, cos_B / sin_B, 0)
    cos_m_B, sin_m_B = margin_B.cos(), margin_B.sin()
    return cos_B * cos_m_B - sin_B * sin_m_B, cos_m_B + slope_B * sin_m_B


def checked_angle(parameter: str, margin: float) -> float:
    """A margin in degrees, in radians; raises ValueError unless it lies in 0..90."""
    if at_least(parameter, margin, 0) > 90:
        raise ValueError(f"{parameter}={margin} must be an angle of at most 90 degrees; 28.6 is usual")
    return math.radians(margin)


class NormSoftmax(ClassSoftmax):
    """Normalised softmax: cross-entropy of cosines over a temperature (Zhai and Wu 2019).

    L_i = -log softmax_c(z_i.w_c / T) at c = y_i, T = ``temperature``. With one class L_i = 0. References are ignored.
    ``sample`` is as in ``ClassSoftmax``.

    The count is the number of anchors. Raises ValueError unless T > 0, labels lie in 0..C-1 and z has size ``dim``.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        temperature: float = 0.05,
        sample: float = 1.0,
        seed: int = 0,
        share: slice | None = None,
    ) -> None:
        super().__init__(num_classes, dim, 1 / above("temperature", temperature, 0), sample, seed, share)
        self.temperature = temperature
        self.proxies_CD = unit_vectors(seed, self.num_classes, self.dim, share=share)

    def transforms(self, own_B: Tensor, anchors: Embeddings, references: Embeddings) -> Transforms:
        """T(o) = o."""
        return Transforms(own_B, torch.ones_like(own_B))


class ProxyNCAPlusPlus(ClassSoftmax):
    """ProxyNCA++: classification by the nearest proxy (Teh et al. 2020, Eq. 6).

    L_i = -log softmax_c(-||z_i - p_c||^2 / T) at c = y_i, T = ``temperature``, which is the softmax of 2 z_i.p_c / T,
    also for z off the sphere: ||z_i||^2 is the same for all classes. With one class L_i = 0. References are ignored.
    ``sample`` is as in ``ClassSoftmax``.

    The count is the number of anchors. Raises ValueError unless T > 0, labels lie in 0..C-1 and z has size
    ``dim``.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        temperature: float = 1 / 9,
        sample: float = 1.0,
        seed: int = 0,
        share: slice | None = None,
    ) -> None:
        super().__init__(num_classes, dim, 2 / above("temperature", temperature, 0), sample, seed, share)
        self.temperature = temperature
        self.proxies_CD = unit_vectors(seed, self.num_classes, self.dim, share=share)

    def transforms(self, own_B: Tensor, anchors: Embeddings, references: Embeddings) -> Transforms:
        """T(o) = o."""
        return Transforms(own_B, torch.ones_like(own_B))


class ArcFace(ClassSoftmax):
    """ArcFace: cross-entropy of scaled cosines, the own angle widened by a margin (Deng et al. 2019, Eq. 3).

    L_i = -log softmax_c(scale S'_ic) at c = y_i; S'_ic = cos(theta_ic) = z_i.p_c for c != y_i and
    S'_iy = cos(theta_iy + m) = S cos m - sqrt(1 - S^2) sin m, m = ``margin`` in degrees.

    Where theta_iy + m > 180 degrees, cos would rise again; there S'_iy = S - m sin m (m in radians), the usual
    continuation: it keeps falling with theta, after a step down at the seam. 1 - S^2 is kept >= 1e-12; below, its
    gradient is zero, not infinite.

    With one class L_i = 0. References are ignored. ``sample`` is as in ``ClassSoftmax``.

    The count is the number of anchors. Raises ValueError unless 0 <= m <= 90 (beyond 133 the step would go up),
    scale > 0, labels lie in 0..C-1 and z has size ``dim``.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 28.6,
        scale: float = 64.0,
        sample: float = 1.0,
        seed: int = 0,
        share: slice | None = None,
    ) -> None:
        super().__init__(num_classes, dim, above("scale", scale, 0), sample, seed, share)
        self.margin = margin
        self.angle = checked_angle("margin", margin)
        self.proxies_CD = unit_vectors(seed, self.num_classes, self.dim, share=share)

    def transforms(self, own_B: Tensor, anchors: Embeddings, references: Embeddings) -> Transforms:
        """T(o) = cos(theta + m)."""
        return Transforms(*widened(own_B, own_B.new_full((), self.angle)))


class CosFace(ClassSoftmax):
    """CosFace: cross-entropy of scaled cosines, the own one lowered by a margin (Wang et al. 2018, Eq. 4).

    L_i = -log softmax_c(scale (z_i.p_c - margin [c = y_i])) at c = y_i. With one class L_i = 0. References are
    ignored. ``sample`` is as in ``ClassSoftmax``.

    The count is the number of anchors. Raises ValueError unless margin >= 0, scale > 0, labels lie in 0..C-1
    and z has size ``dim``.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.35,
        scale: float = 64.0,
        sample: float = 1.0,
        seed: int = 0,
        share: slice | None = None,
    ) -> None:
        super().__init__(num_classes, dim, above("scale", scale, 0), sample, seed, share)
        self.margin = at_least("margin", margin, 0)
        self.proxies_CD = unit_vectors(seed, self.num_classes, self.dim, share=share)

    def transforms(self, own_B: Tensor, anchors: Embeddings, references: Embeddings) -> Transforms:
        """T(o) = o - m."""
        return Transforms(own_B - self.margin, torch.ones_like(own_B))
