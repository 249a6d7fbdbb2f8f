"""Learners of running means and covariances from labelled points: streaming LDA, nearest class mean, whitening.

They are what a learner of constraints has to beat: closed forms, without a step size, after one look at each point.

A point's loss is its squared distance from the mean that it moves, before it moves it; 0 of a class's first point.

Shapes: B points as they arrive, N points, D features, C classes in the order they were first seen.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from dmlstudy.losses.parameters import above
from dmlstudy.online.learner import Flags, Floats, Labels, OnInvalid, OnlineLearner, Side, State


class RunningLearner(OnlineLearner):
    """Running means, of each class or of all points, and with ``shrinkage`` one covariance about them.

    Every point moves a mean, so every point is used. With t points seen before, d = x - mu, n points of the mean,

        mu <- mu + d / (n + 1),   Sigma <- (t Sigma + t d d^T / (t + 1)) / (t + 1),

    d = 0 of a mean's first point. Kept is the sum t Sigma, to which the points of a call are added by one product.

    Raises ValueError unless 0 < shrinkage <= 1.
    """

    arity = 1
    has_classes: ClassVar[bool] = True
    """False if all points have one mean."""

    prefix: ClassVar[str]
    """Before the names of its arrays; no other kind of learner has them."""

    def __init__(self, num_features: int, on_invalid: OnInvalid, shrinkage: float | None) -> None:
        super().__init__(num_features, on_invalid)
        self._class_C = np.empty(0, np.int64)
        self._count_C = np.empty(0, np.int64)
        self._mean_CD: Floats = np.empty((0, num_features))
        self._place: dict[int, int] = {}
        self._num_points = 0
        self._sum_DD: Floats | None = None
        self._root_DD: Floats | None = None
        if shrinkage is not None:
            self.shrinkage = above("shrinkage", shrinkage, 0)
            if shrinkage > 1:
                raise ValueError(f"shrinkage={shrinkage} must be at most 1")
            self._sum_DD = np.zeros((num_features, num_features))

    @property
    def growing(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}_{name}" for name in ("class", "count", "mean"))

    @property
    def layer_weights(self) -> Floats:
        return np.ones(1)

    @property
    def classes(self) -> Labels:
        """The classes seen, in the order they were first seen."""
        return self._class_C.copy()

    @property
    def means(self) -> Floats:
        """(C, D): their means."""
        return self._mean_CD.copy()

    @property
    def covariance(self) -> Floats:
        """Sigma (D, D), of 0 before the first point. Raises ValueError of a learner that has none."""
        if self._sum_DD is None:
            raise ValueError(f"{type(self).__name__} has no covariance: it keeps means alone")
        return self._sum_DD / max(self._num_points, 1)

    def embed(self, x_ND: NDArray[np.floating], side: Side = "gallery") -> list[Floats]:
        x_ND = self._points(x_ND)
        return [x_ND if self._sum_DD is None else x_ND @ self._root()]

    def predict(self, x_ND: NDArray[np.floating]) -> Labels | None:
        if not self.has_classes or not len(self._class_C):
            return None
        order_C = np.argsort(self._class_C)
        (z_NE,), (m_CE,) = self.embed(x_ND), self.embed(self._mean_CD[order_C])
        centre_E = m_CE.mean(axis=0)  # scores of points far from the origin keep their digits
        z_NE, m_CE = z_NE - centre_E, m_CE - centre_E
        score_NC = z_NE @ m_CE.T - np.einsum("ce,ce->c", m_CE, m_CE) / 2
        return np.asarray(self._class_C[order_C][score_NC.argmax(axis=1)])

    def forget(self, label: int) -> None:
        """Drop the mean of a class; the covariance keeps what its points gave."""
        rest_C = self._class_C != label
        self._class_C, self._count_C = self._class_C[rest_C], self._count_C[rest_C]
        self._mean_CD = self._mean_CD[rest_C]
        self._index()

    def _learn(
        self, x_BCD: Floats, is_similar_B: Flags | None, label_B: Labels | None
    ) -> tuple[Floats, Flags]:
        assert label_B is not None
        own_B = label_B if self.has_classes else np.zeros_like(label_B)
        self._make_room(own_B)
        apart_BD = np.zeros((len(x_BCD), self.num_features))
        for number, (x_D, label) in enumerate(zip(x_BCD[:, 0], own_B.tolist(), strict=True)):
            place = self._place[label]
            num = int(self._count_C[place])
            if num:
                apart_BD[number] = x_D - self._mean_CD[place]
                self._mean_CD[place] += apart_BD[number] / (num + 1)
            else:
                self._mean_CD[place] = x_D
            self._count_C[place] += 1
        if self._sum_DD is not None:
            seen_B = self._num_points + np.arange(len(x_BCD))
            weighted_BD = np.sqrt(seen_B / (seen_B + 1))[:, None] * apart_BD
            self._sum_DD = self._sum_DD + weighted_BD.T @ weighted_BD
            self._root_DD = None
        self._num_points += len(x_BCD)
        return np.einsum("bd,bd->b", apart_BD, apart_BD), np.ones(len(x_BCD), bool)

    def _root(self) -> Floats:
        """((1 - eps) Sigma + eps I)^-1/2, symmetric; an eigenvalue below eps is rounding."""
        if self._root_DD is None:
            value_D, vector_DD = eigh((1 - self.shrinkage) * self.covariance)
            scale_D = 1 / np.sqrt(np.maximum(value_D, 0) + self.shrinkage)
            self._root_DD = (vector_DD * scale_D) @ vector_DD.T
        return self._root_DD

    def _make_room(self, label_B: Labels) -> None:
        """A mean for each class that is new, in the order of these points."""
        new = [label for label in dict.fromkeys(label_B.tolist()) if label not in self._place]
        if new:
            num = len(new)
            self._class_C = np.concatenate([self._class_C, np.array(new, np.int64)])
            self._count_C = np.concatenate([self._count_C, np.zeros(num, np.int64)])
            self._mean_CD = np.concatenate([self._mean_CD, np.zeros((num, self.num_features))])
            self._index()

    def _index(self) -> None:
        self._place = {label: place for place, label in enumerate(self._class_C.tolist())}

    def _parameters(self) -> State:
        own = {
            "class": self._class_C,
            "count": self._count_C,
            "mean": self._mean_CD,
            "num_points": np.array(self._num_points, np.int64),
        }
        if self._sum_DD is not None:
            own["sum"] = self._sum_DD
        return {f"{self.prefix}_{name}": value for name, value in own.items()}

    def _set_parameters(self, state: State) -> None:
        of_class, count, mean, *_ = (state[f"{self.prefix}_{name}"] for name in ("class", "count", "mean"))
        if not len(of_class) == len(count) == len(mean):
            raise ValueError(
                f"state: {len(of_class)} classes, {len(count)} counts and {len(mean)} means; each class has one"
            )
        self._class_C, self._count_C, self._mean_CD = of_class, count, mean
        self._num_points = int(state[f"{self.prefix}_num_points"][()])
        if self._sum_DD is not None:
            self._sum_DD = state[f"{self.prefix}_sum"]
        self._root_DD = None
        self._index()


class StreamingLDA(RunningLearner):
    """Streaming linear discriminant analysis: class means and one covariance about them (Hayes and Kanan 2020).

    With Lambda = ((1 - eps) Sigma + eps I)^-1 the class of x is argmax_c w_c.x + b_c, w_c = Lambda mu_c,
    b_c = -mu_c.Lambda mu_c / 2, so the class whose mean is nearest to x by Lambda.

    The embedding is x Lambda^1/2: squared distances are Mahalanobis'. Sigma is the paper's plastic covariance, which
    moves with each point, before the mean does. ``shrinkage`` is eps, in the features' squared units.

    A class's first point is its mean and adds nothing to Sigma, but counts in t. That is our choice: the paper begins
    with means and covariance of a first batch. Raises ValueError unless 0 < shrinkage <= 1.
    """

    prefix = "slda"

    def __init__(self, num_features: int, shrinkage: float = 1e-4, on_invalid: OnInvalid = "error") -> None:
        super().__init__(num_features, on_invalid, shrinkage)


class NearestClassMean(RunningLearner):
    """Running class means: the class of a point is that of the nearest; distances are the features' own."""

    prefix = "class_mean"

    def __init__(self, num_features: int, on_invalid: OnInvalid = "error") -> None:
        super().__init__(num_features, on_invalid, None)


class Whitening(RunningLearner):
    """Streaming whitening: x ((1 - eps) Sigma + eps I)^-1/2, Sigma the covariance of all points (Welford 1962).

    Sigma is of the population, the sum of squares over the number of points. Labels are not looked at.
    ``shrinkage`` is eps, in the features' squared units; with too small a one noise counts as much as what matters.
    Raises ValueError unless 0 < shrinkage <= 1.
    """

    has_classes = False
    prefix = "whitening"

    def __init__(self, num_features: int, shrinkage: float = 1e-2, on_invalid: OnInvalid = "error") -> None:
        super().__init__(num_features, on_invalid, shrinkage)
