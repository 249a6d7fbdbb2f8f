"""Softmax over classes whose margin depends on the class, the training so far, or the norm of an embedding.

Margins are angles in radians here, but for ``SubCenterArcFace``, whose are ArcFace's in degrees.

Shapes: B anchors on this rank, M references (the global batch), D embedding size, C classes, K centres of one class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dmlstudy.losses.class_softmax import (
    ClassSoftmax,
    Transforms,
    checked_angle,
    cos_of_sum,
    widened,
)
from dmlstudy.losses.distances import SQUARED_FLOOR
from dmlstudy.losses.interface import Embeddings, World
from dmlstudy.losses.parameters import above, at_least, choice
from dmlstudy.losses.plan import order_of
from dmlstudy.losses.proxies import unit_vectors
from dmlstudy.text import shown
from dmlstudy.transfers import placed

NORM_BOUNDS = {"relative": True, "absolute": False}

USUAL_NORM = 50.0
"""The median norm that MagFace's bounds on norms suit: the middle of 10 and 110, less a little."""


class SubCenterArcFace(ClassSoftmax):
    """Sub-centre ArcFace: several vectors of a class, of which the nearest counts (Deng et al. 2020).

    S_ic = max_k z_i.w_ck, K = ``centers``; L_i = -log softmax_c(scale S'_ic) at c = y_i with S'_ic = S_ic for c != y_i
    and S'_iy = cos(theta_iy + m), beyond the seam as in ``ArcFace``. The gradient goes to the first nearest vector.

    ``margin_by`` 'fixed': m = ``margin`` in degrees. 'class_size': the smaller a class the larger its margin,
    m_c = lo + (hi - lo) (n_c^-e - a) / (b - a), n_c its number of training images, e = ``exponent``.

    a and b are the least and largest n^-e of all classes, lo = ``lowest_margin`` and hi = ``highest_margin`` in
    degrees. Where all classes are equally large m = hi (Ha et al. 2020, Google Landmarks 2020, third place).

    'power': m_c = lo + add n_c^-e, add = ``added_margin`` in degrees, which does not depend on the other classes.

    With one class L_i = 0. References are ignored. ``sample`` is as in ``ClassSoftmax``.

    The count is the number of anchors. Raises ValueError unless margins lie in 0..90, lo <= hi, add >= 0, lo + add <=
    90, e >= 0, scale > 0, K >= 1, ``class_sizes`` are C positive numbers where they are needed, labels lie in 0..C-1
    and z has size ``dim``.
    """

    angle_C: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 28.6,
        scale: float = 64.0,
        centers: int = 3,
        margin_by: str = "fixed",
        lowest_margin: float = 2.865,
        highest_margin: float = 28.648,
        added_margin: float = 28.648,
        exponent: float = 0.25,
        sample: float = 1.0,
        class_sizes: Sequence[int] | None = None,
        seed: int = 0,
        share: slice | None = None,
    ) -> None:
        super().__init__(num_classes, dim, above("scale", scale, 0), sample, seed, share)
        centers = int(at_least("centers", centers, 1))
        self.margin = margin
        fixed = checked_angle("margin", margin)
        lowest = checked_angle("lowest_margin", lowest_margin)
        highest = checked_angle("highest_margin", highest_margin)
        at_least("highest_margin", highest_margin, lowest_margin)
        added = checked_angle("added_margin", added_margin)
        at_least("exponent", exponent, 0)

        def powers_C() -> Tensor:
            return _checked_sizes(margin_by, class_sizes, self.num_classes) ** -exponent

        kinds: dict[str, Callable[[], Tensor]] = {
            "fixed": lambda: torch.full((self.num_classes,), fixed, dtype=torch.float64),
            "class_size": lambda: _between(lowest, highest, powers_C()),
            "power": lambda: lowest + added * powers_C(),
        }
        angle_C = choice("margin_by", margin_by, kinds)()
        if margin_by == "power":
            checked_angle("lowest_margin + added_margin", lowest_margin + added_margin)
        self.register_buffer("angle_C", angle_C, persistent=False)
        self.centers_CKD = unit_vectors(seed, self.num_classes, centers, self.dim, share=share)

    def transforms(self, own_B: Tensor, anchors: Embeddings, references: Embeddings) -> Transforms:
        """T(o) = cos(theta + m_y)."""
        return Transforms(*widened(own_B, self.angle_C[anchors.y_N].to(own_B.dtype)))


def _checked_sizes(margin_by: str, class_sizes: Sequence[int] | None, num_classes: int) -> Tensor:
    if class_sizes is None:
        raise ValueError(
            f"margin_by={margin_by!r} needs the number of training images of each class; pass class_sizes=..."
        )
    if len(class_sizes) != num_classes or min(class_sizes) < 1:
        raise ValueError(
            f"class_sizes={shown(list(class_sizes))} must be num_classes={num_classes} numbers of at least 1"
        )
    return torch.tensor(list(class_sizes), dtype=torch.float64)


def _between(lowest: float, highest: float, power_C: Tensor) -> Tensor:
    """Margins that rise with n^-e from the lowest to the highest; the highest where all are the same."""
    spread = power_C.max() - power_C.min()
    if spread == 0:
        return torch.full_like(power_C, highest)
    return lowest + (highest - lowest) * (power_C - power_C.min()) / spread


class CurricularFace(ClassSoftmax):
    """CurricularFace: ArcFace that weighs hard other classes the more the further training is (Huang et al. 2020).

    The own logit is ArcFace's, s cos(theta_y + m) with its seam, m = ``margin`` in radians. Another class's is s S
    where S <= cos(theta_y + m), and s S (t + S) where it is harder than that.

    t <- 0.99 t + 0.01 mean(o), o the own cosines of all ranks' anchors, before it is used; it starts at 0 and is a
    constant in the gradient. It moves in training alone, and is saved with it.

    With one class L_i = 0. References are ignored. ``sample`` is as in ``ClassSoftmax``.

    The count is the number of anchors. Raises ValueError unless 0 <= m <= pi/2, scale > 0, labels lie in 0..C-1 and z
    has size ``dim``.
    """

    t: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.5,
        scale: float = 64.0,
        sample: float = 1.0,
        seed: int = 0,
        share: slice | None = None,
    ) -> None:
        super().__init__(num_classes, dim, above("scale", scale, 0), sample, seed, share)
        self.margin = _checked_radians("margin", margin)
        self.register_buffer("t", torch.zeros((), dtype=torch.float64))
        self.proxies_CD = unit_vectors(seed, self.num_classes, self.dim, share=share)

    def observe(self, own_B: Tensor, references: Embeddings, world: World) -> None:
        """Move t towards the mean own cosine."""
        sums_2 = world.sum(torch.stack([own_B.double().sum(), own_B.new_full((), len(own_B)).double()]))
        moved = 0.99 * self.t + 0.01 * sums_2[0] / sums_2[1].clamp(min=1)
        self.t.copy_(torch.where(sums_2[1] > 0, moved, self.t))

    def transforms(self, own_B: Tensor, anchors: Embeddings, references: Embeddings) -> Transforms:
        """T(o) = cos(theta + m); N(S) = S (t + S) where S is hard."""
        margin = own_B.new_full((), self.margin)
        bound_B, _ = cos_of_sum(own_B, margin)
        t = self.t.to(own_B.dtype, copy=True)  # it has moved on before backward

        def others(s_BC: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            is_hard_BC = s_BC > bound_B[rows, None]
            slope_BC = torch.where(is_hard_BC, 2 * s_BC + t, 1)
            return torch.where(is_hard_BC, s_BC * (s_BC + t), s_BC), slope_BC

        return Transforms(*widened(own_B, margin), others)


class AdaFace(ClassSoftmax):
    """AdaFace: a margin by image quality, for which the norm of an embedding stands (Kim et al. 2022).

    q = clip(h (v - mean) / (sd + e), -1, 1), v the norm before normalising, clipped to 0.001..100 and detached,
    h = ``concentration``, e = 0.001.

    S'_ic = S_ic for c != y_i and
    S'_iy = cos(clip(theta_iy - m q, e, pi - e)) - m (1 + q), m = ``margin``; all cosines are clipped to +-(1 - e).
    L_i = -log softmax_c(scale S'_ic) at c = y_i.

    Mean and sd (unbiased) are running ones of all ranks' norms; they start at 20 and 100, those of face networks.
    x <- (1 - a) x + a x_batch with a = ``t_alpha``, before they are used. A batch of one leaves sd as it is. They move
    in training alone, and are saved with it.

    With one class L_i = 0. ``sample`` is as in ``ClassSoftmax``.

    The count is the number of anchors. Raises ValueError unless m, h >= 0, 0 <= a <= 1, scale > 0, labels lie in 0..C-1
    and z has size ``dim``; and for embeddings without norms.
    """

    uses_norms = True
    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.4,
        concentration: float = 0.333,
        t_alpha: float = 0.01,
        scale: float = 64.0,
        sample: float = 1.0,
        seed: int = 0,
        share: slice | None = None,
    ) -> None:
        super().__init__(num_classes, dim, above("scale", scale, 0), sample, seed, share)
        self.margin = at_least("margin", margin, 0)
        self.concentration = at_least("concentration", concentration, 0)
        if at_least("t_alpha", t_alpha, 0) > 1:
            raise ValueError(
                f"t_alpha={t_alpha} must be at most 1: it is the share of a batch in the running mean"
            )
        self.t_alpha = t_alpha
        self.register_buffer("mean", torch.tensor(20.0, dtype=torch.float64))
        self.register_buffer("deviation", torch.tensor(100.0, dtype=torch.float64))
        self.proxies_CD = unit_vectors(seed, self.num_classes, self.dim, share=share)

    def observe(self, own_B: Tensor, references: Embeddings, world: World) -> None:
        """Take the batch's norms into the running mean and deviation."""
        norm_M = _norms(references)
        norm_M = norm_M[placed(order_of(references), norm_M.device)].double().clamp(_QUALITY, 100)
        if len(norm_M):
            self.mean.lerp_(norm_M.mean().to(self.mean.dtype), self.t_alpha)
        if len(norm_M) > 1:
            self.deviation.lerp_(norm_M.std().to(self.deviation.dtype), self.t_alpha)

    def transforms(self, own_B: Tensor, anchors: Embeddings, references: Embeddings) -> Transforms:
        """T(o) = cos(theta - m q) - m (1 + q); N(S) is S clipped."""
        norm_B = _norms(anchors).double().clamp(_QUALITY, 100)
        q_B = self.concentration * (norm_B - self.mean) / (self.deviation + _QUALITY)
        q_B = q_B.clamp(-1, 1).to(own_B.dtype)
        theta_B = own_B.clamp(_QUALITY - 1, 1 - _QUALITY).acos()
        moved_B = theta_B - self.margin * q_B
        is_within_B = (own_B.abs() <= 1 - _QUALITY) & (moved_B >= _QUALITY) & (moved_B <= math.pi - _QUALITY)
        moved_B = moved_B.clamp(_QUALITY, math.pi - _QUALITY)
        slope_B = torch.where(is_within_B, moved_B.sin() / theta_B.sin(), 0)
        return Transforms(moved_B.cos() - self.margin * (1 + q_B), slope_B, _clipped)


_QUALITY = 1e-3


def _clipped(s_BC: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    is_within_BC = s_BC.abs() <= 1 - _QUALITY
    return s_BC.clamp_(_QUALITY - 1, 1 - _QUALITY), is_within_BC


class MagFace(ClassSoftmax):
    """MagFace: the longer an embedding, the larger its margin, and long ones are rewarded (Meng et al. 2021).

    L_i = -log softmax_c(scale S'_ic) at c = y_i, plus w (v / u^2 + 1 / v), w = ``norm_weight``. S'_ic = S_ic for
    c != y_i and S'_iy = cos(theta_iy + m(v)); with ``easy`` S_iy where it is <= 0, else beyond the seam as in
    ``ArcFace``.

    v is the norm before normalising, clipped to l..u = ``lowest_norm``..``highest_norm``, and
    m(v) = lm + (um - lm) (v - l) / (u - l), lm and um = ``lowest_margin`` and ``highest_margin`` in radians.

    The bounds are those of face networks. With ``norm_bounds`` 'relative' norms are measured in the unit in which the
    first training batch's median, over all ranks, is 50; that unit is saved. 'absolute': as they are.

    With one class the first part is 0, the second remains. ``sample`` is as in ``ClassSoftmax``.

    The count is the number of anchors. Raises ValueError unless 0 <= lm <= um <= pi/2, 0 < l < u, w >= 0, scale > 0,
    labels lie in 0..C-1 and z has size ``dim``; and for embeddings without norms.
    """

    uses_norms = True
    unit: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        lowest_margin: float = 0.45,
        highest_margin: float = 0.8,
        lowest_norm: float = 10.0,
        highest_norm: float = 110.0,
        norm_bounds: str = "relative",
        norm_weight: float = 35.0,
        easy: bool = True,
        scale: float = 64.0,
        sample: float = 1.0,
        seed: int = 0,
        share: slice | None = None,
    ) -> None:
        super().__init__(num_classes, dim, above("scale", scale, 0), sample, seed, share)
        self.lowest_margin = _checked_radians("lowest_margin", lowest_margin)
        self.highest_margin = _checked_radians("highest_margin", highest_margin)
        at_least("highest_margin", highest_margin, lowest_margin)
        self.lowest_norm = above("lowest_norm", lowest_norm, 0)
        self.highest_norm = above("highest_norm", highest_norm, lowest_norm)
        self.is_relative = choice("norm_bounds", norm_bounds, NORM_BOUNDS)
        self.norm_weight = at_least("norm_weight", norm_weight, 0)
        self.easy = easy
        self.register_buffer("unit", torch.tensor(0.0 if self.is_relative else 1.0, dtype=torch.float64))
        self.proxies_CD = unit_vectors(seed, self.num_classes, self.dim, share=share)

    def observe(self, own_B: Tensor, references: Embeddings, world: World) -> None:
        """Settle the unit of norms, by the first batch."""
        self.unit.copy_(self._unit_for(references))

    def transforms(self, own_B: Tensor, anchors: Embeddings, references: Embeddings) -> Transforms:
        """T(o) = cos(theta + m(v)), and the term of v."""
        unit = self._unit_for(references)
        given_B, low, high = _norms(anchors).double() / unit, self.lowest_norm, self.highest_norm
        v_B = given_B.clamp(low, high)
        by_norm_B = ((given_B >= low) & (given_B <= high)) / unit  # dv by the norm as it is
        rise = (self.highest_margin - self.lowest_margin) / (high - low)
        margin_B = (self.lowest_margin + rise * (v_B - low)).to(own_B.dtype)
        sin_B = ((1 - own_B) * (1 + own_B)).clamp(min=SQUARED_FLOOR).sqrt()
        by_margin_B = -(sin_B * margin_B.cos() + own_B * margin_B.sin())
        if self.easy:
            value_B, slope_B = cos_of_sum(own_B, margin_B)
            is_plain_B = own_B <= 0
            value_B, slope_B = torch.where(is_plain_B, own_B, value_B), torch.where(is_plain_B, 1, slope_B)
            by_margin_B = torch.where(is_plain_B, 0, by_margin_B)
        else:
            value_B, slope_B = widened(own_B, margin_B)
            beyond_B = -(margin_B.sin() + margin_B * margin_B.cos())
            by_margin_B = torch.where(own_B >= -margin_B.cos(), by_margin_B, beyond_B)
        return Transforms(
            value_B,
            slope_B,
            norm_slope_B=by_margin_B * (rise * by_norm_B).to(own_B.dtype),
            term_B=(self.norm_weight * (v_B / high**2 + 1 / v_B)).to(own_B.dtype),
            term_norm_slope_B=(self.norm_weight * (1 / high**2 - v_B**-2) * by_norm_B).to(own_B.dtype),
        )

    def _unit_for(self, references: Embeddings) -> Tensor:
        """The unit as settled, or by this batch where none is."""
        norm_M = _norms(references).double()
        if not self.is_relative or not len(norm_M):
            return self.unit
        of_batch = norm_M.quantile(0.5).clamp(min=1e-12) / USUAL_NORM
        return torch.where(self.unit > 0, self.unit, of_batch)


def _norms(embeddings: Embeddings) -> Tensor:
    assert embeddings.norm_N is not None
    return embeddings.norm_N.detach()


def _checked_radians(parameter: str, angle: float) -> float:
    if at_least(parameter, angle, 0) > math.pi / 2:
        raise ValueError(f"{parameter}={angle} must be an angle in radians, of at most pi/2; 0.5 is usual")
    return angle
