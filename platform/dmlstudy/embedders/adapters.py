"""Low-rank adapters (LoRA) of a backbone: small trained terms beside frozen weights, merged into them to be kept.

A weight of O rows and I columns becomes, while it is trained::

    W = W0 + (alpha / r) B A        B: O x r, at first 0;  A: r x I, at first uniform in +-1/sqrt(I)

A convolution (O, I, kh, kw) is adapted as the matrix (O, I kh kw). Adapters are parametrizations of the weights, not
wrapped layers, because some networks (attention of torchvision) use the weights without calling their layers.

Source: Hu et al. 2022, LoRA; initial values and merging as in PEFT.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dmlstudy.embedders.blocks import Blocks, blocks_of

ATTENTION, MLP, ALL = "attention", "mlp", "all"
"""The adapted weights: projections of attention, the linear layers of MLPs, or every linear layer and convolution."""

PROJECTION = re.compile(r"(to_)?(q|k|v|qk|kv|qkv|in|out)(_proj)?|proj(_out)?|merge")
"""Last names of the linear layers of attention in torchvision and timm."""

IN_MLPS = re.compile(r"mlp(_\w+)?|ffn")
"""Names of MLPs there; those that only find positions' biases (``cpb_mlp``) have others."""

ARE_MLPS = ("CNBlock", "SwiGLU")
"""Classes of MLPs beside those that say so in their names."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

Network = TypeVar("Network", bound=nn.Module)


class LowRank(nn.Module):
    """A weight W0 to W0 + ``scale`` B A, in the precision of W0 also under autocast, as it is merged.

    ``depth`` is the number of layers from the weight's block to the head, 1 for the last block. A is drawn from
    ``seed`` and the weight's ``name`` alone: it is the same on every rank, and whatever else is adapted.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float, depth: int, *, seed: int, name: str) -> None:
        super().__init__()
        self.scale, self.depth = scale, depth
        num_rows, num_columns = weight.flatten(1).shape
        rank = min(rank, num_rows, num_columns)  # with more, B A could be no other matrix
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        down_RI = torch.empty(rank, num_columns, device="cpu")
        nn.init.kaiming_uniform_(down_RI, a=math.sqrt(5), generator=generator)
        self.down_RI = nn.Parameter(down_RI.to(weight))
        self.up_OR = nn.Parameter(torch.zeros(num_rows, rank).to(weight))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            return weight + (self.scale * (self.up_OR @ self.down_RI)).view_as(weight)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """The same, formed in float64 and rounded once; in the memory format of ``weight``."""
        delta_OI = self.scale * (self.up_OR.double() @ self.down_RI.double())
        return torch.empty_like(weight).copy_(weight.double() + delta_OI.view_as(weight))


class AdaptedWeight(NamedTuple):
    """A weight that can be adapted: the parameter ``leaf`` of the module at ``path``."""

    path: str
    module: nn.Module
    leaf: str
    targets: str
    """``attention`` or ``mlp``; ``all`` for one that is neither."""

    @property
    def name(self) -> str:
        return f"{self.path}.{self.leaf}" if self.path else self.leaf


def attach(
    backbone: nn.Module, *, rank: int, alpha: float, targets: str = ALL, last: int | str = "all", seed: int
) -> None:
    """Put adapters on the weights ``targets`` of the ``last`` blocks, or of all; nothing else has a gradient then.

    The stem has none; what follows the last block is chosen with it. A rank above a weight's smaller side is cut to
    that, with the same scale alpha / rank. Raises ValueError where nothing is chosen.
    """
    blocks = blocks_of(backbone)
    places = chosen(backbone, targets, last, blocks)
    backbone.requires_grad_(False)
    for place in places:
        weight = getattr(place.module, place.leaf)
        depth = blocks.after - blocks.layers[place.name]
        adapter = LowRank(weight, rank, alpha / rank, depth, seed=seed, name=place.name)
        parametrize.register_parametrization(place.module, place.leaf, adapter)


def chosen(
    backbone: nn.Module, targets: str, last: int | str = "all", blocks: Blocks | None = None
) -> list[AdaptedWeight]:
    """The weights that ``attach`` adapts, in the order of the network's modules.

    Raises ValueError, beginning with the key, where there are none, and for more blocks than there are.
    """
    blocks = blocks or blocks_of(backbone)
    if last != "all" and int(last) > blocks.num:
        raise ValueError(
            f"training.lora_blocks: {last} blocks, but the backbone has {blocks.num}; set it to at most {blocks.num},"
            " or to all"
        )
    first = 1 if last == "all" else blocks.after - int(last)
    within = [place for place in _places(backbone) if blocks.layers[place.name] >= first]
    found = [place for place in within if targets in (place.targets, ALL)]
    if found:
        return found
    if within:
        raise ValueError(
            f"training.lora_targets: {targets} matches no layer of the backbone's blocks; set it to all, for every"
            " linear layer and convolution"
        )
    raise ValueError(
        "training.adapter: lora has no linear layer or convolution to adapt in this backbone; set it to none"
    )


def depths(backbone: nn.Module) -> dict[str, int]:
    """The adapters' parameters by name, each with the number of layers from its block to the head; empty without."""
    return {
        f"{path}.{name}": module.depth
        for path, module in backbone.named_modules()
        if isinstance(module, LowRank)
        for name, _ in module.named_parameters()
    }


def merged(network: Network) -> Network:
    """A copy with adapters merged into their weights, of the plain network's classes and names.

    The network itself where it has none.
    """
    if not any(isinstance(module, LowRank) for module in network.modules()):
        return network
    plain = copy.deepcopy(network)
    for module in list(plain.modules()):
        if parametrize.is_parametrized(module):
            _merge(module)
    return plain


def _merge(module: nn.Module) -> None:
    # remove_parametrizations would take the weight off a class that copies share, and so off the network in training.
    module.__class__ = type(module).__bases__[0]
    for leaf, adapted in module.get_submodule("parametrizations").named_children():
        assert isinstance(adapted, parametrize.ParametrizationList)
        weight, (adapter,) = adapted.original, adapted
        assert isinstance(weight, nn.Parameter)
        assert isinstance(adapter, LowRank)
        module.register_parameter(leaf, nn.Parameter(adapter.merged(weight), weight.requires_grad))
    del module.parametrizations


def _places(backbone: nn.Module) -> Iterator[AdaptedWeight]:
    modules = dict(backbone.named_modules())
    for path, module in modules.items():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            yield AdaptedWeight(path, module, "in_proj_weight", ATTENTION)
        elif isinstance(module, nn.Linear) or (isinstance(module, CONVOLUTIONS) and module.groups == 1):
            yield AdaptedWeight(path, module, "weight", _targets(path, modules))


def _targets(path: str, modules: dict[str, nn.Module]) -> str:
    """The kind of a linear layer or convolution, by the names and classes of the modules that it lies in."""
    *above, own = path.split(".")
    if not above:
        return ALL
    classes = [type(modules[".".join(above[: end + 1])]).__name__ for end in range(len(above))]
    if re.search("attention|attn", classes[-1].lower()) and PROJECTION.fullmatch(own):
        return ATTENTION
    is_in_mlp = any("mlp" in each.lower() or each in ARE_MLPS for each in classes)
    is_called_so = any(map(IN_MLPS.fullmatch, above))
    finds_biases = any(each.endswith("_mlp") for each in above)
    is_linear = isinstance(modules[path], nn.Linear) or modules[path].kernel_size in ((1,), (1, 1), (1, 1, 1))
    return MLP if (is_in_mlp or is_called_so) and is_linear and not finds_biases else ALL
