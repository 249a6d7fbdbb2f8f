"""Backbones by name: published sizes, stages, preprocessing, weights from files, faults with their mends."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dmlstudy import embedders
from dmlstudy.embedders import weights
from dmlstudy.embedders.backbones import Backbone, build_backbone, torchvision_names
from dmlstudy.embedders.bn_inception import BNInception


def built(name: str, side: int = 64, **changes: Any) -> Backbone:
    return build_backbone(name, 3, 4, changes.pop("weights", None), (side, side), **changes)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_alike(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Beside the largest: without trained statistics a network's features may be 1e-14 all."""
    largest = theirs.abs().max()
    assert largest > 0
    torch.testing.assert_close(ours / largest, theirs / largest, atol=1e-5, rtol=1e-4)


# Parameters without the classifier: torchvision's published counts minus (F + 1) * 1000 of the last layer.
PUBLISHED = {
    "resnet18": (512, 11_689_512),
    "resnet50": (2048, 25_557_032),
    "googlenet": (1024, 6_624_904),
    "convnext_tiny": (768, 28_589_128),
    "mobilenet_v3_small": (1024, 2_542_856),
    "shufflenet_v2_x0_5": (1024, 1_366_792),
    "squeezenet1_1": (512, 1_235_496),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    backbone = built(name)
    num_features, with_classifier = PUBLISHED[name]
    own = sum(parameter.numel() for parameter in backbone.network.parameters())
    assert backbone.num_features == num_features
    assert own == with_classifier - 1000 * (num_features + 1)
    assert backbone.network.eval()(noise(2, 3, 64, 64)).shape == (2, num_features)


def test_every_classifier_of_torchvision_has_a_name() -> None:
    names = torchvision_names()
    assert {"alexnet", "vgg16", "inception_v3", "vit_b_16", "resnet101", "convnext_base", "swin_t"} <= set(
        names
    )
    for name in names:
        embedders.check_backbone(name, "default")


ENDS = {
    "resnet18": ([128, 256, 512], [8, 4, 2]),
    "googlenet": ([480, 832, 1024], [8, 4, 2]),
    "efficientnet_b0": ([40, 112, 1280], [8, 4, 2]),
    "densenet121": ([512, 1024, 1024], [8, 4, 2]),
    "bn_inception": ([576, 1056, 1024], [4, 2, 2]),
    "small_conv": ([4, 8, 16], [64, 32, 32]),
}


@pytest.mark.parametrize("name", ENDS)
def test_fusion_is_the_pooled_maps_of_three_stages_side_by_side(name: str) -> None:
    """Maps caught by hooks in the plain network, pooled by hand."""
    torch.manual_seed(1)
    plain = built(name)
    plain.network.eval()
    torch.manual_seed(1)
    fused = built(name, fusion="features")
    stages = fused.network.eval().get_submodule("stages")
    x = noise(2, 3, 64, 64)
    caught: dict[str, torch.Tensor] = {}
    if isinstance(plain.network, BNInception):
        for after in ("4a", "5a"):
            module = plain.network.get_submodule(f"inception_{after}_1x1")
            module.register_forward_pre_hook(
                lambda _m, i, after=after: caught.__setitem__(after, i[0].clone())
            )
        with torch.no_grad():
            maps = [*(m := plain.network.maps(x))[:0], caught["4a"], caught["5a"], m[-1]]
    else:
        ends = stages.ends
        for end in ends:
            module = plain.network.get_submodule(end)
            module.register_forward_hook(lambda _m, _i, out, end=end: caught.__setitem__(end, out.clone()))
        with torch.no_grad():
            plain.network(x)
        maps = [caught[end] for end in ends]
    channels, sides = ENDS[name]
    assert [m.shape[1] for m in maps] == channels
    assert [m.shape[2] for m in maps] == sides
    assert fused.num_features == sum(channels)
    for pooling in ("avg", "max", "avg+max"):
        fused.network.pooling = pooling
        by_hand = []
        for m in maps:
            flat = m.reshape(*m.shape[:2], -1)
            kinds = {"avg": flat.sum(2) / flat.shape[2], "max": flat.sort(dim=2).values[:, :, -1]}
            by_hand.append(sum(kinds[kind] for kind in pooling.split("+")))
        with torch.no_grad():
            of_stages = fused.network(x).split(channels, dim=1)
        for ours, theirs in zip(of_stages, by_hand, strict=True):
            assert_alike(ours, theirs)


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "bn_inception", "densenet121", "swin_t"])
def test_the_last_stage_averaged_is_the_networks_own_features(name: str) -> None:
    torch.manual_seed(1)
    own = built(name).network.eval()
    torch.manual_seed(1)
    averaged = built(name, pooling="avg").network.eval()
    x = noise(2, 3, 64, 64)
    with torch.no_grad():
        assert_alike(averaged(x), own(x))


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("googlenet", 64),
        ("inception_v3", 96),
        ("efficientnet_b0", 64),
        ("mobilenet_v2", 64),
        ("mnasnet0_5", 64),
    ],
)
def test_training_has_no_dropout_before_the_head(name: str, side: int) -> None:
    """So that ``pooling`` switches the pooling alone; what else the network draws in training, it draws alike."""
    outputs = []
    for pooling in ("own", "avg"):
        embedder = embedders.build(name, 8, in_channels=3, image_size=side, pooling=pooling, seed=0)
        network = embedder.train().backbone
        torch.manual_seed(1)  # of stochastic depth
        with torch.no_grad():
            outputs.append(network(noise(2, 3, side, side)))
    assert_alike(*outputs)


def test_dropouts_between_hidden_layers_stay() -> None:
    for name, kept in (
        ("alexnet", ["classifier.0", "classifier.3"]),
        ("vgg11", ["classifier.2"]),
        ("mobilenet_v3_small", []),
    ):
        modules = built(name).network.named_modules()
        assert [path for path, module in modules if isinstance(module, nn.Dropout)] == kept


@pytest.mark.parametrize("name", ["vgg11", "alexnet", "mobilenet_v3_small", "bn_inception"])
def test_every_parameter_of_a_fused_network_gets_a_gradient(name: str) -> None:
    """So that data parallel does not wait for one that never comes; the classifiers' layers are taken out."""
    network = built(name, fusion="features").network.eval()
    network(noise(2, 3, 64, 64)).square().sum().backward()
    assert [n for n, p in network.named_parameters() if p.grad is None] == []


def test_bn_inception_is_the_published_network() -> None:
    network = BNInception()
    assert sum(p.numel() for p in network.parameters()) + 1024 * 1000 + 1000 == 11_295_240
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert shapes["conv1_7x7_s2.weight"] == (64, 3, 7, 7)
    assert shapes["conv2_3x3.weight"] == (192, 64, 3, 3)
    assert shapes["inception_3a_pool_proj.weight"] == (32, 192, 1, 1)
    assert shapes["inception_3c_double_3x3_2.bias"] == (96,)
    assert shapes["inception_4a_1x1.weight"] == (224, 576, 1, 1)
    assert shapes["inception_4d_double_3x3_1.weight"] == (192, 160, 3, 3)
    assert shapes["inception_4e_3x3_bn.running_var"] == (192,)
    assert shapes["inception_5b_pool_proj.weight"] == (128, 1024, 1, 1)
    assert "inception_3c_1x1.weight" not in shapes
    assert "inception_4e_pool_proj.weight" not in shapes
    maps = network.eval().maps(noise(1, 3, 224, 224))
    assert [tuple(m.shape[1:]) for m in maps] == [(576, 14, 14), (1056, 7, 7), (1024, 7, 7)]


class Caffe:
    """The layers of BN-Inception's Caffe model as plain functions of a state; names as in its prototxt."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state

    def conv(self, x: torch.Tensor, name: str, stride: int = 1, pad: int = 0) -> torch.Tensor:
        """Convolution, normalisation by the running statistics, ReLU."""
        of = self.state
        y = nn.functional.conv2d(x, of[f"{name}.weight"], of[f"{name}.bias"], stride, pad)
        mean, var, scale, shift = (
            of[f"{name}_bn.{part}"][:, None, None]
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (scale * (y - mean) / (var + 1e-5).sqrt() + shift).clamp(min=0)

    def halved(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of each 3 x 3, stride 2; the size ceil((side - 3) / 2) + 1, windows cut off at the border."""
        rows, columns = ([range(at, min(at + 3, n)) for at in range(0, n - 1, 2)] for n in x.shape[2:])
        return torch.stack(
            [
                torch.stack([x[:, :, r.start : r.stop, c.start : c.stop].amax((2, 3)) for c in columns], -1)
                for r in rows
            ],
            -2,
        )

    def shifted(self, x: torch.Tensor, beyond: float) -> list[torch.Tensor]:
        height, width = x.shape[2:]
        padded = nn.functional.pad(x, (1, 1, 1, 1), value=beyond)
        return [padded[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]

    def average(self, x: torch.Tensor) -> torch.Tensor:
        """Of 3 x 3, stride 1; Caffe counts the zeros beyond the border in."""
        return sum(self.shifted(x, 0.0)) / 9

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.shifted(x, -torch.inf)).amax(0)

    def block(self, x: torch.Tensor, at: str, pool: str) -> torch.Tensor:
        """1x1; 3x3; double 3x3; pooled and projected."""
        one = self.conv(x, f"{at}_1x1")
        three = self.conv(self.conv(x, f"{at}_3x3_reduce"), f"{at}_3x3", pad=1)
        double = self.conv(self.conv(x, f"{at}_double_3x3_reduce"), f"{at}_double_3x3_1", pad=1)
        double = self.conv(double, f"{at}_double_3x3_2", pad=1)
        pooled = self.average(x) if pool == "average" else self.largest(x)
        return torch.cat([one, three, double, self.conv(pooled, f"{at}_pool_proj")], 1)

    def halving(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """3x3 and double 3x3, both of stride 2 at their end; pooled and passed on."""
        three = self.conv(self.conv(x, f"{at}_3x3_reduce"), f"{at}_3x3", stride=2, pad=1)
        double = self.conv(self.conv(x, f"{at}_double_3x3_reduce"), f"{at}_double_3x3_1", pad=1)
        double = self.conv(double, f"{at}_double_3x3_2", stride=2, pad=1)
        return torch.cat([three, double, self.halved(x)], 1)

    def maps(self, rgb: torch.Tensor) -> list[torch.Tensor]:
        x = self.halved(self.conv(rgb[:, [2, 1, 0]], "conv1_7x7_s2", stride=2, pad=3))
        x = self.halved(self.conv(self.conv(x, "conv2_3x3_reduce"), "conv2_3x3", pad=1))
        x = self.block(x, "inception_3a", "average")
        x = self.block(x, "inception_3b", "average")
        inception_3c = x = self.halving(x, "inception_3c")
        x = self.block(x, "inception_4a", "average")
        x = self.block(x, "inception_4b", "average")
        x = self.block(x, "inception_4c", "average")
        x = self.block(x, "inception_4d", "average")
        inception_4e = x = self.halving(x, "inception_4e")
        x = self.block(x, "inception_5a", "average")
        return [inception_3c, inception_4e, self.block(x, "inception_5b", "largest")]


# Ioffe & Szegedy 2015, Figure 5: 1x1, 3x3 reduce, 3x3, double 3x3 reduce, double 3x3, projection after the pooling.
FIGURE_5 = {
    "3a": (64, 64, 64, 64, 96, 32),
    "3b": (64, 64, 96, 64, 96, 64),
    "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128),
    "4b": (192, 96, 128, 96, 128, 128),
    "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128),
    "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128),
    "5b": (352, 192, 320, 192, 224, 128),
}


@pytest.mark.parametrize("side", [64, 68])
def test_bn_inception_is_the_published_one_layer_by_layer(side: int) -> None:
    network = BNInception().double().eval()
    draw = torch.Generator().manual_seed(0)
    state = network.state_dict()
    for key, value in state.items():
        if key.endswith("num_batches_tracked"):
            continue
        random = torch.randn(value.shape, generator=draw, dtype=torch.float64)
        if value.ndim == 4:
            state[key] = random * (2 / value[0].numel()) ** 0.5
        elif key.endswith(("running_var", "_bn.weight")):
            state[key] = 0.5 + random.abs()
        else:
            state[key] = 0.3 * random
    network.load_state_dict(state)
    x = noise(2, 3, side, side).double()
    with torch.no_grad():
        ours, published = network.maps(x), Caffe(state).maps(x)
        for one, other in zip(ours, published, strict=True):
            largest = other.abs().max()
            torch.testing.assert_close(one / largest, other / largest, atol=1e-9, rtol=0)
            assert (one > 0).double().mean() > 0.1
        torch.testing.assert_close(network(x), published[-1].sum((2, 3)) / published[-1][0, 0].numel())
    for name, widths in FIGURE_5.items():
        names = ("1x1", "3x3_reduce", "3x3", "double_3x3_reduce", "double_3x3_2", "pool_proj")
        found = [len(state.get(f"inception_{name}_{layer}.bias", ())) for layer in names]
        assert tuple(found) == widths, name


def test_bn_inception_sees_what_caffe_did() -> None:
    """Blue, green, red in 0..255 minus 104, 117, 128."""
    embedder = embedders.build("bn_inception", 4, in_channels=3, image_size=64, seed=0).eval()
    seen: list[torch.Tensor] = []
    first = embedder.backbone.get_submodule("conv1_7x7_s2")
    first.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    image = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    embedders.embed(embedder, image)
    expected = image[0, :, :, ::-1].astype(np.float64) - np.array([104, 117, 128])
    np.testing.assert_allclose(seen[0][0].permute(1, 2, 0).numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_googles_networks_take_pixels_in_minus_one_to_one(name: str) -> None:
    backbone = built(name, 96)
    assert (backbone.mean, backbone.std) == ((0.5,) * 3, (0.5,) * 3)
    assert backbone.network.transform_input is False
    assert isinstance(backbone.network.train()(noise(2, 3, 96, 96)), torch.Tensor)  # no auxiliary outputs


def test_a_vision_transformer_is_built_for_the_images_side(tmp_path: Path) -> None:
    from torchvision.models import VisionTransformer
    from torchvision.models.vision_transformer import interpolate_embeddings

    def tiny(**options: Any) -> VisionTransformer:
        given = {"image_size": options["image_size"], "patch_size": 16, "num_layers": 1, "num_heads": 2}
        return VisionTransformer(**given, hidden_dim=16, mlp_dim=16)

    donor = tiny(image_size=224)
    nn.init.normal_(donor.encoder.pos_embedding)
    torch.save(donor.state_dict(), tmp_path / "v.pth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchvision.models.get_model", lambda name, weights, **options: tiny(**options))
        network = built("vit_b_16", 32, weights=str(tmp_path / "v.pth")).network.eval()
    expected = tiny(image_size=32)
    expected.load_state_dict(interpolate_embeddings(32, 16, donor.state_dict()))
    assert torch.equal(network.encoder.pos_embedding, expected.encoder.pos_embedding)
    assert network(noise(2, 3, 32, 32)).shape == (2, 16)
    with pytest.raises(
        ValueError, match=r"data\.image_size: images are 40 x 40; vit_b_16 takes images that are"
    ):
        built("vit_b_16", 40)


@pytest.mark.parametrize("depth", [0, 2])
def test_vectors_go_through_an_mlp(depth: int, tmp_path: Path) -> None:
    name = f"mlp{depth}" if depth else "linear"
    embedder = embedders.build(name, 3, width=7, in_channels=5, image_size=(), seed=0)
    x = noise(4, 5).numpy()
    h = torch.from_numpy(x)
    for layer in [embedder.backbone[2 * i] for i in range(depth)]:
        h = (h @ layer.weight.T + layer.bias).clamp(min=0)
    h = h @ embedder.head.weight.T + embedder.head.bias
    expected = (h / h.norm(dim=1, keepdim=True)).detach().numpy()
    np.testing.assert_allclose(embedders.embed(embedder, x), expected, atol=1e-6)
    embedders.save(embedder, tmp_path, example_NHWC=x)
    embedders.add_program(tmp_path)
    assert embedders.largest_deviation(tmp_path) == 0
    with pytest.raises(ValueError, match=r"this embedder takes \(5,\)"):
        embedders.embed(embedder, x[:, :4])


def test_faults_name_the_mend() -> None:
    for arguments, message in (
        ({"name": "resnet8"}, "no backbone 'resnet8'; did you mean 'resnet18'"),
        (
            {"name": "vit_b_16", "fusion": "heads"},
            r"embedder\.fusion: vit_b_16 has no stages of maps; set it to",
        ),
        (
            {"name": "resnet18", "fusion": "all"},
            r"embedder\.fusion: unknown 'all'; known are: none, features",
        ),
        ({"name": "resnet18", "pooling": "mean"}, r"embedder\.pooling: unknown 'mean'"),
        ({"name": "mlp2"}, "mlp2 takes feature vectors, this data has images; choose small_conv"),
        (
            {"name": "bn_inception", "weights": "default"},
            "no 'default' weights; give a file: a state_dict with",
        ),
        (
            {"name": "bn_inception", "side": 48},
            "images are 48 x 48; bn_inception takes images whose sides .* 32",
        ),
        ({"name": "vgg16", "side": 16}, r"images are 16 x 16; vgg16 takes images of at least 32 x 32"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            built(**arguments)
        assert "\n" not in str(raised.value)
    with pytest.raises(
        ValueError, match="resnet18 takes images, this data has feature vectors; choose linear"
    ):
        build_backbone("resnet18", 5, 4, None, ())


def test_timm_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"needs timm .*; pip install 'dmlstudy\[timm\]'"):
        embedders.check_backbone("timm:resnet10t")


def test_timm_by_name(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(1)
    model = timm.create_model("resnet10t", num_classes=10)
    torch.save(model.state_dict(), tmp_path / "t.pth")
    plain = built("timm:resnet10t", weights=str(tmp_path / "t.pth"))
    x = noise(2, 3, 64, 64)
    model.eval()
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(x), pre_logits=True)
        torch.testing.assert_close(plain.network.eval()(x), expected)
        maps = model.forward_intermediates(x, indices=3, intermediates_only=True)
    fused = built("timm:resnet10t", weights=str(tmp_path / "t.pth"), fusion="features")
    with torch.no_grad():
        by_hand = torch.cat([m.mean(dim=(2, 3)) for m in maps], dim=1)
        torch.testing.assert_close(fused.network.eval()(x), by_hand)
    fused.network(x).sum().backward()
    assert all(p.grad is not None for p in fused.network.parameters())
    assert built("timm:vit_tiny_patch16_224", 32).num_features == 192
    with pytest.raises(ValueError, match=r"timm has no model 'resnet10x'; did you mean 'resnet1"):
        built("timm:resnet10x")
    embedder = embedders.build("timm:resnet10t", 4, in_channels=3, image_size=64, fusion="heads", seed=0)
    embedders.save(embedder, tmp_path / "kept")
    embedders.add_program(tmp_path / "kept")
    image = np.zeros((1, 64, 64, 3), np.uint8)
    loaded = embedders.load(tmp_path / "kept")
    np.testing.assert_array_equal(embedders.embed(loaded, image), embedders.embed(embedder, image))


def wrapped(state: dict[str, torch.Tensor], kind: str) -> object:
    """The ways in which files in the wild keep a network."""
    if kind == "old":  # batch norm as (1, C), before torch 0.2
        return {key: value[None] if "_bn." in key else value for key, value in state.items()}
    if kind == "tsn":
        return {"state_dict": {f"module.base_model.{k}": v for k, v in state.items()}, "epoch": 3}
    if kind == "prefixed":
        return {"model": {f"model.{k}": v for k, v in state.items()} | {"embedding.weight": torch.zeros(3)}}
    return state | {"last_linear.weight": torch.zeros(9, 1024), "fc.bias": torch.zeros(9)}


@pytest.mark.parametrize("kind", ["plain", "old", "tsn", "prefixed"])
def test_bn_inception_from_files_in_the_wild(kind: str, tmp_path: Path) -> None:
    donor = BNInception().state_dict()
    donor = {key: value for key, value in donor.items() if not key.endswith("num_batches_tracked")}
    donor["conv2_3x3_bn.running_mean"] = torch.arange(192.0)
    torch.save(wrapped(donor, kind), tmp_path / "b.pth")
    loaded = built("bn_inception", weights=str(tmp_path / "b.pth")).network.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in donor.items())


def test_weights_that_do_not_fit_name_the_parameter(tmp_path: Path) -> None:
    donor = built("resnet18").network.state_dict()
    for change, message in (
        (
            {"layer3.0.conv1.weight": torch.zeros(1, 2)},
            r"layer3\.0\.conv1\.weight has shape \(1, 2\) there and \(",
        ),
        (
            {"layer3.7.conv1.weight": torch.zeros(1)},
            r"layer3\.7\.conv1\.weight belongs to no part of it; give the",
        ),
        ({"bn1.running_mean": None}, r"bn1\.running_mean is missing"),
    ):
        state = {key: value for key, value in (donor | change).items() if value is not None}
        save_file(state, tmp_path / "r.safetensors")
        with pytest.raises(ValueError, match=message):
            built("resnet18", weights=str(tmp_path / "r.safetensors"))
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="it holds a list, not parameters by name"):
        weights.read(tmp_path / "list.pth")


def test_fusion_takes_the_same_file(tmp_path: Path) -> None:
    torch.manual_seed(3)
    donor = built("googlenet").network
    torch.save(
        donor.state_dict() | {"aux1.fc1.weight": torch.zeros(2), "fc.bias": torch.zeros(1000)}, tmp_path / "g"
    )
    fused = built("googlenet", weights=str(tmp_path / "g"), fusion="heads").network
    got = fused.state_dict()["stages.network.inception4e.branch1.conv.weight"]
    assert torch.equal(got, donor.state_dict()["inception4e.branch1.conv.weight"])


def test_without_a_network_the_file_to_fetch_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offline(*arguments: object, **named: object) -> None:
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    for wish in ("default", "IMAGENET1K_V1"):
        with pytest.raises(ValueError, match="could not download the weights of resnet18") as raised:
            built("resnet18", weights=wish)
        message = str(raised.value)
        assert "https://download.pytorch.org/models/resnet18-f37072fd.pth" in message
        assert f"{tmp_path}/hub/checkpoints" in message
        assert "\n" not in message


def test_the_hubs_cache_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torchvision.models import get_model

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    donor = get_model("squeezenet1_1").state_dict()
    torch.save(donor, tmp_path / "hub" / "checkpoints" / "squeezenet1_1-b8a52dc0.pth")
    loaded = built("squeezenet1_1", weights="default").network.state_dict()
    assert loaded
    assert all(torch.equal(value, donor[key]) for key, value in loaded.items())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("resnet18", {"fusion": "heads"}),
        ("bn_inception", {"fusion": "features", "pooling": "avg+max"}),
        ("squeezenet1_1", {"pooling": "max", "head_norm": True, "code": "tanh"}),
        ("small_conv", {"fusion": "heads", "code": "sign"}),
    ],
)
def test_each_kind_travels_in_a_folder(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    embedder = embedders.build(name, 7, width=4, in_channels=3, image_size=64, seed=0, **changes)
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    embedders.save(embedder, tmp_path, example_NHWC=images)
    embedders.add_program(tmp_path)
    loaded = embedders.load(tmp_path)
    assert loaded.architecture == embedder.architecture
    np.testing.assert_array_equal(embedders.embed(loaded, images), embedders.embed(embedder, images))
    program = torch.export.load(tmp_path / "embedder.pt2").module()
    with torch.no_grad():
        z = program(torch.tensor(images)).numpy()
    np.testing.assert_allclose(z, embedders.embed(embedder, images), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)
