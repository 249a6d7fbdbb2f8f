"""Online learners of a linear metric: LEGO, RDML and a hinge from pairs, OASIS, OPML and a hinge from triplets.

Each has one D x D matrix and changes it by a matrix of rank one or two, in place: O(D^2) a constraint. RDML alone
needs more where it takes from its metric: some tens of products with it, or a Cholesky decomposition.

A step larger than 1e100, or too small for float64, is not taken: parameters stay finite whatever arrives. A
constraint counts as used where a step was taken; its loss is returned all the same.

Shapes: N points, D features, C points of a constraint, K steps of a search for an eigenvector.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import blas, eigh, eigh_tridiagonal, lapack, solve_triangular

from dmlstudy.losses.parameters import above, at_least, choice
from dmlstudy.online.learner import Flags, Floats, Labels, OnInvalid, OnlineLearner, Side, State

MOST_STEP = 1e100
"""Frobenius norm of the largest change of a matrix: squared distances are finite even after 1e15 of these."""

ROUNDING = 1e-12
"""Values below this share of a matrix's largest entry or eigenvalue count as rounding errors."""

IN_RANGE = 1e-8
"""Share of a vector that may lie outside of a matrix' range, for the vector to count as inside."""

MOST_PRODUCTS = 300
"""Products with a metric after which its lowest eigenvector is found by a full decomposition; most need 50."""

NUM_PAIRS = 10_000
"""Random pairs whose distances LEGO takes its limits from."""

HEADROOM = 2.0
"""OASIS embeds points up to so many times as long as the longest it has been given to learn from."""

FEATURE_BOUND = 16.0
"""Root mean square of the features of the longest point that OASIS embeds before it is given any."""


class LinearLearner(OnlineLearner):
    """A learner of one matrix that takes one step after another."""

    matrix_name: ClassVar[str]
    """The matrix' name in the state; no other kind of learner has one of this name."""

    def __init__(self, num_features: int, on_invalid: OnInvalid, start: float = 1.0) -> None:
        super().__init__(num_features, on_invalid)
        self.matrix_DD: Floats = start * np.eye(num_features)

    @property
    def layer_weights(self) -> Floats:
        return np.ones(1)

    def _learn(
        self, x_BCD: Floats, is_similar_B: Flags | None, label_B: Labels | None
    ) -> tuple[Floats, Flags]:
        loss_B, is_used_B = np.zeros(len(x_BCD)), np.zeros(len(x_BCD), bool)
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is no step
            for i, x_CD in enumerate(x_BCD):
                is_similar = is_similar_B is not None and bool(is_similar_B[i])
                loss_B[i], is_used_B[i] = self._step(x_CD, is_similar)
        return loss_B, is_used_B

    @abstractmethod
    def _step(self, x_CD: Floats, is_similar: bool) -> tuple[float, bool]:
        """Learn from one constraint; its loss as it arrived, and whether the matrix changed."""

    def _parameters(self) -> State:
        return {self.matrix_name: self.matrix_DD.copy()}

    def _set_parameters(self, state: State) -> None:
        self.matrix_DD = np.ascontiguousarray(state[self.matrix_name], np.float64)


class LEGO(LinearLearner):
    """LogDet exact gradient online: similar pairs nearer than u, dissimilar ones farther than l (Jain et al. 2008).

    A_0 = I. With z = x_1 - x_2, yhat = z^T A z and the target y = u of a similar pair, l of a dissimilar one, a pair
    on the wrong side of its target (similar and yhat > u, or dissimilar and yhat < l) has the loss (y - yhat)^2 / 2,
    any other 0.

    It moves A to the minimiser of LogDet(A, A_t) + eta (y - z^T A z)^2 / 2, in closed form

        A_t+1 = A - eta (ybar - y) (A z)(A z)^T / (1 + eta (ybar - y) yhat),
        ybar = [eta y yhat - 1 + sqrt((eta y yhat - 1)^2 + 4 eta yhat^2)] / (2 eta yhat),

    and the pair's new distance is ybar, between yhat and y. Kept is the factor G of A = G^T G, which the same step
    takes to (I - d w w^T) G, w = G z, d = (1 - sqrt(ybar / yhat)) / yhat: so A is positive definite, rounding and
    all, and x G^T embeds.

    Distances are squared. ``prepare`` takes u and l from the quantiles of the squared distances of 10,000 random
    pairs of points (``online/README.md``); ``limit`` sets them by hand. Raises ValueError unless 0 <=
    similar_quantile < dissimilar_quantile <= 1 and eta > 0, and for constraints before there are limits.
    """

    arity = 2
    matrix_name = "lego_factor"

    def __init__(
        self,
        num_features: int,
        similar_quantile: float = 0.05,
        dissimilar_quantile: float = 0.95,
        eta: float = 0.1,
        on_invalid: OnInvalid = "error",
    ) -> None:
        super().__init__(num_features, on_invalid)
        self.similar_quantile = at_least("similar_quantile", similar_quantile, 0)
        self.dissimilar_quantile = above("dissimilar_quantile", dissimilar_quantile, similar_quantile)
        if dissimilar_quantile > 1:
            raise ValueError(f"dissimilar_quantile={dissimilar_quantile} must be at most 1")
        self.eta = above("eta", eta, 0)
        self._limits_2 = np.full(2, np.nan)

    def prepare(self, x_ND: NDArray[np.floating], seed: int = 0) -> None:
        """Set the limits by the points' distances. Raises ValueError where all, or too many, are alike."""
        x_ND = self._points(x_ND)
        one, other = np.random.default_rng(seed).integers(0, max(len(x_ND), 1), (2, NUM_PAIRS))
        between = (x_ND[one[one != other]] - x_ND[other[one != other]]) ** 2
        if not len(between):
            raise ValueError(f"{len(x_ND)} points: LEGO takes its limits from pairs of them")
        self.limit(*np.quantile(between.sum(axis=1), [self.similar_quantile, self.dissimilar_quantile]))

    def limit(self, similar: float, dissimilar: float) -> None:
        """Set u and l, in squared distances. Raises ValueError unless 0 < u < l."""
        above("similar limit", similar, 0)
        self._limits_2 = np.array([similar, above("dissimilar limit", dissimilar, similar)])

    def embed(self, x_ND: NDArray[np.floating], side: Side = "gallery") -> list[Floats]:
        return [self._points(x_ND) @ self.matrix_DD.T]

    def _step(self, x_CD: Floats, is_similar: bool) -> tuple[float, bool]:
        w_D = np.dot(self.matrix_DD, x_CD[0] - x_CD[1])
        distance = float(np.dot(w_D, w_D))
        target = float(self._limits_2[0 if is_similar else 1])
        if distance <= target if is_similar else distance >= target:
            return 0.0, False
        loss = (target - distance) * (target - distance) / 2
        if distance == 0:  # a difference too small for its square
            return loss, False
        shrink = (1 - math.sqrt(self._new_distance(target, distance) / distance)) / distance
        v_D = np.dot(w_D, self.matrix_DD)
        is_sound = 0 < abs(shrink) * math.sqrt(distance) * _norm(v_D) <= MOST_STEP
        if is_sound:
            self.matrix_DD = _plus_outer(self.matrix_DD, -shrink, w_D, v_D)
        return loss, is_sound

    def _learn(
        self, x_BCD: Floats, is_similar_B: Flags | None, label_B: Labels | None
    ) -> tuple[Floats, Flags]:
        if np.isnan(self._limits_2).any():
            raise ValueError(
                "LEGO has no limits yet: prepare(points) takes them from the data, limit(u, l) sets them"
            )
        return super()._learn(x_BCD, is_similar_B, label_B)

    def _parameters(self) -> State:
        return {**super()._parameters(), "lego_limits": self._limits_2}

    def _set_parameters(self, state: State) -> None:
        super()._set_parameters(state)
        self._limits_2 = state["lego_limits"]

    def _new_distance(self, target: float, distance: float) -> float:
        """ybar, in that of two equal forms which subtracts nothing."""
        q = self.eta * target * distance - 1
        root = math.hypot(q, 2 * math.sqrt(self.eta) * distance)
        return (q + root) / (2 * self.eta * distance) if q > 0 else 2 * distance / (root - q)


class RDML(LinearLearner):
    """Regularised distance metric learning: similar pairs nearer than 1, others farther (Jin et al. 2009, Alg. 1).

    A_0 = 0, or I with ``initial="identity"``. With z = x_1 - x_2, d^2 = z^T A z and y = +1 of a similar pair, -1 of
    a dissimilar one, the loss is max(0, y (d^2 - 1)), and where y (1 - d^2) <= 0 (so at d^2 = 1 too)

        A <- PSD(A - lambda y z z^T), the nearest positive semi-definite matrix, with ``projection="exact"``, or

        A <- A - lambda_t y z z^T with ``projection="capped"`` (Theorem 6): lambda_t = lambda of a dissimilar pair,
             of a similar one min(lambda, 1 / z^T A^+ z) if z is in the range of A, else 0 (and the pair is not used).

    Both agree until a step would leave the cone. Taking lambda z z^T makes at most one eigenvalue negative, so the
    exact projection removes one eigenpair.

    The capped step learns nothing from a similar pair whose difference is no sum of those of the dissimilar pairs
    it has learned from: from A_0 = 0, in D dimensions, not before D of these. Distances are squared. ``step_size``
    is lambda. Raises ValueError unless step_size > 0, and for other names of projection and start.
    """

    arity = 2
    matrix_name = "rdml_metric"

    def __init__(
        self,
        num_features: int,
        step_size: float = 0.01,
        projection: str = "exact",
        initial: str = "zero",
        on_invalid: OnInvalid = "error",
    ) -> None:
        super().__init__(num_features, on_invalid, choice("initial", initial, {"zero": 0.0, "identity": 1.0}))
        self.step_size = above("step_size", step_size, 0)
        self._is_capped = choice("projection", projection, {"exact": False, "capped": True})

    def embed(self, x_ND: NDArray[np.floating], side: Side = "gallery") -> list[Floats]:
        root_RD = root(self.matrix_DD)
        x_ND = self._points(x_ND)
        embedding_ND = np.zeros(x_ND.shape)
        embedding_ND[:, : len(root_RD)] = x_ND @ root_RD.T
        return [embedding_ND]

    def _step(self, x_CD: Floats, is_similar: bool) -> tuple[float, bool]:
        z_D = x_CD[0] - x_CD[1]
        excess = float(np.dot(self._times(z_D), z_D)) - 1
        wrongness = excess if is_similar else -excess
        loss = max(0.0, wrongness)
        is_sound = 0 < self.step_size * float(np.dot(z_D, z_D)) <= MOST_STEP
        if wrongness < 0 or not is_sound:
            return loss, False
        if not is_similar:
            self._add(self.step_size, z_D)
            return loss, True
        eigenvalue, q_D = lowest_eigenpair(self.matrix_DD, z_D, self.step_size)
        if eigenvalue < 0 and self._is_capped:
            return loss, self._subtract_capped(z_D)
        self._add(-self.step_size, z_D)
        if eigenvalue < 0:
            self._remove(q_D)
        return loss, True

    def _subtract_capped(self, z_D: Floats) -> bool:
        """A - lambda_t z z^T; whether lambda_t > 0.

        With A = G^T G and z = G^T s, z^T A^+ z = |s|^2 and A - lambda_t z z^T = G^T (I - lambda_t s s^T) G. What is
        taken is G^T s itself, so that rounding in z takes nothing from where A has nothing.
        """
        s_R, in_range_D = solved_by_root(self.matrix_DD, z_D)
        squared = float(np.dot(s_R, s_R))
        if _norm(z_D - in_range_D) > IN_RANGE * _norm(z_D) or squared == 0:
            return False
        self._add(-min(self.step_size, 1 / squared), in_range_D)
        return True

    def _remove(self, q_D: Floats) -> None:
        """(I - q q^T) A (I - q q^T): of an eigenvector, A without it, and exactly without it of a near one."""
        m_D = self._times(q_D)
        h_D = m_D - np.dot(q_D, m_D) / 2 * q_D
        self.matrix_DD = blas.dsyr2(-1.0, q_D, h_D, a=self.matrix_DD.T, overwrite_a=True).T

    # Of the metric only the lower triangle is kept; products and sums read and write half as much.

    def _times(self, v_D: Floats) -> Floats:
        return np.asarray(blas.dsymv(1.0, self.matrix_DD.T, v_D))

    def _add(self, scale: float, v_D: Floats) -> None:
        self.matrix_DD = blas.dsyr(scale, v_D, a=self.matrix_DD.T, overwrite_a=True).T

    def _parameters(self) -> State:
        return {self.matrix_name: np.tril(self.matrix_DD) + np.tril(self.matrix_DD, -1).T}


class OASIS(LinearLearner):
    """Online algorithm for scalable image similarity: S(q, g) = q^T W g by passive-aggressive steps (Chechik 2010).

    W_0 = I; the loss of a triplet is l = max(0, 1 - S(x, x+) + S(x, x-)), and where it is above 0

        W <- W + min(C, l / ||V||_F^2) V,  V = x (x+ - x-)^T,

    after which the loss is 0 or the step was C = ``aggressiveness``. W is neither symmetric nor definite, so S is
    no distance.

    A query is embedded as [W^T q, 0] and a point of the gallery as [g, sqrt(R^2 - |g|^2)]: the squared distance is
    |W^T q|^2 + R^2 - 2 S(q, g), and falls with S. The points of a gallery must have one R, and none may be longer
    (no embedding that is linear in g can do without such a bound).

    So that a gallery may be embedded in parts, R is the learner's own: twice the length of the longest point it was
    given to learn from, used or not, which is part of the state; 16 sqrt(D) before the first. R as small as that
    costs single precision two bits.

    ``embed`` raises ValueError for a longer point of a gallery. Raises ValueError unless C > 0.
    """

    arity = 3
    matrix_name = "oasis_similarity"

    def __init__(
        self, num_features: int, aggressiveness: float = 0.1, on_invalid: OnInvalid = "error"
    ) -> None:
        super().__init__(num_features, on_invalid)
        self.aggressiveness = above("aggressiveness", aggressiveness, 0)
        self.longest = 0.0

    @property
    def radius(self) -> float:
        """R, the length of every embedded point of a gallery."""
        return HEADROOM * self.longest or FEATURE_BOUND * math.sqrt(self.num_features)

    def embed(self, x_ND: NDArray[np.floating], side: Side = "gallery") -> list[Floats]:
        x_ND = self._points(x_ND)
        if side == "query":
            return [np.hstack([x_ND @ self.matrix_DD, np.zeros((len(x_ND), 1))])]
        length_N = np.linalg.norm(x_ND, axis=1)
        if (length_N > self.radius).any():
            first = int(np.argmax(length_N > self.radius))
            raise ValueError(
                f"point {first} of the gallery has length {length_N[first]:g}; OASIS embeds points up to"
                f" {self.radius:g}, "
                + (
                    f"{HEADROOM:g} times the longest in its constraints: scale the gallery like these"
                    if self.longest
                    else "until it has seen a constraint: learn first, or scale the features down"
                )
            )
        height_N = np.sqrt((self.radius - length_N) * (self.radius + length_N))
        return [np.hstack([x_ND, height_N[:, None]])]

    def _step(self, x_CD: Floats, is_similar: bool) -> tuple[float, bool]:
        self.longest = max(self.longest, *np.linalg.norm(x_CD, axis=1).tolist())
        x_D, difference_D = x_CD[0], x_CD[1] - x_CD[2]
        loss = max(0.0, 1 - float(np.dot(x_D, np.dot(self.matrix_DD, difference_D))))
        size = _norm(x_D) * _norm(difference_D)
        if loss == 0 or size * size == 0:  # V = 0 of an anchor 0, and of x+ = x-
            return loss, False
        step = min(self.aggressiveness, loss / (size * size))
        is_sound = 0 < step * size <= MOST_STEP
        if is_sound:
            self.matrix_DD = _plus_outer(self.matrix_DD, step, x_D, difference_D)
        return loss, is_sound

    def _parameters(self) -> State:
        return {**super()._parameters(), "oasis_longest": np.array(self.longest)}

    def _set_parameters(self, state: State) -> None:
        super()._set_parameters(state)
        self.longest = float(state["oasis_longest"][()])


class OPML(LinearLearner):
    """One-pass closed-form metric learning: a linear map L that brings x+ nearer than x- by 1 (Li et al. 2018).

    L_0 = I. With a = x - x+, b = x - x-, the loss of a triplet is z = max(0, 1 + |L a|^2 - |L b|^2), and where it is
    above 0 L moves to the minimiser of ||L - L_t||_F^2 / 2 + lambda z / 2, in closed form

        L_t+1 = L (I + U)^-1,  U = lambda (a a^T - b b^T),
        (I + U)^-1 = I - (lambda / det) [a b] [[1 - beta, gamma], [gamma, -1 - alpha]] [a b]^T,
        alpha = lambda |a|^2, beta = lambda |b|^2, gamma = lambda a.b, det = (1 + alpha)(1 - beta) + gamma^2,

    by Sherman, Morrison and Woodbury. That is a minimum only while I + U is positive definite, and all its
    eigenvalues but two are 1, those two 1 + (alpha - beta)/2 +- sqrt((alpha + beta)^2/4 - gamma^2).

    Where the lower is not above 0 (by 1e-12 of 1 + alpha + beta, which is rounding) the triplet is not learned
    from, and counted in ``num_ill_posed``.

    This is the exact condition; the simpler lambda |b|^2 < 1 is sufficient for it, and would pass over more.
    ``step_size`` is lambda. Raises ValueError unless it is above 0.
    """

    arity = 3
    makes_own_triplets = True
    matrix_name = "opml_map"

    def __init__(self, num_features: int, step_size: float = 1e-3, on_invalid: OnInvalid = "error") -> None:
        super().__init__(num_features, on_invalid)
        self.step_size = above("step_size", step_size, 0)
        self.num_ill_posed = 0

    def embed(self, x_ND: NDArray[np.floating], side: Side = "gallery") -> list[Floats]:
        return [self._points(x_ND) @ self.matrix_DD.T]

    def _step(self, x_CD: Floats, is_similar: bool) -> tuple[float, bool]:
        ab_2D = x_CD[0] - x_CD[1:]
        mapped_2D = np.dot(ab_2D, self.matrix_DD.T)
        to_positive, to_negative = np.einsum("kd,kd->k", mapped_2D, mapped_2D).tolist()
        loss = max(0.0, 1 + to_positive - to_negative)
        if loss == 0 or np.array_equal(ab_2D[0], ab_2D[1]):
            return loss, False
        (alpha, gamma), (_, beta) = (self.step_size * np.dot(ab_2D, ab_2D.T)).tolist()
        middle = 1 + (alpha - beta) / 2
        spread = math.sqrt(max(0.0, (alpha + beta) / 2 * ((alpha + beta) / 2) - gamma * gamma))
        if not middle - spread > ROUNDING * (1 + alpha + beta):
            self.num_ill_posed += 1
            return loss, False
        weight_22 = np.array([[1 - beta, gamma], [gamma, -1 - alpha]])
        weight_22 *= self.step_size / ((middle - spread) * (middle + spread))
        change_2D = np.dot(weight_22, mapped_2D)
        is_sound = 0 < float(np.dot(_norms(change_2D), _norms(ab_2D))) <= MOST_STEP
        if is_sound:
            self.matrix_DD = blas.dgemm(
                -1.0, ab_2D.T, change_2D.T, beta=1.0, c=self.matrix_DD.T, trans_b=True, overwrite_c=True
            ).T
        return loss, is_sound

    def _parameters(self) -> State:
        return {**super()._parameters(), "opml_num_ill_posed": np.array(self.num_ill_posed, np.int64)}

    def _set_parameters(self, state: State) -> None:
        super()._set_parameters(state)
        self.num_ill_posed = int(state["opml_num_ill_posed"][()])


def lowest_eigenpair(a_DD: Floats, z_D: Floats, step: float) -> tuple[float, Floats]:
    """The negative eigenvalue of A - step z z^T with its unit eigenvector, or some other pair if there is none.

    A is positive semi-definite; only its lower triangle is read.

    A negative eigenvalue mu is alone, and its eigenvector, a multiple of (A - mu)^-1 z, is in the span of z, A z,
    A^2 z, ...: Lanczos' method from z cannot miss it. As mu is cut off from all other eigenvalues, few products do.

    Its residual is at most 1e-12 of the largest entry of the tridiagonal matrix; without that after 300 products, a
    full decomposition.
    """
    most = min(len(z_D), MOST_PRODUCTS)
    basis_KD, diagonal_K, beside_K = np.empty((most, len(z_D))), np.empty(most), np.empty(most)
    length = _norm(z_D)
    q_D, scale = z_D / length, 0.0
    for k in range(most):
        basis_KD[k] = q_D
        rest_D = blas.dsymv(1.0, a_DD.T, q_D)
        diagonal_K[k] = np.dot(rest_D, q_D) - (step * length * length if k == 0 else 0.0)
        for _ in range(2):  # once does not keep the basis orthogonal
            rest_D = rest_D - np.dot(np.dot(basis_KD[: k + 1], rest_D), basis_KD[: k + 1])
        beside_K[k] = _norm(rest_D)
        scale = max(scale, abs(diagonal_K[k]), beside_K[k])
        if k % 4 == 0 or beside_K[k] <= ROUNDING * scale:
            value, y_K = _lowest_of_tridiagonal(diagonal_K[: k + 1], beside_K[:k])
            if beside_K[k] * abs(y_K[-1]) <= ROUNDING * scale:
                return value, np.dot(y_K, basis_KD[: k + 1])
        q_D = rest_D / beside_K[k]
    full_DD = a_DD - step * np.outer(z_D, z_D)
    values_1, vectors_D1 = eigh(full_DD, lower=True, subset_by_index=[0, 0])
    return float(values_1[0]), vectors_D1[:, 0].copy()


class PairHinge(LinearLearner):
    """A fixed margin on pairs, by gradient descent on a linear map M (OAHU, Eq. 4; after Shalev-Shwartz et al. 2004).

    M_0 = I. With z = x_1 - x_2, y = +1 of a similar pair, -1 of a dissimilar one, and b = ``bound``, the loss is

        l = max(0, y (|M z|^2 - b) + 1),

    0 where similar points are within b - 1 and dissimilar ones beyond b + 1, in squared distances. Where it is above 0

        M <- M - 2 eta y (M z) z^T.

    The paper prints the loss; map, start and step are our choice. Raises ValueError unless bound > 0 and eta > 0.
    """

    arity = 2
    matrix_name = "pair_hinge_map"

    def __init__(
        self, num_features: int, bound: float = 2.0, eta: float = 0.01, on_invalid: OnInvalid = "error"
    ) -> None:
        super().__init__(num_features, on_invalid)
        self.bound = above("bound", bound, 0)
        self.eta = above("eta", eta, 0)

    def embed(self, x_ND: NDArray[np.floating], side: Side = "gallery") -> list[Floats]:
        return [self._points(x_ND) @ self.matrix_DD.T]

    def _step(self, x_CD: Floats, is_similar: bool) -> tuple[float, bool]:
        z_D = x_CD[0] - x_CD[1]
        mapped_D = np.dot(self.matrix_DD, z_D)
        sign = 1 if is_similar else -1
        loss = max(0.0, sign * (float(np.dot(mapped_D, mapped_D)) - self.bound) + 1)
        step = 2 * self.eta * sign
        is_sound = loss > 0 and 0 < abs(step) * _norm(mapped_D) * _norm(z_D) <= MOST_STEP
        if is_sound:
            self.matrix_DD = _plus_outer(self.matrix_DD, -step, mapped_D, z_D)
        return loss, is_sound


class TripletHinge(LinearLearner):
    """A fixed margin on triplets, by gradient descent on a linear map M (OAHU, Eq. 5).

    M_0 = I. With a = x - x+, c = x - x- and b = ``margin`` the loss is, in distances that are not squared,

        l = max(0, b + |M a| - |M c|),

    and where it is above 0

        M <- M - eta ((M a) a^T / |M a| - (M c) c^T / |M c|),

    a term without a direction (|M a| = 0 or |M c| = 0) left out. The paper prints the loss; map, start and step are
    our choice. Raises ValueError unless margin >= 0 and eta > 0.
    """

    arity = 3
    matrix_name = "triplet_hinge_map"

    def __init__(
        self, num_features: int, margin: float = 1.0, eta: float = 0.01, on_invalid: OnInvalid = "error"
    ) -> None:
        super().__init__(num_features, on_invalid)
        self.margin = at_least("margin", margin, 0)
        self.eta = above("eta", eta, 0)

    def embed(self, x_ND: NDArray[np.floating], side: Side = "gallery") -> list[Floats]:
        return [self._points(x_ND) @ self.matrix_DD.T]

    def _step(self, x_CD: Floats, is_similar: bool) -> tuple[float, bool]:
        ac_2D = x_CD[0] - x_CD[1:]
        mapped_2D = np.dot(ac_2D, self.matrix_DD.T)
        distance_2 = _norms(mapped_2D)
        loss = max(0.0, self.margin + float(distance_2[0] - distance_2[1]))
        # |(M a) a^T| / |M a| is |a|: the change is at most eta (|a| + |c|).
        has_step = distance_2.any() and self.eta * float(_norms(ac_2D).sum()) <= MOST_STEP
        if loss == 0 or not has_step:
            return loss, False
        for sign, mapped_D, distance, z_D in zip((-1, 1), mapped_2D, distance_2.tolist(), ac_2D, strict=True):
            if distance > 0:
                self.matrix_DD = _plus_outer(self.matrix_DD, sign * self.eta / distance, mapped_D, z_D)
        return loss, True


def root(a_DD: Floats) -> Floats:
    """G_RD with A = G^T G, R the rank of A; of A only the lower triangle is read."""
    upper_DD, order_D, rank = _pivoted_cholesky(a_DD)
    root_RD = np.empty((rank, len(a_DD)))
    root_RD[:, order_D] = np.triu(upper_DD)[:rank]
    return root_RD


def solved_by_root(a_DD: Floats, z_D: Floats) -> tuple[Floats, Floats]:
    """s_R, and G^T s, which is z where z is in the range of A = G^T G and differs from it where it is not.

    Of the G^T s that agree with z in the R features that were pivots. In the range, z^T A^+ z = s.s.
    """
    upper_DD, order_D, rank = _pivoted_cholesky(a_DD)
    pivots_R, others = order_D[:rank], order_D[rank:]
    if rank == 0:
        return np.zeros(0), np.zeros(len(z_D))
    s_R: Floats = solve_triangular(upper_DD[:rank, :rank], z_D[pivots_R], trans=1, check_finite=False)
    in_range_D = z_D.copy()
    in_range_D[others] = np.dot(upper_DD[:rank, rank:].T, s_R)
    return s_R, in_range_D


def _pivoted_cholesky(a_DD: Floats) -> tuple[Floats, NDArray[np.integer], int]:
    """An upper triangle (below it is no matter), the features in the order of their pivots, and the rank.

    Pivots of 1e-12 of A's largest entry are rounding, as are negative ones: the rank is the number of those before.
    """
    limit = ROUNDING * max(0.0, float(np.diag(a_DD).max()))
    upper_DD, order_D, rank, _ = lapack.dpstrf(a_DD.T, tol=limit)
    return upper_DD, order_D - 1, int(rank)


def _lowest_of_tridiagonal(diagonal_K: Floats, beside_K: Floats) -> tuple[float, Floats]:
    if len(diagonal_K) == 1:
        return float(diagonal_K[0]), np.ones(1)
    values_1, vectors_K1 = eigh_tridiagonal(diagonal_K, beside_K, select="i", select_range=(0, 0))
    return float(values_1[0]), vectors_K1[:, 0]


def _plus_outer(matrix_DD: Floats, scale: float, u_D: Floats, v_D: Floats) -> Floats:
    """The same array with scale u v^T added in place."""
    changed_DD: Floats = blas.dger(scale, v_D, u_D, a=matrix_DD.T, overwrite_a=True).T
    return changed_DD


def _norm(v_D: Floats) -> float:
    return math.sqrt(float(np.dot(v_D, v_D)))


def _norms(v_KD: Floats) -> Floats:
    norm_K: Floats = np.sqrt(np.einsum("kd,kd->k", v_KD, v_KD))
    return norm_K
