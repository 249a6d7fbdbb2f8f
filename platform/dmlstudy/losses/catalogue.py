"""The catalogue of losses: every loss a study can name, and how it is built from plain parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from dmlstudy.losses.general import Contrastive, PairWeighting, TripletWeighting
from dmlstudy.losses.interface import Loss
from dmlstudy.losses.parameters import choice, suggestion
from dmlstudy.losses.textbook import Margin, MultiSimilarity, ProxyNCA
from dmlstudy.records import Scalar

CATALOGUE: dict[str, type[Loss]] = {
    "pair_weighting": PairWeighting,
    "triplet_weighting": TripletWeighting,
    "multi_similarity": MultiSimilarity,
    "contrastive": Contrastive,
    "margin": Margin,
    "proxy_nca": ProxyNCA,
}

_GIVEN = ("num_classes", "dim", "seed")
"""Arguments the trial supplies; they are nobody's hyperparameters."""


def build(name: str, params: Mapping[str, Scalar], *, num_classes: int, dim: int, seed: int = 0) -> Loss:
    """The catalogue's loss ``name`` with these parameters, the others at their defaults.

    ``num_classes``, ``dim`` and ``seed`` reach the constructors that ask for them. Raises ValueError for an unknown
    entry or parameter (with the nearest name and the list), for a value of the wrong type, and whatever
    the loss itself refuses.
    """
    loss = choice("loss", name, CATALOGUE)
    defaults = parameters_of(name)
    for key, value in params.items():
        if key not in defaults:
            raise ValueError(f"loss {name!r} has no parameter {key!r}; {suggestion(key, defaults)}")
        if not _fits(value, defaults[key]):
            wanted = "number" if isinstance(defaults[key], float) else type(defaults[key]).__name__
            raise ValueError(
                f"loss {name!r}: {key}={value!r} must be of type {wanted}, like {defaults[key]!r}"
            )
    given = {"num_classes": num_classes, "dim": dim, "seed": seed}
    asked = inspect.signature(loss).parameters
    arguments: dict[str, Scalar] = {key: value for key, value in given.items() if key in asked}
    return loss(**arguments, **params)


def parameters_of(name: str) -> dict[str, Scalar]:
    """Hyperparameters of the loss ``name`` with their defaults; raises ValueError for an unknown name."""
    parameters = inspect.signature(choice("loss", name, CATALOGUE)).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name not in _GIVEN}


def _fits(value: Scalar, default: Scalar) -> bool:
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)
