"""The backbones by name. Adding one is one function and one line in ``BACKBONES``.

Shapes: N images, C channels, H height, W width, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dmlstudy.naming import nearest


class Backbone(NamedTuple):
    """A network x_NCHW -> features_NF with the normalisation of pixels in [0, 1] that it expects."""

    network: nn.Module
    num_features: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def small_conv(in_channels: int, width: int, weights: str | None) -> Backbone:
    """Three stages of conv3x3, group norm and ReLU with width, 2*width, 4*width channels, averaged to 4x4.

    For small images (8x8 and up). Group norm, because batch statistics would depend on the world size; a
    4x4 grid, because where the strokes are is half of what a small image says.
    """
    if weights == "default":
        raise ValueError("embedder.weights: small_conv has no 'default' weights; leave it out or give a file")
    stages = [
        _stage(in_channels, width, stride=1),
        _stage(width, 2 * width, stride=2),
        _stage(2 * width, 4 * width, stride=1),
    ]
    network = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(4), nn.Flatten())
    if weights is not None:
        _load_file(network, weights, ignore=())
    return Backbone(network, 4 * 4 * 4 * width, in_channels, (0.5,) * in_channels, (0.5,) * in_channels)


def _stage(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    groups = next(g for g in (8, 4, 2, 1) if channels % g == 0)
    conv = nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(groups, channels), nn.ReLU())


def torchvision_model(name: str, in_channels: int, width: int, weights: str | None) -> Backbone:
    """A torchvision classifier up to its last linear layer, which becomes the identity.

    ``weights``: None, 'default' (the hub's best) or a file of its parameters (safetensors, or a state_dict
    by torch.save); the classifier's own parameters in it are left out.
    """
    from torchvision.models import get_model  # type: ignore[import-untyped]

    try:
        network: nn.Module = get_model(name, weights="DEFAULT" if weights == "default" else None)
    except OSError as error:
        raise ValueError(
            f"embedder.weights: could not download the weights of {name} ({error}); give a file instead"
        ) from error
    classifier_name, classifier = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)][-1]
    network.set_submodule(classifier_name, nn.Identity())
    if weights not in (None, "default"):
        assert weights is not None
        _load_file(network, weights, ignore=(f"{classifier_name}.weight", f"{classifier_name}.bias"))
    return Backbone(network, classifier.in_features, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def _load_file(network: nn.Module, weights: str, ignore: tuple[str, ...]) -> None:
    path = Path(weights)
    if not path.is_file():
        raise ValueError(f"embedder.weights: no file {path}; give 'default', a file, or leave it out")
    try:
        state: Any
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        parameters: dict[str, Tensor] = {key: value for key, value in state.items() if key not in ignore}
        network.load_state_dict(parameters)
    except Exception as error:  # each format fails with its own types, all mean the same to the user
        reason = str(error).strip().replace("\n", " ")
        raise ValueError(f"embedder.weights: {path} does not fit this backbone: {reason}") from error


BACKBONES: Mapping[str, Callable[[int, int, str | None], Backbone]] = {
    "small_conv": small_conv,
    "resnet18": partial(torchvision_model, "resnet18"),
    "resnet50": partial(torchvision_model, "resnet50"),
}


def build_backbone(name: str, in_channels: int, width: int, weights: str | None) -> Backbone:
    """Build the backbone ``name`` for images of ``in_channels`` channels (only small_conv has a ``width``).

    Raises ValueError for an unknown name or weights that are missing or do not fit.
    """
    if name not in BACKBONES:
        raise ValueError(f"embedder.backbone: unknown {name!r}{nearest(name, BACKBONES, listed=True)}")
    return BACKBONES[name](in_channels, width, weights)
