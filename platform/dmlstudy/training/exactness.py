"""The law of the training step, checked: any number of ranks gives the gradient of one process.

A study may run its trials on 1, 2 or 64 workers and must find the same optimum.

So every loss that can be named, with regularisers and memory, is taken through one training step by all ranks
together, on equal and on ragged shares of a global batch, at once and in chunks, and through the same step by one
process alone.

Then value and gradients are compared, of the encoder and of the loss's own parameters, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy import distributed
from dmlstudy.embedders.ball import on_ball
from dmlstudy.losses import catalogue
from dmlstudy.losses.class_softmax import ClassSoftmax
from dmlstudy.losses.interface import ALONE, Embeddings, Labels, World
from dmlstudy.losses.memory import CrossBatchMemory
from dmlstudy.records import CLIP_RADIUS, CURVATURE, HYPERBOLIC, Scalar
from dmlstudy.training.class_shards import shared_out
from dmlstudy.training.gradients import gradients_of
from dmlstudy.training.step import Step

Batch: TypeAlias = tuple[Tensor, distributed.GlobalLabels]
"""Images of a rank, and the labels of all ranks."""

NUM_CLASSES, DIM, NUM_LAYERS, NUM_IMAGES = 4, 5, 2, 24
MANY_CLASSES = 23
CHUNK = 5
"""Images embedded at once in the step by chunks; it divides no share of 1, 2 or 4 ranks."""
TOLERANCE = 1e-9
"""Largest relative error, of the value and of each gradient, that counts as equal in float64."""
KERNEL_TOLERANCE = 1e-4
"""The same of kernels, which compute in float32, beside tiles in float64."""


@dataclass(frozen=True)
class Case:
    """A loss with parameters under which a batch of random embeddings exercises it."""

    name: str
    loss: str
    params: dict[str, Scalar]
    regularizer: tuple[str, dict[str, Scalar]] | None = None
    memory_size: int = 0
    num_classes: int = NUM_CLASSES
    """More than the batch has where the loss looks at some classes alone."""
    has_shards: bool = False
    """True if each rank has the vectors of a share of the classes; one process has them all."""


def _cases() -> dict[str, Case]:
    plain: dict[str, dict[str, Scalar]] = {
        "pair_weighting": {"negative_margin": 1.5, "mining": "threshold+margin", "alpha": 1.0},
        "triplet_weighting": {"margin": 0.3, "alpha": 10.0},
        "contrastive": {"negative_margin": 1.5},
        "arcface": {"scale": 4.0},
        "cosface": {"scale": 4.0},
        "norm_softmax": {"temperature": 0.25},
        "subcenter_arcface": {"scale": 4.0, "centers": 2},
        "curricularface": {"scale": 4.0},
        "adaface": {"scale": 4.0, "t_alpha": 1.0},
        "magface": {"scale": 4.0},
        "circle": {"gamma": 8.0},
        "proxy_anchor": {"alpha": 8.0},
        "supcon": {"learn": True},
        "siglip": {"bias": -2.0},
        "tcm": {"negative_margin": 0.1},
        "smooth_ap": {"tau": 0.1},
        "sup_ap": {"tau": 0.1},
        "recall_at_k": {"tau": 0.1},
        "potential_field": {"alpha": 2.0, "delta": 0.9, "proxies": 2},
    }
    variants: list[tuple[str, dict[str, Scalar]]] = [
        ("pair_weighting", {"negative_margin": 1.5, "weighting": "power", "detach_weights": False}),
        ("pair_weighting", {"negative_margin": 1.5, "mining": "threshold+batch_hard", "normalize": "none"}),
        ("triplet_weighting", {"margin": 0.5, "mining": "semi_hard+margin", "detach_weights": False}),
        ("triplet", {"margin": 0.5, "mining": "distance_weighted"}),
        ("pair_weighting", {"negative_margin": 6.0, "distance": "hyperbolic"}),
        ("triplet_weighting", {"margin": 1.0, "distance": "hyperbolic"}),
        ("supcon", {"temperature": 0.5, "learn": True, "distance": "hyperbolic"}),
        ("margin", {"mining": "distance_weighted", "nu": 0.01}),
        ("multi_similarity_distance", {"version": "v2"}),
        ("potential_field", {"alpha": 2.0, "delta": 0.9, "proxies": 0}),
        ("multi_similarity", {"precision": "bf16x3"}),
        ("norm_softmax", {"temperature": 0.25, "precision": "tf32"}),
        ("proxy_nca", {"precision": "tf32"}),
        ("proxy_anchor", {"alpha": 8.0, "precision": "bf16"}),
        ("soft_triple", {"precision": "bf16x3"}),
        ("angular", {"precision": "tf32"}),
        ("lifted_structure", {"precision": "bf16x3"}),
        ("n_pair", {"positive": "all"}),
        ("n_pair", {"positive": "one_per_class"}),
        ("supcon", {"denominator": "negatives", "average": "with_positive"}),
        ("smooth_ap", {"tau": 0.1, "count_self": True}),
        ("recall_at_k", {"tau": 0.1, "simix": True}),
        ("subcenter_arcface", {"scale": 4.0, "margin_by": "class_size"}),
        ("magface", {"scale": 4.0, "easy": False}),
    ]
    regularizers: list[tuple[str, dict[str, Scalar]]] = [
        ("graph_consistency", {"weight": 1.0}),
        ("graph_consistency", {"weight": 1.0, "term": "gc", "sigma_mode": "median", "draw": "two_draws"}),
        ("structure", {"weight": 1.0}),
        ("structure", {"weight": 1.0, "preset": "paper", "eta_source": "adaptive"}),
        ("distance_levels", {"weight": 1.0}),
        ("tcm", {"weight": 1.0, "negative_margin": 0.1}),
        ("koleo", {"weight": 1.0}),
        ("gor", {"weight": 1.0}),
        ("retention", {"weight": 1.0}),
        ("retention", {"weight": 1.0, "of": "embedding"}),
        ("graph_consistency", {"weight": 1.0, "precision": "tf32"}),
        ("structure", {"weight": 1.0, "precision": "bf16x3"}),
        ("gor", {"weight": 1.0, "precision": "bf16"}),
    ]
    many: list[tuple[str, dict[str, Scalar]]] = [
        ("norm_softmax", {"temperature": 0.25, "sample": 0.4}),
        ("subcenter_arcface", {"scale": 4.0, "centers": 2, "margin_by": "power", "sample": 0.4}),
        ("magface", {"scale": 4.0, "sample": 0.1}),
    ]
    with_shards: list[tuple[str, dict[str, Scalar], tuple[str, dict[str, Scalar]] | None]] = [
        (name, plain.get(name, {}), None)
        for name in catalogue.CATALOGUE
        if issubclass(catalogue.kind_of(name), ClassSoftmax)
    ]
    with_shards += [
        ("norm_softmax", {"temperature": 0.25, "precision": "bf16x3"}, None),
        ("subcenter_arcface", {"scale": 4.0, "centers": 2, "sample": 0.4}, None),
        ("cosface", {"scale": 4.0, "sample": 0.1}, regularizers[0]),
    ]
    if find_spec("triton") is not None:
        kernels: dict[str, Scalar] = {catalogue.BACKEND: "triton"}
        variants += [
            (name, plain.get(name, {}) | kernels)
            for name in ("contrastive", "binomial_deviance", "multi_similarity", "circle")
        ]
        variants.append(("supcon", kernels))
    cases = [Case(name, name, plain.get(name, {})) for name in catalogue.CATALOGUE]
    cases += [Case(_named(name, params), name, params) for name, params in variants]
    base = plain["contrastive"]
    cases += [
        Case(f"contrastive + {_named(name, {k: v for k, v in params.items() if k != 'weight'})}",
             "contrastive", base, (name, params))
        for name, params in regularizers
    ]  # fmt: skip
    cases += [
        Case("proxy_nca_pp + graph_consistency", "proxy_nca_pp", {}, regularizers[0]),
        Case("contrastive, memory", "contrastive", base, memory_size=30),
        Case("recall_at_k simix=True, memory", "recall_at_k", {"tau": 0.1, "simix": True}, memory_size=30),
        Case("contrastive + structure, memory", "contrastive", base, regularizers[2], memory_size=30),
    ]
    cases += [
        Case(f"{_named(name, params)}, {MANY_CLASSES} classes", name, params, num_classes=MANY_CLASSES)
        for name, params in many
    ]
    cases += [
        Case(
            f"{_named(name, params)}, {MANY_CLASSES} classes, shards",
            name,
            params,
            regularizer,
            0,
            MANY_CLASSES,
            True,
        )
        for name, params, regularizer in with_shards
    ]
    return {case.name: case for case in cases}


def _named(name: str, params: dict[str, Scalar]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in params.items())])


CASES: dict[str, Case] = _cases()
"""Every catalogue entry, the variants that take another path through the code, and the combinations."""


class Outcome(NamedTuple):
    """The outcome of a training step: the global mean loss, and each parameter's gradient."""

    value: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Finding:
    """The step of all ranks beside that of one process, the worst over shares and parameters."""

    case: str
    value: float
    value_error: float
    cosine: float
    norm_ratio: float
    error: float
    tolerance: float = TOLERANCE

    @property
    def is_exact(self) -> bool:
        return self.value_error <= self.tolerance and self.error <= self.tolerance


class SmallEncoder(nn.Module):
    """Two layers and, where asked for, a structure head, with random weights: what a step of the check trains.

    Its embeddings are unit vectors or, ``in_ball``, points of the ball of the usual curvature.
    """

    has_layers = False

    def __init__(self, *, has_structure: bool, in_ball: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.in_ball = in_ball
        generator = torch.Generator().manual_seed(seed)
        self.backbone: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, DIM)
        self.structure = nn.Linear(8, DIM) if has_structure else None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def embed_with_structure(
        self, images_NHWC: Tensor, *, is_unit: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        return self.embed_features(self.features(images_NHWC), is_unit=is_unit)

    def features(self, images_NHWC: Tensor) -> Tensor:
        features_NF: Tensor = self.backbone(images_NHWC)
        return features_NF

    def embed_features(self, features_NF: Tensor, *, is_unit: bool = True) -> tuple[Tensor, Tensor | None]:
        omega_ND = None if self.structure is None else 0.5 + torch.sigmoid(self.structure(features_NF))
        v_ND = self.head(features_NF)
        if self.in_ball:
            return on_ball(v_ND, CURVATURE, CLIP_RADIUS), omega_ND
        return functional.normalize(v_ND) if is_unit else v_ND, omega_ND

    def weigh_layers(self, alpha_L: Tensor) -> None:
        raise AssertionError("it has no layers to weigh")


def step_of(
    case: Case, gather: Callable[[Embeddings], Embeddings] | None = None, world: World | None = None
) -> Step:
    """The very step that trains, over a small encoder and the case's loss; of the process group, unless given."""
    has_structure = case.regularizer is not None and case.regularizer[0] == "structure"
    in_ball = case.params.get("distance") == HYPERBOLIC
    has_shards = case.has_shards and world is None
    encoder = SmallEncoder(has_structure=has_structure, in_ball=in_ball)
    loss = catalogue.build(
        case.loss,
        case.params,
        regularizer=case.regularizer,
        memory=case.memory_size > 0,
        num_classes=case.num_classes,
        class_sizes=range(1, case.num_classes + 1),
        dim=DIM,
        num_layers=NUM_LAYERS,
        share=distributed.own_slice(case.num_classes) if has_shards else None,
    )
    memory = CrossBatchMemory(case.memory_size, DIM) if case.memory_size else None
    start = SmallEncoder(has_structure=False, seed=1) if loss.retains else None
    return Step(encoder, loss, memory, start=start, gather=gather, world=world)


def check(case: Case, device: torch.device | str = "cpu") -> Finding:
    """Compare the ranks' step, at once and in chunks, with one process's; every rank must call this, and gets the same
    answer.

    Kernels compute in float32 and on a GPU alone; there they are compared with tiles of one process.
    """
    by_kernels = case.params.get(catalogue.BACKEND) == "triton" and torch.device(device).type == "cuda"
    dtype = torch.float32 if by_kernels else torch.float64
    truth = _alone(case, step_of(case, lambda batch: batch, ALONE), device)
    tolerance = KERNEL_TOLERANCE if by_kernels else TOLERANCE
    worst = Finding(case.name, truth.value, 0.0, 1.0, 1.0, 0.0, tolerance)
    for share in (_equal_share(), _ragged_share()):
        for chunk in (None, CHUNK):
            worst = _worse(worst, ranks_step(case, step_of(case), share, chunk, device, dtype), truth)
    return worst


def ranks_step(
    case: Case,
    step: Step,
    share: slice,
    chunk: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Outcome:
    """One training step of all ranks, each with its share of the global batch, as a trial makes it."""
    before, batch = (_batch(number, share, device, dtype) for number in (1, 0))
    step = _prepared(case, step, before, device, dtype)
    mean = gradients_of(step, chunk)(*batch)
    return Outcome(mean.read(), _gradients(step))


def _alone(case: Case, step: Step, device: torch.device | str) -> Outcome:
    """The same step of one process on the whole batch."""
    step = _prepared(case, step, _whole(1, device), device, torch.float64)
    total, count, _ = step(*_whole(0, device))
    objective = total / count.clamp(min=1)
    objective.backward()
    return Outcome(objective.item(), _gradients(step))


def _prepared(case: Case, step: Step, before: Batch, device: torch.device | str, dtype: torch.dtype) -> Step:
    """The step in this precision, after another batch that fills the memory where there is one."""
    step = step.to(device, dtype)
    if case.memory_size:
        with torch.no_grad():
            step(*before)
    return step


def _batch(number: int, share: slice, device: torch.device | str, dtype: torch.dtype) -> Batch:
    """The images of this rank's share, and the labels of all."""
    x, y, ids = (part[share].to(device) for part in global_batch(number))
    return x.to(dtype), distributed.asked(y, ids)


def _whole(number: int, device: torch.device | str) -> Batch:
    """The batch as one process has it, for which other ranks have no rows."""
    x, y, ids = global_batch(number)
    sizes = [len(y) if rank == distributed.rank() else 0 for rank in range(distributed.world_size())]
    return x.to(device), distributed.GlobalLabels(Labels(y, ids), sizes, torch.device(device))


def _gradients(step: Step) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(step.named_parameters(), whole_gradients(step), strict=True)
    }


def whole_gradients(step: Step) -> list[Tensor | None]:
    """Each parameter's gradient, those of shares of classes one after the other; every rank must call this."""
    shares = shared_out(step)
    found: list[Tensor | None] = []
    for parameter in step.parameters():
        gradient = None if parameter.grad is None else parameter.grad.to_dense()
        if parameter in shares:
            gradient = distributed.gather_rows(torch.zeros_like(parameter) if gradient is None else gradient)
        found.append(gradient)
    return found


def _worse(worst: Finding, found: Outcome, truth: Outcome) -> Finding:
    value_error = abs(found.value - truth.value) / max(abs(truth.value), 1e-300)
    cosines, ratios, errors = [worst.cosine], [worst.norm_ratio], [worst.error]
    for name, wanted in truth.gradients.items():
        size, got = float(wanted.norm()), found.gradients[name]
        if size == 0 and not got.any():
            continue
        ratios.append(float(got.norm()) / size if size else math.inf)
        cosines.append(float((got * wanted).sum() / (got.norm() * size).clamp(min=1e-300)))
        errors.append(float((got - wanted).norm()) / size if size else math.inf)
    return Finding(
        worst.case,
        worst.value,
        max(worst.value_error, value_error),
        min(cosines),
        max(ratios, key=lambda ratio: abs(ratio - 1)),
        max(errors),
        worst.tolerance,
    )


def whole_batch(number: int) -> Batch:
    """The global batch of one process."""
    return _whole(number, "cpu")


def global_batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels and ids: two draws of three images per class, one image in both, spread over the ranks."""
    x = torch.randn(NUM_IMAGES, 6, generator=torch.Generator().manual_seed(1 + number), dtype=torch.float64)
    y = torch.arange(NUM_IMAGES) % NUM_CLASSES
    ids = torch.arange(NUM_IMAGES) + 2**53 + 10 * number
    x[15], ids[15] = x[3], ids[3]
    return x, y, ids


def _equal_share() -> slice:
    return distributed.own_slice(NUM_IMAGES)


def _ragged_share() -> slice:
    """The later a rank, the more rows it has; with three ranks and more the first has none."""
    rank, world_size = distributed.rank(), distributed.world_size()
    first = 1 if world_size < 3 else 0
    total = sum(range(first, world_size + first))
    ends = [NUM_IMAGES * sum(range(first, r + first)) // total for r in range(world_size + 1)]
    return slice(ends[rank], ends[rank + 1])
