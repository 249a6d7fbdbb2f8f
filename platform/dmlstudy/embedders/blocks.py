"""The blocks of a backbone in the order in which they run: the stem, each block, and what follows the last one.

Layer-wise learning rates, partial unfreezing and recomputed activations ask here which parameters form a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from dmlstudy.embedders.backbones import PROBED_SIDE, TAKE_VECTORS, Backbone, build_backbone

BLOCK_CLASSES = frozenset(
    {
        "BasicBlock",  # ResNet
        "Bottleneck",  # ResNet, ResNeXt, Wide ResNet
        "CNBlock",  # ConvNeXt
        "EncoderBlock",  # ViT
        "Fire",  # SqueezeNet
        "FusedMBConv",  # EfficientNetV2
        "Inception",  # GoogLeNet
        "InceptionA",  # Inception v3, to InceptionE
        "InceptionB",
        "InceptionC",
        "InceptionD",
        "InceptionE",
        "InvertedResidual",  # MobileNetV2 and V3, ShuffleNetV2
        "MBConv",  # EfficientNet
        "MaxVitLayer",  # MaxViT
        "ResBottleneckBlock",  # RegNet
        "SwinTransformerBlock",
        "SwinTransformerBlockV2",
        "_DenseLayer",  # DenseNet
        "_InvertedResidual",  # MNASNet
    }
)
"""Classes of torchvision's blocks; a network without any is cut into its convolutions and linear layers."""

LAYER_CLASSES = (nn.modules.conv._ConvNd, nn.Linear)
"""Layers that are blocks of their own in a network of plain layers (VGG, AlexNet, small_conv, MLPs)."""

IN_NAMES = re.compile(r"(?:^|\.)(inception_\d[a-z])_")
"""Blocks of BN-Inception, which stand in its layers' names alone."""

NOT_DECAYED = ("class_token", "pos_embedding", "relative_position_bias_table")
"""Last parts of torchvision's names of learned positions and tokens, which weight decay leaves out with norms."""


class Blocks(NamedTuple):
    """The layer of each parameter of a backbone: 0 the stem, 1 to ``num`` the blocks, ``num + 1`` what follows them.

    Layers before a block that belong to none (a downsampling, a transition) are part of the block after them.
    """

    layers: Mapping[str, int]
    num: int

    @property
    def after(self) -> int:
        """The layer of what follows the last block."""
        return self.num + 1


def blocks_of(backbone: nn.Module) -> Blocks:
    """The blocks of a backbone, also of one whose stages are fused.

    A network of timm says them itself (``group_matcher``). One without parameters has none.
    """
    for path, module in backbone.named_modules():
        if hasattr(module, "group_matcher"):
            return _told_by_timm(module, f"{path}." if path else "")
    names = [name for name, _ in backbone.named_parameters()]
    found = [IN_NAMES.search(name) for name in names]
    if any(found):
        return _in_order(names, [match.group(1) if match else None for match in found])
    paths = list(_outermost(backbone, lambda module: type(module).__name__ in BLOCK_CLASSES))
    if paths:
        return _in_order(names, [_path_of(name, paths) for name in names])
    paths = list(_outermost(backbone, lambda module: isinstance(module, LAYER_CLASSES)))
    return _in_order(names, [_path_of(name, paths) for name in names], is_plain=True)


@lru_cache(maxsize=64)
def num_blocks(name: str, fusion: str, side: int = PROBED_SIDE) -> int | None:
    """The number of blocks of a backbone by its name, found without data.

    None where it cannot be built so: for other images, or as RegNet, whose builder reads values.
    """
    network = without_data(name, fusion, side)
    return None if network is None else blocks_of(network).num


@lru_cache(maxsize=64)
def num_features(name: str, fusion: str, width: int, side: int = PROBED_SIDE) -> int | None:
    """The number of features of a backbone by its name, found without data; None where only data can tell."""
    backbone = None if name in TAKE_VECTORS else _built_without_data(name, fusion, width, side)
    return None if backbone is None else backbone.num_features


def without_data(name: str, fusion: str, side: int = PROBED_SIDE) -> nn.Module | None:
    """A backbone's modules by its name, without memory for their weights; None where it cannot be built so."""
    backbone = _built_without_data(name, fusion, 8, side)
    return None if backbone is None else backbone.network


def _built_without_data(name: str, fusion: str, width: int, side: int) -> Backbone | None:
    size = () if name in TAKE_VECTORS else (side, side)
    try:
        with torch.device("meta"):
            return build_backbone(name, 3, width, None, size, fusion)
    except (ValueError, NotImplementedError, RuntimeError):
        return None


def block_modules(backbone: nn.Module, blocks: Blocks) -> list[tuple[str, nn.Module]]:
    """The largest modules that lie within one block and have several parts, in order, with their paths."""
    return [
        (path, module)
        for path, module in _within_one(backbone, "", blocks)
        if _only_layer(module, path, blocks) in range(1, blocks.after) and any(module.children())
    ]


def rest(backbone: nn.Module, is_trained: Callable[[str], bool]) -> None:
    """Put modules none of whose parameters, told by name, are trained into eval mode; others keep their mode.

    A module without parameters (a dropout) goes with the one that stands before it.
    """
    _rest(backbone, "", is_trained, before=False)


def not_decayed(backbone: nn.Module) -> set[str]:
    """Names of the parameters that recipes with weight decay on matrices alone leave out.

    They are biases and the parameters of norms, which are vectors or numbers, and learned positions and tokens.
    """
    own = {
        name
        for name, parameter in backbone.named_parameters()
        if parameter.ndim <= 1 or name.endswith(".bias") or name.rpartition(".")[2] in NOT_DECAYED
    }
    for path, module in backbone.named_modules():
        if callable(named := getattr(module, "no_weight_decay", None)):
            prefix = f"{path}." if path else ""
            own |= {f"{prefix}{name}" for name in named()}
    return own


def _in_order(names: list[str], blocks: list[str | None], *, is_plain: bool = False) -> Blocks:
    """Layers by the block of each parameter, names and blocks in the order in which they run.

    Parameters of no block belong to the block after them, in a network of plain layers to the layer before them.
    """
    number_of = {block: number for number, block in enumerate(dict.fromkeys(filter(None, blocks)), 1)}
    last = len(number_of)
    layers: dict[str, int] = {}
    latest = 0
    for name, block in zip(names, blocks, strict=True):
        if block is not None:
            layers[name] = latest = number_of[block]
        elif is_plain or latest == 0:
            layers[name] = latest
        else:
            layers[name] = latest + 1
    return Blocks(layers, last)


def _told_by_timm(network: Any, prefix: str) -> Blocks:
    """timm's own groups, by its patterns of names; its classifier, which is taken out, belongs to none of them."""
    from timm.models import group_parameters

    matcher = network.group_matcher(coarse=False)
    groups: dict[str, int] = group_parameters(network, matcher, reverse=True)
    is_stem, is_block = _kinds(matcher)
    first = 0 if any(map(is_stem, _named_in(groups, 0))) else 1
    last = max(groups.values())
    # Parameters that timm leaves unmatched, a last norm or convolution, are its largest group; else that is a block.
    has_after = not any(map(is_block, _named_in(groups, last)))
    layers = {f"{prefix}{name}": group + first for name, group in groups.items()}
    return Blocks(layers, last + first - has_after)


def _named_in(groups: Mapping[str, int], group: int) -> Iterator[str]:
    return (name for name, own in groups.items() if own == group)


def _kinds(matcher: Any) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    """Tests of a parameter's name, by timm's patterns or function: is it of the stem, is it of a block?

    Patterns of blocks hold their numbers; the others put a last norm into the last block. The function numbers groups.
    """
    if not isinstance(matcher, Mapping):
        return (lambda name: True), (lambda name: matcher(name) not in (float("inf"), (float("inf"),)))
    stem, numbered = (_patterns(matcher.get("stem")), _patterns(matcher.get("blocks")))
    return (
        lambda name: any(each.match(name) for each in stem),
        lambda name: any(each.groups and each.match(name) for each in numbered),
    )


def _patterns(given: Any) -> list[re.Pattern[str]]:
    return [re.compile(each) for each in ([given] if isinstance(given, str) else (e[0] for e in given or ()))]


def _outermost(module: nn.Module, is_wanted: Callable[[nn.Module], bool], path: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if is_wanted(child):
            yield inner
        else:
            yield from _outermost(child, is_wanted, inner)


def _path_of(name: str, paths: list[str]) -> str | None:
    return next((path for path in paths if name.startswith(f"{path}.")), None)


def _only_layer(module: nn.Module, path: str, blocks: Blocks) -> int | None:
    """The layer of all of a module's parameters; None where they are of several, or there are none."""
    layers = {blocks.layers[_joined(path, name)] for name, _ in module.named_parameters()}
    return layers.pop() if len(layers) == 1 else None


def _within_one(module: nn.Module, path: str, blocks: Blocks) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules with a ``forward`` of their own whose parameters are of one layer."""
    for name, child in module.named_children():
        inner = _joined(path, name)
        if (
            not isinstance(child, nn.ModuleList | nn.ModuleDict)
            and _only_layer(child, inner, blocks) is not None
        ):
            yield inner, child
        else:
            yield from _within_one(child, inner, blocks)


def _rest(module: nn.Module, path: str, is_trained: Callable[[str], bool], *, before: bool) -> bool:
    """Put what rests into eval mode; whether the last part trains. ``before`` says so of what precedes."""
    trained = {is_trained(_joined(path, name)) for name, _ in module.named_parameters()} or {before}
    if trained == {False}:
        module.eval()
    if len(trained) == 1:
        return trained.pop()
    for name, child in module.named_children():
        before = _rest(child, _joined(path, name), is_trained, before=before)
    return before


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
