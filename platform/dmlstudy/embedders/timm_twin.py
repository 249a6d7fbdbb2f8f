"""An embedder as a model of timm: the same numbers before the unit norm, from a classifier of D classes.

A backbone of timm is that model itself, the linear head its classifier. Of torchvision's networks those have a twin
whose layers timm has too, under the same or other names.

Shapes: N images, C channels, H height, W width, F features, D embedding size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from dmlstudy.embedders.backbones import TIMM, is_elsewhere, timm_network
from dmlstudy.embedders.ball import SPHERE
from dmlstudy.embedders.embedder import Architecture, Embedder
from dmlstudy.embedders.heads import NO_CODE
from dmlstudy.embedders.stages import NO_FUSION, OWN_POOLING
from dmlstudy.text import first_line

Rename: TypeAlias = Callable[[str, Tensor], tuple[str, Tensor]]


class TimmTwin(NamedTuple):
    """A timm model x_NCHW -> h_ND of normalised pixels, in eval mode on the CPU, and how timm builds it again.

    ``classifier`` is the name of its last linear layer; None where the features are the embedding.
    """

    network: nn.Module
    architecture: str
    args: dict[str, Any]
    classifier: str | None
    num_features: int


def twin(embedder: Embedder) -> TimmTwin:
    """The timm model that computes what an embedder of pictures computes, before its unit norm.

    A structure head is left out. Raises ValueError, saying which part of the embedder timm has no place for.
    """
    own = embedder.architecture
    _check_plain(own)
    name, rename = _name(own.backbone)
    with torch.random.fork_rng(devices=[]):
        is_bare = not isinstance(embedder.head, nn.Linear)
        network, args = _built(name, 0 if is_bare else own.dim, own.image_size)
    state = dict(rename(key, value.detach()) for key, value in embedder.backbone.state_dict().items())
    wanted = network.state_dict()
    missing = [key for key in wanted if key not in state]
    classifier = None
    if not is_bare:
        classifier = missing[0].rpartition(".")[0] if missing else ""
        if sorted(missing) != [f"{classifier}.bias", f"{classifier}.weight"]:
            raise ValueError(f"timm's {name} has a classifier of other parts ({', '.join(missing[:3])})")
        assert isinstance(embedder.head, nn.Linear)
        for kind in ("weight", "bias"):
            given = getattr(embedder.head, kind).detach()
            state[f"{classifier}.{kind}"] = given.reshape(wanted[f"{classifier}.{kind}"].shape)
        num_features = embedder.head.in_features
    else:
        num_features = own.dim
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"timm's {name} has other parameters ({' '.join(str(error).split())[:80]})"
        ) from None
    architecture = str(network.pretrained_cfg["architecture"])
    return TimmTwin(network.eval(), architecture, args, classifier, num_features)


def _check_plain(own: Architecture) -> None:
    has_no_place = {
        "vectors": not own.image_size,
        f"embedder.fusion: {own.fusion}": own.fusion != NO_FUSION,
        f"embedder.pooling: {own.pooling}": own.pooling != OWN_POOLING,
        f"embedder.code: {own.code}": own.code != NO_CODE,
        f"embedder.head_depth: {own.head_depth}": own.head_depth > 0,
        "embedder.head_norm": own.head_norm,
        f"embedder.space: {own.space}": own.space != SPHERE,
    }
    for what, is_there in has_no_place.items():
        if is_there:
            raise ValueError(f"timm has no place for {what}")


def _name(backbone: str) -> tuple[str, Rename]:
    """timm's name of a backbone, and what its parameters are called there."""
    if backbone.startswith(TIMM):
        name = backbone.removeprefix(TIMM)
        if is_elsewhere(name):
            raise ValueError(f"{backbone} is described outside timm, with arguments of its own")
        return name, _as_it_is
    if backbone in TWINS:
        return TWINS[backbone]
    raise ValueError(f"timm has no twin of {backbone}")


def _built(name: str, num_classes: int, image_size: tuple[int, ...]) -> tuple[Any, dict[str, Any]]:
    """The model as ``backbones.timm_model`` builds it, and the arguments beside its name."""
    try:
        import timm
    except ImportError:
        raise ValueError("needs timm: pip install 'dmlstudy[timm]'") from None
    network, is_sized = timm_network(partial(timm.create_model, name, num_classes=num_classes), image_size)
    return network, {"img_size": list(image_size)} if is_sized else {}


def _as_it_is(key: str, value: Tensor) -> tuple[str, Tensor]:
    return key, value


def _vision_transformer(key: str, value: Tensor) -> tuple[str, Tensor]:
    """torchvision's names of a vision transformer's parameters to timm's."""
    whole = {"class_token": "cls_token", "encoder.pos_embedding": "pos_embed"}
    for old, new in (
        (r"^conv_proj\.", "patch_embed.proj."),
        (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
        (r"^encoder\.ln\.", "norm."),
        (r"\.ln_([12])\.", r".norm\1."),
        (r"\.self_attention\.in_proj_", ".attn.qkv."),
        (r"\.self_attention\.out_proj\.", ".attn.proj."),
        (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
        (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
    ):
        key = re.sub(old, new, key)
    return whole.get(key, key), value


def _convnext(key: str, value: Tensor) -> tuple[str, Tensor]:
    """torchvision's names of a ConvNeXt's parameters to timm's; a layer's scale is (C,) there."""
    if key.endswith("layer_scale"):
        value = value.flatten()
    key = re.sub(r"^classifier\.0\.", "head.norm.", re.sub(r"^features\.0\.", "stem.", key))
    number = re.match(r"features\.(\d+)\.", key)
    if number is None:
        return key, value
    stage, is_blocks = divmod(int(number[1]), 2)
    if not is_blocks:  # features.2, .4 and .6 go before the stages 1, 2 and 3
        return re.sub(r"^features\.\d+\.", f"stages.{stage}.downsample.", key), value
    key = re.sub(r"^features\.\d+\.(\d+)\.", rf"stages.{stage}.blocks.\1.", key)
    for old, new in (
        (r"\.block\.0\.", ".conv_dw."),
        (r"\.block\.2\.", ".norm."),
        (r"\.block\.3\.", ".mlp.fc1."),
        (r"\.block\.5\.", ".mlp.fc2."),
        (r"\.layer_scale$", ".gamma"),
    ):
        key = re.sub(old, new, key)
    return key, value


TWINS: Mapping[str, tuple[str, Rename]] = {
    **{
        name: (name, _as_it_is)
        for name in (
            *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
            *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
            *("wide_resnet50_2", "wide_resnet101_2"),
        )
    },
    **{
        f"vit_{letter}_{patch}": (f"vit_{size}_patch{patch}_224", _vision_transformer)
        for letter, size in (("b", "base"), ("l", "large"))
        for patch in (16, 32)
    },
    **{f"convnext_{size}": (f"convnext_{size}", _convnext) for size in ("tiny", "small", "base", "large")},
}
"""torchvision's names to timm's, and how parameters are renamed."""


def read(folder: Path) -> nn.Module:
    """The model that timm builds of a published folder, in eval mode. Raises ValueError where it cannot."""
    import timm

    try:
        with torch.random.fork_rng(devices=[]):
            network: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except Exception as error:  # of whatever kind a folder's content causes
        raise ValueError(f"{folder}: timm cannot build it ({first_line(error)})") from error
    return network.eval()
