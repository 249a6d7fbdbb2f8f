"""Feature maps of a network's stages, pooled and put side by side (GPW, multi-level features).

Shapes: N images, C channels, H height, W width, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dmlstudy.embedders.modes import shapes_only
from dmlstudy.records import NUM_FUSED

NO_FUSION, OWN_POOLING = "none", "own"

UNIT_HEADS = "unit_heads"

FUSIONS: Mapping[str, str] = {
    NO_FUSION: "the last stage alone",
    "features": "pooled features of three stages side by side, one head",
    "heads": "the same, a head for each stage and a third of the embedding from each",
    UNIT_HEADS: "the same, each stage's part of unit norm before they are put together",
}

POOLINGS: Mapping[str, str] = {
    OWN_POOLING: "the backbone's own; of stages the average",
    "avg": "the average over positions",
    "max": "the largest over positions",
    "avg+max": "the sum of both",
}

NUM_LEVELS = NUM_FUSED

AFTER_THE_MAPS = {"avgpool", "classifier", "fc", "head", "heads", "dropout", "flatten", "permute"}
CONTAINERS = {"features", "layers", "blocks", "trunk_output"}


class Stages(NamedTuple):
    """A network x_NCHW -> list of maps, one for each stage, its channels, and whether maps are NHWC."""

    network: nn.Module
    channels: tuple[int, ...]
    channels_last: bool = False


class ChainStages(nn.Module):
    """Runs the parts of ``network`` at ``paths`` one after another and returns the outputs at ``ends``.

    What comes after the last end, and parts on no path, are taken out of the network, so that each of its
    parameters gets a gradient.
    """

    def __init__(self, network: nn.Module, paths: list[str], ends: list[str]) -> None:
        super().__init__()
        self.network = network
        self.paths = paths[: paths.index(ends[-1]) + 1]
        self.ends = ends
        kept = {path.partition(".")[0] for path in self.paths}
        for name, _ in list(network.named_children()):
            if name not in kept:
                delattr(network, name)
        for path in paths[len(self.paths) :]:
            if path.partition(".")[0] in kept:
                network.set_submodule(path, nn.Identity())

    def forward(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for path in self.paths:
            x = self.network.get_submodule(path)(x)
            if path in self.ends:
                found.append(x)
        return found


class PooledStages(nn.Module):
    """features_NF: the stages' maps, each pooled over its positions, side by side."""

    def __init__(self, stages: Stages, pooling: str) -> None:
        super().__init__()
        self.stages = stages.network
        self.pooling = pooling
        self.positions = (1, 2) if stages.channels_last else (2, 3)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return torch.cat([self._pooled(maps) for maps in self.stages(x_NCHW)], dim=1)

    def _pooled(self, maps: Tensor) -> Tensor:
        if self.pooling == "max":
            return maps.amax(dim=self.positions)
        average = maps.mean(dim=self.positions)
        return average + maps.amax(dim=self.positions) if self.pooling == "avg+max" else average


def cut(network: nn.Module, side: int, channels: int, count: int, *, channels_last: bool = False) -> Stages:
    """The last ``count`` stages of a network that runs its parts in order: the last map at each resolution.

    A pooling at the very end is left out, so a VGG ends with conv5's maps. Resolutions are those of an image of
    ``side`` pixels, found without computing. Raises ValueError for a network of fewer resolutions.
    """
    paths = _paths(network)
    last_at: dict[tuple[int, ...], tuple[str, int]] = {}
    with shapes_only(network):
        x = torch.zeros(1, channels, side, side)
        for path in paths:
            x = network.get_submodule(path)(x)
            size, width = (x.shape[1:3], x.shape[3]) if channels_last else (x.shape[2:], x.shape[1])
            last_at[tuple(size)] = (path, width)
    if len(last_at) < count:
        raise ValueError(
            f"embedder.fusion: this backbone has {len(last_at)} stages, not {count}; set it to none"
        )
    ends = list(last_at.values())[-count:]
    return Stages(
        ChainStages(network, paths, [path for path, _ in ends]), tuple(w for _, w in ends), channels_last
    )


def _paths(network: nn.Module) -> list[str]:
    paths: list[str] = []
    for name, child in network.named_children():
        if name in AFTER_THE_MAPS:
            continue
        if name in CONTAINERS:
            paths += [f"{name}.{inner}" for inner, _ in child.named_children()]
        else:
            paths.append(name)

    def is_pooling(path: str) -> bool:
        return isinstance(
            network.get_submodule(path),
            nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d | nn.Flatten,
        )

    while is_pooling(paths[-1]):
        paths.pop()
    return paths
