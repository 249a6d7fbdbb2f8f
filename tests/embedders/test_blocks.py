"""Blocks of backbones: the order of the stem, the blocks and what follows them, over many families of networks."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn
from torchvision.models import get_model  # type: ignore[import-untyped]

from dmlstudy.embedders.backbones import build_backbone, timm_model, torchvision_names
from dmlstudy.embedders.blocks import Blocks, block_modules, blocks_of, not_decayed, rest

NUM_BLOCKS = {
    "alexnet": 7,
    "convnext_tiny": 18,
    "densenet121": 58,
    "efficientnet_b0": 16,
    "googlenet": 9,
    "inception_v3": 11,
    "maxvit_t": 11,
    "mnasnet0_5": 16,
    "mobilenet_v2": 17,
    "mobilenet_v3_small": 11,
    "resnet18": 8,
    "resnext50_32x4d": 16,
    "shufflenet_v2_x0_5": 16,
    "squeezenet1_1": 8,
    "swin_t": 12,
    "vgg11_bn": 10,
    "vit_b_32": 12,
}
"""One of each of torchvision's families; RegNet's builder reads values, so that it has none without data."""

PLAIN = ("alexnet", "vgg11_bn")


def without_data(name: str) -> nn.Module:
    """torchvision's network without its classifier, of shapes alone."""
    options = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        network: nn.Module = get_model(name, weights=None, **options)
    linear = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if linear:
        network.set_submodule(linear[-1], nn.Identity())
    return network


def of_layer(blocks: Blocks, layer: int) -> list[str]:
    return [name for name, own in blocks.layers.items() if own == layer]


def assert_sound(network: nn.Module, blocks: Blocks) -> None:
    """Every parameter has a layer, every block has parameters."""
    assert set(blocks.layers) == {name for name, _ in network.named_parameters()}
    assert set(range(1, blocks.after)) <= set(blocks.layers.values()) <= set(range(blocks.after + 1))


@pytest.mark.parametrize("name", NUM_BLOCKS)
def test_blocks_of_torchvisions_families_are_in_their_order(name: str) -> None:
    network = without_data(name)
    blocks = blocks_of(network)
    assert_sound(network, blocks)
    assert blocks.num == NUM_BLOCKS[name]
    assert list(blocks.layers.values()) == sorted(blocks.layers.values())
    assert bool(of_layer(blocks, 0)) == (name not in PLAIN)
    modules = block_modules(network, blocks)
    assert len(modules) >= (0 if name in PLAIN else blocks.num)
    assert all(type(module).forward is not nn.Module.forward for _, module in modules)


def test_every_family_of_torchvision_is_looked_at() -> None:
    families = {name[:4] for name in NUM_BLOCKS} | {"regn", "wide"}  # the last is a ResNet
    assert {name[:4] for name in torchvision_names()} == families


def test_a_regnet_has_its_blocks() -> None:
    network = build_backbone("regnet_y_400mf", 3, 4, None, (64, 64)).network
    blocks = blocks_of(network)
    assert_sound(network, blocks)
    assert blocks.num == 16


def test_stem_last_block_and_what_follows_it() -> None:
    resnet, vit, convnext = (
        blocks_of(without_data(name)) for name in ("resnet18", "vit_b_32", "convnext_tiny")
    )
    assert of_layer(resnet, 0) == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert all(name.startswith("layer4.1.") for name in of_layer(resnet, 8))
    assert of_layer(resnet, resnet.after) == []
    assert of_layer(vit, 0) == ["class_token", "conv_proj.weight", "conv_proj.bias", "encoder.pos_embedding"]
    assert of_layer(vit, vit.after) == ["encoder.ln.weight", "encoder.ln.bias"]
    assert of_layer(convnext, convnext.after) == ["classifier.0.weight", "classifier.0.bias"]
    assert convnext.layers["features.2.1.weight"] == convnext.layers["features.3.0.block.0.weight"] == 4


TIMM = {  # blocks, and the first parameter after them
    "vit_tiny_patch16_224": (12, None),  # its last norm belongs to the last block
    "convnext_atto": (12, "head.norm.weight"),
    "inception_v3": (12, None),  # says its groups by a function
}


@pytest.mark.parametrize("name", TIMM)
def test_timm_says_its_blocks_itself(name: str) -> None:
    with torch.device("meta"):
        network: nn.Module = timm.create_model(name, num_classes=0)
    blocks = blocks_of(network)
    assert_sound(network, blocks)
    num, first_after = TIMM[name]
    assert blocks.num == num
    assert next(iter(of_layer(blocks, blocks.after)), None) == first_after
    assert len(block_modules(network, blocks)) >= num
    assert (name != "vit_tiny_patch16_224") or {"pos_embed", "cls_token"} <= not_decayed(network)


def test_a_network_of_timm_whose_stages_are_fused_has_the_same_blocks() -> None:
    alone = blocks_of(timm_model("test_resnet", (32, 32), None).network)
    network = build_backbone("timm:test_resnet", 3, 4, None, (32, 32), "features").network
    blocks = blocks_of(network)
    assert_sound(network, blocks)
    assert {
        name.removeprefix("stages.network."): layer for name, layer in blocks.layers.items()
    } == alone.layers


@pytest.mark.parametrize(
    ("name", "side", "num"), [("bn_inception", 64, 10), ("small_conv", 16, 3), ("mlp2", 0, 2)]
)
def test_own_backbones_have_blocks(name: str, side: int, num: int) -> None:
    network = build_backbone(name, 3, 4, None, (side, side) if side else ()).network
    blocks = blocks_of(network)
    assert_sound(network, blocks)
    assert blocks.num == num
    fused = name != "mlp2" and build_backbone(name, 3, 4, None, (side, side), "features").network
    assert not fused or blocks_of(fused).num == num


def test_a_network_without_parameters_has_no_blocks() -> None:
    assert blocks_of(build_backbone("linear", 3, 4, None, ()).network) == Blocks({}, 0)


def test_what_is_not_trained_rests() -> None:
    network = without_data("resnet18").train()
    network.add_module("dropout", nn.Dropout())
    network.layer2.add_module("dropout", nn.Dropout())  # type: ignore[union-attr]
    blocks = blocks_of(network)
    rest(network, lambda name: blocks.layers[name] >= 7)
    training = {name for name, module in network.named_modules() if module.training}
    assert {"layer4", "layer4.0", "layer4.1", "layer4.1.bn2", "dropout"} <= training
    assert not training & {"conv1", "bn1", "layer1", "layer2.dropout", "layer3", "layer3.1.bn2"}
    rest(network, lambda name: False)
    assert not any(module.training for module in network.modules())


def test_weights_of_layers_alone_are_decayed() -> None:
    network = without_data("vit_b_32")
    left_out = not_decayed(network)
    assert {"class_token", "encoder.pos_embedding", "encoder.ln.weight", "conv_proj.bias"} <= left_out
    kept = {name for name, _ in network.named_parameters()} - left_out
    assert {name.rpartition(".")[2] for name in kept} == {"weight", "in_proj_weight"}
    assert not kept & {name for name, parameter in network.named_parameters() if parameter.ndim < 2}
