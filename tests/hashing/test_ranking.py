"""The point-wise ranking loss against the paper's sums, its laws, and the bound on the margin (hashing/README.md)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmlstudy.hashing.ranking import PointRanking, nearest_rows


def batch(num_rows: int = 9, num_bits: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features, codes +-1 and weights in (0.5, 1.5), float64; codes and weights with gradient."""
    generator = torch.Generator().manual_seed(seed)
    x_BF, z_BD, omega_BD = (
        torch.randn(num_rows, size, dtype=torch.float64, generator=generator)
        for size in (5, num_bits, num_bits)
    )
    return x_BF, z_BD.sign().requires_grad_(), (0.5 + omega_BD.sigmoid()).requires_grad_()


def as_printed(x_BF: Tensor, z_BD: Tensor, omega_BD: Tensor, neighbours: int, margin: float) -> Tensor:
    """NASA Eq. 8 and 9 with one number at a time."""
    num_rows, num_bits = z_BD.shape

    def cosine(i: int, j: int) -> float:
        return float(x_BF[i] @ x_BF[j] / x_BF[i].norm() / x_BF[j].norm())

    total = torch.zeros((), dtype=torch.float64)
    for i in range(num_rows):
        others = sorted((j for j in range(num_rows) if j != i), key=lambda j: -cosine(i, j))[:neighbours]
        s = [
            sum(omega_BD[i, d] * z_BD[i, d] * z_BD[n, d] for d in range(num_bits)) / num_bits for n in others
        ]
        for k in range(len(others) - 1):
            total = total + (s[k + 1] - s[k] + margin).clamp(min=0)
    return total / (num_rows * (neighbours - 1))


@pytest.mark.parametrize(("neighbours", "margin"), [(8, 0.03), (4, 0.3), (2, 1.9)])
def test_value_and_gradients_equal_the_formula(neighbours: int, margin: float) -> None:
    x_BF, z_BD, omega_BD = batch()
    value = PointRanking(neighbours, margin)(x_BF, z_BD, omega_BD)
    expected = as_printed(x_BF, z_BD, omega_BD, neighbours, margin)
    assert expected > 1e-2
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    got, wanted = (torch.autograd.grad(loss, [z_BD, omega_BD]) for loss in (value, expected))
    for one, other in zip(got, wanted, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_gradient_is_the_slope_of_the_value() -> None:
    x_BF, z_BD, omega_BD = batch()
    free_BD = (z_BD.detach() * torch.linspace(0.6, 1.4, 8, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z, omega: PointRanking(5, 0.1)(x_BF, z, omega), (free_BD, omega_BD)
    )


def test_similarity_is_that_of_differing_bits() -> None:
    """NASA Eq. 8: s = (sum omega - 2 sum omega [z != n]) / D, the XOR form."""
    _, z_BD, omega_BD = batch(2)
    differ_D = z_BD[0] != z_BD[1]
    s = (omega_BD[0].sum() - 2 * omega_BD[0][differ_D].sum()) / 8
    torch.testing.assert_close((omega_BD[0] * z_BD[0] * z_BD[1]).sum() / 8, s, rtol=1e-14, atol=1e-15)


def test_batch_order_and_scale_of_features_change_nothing() -> None:
    x_BF, z_BD, omega_BD = batch(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    loss = PointRanking(5, 0.1)
    value = loss(x_BF, z_BD, omega_BD)
    torch.testing.assert_close(loss(x_BF[order], z_BD[order], omega_BD[order]), value, rtol=1e-13, atol=0)
    scale_B = torch.linspace(0.1, 9, 12, dtype=torch.float64)
    torch.testing.assert_close(loss(scale_B[:, None] * x_BF, z_BD, omega_BD), value, rtol=1e-13, atol=0)


def test_bits_in_the_right_order_cost_nothing() -> None:
    """Points on a line of angles whose codes lose one bit with each step from the first."""
    angle_B = torch.tensor([0.0, 0.2, 0.5, 1.0], dtype=torch.float64)
    x_BF = torch.stack([angle_B.cos(), angle_B.sin()], dim=1)
    z_BD = torch.where(torch.arange(4)[:, None] > torch.arange(4), -1.0, 1.0).double()
    omega_BD = torch.ones(4, 4, dtype=torch.float64)
    right, wrong = (loss_of_first(x_BF, z_BD, omega_BD, flip) for flip in (False, True))
    assert right == 0
    assert wrong == pytest.approx((0.03 + 0.5) * 2)
    assert nearest_rows(x_BF, 3)[0].tolist() == [1, 2, 3]


def loss_of_first(x_BF: Tensor, z_BD: Tensor, omega_BD: Tensor, flip: bool) -> float:
    """The hinges of row 0 alone, with the others' codes turned around or not."""
    z_BD = torch.cat([z_BD[:1], z_BD[1:].flip(0)]) if flip else z_BD
    whole = PointRanking(3, 0.03)(x_BF, z_BD, omega_BD)
    rest = sum(
        (z_BD[i] @ z_BD[b] / 4 - z_BD[i] @ z_BD[a] / 4 + 0.03).clamp(min=0)
        for i in range(1, 4)
        for a, b in zip(nearest_rows(x_BF, 3)[i][:-1], nearest_rows(x_BF, 3)[i][1:], strict=True)
    )
    return round(float(whole * 8 - rest), 12)


def test_ties_come_by_place_and_no_row_is_its_own_neighbour() -> None:
    x_BF = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert nearest_rows(x_BF, 3)[:4].tolist() == [[1, 3, 2], [0, 3, 2], [0, 1, 3], [0, 1, 2]]
    assert nearest_rows(x_BF[:1], 3).shape == (1, 0)


@pytest.mark.parametrize(("num_rows", "is_zero"), [(1, True), (2, True), (3, False), (5, False)])
def test_small_batches(num_rows: int, is_zero: bool) -> None:
    x_BF, z_BD, omega_BD = batch(num_rows)
    value = PointRanking(8, 0.2)(x_BF, z_BD, omega_BD)
    value.backward()
    assert (value == 0) == is_zero
    assert ((z_BD.grad == 0).all() and (omega_BD.grad == 0).all()) == is_zero
    if not is_zero:
        expected = as_printed(x_BF, z_BD, omega_BD, num_rows - 1, 0.2)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 0.03), "neighbours=1 have no order"),
        ((8, 0.0), "margin=0.0 must be a finite number > 0"),
        ((21, 0.1), "margin=0.1 times neighbours-1=20 is not below 2"),
    ],
)
def test_faults(arguments: tuple[int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PointRanking(*arguments)
