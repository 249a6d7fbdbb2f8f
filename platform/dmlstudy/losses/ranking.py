"""Losses of ranks: smooth forms of average precision and of recall at k.

An anchor's references are ranked by cosine. The rank of a positive counts the references nearer than it, and a sigmoid
stands for the step that counts, so that a slope exists. References are compared with one positive of each anchor at a
time.

Shapes: B anchors on this rank, M references, T anchors in a tile, Q references in the tile's band, P most positives of
any anchor, V virtual rows, D embedding size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dmlstudy.losses.distances import cosine, full_precision
from dmlstudy.losses.interface import Embeddings, Labels, LossSum, World, labelled
from dmlstudy.losses.mining import positives_in_columns, scrambled, unit_interval
from dmlstudy.losses.parameters import LARGEST, above, at_least, choice
from dmlstudy.losses.plan import order_of
from dmlstudy.losses.tiles import RowLoss, RowTerms, Tile
from dmlstudy.text import shown
from dmlstudy.transfers import placed

TIE = 1e-6
"""Cosines that differ by no more count as equal where a step is not smooth: rounding must not decide on it."""


class SmoothAP(RowLoss):
    """Smooth average precision (Brown et al. 2020).

    L_i = 1 - mean_{p in pos(i)} r_p / R_p, with r_p = 1 + sum_{j in pos(i), j != p} G(S_ij - S_ip), R_p = r_p +
    sum_{k in neg(i)} G(S_ik - S_ip), G(x) = 1 / (1 + e^{-x/tau}) and S = z_i.z_j of unit vectors.

    ``count_self`` puts the anchor among its own positives, at the constant similarity 1, as the authors' code does.

    The count is the number of anchors; an anchor without positives or without negatives gives 0. Raises ValueError
    unless tau > 0.
    """

    def __init__(self, tau: float = 0.01, count_self: bool = False) -> None:
        super().__init__(cosine)
        self.tau = above("tau", tau, 0)
        self.count_self = count_self

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        ranked = RankedTile(rows, self.tau)
        number_T1 = ranked.number_T1 + 1 if self.count_self else ranked.number_T1.clamp(min=1)
        share_T1 = (ranked.number_T1 > 0) / number_T1
        total = rows.d_TM.new_zeros(())
        for place in range(ranked.num_positives):
            total += self._term(ranked, place, share_T1 * ranked.real_TP[:, place, None])
        if self.count_self and ranked.num_positives:
            total += self._term(ranked, None, share_T1)
        return ranked.terms(total)

    def _term(self, ranked: RankedTile, place: int | None, share_T1: Tensor) -> Tensor:
        """1 - r/R = n/R of one positive of each anchor, n = R - r: slopes r/R^2 by n and -n/R^2 by r."""
        g = ranked.smooth_steps(place)
        n_T1, r_T1 = g.negative_TM.sum(1, keepdim=True), g.positive_TP.sum(1, keepdim=True).add_(1)
        self_T1 = ranked.step_of_self(place) if self.count_self else torch.zeros_like(r_T1)
        r_T1 += self_T1
        by_both_T1 = share_T1 / (r_T1 + n_T1).square()
        by_n_T1, by_r_T1 = r_T1 * by_both_T1, -n_T1 * by_both_T1
        ranked.push(place, slopes_of(g.negative_TM), by_n_T1)
        ranked.pull(place, slopes_of(g.positive_TP), by_r_T1)
        if self.count_self and place is not None:
            ranked.slope_TP[:, place, None] += by_r_T1 * slopes_of(self_T1) / self.tau
        return (share_T1 * n_T1 / (r_T1 + n_T1)).sum()


class SupAP(RowLoss):
    """An upper bound of 1 - average precision, smooth in the negatives (Ramzi et al. 2021).

    L_i = 1 - mean_{p in pos(i)} r_p / (r_p + n_p), with r_p = 1 + |{j in pos(i), j != p : S_ij >= S_ip}|, through which
    no gradient flows, n_p = sum_{k in neg(i)} H(S_ik - S_ip), S = z_i.z_j of unit vectors and

    H(x) = G(x) up to 0, start + G(x) up to delta, offset + rho (x - delta) beyond, G(x) = 1 / (1 + e^{-x/tau}).

    ``offset_mode='continuous'`` has offset = start + G(delta), so that H has no step at delta; 'fixed' takes
    ``offset``. Similarities within 1e-6 are equal.

    The count is the number of anchors; an anchor without positives or without negatives gives 0. Raises ValueError
    unless tau > 0 and rho, delta, start, offset >= 0, and for an unknown ``offset_mode``.
    """

    def __init__(
        self,
        tau: float = 0.01,
        rho: float = 100.0,
        delta: float = 0.05,
        start: float = 0.5,
        offset_mode: str = "continuous",
        offset: float = 1.44,
    ) -> None:
        super().__init__(cosine)
        self.tau = above("tau", tau, 0)
        self.rho = at_least("rho", rho, 0)
        self.delta = at_least("delta", delta, 0)
        self.start = at_least("start", start, 0)
        at_delta = self.start + 1 / (1 + math.exp(-self.delta / self.tau))
        modes = {"continuous": at_delta, "fixed": at_least("offset", offset, 0)}
        self.jump = choice("offset_mode", offset_mode, modes) - at_delta

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        ranked = RankedTile(rows, self.tau)
        share_T1 = 1 / ranked.number_T1.clamp(min=1)
        total, spare_TM = rows.d_TM.new_zeros(()), torch.empty_like(rows.d_TM)
        for place in range(ranked.num_positives):
            nearer = ranked.differences(place)
            r_T1 = (nearer.positive_TP >= -TIE / self.tau).sum(1, keepdim=True).add_(1)
            n_T1 = self._bound(nearer.negative_TM, spare_TM)
            part_T1 = share_T1 * ranked.real_TP[:, place, None] / (r_T1 + n_T1)
            ranked.push(place, nearer.negative_TM, part_T1 * r_T1 / (r_T1 + n_T1))
            total += (part_T1 * n_T1).sum()
        return ranked.terms(total)

    def _bound(self, x_TM: Tensor, spare_TM: Tensor) -> Tensor:
        """The sum of H over each row; x, which is in units of tau, becomes H's slopes.

        Arithmetic alone, of arrays that exist: masks and fresh memory take most of the time on a CPU.
        """
        delta, rho = self.delta / self.tau, self.rho * self.tau
        n_T1 = excess_over(x_TM, TIE / self.tau, spare_TM).sign_().sum(1, keepdim=True).mul_(self.start)
        n_T1 += excess_over(x_TM, delta, spare_TM).sum(1, keepdim=True).mul_(rho)
        beyond_TM = spare_TM.sign_()
        n_T1 += beyond_TM.sum(1, keepdim=True).mul_(self.jump)
        g_TM = x_TM.clamp_(max=delta).sigmoid_()
        n_T1 += g_TM.sum(1, keepdim=True)
        slope_TM = slopes_of(g_TM)
        slope_TM.addcmul_(slope_TM, beyond_TM, value=-1).add_(beyond_TM, alpha=rho)
        return n_T1


class RecallAtK(RowLoss):
    """Recall at several k, made smooth twice: in the ranks and in the step at k (Patel et al. 2022).

    L_i = 1 - mean_{k in ks} min(k, sum_{p in pos(i)} q_kp) / min(k, |pos(i)|), with q_kp = G_k(k - r_p), r_p = 1 +
    sum_{j != p} G(S_ij - S_ip) over the positives and negatives of i, G(x) = 1 / (1 + e^{-x/tau}), G_k the same with
    the temperature of k, and S = z_i.z_j.

    ``ks`` are integers between spaces. A k beyond the number of references M is M. ``k_temperature_mode='fixed'`` has
    the temperature ``k_temperature`` for every k, 'k' has k itself.

    ``simix`` adds virtual rows a z_i + (1 - a) z_j, not normalised, for all pairs of images of one class in the global
    batch. They are of that class, anchors and references alike, dealt to the ranks and counted.

    The weight a is a hash of the batch's images and the pair. Rows of a memory are not mixed, nor does it keep virtual
    ones.

    The count is the number of anchors; an anchor without positives gives 0. Raises ValueError unless tau, k_temperature
    > 0, for ``ks`` that are no different positive integers, and for an unknown ``k_temperature_mode``.
    """

    def __init__(
        self,
        ks: str = "1 2 4 8 16",
        tau: float = 0.01,
        k_temperature_mode: str = "fixed",
        k_temperature: float = 1.0,
        simix: bool = False,
    ) -> None:
        super().__init__(cosine)
        self.ks = integers("ks", ks)
        self.tau = above("tau", tau, 0)
        modes = {"fixed": above("k_temperature", k_temperature, 0), "k": None}
        self.k_temperature = choice("k_temperature_mode", k_temperature_mode, modes)
        self.simix = simix

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum of L_i over the anchors, virtual ones among them, and their number."""
        if self.simix:
            virtual = virtual_rows(references.rows(slice(0, world.total(len(anchors.z_ND)))))
            share = world.share(len(virtual.z_ND))
            anchors, references = joined(anchors, virtual.rows(share)), joined(references, virtual)
        return super().terms(anchors, references, world)

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        ranked = RankedTile(rows, self.tau)
        r_TP = torch.zeros_like(ranked.d_TP)
        for place in range(ranked.num_positives):
            g = ranked.smooth_steps(place)
            r_TP[:, place] = g.negative_TM.sum(1).add_(g.positive_TP.sum(1)).add_(1)
        value_T1, by_rank_TP = self._recall(r_TP, ranked)
        for place in range(ranked.num_positives):
            g = ranked.smooth_steps(place)  # again, for of all positives they would take P T x M
            factor_T1 = by_rank_TP[:, place, None]
            ranked.push(place, slopes_of(g.negative_TM), factor_T1)
            ranked.pull(place, slopes_of(g.positive_TP), factor_T1)
        return ranked.terms((ranked.number_T1.clamp(max=1) - value_T1).sum())

    def _recall(self, r_TP: Tensor, ranked: RankedTile) -> tuple[Tensor, Tensor]:
        """The mean recall over ks of each anchor, and the slopes of its loss by the ranks."""
        value_T1, by_rank_TP = torch.zeros_like(ranked.number_T1), torch.zeros_like(r_TP)
        for k in self.ks:
            k = min(k, ranked.num_references)
            temperature = float(k) if self.k_temperature is None else self.k_temperature
            q_TP = ((k - r_TP) / temperature).sigmoid_().mul_(ranked.real_TP)
            found_T1 = q_TP.sum(1, keepdim=True)
            share_T1 = 1 / (ranked.number_T1.clamp(1, k) * len(self.ks))
            value_T1 += found_T1.clamp(max=k) * share_T1
            by_rank_TP += slopes_of(q_TP).mul_(share_T1 * (found_T1 < k) / temperature)
        return value_T1, by_rank_TP


class Differences(NamedTuple):
    """The lead of each negative (T, M) and of each positive (T, P) before one positive of each anchor.

    What is no such pair has the lead -infinity, of which the sigmoid and its slope are 0.
    """

    negative_TM: Tensor
    positive_TP: Tensor


class RankedTile:
    """A tile's references as ranked by its anchors, and the slopes by their distances that gather here.

    ``d_TP`` are the distances of the positives side by side, in units of tau as all here; ``real_TP`` says which of
    them are no padding. The differences from one positive lie where those from the last one lay: on a CPU fresh memory
    costs more than the sigmoid.
    """

    def __init__(self, rows: Tile, tau: float) -> None:
        positive = rows.positive
        self.tau = tau
        self.num_anchors, self.num_references = rows.d_TM.shape
        self.num_band = positive.d.shape[1]
        self.place_TP, self.real_TP = positives_in_columns(rows, positive.chosen)
        self.num_positives = self.place_TP.shape[1]
        self.d_TP = positive.d.gather(1, self.place_TP).div_(tau)
        self.number_T1 = self.real_TP.sum(1, keepdim=True).to(self.d_TP.dtype)
        self.slope_TM, self.slope_TP = torch.zeros_like(rows.d_TM), torch.zeros_like(self.d_TP)
        self._positive_TP = self.d_TP.masked_fill(~self.real_TP, math.inf)
        self._negative_TM = rows.d_TM / tau
        self._negative_TM[:, rows.band].masked_fill_(rows.y_T[:, None] == rows.y_Q, math.inf)
        self._room_TM = torch.empty_like(rows.d_TM)

    def differences(self, place: int | None) -> Differences:
        """(S_ij - S_ip) / tau of each j, p the positive at this place, or the anchor itself at similarity 1."""
        own_T1 = self.number_T1.new_zeros(self.num_anchors, 1) if place is None else self.d_TP[:, place, None]
        positive_TP = own_T1 - self._positive_TP
        if place is not None:
            positive_TP[:, place] = -math.inf
        return Differences(torch.sub(own_T1, self._negative_TM, out=self._room_TM), positive_TP)

    def smooth_steps(self, place: int | None) -> Differences:
        """The sigmoids of the differences."""
        x = self.differences(place)
        return Differences(x.negative_TM.sigmoid_(), x.positive_TP.sigmoid_())

    def step_of_self(self, place: int | None) -> Tensor:
        """The sigmoid of the lead of the anchor itself, (T, 1); none before itself."""
        return (
            self.number_T1.new_zeros(self.num_anchors, 1)
            if place is None
            else self.d_TP[:, place, None].sigmoid()
        )

    def push(self, place: int | None, slope_TM: Tensor, factor_T1: Tensor) -> None:
        """Adds slopes by the negatives' differences from one positive, times a factor of each anchor."""
        self._add(self.slope_TM, place, slope_TM, factor_T1)

    def pull(self, place: int | None, slope_TP: Tensor, factor_T1: Tensor) -> None:
        """Adds slopes by the positives' differences from one positive, times a factor of each anchor."""
        self._add(self.slope_TP, place, slope_TP, factor_T1)

    def _add(self, by_reference: Tensor, place: int | None, slope: Tensor, factor_T1: Tensor) -> None:
        by_reference.addcmul_(slope, factor_T1, value=-1 / self.tau)
        if place is not None:
            own_T1 = self.slope_TP[:, place, None]
            own_T1.addcmul_(slope.sum(1, keepdim=True), factor_T1, value=1 / self.tau)

    def terms(self, total: Tensor) -> RowTerms:
        """The tile's sum with the slopes by its distances."""
        by_band_TQ = self.slope_TP.new_zeros(self.num_anchors, self.num_band)
        by_band_TQ.scatter_add_(1, self.place_TP, self.slope_TP)
        return RowTerms(total, self.num_anchors, self.slope_TM, by_band_TQ)


def slopes_of(g: Tensor) -> Tensor:
    """The slopes g (1 - g) of sigmoids, in their memory."""
    return g.addcmul_(g, g, value=-1)


def excess_over(x_TM: Tensor, low: float, out_TM: Tensor) -> Tensor:
    """max(0, x - low), in the memory of ``out_TM``."""
    return torch.sub(x_TM, low, out=out_TM).clamp_(min=0)


def integers(parameter: str, value: str) -> tuple[int, ...]:
    """The integers of a text such as '1 2 4', in order; raises ValueError unless they are positive and differ."""
    words = value.split()
    found = sorted({int(word) for word in words if word.isascii() and word.isdecimal()})
    if not found or len(found) < len(words) or found[0] < 1 or found[-1] > LARGEST:
        raise ValueError(
            f"{parameter}={shown(value)} must be different integers of 1 to {LARGEST}, like '1 2 4'"
        )
    return tuple(found)


def virtual_rows(batch: Embeddings) -> Embeddings:
    """A row a z_i + (1 - a) z_j for each two images of one class, i the one of the smaller id, in order of (label, id).

    The weight a, in [0, 1), is a hash of the batch's images and the pair, and so is the row's id: the same whatever the
    order of the batch. Two rows of one image give no virtual row, and their rows with a third image have one id.
    """
    (z_ND,) = full_precision(batch.z_ND)
    device = z_ND.device
    order_N = order_of(batch)
    y_N, id_N = batch.labels.rows(order_N)
    place_N = torch.arange(len(y_N), device=y_N.device)
    later_N = torch.searchsorted(y_N, y_N, right=True) - place_N - 1  # rows of one's class behind one
    first_V = place_N.repeat_interleave(later_N)
    begin_N = later_N.cumsum(0) - later_N
    second_V = torch.arange(len(first_V), device=y_N.device) - begin_N[first_V] + first_V + 1
    differ_V = id_N[first_V] != id_N[second_V]
    first_V, second_V = first_V[differ_V], second_V[differ_V]
    hash_V = scrambled(scrambled(scrambled(id_N.sum()) + id_N[first_V]) + id_N[second_V])
    a_V1 = placed(unit_interval(scrambled(hash_V))[:, None].to(z_ND.dtype), device)
    first_VD, second_VD = (z_ND[placed(order_N[place_V], device)] for place_V in (first_V, second_V))
    return labelled(a_V1 * first_VD + (1 - a_V1) * second_VD, Labels(y_N[first_V], hash_V))


def joined(rows: Embeddings, others: Embeddings) -> Embeddings:
    """The rows, then the others, in full precision."""
    z_ND = torch.cat(full_precision(rows.z_ND, others.z_ND))
    y_N, id_N = torch.cat([rows.y_N, others.y_N]), torch.cat([rows.id_N, others.id_N])
    on_host = None
    if rows.on_host is not None and others.on_host is not None:
        on_host = Labels(*(torch.cat(both) for both in zip(rows.on_host, others.on_host, strict=True)))
    return Embeddings(z_ND, y_N, id_N, on_host=on_host)
