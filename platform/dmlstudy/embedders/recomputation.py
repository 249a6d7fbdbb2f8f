"""Activations of a backbone's blocks that are computed again in the backward pass, rather than kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from dmlstudy.embedders.blocks import block_modules, blocks_of
from dmlstudy.embedders.bn_inception import BNInception


def recompute_blocks(backbone: nn.Module) -> None:
    """Let each block keep its inputs alone while gradients are wanted; values and gradients stay as they are.

    Dropout draws the same masks again. Raises ValueError for batch norm that trains, whose statistics would move
    twice, and for a network of plain layers, whose blocks have nothing to leave out.
    """
    if any(isinstance(module, _BatchNorm) and module.training for module in backbone.modules()):
        raise ValueError(
            "training.checkpointing: batch norm that trains would see each batch twice; set embedder.freeze_bn: true,"
            " or leave it out"
        )
    for module in backbone.modules():
        if isinstance(module, BNInception):
            module.run_block = _recomputed(module.run_block)  # type: ignore[method-assign]
            return
    modules = block_modules(backbone, blocks_of(backbone))
    if not modules:
        raise ValueError(
            "training.checkpointing: this backbone is a chain of plain layers, of which there is nothing to recompute;"
            " leave it out"
        )
    for _, module in modules:
        module.forward = _recomputed(module.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return partial(_run, forward)  # a partial of a method is copied with its module, a closure is not


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
