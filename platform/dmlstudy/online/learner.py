"""The interface of online learners: a metric from a stream of constraints, one at a time.

Shapes: B constraints in the order they arrive, C points of a constraint, D features, N points, L + 1 layers
(numbered from 0), E size of an embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
Labels: TypeAlias = NDArray[np.int64]
State: TypeAlias = dict[str, NDArray[Any]]
Side: TypeAlias = Literal["query", "gallery"]
OnInvalid: TypeAlias = Literal["error", "skip"]

MOST = 1e15
"""Features beyond this are refused like infinite ones: their products overflow."""

KINDS = {1: "labelled points", 2: "pairs", 3: "triplets"}
"""Constraints by the number of their points."""


class Constraints(NamedTuple):
    """Some constraints of a stream, in the order they arrive.

    Of a triplet the three points are anchor, positive and negative; of a pair the two points, and whether they are
    similar; of a labelled point the one point, and its class.
    """

    x_BCD: NDArray[np.floating]
    is_similar_B: Flags | None = None
    label_B: Labels | None = None


class Counts(NamedTuple):
    """Counts of the constraints a learner was given, of those it learned from, and of what was no constraint."""

    seen: int = 0
    used: int = 0
    skipped: int = 0

    @property
    def utilization(self) -> float:
        """U, the share of the constraints that moved the metric; those skipped do not count. 0 of none.

        A constraint moves it where its loss is above 0, but for a triplet for which OPML's step is not defined:
        that has a loss and is not counted.
        """
        return self.used / max(self.seen - self.skipped, 1)


class OnlineLearner(ABC):
    """A metric that a stream of constraints moves, one step for each.

    What is not a constraint (a point that is not finite or beyond 1e15, a triplet or pair that repeats one point)
    is an error that leaves the learner as it was, or with ``on_invalid="skip"`` counted and passed over. Not one
    learner keeps anything of the constraints it has seen but its own parameters.
    """

    arity: ClassVar[Literal[1, 2, 3]]
    """Points of a constraint: 3 of triplets, 2 of pairs, 1 of labelled points."""

    makes_own_triplets: ClassVar[bool] = False
    """True if its paper trains it on the triplets of one pass over labelled points (``one_pass_triplets``)."""

    def __init__(self, num_features: int, on_invalid: OnInvalid = "error") -> None:
        if num_features < 1:
            raise ValueError(f"num_features={num_features} must be at least 1")
        if on_invalid not in ("error", "skip"):
            raise ValueError(f"on_invalid={on_invalid!r}: choose error or skip")
        self.num_features, self.on_invalid = num_features, on_invalid
        self.counts = Counts()

    def prepare(self, x_ND: NDArray[np.floating], seed: int = 0) -> None:  # noqa: B027
        """Take what the learner needs to know of training points before the first constraint: nothing, for most."""

    def partial_fit(self, constraints: Constraints) -> Floats:
        """Learn from the constraints in their order, and return the loss of each as it arrived; NaN where skipped.

        Raises ValueError for points of another number or size than this learner's, for pairs without ``is_similar_B``,
        points without ``label_B`` and, unless they are to be skipped, for what is not a constraint; then nothing is
        learned.
        """
        x_BCD = self._checked(constraints)
        is_valid_B = self._valid(x_BCD)
        loss_B = np.full(len(x_BCD), np.nan)
        is_similar_B, label_B = constraints.is_similar_B, constraints.label_B
        loss_B[is_valid_B], is_used_B = self._learn(
            x_BCD[is_valid_B],
            None if is_similar_B is None else is_similar_B[is_valid_B],
            None if label_B is None else label_B[is_valid_B],
        )
        self.counts = Counts(
            self.counts.seen + len(x_BCD),
            self.counts.used + int(is_used_B.sum()),
            self.counts.skipped + int((~is_valid_B).sum()),
        )
        return loss_B

    @abstractmethod
    def embed(self, x_ND: NDArray[np.floating], side: Side = "gallery") -> list[Floats]:
        """Embeddings of points, (N, E) of each layer: their Euclidean distances are the learned ones.

        A learner of a similarity that is no distance embeds queries and gallery differently, so that the distance
        of a query from the gallery's points falls as their similarity grows. Raises ValueError for other sizes and
        for points that are not finite.
        """

    def predict(self, x_ND: NDArray[np.floating]) -> Labels | None:
        """Classes (N,) of points by the learner's own rule; None if it has none, or has seen no class yet."""
        return None

    @property
    def growing(self) -> tuple[str, ...]:
        """Arrays of the state that have a row for each class seen, and so any number of rows."""
        return ()

    @property
    @abstractmethod
    def layer_weights(self) -> Floats:
        """alpha, the weight of each layer; they sum to 1."""

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """The arguments it was built with, by name."""
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {name: value for name, value in public.items() if isinstance(value, (bool, int, float, str))}

    def state(self) -> State:
        """Everything that ``restore`` needs, as arrays: parameters and counts."""
        own = {name: value.copy() for name, value in self._parameters().items()}
        return {**own, "counts": np.array(self.counts, np.int64)}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on as the learner whose state this is. Raises ValueError for the state of another kind or size."""
        own = self.state()
        for name, value in own.items():
            rows = 1 if name in self.growing else 0
            if (
                name not in state
                or state[name].ndim != value.ndim
                or state[name].shape[rows:] != value.shape[rows:]
                or state[name].dtype != value.dtype
            ):
                raise ValueError(
                    f"state {name!r}: this {type(self).__name__} needs {value.dtype} of shape {value.shape}; got"
                    + (f" {state[name].dtype} of shape {state[name].shape}" if name in state else " none")
                )
        self._set_parameters({name: state[name].copy() for name in own if name != "counts"})
        self.counts = Counts(*(int(count) for count in state["counts"]))

    @abstractmethod
    def _learn(
        self, x_BCD: Floats, is_similar_B: Flags | None, label_B: Labels | None
    ) -> tuple[Floats, Flags]:
        """A step for each of these; the loss of each as it arrived, and whether that changed anything."""

    @abstractmethod
    def _parameters(self) -> State:
        """The learned arrays, by name."""

    @abstractmethod
    def _set_parameters(self, state: State) -> None:
        """Take what ``_parameters`` gave."""

    def _points(self, x_ND: NDArray[np.floating]) -> Floats:
        """Points as float64. Raises ValueError for others than this learner's."""
        x_ND = np.asarray(x_ND)
        if x_ND.ndim != 2 or x_ND.shape[1] != self.num_features:
            raise ValueError(f"points have shape {x_ND.shape}; this learner takes (N, {self.num_features})")
        x_ND = np.asarray(x_ND, np.float64)
        is_sound_N = (np.abs(x_ND) <= MOST).all(axis=1)
        if not is_sound_N.all():
            raise ValueError(f"point {int(np.argmin(is_sound_N))} is not finite, or beyond {MOST:g}")
        return np.asarray(x_ND, np.float64)

    def _checked(self, constraints: Constraints) -> Floats:
        x_BCD = np.asarray(constraints.x_BCD)
        wanted = f"(B, {self.arity}, {self.num_features})"
        if x_BCD.ndim != 3 or x_BCD.shape[1:] != (self.arity, self.num_features):
            raise ValueError(
                f"constraints have shape {x_BCD.shape}; {type(self).__name__} learns from"
                f" {KINDS[self.arity]} of shape {wanted}"
            )
        is_similar_B = constraints.is_similar_B
        if self.arity == 2 and (
            is_similar_B is None or is_similar_B.shape != (len(x_BCD),) or is_similar_B.dtype != np.bool_
        ):
            raise ValueError("pairs need is_similar_B, true or false for each (of type bool)")
        label_B = constraints.label_B
        if self.arity == 1 and (
            label_B is None or label_B.shape != (len(x_BCD),) or label_B.dtype != np.int64
        ):
            raise ValueError("labelled points need label_B, the class of each (of type int64)")
        return x_BCD.astype(np.float64, copy=False)

    def _valid(self, x_BCD: Floats) -> Flags:
        is_finite_B = np.asarray((np.abs(x_BCD) <= MOST).all(axis=(1, 2)))
        repeats = [(x_BCD[:, i] == x_BCD[:, j]).all(axis=1) for j in range(self.arity) for i in range(j)]
        is_repeated_B = np.any(repeats, axis=0) if repeats else np.zeros(len(x_BCD), bool)
        is_valid_B = np.asarray(is_finite_B & ~is_repeated_B)
        if self.on_invalid == "error" and not is_valid_B.all():
            first = int(np.argmin(is_valid_B))
            what = "repeats one point" if is_finite_B[first] else f"is not finite, or beyond {MOST:g}"
            raise ValueError(
                f"constraint {self.counts.seen + first} {what}; mend the stream, or skip such (on_invalid='skip')"
            )
        return is_valid_B
