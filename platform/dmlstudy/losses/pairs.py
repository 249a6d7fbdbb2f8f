"""Pair losses of the textbooks: each is a function of an anchor's positive and negative distances.

Shapes: B anchors on this rank, M references, T anchors in a tile, Q references in the tile's band, P most
positives of any anchor, D embedding size, C classes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy.losses.distances import cosine, euclidean, full_precision
from dmlstudy.losses.forms import Factors, Form, Logit, Sums
from dmlstudy.losses.interface import Embeddings, LossSum, World, check_classes
from dmlstudy.losses.mining import (
    NegativeDraw,
    SimilarityRule,
    only_nearest,
    positives_in_columns,
)
from dmlstudy.losses.pair_weighting import PairWeighting
from dmlstudy.losses.parameters import above, at_least, choice
from dmlstudy.losses.plan import order_of, plan_of
from dmlstudy.losses.products import add_product, differentiable, factor_last, scaled_sum
from dmlstudy.losses.tiles import (
    Layout,
    Pieces,
    RowLoss,
    RowTerms,
    Side,
    Swept,
    Tile,
    TiledLoss,
    in_one_sweep,
    in_tiles,
    row_values,
)
from dmlstudy.losses.weighting import Exponential
from dmlstudy.transfers import placed


class MultiSimilarity(RowLoss):
    """Multi-similarity in cosine, with its miner (Wang et al. 2019; GPW Eq. 17).

    L_i = (1/alpha) log(1 + sum_{P_i} e^{-alpha(S_ij-lambda)}) + (1/beta) log(1 + sum_{N_i}
    e^{beta(S_ik-lambda)}), S = z_i.z_j of unit vectors, lambda = ``threshold``; P_i: S_ij <= max_{neg(i)}
    S + epsilon, N_i: S_ik >= min_{pos(i)} S - epsilon.

    The count is the number of anchors; an empty set gives log 1 = 0. Raises ValueError unless alpha, beta > 0,
    epsilon >= 0 and threshold >= -1.
    """

    has_kernels = True

    def __init__(
        self, alpha: float = 2.0, beta: float = 50.0, threshold: float = 0.5, epsilon: float = 0.1
    ) -> None:
        super().__init__(cosine)
        self.alpha = above("alpha", alpha, 0)
        self.beta = above("beta", beta, 0)
        self.threshold = at_least("threshold", threshold, -1)
        self.rule = SimilarityRule(at_least("epsilon", epsilon, 0))

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        positive, negative = rows.positive, rows.negative
        pull_TQ, push_TM = self.rule(positive, negative)
        # In cosine distance d = 1 - S: pull where d is large, push where it is small.
        middle = 1 - self.threshold
        pull = log_sum_exp((positive.d - middle).mul_(self.alpha), pull_TQ, plus_one=True)
        push = log_sum_exp((middle - negative.d).mul_(self.beta), push_TM, plus_one=True)
        total = pull.log_T1.sum() / self.alpha + push.log_T1.sum() / self.beta
        return RowTerms(total, len(rows.y_T), push.powers.div_(-push.sum_T1), pull.powers.div_(pull.sum_T1))

    def form(self) -> Form:
        """Two logarithms of 1 + a sum of exponentials."""
        middle = 1 - self.threshold
        pull, push = Logit(self.alpha, middle), Logit(self.beta, middle)
        return Form("exponential", pull, push, self._factors, epsilon=self.rule.epsilon)

    def _factors(self, sums: Sums) -> Factors:
        total = functional.softplus(sums.pull_T, threshold=LINEAR).sum() / self.alpha
        total += functional.softplus(sums.push_T, threshold=LINEAR).sum() / self.beta
        by_pull_T, by_push_T = sums.pull_T.sigmoid() / self.alpha, sums.push_T.sigmoid() / self.beta
        return Factors(total, len(sums.pull_T), by_pull_T, by_push_T)


class MultiSimilarityDistance(RowLoss):
    """Multi-similarity in Euclidean distance, with its miner (GPW Eq. 17, Sec. IV-B5).

    v1: L_i = (1/alpha) log(1 + sum_{P_i} e^{alpha(D_ij-m)}) + (1/beta) log(1 + sum_{N_i} e^{beta(m-D_ik)});
    v2: the same without the two "1 +". P_i: D_ij >= min_{neg(i)} D - epsilon, N_i: D_ik <= max_{pos(i)} D +
    epsilon (Eq. 24-25).

    The count is the number of anchors; the term of an empty set is 0. Raises ValueError unless alpha, beta > 0,
    margin, epsilon >= 0, and for an unknown version.
    """

    def __init__(
        self,
        alpha: float = 2.0,
        beta: float = 50.0,
        margin: float = 1.0,
        epsilon: float = 0.1,
        version: str = "v1",
    ) -> None:
        super().__init__(euclidean)
        self.alpha = above("alpha", alpha, 0)
        self.beta = above("beta", beta, 0)
        self.margin = at_least("margin", margin, 0)
        self.rule = SimilarityRule(at_least("epsilon", epsilon, 0))
        self.plus_one = choice("version", version, {"v1": True, "v2": False})

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        positive, negative = rows.positive, rows.negative
        pull_TQ, push_TM = self.rule(positive, negative)
        pull = log_sum_exp((positive.d - self.margin).mul_(self.alpha), pull_TQ, self.plus_one)
        push = log_sum_exp((self.margin - negative.d).mul_(self.beta), push_TM, self.plus_one)
        total = _where_any(pull.log_T1).sum() / self.alpha + _where_any(push.log_T1).sum() / self.beta
        return RowTerms(total, len(rows.y_T), push.powers.div_(-push.sum_T1), pull.powers.div_(pull.sum_T1))


class BinomialDeviance(RowLoss):
    """Binomial deviance in cosine, means over all positive and all negative pairs (CGML Eq. 7).

    L = mean_{(i,j) positive} log(1 + e^{-alpha (S_ij - beta)})
      + mean_{(i,k) negative} log(1 + e^{eta alpha (S_ik - beta)}), eta = ``negative_weight``.

    The means run over the pairs of all ranks, whose numbers follow from labels and ids. The total is
    (sum_pos / number_pos + sum_neg / number_neg) times the number of all ranks' anchors, so that total / count is L.
    It is a sum over anchors for given numbers of pairs only.

    The count is the number of own anchors. The mean over a sign without pairs is 0. Raises ValueError unless
    alpha, negative_weight > 0 and beta >= -1.
    """

    has_kernels = True
    is_symmetric = True

    def __init__(self, alpha: float = 2.0, beta: float = 0.5, negative_weight: float = 25.0) -> None:
        super().__init__(cosine)
        self.alpha = above("alpha", alpha, 0)
        self.beta = at_least("beta", beta, -1)
        self.negative_weight = above("negative_weight", negative_weight, 0)
        self._scales_2 = torch.zeros(2)  # of the batch at hand

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """The scaled sums over the anchors' pairs, and the number of anchors."""
        positives_B, negatives_B = plan_of(anchors, references).pair_numbers
        numbers_3B = torch.stack([positives_B, negatives_B, torch.ones_like(positives_B)])
        numbers_3 = world.sum(placed(numbers_3B.sum(1).double(), anchors.z_ND.device))
        self._scales_2 = numbers_3[2] / numbers_3[:2].clamp(min=1)
        return super().terms(anchors, references, world)

    def rows(self, rows: Tile) -> RowTerms:
        """Scaled sum over the pairs of the tile's anchors, and their number."""
        positive, negative = rows.positive, rows.negative
        middle = 1 - self.beta
        pull, pull_slope_TQ = softplus_sum(positive.d - middle, positive.chosen, self.alpha)
        push, push_slope_TM = softplus_sum(
            middle - negative.d, negative.chosen, self.negative_weight * self.alpha
        )
        by_pulls, by_pushes = self._scales_2.to(rows.d_TM.dtype)
        total = pull * by_pulls + push * by_pushes
        return RowTerms(total, len(rows.y_T), push_slope_TM.mul_(-by_pushes), pull_slope_TQ.mul_(by_pulls))

    def form(self) -> Form:
        """Two sums of soft hinges."""
        middle = 1 - self.beta
        pull, push = Logit(self.alpha, middle), Logit(self.negative_weight * self.alpha, middle)
        return Form("softplus", pull, push, self._factors)

    def _factors(self, sums: Sums) -> Factors:
        by_pulls, by_pushes = self._scales_2.to(sums.pull_T)
        total = sums.pull_T.sum() * by_pulls + sums.push_T.sum() * by_pushes
        num_anchors = len(sums.pull_T)
        return Factors(total, num_anchors, by_pulls.repeat(num_anchors), by_pushes.repeat(num_anchors))


class Margin(RowLoss):
    """Margin loss with a learned boundary per class (Wu et al. 2017, Eq. 6-7).

    [D_ij - beta_{y_i} + alpha]_+ for positives and [beta_{y_i} - D_ik + alpha]_+ for negatives, beta_C a
    parameter that starts at ``beta``. Mining 'all' takes all pairs; 'distance_weighted' all positive pairs,
    and for each one negative drawn with probability ~ 1/q(D) (``mining.DistanceWeighted``).

    ``nu`` adds nu sum_{(i,j) positive} beta_{y_i}, once per positive pair as in the authors' and
    pytorch-metric-learning's sum over triplets.

    The count is the number of terms above 0; where no rank has any, the sum is 0. Raises ValueError unless alpha,
    beta, nu >= 0 and labels lie in 0..C-1.
    """

    def __init__(
        self,
        num_classes: int,
        alpha: float = 0.2,
        beta: float = 1.2,
        nu: float = 0.0,
        negatives: NegativeDraw | None = None,
    ) -> None:
        super().__init__(euclidean)
        self.num_classes = int(at_least("num_classes", num_classes, 1))
        self.alpha = at_least("alpha", alpha, 0)
        self.beta_C = nn.Parameter(torch.full((self.num_classes,), float(at_least("beta", beta, 0))))
        self.nu = at_least("nu", nu, 0)
        self.negatives = negatives

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum of the pairs' terms and what ``nu`` adds, and the number of the terms above 0."""
        check_classes(anchors, self.num_classes)
        check_classes(references, self.num_classes)  # so that all ranks refuse a label together
        total, count = super().terms(anchors, references, world)
        if self.nu > 0:
            positives_B, _ = plan_of(anchors, references).pair_numbers
            positives_B = placed(positives_B, total.device)
            beta_B = self.beta_C[anchors.y_N].to(total.dtype)
            reached = world.sum(count.detach()) > 0
            total = total + self.nu * (beta_B * positives_B).sum() * reached
        return LossSum(total, count)

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of the tile's pairs' terms, and the number of those above 0."""
        beta_T1 = self.beta_C.detach()[rows.y_T, None].to(rows.d_TM.dtype)
        positive = rows.positive
        pull_TQ = (positive.d - (beta_T1 - self.alpha)).clamp_(min=0).mul_(positive.chosen)
        total = pull_TQ.sum()
        pulled_TQ = pull_TQ.sign_()
        if self.negatives is not None:
            draw = self.negatives.draw(rows, rows.d_TM)
            push = Side(rows.d_TM.gather(1, draw.column_TP), draw.drawn_TP)
        else:
            push = rows.negative
        hinge = (beta_T1 + self.alpha - push.d).clamp_(min=0).mul_(push.chosen)
        total += hinge.sum()
        pushed = hinge.sign_()
        pulled_T, pushed_T = pulled_TQ.sum(1), pushed.sum(1)
        slope_C = torch.zeros_like(self.beta_C.detach())
        slope_C.index_add_(0, rows.y_T, (pushed_T - pulled_T).to(slope_C.dtype))
        slope_TM = pushed.neg_()
        if self.negatives is not None:
            slope_TM = torch.zeros_like(rows.d_TM).scatter_add_(1, draw.column_TP, slope_TM)
        return RowTerms(total, (pulled_T + pushed_T).sum(), slope_TM, pulled_TQ, (slope_C,))


class RankedList(PairWeighting):
    """Ranked list: pairs beyond their margins, exponentially weighted (Wang et al. 2019, Eq. 3-9).

    L_i = (1 - imbalance) mean_{P_i} (D_ij - (alpha - margin)) + imbalance mean_{N_i} (alpha - D_ik), means with
    weights e^{Tp (D - (alpha - margin))} and e^{Tn (alpha - D)} through which the gradient flows, Tp and Tn the
    temperatures. P_i: D_ij > alpha - margin, N_i: D_ik < alpha.

    With imbalance 0.5 it is half of GPW's exponential pair form with undetached weights.

    The count is the number of anchors; an empty set gives 0. Raises ValueError unless 0 <= margin <= alpha,
    temperatures >= 0 and 0 <= imbalance <= 1.
    """

    def __init__(
        self,
        alpha: float = 1.2,
        margin: float = 0.4,
        negative_temperature: float = 10.0,
        positive_temperature: float = 0.0,
        imbalance: float = 0.5,
    ) -> None:
        at_least("alpha", alpha, at_least("margin", margin, 0))
        at_least("positive_temperature", positive_temperature, 0)
        at_least("negative_temperature", negative_temperature, 0)
        super().__init__(
            positive_margin=alpha - margin,
            negative_margin=alpha,
            positive_weighting=Exponential(positive_temperature),
            negative_weighting=Exponential(negative_temperature),
            detach_weights=False,
        )
        if not 0 <= imbalance <= 1:
            raise ValueError(f"imbalance={imbalance} must lie in 0..1: the negatives' share of the loss")
        self.imbalance = imbalance

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        positive, negative = rows.positive, rows.negative
        low, high = self.positive_margin, self.negative_margin
        pull, pull_slope_TQ = self._weighted(
            positive.d - low, positive.chosen & (positive.d > low), self.positive_weighting
        )
        push, push_slope_TM = self._weighted(
            high - negative.d, negative.chosen & (negative.d < high), self.negative_weighting
        )
        total = (1 - self.imbalance) * pull + self.imbalance * push
        return RowTerms(
            total,
            len(rows.y_T),
            push_slope_TM.mul_(-self.imbalance),
            pull_slope_TQ.mul_(1 - self.imbalance),
        )


class Circle(RowLoss):
    """Circle loss in cosine (Sun et al. 2020, Eq. 4-8).

    L_i = log(1 + sum_{neg(i)} e^{gamma a_k (S_ik - m)} sum_{pos(i)} e^{-gamma a_j (S_ij - 1 + m)}), with
    detached a_k = [S_ik + m]_+ and a_j = [1 + m - S_ij]_+, m = ``margin``.

    The count is the number of anchors; an anchor without positives or without negatives gives 0. Raises
    ValueError unless margin >= 0 and gamma > 0.
    """

    has_kernels = True

    def __init__(self, margin: float = 0.4, gamma: float = 80.0) -> None:
        super().__init__(cosine)
        self.margin = at_least("margin", margin, 0)
        self.gamma = above("gamma", gamma, 0)

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        positive, negative = rows.positive, rows.negative
        pace_TQ = (positive.d + self.margin).clamp_(min=0).mul_(self.gamma)
        pace_TM = (1 + self.margin - negative.d).clamp_(min=0).mul_(self.gamma)
        pull = log_sum_exp((positive.d - self.margin).mul_(pace_TQ), positive.chosen)
        push = log_sum_exp((1 - self.margin - negative.d).mul_(pace_TM), negative.chosen)
        both_T1 = pull.log_T1 + push.log_T1
        total = functional.softplus(both_T1, threshold=LINEAR).sum()
        slope_T1 = both_T1.sigmoid_()
        return RowTerms(
            total,
            len(rows.y_T),
            push.powers.mul_(pace_TM).mul_(-slope_T1 / push.sum_T1),
            pull.powers.mul_(pace_TQ).mul_(slope_T1 / pull.sum_T1),
        )

    def form(self) -> Form:
        """A soft hinge of two logarithms of sums of exponentials."""
        pull = Logit(self.gamma, self.margin, self.margin)
        push = Logit(self.gamma, 1 - self.margin, 1 + self.margin)
        return Form("exponential", pull, push, _circle, is_paced=True)


def _circle(sums: Sums) -> Factors:
    both_T = sums.pull_T + sums.push_T
    total = functional.softplus(both_T, threshold=LINEAR).sum()
    slope_T = both_T.sigmoid()
    return Factors(total, len(both_T), slope_T, slope_T)


class NPair(RowLoss):
    """N-pair loss (Sohn 2016, Eq. 6, 10; GPW Eq. 15; CGML Eq. 6).

    L_i = log(1 + sum_{neg(i)} e^{scale (S_ik - S_ij)}) + l2 ||z_i||^2, S = z_i.z_j and j the nearest
    positive ('nearest', of equally near ones the first by label and id), or the mean of the logarithms over all
    positives ('all'), against all negatives of the batch.

    With 'one_per_class' (Sohn's own form) only the first two images of a class, by id, take part: the first is
    the anchor, the second its positive and the negative of all other classes' anchors.

    ``scale`` multiplies products: features times 10, as CGML's author released them with ECAML, are a scale of 100.
    ``l2`` holds the norms of embeddings that are not normalised.

    The count is the number of anchors; without a positive or a negative the logarithm is 0. Raises ValueError
    unless scale > 0, l2 >= 0, and for an unknown ``positive``.
    """

    def __init__(self, scale: float = 100.0, l2: float = 0.0005, positive: str = "nearest") -> None:
        super().__init__(cosine)
        self.scale = above("scale", scale, 0)
        self.l2 = at_least("l2", l2, 0)
        modes = ("nearest", "all", "one_per_class")
        self.positive = choice("positive", positive, {mode: mode for mode in modes})

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum of L_i over the anchors, and their number."""
        if self.positive == "one_per_class":
            first_C, second_C = first_two_of_each_class(references)
            anchors = references.rows(first_C[world.share(len(first_C))])
            references = references.rows(second_C)
        total, count = super().terms(anchors, references, world)
        (z_BD,) = full_precision(anchors.z_ND)
        return LossSum(total + self.l2 * z_BD.square().sum(), count)

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of the logarithms over the tile's anchors, and their number."""
        positive = rows.positive
        chosen_TQ = only_nearest(positive) if self.positive == "nearest" else positive.chosen
        share_TQ = chosen_TQ.to(positive.d.dtype)
        share_TQ /= share_TQ.sum(1, keepdim=True).clamp_(min=1)
        return each_against_negatives(rows, share_TQ, self.scale)._replace(count=len(rows.y_T))


class GeneralizedLiftedStructure(RowLoss):
    """Lifted structure over all of an anchor's positives (Hermans et al. 2017, Sec. 2).

    L_i = [log sum_{pos(i)} e^{D_ij} + log sum_{neg(i)} e^{m - D_ik}]_+, m = ``margin``. The count is the
    number of anchors; an anchor without positives or without negatives gives 0. Raises ValueError unless margin >= 0.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__(euclidean)
        self.margin = at_least("margin", margin, 0)

    def rows(self, rows: Tile) -> RowTerms:
        """Sum of L_i over the tile's anchors, and their number."""
        positive, negative = rows.positive, rows.negative
        pull = log_sum_exp(positive.d.clone(), positive.chosen)
        push = log_sum_exp(self.margin - negative.d, negative.chosen)
        both_T1 = (pull.log_T1 + push.log_T1).clamp_(min=0)
        total = both_T1.sum()
        active_T1 = both_T1.sign_()
        return RowTerms(
            total,
            len(rows.y_T),
            push.powers.mul_(-active_T1 / push.sum_T1),
            pull.powers.mul_(active_T1 / pull.sum_T1),
        )


class LiftedStructure(TiledLoss):
    """Lifted structure: a pair against the negatives of both its ends (Song et al. 2016, Eq. 4).

    L = 1/(2|P|) sum_{(i,j)} [D_ij + log(sum_{neg(i)} e^{m - D_ik} + sum_{neg(j)} e^{m - D_jl})]_+^2 over the
    ordered positive pairs, m = ``margin``.

    The second sum is asked of the rank that has j as an anchor; where anchors are not all of the references, it
    is found from the references.

    The count is the number of ordered pairs |P|; a pair without negatives gives 0. Raises ValueError unless
    margin >= 0.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        self.margin = at_least("margin", margin, 0)

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Half the sum of the squares over the anchors' ordered positive pairs, and their number."""
        count = anchors.z_ND.new_zeros(())

        def total_of(z_BD: Tensor, z_MD: Tensor) -> Tensor:
            own, others = anchors._replace(z_ND=z_BD), references._replace(z_ND=z_MD)
            nonlocal count
            total, count = self._terms(own, others, world)
            return total

        leaves = full_precision(anchors.z_ND, references.z_ND)
        return LossSum(factor_last(total_of, self.product, *leaves), count)

    def _terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        z_BD, z_MD = anchors.z_ND, references.z_ND
        num_columns = len(z_MD)
        shared = [z_MD, references.y_N]
        push_B = row_values(self._push, [z_BD, anchors.y_N], shared, num_columns=num_columns)
        push_M = world.gather(push_B)
        if len(push_M) != len(z_MD):
            push_M = row_values(self._push, shared, shared, num_columns=num_columns)
        layout = self.layout(anchors, references, z_MD.element_size())
        rows = [x[layout.anchor_order_B] for x in (z_BD, anchors.y_N, anchors.id_N, push_B)]
        rows += layout.bands_B
        columns = [x[layout.reference_order_M] for x in (z_MD, references.y_N, references.id_N, push_M)]
        return in_tiles(self._pairs, rows, columns, num_columns=num_columns)

    def _push(self, rows: list[Tensor], shared: list[Tensor]) -> Tensor:
        """log sum_{neg(i)} e^{m - D_ik}, and some -1e30 without negatives: finite, as is its gradient."""
        (z_TD, y_T), (z_MD, y_M) = rows, shared
        logits_TM = self.margin - euclidean(z_TD, z_MD, differentiable(self.product))
        return logits_TM.masked_fill(y_T[:, None] == y_M, -1e30).logsumexp(1)

    def _pairs(self, rows: list[Tensor], shared: list[Tensor]) -> Pieces:
        """The terms of the tile's positive pairs, which all lie in its band."""
        z_TD, y_T, id_T, push_T, low_T, high_T = rows
        z_QD, y_Q, id_Q, push_Q = (x[int(low_T[0]) : int(high_T[-1])] for x in shared)
        chosen_TQ = (y_T[:, None] == y_Q) & (id_T[:, None] != id_Q)
        d_TQ = euclidean(z_TD, z_QD, differentiable(self.product))
        term_TQ = self._term(d_TQ, push_T[:, None], push_Q)
        yield (term_TQ * chosen_TQ).sum(), chosen_TQ.sum()

    def _term(self, d_TQ: Tensor, push_T1: Tensor, push_Q: Tensor) -> Tensor:
        """The term of each pair, from its distance and the logarithms of both ends."""
        return (d_TQ + torch.logaddexp(push_T1, push_Q)).relu().square() / 2


class LiftedStructureGPW(LiftedStructure):
    """Lifted structure as general pair weighting states it (GPW Eq. 16): two logarithms, no square.

    L = 1/|P| sum_{(i,j)} [D_ij + log sum_{neg(i)} e^{m - D_ik} + log sum_{neg(j)} e^{m - D_jl}]_+ over the ordered
    positive pairs, m = ``margin``; another function than Song's (``losses/README.md``).

    The count is the number of ordered pairs |P|; a pair without negatives on either side gives 0. Raises
    ValueError unless margin >= 0.
    """

    def _term(self, d_TQ: Tensor, push_T1: Tensor, push_Q: Tensor) -> Tensor:
        return (d_TQ + push_T1 + push_Q).relu()


class Angular(TiledLoss):
    """Angular loss: a negative's angle in its triangle with a positive pair is bounded (Wang 2017, Eq. 6-7).

    Mean over the ordered positive pairs of log(1 + sum_{neg(a)} e^{f_apn}), f_apn = 4 tan^2(angle)
    (z_a + z_p).z_n - 2 (1 + tan^2(angle)) z_a.z_p, of unit vectors, angle in degrees. The negatives of
    one positive per anchor live at a time.

    The count is the number of pairs; without negatives a pair gives 0. Raises ValueError unless 0 < angle < 90.
    """

    accepts_memory = True

    def __init__(self, angle: float = 40.0) -> None:
        super().__init__()
        self.angle = above("angle", angle, 0)
        if angle >= 90:
            raise ValueError(f"angle={angle} must be below 90 degrees; it is usually between 30 and 60")

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """Sum over the anchors' ordered positive pairs, and their number."""
        z_BD, z_MD = full_precision(anchors.z_ND, references.z_ND)
        live_LD = z_MD if references.live_LD is None else references.live_LD.to(z_MD.dtype)
        layout = self.layout(anchors, references, z_MD.element_size())
        return in_one_sweep(
            lambda wanted: self._sweep(layout, z_BD.detach(), z_MD.detach(), len(live_LD), wanted),
            [z_BD, live_LD],
        )

    def _sweep(self, layout: Layout, z_BD: Tensor, z_MD: Tensor, num_live: int, wanted: bool) -> Swept:
        """Of the references the first ``num_live`` have a gradient."""
        by_product = 4 * math.tan(math.radians(self.angle)) ** 2
        by_pair = -2 - by_product / 2
        z_BD, z_MD = z_BD[layout.anchor_order_B], z_MD[layout.reference_order_M]
        slope_BD, as_positive_MD = torch.zeros_like(z_BD), torch.zeros_like(z_MD)
        live_L = layout.places_of_first(num_live)
        slope_LD = as_positive_MD if live_L is None else z_MD.new_zeros(num_live, z_MD.shape[1])
        total, count = z_BD.new_zeros(()), z_BD.new_zeros(())
        for tile, band in layout.tiles:
            z_TD, z_QD, slope_TD, slope_QD = z_BD[tile], z_MD[band], slope_BD[tile], as_positive_MD[band]
            s_TM = self.product(z_TD, z_MD.T)
            rows = layout.rows(s_TM, tile, band, z_BD.shape[1])
            negative_TM = rows.negative.chosen
            place_TP, real_TP = positives_in_columns(rows, rows.positive.chosen)
            count += real_TP.sum()
            for place_T, real_T in zip(place_TP.T, real_TP.T, strict=True):
                positive_TD, real_T1 = z_QD[place_T], real_T[:, None]
                pair_T1 = s_TM[:, band].gather(1, place_T[:, None])
                f_TM = scaled_sum(s_TM, positive_TD, z_MD.T, self.product, by_product)
                push = log_sum_exp(f_TM.add_(by_pair * pair_T1), negative_TM, plus_one=True)
                total += (push.log_T1 * real_T1).sum()
                if not wanted:
                    continue
                slope_TM = push.powers.mul_(real_T1 / push.sum_T1)
                by_both_TD = by_product * self.product(slope_TM, z_MD)
                by_pair_T1 = by_pair * slope_TM.sum(1, keepdim=True)
                slope_TD += by_both_TD + by_pair_T1 * positive_TD
                slope_QD.index_add_(0, place_T, by_both_TD + by_pair_T1 * z_TD)
                slope_TL = slope_TM if live_L is None else slope_TM[:, live_L]
                add_product(slope_LD, slope_TL.T, z_TD + positive_TD, self.product, by_product)
        gradient_BD = torch.empty_like(z_BD)
        gradient_BD[layout.anchor_order_B] = slope_BD
        if live_L is not None:
            return total, count, [gradient_BD, slope_LD.add_(as_positive_MD[live_L])]
        gradient_MD = torch.empty_like(z_MD)
        gradient_MD[layout.reference_order_M] = slope_LD
        return total, count, [gradient_BD, gradient_MD]


def first_two_of_each_class(embeddings: Embeddings) -> tuple[Tensor, Tensor]:
    """Rows of the first image of each class and of its next one, by id; classes with one image are left out."""
    order_N = order_of(embeddings)
    y_N, id_N = embeddings.labels.rows(order_N)
    is_first_N = torch.ones_like(y_N, dtype=torch.bool)
    is_first_N[1:] = y_N[1:] != y_N[:-1]
    other_image_N = torch.zeros_like(is_first_N)
    other_image_N[1:] = (y_N[1:] == y_N[:-1]) & (id_N[1:] != id_N[:-1])
    place_N = torch.arange(len(y_N), device=y_N.device)
    start_N = torch.where(is_first_N, place_N, 0).cummax(0).values  # where each row's class starts
    seen_N = other_image_N.cumsum(0)
    is_second_N = other_image_N & (seen_N - seen_N[start_N] == 1)
    return order_N[start_N[is_second_N]], order_N[is_second_N]


LINEAR = 50.0
"""From here on log(1 + e^x) is x, also in float64."""


class LogSumExp(NamedTuple):
    """log(sum_{chosen} e^logit) of each row, and its slopes by the logits, which are powers / sum."""

    log_T1: Tensor
    powers: Tensor
    sum_T1: Tensor


def log_sum_exp(logits: Tensor, chosen: Tensor, plus_one: bool = False) -> LogSumExp:
    """The logarithm of a row's sum of exponentials, or of 1 + the sum.

    No overflow; a row in which nothing is chosen gives -infinity (0 with ``plus_one``) and powers 0, and
    its sum is 1. The logits' memory becomes that of the powers.
    """
    if logits.shape[1] == 0:
        empty_T1 = logits.new_full((len(logits), 1), 0.0 if plus_one else -math.inf)
        return LogSumExp(empty_T1, logits, torch.ones_like(empty_T1))
    logits = logits.masked_fill_(~chosen, -math.inf)
    largest_T1 = logits.amax(1, keepdim=True)
    if plus_one:
        largest_T1.clamp_(min=0)
    else:
        largest_T1.masked_fill_(largest_T1 == -math.inf, 0)
    powers = logits.sub_(largest_T1).exp_()
    sum_T1 = powers.sum(1, keepdim=True)
    if plus_one:
        sum_T1 += torch.exp(-largest_T1)
    return LogSumExp(sum_T1.log() + largest_T1, powers, sum_T1.clamp(min=1))


def each_against_negatives(rows: Tile, share_TQ: Tensor, scale: Tensor | float) -> RowTerms:
    """sum_j share_ij log(1 + sum_{neg(i)} e^{scale (d_ij - d_ik)}) over the tile, with its slopes; the count is 0."""
    positive, negative = rows.positive, rows.negative
    push = log_sum_exp(negative.d * -scale, negative.chosen)
    logits_TQ = (positive.d * scale).add_(push.log_T1)
    total = functional.softplus(logits_TQ, threshold=LINEAR).mul_(share_TQ).sum()
    pull_TQ = logits_TQ.sigmoid_().mul_(share_TQ).mul_(scale)
    return RowTerms(total, 0, push.powers.mul_(-pull_TQ.sum(1, keepdim=True) / push.sum_T1), pull_TQ)


def _where_any(log_T1: Tensor) -> Tensor:
    """The logarithms of sums, 0 where there was nothing to sum."""
    return log_T1.masked_fill(log_T1 == -math.inf, 0)


def softplus_sum(gap: Tensor, chosen: Tensor, rate: Tensor | float) -> tuple[Tensor, Tensor]:
    """sum_{chosen} log(1 + e^{rate gap}) and its slopes by the gap, whose memory is reused."""
    logits = gap.mul_(rate).masked_fill_(~chosen, -math.inf)
    return functional.softplus(logits, threshold=LINEAR).sum(), logits.sigmoid_().mul_(rate)
