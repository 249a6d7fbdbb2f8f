"""Recomputed blocks: the same gradients, less that is kept, copies and saved models without a trace of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dmlstudy import embedders
from dmlstudy.embedders.recomputation import recompute_blocks


def built(backbone: str, side: int, *, is_recomputed: bool, fusion: str = "none") -> embedders.Embedder:
    embedder = embedders.build(backbone, 8, width=4, in_channels=3, image_size=side, seed=0, fusion=fusion)
    for module in list(embedder.modules()):
        if backbone == "small_conv" and isinstance(module, nn.Sequential) and len(module) == 3:
            module.append(nn.Dropout(0.5))
    if is_recomputed:
        recompute_blocks(embedder.backbone)
    return embedder


def gradients(embedder: embedders.Embedder, side: int) -> tuple[dict[str, Tensor], int]:
    """Of a sum of embeddings, by name, and the bytes that the forward pass keeps for them."""
    x = torch.rand(4, side, side, 3, generator=torch.Generator().manual_seed(0)) * 255
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    torch.manual_seed(1)  # of dropout's masks
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        z_ND = embedder(x)
    (z_ND * torch.linspace(-1, 1, 8)).sum().backward()
    return {name: p.grad for name, p in embedder.named_parameters() if p.grad is not None}, kept


@pytest.mark.parametrize(
    ("backbone", "side", "fusion"),
    [
        ("small_conv", 16, "none"),
        ("small_conv", 16, "heads"),
        ("bn_inception", 64, "none"),
        ("bn_inception", 64, "features"),
        ("shufflenet_v2_x0_5", 32, "none"),
        ("timm:test_vit", 32, "none"),
        ("timm:test_convnext", 32, "features"),
    ],
)
def test_gradients_are_those_of_kept_activations(backbone: str, side: int, fusion: str) -> None:
    plain, most = gradients(built(backbone, side, is_recomputed=False, fusion=fusion), side)
    recomputed, kept = gradients(built(backbone, side, is_recomputed=True, fusion=fusion), side)
    assert set(plain) == set(recomputed)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-6, atol=1e-7)
    assert kept < most


def test_a_copy_recomputes_its_own_blocks() -> None:
    one = built("small_conv", 16, is_recomputed=True)
    other = copy.deepcopy(one)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert gradients(one, 16)[0]["backbone.0.0.weight"].abs().sum() > 0
    assert gradients(other, 16)[0]["backbone.0.0.weight"].abs().sum() == 0
    assert set(one.state_dict()) == set(built("small_conv", 16, is_recomputed=False).state_dict())


def test_batch_norm_that_trains_is_refused() -> None:
    embedder = embedders.build("resnet18", 8, in_channels=3, image_size=64, freeze_bn=False, seed=0)
    with pytest.raises(
        ValueError, match=r"^training\.checkpointing: batch norm that trains .*freeze_bn: true"
    ):
        recompute_blocks(embedder.backbone)


def test_plain_layers_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^training\.checkpointing: this backbone is a chain of plain layers"
    ):
        recompute_blocks(embedders.build("mlp2", 8, width=4, in_channels=6, image_size=(), seed=0).backbone)
