"""The potential field against its formula in plain loops, and against a worked example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses.interface import Embeddings
from dmlstudy.losses.potential_field import PotentialField

DIM, NUM_CLASSES = 3, 4
Z_ND = [[1, 0, 0], [0.8, 0.6, 0], [0.6, 0, 0.8], [0, 0.6, 0.8], [0, 0.96, -0.28], [-0.6, 0.8, 0]]
PROXIES_CKD = [
    [[0.96, 0.28, 0], [0.6, 0.8, 0]],
    [[0.28, 0, 0.96], [0, 0.6, -0.8]],
    [[-0.28, 0.96, 0], [-1, 0, 0]],
]


def energy(d: Tensor, same_class: bool, alpha: float, delta: float) -> Tensor:
    if same_class:
        return -((delta / d.clamp(min=delta)) ** alpha)
    if d >= delta:
        return 0 * d
    if d >= delta / 10:
        return (delta / d) ** alpha - 1
    return 10**alpha - 1 + alpha * 10 ** (alpha + 1) / delta * (delta / 10 - d)


def reference(loss: PotentialField, batch: Embeddings) -> Tensor:
    """Every ordered pair of embeddings and proxies, one after the other."""
    points = [
        (z, y, f"image {i}")
        for z, y, i in zip(batch.z_ND, batch.y_N.tolist(), batch.id_N.tolist(), strict=True)
    ]
    if loss.proxies_CKD is not None:
        for y, own_KD in enumerate(loss.proxies_CKD):
            points += [(p / p.norm(), y, f"proxy {y} {k}") for k, p in enumerate(own_KD)]
    total = batch.z_ND.sum() * 0
    for place, (z, y, name) in enumerate(points):
        for other, (z_other, y_other, other_name) in enumerate(points):
            if place != other and not (y == y_other and name == other_name):
                d = (z - z_other).square().sum().clamp(min=1e-12).sqrt()
                total = total + energy(d, y == y_other, loss.field.alpha, loss.field.delta)
    return total / len(batch.y_N)


def batch_of(labels: list[int], ids: list[int], spread: float = 1.0) -> Embeddings:
    generator = torch.Generator().manual_seed(len(labels))
    drawn_ND = torch.randn(len(labels), DIM, dtype=torch.float64, generator=generator)
    z_ND = functional.normalize(torch.ones(DIM, dtype=torch.float64) + spread * drawn_ND)
    return Embeddings(z_ND.requires_grad_(), torch.tensor(labels), torch.tensor(ids))


@pytest.mark.parametrize("proxies", [0, 1, 3])
@pytest.mark.parametrize(("alpha", "delta"), [(4.0, 0.2), (1.0, 0.9), (2.5, 3.0)])
@pytest.mark.parametrize(
    ("labels", "ids", "spread"),
    [
        ([0, 1, 0, 1, 2, 0, 3, 2], [5, 6, 7, 8, 9, 5, 11, 12], 1.0),  # one image twice
        ([0, 1, 0, 1, 2, 0, 3, 2], [5, 6, 7, 8, 9, 10, 11, 12], 0.02),  # pairs below the floor
        ([0, 1, 2, 3], [0, 1, 2, 3], 1.0),  # no positives
        ([1, 1, 1], [0, 1, 2], 1.0),  # no negatives
        ([2], [0], 1.0),
    ],
)
@pytest.mark.filterwarnings("ignore:a batch holds no two images of one class")
def test_value_and_gradients_are_those_of_the_formula(
    labels: list[int], ids: list[int], spread: float, alpha: float, delta: float, proxies: int
) -> None:
    loss = PotentialField(NUM_CLASSES, DIM, alpha, delta, proxies, seed=3).double()
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter *= 1.7  # the forward pass must normalise them
    batch = batch_of(labels, ids, spread)
    total, count = loss(batch)
    wanted = reference(loss, batch)
    torch.testing.assert_close(total / count, wanted, rtol=1e-11, atol=1e-12)
    leaves = [batch.z_ND, *loss.parameters()]
    found = torch.autograd.grad(total / count, leaves)
    slopes = torch.autograd.grad(wanted, leaves, allow_unused=True)
    for own, slope in zip(found, slopes, strict=True):
        torch.testing.assert_close(
            own, torch.zeros_like(own) if slope is None else slope, rtol=1e-8, atol=1e-9
        )


@pytest.mark.parametrize(
    ("delta", "alpha", "proxies", "value"),
    [(0.7, 2.0, 2, -2.4818478387), (0.2, 4.0, 2, -0.2490899176), (0.7, 2.0, 0, -0.8019019277)],
)
def test_a_worked_example(delta: float, alpha: float, proxies: int, value: float) -> None:
    loss = PotentialField(3, DIM, alpha, delta, proxies).double()
    if loss.proxies_CKD is not None:
        loss.proxies_CKD.data = torch.tensor(PROXIES_CKD, dtype=torch.float64)
    z_ND = torch.tensor(Z_ND, dtype=torch.float64)
    total, count = loss(Embeddings(z_ND, torch.tensor([0, 0, 0, 1, 1, 2]), torch.arange(6)))
    assert (total / count).item() == pytest.approx(value, abs=5e-11)


def test_far_negatives_and_near_positives_leave_nothing_to_learn() -> None:
    z_ND = torch.eye(3, dtype=torch.float64).repeat_interleave(2, 0).requires_grad_()
    loss = PotentialField(3, 3, proxies=0)
    total, _ = loss(Embeddings(z_ND, torch.arange(3).repeat_interleave(2), torch.arange(6)))
    assert total.item() == -6
    (gradient,) = torch.autograd.grad(total, [z_ND])
    assert not gradient.any()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"proxies": -1}, "proxies=-1"),
        ({"num_classes": 0}, "num_classes=0"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, float], said: str) -> None:
    given = {"num_classes": NUM_CLASSES, "dim": DIM} | params
    with pytest.raises(ValueError, match=said):
        PotentialField(**given)  # type: ignore[arg-type]


def test_embeddings_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="embeddings have size 3, proxies 5"):
        PotentialField(NUM_CLASSES, 5)(batch_of([0, 1], [0, 1]))
