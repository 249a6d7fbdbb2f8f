"""Losses of pytorch-metric-learning under the name `pml:ClassName`, where that library is installed.

Shapes: B anchors on this rank, M references (the global batch), D embedding size.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from dmlstudy.losses.interface import Embeddings, Loss, LossSum, World, check_classes
from dmlstudy.records import LIBRARY_PREFIX, Scalar
from dmlstudy.text import nearest

_ROOT = "BaseMetricLossFunction"
_REFUSED = {
    _ROOT: "it is abstract",
    "GenericPairLoss": "it is abstract",
    "ManifoldLoss": "it takes no labels",
    "VICRegLoss": "it takes no labels",
    "DynamicSoftMarginLoss": "its histogram keeps the graph of the step before (seen in 2.9.0)",
    "SmoothAPLoss": "it mixes classes unless each has as many images as there are classes (seen in 2.9.0)",
}
"""Losses of the library that cannot be used, and why."""

_SIZES = ("num_classes", "embedding_size", "descriptors_dim")
"""Arguments the trial supplies, under all names the library has for them."""

_PARTS = (
    "distance",
    "reducer",
    "embedding_regularizer",
    "embedding_reg_weight",
    "weight_regularizer",
    "weight_reg_weight",
    "weight_init_func",
    "collect_stats",
)
"""Arguments that are objects of the library, or have no effect without them: a study cannot write them."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NO_DEFAULT = inspect.Parameter.empty


class ForeignLoss(Loss):
    """A loss of pytorch-metric-learning, exact at any number of ranks.

    L = the library's loss on the whole gathered batch, with its own reducer and its default mining: none.

    Every rank computes it and counts it by its share of the anchors: total L B/M, count B/M, in sum L and 1. Memory
    and time do not fall with the number of ranks. Anchors are rows of the references.

    An empty batch, or one without terms for the library, gives 0, with zero gradients also for the library's own
    parameters. Random choices of the library (``triplets_per_anchor``) are drawn from ``seed`` and the
    number of calls so far, the same on all ranks. It computes in float32 at least, and in the precision of its
    parameters where it has some.

    Image ids are ignored: the library makes a positive pair of two rows of one image. Raises ValueError unless
    labels lie in 0..num_classes-1 and z has size ``dim``.
    """

    calls: Tensor

    def __init__(self, library_loss: nn.Module, num_classes: int, dim: int, seed: int) -> None:
        super().__init__()
        self.library_loss = library_loss
        self.num_classes = num_classes
        self.dim = dim
        self.seed = seed
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        _bare_tensors_to_buffers(library_loss)

    def why_not_cut(self) -> str:
        return "a loss of another library"

    def terms(self, anchors: Embeddings, references: Embeddings, world: World) -> LossSum:
        """The library's loss of all references times B/M, and B/M."""
        check_classes(references, self.num_classes)
        if references.z_ND.shape[1] != self.dim:
            raise ValueError(
                f"embeddings have size {references.z_ND.shape[1]}, the loss's dim is {self.dim}; "
                "build the loss with dim = the embedder's size"
            )
        z_MD = references.z_ND.to(self._dtype(references.z_ND))
        num_references = z_MD.shape[0]
        leaves = (anchors.z_ND.to(z_MD), z_MD, *self.parameters())
        total = sum((leaf.flatten()[:0].sum() for leaf in leaves), z_MD.new_zeros(()))
        if num_references == 0:
            return LossSum(total, total.new_zeros(()))
        part = anchors.z_ND.shape[0] / num_references
        digest = hashlib.sha256(f"{self.seed}/{int(self.calls)}".encode()).digest()
        self.calls += 1
        with torch.autocast(z_MD.device.type, enabled=False), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(digest[:4], "big"))
            value: Tensor = self.library_loss(z_MD, references.y_N)
        return LossSum(total + part * value.to(total).reshape(()), total.new_full((), part))

    def _dtype(self, z_MD: Tensor) -> torch.dtype:
        """The parameters' dtype, which the library would else change to that of the embeddings."""
        dtypes = [p.dtype for p in self.parameters() if p.is_floating_point()] or [z_MD.dtype]
        return reduce(torch.promote_types, dtypes, torch.float32)


def build(name: str, params: Mapping[str, Scalar], *, num_classes: int, dim: int, seed: int) -> ForeignLoss:
    """The library's loss ``name`` with these parameters, the others at their defaults.

    ``num_classes`` and ``dim`` reach the constructors that ask for them; parameters start from ``seed``
    alone. Raises ValueError when the library is missing, for a class that is unknown or no loss of
    labelled embeddings by itself, for a parameter that is unknown, missing or of the wrong type, and for whatever
    the library's constructor refuses.
    """
    loss = _loss_class(name)
    accepted = _accepted(loss)
    known = {key: default for key, default in accepted.items() if key not in _SIZES}
    for key, value in params.items():
        if key not in known:
            raise ValueError(f"loss {name!r} has no parameter {key!r}{nearest(key, known, listed=True)}")
        _check_value(name, key, value, known[key])
    missing = [key for key, default in known.items() if default is _NO_DEFAULT and key not in params]
    if missing:
        raise ValueError(f"loss {name!r} needs a value for {', '.join(missing)}: there is no default")
    sizes = {"num_classes": num_classes, "embedding_size": dim, "descriptors_dim": dim}
    arguments: dict[str, Any] = {key: value for key, value in sizes.items() if key in accepted}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            library_loss: nn.Module = loss(**arguments, **params)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"loss {name!r} refuses {dict(params)}: {error or 'no reason given'}") from error
    return ForeignLoss(library_loss, num_classes, dim, seed)


def parameters_of(name: str) -> dict[str, Scalar]:
    """Hyperparameters of the library's loss ``name`` that have a default, with it.

    Those without one (or with None) may be passed to ``build`` but are not listed. Raises ValueError when
    the library is missing, or for a class that is unknown or no loss of labelled embeddings.
    """
    return {
        key: default
        for key, default in _accepted(_loss_class(name)).items()
        if key not in _SIZES and isinstance(default, (bool, int, float, str))
    }


def _loss_class(name: str) -> type[nn.Module]:
    """The class a study calls ``name``; raises ValueError with the nearest name and the list."""
    try:
        losses: Any = importlib.import_module("pytorch_metric_learning.losses")
    except ImportError as error:
        raise ValueError(
            f"loss {name!r} needs pytorch-metric-learning ({error}): pip install dmlstudy[pml]"
        ) from error
    root: type[nn.Module] = getattr(losses, _ROOT)
    classes: dict[str, type[nn.Module]] = {
        LIBRARY_PREFIX + key: value
        for key, value in vars(losses).items()
        if inspect.isclass(value) and issubclass(value, root) and key not in _REFUSED
    }
    if name not in classes:
        key = name.removeprefix(LIBRARY_PREFIX)
        reason = _REFUSED.get(key, f"it is no subclass of pytorch_metric_learning.losses.{_ROOT}")
        what = f"cannot be used: {reason}" if hasattr(losses, key) else "is unknown"
        raise ValueError(f"loss={name!r} {what}{nearest(name, sorted(classes), listed=True)}")
    return classes[name]


def _accepted(loss: type[nn.Module]) -> dict[str, Any]:
    """Arguments of the constructor with their defaults: its own, and its parents' as far as **kwargs reach.

    What a parent asks for without a default, its child supplies; but the sizes are passed on.
    """
    constructors = [vars(owner)["__init__"] for owner in loss.__mro__ if "__init__" in vars(owner)]
    accepted: dict[str, Any] = {}
    for depth, constructor in enumerate(constructors):
        _self, *parameters = inspect.signature(constructor).parameters.values()
        for name, kind, default in ((p.name, p.kind, p.default) for p in parameters):
            supplied = depth > 0 and default is _NO_DEFAULT and name not in _SIZES
            if kind in _NAMED and not supplied and name not in _PARTS:
                accepted.setdefault(name, default)
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return accepted


def _bare_tensors_to_buffers(module: nn.Module) -> None:
    """Lets tensors that are mere attributes (MarginLoss.beta) move with the module to another device."""
    for part in module.modules():
        for key, value in [(k, v) for k, v in vars(part).items() if isinstance(v, Tensor)]:
            delattr(part, key)
            part.register_buffer(key, value, persistent=False)


def _check_value(name: str, key: str, value: Scalar, default: object) -> None:
    """Raises ValueError for a value whose type is not the default's, all finite numbers being alike.

    The library writes 64 for 64.0, and "all" where it also takes a number.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"loss {name!r}: {key}={value} must be a finite number")
    if isinstance(default, bool):
        wanted, fits = "bool", isinstance(value, bool)
    elif isinstance(default, (int, float)):
        wanted, fits = "number", number
    else:
        wanted, fits = "str or number", not (isinstance(default, str) and isinstance(value, bool))
    if not fits:
        raise ValueError(f"loss {name!r}: {key}={value!r} must be of type {wanted}, like {default!r}")
