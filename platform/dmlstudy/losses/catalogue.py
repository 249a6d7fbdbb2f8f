"""The catalogue of losses: every loss a study can name, and how it is built from plain parameters.

Weightings, miners and distances have names here alone: a loss itself is given objects. From Python an object may stand
where a study file has a name (``losses.build``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TypeAlias, cast

from dmlstudy.losses import pml
from dmlstudy.losses.adaptive import AdaptiveBound
from dmlstudy.losses.class_margins import AdaFace, CurricularFace, MagFace, SubCenterArcFace
from dmlstudy.losses.class_softmax import ArcFace, ClassSoftmax, CosFace, NormSoftmax, ProxyNCAPlusPlus
from dmlstudy.losses.distance_levels import DistanceLevels
from dmlstudy.losses.distances import (
    Distance,
    Hyperbolic,
    checked_distance,
    cosine,
    euclidean,
    squared_euclidean,
)
from dmlstudy.losses.graph import GraphConsistency
from dmlstudy.losses.infonce import SigLIP, SupCon
from dmlstudy.losses.interface import Loss
from dmlstudy.losses.matryoshka import Matryoshka
from dmlstudy.losses.mining import (
    AllOf,
    DistanceWeighted,
    Miner,
    NegativeDraw,
    SimilarityRule,
    Thresholds,
    batch_hard,
    checked_miner,
    keep_all,
)
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
from dmlstudy.losses.potential_field import PotentialField
from dmlstudy.losses.products import PRODUCTS, exact
from dmlstudy.losses.proxies import ProxyAnchor, ProxyNCA, SoftTriple
from dmlstudy.losses.ranking import RecallAtK, SmoothAP, SupAP
from dmlstudy.losses.regularized import Regularized
from dmlstudy.losses.retention import Retention
from dmlstudy.losses.spreading import GlobalOrthogonal, KoLeo
from dmlstudy.losses.structure import Structure
from dmlstudy.losses.threshold_consistency import ThresholdConsistentMargin
from dmlstudy.losses.tiles import RowLoss
from dmlstudy.losses.triplets import Hardest, Triplet
from dmlstudy.losses.weighting import Constant, Exponential, Power, Weighting, checked_weighting
from dmlstudy.records import CURVATURE, HYPERBOLIC, LIBRARY_PREFIX, Scalar
from dmlstudy.text import shown

Part: TypeAlias = Weighting | Miner | NegativeDraw | Distance
"""A part that a loss is built from."""


def weighting_of(named: str | Weighting, exponent: float, rate: float) -> Weighting:
    """The weighting of that name with these parameters, or the object; raises ValueError for an unknown name."""
    if not isinstance(named, str):
        return checked_weighting(named)
    kinds: dict[str, Weighting] = {
        "constant": Constant(),
        "power": Power(exponent),
        "exponential": Exponential(rate),
    }
    return choice("weighting", named, kinds)


def miner_of(named: str | Miner, miners: Mapping[str, Miner]) -> Miner:
    """The miner of names joined by '+', or the object; raises ValueError for a name that is not among ``miners``."""
    if not isinstance(named, str):
        return checked_miner(named)
    return AllOf(tuple(choice("mining", name, miners) for name in named.split("+")))


def distance_of(named: str | Distance, curvature: float) -> Distance:
    """The distance of that name, or the object; raises ValueError for an unknown name.

    ``curvature`` is that of the ball of 'hyperbolic'.
    """
    if not isinstance(named, str):
        return checked_distance(named)
    kinds: dict[str, Distance] = {
        "euclidean": euclidean,
        "squared_euclidean": squared_euclidean,
        "cosine": cosine,
        HYPERBOLIC: Hyperbolic(curvature),
    }
    return choice("distance", named, kinds)


def pair_weighting(
    positive_margin: float = 0.0,
    negative_margin: float = 0.8,
    weighting: str | Weighting = "exponential",
    p: float = 0.0,
    q: float = 1.0,
    alpha: float = 0.0,
    beta: float = 2.0,
    normalize: str = "anchor",
    mining: str | Miner = "threshold",
    epsilon: float = 0.1,
    distance: str | Distance = "euclidean",
    detach_weights: bool = True,
    curvature: float = CURVATURE,
) -> PairWeighting:
    """The pair form with its parts by name, or an object, the same weighting for both signs then.

    Raises ValueError unless p, q, alpha, beta, epsilon >= 0, for unknown names and as ``PairWeighting``.
    """
    for name, value in (("p", p), ("q", q), ("alpha", alpha), ("beta", beta), ("epsilon", epsilon)):
        at_least(name, value, 0)
    miners: dict[str, Miner] = {
        "threshold": keep_all,
        "margin": SimilarityRule(epsilon),
        "batch_hard": batch_hard,
    }
    return PairWeighting(
        positive_margin,
        negative_margin,
        weighting_of(weighting, p, alpha),
        weighting_of(weighting, q, beta),
        normalize,
        miner_of(mining, miners),
        distance_of(distance, curvature),
        detach_weights,
    )


def triplet_weighting(
    margin: float = 0.1,
    weighting: str | Weighting = "exponential",
    p: float = 5.0,
    alpha: float = 40.0,
    normalize: str = "anchor",
    mining: str | Miner = "all",
    epsilon: float = 0.1,
    positive_margin: float = 0.0,
    negative_margin: float = 2.0,
    distance: str | Distance = "euclidean",
    detach_weights: bool = True,
    curvature: float = CURVATURE,
) -> TripletWeighting:
    """The triplet form with its parts by name, or an object; 'semi_hard' restricts triplets, not pairs.

    Raises ValueError unless p, alpha, epsilon >= 0, for unknown names and as ``TripletWeighting``.
    """
    for name, value in (("p", p), ("alpha", alpha), ("epsilon", epsilon)):
        at_least(name, value, 0)
    at_least("negative_margin", negative_margin, at_least("positive_margin", positive_margin, 0))
    miners: dict[str, Miner] = {
        "all": keep_all,
        "semi_hard": keep_all,
        "margin": SimilarityRule(epsilon),
        "batch_hard": batch_hard,
        "threshold": Thresholds(positive_margin, negative_margin),
    }
    return TripletWeighting(
        margin,
        weighting_of(weighting, p, alpha),
        normalize,
        miner_of(mining, miners),
        isinstance(mining, str) and "semi_hard" in mining.split("+"),
        distance_of(distance, curvature),
        detach_weights,
    )


def triplet(
    margin: float = 0.2,
    mining: str | Miner | NegativeDraw = "all",
    distance: str | Distance = "euclidean",
    seed: int = 0,
    curvature: float = CURVATURE,
) -> Triplet:
    """The triplet loss with its parts by name, or an object.

    Raises ValueError for unknown names, and as ``Triplet``.
    """
    miner: Miner | NegativeDraw
    if isinstance(mining, str):
        miners: dict[str, Miner | NegativeDraw] = {
            "all": keep_all,
            "semi_hard": keep_all,
            "batch_hard": Hardest(),
            "distance_weighted": DistanceWeighted(seed),
        }
        miner = choice("mining", mining, miners)
    else:
        miner = mining if isinstance(mining, NegativeDraw) else checked_miner(mining)
    return Triplet(margin, miner, mining == "semi_hard", distance_of(distance, curvature))


def supcon(
    temperature: float = 0.1,
    learn: bool = False,
    denominator: str = "all",
    average: str = "anchors",
    distance: str | Distance = "cosine",
    curvature: float = CURVATURE,
) -> SupCon:
    """The supervised contrastive loss with its distance by name, or an object. Raises ValueError as ``SupCon``."""
    return SupCon(temperature, learn, denominator, average, distance_of(distance, curvature))


def margin(
    num_classes: int,
    alpha: float = 0.2,
    beta: float = 1.2,
    nu: float = 0.0,
    mining: str | NegativeDraw = "all",
    seed: int = 0,
) -> Margin:
    """The margin loss with its negatives by name, or an object. Raises ValueError for an unknown name."""
    draws = {"all": None, "distance_weighted": DistanceWeighted(seed)}
    if isinstance(mining, str):
        return Margin(num_classes, alpha, beta, nu, choice("mining", mining, draws))
    if not isinstance(mining, NegativeDraw):
        raise ValueError(
            f"mining={shown(mining)} is no NegativeDraw; pass an object with counts_all and draw(rows, d_TM)"
        )
    return Margin(num_classes, alpha, beta, nu, mining)


CATALOGUE: dict[str, Callable[..., Loss]] = {
    "pair_weighting": pair_weighting,
    "triplet_weighting": triplet_weighting,
    "contrastive": Contrastive,
    "triplet": triplet,
    "n_pair": NPair,
    "lifted_structure": LiftedStructure,
    "lifted_structure_gpw": LiftedStructureGPW,
    "generalized_lifted_structure": GeneralizedLiftedStructure,
    "multi_similarity": MultiSimilarity,
    "multi_similarity_distance": MultiSimilarityDistance,
    "binomial_deviance": BinomialDeviance,
    "margin": margin,
    "ranked_list": RankedList,
    "circle": Circle,
    "angular": Angular,
    "supcon": supcon,
    "siglip": SigLIP,
    "tcm": ThresholdConsistentMargin,
    "smooth_ap": SmoothAP,
    "sup_ap": SupAP,
    "recall_at_k": RecallAtK,
    "proxy_nca": ProxyNCA,
    "proxy_nca_pp": ProxyNCAPlusPlus,
    "proxy_anchor": ProxyAnchor,
    "soft_triple": SoftTriple,
    "potential_field": PotentialField,
    "norm_softmax": NormSoftmax,
    "arcface": ArcFace,
    "cosface": CosFace,
    "subcenter_arcface": SubCenterArcFace,
    "curricularface": CurricularFace,
    "adaface": AdaFace,
    "magface": MagFace,
    "adaptive_bound": AdaptiveBound,
}
"""Losses that train an embedder by themselves; ``pml:ClassName`` names any other of that library."""

REGULARIZERS: dict[str, type[Loss]] = {
    "graph_consistency": GraphConsistency,
    "structure": Structure,
    "distance_levels": DistanceLevels,
    "tcm": ThresholdConsistentMargin,
    "koleo": KoLeo,
    "gor": GlobalOrthogonal,
    "retention": Retention,
}
"""Terms that are added to any of the losses, with a weight lambda."""

WEIGHT = "weight"
"""The regulariser's parameter that the sum needs, not the regulariser itself."""

PRECISION = "precision"
"""The parameter that every loss has whose products may be coarser than float32."""

BACKEND = "backend"
"""The parameter that every loss has which kernels may compute."""

BACKENDS = ("auto", "tiles", "triton")
"""Names of what computes a loss on a GPU: kernels where there are any, no kernels, kernels."""

_GIVEN = ("num_classes", "class_sizes", "dim", "num_layers", "seed", "curvature", "share")
"""Arguments the trial supplies; they are not hyperparameters."""

PARTS = ("weighting", "mining", "distance")
"""Parameters that name a part; from Python an object may replace the name."""


def build(
    name: str,
    params: Mapping[str, Scalar | Part],
    *,
    regularizer: tuple[str, Mapping[str, Scalar]] | None = None,
    memory: bool = False,
    leading: Sequence[int] = (),
    num_classes: int,
    dim: int,
    class_sizes: Sequence[int] | None = None,
    num_layers: int = 1,
    seed: int = 0,
    curvature: float = CURVATURE,
    share: slice | None = None,
) -> Loss:
    """The catalogue's loss ``name`` with these parameters, the others at their defaults.

    With a ``regularizer`` (its name and parameters, ``weight`` among them) it is the sum of both. ``memory`` says
    that references will hold rows of earlier batches.

    ``num_classes``, ``class_sizes`` (the number of training images of each class), ``dim``, ``num_layers`` (of the
    embedder's head), ``seed`` and ``curvature`` (of the ball that 'hyperbolic' is the distance of) reach the
    constructors that ask for them.

    With ``share`` the loss has the vectors of this part of its classes alone (``ClassSoftmax``).

    With ``leading`` the loss, without its regulariser, is the mean over embeddings' leading parts of these sizes and
    the whole (``Matryoshka``).

    A parameter that names a part (``PARTS``) also accepts an object. A parameter that the chosen parts do not use has
    no effect here, because studies of earlier versions may contain one (``unused`` finds them).

    Raises ValueError for an unknown entry or parameter (with the nearest name and the list), for a value of the wrong
    type, for a loss that cannot use a memory, and whatever the loss itself refuses.
    """
    given = {
        "num_classes": num_classes,
        "class_sizes": class_sizes,
        "dim": dim,
        "num_layers": num_layers,
        "seed": seed,
        "curvature": curvature,
        "share": share,
    }
    if share is not None and (name.startswith(LIBRARY_PREFIX) or not _shares_classes(name)):
        able = [entry for entry in CATALOGUE if _shares_classes(entry)]
        raise ValueError(
            f"loss {name!r} has no class vectors to share out; set training.class_shards to false, or choose from"
            f" {', '.join(able)}"
        )
    precision, backend = params.get(PRECISION, "float32"), params.get(BACKEND, "auto")
    if not name.startswith(LIBRARY_PREFIX):
        params = {key: value for key, value in params.items() if key not in (PRECISION, BACKEND)}
    parts = {key: value for key, value in params.items() if key in PARTS and not _is_scalar(value)}
    named = cast("dict[str, Scalar]", {key: value for key, value in params.items() if key not in parts})
    if name.startswith(LIBRARY_PREFIX):
        loss: Loss = pml.build(
            name, cast("Mapping[str, Scalar]", params), num_classes=num_classes, dim=dim, seed=seed
        )
    else:
        loss = constructed("loss", name, CATALOGUE, named, given, parts)
        _set_precision(loss, f"loss {name!r}", precision)
        _set_backend(loss, name, backend)
    if memory and not loss.accepts_memory:
        able = [entry for entry in CATALOGUE if kind_of(entry).accepts_memory]
        raise ValueError(
            f"loss {name!r} cannot use a cross-batch memory; set batch.memory_size to 0, or choose from "
            f"{', '.join(able)}"
        )
    if leading:
        loss = Matryoshka(loss, leading, dim)
    if regularizer is None:
        return loss
    kind, its_params = regularizer
    weight = its_params.get(WEIGHT, 1.0)
    if isinstance(weight, str | bool):
        raise ValueError(f"regularizer {kind!r}: {WEIGHT}={weight!r} must be a number")
    try:
        rest = {key: value for key, value in its_params.items() if key not in (WEIGHT, PRECISION)}
        term = constructed("regularizer", kind, REGULARIZERS, rest, given)
        _set_precision(term, f"regularizer {kind!r}", its_params.get(PRECISION, "float32"))
        return Regularized(loss, term, at_least(WEIGHT, weight, 0))
    except ValueError as error:
        said = str(error)
        raise ValueError(
            said if said.startswith("regularizer") else f"regularizer {kind!r}: {said}"
        ) from None


def _set_precision(loss: Loss, called: str, precision: object) -> None:
    """Let the loss compute its products so; raises ValueError for an unknown precision, and a loss that has but one."""
    product = choice(PRECISION, str(precision), PRODUCTS)
    if not loss.has_precision and product is not exact:
        raise ValueError(
            f"{called} has no products of matrices to compute in {precision}; leave {PRECISION} out"
        )
    for module in loss.modules():
        if isinstance(module, Loss):
            module.product = product


def _shares_classes(name: str) -> bool:
    return name in CATALOGUE and issubclass(kind_of(name), ClassSoftmax)


def _set_backend(loss: Loss, name: str, backend: object) -> None:
    """Let kernels compute the loss on a GPU, or not.

    Raises ValueError for an unknown backend, and where kernels are asked for by name: for a loss that has none, and
    without Triton.
    """
    asked = choice(BACKEND, str(backend), {each: each for each in BACKENDS})
    if asked == "tiles":
        return
    has_kernels, has_triton = isinstance(loss, RowLoss) and loss.has_kernels, find_spec("triton") is not None
    if asked == "triton" and not has_kernels:
        raise ValueError(
            f"loss {name!r} has no kernels; leave {BACKEND} out, or choose from {', '.join(_WITH_KERNELS)}"
        )
    if asked == "triton" and not has_triton:
        raise ValueError(f"{BACKEND}={backend!r} needs Triton; pip install triton, or leave {BACKEND} out")
    if isinstance(loss, RowLoss) and has_kernels and has_triton:
        loss.kernel_devices, loss.needs_kernels = ("cuda",), asked == "triton"


def sizes_of(name: str) -> list[str]:
    """The sizes, of ``num_classes`` and ``dim``, that the loss ``name`` needs; raises ValueError for an unknown one."""
    if name.startswith(LIBRARY_PREFIX):
        return ["num_classes", "dim"]
    asked = inspect.signature(choice("loss", name, CATALOGUE)).parameters
    return [key for key in ("num_classes", "dim") if key in asked]


def has_class_vectors(loss: Loss) -> bool:
    """True if the loss compares embeddings with vectors of classes, so that one image of a class is enough for it."""
    own = loss.base if isinstance(loss, Regularized) else loss
    return any(parameter.ndim > 1 for parameter in own.parameters())


def kind_of(name: str) -> type[Loss]:
    """The class of the catalogue's loss ``name``."""
    entry = CATALOGUE[name]
    kind = entry if isinstance(entry, type) else inspect.get_annotations(entry, eval_str=True)["return"]
    assert issubclass(kind, Loss)
    return kind


_WITH_KERNELS = [name for name in CATALOGUE if getattr(kind_of(name), "has_kernels", False)]


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float)


def parameters_of(name: str) -> dict[str, Scalar]:
    """Hyperparameters of the loss ``name`` with their defaults; raises ValueError for an unknown one."""
    if name.startswith(LIBRARY_PREFIX):
        return pml.parameters_of(name)
    own = hyperparameters(choice("loss", name, CATALOGUE), _GIVEN)
    if kind_of(name).has_precision:
        own |= {PRECISION: "float32"}
    return own | {BACKEND: "auto"} if name in _WITH_KERNELS else own


def parameters_of_regularizer(name: str) -> dict[str, Scalar]:
    """Hyperparameters of the regulariser ``name``, its weight among them, with their defaults.

    Raises ValueError for an unknown name.
    """
    kind = choice("regularizer", name, REGULARIZERS)
    own = {WEIGHT: 1.0, **hyperparameters(kind, _GIVEN)}
    return own | {PRECISION: "float32"} if kind.has_precision else own
