"""OAHU: a network of many depths whose weights a stream of triplets moves (Gao et al. 2019).

A step changes every weight, yet reads the large input layer only once per block of triplets. Inside a block

    M_t = M - eta sum_{s<t} G_s^T X_s, so X_t M_t^T = X_t M^T - eta sum_{s<t} (X_t X_s^T) G_s

needs one product of the block's points with M, one with each other, and the gradients G_s of the steps before.

The steps are the same, one triplet at a time; only the order of summation differs.

Shapes: B triplets, T of a block, 3 points of a triplet, D features, H hidden units, E embedding size, L hidden
layers, N points; the L + 1 embedding layers l = 0..L are the first axis of what is "of all layers".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmlstudy.losses.adaptive import check_hedge, hedged
from dmlstudy.losses.parameters import above, at_least, choice
from dmlstudy.online.learner import Flags, Floats, Labels, OnInvalid, OnlineLearner, Side, State

Reals: TypeAlias = NDArray[np.floating[Any]]

BLOCK = 48
"""Triplets whose points meet the input layer in one product; a block's steps grow dearer with its length."""

PRECISIONS: dict[str, Any] = {"float64": np.float64, "float32": np.float32}


def _fan_in(fan_in: int, fan_out: int) -> float:
    return float(fan_in**-0.5)


def _he(fan_in: int, fan_out: int) -> float:
    return float((6 / fan_in) ** 0.5)


def _glorot(fan_in: int, fan_out: int) -> float:
    return float((6 / (fan_in + fan_out)) ** 0.5)


STARTS: dict[str, Callable[[int, int], float]] = {"fan_in": _fan_in, "he": _he, "glorot": _glorot}
"""The bound of initial weights, drawn uniformly from minus to plus this value."""


def bounds(plus: Floats, minus: Floats, tau: float) -> tuple[Floats, Floats]:
    """The adaptive bounds of distances in [0, 2] (OAHU Eq. 9-11).

    d_sim = tau (e^{D+} - 1) / (e^2 - 1), from 0 at D+ = 0 to tau at 2, and d_dis = 2 - tau +
    tau (1 - e^{-D-}) / (1 - e^{-2}), from 2 - tau at D- = 0 to 2 at 2; so d_sim <= D+ and d_dis >= D- for
    tau in (0, 2].
    """
    similar = np.expm1(plus) * (tau / np.expm1(2.0))
    dissimilar = 2 - tau - np.expm1(-minus) * (tau / -np.expm1(-2.0))
    return similar, dissimilar


def adaptive_bound_loss(plus: Floats, minus: Floats, tau: float) -> Floats:
    """ABTL = (L_attr + L_rep) / 2 in [0, 1] (OAHU Eq. 12-13), 0 only at D+ = 0 and D- = 2.

    L_attr = max(0, (D+ - d_sim) / (2 - d_sim)), L_rep = max(0, 1 - D- / d_dis).
    """
    similar, dissimilar = bounds(plus, minus, tau)
    attractive = np.maximum(0, (plus - similar) / (2 - similar))
    repulsive = np.maximum(0, 1 - minus / dissimilar)
    return np.asarray((attractive + repulsive) / 2)


class OAHU(OnlineLearner):
    """Online metric learning with adaptive hedge update (Gao et al. 2019).

    h^0 = x, h^l = relu(h^{l-1} W^l + b^l), f^l = h^l Theta^l / ||.|| (0 where the norm is), D^l = ||f^l_i - f^l_j||.

    For each triplet: Theta, W and b move by -eta times the gradient of sum_l alpha^l ABTL^l (Eq. 19, 21, 22; the
    bounds d_sim and d_dis and alpha are constants in it), then alpha by ``hedged`` with the same losses; alpha starts
    at 1 / (L + 1).

    Not stated in the paper and our choice: that W has biases and Theta none, and where they start, with
    ``initial="fan_in"`` uniform in +-1/sqrt(fan-in), as torch's layers do; "he" and "glorot" are the uniform starts
    of He et al. 2015 and Glorot and Bengio 2010, with biases of 0.

    Embeddings less than 1e-12 apart have no direction from one to the other, and no gradient.

    A triplet is used if its loss is above 0 in some layer. Raises ValueError as ``check_hedge`` (the paper's theorem
    holds for tau below 2/3) and unless eta > 0.
    """

    arity = 3

    def __init__(
        self,
        num_features: int,
        seed: int = 0,
        tau: float = 0.1,
        beta: float = 0.99,
        num_hidden: int = 5,
        width: int = 100,
        size: int = 50,
        smoothing: float = 0.1,
        eta: float = 0.3,
        rule: str = "printed",
        initial: str = "fan_in",
        precision: str = "float64",
        on_invalid: OnInvalid = "error",
    ) -> None:
        super().__init__(num_features, on_invalid)
        check_hedge(tau, beta, smoothing, rule)
        above("eta", eta, 0)
        for name, value, low in (("num_hidden", num_hidden, 0), ("width", width, 1), ("size", size, 1)):
            at_least(name, value, low)
        self.seed, self.tau, self.beta, self.smoothing, self.eta, self.rule = (
            seed,
            tau,
            beta,
            smoothing,
            eta,
            rule,
        )
        self.num_hidden, self.width, self.size, self.initial = num_hidden, width, size, initial
        self._limit = choice("initial", initial, STARTS)
        self.precision, self._dtype = precision, choice("precision", precision, PRECISIONS)
        self._start(np.random.default_rng(seed))

    def _start(self, rng: np.random.Generator) -> None:
        """Random weights, equal layer weights."""

        def uniform(*shape: int) -> Reals:
            """Weights (..., fan-in, fan-out)."""
            limit = self._limit(*shape[-2:])
            return rng.uniform(-limit, limit, shape).astype(self._dtype)

        def bias(fan_in: int, number: int) -> Reals:
            limit = fan_in**-0.5 if self.initial == "fan_in" else 0.0
            return rng.uniform(-limit, limit, (number, width)).astype(self._dtype)

        features, width, num_after = self.num_features, self.width, max(self.num_hidden - 1, 0)
        of_input = [uniform(features, size) for size in (self.size, width)[: 1 + bool(self.num_hidden)]]
        self._input_DV = np.concatenate(of_input, axis=1)  # [Theta^0, W^1]
        self._hidden_LHH = uniform(num_after, width, width)  # W^2..W^L
        self._bias_LH = np.concatenate([bias(features, min(self.num_hidden, 1)), bias(width, num_after)])
        self._theta_LHE = uniform(self.num_hidden, width, self.size)  # Theta^1..Theta^L
        self._alpha_L = np.full(self.num_hidden + 1, 1 / (self.num_hidden + 1))

    def anew(self, number: int) -> OAHU:
        """One of the same settings that has learned nothing: other random weights for each ``number``."""
        seed = int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0])
        settings: dict[str, Any] = {**self.settings, "seed": seed}
        return OAHU(**settings)

    @property
    def layer_weights(self) -> Floats:
        return self._alpha_L.copy()

    def embed(self, x_ND: Reals, side: Side = "gallery") -> list[Floats]:
        x_ND = self._points(x_ND).astype(self._dtype, copy=False)
        u_NV = x_ND @ self._input_DV
        raw = [u_NV[:, : self.size]]
        h_NH = u_NV[:, self.size :]
        for layer in range(self.num_hidden):
            before_NH = h_NH if layer == 0 else h_NH @ self._hidden_LHH[layer - 1]
            h_NH = np.maximum(before_NH + self._bias_LH[layer], 0)
            raw.append(h_NH @ self._theta_LHE[layer])
        return [(f * _inverse(np.sqrt((f * f).sum(axis=1)))[:, None]).astype(np.float64) for f in raw]

    def _learn(
        self, x_BCD: Floats, is_similar_B: Flags | None, label_B: Labels | None
    ) -> tuple[Floats, Flags]:
        loss_B, is_used_B = np.empty(len(x_BCD)), np.empty(len(x_BCD), bool)
        for start in range(0, len(x_BCD), BLOCK):
            part = slice(start, start + BLOCK)
            loss_B[part], is_used_B[part] = self._block(x_BCD[part].astype(self._dtype, copy=False))
        return loss_B, is_used_B

    def _block(self, x_T3D: Reals) -> tuple[Floats, Flags]:
        """A step for each triplet; the input layer moves once, at the end, by all of them."""
        num_triplets, size, eta = len(x_T3D), self.size, self.eta
        x_RD = x_T3D.reshape(3 * num_triplets, -1)  # R = 3T rows
        u_RV = x_RD @ self._input_DV
        gram_RR = x_RD @ x_RD.T
        step_RV = np.empty_like(u_RV)  # -eta times the gradient by u
        hidden_L3H = np.empty((self.num_hidden, 3, self.width), self._dtype)
        slope_L3H = np.empty_like(hidden_L3H)
        f_L3E = np.empty((self.num_hidden + 1, 3, size), self._dtype)
        hidden_LHH, theta_LHE, bias_LH = self._hidden_LHH, self._theta_LHE, self._bias_LH
        step_LHH, step_LHE = np.empty_like(hidden_LHH), np.empty_like(theta_LHE)
        loss_T, is_used_T = np.empty(num_triplets), np.empty(num_triplets, bool)
        for number in range(num_triplets):
            row = 3 * number
            u_3V = u_RV[row : row + 3]
            if number:
                u_3V = u_3V + gram_RR[row : row + 3, :row] @ step_RV[:row]
            f_L3E[0] = u_3V[:, :size]
            before_3H = u_3V[:, size:]
            for layer in range(self.num_hidden):
                if layer:
                    before_3H = hidden_L3H[layer - 1] @ hidden_LHH[layer - 1]
                np.maximum(before_3H + bias_LH[layer], 0, out=hidden_L3H[layer])
            np.matmul(hidden_L3H, theta_LHE, out=f_L3E[1:])
            loss_L, slope_L3E = self._loss(f_L3E)
            loss_T[number], is_used_T[number] = self._alpha_L @ loss_L, loss_L.any()

            slope_L3E *= -eta
            np.matmul(slope_L3E[1:], theta_LHE.transpose(0, 2, 1), out=slope_L3H)
            for layer in range(self.num_hidden - 1, -1, -1):
                slope_L3H[layer] *= hidden_L3H[layer] > 0
                if layer:
                    slope_L3H[layer - 1] += slope_L3H[layer] @ hidden_LHH[layer - 1].T
            step_RV[row : row + 3, :size] = slope_L3E[0]
            if self.num_hidden:
                step_RV[row : row + 3, size:] = slope_L3H[0]
                theta_LHE += np.matmul(hidden_L3H.transpose(0, 2, 1), slope_L3E[1:], out=step_LHE)
                hidden_LHH += np.matmul(hidden_L3H[:-1].transpose(0, 2, 1), slope_L3H[1:], out=step_LHH)
                bias_LH += slope_L3H.sum(axis=1)
            self._alpha_L = hedged(self._alpha_L, loss_L, self.beta, self.smoothing, self.rule)
        self._input_DV += x_RD.T @ step_RV
        return loss_T, is_used_T

    def _loss(self, raw_L3E: Reals) -> tuple[Floats, Reals]:
        """ABTL of each layer, and the gradient of sum_l alpha^l ABTL^l by the embeddings before they are normalised."""
        inverse_L31 = _inverse(np.sqrt(np.vecdot(raw_L3E, raw_L3E)))[:, :, None]
        f_L3E = raw_L3E * inverse_L31
        apart_L2E = f_L3E[:, :1] - f_L3E[:, 1:]  # from the positive, from the negative
        distance_L2 = np.sqrt(np.vecdot(apart_L2E, apart_L2E))
        plus_L, minus_L = distance_L2.T.astype(np.float64)
        similar_L, dissimilar_L = bounds(plus_L, minus_L, self.tau)
        attractive_L = (plus_L - similar_L) / (2 - similar_L)
        repulsive_L = 1 - minus_L / dissimilar_L
        by_distance_L2 = np.empty(distance_L2.shape, self._dtype)
        by_distance_L2[:, 0] = self._alpha_L / 2 / (2 - similar_L) * (attractive_L > 0)
        by_distance_L2[:, 1] = -self._alpha_L / 2 / dissimilar_L * (repulsive_L > 0)
        apart_L2E *= (by_distance_L2 * _inverse(distance_L2))[:, :, None]
        slope_L3E = np.empty_like(f_L3E)
        np.add(apart_L2E[:, 0], apart_L2E[:, 1], out=slope_L3E[:, 0])
        np.negative(apart_L2E, out=slope_L3E[:, 1:])
        slope_L3E -= f_L3E * np.vecdot(f_L3E, slope_L3E)[:, :, None]
        slope_L3E *= inverse_L31
        return (np.maximum(attractive_L, 0) + np.maximum(repulsive_L, 0)) / 2, slope_L3E

    def _parameters(self) -> State:
        return {
            "input": self._input_DV,
            "hidden": self._hidden_LHH,
            "bias": self._bias_LH,
            "theta": self._theta_LHE,
            "alpha": self._alpha_L,
        }

    def _set_parameters(self, state: State) -> None:
        self._input_DV, self._hidden_LHH = state["input"], state["hidden"]
        self._bias_LH, self._theta_LHE = state["bias"], state["theta"]
        self._alpha_L = state["alpha"]


def _inverse(length: Reals) -> Reals:
    """1 / length, and 0 where there is none: no direction, and no gradient."""
    return np.asarray(np.divide(1, length, out=np.zeros_like(length), where=length > 1e-12))
