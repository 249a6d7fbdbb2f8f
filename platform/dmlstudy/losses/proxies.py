"""Losses against learned proxies: ProxyNCA, Proxy-Anchor and SoftTriple; ``class_softmax`` has the others.

Shapes: B anchors on this rank, M references (the global batch), D embedding size, C classes, K centres of
one class. Embeddings z are unit vectors; proxies are learned, start uniform on the sphere from ``seed``
alone, and are normalised in the forward pass. Everything is computed in float32 at least.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy.losses.distances import SQUARED_FLOOR, squared_euclidean
from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World, check_classes, per_anchor
from dmlstudy.losses.pairs import log_sum_exp
from dmlstudy.losses.parameters import above, at_least
from dmlstudy.losses.products import add_product, factor
from dmlstudy.losses.tiles import Swept, cut, in_one_sweep, padded, tile_height

BLOCK = 4096
"""Classes whose first vectors are drawn at once where each rank keeps a share.

PyTorch draws 16 numbers together. Blocks of a multiple of them are the same numbers as one draw of all, if what is left
at the end is in the last one.
"""


class ProxyLoss(Loss):
    """A loss with learned vectors for each class; a subclass says what ``_terms`` are in full precision."""

    has_precision = True

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        self.num_classes = int(at_least("num_classes", num_classes, 1))
        self.dim = int(at_least("dim", dim, 1))

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """``_terms`` in float32 at least; ValueError for labels beyond the classes or another size D."""
        check_classes(anchors, self.num_classes)
        if references is not anchors:
            check_classes(references, self.num_classes)
        size = next(self.parameters()).shape[-1]
        if anchors.z_ND.shape[1] != size:
            raise ValueError(
                f"embeddings have size {anchors.z_ND.shape[1]}, proxies {size}; "
                "build the loss with dim = the embedder's size"
            )
        tensors = (anchors.z_ND, references.z_ND, *self.parameters())
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
        with torch.autocast(anchors.z_ND.device.type, enabled=False):
            return self._terms(
                _in(dtype, anchors),
                _in(dtype, references),
                world,
            )

    @abstractmethod
    def _terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """The loss's ``terms`` for embeddings of one dtype, the dtype to compute in."""


class ProxyNCA(ProxyLoss):
    """ProxyNCA: own proxy against the sum over all others (Movshovitz-Attias et al. 2017, Eq. 4).

    L_i = -log( e^{-d(z_i,p_y)/T} / sum_{c != y} e^{-d(z_i,p_c)/T} ), d = ||z - p||^2, T = ``temperature``.

    The own proxy is not in the denominator, so L_i may be negative. With one class there is no denominator: the
    term is 0, with zero gradients. References are ignored.

    The count is the number of anchors. Raises ValueError unless T > 0, labels lie in 0..C-1 and z has size
    ``dim``.
    """

    def __init__(self, num_classes: int, dim: int, temperature: float = 1.0, seed: int = 0) -> None:
        super().__init__(num_classes, dim)
        self.temperature = above("temperature", temperature, 0)
        self.proxies_CD = unit_vectors(seed, self.num_classes, self.dim)

    def _terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        z_BD, proxies_CD = anchors.z_ND, _normalized(self.proxies_CD, anchors)
        total, _ = in_one_sweep(
            lambda wanted: self._sweep(z_BD.detach(), proxies_CD.detach(), anchors.y_N, wanted),
            [z_BD, proxies_CD],
        )
        return per_anchor(total, anchors)

    def _sweep(self, z_BD: Tensor, proxies_CD: Tensor, y_B: Tensor, wanted: bool) -> Swept:
        """The anchors in tiles against all proxies."""
        distance = squared_euclidean
        left_BF, right_CF = padded(distance.left(z_BD)), padded(distance.right(proxies_CD))
        left, right = factor(left_BF, self.product), factor(right_CF, self.product)
        by_left_BF, by_right_CF = torch.zeros_like(left_BF), torch.zeros_like(right_CF)
        total, num_features = z_BD.new_zeros(()), z_BD.shape[1] + 2
        for rows in cut(z_BD, self.num_classes) if self.num_classes > 1 else ():
            own_T1 = y_B[rows, None]
            d_TC = distance.of(left.rows(rows).times(right)).div_(self.temperature)
            total += d_TC.gather(1, own_T1).sum()
            others_TC = torch.ones_like(d_TC, dtype=torch.bool).scatter_(1, own_T1, False)
            others = log_sum_exp(d_TC.neg_(), others_TC)
            total += others.log_T1.sum()
            if not wanted:
                continue
            slope_TC = others.powers.div_(others.sum_T1).neg_().scatter_(1, own_T1, 1.0)
            parts = right.parts(slope_TC.div_(self.temperature))
            by_left_BF[rows] = right.weighted(parts)
            left.rows(rows).add_weighted(by_right_CF, parts)
        by_z_BD = distance.left_gradient(by_left_BF[:, :num_features], z_BD)
        by_proxy_CD = distance.right_gradient(by_right_CF[:, :num_features], proxies_CD)
        return total, total.new_full((), len(z_BD)), [by_z_BD, by_proxy_CD]


class ProxyAnchor(ProxyLoss):
    """Proxy-Anchor: each proxy pulls its images and pushes all others (Kim et al. 2020, Eq. 4).

    L = (1/|C+|) sum_{c in C+} log(1 + sum_{y_j = c} e^{-alpha (S_cj - delta)})
      + (1/C) sum_c log(1 + sum_{y_j != c} e^{alpha (S_cj + delta)}), S_cj = p_c.z_j, C+ the classes with an
    image among the references.

    It is a sum over proxies, not anchors: each rank takes its share of the proxies against all references and counts
    that share, so all ranks together count 1. An empty set gives log 1 = 0, an empty batch or share a zero.

    Raises ValueError unless alpha > 0, delta >= -1, labels lie in 0..C-1 and z has size ``dim``.
    """

    def __init__(
        self, num_classes: int, dim: int, alpha: float = 32.0, delta: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__(num_classes, dim)
        self.alpha = above("alpha", alpha, 0)
        self.delta = at_least("delta", delta, -1)
        self.proxies_CD = unit_vectors(seed, self.num_classes, self.dim)

    def _terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        share = world.share(self.num_classes)
        y_M, classes_C = references.y_N, torch.arange(self.num_classes, device=references.y_N.device)
        num_present = torch.zeros_like(classes_C).index_fill_(0, y_M, 1).sum().clamp(min=1)
        proxies_CD, z_MD = _normalized(self.proxies_CD[share], references), references.z_ND
        total, _ = in_one_sweep(
            lambda wanted: self._sweep(
                proxies_CD.detach(), z_MD.detach(), classes_C[share], y_M, num_present, wanted
            ),
            [proxies_CD, z_MD],
        )
        on_the_graph = anchors.z_ND[:0].sum()
        return LossSum(total + on_the_graph, total.new_full((), len(proxies_CD) / self.num_classes))

    def _sweep(
        self,
        proxies_CD: Tensor,
        z_MD: Tensor,
        classes_C: Tensor,
        y_M: Tensor,
        num_present: Tensor,
        wanted: bool,
    ) -> Swept:
        """A share's proxies in tiles against all references."""
        left_CF, right_MF = padded(proxies_CD), padded(z_MD)
        left, right = factor(left_CF, self.product), factor(right_MF, self.product)
        by_left_CF, by_right_MF = torch.zeros_like(left_CF), torch.zeros_like(right_MF)
        total, dim = z_MD.new_zeros(()), z_MD.shape[1]
        for rows in cut(proxies_CD, len(z_MD)):
            s_TM = left.rows(rows).times(right)
            positive_TM = classes_C[rows, None] == y_M
            pull = log_sum_exp((self.delta - s_TM).mul_(self.alpha), positive_TM, plus_one=True)
            push = log_sum_exp(s_TM.add_(self.delta).mul_(self.alpha), ~positive_TM, plus_one=True)
            total += pull.log_T1.sum() / num_present + push.log_T1.sum() / self.num_classes
            if not wanted:
                continue
            slope_TM = push.powers.mul_(self.alpha / self.num_classes / push.sum_T1)
            slope_TM -= pull.powers.mul_(self.alpha / num_present / pull.sum_T1)
            parts = right.parts(slope_TM)
            by_left_CF[rows] = right.weighted(parts)
            left.rows(rows).add_weighted(by_right_MF, parts)
        return total, total.new_zeros(()), [by_left_CF[:, :dim], by_right_MF[:, :dim]]


class SoftTriple(ProxyLoss):
    """SoftTriple: classification with several centres per class (Qian et al. 2019, Eq. 7-9).

    S_ic = sum_k softmax_k(z_i.w_ck / gamma) z_i.w_ck, K = ``centers``;
    L_i = -log( e^{scale (S_iy - margin)} / (e^{scale (S_iy - margin)} + sum_{c != y} e^{scale S_ic}) )
        + tau / (C K (K-1)) sum_c sum_{t > s} sqrt(2 + 1e-5 - 2 w_cs.w_ct), as in the authors' code.

    The second part, 0 for K = 1, draws a class's centres together. It is the same in every anchor's term,
    so it enters the mean once at any number of ranks. With one class only it remains; without anchors the
    sum is 0. References are ignored.

    The count is the number of anchors. Raises ValueError unless scale, gamma > 0, tau, margin >= 0, K >= 1,
    labels lie in 0..C-1 and z has size ``dim``.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 20.0,
        gamma: float = 0.1,
        tau: float = 0.2,
        margin: float = 0.01,
        centers: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__(num_classes, dim)
        self.scale = above("scale", scale, 0)
        self.gamma = above("gamma", gamma, 0)
        self.tau = at_least("tau", tau, 0)
        self.margin = at_least("margin", margin, 0)
        centers = int(at_least("centers", centers, 1))
        self.centers_CKD = unit_vectors(seed, self.num_classes, centers, self.dim)

    def _terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        w_CKD = _normalized(self.centers_CKD, anchors)
        z_BD, w_ED = anchors.z_ND, w_CKD.flatten(0, 1)
        total, count = in_one_sweep(
            lambda wanted: self._sweep(z_BD.detach(), w_ED.detach(), anchors.y_N, wanted), [z_BD, w_ED]
        )
        return LossSum(total + count * self.tau * self._spread(w_CKD), count)

    def _sweep(self, z_BD: Tensor, w_ED: Tensor, y_B: Tensor, wanted: bool) -> Swept:
        """Cross-entropy of the anchors in tiles, with slopes in closed form; E = C K centres, class by class."""
        slope_BD, slope_ED = torch.zeros_like(z_BD), torch.zeros_like(w_ED)
        total = z_BD.new_zeros(())
        # Each tile adds to all of slope_ED, so a very low one would do little else.
        height = max(128, tile_height(len(w_ED), z_BD.element_size(), z_BD.device))
        for start in range(0, len(z_BD), height):
            z_TD, own_T1 = z_BD[start : start + height], y_B[start : start + height, None]
            s_TCK = self.product(z_TD, w_ED.T).view(len(z_TD), self.num_classes, -1)
            share_TCK = (s_TCK / self.gamma).softmax(2)
            s_TC = (share_TCK * s_TCK).sum(2)
            logits_TC = self.scale * s_TC
            logits_TC.scatter_add_(1, own_T1, logits_TC.new_full(own_T1.shape, -self.scale * self.margin))
            log_p_TC = logits_TC.log_softmax(1)
            total -= log_p_TC.gather(1, own_T1).sum()
            if not wanted:
                continue
            slope_TC = log_p_TC.exp_()
            slope_TC.scatter_add_(1, own_T1, -torch.ones_like(slope_TC[:, :1])).mul_(self.scale)
            # dS_ic / ds_ick = share (1 + (s - S) / gamma)
            slope_TCK = s_TCK.sub_(s_TC[:, :, None]).div_(self.gamma).add_(1).mul_(share_TCK)
            slope_TE = slope_TCK.mul_(slope_TC[:, :, None]).flatten(1)
            slope_BD[start : start + height] = self.product(slope_TE, w_ED)
            add_product(slope_ED, slope_TE.T, z_TD, self.product)
        return total, total.new_full((), len(z_BD)), [slope_BD, slope_ED]

    def _spread(self, w_CKD: Tensor) -> Tensor:
        """Half the mean distance of two centres of one class, smoothed at 0; 0 for one centre."""
        num_classes, num_centers, _ = w_CKD.shape
        d_CKK = (2 + 1e-5 - 2 * (w_CKD @ w_CKD.mT)).clamp(min=SQUARED_FLOOR).sqrt()
        return d_CKK.triu(1).sum() / max(1, num_classes * num_centers * (num_centers - 1))


def unit_vectors(seed: int, *shape: int, share: slice | None = None) -> nn.Parameter:
    """A parameter of vectors drawn uniformly on the unit sphere, from the seed alone.

    With ``share`` it holds these of the first dimension's alone, the same numbers as in the whole, of which there is
    never more than a block in memory.
    """
    generator = torch.Generator().manual_seed(seed)
    if share is None:
        return nn.Parameter(functional.normalize(torch.randn(shape, generator=generator), dim=-1))
    num_classes, *of_class = shape
    kept = torch.empty(share.stop - share.start, *of_class)
    for start in range(0, max(BLOCK, num_classes - BLOCK + 1), BLOCK):
        is_last = num_classes - start < 2 * BLOCK
        rows = torch.randn(num_classes - start if is_last else BLOCK, *of_class, generator=generator)
        first, last = max(start, share.start), min(start + len(rows), share.stop)
        if first < last:
            own = functional.normalize(rows[first - start : last - start], dim=-1)
            kept[first - share.start : last - share.start] = own
    return nn.Parameter(kept)


def _normalized(proxies: Tensor, embeddings: Embeddings) -> Tensor:
    """The proxies as unit vectors, in the embeddings' dtype."""
    return functional.normalize(proxies.to(embeddings.z_ND.dtype), dim=-1)


def _in(dtype: torch.dtype, embeddings: Embeddings) -> Embeddings:
    norm_N = None if embeddings.norm_N is None else embeddings.norm_N.to(dtype)
    return embeddings._replace(z_ND=embeddings.z_ND.to(dtype), norm_N=norm_N)
