"""Embedders whose embeddings are points of a ball: the map into it, what it refuses, its folder and its program."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dmlstudy import embedders
from dmlstudy.embedders.ball import RIM
from dmlstudy.saved import Model


def built(**named: object) -> embedders.Embedder:
    how = {"in_channels": 1, "image_size": 8, "seed": 0, "width": 4, "space": "ball"} | named
    return embedders.build("small_conv", 6, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(("curvature", "radius"), [(0.1, 2.3), (1.0, 4.0), (0.01, 1.0)])
def test_the_map_is_the_exponential_one_of_cut_vectors(curvature: float, radius: float) -> None:
    v_ND = torch.randn(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v_ND *= torch.linspace(0.01, 4, 20)[:, None]
    found_ND = embedders.on_ball(v_ND, curvature, radius)
    root = math.sqrt(curvature)
    for v_D, x_D in zip(v_ND.tolist(), found_ND.tolist(), strict=True):
        length = math.hypot(*v_D)
        cut = min(length, radius)
        norm = min(math.tanh(root * cut) / root, (1 - RIM) / root)
        assert x_D == pytest.approx([norm * each / length for each in v_D], rel=1e-12)


def test_the_map_has_gradients_everywhere_and_stays_inside() -> None:
    v_ND = torch.tensor([[0.0, 0.0], [1e-20, 0.0], [1e3, 1e3], [0.5, -0.2]]).requires_grad_()
    x_ND = embedders.on_ball(v_ND, 1.0, 10.0)
    assert (x_ND.norm(dim=1) < 1).all()
    x_ND.sum().backward()
    assert v_ND.grad is not None
    assert v_ND.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_embeddings_are_float32_and_inside_also_under_autocast(dtype: torch.dtype) -> None:
    embedder = built(curvature=1.0, clip_radius=10.0)
    embedder.head.weight.data *= 1e4
    images = torch.randint(0, 256, (9, 8, 8, 1), dtype=torch.uint8)
    with torch.autocast("cpu", dtype=dtype):
        z_ND = embedder(images)
    assert z_ND.dtype == torch.float32
    assert z_ND.norm(dim=1).max().item() == pytest.approx(1 - RIM, rel=1e-5)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"structure": "official"}, "a structure head"),
        ({"code": "sign"}, "embedder.code: sign"),
        ({"head_depth": 1}, "embedder.head_depth: 1"),
        ({"unit_norm": False}, "embedder.unit_norm: false"),
    ],
)
def test_what_has_no_meaning_in_a_ball_is_refused(named: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=rf"embedder\.space: ball has no meaning beside {said}"):
        built(**named)


def test_an_unknown_space_is_refused() -> None:
    with pytest.raises(ValueError, match=r"embedder\.space: unknown 'bal'.*'ball'"):
        built(space="bal")


def test_its_folder_says_the_distance_and_its_program_gives_the_same_points(tmp_path: Path) -> None:
    embedder = built(curvature=0.5, clip_radius=3.0)
    embedders.save(embedder, tmp_path)
    described = json.loads((tmp_path / "embedder.json").read_text())
    assert described["output"] == {
        "dim": 6,
        "unit_norm": False,
        "distance": "hyperbolic",
        "curvature": 0.5,
    }
    model = Model.open(tmp_path)
    assert model.curvature == 0.5
    assert not model.gives_unit_vectors
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), dtype=np.uint8)
    z_ND = embedders.embed(embedder, images)
    np.testing.assert_array_equal(model.embed(images), z_ND)
    embedders.add_program(tmp_path)
    program = torch.export.load(tmp_path / "embedder.pt2").module()
    np.testing.assert_allclose(program(torch.from_numpy(images)), z_ND, rtol=1e-5, atol=1e-6)


def test_a_model_of_the_sphere_has_no_curvature(tmp_path: Path) -> None:
    embedders.save(built(space="sphere"), tmp_path)
    assert Model.open(tmp_path).curvature is None
    assert Model.open(tmp_path).gives_unit_vectors
