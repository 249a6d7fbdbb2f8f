"""SupCon, SigLIP and threshold-consistent margin against their formulas, as plain loops in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml
from support.small_batch import BY_CLASS, INTERLEAVED, assert_same, balanced, embeddings, pair_sets
from support.worked_example import example
from torch import Tensor
from torch.nn import functional

from dmlstudy.embedders import on_ball
from dmlstudy.losses import catalogue, tiles
from dmlstudy.losses.distances import Hyperbolic, euclidean
from dmlstudy.losses.infonce import SigLIP, SupCon
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.losses.threshold_consistency import ThresholdConsistentMargin

Reference = Callable[[Embeddings, Embeddings, Loss], tuple[Tensor, float]]


def added(terms: list[Tensor]) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64))


def supcon(anchors: Embeddings, references: Embeddings, loss: SupCon) -> tuple[Tensor, float]:
    scale = loss.log_scale.exp() if loss.log_scale is not None else 1 / loss.temperature
    terms, number = [], 0
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        s = {a: scale * closeness(loss, z, references.z_ND[a]) for a in positives + negatives}
        if loss.over_all:
            logs = [
                torch.log(added([torch.exp(s[a]) for a in positives + negatives])) - s[j] for j in positives
            ]
        else:
            logs = [torch.log(1 + added([torch.exp(s[k] - s[j]) for k in negatives])) for j in positives]
        terms += [added(logs) / len(logs)] if logs else []
        number += 1 if logs or loss.counts_all else 0
    return added(terms), number


def closeness(loss: SupCon, a: Tensor, b: Tensor) -> Tensor:
    return -(a - b).square().sum().sqrt() if loss.distance is euclidean else torch.dot(a, b)


def siglip(anchors: Embeddings, references: Embeddings, loss: SigLIP) -> tuple[Tensor, float]:
    scale = loss.log_scale.exp() if loss.log_scale is not None else loss.scale
    bias = loss.learned_bias if loss.learned_bias is not None else loss.bias
    terms = []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        u = scale * (references.z_ND @ z) + bias
        terms += [torch.log(1 + torch.exp(-u[j])) for j in positives]
        terms += [torch.log(1 + torch.exp(u[k])) for k in negatives]
    return added(terms), len(anchors.z_ND)


def tcm(anchors: Embeddings, references: Embeddings, loss: ThresholdConsistentMargin) -> tuple[Tensor, float]:
    pulls, pushes = [], []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        s = references.z_ND @ z
        pulls += [loss.pulls.margin - s[j] for j in positives if s[j] <= loss.pulls.margin]
        pushes += [s[k] - loss.pushes.margin for k in negatives if s[k] >= loss.pushes.margin]
    mean = loss.positive_weight * added(pulls) / max(1, len(pulls))
    mean = mean + loss.negative_weight * added(pushes) / max(1, len(pushes))
    return mean * len(anchors.z_ND), len(anchors.z_ND)


CASES: dict[str, tuple[Reference, Callable[[], Loss]]] = {
    "supcon": (supcon, SupCon),
    "supcon-learned": (supcon, lambda: SupCon(0.5, learn=True)),
    "supcon-counted": (supcon, lambda: SupCon(0.3, average="with_positive")),
    "supcon-euclidean": (supcon, lambda: SupCon(0.5, learn=True, distance=euclidean)),
    "nt-xent": (supcon, lambda: SupCon(denominator="negatives")),
    "nt-xent-learned": (supcon, lambda: SupCon(0.5, True, "negatives", "with_positive")),
    "siglip": (siglip, SigLIP),
    "siglip-soft": (siglip, lambda: SigLIP(2.0, -0.5)),
    "siglip-fixed": (siglip, lambda: SigLIP(5.0, -2.0, learn=False)),
    "tcm": (tcm, lambda: ThresholdConsistentMargin(0.9, 0.1)),
    "tcm-weighted": (tcm, lambda: ThresholdConsistentMargin(0.7, -0.2, 0.3, 2.0)),
}
each_case = pytest.mark.parametrize("name", list(CASES))


@pytest.mark.parametrize("order", [INTERLEAVED, BY_CLASS], ids=["interleaved", "by class"])
@pytest.mark.parametrize("rows", [slice(None), slice(2, 7)], ids=["own batch", "other references"])
@each_case
def test_value_and_gradient_equal_the_formula_s_loops(name: str, rows: slice, order: list[int]) -> None:
    loss, batch = CASES[name][1]().double(), embeddings(order)
    leaves = [batch.z_ND, *loss.parameters()]
    total, count = loss(batch.rows(rows), batch)
    expected, expected_count = CASES[name][0](batch.rows(rows), batch, loss)
    assert count.item() == expected_count
    assert_same((total,), (expected,), 1e-10)
    wanted = torch.autograd.grad(expected, leaves)
    assert all(gradient.abs().max() > 1e-3 for gradient in wanted)
    assert_same(torch.autograd.grad(total, leaves), wanted, 1e-9)


@each_case
def test_tiles_of_one_row_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, batch = CASES[name][1]().double(), embeddings()
    leaves = [batch.z_ND, *loss.parameters()]
    whole = loss(batch)
    gradients = torch.autograd.grad(whole.total, leaves)
    monkeypatch.setattr(tiles, "BUDGET_BYTES", {"cpu": 1})
    in_rows = loss(batch)
    assert_same(in_rows, whole, 1e-12)
    assert_same(torch.autograd.grad(in_rows.total, leaves), gradients, 1e-12)


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (SupCon(0.1), 1.9953028976),
        (SupCon(0.1, average="with_positive"), 2.3943634771),
        (SupCon(0.5), 1.1738567635),
        (SupCon(0.1, denominator="negatives"), 1.5932743936),
        (SupCon(0.5, denominator="negatives", average="with_positive"), 1.1767593801),
        (SigLIP(), 5.9914724349),
        (ThresholdConsistentMargin(), 0.5033333333),
        (ThresholdConsistentMargin(0.9, 0.6), 0.446),
    ],
)
def test_a_worked_example(loss: Loss, value: float) -> None:
    total, count = loss.double()(example())
    learned_in_float32 = any(True for _ in loss.parameters())
    assert (total / count).item() == pytest.approx(value, abs=1e-6 if learned_in_float32 else 5e-11)


def test_learned_scalars_have_the_slopes_of_the_worked_example() -> None:
    loss: Loss = SupCon(0.5, learn=True).double()
    total, count = loss(example())
    (total / count).backward()
    assert [x.grad.item() for x in loss.parameters()] == pytest.approx([-0.0065524], abs=2e-7)
    loss = SigLIP().double()
    total, count = loss(example())
    (total / count).backward()
    assert [x.grad.item() for x in loss.parameters()] == pytest.approx([-6.7517359, -1.2394085], abs=2e-7)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_supcon_is_that_of_pytorch_metric_learning(temperature: float) -> None:
    batch = embeddings()
    batch = batch.rows(slice(9))  # without the image that is drawn twice
    total, count = SupCon(temperature, average="with_positive")(batch)
    theirs = pml.SupConLoss(temperature=temperature)(batch.z_ND, batch.y_N)
    torch.testing.assert_close(total / count, theirs, rtol=1e-9, atol=0)


def test_nt_xent_is_that_of_pytorch_metric_learning() -> None:
    """Where each anchor has as many positives: theirs is a mean over pairs."""
    batch = balanced()
    total, count = SupCon(0.2, denominator="negatives")(batch)
    theirs = pml.NTXentLoss(temperature=0.2)(batch.z_ND, batch.y_N)
    torch.testing.assert_close(total / count, theirs, rtol=1e-9, atol=0)


def test_tcm_is_that_of_pytorch_metric_learning() -> None:
    batch = balanced()
    total, count = ThresholdConsistentMargin(0.9, 0.1)(batch)
    theirs = pml.ContrastiveLoss(0.9, 0.1, distance=pml_distances.CosineSimilarity())(batch.z_ND, batch.y_N)
    torch.testing.assert_close(total / count, theirs, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["supcon", "siglip"])
def test_a_learned_scale_stays_in_its_range(name: str) -> None:
    loss = catalogue.build(name, {"learn": True}, num_classes=2, dim=4)
    batch = embeddings()
    for left_at, kept in ((-3.0, 1.0), (9.0, 100.0)):
        with torch.no_grad():
            loss.log_scale.fill_(left_at)
        loss(batch)
        assert loss.log_scale.exp().item() == pytest.approx(kept)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("supcon", {"temperature": 0.0}, "temperature=0.0 must be a finite number > 0"),
        (
            "supcon",
            {"temperature": 2.0, "learn": True},
            r"temperature=2.0 must lie in 0.01..1 where it is learned",
        ),
        ("supcon", {"denominator": "positives"}, "denominator='positives' is unknown; .*all, negatives"),
        ("supcon", {"average": "pairs"}, "average='pairs' is unknown"),
        ("siglip", {"scale": 0.5}, r"scale=0.5 must lie in 1..100 where it is learned"),
        ("siglip", {"bias": float("inf")}, "bias=inf must be a finite number"),
        ("tcm", {"positive_margin": 1.2}, r"positive_margin=1.2 must be a cosine, within -1..1"),
        ("tcm", {"negative_weight": -1.0}, "negative_weight=-1.0 must be a finite number >= 0"),
    ],
)
def test_mistakes_are_named(name: str, params: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        catalogue.build(name, params, num_classes=2, dim=4)


def test_far_logits_do_not_overflow() -> None:
    """A temperature of 0.001 makes logits of 2,000; the loss is their largest difference."""
    z_ND = functional.normalize(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])).requires_grad_()
    batch = Embeddings(z_ND, torch.tensor([0, 0, 1]), torch.arange(3))
    for denominator in ("all", "negatives"):
        loss = copy.deepcopy(SupCon(0.001, denominator=denominator))
        total, _ = loss(batch)
        assert total.item() == pytest.approx(2000.0, rel=1e-3)
        total.backward()
        assert z_ND.grad is not None
        assert z_ND.grad.isfinite().all()


def test_points_of_a_ball_by_hyperbolic_distance() -> None:
    batch = example()
    v_ND = batch.z_ND * torch.tensor([3, 0.5, 1.5, 2, 1, 2.5], dtype=torch.float64)[:, None]
    total, count = SupCon(0.2, distance=Hyperbolic(0.1))(batch._replace(z_ND=on_ball(v_ND, 0.1, 2.3)))
    assert (total / count).item() == pytest.approx(4.5450205378, abs=1e-6)  # the map is in float32
