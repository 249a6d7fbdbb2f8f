"""The structure head: its two presets, one pass of the backbone for both heads, and the folder on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dmlstudy import embedders, model_folder
from dmlstudy.embedders.structure import StructureHead

each_preset = pytest.mark.parametrize("preset", ["official", "paper"])


def small(structure: str = "official", **changes: Any) -> embedders.Embedder:
    arguments: dict[str, Any] = {"dim": 6, "width": 4, "in_channels": 1, "image_size": 8, "seed": 3}
    return embedders.build("small_conv", structure=structure, **(arguments | changes))


def pictures(num_images: int = 5) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num_images, 8, 8, 1), dtype=np.uint8)


def features(num_rows: int = 7) -> torch.Tensor:
    return torch.randn(num_rows, 12, generator=torch.Generator().manual_seed(0))


def test_official_is_the_code_s_formula() -> None:
    """Initial statistics make batch norm a division by sqrt(1 + eps), times weight, plus bias."""
    head, x_NF = StructureHead(12, 6, "official"), features()
    first, norm, second, last_norm = head.layers
    with torch.no_grad():
        for affine in (norm, last_norm):
            affine.weight.uniform_(0.5, 2)
            affine.bias.uniform_(-1, 1)
    x_ND = first(x_NF) / (1 + norm.eps) ** 0.5 * norm.weight + norm.bias
    x_ND = second(x_ND) / (1 + last_norm.eps) ** 0.5 * last_norm.weight + last_norm.bias
    expected = 1 + 0.5 * (2 * torch.sigmoid(x_ND) - 1)
    torch.testing.assert_close(head(x_NF), expected)
    assert first.out_features == 512
    extreme = head(1e6 * x_NF)
    assert ((extreme >= 0.5) & (extreme <= 1.5)).all()


def test_paper_is_a_softmax_of_mean_one() -> None:
    head, x_NF = StructureHead(12, 6, "paper"), features()
    first, norm, relu, second = head.layers
    assert isinstance(relu, nn.ReLU)
    x_NH = torch.relu(first(x_NF) / (1 + norm.eps) ** 0.5)
    torch.testing.assert_close(head(x_NF), 6 * torch.softmax(second(x_NH), dim=1))
    torch.testing.assert_close(head(x_NF).mean(1), torch.ones(7))
    assert (head(x_NF) > 0).all()


@each_preset
@pytest.mark.parametrize("freeze_bn", [True, False])
def test_batch_norm_keeps_its_initial_statistics(preset: str, freeze_bn: bool) -> None:
    """Rows do not know of each other, so that the number of ranks does not matter."""
    embedder = small(preset, freeze_bn=freeze_bn)
    images = torch.tensor(pictures())
    for mode in (True, False, True):
        embedder.train(mode)
        norms = [m for m in embedder.structure_head.modules() if isinstance(m, nn.BatchNorm1d)]
        assert norms
        assert not any(norm.training for norm in norms)
        assert all(norm.weight.requires_grad for norm in norms)
        omega_ND = embedder.embed_with_structure(images)[1]
        for rows in (slice(0, 1), slice(2, 5), slice(0, 0)):
            torch.testing.assert_close(
                embedder.embed_with_structure(images[rows])[1], omega_ND[rows], rtol=1e-5, atol=1e-6
            )
    assert all((norm.running_mean == 0).all() and (norm.running_var == 1).all() for norm in norms)


@each_preset
def test_one_pass_of_the_backbone_gives_both(preset: str) -> None:
    embedder, images = small(preset), torch.tensor(pictures())
    passes: list[int] = []
    embedder.backbone.register_forward_hook(lambda *_: passes.append(1))
    z_ND, omega_ND = embedder.embed_with_structure(images)
    assert len(passes) == 1
    assert omega_ND.shape == z_ND.shape == (5, 6)
    assert omega_ND.dtype == z_ND.dtype == torch.float32
    assert torch.equal(embedder(images), z_ND)
    (omega_ND * torch.arange(6)).sum().backward()
    for part in (embedder.backbone, embedder.structure_head):
        assert all(p.grad is not None and p.grad.isfinite().all() for p in part.parameters())
    assert all(p.grad is None for p in embedder.head.parameters())


def test_without_a_head_there_is_no_structure() -> None:
    embedder = small("none")
    assert embedder.structure_head is None
    z_ND, omega_ND = embedder.embed_with_structure(torch.tensor(pictures()))
    assert omega_ND is None
    assert torch.equal(z_ND, embedder(torch.tensor(pictures())))
    assert not any("structure" in name for name in embedder.state_dict())


@each_preset
def test_the_rest_is_initialised_as_without(preset: str) -> None:
    with_head, without = small(preset), small("none")
    state = with_head.state_dict()
    assert all(torch.equal(state[name], value) for name, value in without.state_dict().items())
    again, other = small(preset), small(preset, seed=4)
    for mine, same, another in zip(
        *(e.structure_head.layers[0].parameters() for e in (with_head, again, other)), strict=True
    ):
        assert torch.equal(mine, same)
        assert not torch.equal(mine, another)


@each_preset
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_autocast_gives_float32(preset: str, dtype: torch.dtype) -> None:
    embedder, images = small(preset), torch.tensor(pictures())
    plain = embedder.embed_with_structure(images)[1]
    with torch.autocast("cpu", dtype=dtype):
        omega_ND = embedder.embed_with_structure(images)[1]
    assert omega_ND.dtype == torch.float32
    torch.testing.assert_close(omega_ND, plain, rtol=0.05, atol=0.05)
    if preset == "paper":
        torch.testing.assert_close(omega_ND.mean(1), torch.ones(5))


@each_preset
def test_the_folder_carries_it(preset: str, tmp_path: Path) -> None:
    embedder, images = small(preset), torch.tensor(pictures())
    with torch.no_grad():
        for parameter in embedder.structure_head.parameters():
            parameter += 0.01
    embedders.save(embedder, tmp_path, example_NHWC=pictures())
    loaded = embedders.load(tmp_path)
    assert loaded.architecture == embedder.architecture
    assert loaded.architecture.structure == preset
    with torch.no_grad():
        for mine, theirs in zip(
            embedder.eval().embed_with_structure(images), loaded.embed_with_structure(images), strict=True
        ):
            assert torch.equal(mine, theirs)
    assert embedders.largest_deviation(tmp_path) == 0


def test_a_folder_from_before_structure_heads_is_loaded(tmp_path: Path) -> None:
    embedder = small("none")
    embedders.save(embedder, tmp_path)
    description = json.loads((tmp_path / "embedder.json").read_text())
    assert description["format_version"] == 1
    assert description["architecture"].pop("structure") == "none"
    (tmp_path / "embedder.json").write_text(json.dumps(description))
    model_folder.seal(tmp_path)
    loaded = embedders.load(tmp_path)
    assert loaded.structure_head is None
    np.testing.assert_array_equal(embedders.embed(loaded, pictures()), embedders.embed(embedder, pictures()))


def test_the_exported_program_is_the_embedding_alone(tmp_path: Path) -> None:
    embedder = small("official")
    embedders.save(embedder, tmp_path)
    embedders.add_program(tmp_path)
    program = torch.export.load(tmp_path / "embedder.pt2")
    with torch.no_grad():
        z_ND = program.module()(torch.tensor(pictures()))
    np.testing.assert_allclose(z_ND.numpy(), embedders.embed(embedder, pictures()), atol=1e-5)
    assert not any("structure" in name for name in program.state_dict)
    assert any(name.startswith("structure_head.") for name in load_file(tmp_path / "weights.safetensors"))
    embedders.verify(tmp_path)


def test_faults() -> None:
    with pytest.raises(
        ValueError, match=r"embedder\.structure: unknown 'oficial'; did you mean 'official'\?"
    ):
        small("oficial")
    with pytest.raises(ValueError, match="'official' or 'paper', not 'none'"):
        StructureHead(4, 4, "none")
