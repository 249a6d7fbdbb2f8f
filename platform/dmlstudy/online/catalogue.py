"""The catalogue of online learners: every one a study can name, and how it is built from plain parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dmlstudy.losses.parameters import choice, constructed, hyperparameters
from dmlstudy.online.learner import Flags, Floats, Labels, OnInvalid, OnlineLearner, Side, State
from dmlstudy.online.linear import LEGO, OASIS, OPML, RDML, PairHinge, TripletHinge
from dmlstudy.online.oahu import OAHU
from dmlstudy.online.running import NearestClassMean, StreamingLDA, Whitening
from dmlstudy.records import Scalar


class EuclideanLearner(OnlineLearner):
    """The features' own Euclidean distance: learns nothing, and shows what learning is worth."""

    arity = 3

    def __init__(self, num_features: int, on_invalid: OnInvalid = "error") -> None:
        super().__init__(num_features, on_invalid)

    def embed(self, x_ND: NDArray[np.floating], side: Side = "gallery") -> list[Floats]:
        return [self._points(x_ND)]

    @property
    def layer_weights(self) -> Floats:
        return np.ones(1)

    def _learn(
        self, x_BCD: Floats, is_similar_B: Flags | None, label_B: Labels | None
    ) -> tuple[Floats, Flags]:
        return np.zeros(len(x_BCD)), np.zeros(len(x_BCD), bool)

    def _parameters(self) -> State:
        return {}

    def _set_parameters(self, state: State) -> None:
        pass


LEARNERS: dict[str, type[OnlineLearner]] = {
    "oahu": OAHU,
    "lego": LEGO,
    "rdml": RDML,
    "oasis": OASIS,
    "opml": OPML,
    "pair_hinge": PairHinge,
    "triplet_hinge": TripletHinge,
    "euclidean": EuclideanLearner,
    "slda": StreamingLDA,
    "nearest_class_mean": NearestClassMean,
    "whitening": Whitening,
}

_GIVEN = ("num_features", "seed", "on_invalid")
"""Arguments the trial supplies; they are nobody's hyperparameters."""


def build(
    name: str,
    params: Mapping[str, Scalar],
    *,
    num_features: int,
    seed: int = 0,
    on_invalid: OnInvalid = "error",
) -> OnlineLearner:
    """The learner ``name`` with these parameters, the others at their defaults.

    Raises ValueError for an unknown learner or parameter (with the nearest name and the list), for a value of the wrong
    type, and whatever the learner itself refuses.
    """
    given = {"num_features": num_features, "seed": seed, "on_invalid": on_invalid}
    return constructed("online learner", name, LEARNERS, params, given)


def parameters_of(name: str) -> dict[str, Scalar]:
    """Hyperparameters of the learner ``name`` with their defaults. Raises ValueError for an unknown name."""
    return hyperparameters(choice("online learner", name, LEARNERS), _GIVEN)
