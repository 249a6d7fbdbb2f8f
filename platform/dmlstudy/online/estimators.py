"""Online learners as transformers of scikit-learn (``partial_fit``, ``transform``) and river (``learn_one``).

Both are given points with labels, and make the constraints of one pass over them (``constraints.one_pass_triplets``):
a triplet, or of a learner of pairs its similar and its dissimilar pair. They keep the newest point of each class. A
learner of labelled points is given each as it is.

Shapes: N points, D features, E embedding size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from river.base import SupervisedTransformer
from sklearn.base import (  # type: ignore[import-untyped]
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]

from dmlstudy.online.catalogue import build
from dmlstudy.online.learner import Constraints, Floats, OnlineLearner
from dmlstudy.online.running import RunningLearner
from dmlstudy.records import Scalar

LEARNER = "triplet_hinge"

MAX_CLASSES = 1000


class Triple(NamedTuple):
    """A triplet's points."""

    anchor_D: Floats
    positive_D: Floats
    negative_D: Floats


class OnePass:
    """The triplets of ``constraints.one_pass_triplets``, of points that come one by one.

    Beyond ``max_classes`` the class that was seen longest ago is forgotten: memory O(max_classes D).
    """

    def __init__(self, max_classes: int) -> None:
        if max_classes < 2:
            raise ValueError(f"max_classes={max_classes} must be at least 2")
        self.max_classes = max_classes
        self.newest: dict[Hashable, Floats] = {}
        self.created: list[Hashable] = []
        self.previous: Hashable = None

    def triplet(self, x_D: Floats, label: Hashable) -> Triple | None:
        """The triplet whose anchor the point is; None where it has none."""
        found = self._found(x_D, label)
        if label not in self.newest:
            self.created = [*self.created[-1:], label]
        self.newest.pop(label, None)
        self.newest[label] = x_D.copy()
        if len(self.newest) > self.max_classes:
            del self.newest[next(iter(self.newest))]
        self.previous = label
        return found

    def _found(self, x_D: Floats, label: Hashable) -> Triple | None:
        if label not in self.newest or len(self.newest) < 2:
            return None
        if self.previous != label:
            return Triple(x_D, self.newest[label], self.newest[self.previous])
        other = self.created[-1] if self.created[-1] != label else self.created[0]
        negative_D = self.newest.get(other)
        return None if negative_D is None or other == label else Triple(x_D, self.newest[label], negative_D)


class _Taught:
    """A learner with the pass over its points."""

    def __init__(
        self, name: str, params: Mapping[str, Scalar] | None, num_features: int, max_classes: int, seed: int
    ) -> None:
        if name == "oasis":
            raise ValueError(
                "learner='oasis' embeds queries otherwise than a gallery, and a transformer has one of both; choose"
                " another"
            )
        self.one_pass = OnePass(max_classes)
        self.numbers: dict[Hashable, int] = {}
        """Of the classes of a learner of labelled points, that seen longest ago first."""
        self.num_numbers = 0
        self.learner: OnlineLearner = build(
            name, params or {}, num_features=num_features, seed=seed, on_invalid="skip"
        )

    def learn(self, x_D: Floats, label: Hashable) -> None:
        if isinstance(self.learner, RunningLearner):
            number = self._number(label, self.learner)
            self.learner.partial_fit(Constraints(x_D[None, None], None, np.array([number])))
            return
        found = self.one_pass.triplet(x_D, label)
        if found is None:
            return
        if self.learner.arity == 3:
            self.learner.partial_fit(Constraints(np.stack(found)[None]))
            return
        pairs = np.stack([[found.anchor_D, found.positive_D], [found.anchor_D, found.negative_D]])
        self.learner.partial_fit(Constraints(pairs, np.array([True, False])))

    def _number(self, label: Hashable, learner: RunningLearner) -> int:
        """A class as a number; beyond ``max_classes`` the one that was seen longest ago is forgotten."""
        number = self.numbers.pop(label, self.num_numbers)
        self.num_numbers = max(self.num_numbers, number + 1)
        self.numbers[label] = number
        if len(self.numbers) > self.one_pass.max_classes:
            learner.forget(self.numbers.pop(next(iter(self.numbers))))
        return number

    def embed(self, x_ND: Floats) -> Floats:
        """All layers side by side, each times the root of its weight."""
        layers, alpha = self.learner.embed(x_ND), self.learner.layer_weights
        return np.concatenate(
            [np.sqrt(a) * f_NE for a, f_NE in zip(alpha, layers, strict=True)], axis=1
        ).astype(np.float64)


class MetricTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """An online learner as a transformer of scikit-learn: points to points whose distances are the learned ones.

    ``partial_fit(X, y)`` learns from labelled points in their order, in any number of calls, and gives what one call
    with all of them gives; of learners with a preparation (``lego``) the first call's points set that. ``fit`` begins
    anew. ``learner`` and ``params`` are those of the catalogue, ``oasis`` excepted.

    Raises ValueError as the catalogue and scikit-learn's ``validate_data``.
    """

    def __init__(
        self,
        learner: str = LEARNER,
        params: Mapping[str, Scalar] | None = None,
        max_classes: int = MAX_CLASSES,
        random_state: int = 0,
    ) -> None:
        self.learner = learner
        self.params = params
        self.max_classes = max_classes
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Forget all, and learn from these points in their order."""
        if hasattr(self, "taught_"):
            del self.taught_
        return self.partial_fit(X, y)

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from these points in their order."""
        is_first = not hasattr(self, "taught_")
        x_ND, labels_N = validate_data(self, X, y, reset=is_first, dtype=np.float64)
        if is_first:
            self.taught_ = _Taught(
                self.learner, self.params, x_ND.shape[1], self.max_classes, self.random_state
            )
            self.taught_.learner.prepare(x_ND, self.random_state)
            self._n_features_out = self.taught_.embed(x_ND[:1]).shape[1]
        for x_D, label in zip(x_ND, labels_N.tolist(), strict=True):
            self.taught_.learn(x_D, label)
        return self

    def transform(self, X: ArrayLike) -> NDArray[np.float64]:
        """Embeddings (N, E) of points."""
        check_is_fitted(self)
        return self.taught_.embed(validate_data(self, X, reset=False, dtype=np.float64))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float64"]
        return tags


class MetricOneByOne(SupervisedTransformer):
    """An online learner as a transformer of river: a point's features to numbers whose distances are the learned ones.

    Its features are those of the first point it learns from, in the order of their names; of a later point others are
    ignored, and missing ones are 0. ``transform_one`` gives numbers by their position, before anything was learned the
    features themselves. Learners with a preparation (``lego``) need ``MetricTransformer``.

    Examples
    --------
    >>> from dmlstudy.online.estimators import MetricOneByOne
    >>> metric = MetricOneByOne()
    >>> metric.learn_one({"a": 1.0, "b": 2.0}, "cat")
    >>> metric.transform_one({"a": 1.0, "b": 2.0})
    {0: 1.0, 1: 2.0}

    """

    def __init__(
        self,
        learner: str = LEARNER,
        params: Mapping[str, Scalar] | None = None,
        max_classes: int = MAX_CLASSES,
        seed: int = 0,
    ) -> None:
        self.learner = learner
        self.params = params
        self.max_classes = max_classes
        self.seed = seed
        self._names: list[Any] = []
        self._taught: _Taught | None = None

    def learn_one(self, x: dict[Any, Any], y: Any) -> None:
        """Learn from one labelled point."""
        if self._taught is None:
            self._names = sorted(x, key=str)
            self._taught = _Taught(self.learner, self.params, len(x), self.max_classes, self.seed)
        self._taught.learn(self._vector(x, self._names), y)

    def transform_one(self, x: dict[Any, Any]) -> dict[Any, Any]:
        """The embedding of one point, by position."""
        if self._taught is None:
            return dict(enumerate(self._vector(x, sorted(x, key=str)).tolist()))
        return dict(enumerate(self._taught.embed(self._vector(x, self._names)[None])[0].tolist()))

    @staticmethod
    def _vector(x: Mapping[Any, Any], names: list[Any]) -> Floats:
        try:
            x_D = np.array([float(x.get(name, 0.0)) for name in names])
        except (TypeError, ValueError):
            wrong = next(name for name in names if not isinstance(x.get(name, 0.0), (int, float, np.number)))
            raise ValueError(
                f"feature {wrong!r} is {x[wrong]!r}, no number; encode it before (river.preprocessing)"
            ) from None
        if not np.isfinite(x_D).all():
            wrong = names[int(np.argmin(np.isfinite(x_D)))]
            raise ValueError(f"feature {wrong!r} is {x[wrong]!r}; leave the point out, or impute it before")
        return x_D
