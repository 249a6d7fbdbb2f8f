"""The catalogue of losses: every loss a study can name, and how it is built from plain parameters."""

from __future__ import annotations

from collections.abc import Mapping

from dmlstudy.losses import pml
from dmlstudy.losses.adaptive import AdaptiveBound
from dmlstudy.losses.distance_levels import DistanceLevels
from dmlstudy.losses.graph import GraphConsistency
from dmlstudy.losses.interface import Loss
from dmlstudy.losses.pair_weighting import Contrastive, PairWeighting, TripletWeighting
from dmlstudy.losses.pairs import (
    Angular,
    BinomialDeviance,
    Circle,
    GeneralizedLiftedStructure,
    LiftedStructure,
    LiftedStructureGPW,
    Margin,
    MultiSimilarity,
    MultiSimilarityDistance,
    NPair,
    RankedList,
)
from dmlstudy.losses.parameters import at_least, choice, constructed, hyperparameters
from dmlstudy.losses.proxies import (
    ArcFace,
    CosFace,
    ProxyAnchor,
    ProxyNCA,
    ProxyNCAPlusPlus,
    SoftTriple,
)
from dmlstudy.losses.regularized import Regularized
from dmlstudy.losses.structure import Structure
from dmlstudy.losses.triplets import Triplet
from dmlstudy.records import Scalar

CATALOGUE: dict[str, type[Loss]] = {
    "pair_weighting": PairWeighting,
    "triplet_weighting": TripletWeighting,
    "contrastive": Contrastive,
    "triplet": Triplet,
    "n_pair": NPair,
    "lifted_structure": LiftedStructure,
    "lifted_structure_gpw": LiftedStructureGPW,
    "generalized_lifted_structure": GeneralizedLiftedStructure,
    "multi_similarity": MultiSimilarity,
    "multi_similarity_distance": MultiSimilarityDistance,
    "binomial_deviance": BinomialDeviance,
    "margin": Margin,
    "ranked_list": RankedList,
    "circle": Circle,
    "angular": Angular,
    "proxy_nca": ProxyNCA,
    "proxy_nca_pp": ProxyNCAPlusPlus,
    "proxy_anchor": ProxyAnchor,
    "soft_triple": SoftTriple,
    "arcface": ArcFace,
    "cosface": CosFace,
    "adaptive_bound": AdaptiveBound,
}
"""Losses that train an embedder by themselves; ``pml:ClassName`` names any other of that library."""

REGULARIZERS: dict[str, type[Loss]] = {
    "graph_consistency": GraphConsistency,
    "structure": Structure,
    "distance_levels": DistanceLevels,
}
"""Terms that are added to any of the losses, with a weight lambda."""

WEIGHT = "weight"
"""The regulariser's parameter that the sum needs, not the regulariser itself."""

_GIVEN = ("num_classes", "dim", "num_layers", "seed")
"""Arguments the trial supplies; they are nobody's hyperparameters."""


def build(
    name: str,
    params: Mapping[str, Scalar],
    *,
    regularizer: tuple[str, Mapping[str, Scalar]] | None = None,
    memory: bool = False,
    num_classes: int,
    dim: int,
    num_layers: int = 1,
    seed: int = 0,
) -> Loss:
    """The catalogue's loss ``name`` with these parameters, the others at their defaults.

    With a ``regularizer`` (its name and parameters, ``weight`` among them) it is the sum of both. ``memory`` says
    that references will hold rows of earlier batches. ``num_classes``, ``dim``, ``num_layers`` (of the embedder's
    head) and ``seed`` reach the constructors
    that ask for them. Raises ValueError for an unknown entry or parameter (with the nearest name and the
    list), for a value of the wrong type, for a loss that cannot use a memory, and whatever the loss
    itself refuses.
    """
    given = {"num_classes": num_classes, "dim": dim, "num_layers": num_layers, "seed": seed}
    if name.startswith(pml.PREFIX):
        loss: Loss = pml.build(name, params, num_classes=num_classes, dim=dim, seed=seed)
    else:
        loss = constructed("loss", name, CATALOGUE, params, given)
    if memory and not loss.accepts_memory:
        able = [entry for entry, kind in CATALOGUE.items() if kind.accepts_memory]
        raise ValueError(
            f"loss {name!r} cannot use a cross-batch memory; set batch.memory_size to 0, or choose from "
            f"{', '.join(able)}"
        )
    if regularizer is None:
        return loss
    kind, its_params = regularizer
    weight = its_params.get(WEIGHT, 1.0)
    if isinstance(weight, str | bool):
        raise ValueError(f"regularizer {kind!r}: {WEIGHT}={weight!r} must be a number")
    rest = {key: value for key, value in its_params.items() if key != WEIGHT}
    try:
        term = constructed("regularizer", kind, REGULARIZERS, rest, given)
        return Regularized(loss, term, at_least(WEIGHT, weight, 0))
    except ValueError as error:
        said = str(error)
        raise ValueError(
            said if said.startswith("regularizer") else f"regularizer {kind!r}: {said}"
        ) from None


def parameters_of(name: str) -> dict[str, Scalar]:
    """Hyperparameters of the loss or regulariser ``name`` with their defaults.

    Raises ValueError for an unknown name.
    """
    if name.startswith(pml.PREFIX):
        return pml.parameters_of(name)
    if name in REGULARIZERS:
        return {WEIGHT: 1.0} | hyperparameters(REGULARIZERS[name], _GIVEN)
    return hyperparameters(choice("loss", name, CATALOGUE), _GIVEN)
