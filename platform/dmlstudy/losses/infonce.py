"""Losses that take the pairs of a batch for classification: SupCon (labelled InfoNCE) and SigLIP on labels.

Shapes: B anchors on this rank, M references, T anchors in a tile, Q references in the tile's band.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dmlstudy.losses.distances import Cosine, Distance, cosine
from dmlstudy.losses.forms import Factors, Form, Logit, Sums
from dmlstudy.losses.interface import Embeddings, LossSum, World
from dmlstudy.losses.pairs import each_against_negatives, log_sum_exp, softplus_sum
from dmlstudy.losses.parameters import above, choice
from dmlstudy.losses.tiles import RowLoss, RowTerms, Tile

LARGEST_SCALE = 100.0
"""A learned scale stays in [1, 100], as in CLIP (Radford et al. 2021)."""


class SupCon(RowLoss):
    """Supervised contrastive loss: each positive against all other images (Khosla et al. 2020, Eq. 2, L_out).

    L_i = log sum_{a in A(i)} e^{l_ia} - (1/|pos(i)|) sum_{pos(i)} l_ij, logits l = -d/T, T = ``temperature``,
    A(i) = pos(i) and neg(i). By cosine distance l is S/T up to a constant, which cancels.

    ``denominator='negatives'`` is the normalised temperature-scaled form (NT-Xent; Chen et al. 2020) for any number
    of positives: L_i = (1/|pos(i)|) sum_{pos(i)} log(1 + sum_{neg(i)} e^{l_ik - l_ij}).

    With ``learn`` the scale 1/T is a parameter, kept as ln(1/T) and within 1..100.

    The count is the number of anchors, or of those that have a positive (``average='with_positive'``). An anchor
    without positives gives 0; without negatives 'all' runs over the positives alone, and 'negatives' gives 0.

    Raises ValueError unless temperature > 0 (0.01 to 1 with ``learn``), and for unknown names.
    """

    has_kernels = True

    def __init__(
        self,
        temperature: float = 0.1,
        learn: bool = False,
        denominator: str = "all",
        average: str = "anchors",
        distance: Distance = cosine,
    ) -> None:
        super().__init__(distance)
        self.temperature = above("temperature", temperature, 0)
        self.log_scale = _log_scale("temperature", temperature, 1 / temperature) if learn else None
        self.over_all = choice("denominator", denominator, {"all": True, "negatives": False})
        self.counts_all = choice("average", average, {"anchors": True, "with_positive": False})

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum of L_i over the anchors, and the number that counts."""
        _keep_in_range(self.log_scale)
        return super().terms(anchors, references, world)

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and the number that counts."""
        scale = 1 / self.temperature if self.log_scale is None else self.log_scale.detach().exp()
        positive = rows.positive
        share_TQ = positive.chosen.to(positive.d.dtype)
        number_T1 = share_TQ.sum(1, keepdim=True)
        share_TQ /= number_T1.clamp(min=1)
        if self.over_all:
            terms = self._against_all(rows, share_TQ, number_T1 > 0, scale)
        else:
            terms = each_against_negatives(rows, share_TQ, scale)
        terms = terms._replace(count=len(rows.y_T) if self.counts_all else (number_T1 > 0).sum())
        if self.log_scale is None:
            return terms
        slope_TM = _of_whole_rows(terms, rows)
        by_log_scale = (slope_TM * rows.d_TM).sum()  # dL/d ln s = sum_j dL/dd_ij d_ij
        return RowTerms(terms.total, terms.count, slope_TM, None, [by_log_scale.to(self.log_scale.dtype)])

    def _against_all(
        self, rows: Tile, share_TQ: Tensor, has_positive_T1: Tensor, scale: Tensor | float
    ) -> RowTerms:
        """The sum over the tile with its slopes; ``share_TQ`` is 1/|pos(i)| at positives, and the count is 0."""
        others = log_sum_exp(rows.d_TM * -scale, rows.others.chosen & has_positive_T1)
        pulled = scale * (share_TQ * rows.positive.d).sum()
        total = others.log_T1.masked_fill(~has_positive_T1, 0).sum() + pulled
        return RowTerms(total, 0, others.powers.mul_(-scale / others.sum_T1), share_TQ.mul_(scale))

    def form(self) -> Form | None:
        """One logarithm of a sum of exponentials over both signs, and a mean; not of a learned scale."""
        if self.log_scale is not None or not self.over_all or type(self.distance) is not Cosine:
            return None
        scale = 1 / self.temperature
        return Form("exponential", Logit(-scale, 0.0), Logit(scale, 0.0), self._factors)

    def _factors(self, sums: Sums) -> Factors:
        scale, has_positive_T = 1 / self.temperature, sums.num_pulls_T > 0
        log_T = torch.logaddexp(sums.pull_T, sums.push_T)
        by_line_T = scale / sums.num_pulls_T.clamp(min=1)
        total = torch.where(has_positive_T, log_T + by_line_T * sums.line_T, 0).sum()
        by_pull_T, by_push_T = (
            torch.where(has_positive_T, (each_T - log_T).exp(), 0) for each_T in (sums.pull_T, sums.push_T)
        )
        count = len(log_T) if self.counts_all else has_positive_T.sum().to(total.dtype)
        return Factors(total, count, by_pull_T, by_push_T, by_line_T)


class SigLIP(RowLoss):
    """Pairwise sigmoid loss on labels: each pair is a yes or a no by itself (Zhai et al. 2023, Eq. 1).

    L_i = sum_{pos(i)} log(1 + e^{-u_ij}) + sum_{neg(i)} log(1 + e^{u_ik}), u = scale S + bias, S = z_i.z_j of
    unit vectors. It is a sum over references, as in the paper: its value grows with their number.

    With ``learn`` scale (as its logarithm, within 1..100) and bias are parameters.

    The count is the number of anchors; an anchor without positives only pushes. Raises ValueError unless
    scale > 0 (1 to 100 with ``learn``) and bias is finite.
    """

    is_symmetric = True

    def __init__(self, scale: float = 10.0, bias: float = -10.0, learn: bool = True) -> None:
        super().__init__(cosine)
        self.scale = above("scale", scale, 0)
        if not math.isfinite(bias):
            raise ValueError(f"bias={bias} must be a finite number; -10 is usual")
        self.bias = bias
        self.log_scale = _log_scale("scale", scale, scale) if learn else None
        self.learned_bias = nn.Parameter(torch.tensor(float(bias))) if learn else None

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum of L_i over the anchors, and their number."""
        _keep_in_range(self.log_scale)
        return super().terms(anchors, references, world)

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        scale: Tensor | float = self.scale
        bias: Tensor | float = self.bias
        if self.log_scale is not None and self.learned_bias is not None:
            scale, bias = self.log_scale.detach().exp(), self.learned_bias.detach()
        positive, negative, middle = rows.positive, rows.negative, 1 + bias / scale  # u = scale (middle - d)
        push, push_TM = softplus_sum(middle - negative.d, negative.chosen, scale)
        pull, pull_TQ = softplus_sum(positive.d - middle, positive.chosen, scale)
        by_bias = (push_TM.sum() - pull_TQ.sum()) / scale
        terms = RowTerms(push + pull, len(rows.y_T), push_TM.neg_(), pull_TQ)
        if self.log_scale is None:
            return terms
        slope_TM = _of_whole_rows(terms, rows)
        by_log_scale = (slope_TM * (rows.d_TM - 1)).sum()  # S = 1 - d
        slopes = [by_log_scale.to(self.log_scale.dtype), by_bias.to(self.log_scale.dtype)]
        return RowTerms(terms.total, terms.count, slope_TM, None, slopes)


def _of_whole_rows(terms: RowTerms, rows: Tile) -> Tensor:
    """The slopes by all of the tile's distances as one tensor, in the memory of ``terms``."""
    if terms.band_slope_TQ is not None:
        terms.slope_TM[:, rows.band] += terms.band_slope_TQ
    return terms.slope_TM


def _log_scale(parameter: str, value: float, scale: float) -> nn.Parameter:
    """A learned scale as its logarithm; raises ValueError, naming the ``parameter``, unless it lies in 1..100."""
    if not scale * (1 + 1e-12) >= 1 or scale > LARGEST_SCALE * (1 + 1e-12):
        low, high = (1 / LARGEST_SCALE, 1) if parameter == "temperature" else (1, LARGEST_SCALE)
        raise ValueError(f"{parameter}={value} must lie in {low:g}..{high:g} where it is learned")
    return nn.Parameter(torch.tensor(math.log(scale)))


def _keep_in_range(log_scale: nn.Parameter | None) -> None:
    """Bring a learned scale back into 1..100, in place, as an optimiser's step may have left it."""
    if log_scale is not None:
        log_scale.data.clamp_(0, math.log(LARGEST_SCALE))
