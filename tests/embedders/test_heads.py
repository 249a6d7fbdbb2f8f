"""Heads: one for each level, layer norm, codes on the sphere and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmlstudy import embedders
from dmlstudy.embedders.heads import LevelHeads, encode, linear_head


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_each_level_has_a_head_and_together_they_give_d_numbers() -> None:
    head = LevelHeads((3, 4, 5), 8, layer_norm=False).double()
    x = noise(2, 12)
    weights = [(h.weight, h.bias) for h in head.heads]
    assert [w.shape for w, _ in weights] == [(3, 3), (3, 4), (2, 5)]
    parts = [x[:, :3], x[:, 3:7], x[:, 7:]]
    expected = torch.cat([p @ w.T + b for p, (w, b) in zip(parts, weights, strict=True)], dim=1)
    torch.testing.assert_close(head(x), expected)
    with pytest.raises(ValueError, match=r"embedder\.dim: 2 is less than the 3 levels' heads"):
        LevelHeads((3, 4, 5), 2, layer_norm=False)


def test_each_levels_part_may_be_of_unit_norm() -> None:
    head = LevelHeads((3, 4, 5), 8, layer_norm=False, is_unit=True)
    plain = LevelHeads((3, 4, 5), 8, layer_norm=False)
    plain.load_state_dict(head.state_dict())
    x = noise(2, 12).float()
    parts = torch.split(plain(x), [3, 3, 2], dim=1)
    torch.testing.assert_close(head(x), torch.cat([p / p.norm(dim=1, keepdim=True) for p in parts], dim=1))
    options = {"in_channels": 1, "image_size": 8, "seed": 0, "width": 4}
    made, other = (embedders.build("small_conv", 9, fusion=f, **options) for f in ("unit_heads", "heads"))
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype=np.uint8)
    z, plain_z = embedders.embed(made, images), embedders.embed(other, images)
    for part in np.split(z, 3, axis=1):
        np.testing.assert_allclose(np.linalg.norm(part, axis=1), 3**-0.5, rtol=1e-5)
    assert np.abs(z - plain_z).max() > 1e-3
    made_state, other_state = made.state_dict(), other.state_dict()
    assert all(torch.equal(made_state[name], other_state[name]) for name in other_state)


def test_layer_norm_stands_before_the_head() -> None:
    head = linear_head(6, 3, layer_norm=True).double()
    x = 5 + 3 * noise(4, 6)
    scaled = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(head(x), scaled @ head[1].weight.T + head[1].bias)
    assert sum(p.numel() for p in head.parameters()) == 6 * 3 + 3


@pytest.mark.parametrize(
    ("backbone", "options", "num"),
    [
        ("small_conv", {"width": 4}, 256),
        ("small_conv", {"width": 8, "fusion": "features"}, 56),
        ("resnet18", {}, 512),
    ],
)
def test_without_a_head_the_embedding_is_the_features(
    backbone: str, options: dict[str, Any], num: int
) -> None:
    """On the sphere they are compared by their cosine, as a pretrained network's are without any training."""
    made = embedders.build(backbone, num, head="none", in_channels=1, image_size=32, seed=0, **options)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 32, 32, 1), dtype=np.uint8))
    with embedders.modes.in_eval_mode(made), torch.no_grad():
        features = made.features(images)
        torch.testing.assert_close(made(images), features / features.norm(dim=1, keepdim=True))
    assert not list(made.head.parameters())
    assert made.has_layers is False


def test_without_a_head_a_layer_norm_still_scales_the_features() -> None:
    options = {"width": 4, "in_channels": 1, "image_size": 8, "seed": 0}
    made = embedders.build("small_conv", 256, head="none", head_norm=True, **options)
    x = 5 + 3 * noise(4, 256)
    scaled = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(made.head(x), scaled)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dim": 8},
            r"embedder\.dim: 8 stands beside embedder\.head: none, which gives the 256 features of small_conv",
        ),
        ({"head_depth": 2}, r"embedder\.head: none has no place beside embedder\.head_depth: 2"),
        ({"fusion": "heads"}, r"embedder\.head: none has no place beside embedder\.fusion: heads"),
    ],
)
def test_what_no_head_cannot_go_with_is_one_line(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"dim": 256, "width": 4, "in_channels": 1, "image_size": 8, "seed": 0}
    with pytest.raises(ValueError, match=message):
        embedders.build("small_conv", head="none", **(options | changes))


def test_signs_are_codes_whose_distance_is_hammings() -> None:
    h = noise(5, 16)
    h[0, 0] = 0
    for code in ("tanh", "sign"):
        b = encode(h, code, training=False)
        assert set(b.unique().tolist()) == {-1.0, 1.0}
        assert b[0, 0] == 1
        z = b / 16**0.5
        hamming = (b[:, None] != b[None]).sum(2)
        torch.testing.assert_close((z[:, None] - z[None]).square().sum(2), 4 * hamming.double() / 16)


def test_gradients_of_codes() -> None:
    h, g = noise(3, 4).requires_grad_(), noise(3, 4, seed=1)
    sign = encode(h, "sign", training=True)
    assert torch.equal(sign, torch.where(h >= 0, 1.0, -1.0).double())
    assert torch.equal(torch.autograd.grad(sign, h, g)[0], g)  # straight-through
    (of_tanh,) = torch.autograd.grad(encode(h, "tanh", training=True), h, g)
    torch.testing.assert_close(of_tanh, g * (1 - h.tanh() ** 2))
    assert encode(h, "none", training=True) is h


@pytest.mark.parametrize("code", ["tanh", "sign"])
def test_an_embedder_of_codes(code: str) -> None:
    embedder = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=0, code=code)
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype=np.uint8)
    np.testing.assert_allclose(np.abs(embedders.embed(embedder, images)), 8**-0.5, rtol=1e-6)
    z = embedder.train()(torch.tensor(images))
    torch.testing.assert_close(z.norm(dim=1), torch.ones(3))
    z[:, 0].sum().backward()
    assert embedder.head.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"embedder\.code: unknown 'bits'; known are: none, tanh, sign"):
        embedders.build("small_conv", 8, in_channels=1, image_size=8, seed=0, code="bits")
