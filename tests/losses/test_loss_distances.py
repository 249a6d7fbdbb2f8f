"""Distances: their values against plain differences, and their gradient where points coincide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy.embedders import on_ball
from dmlstudy.losses import batch_loss, catalogue, distances
from dmlstudy.losses.interface import Embeddings

ALL = [distances.euclidean, distances.squared_euclidean, distances.cosine, distances.Hyperbolic(0.5)]


def unit(seed: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return functional.normalize(torch.randn(n, 7, dtype=torch.float64, generator=generator))


def test_values_equal_plain_differences() -> None:
    z_BD, z_MD = unit(0, 4), unit(1, 6)
    squares_BM = (z_BD[:, None, :] - z_MD[None, :, :]).square().sum(2)
    torch.testing.assert_close(distances.squared_euclidean(z_BD, z_MD), squares_BM, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(distances.euclidean(z_BD, z_MD), squares_BM.sqrt(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(distances.cosine(z_BD, z_MD), squares_BM / 2, rtol=1e-12, atol=1e-14)


def test_coinciding_points_have_the_floor_s_distance_and_no_gradient() -> None:
    z_ND = torch.eye(3, dtype=torch.float64)[[0, 0]].requires_grad_()
    d_BM = distances.euclidean(z_ND, z_ND)
    assert (d_BM == distances.SQUARED_FLOOR**0.5).all()
    d_BM.sum().backward()
    assert (z_ND.grad == 0).all()


@pytest.mark.parametrize("distance", ALL)
def test_precision_is_float32_at_least(distance: distances.Distance) -> None:
    z_ND = unit(0, 3)
    assert distance(z_ND.half(), z_ND.half()).dtype == torch.float32
    assert distance(z_ND.half(), z_ND).dtype == torch.float64


@pytest.mark.parametrize("distance", ALL)
def test_closed_form_gradients_equal_autograd(distance: distances.Distance) -> None:
    z_BD, z_MD = unit(0, 4).requires_grad_(), unit(1, 6).requires_grad_()
    slope_BM = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad((distance(z_BD, z_MD) * slope_BM).sum(), [z_BD, z_MD])
    z_B, z_M = z_BD.detach(), z_MD.detach()
    left_BF, right_MF = distance.left(z_B), distance.right(z_M)
    d_BM = distance.of(left_BF @ right_MF.T)
    slope_BM = distance.product_slope(slope_BM, d_BM)
    torch.testing.assert_close(distance.left_gradient(slope_BM @ right_MF, z_B), wanted[0])
    torch.testing.assert_close(distance.right_gradient(slope_BM.T @ left_BF, z_M), wanted[1])


def mobius_distance(x_D: Tensor, y_D: Tensor, c: float) -> Tensor:
    """By Moebius addition, as the paper prints it."""
    x_D = -x_D
    product, x2, y2 = (x_D * y_D).sum(), x_D.square().sum(), y_D.square().sum()
    numerator_D = (1 + 2 * c * product + c * y2) * x_D + (1 - c * x2) * y_D
    sum_D = numerator_D / (1 + 2 * c * product + c**2 * x2 * y2)
    return 2 / c**0.5 * torch.atanh(c**0.5 * sum_D.norm())


@pytest.mark.parametrize("curvature", [0.01, 0.1, 1.0, 5.0])
def test_hyperbolic_distances_are_those_by_moebius_addition(curvature: float) -> None:
    x_BD, y_MD = (on_ball(2 * unit(seed, 5), curvature, 2.3).requires_grad_() for seed in (0, 1))
    distance = distances.Hyperbolic(curvature)
    found_BM = distance(x_BD, y_MD)
    wanted_BM = torch.stack([torch.stack([mobius_distance(x, y, curvature) for y in y_MD]) for x in x_BD])
    torch.testing.assert_close(found_BM, wanted_BM, rtol=1e-10, atol=1e-12)  # artanh near 1 has fewer digits
    found = torch.autograd.grad(found_BM.square().sum(), [x_BD, y_MD])
    wanted = torch.autograd.grad(wanted_BM.square().sum(), [x_BD, y_MD])
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    assert distances.checked_distance(distance) is distance


def test_hyperbolic_distance_of_the_worked_example_and_of_a_flat_ball() -> None:
    z_ND = torch.tensor(
        [[1, 0, 0], [0.8, 0.6, 0], [0.6, 0, 0.8], [0, 0.6, 0.8], [0, 0.96, -0.28], [-0.6, 0.8, 0]],
        dtype=torch.float64,
    )
    x_ND = on_ball(z_ND * torch.tensor([3, 0.5, 1.5, 2, 1, 2.5]).double()[:, None], 0.1, 2.3)
    d_N = distances.Hyperbolic(0.1)(x_ND[:1], x_ND)[0]
    assert d_N[[1, 3, 5]].tolist() == pytest.approx([3.8784983478, 6.7750839589, 8.5746073977], abs=5e-11)
    flat_NN = distances.Hyperbolic(1e-9)(z_ND, z_ND)
    torch.testing.assert_close(flat_NN, 2 * distances.euclidean(z_ND, z_ND), rtol=1e-6, atol=1e-9)


def test_hyperbolic_distances_are_finite_where_points_coincide_and_beyond_the_boundary() -> None:
    z_ND = torch.tensor([[0.3, 0.1], [0.3, 0.1], [0.0, 0.0], [2.0, 1.0], [0.0, 1e4]]).requires_grad_()
    d_NN = distances.Hyperbolic(1.0)(z_ND, z_ND)
    assert d_NN.isfinite().all()
    (gradient,) = torch.autograd.grad(d_NN[0, 1], [z_ND], retain_graph=True)
    assert not gradient.any()
    (gradient,) = torch.autograd.grad(d_NN.sum(), [z_ND])
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("triplet", {"margin": 0.7}),
        ("triplet_weighting", {"margin": 0.7, "weighting": "constant", "normalize": "none"}),
        ("pair_weighting", {"negative_margin": 6.0, "weighting": "constant", "normalize": "none"}),
    ],
)
def test_each_loss_that_names_a_distance_takes_the_hyperbolic_one(
    name: str, params: dict[str, float | str]
) -> None:
    y_N, id_N = torch.tensor([0, 1, 0, 1, 2, 0, 0]), torch.tensor([0, 1, 2, 3, 4, 5, 0])
    z_ND = on_ball(2 * unit(3, 7), 0.5, 2.0).requires_grad_()
    loss = catalogue.build(name, params | {"distance": "hyperbolic"}, num_classes=3, dim=7, curvature=0.5)
    total, count = loss(Embeddings(z_ND, y_N, id_N))
    terms = []
    for i in range(7):
        positives = [j for j in range(7) if y_N[j] == y_N[i] and id_N[j] != id_N[i]]
        negatives = [k for k in range(7) if y_N[k] != y_N[i]]
        d = [mobius_distance(z_ND[i], each, 0.5) if each is not z_ND[i] else None for each in z_ND]
        if name == "pair_weighting":
            terms += [d[j] for j in positives] + [(6 - d[k]).relu() for k in negatives]
        else:
            terms += [(d[j] - d[k] + 0.7).relu() for j in positives for k in negatives]
    wanted = torch.stack(terms).sum()
    assert count == (sum(term > 0 for term in terms) if name == "triplet" else 7)
    torch.testing.assert_close(total, wanted, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad(total, [z_ND])
    torch.testing.assert_close(found, torch.autograd.grad(wanted, [z_ND]), rtol=1e-8, atol=1e-9)


def test_the_curvature_is_given_from_python_and_checked() -> None:
    x_ND = on_ball(2 * unit(0, 6), 2.0, 2.0)
    y_N = torch.tensor([0, 0, 1, 1, 2, 2])
    named = batch_loss.build("triplet", distance="hyperbolic", curvature=2.0)(x_ND, y_N)
    assert named == batch_loss.build("triplet", distance=distances.Hyperbolic(2.0))(x_ND, y_N)
    assert named != batch_loss.build("triplet", distance="hyperbolic")(x_ND, y_N)
    with pytest.raises(ValueError, match=r"curvature=0\.0 must be a finite number > 0"):
        batch_loss.build("triplet", distance="hyperbolic", curvature=0.0)
    with pytest.raises(ValueError, match="draws by Euclidean distances"):
        batch_loss.build("triplet", distance="hyperbolic", mining="distance_weighted")
