"""The backbone of trials that never train it, built once by a process that runs many.

Only trials whose features are kept share it (``feature_cache``): it is frozen and in eval mode from its first use to
its last. The head's parameters are drawn after the backbone's, so the generator's state is held too: a trial draws
what it would have drawn after building.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dmlstudy.embedders.backbones import Backbone, build_backbone
from dmlstudy.embedders.weights import digest
from dmlstudy.files import FileState
from dmlstudy.model_folder import MANIFEST

MOST_STATES = 256
"""Seeds whose generator's state is held."""

_held: dict[tuple[Any, ...], Backbone] = {}
"""One at most, for it may be large."""

_states: dict[tuple[Any, ...], Tensor] = {}
_digests: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def made(is_channels_last: bool, *arguments: Any) -> Backbone:
    """``build_backbone`` of the arguments; shared where it would be the same network again.

    Random weights are those of one seed; of given weights the network is the same whatever the seed.
    """
    weights = arguments[3]
    seed = torch.initial_seed()
    network = (*arguments, is_channels_last, seed if weights is None else _file(weights))
    backbone, state = _held.get(network), _states.get((*network, seed))
    if backbone is not None and state is not None:
        torch.set_rng_state(state)
        return backbone
    built = build_backbone(*arguments)
    if len(_states) >= MOST_STATES:
        _states.clear()
    _states[*network, seed] = torch.get_rng_state()
    if backbone is None:
        _held.clear()
        _held[network] = backbone = built
    return backbone


def digest_of(network: nn.Module) -> str:
    """The digest of a network's tensors, which must not change any more."""
    if network not in _digests:
        _digests[network] = digest(network.state_dict())
    return _digests[network]


def forget() -> None:
    """Give the memory back, for a trial that does not share."""
    _held.clear()


def _file(weights: str) -> FileState | None:
    """A file as it is now, or a folder by its manifest; None for a hub's entry."""
    path = Path(weights)
    path = path / MANIFEST if path.is_dir() else path
    return FileState.at(path) if path.is_file() else None
