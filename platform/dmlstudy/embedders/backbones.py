"""The backbones by name. Adding one is one function and one line in ``BACKBONES``.

Shapes: N images, C channels, H height, W width, F features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dmlstudy.embedders import weights as weight_files
from dmlstudy.embedders.bn_inception import FILE, LEVELS, BNInception, BNInceptionStages, halves_evenly
from dmlstudy.embedders.modes import shapes_only
from dmlstudy.embedders.stages import (
    FUSIONS,
    NO_FUSION,
    NUM_LEVELS,
    OWN_POOLING,
    POOLINGS,
    UNIT_HEADS,
    ChainStages,
    PooledStages,
    Stages,
    cut,
)
from dmlstudy.text import first_line, nearest

TIMM = "timm:"

ELSEWHERE = ("hf-hub:", "local-dir:")
"""Beginnings of timm's names for models that are described outside timm."""

PROBED_SIDE = 224
"""The image side at which a network's stages are found."""


class Backbone(NamedTuple):
    """A network x_NCHW -> features_NF with the normalisation of pixels in [0, 1] that it expects.

    ``stages`` gives the network's last so many stages, the network itself being used up; None where it has none.
    ``levels`` are the features of each level, where each gets a head of its own. ``loaded`` are the tensors that its
    weights were given as, by their names there, until ``build_backbone`` has made their digest, ``sha256``; random
    weights have neither.
    """

    network: nn.Module
    num_features: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stages: Callable[[int], Stages] | None = None
    levels: tuple[int, ...] = ()
    loaded: Mapping[str, Tensor] = MappingProxyType({})
    sha256: str | None = None
    name: str = ""
    """The name under which it is built without a hub; empty: the one it was asked for by."""


def small_conv(in_channels: int, width: int, weights: str | None) -> Backbone:
    """Three stages of conv3x3, group norm and ReLU with width, 2*width, 4*width channels, averaged to 4x4.

    For small images (8x8 and up). Group norm, because batch statistics would depend on the world size; a
    4x4 grid, because where the strokes are is half of what a small image says.
    """
    _only_files("small_conv", weights)
    stages = [
        _stage(in_channels, width, stride=1),
        _stage(width, 2 * width, stride=2),
        _stage(2 * width, 4 * width, stride=1),
    ]
    network = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(4), nn.Flatten())
    loaded = _from_file(network, weights)
    return Backbone(
        network,
        4 * 4 * 4 * width,
        in_channels,
        (0.5,) * in_channels,
        (0.5,) * in_channels,
        partial(_small_stages, network, width),
        loaded=loaded,
    )


def _from_file(network: nn.Module, weights: str | None) -> Mapping[str, Tensor]:
    """Load the weights of a file or a saved embedder's folder, if any are named, and return them as they are there."""
    if weights is None:
        return {}
    state = weight_files.read(Path(weights))
    weight_files.fit(network, state, weights)
    return state


def _stage(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    groups = next(g for g in (8, 4, 2, 1) if channels % g == 0)
    conv = nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(groups, channels), nn.ReLU())


def _small_stages(network: nn.Module, width: int, count: int) -> Stages:
    paths = ["0", "1", "2"]
    ends = paths[-count:]
    return Stages(ChainStages(network, paths, ends), tuple(width * 2 ** int(end) for end in ends))


def mlp(depth: int, in_features: int, width: int, weights: str | None) -> Backbone:
    """``depth`` hidden layers of ``width`` units with ReLU on feature vectors x_NF, unscaled.

    With depth 0 the vectors themselves: with the head on them, a linear (Mahalanobis) metric.
    """
    _only_files(f"mlp{depth}" if depth else "linear", weights)
    layers: list[nn.Module] = []
    size = in_features
    for _ in range(depth):
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    network = nn.Sequential(*layers)
    loaded = _from_file(network, weights)
    return Backbone(network, size, in_features, (0.0,), (1.0,), loaded=loaded)


def bn_inception(in_channels: int, width: int, weights: str | None) -> Backbone:
    """BN-Inception, with Caffe's preprocessing: 0..255 minus the means 128, 117, 104 of red, green, blue."""
    _only_files("bn_inception", weights)
    network = BNInception()
    loaded = _from_file(network, weights)
    mean = (128 / 255, 117 / 255, 104 / 255)

    def stages(count: int) -> Stages:
        return Stages(BNInceptionStages(network, count), tuple(LEVELS.values())[-count:])

    return Backbone(network, 1024, 3, mean, (1 / 255,) * 3, stages, loaded=loaded)


def torchvision_model(name: str, image_size: tuple[int, ...], weights: str | None) -> Backbone:
    """A torchvision classifier up to its last linear layer, which becomes the identity, as does a dropout before it.

    Dropouts between hidden layers (two of AlexNet's, one of a VGG's) are the network's own and stay.
    ``weights``: None, 'default' (the hub's best), a name of the hub's (IMAGENET1K_V1) or a file of its parameters;
    the classifier's own and those of auxiliary classifiers are left out.

    A vision transformer is built for the images' side, its position embedding interpolated. Raises ValueError
    for images it cannot take.
    """
    from torchvision.models import get_model, get_model_weights, vision_transformer  # type: ignore[import-untyped]

    hub = get_model_weights(name)
    entry = _of_hub(hub, weights)
    options: dict[str, Any] = {}
    square = len(image_size) == 2 and image_size[0] == image_size[1]
    if name.startswith("vit_"):
        patch = int(name.rpartition("_")[2])
        if not square or image_size[0] % patch:
            raise ValueError(f"{_sized(name, image_size)} that are square, the side a multiple of {patch}")
        options["image_size"] = image_size[0]
    elif name.startswith("maxvit"):
        if any(side % 224 for side in image_size):
            raise ValueError(f"{_sized(name, image_size)} whose sides are multiples of 224")
        options["input_size"] = image_size
    elif name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True, "transform_input": False}
    smallest = (hub.DEFAULT if entry is None else entry).meta["min_size"]
    if not name.startswith(("vit_", "maxvit", "swin")) and min(image_size) < min(smallest):
        raise ValueError(f"{_sized(name, image_size)} of at least {smallest[0]} x {smallest[1]}")
    network: nn.Module = get_model(name, weights=None, **options)
    if name.startswith("squeezenet"):  # its classifier is a convolution
        network.set_submodule("classifier", nn.AdaptiveAvgPool2d(1))
        classifier_name, num_features = "classifier.1", 512
    else:
        classifier_name, classifier = [
            (n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)
        ][-1]
        num_features = classifier.in_features
        network.set_submodule(classifier_name, nn.Identity())
        _take_out_dropout(network, classifier_name)
    if name.startswith("densenet"):  # in the network's own forward; a second time it changes nothing
        network.get_submodule("features").add_module("relu5", nn.ReLU())
    loaded: Mapping[str, Tensor] = {}
    if weights is not None:
        state: Mapping[str, Tensor]
        if entry is not None:
            origin, state = f"the hub's {entry}", _download(name, entry)
        else:
            origin, state = weights, weight_files.read(Path(weights))
        loaded = state
        position = "encoder.pos_embedding"
        own = network.state_dict()
        if name.startswith("vit_") and position in state and state[position].shape != own[position].shape:
            state = vision_transformer.interpolate_embeddings(
                image_size[0], int(name.rpartition("_")[2]), state
            )
        ignore = (f"{classifier_name}.weight", f"{classifier_name}.bias")
        weight_files.fit(network, state, origin, ignore)
    if name in ("googlenet", "inception_v3"):  # of Google's weights, which know no ImageNet means
        mean, std = (0.5,) * 3, (0.5,) * 3
    else:
        transforms = (hub.DEFAULT if entry is None else entry).transforms()
        mean, std = tuple(transforms.mean), tuple(transforms.std)

    def stages(count: int) -> Stages:
        side = image_size[0] if name.startswith("maxvit") else PROBED_SIDE
        return cut(network, side, 3, count, channels_last=name.startswith("swin"))

    stages_of = None if name.startswith("vit_") else stages
    return Backbone(network, num_features, 3, mean, std, stages_of, loaded=loaded)


def _take_out_dropout(network: nn.Module, classifier_name: str) -> None:
    """Make the dropout that stands directly before the classifier the identity, where there is one."""
    parent_name, _, own_name = classifier_name.rpartition(".")
    parent = network.get_submodule(parent_name)
    names = [name for name, _ in parent.named_children()]
    before = names[: names.index(own_name)][-1:]
    if before and isinstance(parent.get_submodule(before[0]), nn.Dropout):
        parent.set_submodule(before[0], nn.Identity())


def timm_model(name: str, image_size: tuple[int, ...], weights: str | None) -> Backbone:
    """A model of timm (an extra: ``pip install 'dmlstudy[timm]'``) without its classifier.

    ``name`` is timm's, or ``hf-hub:OWNER/REPOSITORY`` or ``local-dir:/FOLDER`` with a config.json as timm writes it,
    of which no code is run. ``weights``: None, 'default' (those its name stands for, from its hub or folder) or a
    file of its parameters.

    Raises ValueError for a name timm does not know, a repository that cannot be read, or where timm is missing.
    """
    timm = _timm()
    _check_timm(timm, name)
    origin = f"{TIMM}{name}"
    build = partial(timm.create_model, name, pretrained=weights == "default", num_classes=0)
    try:
        network, _ = timm_network(build, image_size)
    except _refusals_of(name) as error:
        if weights == "default":
            raise ValueError(
                f"embedder.weights: could not get the weights of {origin} ({first_line(error)}); give a file of them"
            ) from error
        raise ValueError(f"embedder.backbone: {origin} cannot be built ({first_line(error)})") from error
    loaded: Mapping[str, Tensor] = network.state_dict() if weights == "default" else {}
    if weights not in (None, "default"):
        assert weights is not None
        heads = ("head", "fc", "classifier", "last_linear", "head.fc", "classif")
        ignore = tuple(f"{head}.{kind}" for head in heads for kind in ("weight", "bias"))
        loaded = weight_files.read(Path(weights))
        weight_files.fit(network, loaded, weights, ignore)
    expected = timm.data.resolve_model_data_config(network)
    with shapes_only(network):
        num_features = network(torch.zeros(1, 3, *image_size)).shape[1]
    mean, std = tuple(expected["mean"]), tuple(expected["std"])
    has_stages = hasattr(network, "forward_intermediates")
    stages = partial(_timm_stages, network, image_size) if has_stages else None
    own_name = _name_without_hub(timm, name, network)
    return Backbone(network, num_features, 3, mean, std, stages, loaded=loaded, name=own_name)


def timm_network(build: Callable[..., nn.Module], image_size: tuple[int, ...]) -> tuple[nn.Module, bool]:
    """The network that ``build`` makes for pictures of a size; False for a convolutional one, which takes any size."""
    try:
        return build(img_size=image_size), True
    except TypeError as error:
        if "img_size" not in str(error):
            raise
    return build(), False


def _refusals_of(name: str) -> tuple[type[Exception], ...]:
    """Errors of timm for a model that cannot be had; a repository or folder may hold anything."""
    return (Exception,) if is_elsewhere(name) else (OSError, RuntimeError, ImportError)


def is_elsewhere(name: str) -> bool:
    """True for a timm model that is described outside timm: in a hub's repository or in a folder."""
    return name.startswith(ELSEWHERE)


def _name_without_hub(timm: Any, name: str, network: Any) -> str:
    """The name by which timm builds the same network from its own list, so that a saved one needs no hub; else empty.

    A repository may give arguments beside the architecture; then there is none.
    """
    architecture = str(getattr(network, "pretrained_cfg", {}).get("architecture", ""))
    if not is_elsewhere(name) or not timm.is_model(architecture):
        return ""
    with torch.device("meta"):
        plain = timm.create_model(architecture, num_classes=0).state_dict()
    own = network.state_dict()
    is_same = {key: value.shape for key, value in plain.items()} == {
        key: value.shape for key, value in own.items()
    }
    return f"{TIMM}{architecture}" if is_same else ""


class TimmStages(nn.Module):
    """x_NCHW -> the maps of a timm network's last ``count`` stages; what comes after them is taken out."""

    def __init__(self, network: Any, count: int) -> None:
        super().__init__()
        known = len(network.feature_info)
        self.indices = network.prune_intermediate_layers(list(range(known))[-count:], prune_norm=True)
        self.network = network

    def forward(self, x_NCHW: Tensor) -> list[Tensor]:
        maps: list[Tensor] = self.network.forward_intermediates(
            x_NCHW, indices=self.indices, intermediates_only=True
        )
        return maps


def _timm_stages(network: nn.Module, image_size: tuple[int, ...], count: int) -> Stages:
    stages = TimmStages(network, count)
    with shapes_only(network):
        maps = stages(torch.zeros(1, 3, *image_size))
    if len(maps) < count:
        raise ValueError(
            f"embedder.fusion: this backbone has {len(maps)} stages, not {count}; set it to none"
        )
    return Stages(stages, tuple(each.shape[1] for each in maps))


BACKBONES: Mapping[str, Callable[[int, int, str | None], Backbone]] = {
    "small_conv": small_conv,
    "bn_inception": bn_inception,
    "linear": partial(mlp, 0),
    "mlp1": partial(mlp, 1),
    "mlp2": partial(mlp, 2),
    "mlp3": partial(mlp, 3),
}
"""Our own, from (channels or features of the input, width, weights); torchvision's and timm's come beside them."""

TAKE_VECTORS = ("linear", "mlp1", "mlp2", "mlp3")


def torchvision_names() -> list[str]:
    """The classifiers of torchvision."""
    from torchvision import models  # type: ignore[import-untyped]

    return list(models.list_models(module=models))


def check_backbone(name: str, weights: str | None = None, fusion: str = NO_FUSION) -> None:
    """Check what can be without building a network or reading a file.

    Raises ValueError for an unknown name, timm's where it is missing, weights no hub has, and a fusion of stages
    where the backbone has none.
    """
    if name.startswith(TIMM):
        _check_timm(_timm(), name.removeprefix(TIMM))
    elif name in BACKBONES:
        if weights == "default":
            more = f": {FILE}" if name == "bn_inception" else ", or leave it out"
            raise ValueError(f"embedder.weights: {name} has no 'default' weights; give a file{more}")
    else:
        known = torchvision_names()
        if name not in known:
            hint = nearest(name, [*BACKBONES, *known])
            hint = hint if "did you mean" in hint else ";"
            raise ValueError(
                f"embedder.backbone: no backbone {name!r}{hint} known are: {', '.join(BACKBONES)}, torchvision's"
                " classifiers by their names (resnet50) and timm's with 'timm:' before theirs"
            )
    if fusion != NO_FUSION and (name.startswith("vit_") or name in TAKE_VECTORS):
        raise ValueError(f"embedder.fusion: {name} has no stages of maps; set it to none")


def check_input(name: str, *, takes_vectors: bool) -> None:
    """Raises ValueError where the backbone takes images and the data has vectors, or the other way round."""
    if name in TAKE_VECTORS and not takes_vectors:
        raise ValueError(
            f"embedder.backbone: {name} takes feature vectors, this data has images; choose small_conv or resnet50"
        )
    if name not in TAKE_VECTORS and takes_vectors:
        raise ValueError(
            f"embedder.backbone: {name} takes images, this data has feature vectors; choose linear or mlp2"
        )


def build_backbone(
    name: str,
    in_channels: int,
    width: int,
    weights: str | None,
    image_size: tuple[int, ...] = (PROBED_SIDE, PROBED_SIDE),
    fusion: str = NO_FUSION,
    pooling: str = OWN_POOLING,
) -> Backbone:
    """Build the backbone ``name`` for images of ``in_channels`` channels and ``image_size`` (height, width).

    ``image_size`` () is for feature vectors of ``in_channels`` numbers. ``width`` is small_conv's and the MLPs'.
    ``fusion`` other than 'none' gives the pooled features of three stages side by side, and their sizes as
    ``levels``; ``pooling`` other than 'own' replaces the network's own pooling of its last maps.

    Raises ValueError for an unknown name, weights that are missing or do not fit, images it cannot take, and
    stages it does not have.
    """
    for key, value, known in (("fusion", fusion, FUSIONS), ("pooling", pooling, POOLINGS)):
        if value not in known:
            raise ValueError(f"embedder.{key}: unknown {value!r}{nearest(value, known, listed=True)}")
    check_backbone(name, weights, fusion)
    check_input(name, takes_vectors=not image_size)
    if name == "bn_inception" and not all(map(halves_evenly, image_size)):
        raise ValueError(
            f"{_sized(name, image_size)} whose sides are multiples of 32, or up to 6 more (224, Caffe's 227)"
        )
    if name in BACKBONES:
        backbone = BACKBONES[name](in_channels, width, weights)
    elif name.startswith(TIMM):
        backbone = timm_model(name.removeprefix(TIMM), image_size, weights)
    else:
        backbone = torchvision_model(name, image_size, weights)
    if backbone.loaded:
        backbone = backbone._replace(loaded={}, sha256=weight_files.digest(backbone.loaded))
    if fusion == NO_FUSION and pooling == OWN_POOLING:
        return backbone
    if backbone.stages is None:
        key = "pooling" if fusion == NO_FUSION else "fusion"
        value = OWN_POOLING if fusion == NO_FUSION else NO_FUSION
        raise ValueError(f"embedder.{key}: {name} has no stages of maps; set it to {value}")
    stages = backbone.stages(1 if fusion == NO_FUSION else NUM_LEVELS)
    return backbone._replace(
        network=PooledStages(stages, pooling),
        num_features=sum(stages.channels),
        levels=stages.channels if fusion in ("heads", UNIT_HEADS) else (),
        stages=None,
    )


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            f"embedder.backbone: a name that begins with {TIMM!r} needs timm ({first_line(error)});"
            " pip install 'dmlstudy[timm]'"
        ) from error
    return timm


def _check_timm(timm: Any, name: str) -> None:
    if is_elsewhere(name):
        kind, _, place = name.partition(":")
        if kind == "hf-hub" and not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", place):
            raise ValueError(
                f"embedder.backbone: {TIMM}{name} names no repository; write {TIMM}hf-hub:OWNER/REPOSITORY, and"
                " @REVISION if not its newest"
            )
        if kind == "local-dir" and not Path(place).is_absolute():
            raise ValueError(
                f"embedder.backbone: {TIMM}{name} is relative, but workers have other folders; give the absolute path"
            )
        return
    if not timm.is_model(name):
        like = timm.list_models(f"*{name.partition('.')[0][:6]}*")
        raise ValueError(f"embedder.backbone: timm has no model {name!r}{nearest(name, like)}")


def _only_files(name: str, weights: str | None) -> None:
    if weights == "default":
        raise ValueError(f"embedder.weights: {name} has no 'default' weights; leave it out or give a file")


def _of_hub(hub: Any, weights: str | None) -> Any:
    """The hub's entry that ``weights`` names: 'default', or one of its names; None for a file."""
    if weights == "default":
        return hub.DEFAULT
    return hub.__members__.get(weights)


def _download(name: str, entry: Any) -> Mapping[str, Tensor]:
    try:
        state: Mapping[str, Tensor] = entry.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"embedder.weights: could not download the weights of {name} ({first_line(error)}); get {entry.url} on a"
            f" machine that can and give that file, or put it into {torch.hub.get_dir()}/checkpoints on each node"
        ) from error
    return state


def _sized(name: str, image_size: tuple[int, ...]) -> str:
    height, width = image_size
    return f"data.image_size: images are {height} x {width}; {name} takes images"
