"""Blocks in which a network is in eval mode, and in which it only shows the shapes it would compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


@contextlib.contextmanager
def in_eval_mode(network: nn.Module) -> Iterator[None]:
    """A block in which all of a network is in eval mode; afterwards each part is in its own again."""
    in_training = [part for part in network.modules() if part.training]
    for part in in_training:
        part.training = False
    try:
        yield
    finally:
        for part in in_training:
            part.training = True


@contextlib.contextmanager
def shapes_only(network: nn.Module) -> Iterator[None]:
    """A block in which a network in eval mode gives tensors that have shapes and no numbers."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), in_eval_mode(network):
        yield
