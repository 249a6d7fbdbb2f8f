"""OAHU's loss in batches against loops over triplets, and the hedge it moves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmlstudy import embedders
from dmlstudy.losses.adaptive import AdaptiveBound, hedged, layer_sizes
from dmlstudy.losses.interface import Embeddings

DIM, LAYERS = 7, 3
LABELS = [0, 0, 1, 1, 1, 2, 0, 3]


def batch(labels: list[int], seed: int = 0) -> Embeddings:
    z_ND = torch.randn(len(labels), DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Embeddings(z_ND.requires_grad_(), torch.tensor(labels), torch.arange(len(labels)))


def by_triplets(z_ND: Tensor, labels: list[int], tau: float) -> Tensor:
    """(L + 1): each layer's mean over anchors of the mean over their triplets of ABTL."""
    losses = []
    for part in torch.split(z_ND, layer_sizes(DIM, LAYERS), dim=1):
        f = normalize(part, dim=1)
        of_anchors = []
        for a, label in enumerate(labels):
            of_triplets = []
            for p in range(len(labels)):
                for n in range(len(labels)):
                    if p == a or labels[p] != label or labels[n] == label:
                        continue
                    plus, minus = (f[a] - f[p]).norm(), (f[a] - f[n]).norm()
                    similar = tau * (plus.detach().exp() - 1) / (math.e**2 - 1)
                    dissimilar = 2 - tau + tau * (1 - (-minus.detach()).exp()) / (1 - math.e**-2)
                    attractive = torch.relu((plus - similar) / (2 - similar))
                    of_triplets.append((attractive + torch.relu(1 - minus / dissimilar)) / 2)
            if of_triplets:
                of_anchors.append(torch.stack(of_triplets).mean())
        losses.append(torch.stack(of_anchors).mean())
    return torch.stack(losses)


@pytest.mark.parametrize("tau", [0.1, 0.6, 1.5])
def test_the_mean_over_all_triplets_and_its_gradient(tau: float) -> None:
    loss = AdaptiveBound(DIM, LAYERS, tau=tau)
    alpha_L = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    loss.alpha_L.copy_(alpha_L)
    given = batch(LABELS)
    total, count = loss(given)
    expected_L = by_triplets(given.z_ND, LABELS, tau)
    assert count == 6  # the classes 2 and 3 have one image each
    torch.testing.assert_close(total / count, (alpha_L * expected_L).sum(), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(total / count, given.z_ND)
    (expected,) = torch.autograd.grad((alpha_L * expected_L).sum(), given.z_ND)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    moved = hedged(alpha_L.numpy(), expected_L.detach().numpy(), 0.99, 0.1, "printed")
    np.testing.assert_allclose(loss.alpha_L.numpy(), moved, rtol=0, atol=1e-14)


@pytest.mark.filterwarnings("ignore:a batch holds no two images")
def test_weights_move_in_training_only_and_not_without_triplets() -> None:
    loss = AdaptiveBound(DIM, LAYERS)
    before = loss.alpha_L.clone()
    with torch.no_grad():
        loss(batch(LABELS))
    loss.eval()
    loss(batch(LABELS))
    loss.train()
    for labels in ([0, 0, 0], [0, 1, 2]):
        total, count = loss(batch(labels))
        assert (total, count) == (0, 0)
        total.backward()
    torch.testing.assert_close(loss.alpha_L, before)
    loss(batch(LABELS))
    assert not torch.equal(loss.alpha_L, before)
    assert float(loss.alpha_L.sum()) == pytest.approx(1)


def test_an_embedder_of_several_depths_weights_its_layers() -> None:
    embedder = embedders.build(
        "small_conv", 10, width=4, in_channels=1, image_size=8, seed=0, head_depth=2, head_width=6
    )
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)
    alpha_L = torch.tensor([0.7, 0.1, 0.2], dtype=torch.float64)
    equal = embedders.embed(embedder, images)
    embedder.weigh_layers(alpha_L)
    z = embedders.embed(embedder, images)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, rtol=1e-6)
    for part, before, alpha in zip(
        np.split(z, [4, 7], axis=1), np.split(equal, [4, 7], axis=1), alpha_L.tolist(), strict=True
    ):
        np.testing.assert_allclose(np.linalg.norm(part, axis=1), math.sqrt(alpha), rtol=1e-6)
        np.testing.assert_allclose(part / math.sqrt(alpha), before * math.sqrt(3), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="2 layer weights, but the embedder's head has 3"):
        embedder.weigh_layers(alpha_L[:2])
    plain = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0)
    with pytest.raises(ValueError, match=r"has 1; set embedder\.head_depth"):
        plain.weigh_layers(alpha_L)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 2}, r"embedder\.dim: 2 is less than the 3 layers"),
        ({"code": "sign"}, "no code: sign"),
        ({"fusion": "heads"}, "no fusion: heads"),
    ],
)
def test_heads_that_cannot_be(changes: dict[str, object], message: str) -> None:
    settings = {"dim": 9, "width": 4, "in_channels": 1, "image_size": 16, "seed": 0, "head_depth": 2}
    with pytest.raises(ValueError, match=message):
        embedders.build("small_conv", **{**settings, **changes})  # type: ignore[arg-type]


def test_bad_settings() -> None:
    for changes, message in (({"tau": 2.0}, "tau"), ({"beta": 1.0}, "beta"), ({"rule": "x"}, "rule")):
        with pytest.raises(ValueError, match=message):
            AdaptiveBound(DIM, LAYERS, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size 7, the loss was built for 6"):
        AdaptiveBound(6, LAYERS)(batch(LABELS))
