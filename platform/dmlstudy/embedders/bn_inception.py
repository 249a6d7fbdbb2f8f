"""BN-Inception, the papers' backbone (Ioffe & Szegedy 2015, Figure 5), with the layer names of its Caffe model.

Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(NamedTuple):
    """Channels of an inception block's branches; without 1x1 it halves the resolution and passes its pool on."""

    name: str
    one: int
    three: tuple[int, int]
    double: tuple[int, int]
    pool: str
    projection: int


BLOCKS = (
    Block("3a", 64, (64, 64), (64, 96), "avg", 32),
    Block("3b", 64, (64, 96), (64, 96), "avg", 64),
    Block("3c", 0, (128, 160), (64, 96), "max", 0),
    Block("4a", 224, (64, 96), (96, 128), "avg", 128),
    Block("4b", 192, (96, 128), (96, 128), "avg", 128),
    Block("4c", 160, (128, 160), (128, 160), "avg", 128),
    Block("4d", 96, (128, 192), (160, 192), "avg", 128),
    Block("4e", 0, (128, 192), (192, 256), "max", 0),
    Block("5a", 352, (192, 320), (160, 224), "avg", 128),
    Block("5b", 352, (192, 320), (192, 224), "max", 128),
)

LEVELS = {"3c": 576, "4e": 1056, "5b": 1024}
"""The last block of inception 3, 4 and 5, and its channels."""

FILE = "a state_dict with the Caffe model's layer names (conv1_7x7_s2.weight ...), as pretrainedmodels has it"


class BNInception(nn.Module):
    """x_NCHW -> features_NF, the averages of inception 5's maps (F = 1024).

    Takes red, green, blue minus their means in 0..255, and turns them to the blue, green, red of Caffe's weights.
    Every convolution has a bias, batch norm (eps 1e-5) and ReLU after it; pooling rounds sizes up, as Caffe does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, 7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64, 1)
        self._add("conv2_3x3", 64, 192, 3)
        channels = 192
        for block in BLOCKS:
            at = f"inception_{block.name}"
            stride = 1 if block.one else 2
            if block.one:
                self._add(f"{at}_1x1", channels, block.one, 1)
            self._add(f"{at}_3x3_reduce", channels, block.three[0], 1)
            self._add(f"{at}_3x3", *block.three, 3, stride=stride)
            self._add(f"{at}_double_3x3_reduce", channels, block.double[0], 1)
            self._add(f"{at}_double_3x3_1", *block.double, 3)
            self._add(f"{at}_double_3x3_2", block.double[1], block.double[1], 3, stride=stride)
            if block.projection:
                self._add(f"{at}_pool_proj", channels, block.projection, 1)
            channels = block.one + block.three[1] + block.double[1] + (block.projection or channels)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.maps(x_NCHW)[-1].mean(dim=(2, 3))

    def maps(self, x_NCHW: Tensor) -> list[Tensor]:
        """The maps after inception 3, 4 and 5: 1/16, 1/32 and 1/32 of the side, since 3c and 4e halve it at once."""
        x = self._run("conv1_7x7_s2", x_NCHW.flip(1))
        x = F.max_pool2d(x, 3, stride=2, ceil_mode=True)
        x = self._run("conv2_3x3", self._run("conv2_3x3_reduce", x))
        x = F.max_pool2d(x, 3, stride=2, ceil_mode=True)
        found: list[Tensor] = []
        for block in BLOCKS:
            x = self.run_block(block, x)
            if block.name in LEVELS:
                found.append(x)
        return found

    def run_block(self, block: Block, x: Tensor) -> Tensor:
        """The maps after an inception block."""
        at = f"inception_{block.name}"
        branches = [self._run(f"{at}_1x1", x)] if block.one else []
        branches.append(self._run(f"{at}_3x3", self._run(f"{at}_3x3_reduce", x)))
        double = self._run(f"{at}_double_3x3_1", self._run(f"{at}_double_3x3_reduce", x))
        branches.append(self._run(f"{at}_double_3x3_2", double))
        if not block.projection:
            branches.append(F.max_pool2d(x, 3, stride=2, ceil_mode=True))
        else:
            pool = F.avg_pool2d if block.pool == "avg" else F.max_pool2d
            branches.append(self._run(f"{at}_pool_proj", pool(x, 3, stride=1, padding=1, ceil_mode=True)))
        return torch.cat(branches, dim=1)

    def _add(self, name: str, channels: int, out: int, kernel: int, stride: int = 1) -> None:
        self.add_module(name, nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2))
        self.add_module(f"{name}_bn", nn.BatchNorm2d(out))

    def _run(self, name: str, x: Tensor) -> Tensor:
        return F.relu(self.get_submodule(f"{name}_bn")(self.get_submodule(name)(x)))


def halves_evenly(side: int) -> bool:
    """True if the blocks that halve the resolution get an even one; else convolution and pooling round differently."""
    side = -(-side // 2)
    for _ in range(2):
        side = -(-(side - 3) // 2) + 1
    return side > 0 and side % 4 == 0


class BNInceptionStages(nn.Module):
    """x_NCHW -> the maps of its last ``count`` stages."""

    def __init__(self, network: BNInception, count: int) -> None:
        super().__init__()
        self.network = network
        self.count = count

    def forward(self, x_NCHW: Tensor) -> list[Tensor]:
        return self.network.maps(x_NCHW)[-self.count :]
