"""KoLeo and the global orthogonal regulariser against their formulas, as plain loops in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.small_batch import BY_CLASS, INTERLEAVED, assert_same, embeddings, pair_sets
from support.worked_example import example
from torch import Tensor

from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.losses.spreading import GlobalOrthogonal, KoLeo


def added(terms: list[Tensor]) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64))


def others(anchors: Embeddings, references: Embeddings, i: int, loss: KoLeo | GlobalOrthogonal) -> list[int]:
    positives, negatives = pair_sets(anchors, references, i)
    return [*positives, *negatives] if loss.with_positives else negatives


def koleo(anchors: Embeddings, references: Embeddings, loss: KoLeo) -> Tensor:
    terms = []
    for i, z in enumerate(anchors.z_ND):
        distances = [
            (z - references.z_ND[j]).square().sum().sqrt() for j in others(anchors, references, i, loss)
        ]
        terms += [-torch.log(torch.stack(distances).min() + 1e-8)] if distances else []
    return added(terms)


def gor(anchors: Embeddings, references: Embeddings, loss: GlobalOrthogonal) -> Tensor:
    s = [
        torch.dot(z, references.z_ND[j])
        for i, z in enumerate(references.z_ND)
        for j in others(references, references, i, loss)
    ]
    first, second = added(s) / len(s), added([x.square() for x in s]) / len(s)
    excess = (second - 1 / references.z_ND.shape[1]).clamp(min=0)
    return (loss.first_moment * first.square() + loss.second_moment * excess) * len(anchors.z_ND)


CASES: dict[str, tuple[Callable[[Embeddings, Embeddings, Loss], Tensor], Loss]] = {
    "koleo": (koleo, KoLeo()),
    "koleo-negatives": (koleo, KoLeo("negatives")),
    "gor": (gor, GlobalOrthogonal()),
    "gor-all": (gor, GlobalOrthogonal(0.5, 2.0, "all")),
}
each_case = pytest.mark.parametrize("name", list(CASES))


@pytest.mark.parametrize("order", [INTERLEAVED, BY_CLASS], ids=["interleaved", "by class"])
@pytest.mark.parametrize("rows", [slice(None), slice(2, 7)], ids=["own batch", "other references"])
@each_case
def test_value_and_gradient_equal_the_formula_s_loops(name: str, rows: slice, order: list[int]) -> None:
    loss, batch = CASES[name][1], embeddings(order, spread=0.3)
    total, count = loss(batch.rows(rows), batch)
    expected = CASES[name][0](batch.rows(rows), batch, loss)
    assert count.item() == len(batch.y_N[rows])
    assert_same((total,), (expected,), 1e-10)
    wanted = torch.autograd.grad(expected, batch.z_ND)
    assert wanted[0].abs().max() > 1e-3
    assert_same(torch.autograd.grad(total, batch.z_ND), wanted, 1e-9)


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (KoLeo(), 0.3354442402),
        (GlobalOrthogonal(), 0.0222280992),
        (GlobalOrthogonal(pairs="all"), 0.0666328178),
    ],
)
def test_a_worked_example(loss: Loss, value: float) -> None:
    total, count = loss(example())
    assert (total / count).item() == pytest.approx(value, abs=5e-11)


def test_groups_larger_than_the_embedding_size() -> None:
    """Then a class's Gram matrix is of its dimensions instead of its rows."""
    batch = embeddings()
    batch = batch._replace(y_N=torch.tensor([0] * 7 + [1] * 3))
    loss = GlobalOrthogonal()
    assert_same((loss(batch).total,), (gor(batch, batch, loss),), 1e-10)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("koleo", {"pairs": "positives"}, "pairs='positives' is unknown; .*all, negatives"),
        ("gor", {"first_moment": -1.0}, "first_moment=-1.0 must be a finite number >= 0"),
    ],
)
def test_mistakes_are_named(name: str, params: dict[str, float | str], message: str) -> None:
    with pytest.raises(ValueError, match=f"regularizer '{name}': {message}"):
        catalogue.build("contrastive", {}, regularizer=(name, params), num_classes=2, dim=4)
