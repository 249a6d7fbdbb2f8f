"""Distances: their values against plain differences, and their gradient where points coincide."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dmlstudy.losses import distances


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


@pytest.mark.parametrize("distance", [distances.euclidean, distances.squared_euclidean, distances.cosine])
def test_precision_is_float32_at_least(distance: distances.Distance) -> None:
    z_ND = unit(0, 3)
    assert distance(z_ND.half(), z_ND.half()).dtype == torch.float32
    assert distance(z_ND.half(), z_ND).dtype == torch.float64


@pytest.mark.parametrize("distance", [distances.euclidean, distances.squared_euclidean, distances.cosine])
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
