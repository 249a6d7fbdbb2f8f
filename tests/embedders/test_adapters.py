"""Low-rank adapters: nothing at first, merged without a trace, drawn by name, and small beside what they train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torchvision.models import VisionTransformer

from dmlstudy import embedders
from dmlstudy.embedders import adapters
from dmlstudy.embedders.adapters import LowRank, attach, chosen, depths, merged
from dmlstudy.embedders.blocks import blocks_of, without_data
from dmlstudy.embedders.recomputation import recompute_blocks


def small_vit() -> nn.Module:
    """torchvision's, whose attention uses ``in_proj_weight`` and ``out_proj.weight`` without calling a layer."""
    torch.manual_seed(0)
    network = VisionTransformer(16, 8, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=24)
    network.heads = nn.Identity()
    return network


@cache
def built(backbone: str) -> nn.Module:
    return embedders.build(backbone, 8, in_channels=3, image_size=32, seed=0).backbone


def resnet() -> nn.Module:
    return copy.deepcopy(built("resnet18"))


def timm_vit() -> nn.Module:
    return copy.deepcopy(built("timm:test_vit"))


def small_conv() -> nn.Module:
    return embedders.build("small_conv", 8, width=4, in_channels=3, image_size=16, seed=0).backbone


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet": (resnet, 32),
    "vit": (small_vit, 16),
    "timm_vit": (timm_vit, 32),
    "small_conv": (small_conv, 16),
}

networks = pytest.mark.parametrize("name", ["resnet", "vit", "timm_vit"])


def images(side: int, num: int = 3) -> Tensor:
    return torch.randn(num, 3, side, side, generator=torch.Generator().manual_seed(1))


def moved(network: nn.Module) -> nn.Module:
    """The network with adapters that have learned something."""
    generator = torch.Generator().manual_seed(2)
    for module in network.modules():
        if isinstance(module, LowRank):
            up_OR = module.up_OR
            up_OR.data = torch.randn(up_OR.shape, generator=generator).to(up_OR) / 10
    return network


@networks
def test_at_first_the_network_is_bit_for_bit_as_it_was(name: str) -> None:
    make, side = NETWORKS[name]
    network = make().eval()
    before = network(images(side))
    weights = copy.deepcopy(network.state_dict())
    attach(network, rank=4, alpha=16, seed=0)
    assert torch.equal(network(images(side)), before)
    assert all(torch.equal(value, weights[key]) for key, value in merged(network).state_dict().items())


@networks
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_merged_it_is_the_same_function_and_a_plain_network(
    name: str, dtype: torch.dtype, most: float
) -> None:
    make, side = NETWORKS[name]
    network = make().to(dtype).eval()
    plain = copy.deepcopy(network)
    attach(network, rank=4, alpha=8, seed=0)
    moved(network)

    def embedded(of: nn.Module) -> Tensor:
        return nn.functional.normalize(of(images(side).to(dtype)), dim=1).detach()

    adapted, kept = embedded(network), merged(network)
    torch.testing.assert_close(embedded(kept), adapted, rtol=0, atol=most)
    assert (adapted - embedded(plain)).abs().max() > 1e-3
    assert [type(module) for module in kept.modules()] == [type(module) for module in plain.modules()]
    shapes = {key: (value.shape, value.dtype) for key, value in plain.state_dict().items()}
    assert {key: (value.shape, value.dtype) for key, value in kept.state_dict().items()} == shapes
    assert not any(map(parametrize.is_parametrized, kept.modules()))
    assert torch.equal(embedded(network), adapted)  # it can be trained further
    assert torch.equal(embedded(merged(copy.deepcopy(network))), embedded(kept))
    assert merged(kept) is kept


@pytest.mark.parametrize("name", ["small_conv", "vit", "timm_vit"])
def test_steps_are_those_of_weights_that_are_written_out(name: str) -> None:
    """Adam on W0 + (alpha / r) B A, with every W0 left as it is."""
    make, side = NETWORKS[name]
    network = make().double().eval()
    plain = copy.deepcopy(network).requires_grad_(False)
    attach(network, rank=3, alpha=6, seed=5)
    own = {path: module for path, module in network.named_modules() if isinstance(module, LowRank)}
    low = {
        path.removesuffix(".0").replace("parametrizations.", ""): (
            module.down_RI.detach().clone().requires_grad_(),
            module.up_OR.detach().clone().requires_grad_(),
        )
        for path, module in own.items()
    }
    weights = dict(plain.named_parameters())
    assert set(low) == {place.name for place in chosen(plain, "all")}
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    one = torch.optim.Adam(trained, lr=1e-2)
    other = torch.optim.Adam([each for pair in low.values() for each in pair], lr=1e-2)
    for step in range(3):
        x = images(side, 2 + step).double()
        target = torch.linspace(-1, 1, 7).double()

        def loss(z_NF: Tensor, target: Tensor = target) -> Tensor:
            return (z_NF[:, :7] - target).square().sum()

        one.zero_grad()
        loss(network(x)).backward()
        one.step()
        other.zero_grad()
        adapted = {
            path: weights[path] + 2 * (up @ down).view_as(weights[path]) for path, (down, up) in low.items()
        }
        loss(functional_call(plain, adapted, x)).backward()
        other.step()
    for (down, up), module in zip(low.values(), own.values(), strict=True):
        torch.testing.assert_close(module.down_RI, down, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(module.up_OR, up, rtol=1e-9, atol=1e-12)
        assert module.up_OR.abs().max() > 0


def test_attention_of_torchvision_is_adapted_on_its_fast_path_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eval mode without gradients it hands its weights to one fused kernel."""
    fused, calls = torch._native_multi_head_attention, []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return fused(*args)

    monkeypatch.setattr(torch, "_native_multi_head_attention", counted)
    network = small_vit().eval()
    with torch.no_grad():
        before = network(images(16))
        attach(network, rank=4, alpha=8, targets="attention", seed=0)
        assert torch.equal(network(images(16)), before)
        assert torch.equal(moved(merged(network))(images(16)), before)
        fast = moved(network)(images(16))
        torch.testing.assert_close(merged(network)(images(16)), fast, rtol=0, atol=1e-5)
    assert len(calls) == 5 * 2
    torch.testing.assert_close(network(images(16)), fast, rtol=0, atol=1e-5)
    assert len(calls) == 5 * 2  # gradients take the slow path
    assert (fast - before).abs().max() > 1e-2


def test_a_merged_network_that_recomputes_has_let_go_of_the_trained_one() -> None:
    network = resnet().eval()
    recompute_blocks(network)
    attach(network, rank=4, alpha=4, seed=0)
    kept = merged(moved(network))
    expected = kept(images(32))
    for depth in depths(network):
        network.get_parameter(depth).data.zero_()
    assert torch.equal(kept(images(32)), expected)
    assert not torch.equal(network(images(32)), expected)


@networks
def test_adapters_alone_have_a_gradient(name: str) -> None:
    make, side = NETWORKS[name]
    network = make()
    attach(network, rank=4, alpha=4, seed=0)
    moved(network)(images(side)).square().sum().backward()
    found = {key for key, parameter in network.named_parameters() if parameter.grad is not None}
    assert found == set(depths(network))
    assert len(found) == 2 * len(chosen(make(), "all"))


def test_first_values_depend_on_the_seed_and_the_name_alone() -> None:
    def draws(
        rank: int = 4, targets: str = "all", last: int | str = "all", seed: int = 0
    ) -> dict[str, Tensor]:
        network = small_vit()
        torch.manual_seed(rank)  # a global generator has no say
        attach(network, rank=rank, alpha=1, targets=targets, last=last, seed=seed)
        return {key: value for key, value in network.named_parameters() if key.endswith("down_RI")}

    whole = draws()
    for part in (draws(targets="attention"), draws(targets="mlp"), draws(last=1)):
        assert 0 < len(part) < len(whole)
        assert all(torch.equal(value, whole[key]) for key, value in part.items())
    assert not any(torch.equal(value, whole[key]) for key, value in draws(seed=1).items())
    assert len({value.flatten()[0].item() for value in whole.values()}) == len(whole)
    for down_RI in whole.values():
        bound = down_RI.shape[1] ** -0.5
        assert bound / 2 < down_RI.abs().max() <= bound


def test_a_rank_is_cut_to_a_weights_smaller_side_at_one_scale() -> None:
    network = small_vit()
    attach(network, rank=20, alpha=10, seed=0)
    ranks = {module.down_RI.shape[0] for module in network.modules() if isinstance(module, LowRank)}
    assert ranks == {12}
    assert {module.scale for module in network.modules() if isinstance(module, LowRank)} == {0.5}


@pytest.mark.parametrize(
    ("backbone", "targets", "leaves"),
    [
        ("vit_b_16", "attention", {"self_attention.in_proj_weight", "out_proj.weight"}),
        ("vit_b_16", "mlp", {"mlp.0.weight", "mlp.3.weight"}),
        ("swin_v2_t", "attention", {"attn.qkv.weight", "attn.proj.weight"}),
        ("swin_v2_t", "mlp", {"mlp.0.weight", "mlp.3.weight"}),
        ("convnext_tiny", "mlp", {"block.3.weight", "block.5.weight"}),
        ("timm:vit_tiny_patch16_224", "attention", {"attn.qkv.weight", "attn.proj.weight"}),
        ("timm:vit_tiny_patch16_224", "mlp", {"mlp.fc1.weight", "mlp.fc2.weight"}),
    ],
)
def test_targets_are_what_they_are_called(backbone: str, targets: str, leaves: set[str]) -> None:
    network = without_data(backbone, "none")
    assert network is not None
    found = [".".join(place.name.split(".")[-3:]) for place in chosen(network, targets)]
    assert {next((leaf for leaf in leaves if name.endswith(leaf)), name) for name in found} == leaves
    assert {name.name for name in chosen(network, targets)} < {place.name for place in chosen(network, "all")}


def test_all_are_the_linear_layers_and_convolutions_of_one_group_but_the_stems() -> None:
    network = without_data("efficientnet_b0", "none")
    assert network is not None
    names = {place.name for place in chosen(network, "all")}
    stem = {name for name, layer in blocks_of(network).layers.items() if layer == 0}
    expected = {
        f"{path}.weight"
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    }
    assert names == expected - stem
    assert expected & stem == {"features.0.0.weight"}


def test_the_last_blocks_and_what_follows_them_may_be_chosen() -> None:
    network = without_data("mobilenet_v3_small", "none")
    assert network is not None
    last = {place.name.partition(".block")[0] for place in chosen(network, "all", 1)}
    assert last == {"features.11", "features.12.0.weight", "classifier.0.weight"}
    small = small_vit()
    attach(small, rank=2, alpha=2, last=1, seed=0)
    assert set(depths(small).values()) == {1}
    assert all("encoder_layer_1." in name for name in depths(small))
    with pytest.raises(
        ValueError, match=r"^training\.lora_blocks: 3 blocks, but the backbone has 2; set it to at"
    ):
        attach(small_vit(), rank=2, alpha=2, last=3, seed=0)


@pytest.mark.parametrize(
    ("backbone", "targets", "said"),
    [
        (
            "resnet18",
            "attention",
            r"^training\.lora_targets: attention matches no layer .*; set it to all, for every",
        ),
        ("resnet18", "mlp", r"^training\.lora_targets: mlp matches no layer"),
        (
            "linear",
            "all",
            r"^training\.adapter: lora has no linear layer or convolution to adapt .* set it to none",
        ),
    ],
)
def test_a_choice_of_nothing_is_refused(backbone: str, targets: str, said: str) -> None:
    network = without_data(backbone, "none")
    assert network is not None
    with pytest.raises(ValueError, match=said):
        attach(network, rank=2, alpha=2, targets=targets, seed=0)


@pytest.mark.parametrize(
    ("backbone", "targets", "most"),
    [
        ("resnet18", "all", 0.035),
        ("timm:vit_small_patch16_224", "all", 0.03),
        ("timm:vit_tiny_patch16_224", "attention", 0.025),
    ],
)
def test_the_optimisers_state_is_a_twentieth_at_most(backbone: str, targets: str, most: float) -> None:
    """Adam's, at the default rank, counted after a step; the head counts on both sides."""

    def elements(*, is_adapted: bool) -> int:
        embedder = embedders.build(backbone, 128, in_channels=3, image_size=32, seed=0)
        if is_adapted:
            attach(embedder.backbone, rank=8, alpha=8, targets=targets, seed=0)
        trained = [parameter for parameter in embedder.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return sum(value.numel() for state in optimizer.state.values() for value in state.values())

    assert elements(is_adapted=True) <= most * elements(is_adapted=False)


def test_of_vit_b_16_adamw_keeps_a_fiftieth() -> None:
    """At rank 8, in bytes, with a head of 128 numbers on both sides."""

    def state_bytes(backbone: nn.Module) -> int:
        head = nn.Linear(768, 128, device="meta")
        trained = [each for part in (backbone, head) for each in part.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return sum(value.nbytes for state in optimizer.state.values() for value in state.values())

    full, adapted = without_data("vit_b_16", "none"), without_data("vit_b_16", "none")
    assert full is not None
    assert adapted is not None
    adapted.to_empty(device="cpu")
    attach(adapted, rank=8, alpha=8, seed=0)
    assert state_bytes(adapted) <= 0.02 * state_bytes(full)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_under_autocast_the_weight_is_the_merged_one(precision: torch.dtype) -> None:
    network = resnet().eval()
    attach(network, rank=4, alpha=4, seed=0)
    moved(network)
    x = images(32)
    with torch.autocast("cpu", precision), torch.no_grad():
        weight = network.get_submodule("layer1.0.conv1").weight
        assert weight.dtype is torch.float32
        adapted, plain = network(x).float(), merged(network)(x).float()
    step = torch.finfo(precision).eps
    torch.testing.assert_close(adapted, plain, rtol=4 * step, atol=4 * step * float(plain.abs().max()))


def test_channels_last_stays_so() -> None:
    network = resnet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    attach(network, rank=4, alpha=4, seed=0)
    for each in (moved(network), merged(network)):
        weight = each.get_submodule("layer1.0.conv1").weight
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()


def test_a_saved_model_has_no_trace_of_adapters(tmp_path: Path) -> None:
    one = embedders.build("small_conv", 8, width=4, in_channels=3, image_size=8, seed=0)
    embedders.save(one, tmp_path / "plain")
    attach(one.backbone, rank=4, alpha=4, seed=0)
    moved(one.backbone)
    kept = merged(one)
    embedders.save(kept, tmp_path / "adapted")
    embedders.add_program(tmp_path / "adapted")
    pictures = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8)
    again = embedders.load(tmp_path / "adapted")
    assert np.array_equal(embedders.embed(again, pictures), embedders.embed(kept, pictures))
    assert abs(embedders.embed(again, pictures) - embedders.embed(one, pictures)).max() <= 1e-6
    described = [(tmp_path / name / "embedder.json").read_text() for name in ("plain", "adapted")]
    assert described[0] == described[1]
    assert adapters.merged(again) is again
    program = torch.export.load(tmp_path / "adapted" / "embedder.pt2")
    assert set(program.state_dict) == set(again.state_dict())
    z_ND = program.module()(torch.from_numpy(pictures)).detach().numpy()
    assert abs(z_ND - embedders.embed(kept, pictures)).max() <= 1e-5
