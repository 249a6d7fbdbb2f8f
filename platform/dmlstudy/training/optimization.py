"""The optimiser of an embedder and its loss: groups of parameters, each with its rate, and what is done at each step.

Groups are made by layer of the backbone, head and loss, and, where norms are not decayed, by weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dmlstudy import distributed, embedders
from dmlstudy.embedders.adapters import depths
from dmlstudy.embedders.blocks import blocks_of, not_decayed, rest
from dmlstudy.losses.class_softmax import ClassSoftmax
from dmlstudy.records import TrainingConfig
from dmlstudy.training import schedule
from dmlstudy.training.averaging import begun
from dmlstudy.training.class_shards import shared_out
from dmlstudy.training.interface import TrialFailed
from dmlstudy.training.recipe import check_unfrozen
from dmlstudy.transfers import ReadLater


class Group(NamedTuple):
    """Parameters with one learning rate; ``undecayed`` are their names that a recipe may leave undecayed."""

    named: dict[str, nn.Parameter]
    lr: float
    undecayed: set[str]
    weight_decay: float | None = None
    """None: that of the recipe."""


class Unfrozen:
    """The parameters of a backbone that are ever trained: all, those of the last blocks, or its adapters'.

    ``last`` is the number of blocks, or 'all'. What follows the last block is trained with it; 0 trains nothing.
    Raises ValueError for more blocks than there are.
    """

    def __init__(self, backbone: nn.Module, last: int | str) -> None:
        self.backbone = backbone
        self.names = set(depths(backbone)) or {name for name, _ in backbone.named_parameters()}
        self.is_all = last == "all"
        if self.is_all:
            return
        blocks = blocks_of(backbone) if last else None
        if blocks is not None:
            check_unfrozen(last, blocks.num)
        first = math.inf if blocks is None else blocks.after - int(last)
        layers = {} if blocks is None else blocks.layers
        self.names = {name for name, layer in layers.items() if layer >= first}

    def require(self, *, is_frozen: bool) -> None:
        """Ask for gradients of these parameters alone, and, while the backbone is frozen, of none."""
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(name in self.names and not is_frozen)

    def rest(self) -> None:
        """Put the parts that are never trained into eval mode."""
        if not self.is_all:
            rest(self.backbone, self.names.__contains__)


class Optimization:
    """An optimiser with its schedule and clipping: ``start_step``, then gradients, then ``step``.

    ``per_epoch`` is the number of batches in an epoch of this model. Without keys of a recipe the groups are the
    backbone, the heads and the loss, in this order, as states of earlier versions have them.
    """

    def __init__(
        self,
        training: TrainingConfig,
        embedder: embedders.Embedder,
        loss: nn.Module,
        per_epoch: int,
        device: torch.device,
    ) -> None:
        self.unfrozen = Unfrozen(embedder.backbone, training.unfreeze_last)
        self.schedule = schedule.planned(
            training.schedule,
            training.epochs,
            per_epoch,
            warmup_epochs=training.warmup_epochs,
            warmup_steps=training.warmup_steps,
            floor=training.lr_floor,
            step_at=training.step_at,
            step_factor=training.step_factor,
        )
        groups = list(_groups(training, embedder, loss, self.unfrozen.names))
        started = dict(begun(embedder)) if training.l2_sp else {}
        self.optimizer = _optimizer(training, groups, set(started.values()), device)
        if started:
            is_decoupled = training.optimizer == "adamw"
            self.optimizer.register_step_pre_hook(
                DecayToStart(started.values(), training.l2_sp, is_decoupled=is_decoupled)
            )
        has_rows = any(isinstance(part, ClassSoftmax) and part.sample < 1 for part in loss.modules())
        if has_rows:
            self.optimizer.register_step_pre_hook(RowSteps())
        self._has_hook = bool(started) or has_rows
        self._lrs: list[float] = [group["lr"] for group in self.optimizer.param_groups]
        self._shared_out = set(shared_out(loss))
        self._clipped = [
            ("embedder", list(embedder.parameters()), training.clip_norm),
            ("loss", list(loss.parameters()), training.clip_loss_norm),
        ]

    def start_step(self, u: int) -> None:
        """Set every group's rate for batch ``u``, counted from 0 through all epochs."""
        factor = self.schedule.factor(u)
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr * factor

    def step(self, scaler: torch.amp.GradScaler) -> Norms:
        """Clip the gradients, which are the same on every rank but for shares of classes, and take the step.

        The norms that were clipped are given, to be checked once they are known.

        fp16's scaler leaves out a step whose gradients overflow.
        """
        norms: dict[str, ReadLater] = {}
        if self._has_hook or any(most is not None for _, _, most in self._clipped):
            scaler.unscale_(self.optimizer)
            for part, parameters, most in self._clipped:
                if most is None:
                    continue
                norm = _clip(parameters, most, self._shared_out, is_scaled=scaler.is_enabled())
                if norm is not None:
                    norms[part] = ReadLater(norm)
        scaler.step(self.optimizer)
        scaler.update()
        return Norms(norms)


class Norms:
    """Norms of the gradients of some parts, which a device may find only later."""

    def __init__(self, norms: Mapping[str, ReadLater]) -> None:
        self._norms = norms

    def check(self) -> None:
        """Raise TrialFailed, on every rank alike, for a norm that is not finite."""
        for part, later in self._norms.items():
            (norm,) = later.read()
            if not math.isfinite(norm):
                raise TrialFailed(f"the norm of the {part}'s gradient is {norm}; set training.lr lower")


class DecayToStart:
    """Weight decay towards the weights w0 that training began with (L2-SP, Li et al. 2018), before each step.

    As the optimiser's own decay with w - w0 in the place of w: w <- w - lr c (w - w0) where it is decoupled (AdamW),
    and else g <- g + c (w - w0). Make it before training. A weight without a gradient stays as it is.
    """

    def __init__(self, weights: Iterable[nn.Parameter], coefficient: float, *, is_decoupled: bool) -> None:
        self.starts = {weight: weight.detach().clone() for weight in weights}
        self.coefficient = coefficient
        self.is_decoupled = is_decoupled

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The hook of the optimiser's step."""
        for group in optimizer.param_groups:
            for weight in group["params"]:
                start = self.starts.get(weight)
                if start is None or weight.grad is None:
                    continue
                if self.is_decoupled:
                    weight.lerp_(start, group["lr"] * self.coefficient)
                else:
                    weight.grad.add_(weight - start, alpha=self.coefficient)


class RowSteps:
    """The step of the rows that a sparse gradient names, before the optimiser's own, which is left no gradient of them.

    Other rows keep their values and their moments, and do not decay. What is not of rows goes on at every step, as the
    number of steps in Adam's bias correction. A small optimiser of the same kind takes the step of a copy of the rows.
    """

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The hook of the optimiser's step."""
        overflow = getattr(
            optimizer, "found_inf", None
        )  # fused ones are told by fp16's scaler, and leave out the step
        is_left_out = overflow is not None and bool(overflow)
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.grad.is_sparse:
                    if not is_left_out:
                        _step_rows(optimizer, group, weight)
                    weight.grad = None


def _step_rows(optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: nn.Parameter) -> None:
    assert weight.grad is not None
    gradient = weight.grad.coalesce()
    (row_S,) = gradient.indices()
    rows = nn.Parameter(weight[row_S])
    rows.grad = gradient.values()
    small = type(optimizer)([group | {"params": [rows]}])  # type: ignore[call-arg]  # a kind has its defaults
    state = optimizer.state[weight]
    small.state[rows] = {
        name: value[row_S] if value.shape == weight.shape else value for name, value in state.items()
    }
    small.step()
    weight[row_S] = rows
    for name, value in small.state[rows].items():
        if value.shape != rows.shape:
            state[name] = value
            continue
        if name not in state:
            state[name] = torch.zeros_like(weight)
        state[name][row_S] = value


def _clip(
    parameters: Iterable[nn.Parameter],
    most: float,
    shared_out: set[nn.Parameter],
    *,
    is_scaled: bool,
) -> Tensor | None:
    """Gradients times min(1, most / (norm + 1e-6)), the norm that of all of them together; the norm.

    Of those ``shared_out`` among the ranks it is that of all ranks' shares. None without gradients, and where some of
    fp16 have overflowed, which its scaler has seen, too.
    """
    own = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [_values(parameter.grad) for parameter in own if parameter.grad is not None]
    if not gradients:
        return None
    norm = get_total_norm(gradients)
    if any(parameter in shared_out for parameter in own):
        parts = [[_values(each.grad) for each in own if each.grad is not None and each in shared_out]]
        parts.append([_values(each.grad) for each in own if each.grad is not None and each not in shared_out])
        of_shares, of_all = (get_total_norm(each).to(norm) for each in parts)
        norm = (distributed.sum_over_ranks(of_shares.square()) + of_all.square()).sqrt()
    if (
        is_scaled
        and not norm.isfinite()
        and not all(bool(gradient.isfinite().all()) for gradient in gradients)
    ):
        return None
    clip_grads_with_norm_(
        [each for each in own if each.grad is not None and not each.grad.is_sparse], most, norm
    )
    for each in own:
        if each.grad is not None and each.grad.is_sparse:
            _values(each.grad).mul_((most / (norm + 1e-6)).clamp(max=1))
    return norm


def _values(gradient: Tensor) -> Tensor:
    """The gradient's numbers, of a sparse one without the zeros; it has each row once."""
    return gradient._values() if gradient.is_sparse else gradient


def _groups(
    training: TrainingConfig, embedder: embedders.Embedder, loss: nn.Module, unfrozen: set[str]
) -> Iterator[Group]:
    """Groups of the backbone's layers, from the first, then of the heads, the structure head where it has a rate of its
    own, and the loss."""
    backbone = embedder.backbone
    trained = {name: value for name, value in backbone.named_parameters() if name in unfrozen}
    undecayed = set() if training.decay_norms else not_decayed(backbone)
    if adapted := depths(backbone):
        yield from _of_adapters(training, trained, adapted)
    elif training.layer_decay == 1:
        yield Group(trained, training.lr, undecayed)
    else:
        blocks = blocks_of(backbone)
        for layer in sorted({blocks.layers[name] for name in trained}):
            own = {name: value for name, value in trained.items() if blocks.layers[name] == layer}
            yield Group(own, training.lr * training.layer_decay ** (blocks.after - layer), undecayed)
    heads = {f"head.{name}": value for name, value in embedder.head.named_parameters()}
    structure: dict[str, nn.Parameter] = {}
    if embedder.structure_head is not None:
        structure = {f"structure_head.{name}": v for name, v in embedder.structure_head.named_parameters()}
    multiple = training.structure_lr_mult
    yield _of_head(training, heads if multiple is not None else heads | structure, training.head_lr_mult)
    if multiple is not None:
        yield _of_head(training, structure, multiple)
    loss_lr = training.lr * training.loss_lr_mult if training.loss_lr is None else training.loss_lr
    yield Group(dict(loss.named_parameters()), loss_lr, set(), 0.0)


def _of_head(training: TrainingConfig, named: dict[str, nn.Parameter], multiple: float) -> Group:
    thin = set() if training.decay_norms else {name for name, value in named.items() if value.ndim <= 1}
    return Group(named, training.lr * multiple, thin)


def _of_adapters(
    training: TrainingConfig, trained: dict[str, nn.Parameter], adapted: dict[str, int]
) -> Iterator[Group]:
    """Groups of adapters, those of the first blocks first: each has its block's rate, and none decays."""
    lrs = {name: training.lr * training.layer_decay**depth for name, depth in adapted.items()}
    for lr in sorted(set(lrs.values())):
        yield Group({name: trained[name] for name in trained if lrs[name] == lr}, lr, set(), 0.0)


def _optimizer(
    training: TrainingConfig, groups: Iterable[Group], started: set[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """The optimiser of these groups; what ``started`` holds decays elsewhere."""
    options: list[dict[str, Any]] = []
    for group in groups:
        undecayed = group.undecayed | {name for name, value in group.named.items() if value in started}
        decayed = [value for name, value in group.named.items() if name not in undecayed]
        own = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
        options.append({"params": decayed, "lr": group.lr, **own})
        others = [value for name, value in group.named.items() if name in undecayed]
        options.append({"params": others, "lr": group.lr, "weight_decay": 0.0})
    options = [each for each in options if each["params"]]
    fused = True if training.fused and device.type == "cuda" else None
    if training.optimizer == "sgd":
        return torch.optim.SGD(
            options, lr=training.lr, momentum=0.9, weight_decay=training.weight_decay, fused=fused
        )
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    return kind(options, lr=training.lr, weight_decay=training.weight_decay, fused=fused)
