"""The softmax over classes against its formulas in plain loops, in tiles of anchors and of classes, and its states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses as pml
from support.ranks import config
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy import data, losses
from dmlstudy.losses import catalogue, tiles
from dmlstudy.losses.class_margins import AdaFace, CurricularFace, MagFace, SubCenterArcFace
from dmlstudy.losses.class_softmax import ArcFace, ClassSoftmax, CosFace, NormSoftmax, ProxyNCAPlusPlus
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.records import TrialConfig
from dmlstudy.training.embedder_trainer import EmbedderTrainer

NUM_CLASSES, DIM = 7, 4
SIZES = [5, 3, 9, 1, 2, 4, 6]
Case = tuple[str, dict[str, Any]]
CASES: list[Case] = [
    ("norm_softmax", {}),
    ("proxy_nca_pp", {"temperature": 0.5}),
    ("arcface", {"scale": 8.0}),
    ("arcface", {"scale": 8.0, "margin": 90.0}),
    ("cosface", {"scale": 8.0}),
    ("subcenter_arcface", {"scale": 8.0, "centers": 3, "margin": 60.0}),
    ("subcenter_arcface", {"scale": 8.0, "centers": 2, "margin_by": "class_size", "exponent": 0.4}),
    ("subcenter_arcface", {"scale": 8.0, "margin_by": "power", "lowest_margin": 5.0, "exponent": 0.4}),
    ("curricularface", {"scale": 8.0}),
    ("curricularface", {"scale": 8.0, "margin": 1.5}),
    ("adaface", {"scale": 8.0, "t_alpha": 0.9, "concentration": 0.5}),
    ("adaface", {"scale": 8.0, "t_alpha": 0.5, "margin": 2.5}),
    ("magface", {"scale": 8.0}),
    ("magface", {"scale": 8.0, "easy": False, "highest_margin": 1.5}),
    ("magface", {"scale": 8.0, "norm_bounds": "absolute", "lowest_norm": 2.0, "highest_norm": 6.0}),
]
each_case = pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param(name, params, id="-".join([name, *(f"{k}={v}" for k, v in params.items())]))
        for name, params in CASES
    ],
)
each_tile = pytest.mark.parametrize("budget", [None, 600, 2000], ids=["whole", "one class", "some classes"])
"""Bytes of a tile: at the default one holds the whole batch, and small ones hold some classes."""


def build(name: str, params: dict[str, Any], num_classes: int = NUM_CLASSES) -> ClassSoftmax:
    """The loss in float64, its vectors off the sphere."""
    loss = catalogue.build(
        name, params, num_classes=num_classes, class_sizes=SIZES[:num_classes], dim=DIM, seed=3
    ).double()
    assert isinstance(loss, ClassSoftmax)
    with torch.no_grad():
        (vectors,) = loss.parameters()
        shape = (*vectors.shape[:-1], 1)
        vectors *= 1 + torch.rand(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return loss


def batch(labels: list[int], ids: list[int] | None = None) -> Embeddings:
    """Unit vectors on all sides of their classes' vectors, with norms below, between and above all bounds."""
    generator = torch.Generator().manual_seed(len(labels))
    z_BD = torch.randn(len(labels), DIM, generator=generator, dtype=torch.float64)
    norm_B = torch.rand(len(labels), generator=generator, dtype=torch.float64) * 9 + 0.1
    return Embeddings(
        functional.normalize(z_BD).requires_grad_(),
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(ids if ids is not None else range(len(labels)), dtype=torch.int64),
        norm_N=norm_B.requires_grad_(),
    )


BATCHES = {
    "twelve": batch([0, 1, 2, 0, 4, 2, 0, 6, 2, 1, 1, 4]),
    "repeated": batch([3, 3, 3, 5, 5, 0], [1, 1, 1, 8, 8, 9]),
    "no positives": batch([6, 5, 4, 2, 1]),
    "one class": batch([2] * 5),
    "one": batch([4]),
}


def reference(loss: ClassSoftmax, given: Embeddings, classes: Sequence[int] = range(NUM_CLASSES)) -> Tensor:
    """The mean over anchors, one scalar after the other, with the state as the batch has moved it."""
    (vectors,) = loss.parameters()
    norms = given.norm_N
    assert norms is not None
    terms = []
    for z, y, norm in zip(given.z_ND, given.y_N.tolist(), norms, strict=True):
        cosines = []
        for of_class in vectors:
            of_vectors = [z @ w / w.norm() for w in of_class.reshape(-1, DIM)]
            cosines.append(max(of_vectors, key=lambda each: each.item()))
        own, others, term = transformed(loss, cosines, y, norm)
        logits = [own if c == y else others[c] for c in classes]
        place = list(classes).index(y)
        terms.append(-torch.log_softmax(loss.scale * torch.stack(logits), 0)[place] + term)
    return torch.stack(terms).mean()


def transformed(
    loss: ClassSoftmax, cosines: list[Tensor], y: int, norm: Tensor
) -> tuple[Tensor, list[Tensor], Tensor | float]:
    """T of the own cosine, N of all, and what is added to the term."""
    o, theta = cosines[y], torch.acos(cosines[y])

    def arc(m: Tensor | float) -> Tensor:
        return (
            torch.cos(theta + m)
            if theta + m <= math.pi
            else o - m * torch.sin(torch.as_tensor(m, dtype=torch.float64))
        )

    match loss:
        case CosFace():
            return o - loss.margin, cosines, 0.0
        case ArcFace():
            return arc(math.radians(loss.margin)), cosines, 0.0
        case SubCenterArcFace():
            return arc(loss.angle_C[y].item()), cosines, 0.0
        case CurricularFace():
            bound, t = torch.cos(theta + loss.margin), loss.t.item()
            return arc(loss.margin), [s * (t + s) if s > bound else s for s in cosines], 0.0
        case AdaFace():
            sharp = (norm.detach().clamp(1e-3, 100) - loss.mean) / (loss.deviation + 1e-3)
            q = (loss.concentration * sharp).clamp(-1, 1)
            clipped = [s.clamp(-1 + 1e-3, 1 - 1e-3) for s in cosines]
            angle = (clipped[y].acos() - loss.margin * q).clamp(1e-3, math.pi - 1e-3)
            return angle.cos() - loss.margin * (1 + q), clipped, 0.0
        case MagFace():
            low, high = loss.lowest_norm, loss.highest_norm
            v = (norm / loss.unit).clamp(low, high)
            m = loss.lowest_margin + (loss.highest_margin - loss.lowest_margin) * (v - low) / (high - low)
            own = (torch.cos(theta + m) if o > 0 else o) if loss.easy else arc(m)
            return own, cosines, loss.norm_weight * (v / high**2 + 1 / v)
    return o, cosines, 0.0


def gradients(total: Tensor, given: Embeddings, loss: Loss) -> list[Tensor]:
    leaves = [given.z_ND, given.norm_N, *loss.parameters()]
    found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


@each_tile
@pytest.mark.parametrize("given", BATCHES.values(), ids=list(BATCHES))
@each_case
def test_value_and_gradients_equal_the_formula_s_loops(
    name: str, params: dict[str, Any], given: Embeddings, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if budget is not None:
        monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", budget)
    loss = build(name, params)
    total, count = loss(given)
    expected = reference(loss, given)
    assert count == len(given.y_N)
    torch.testing.assert_close(total / count, expected, rtol=1e-11, atol=1e-12)
    wanted = gradients(expected, given, loss)
    for _ in range(2):  # backward leaves what it needs as it is
        for gradient, truth in zip(gradients(total / count, given, loss), wanted, strict=True):
            torch.testing.assert_close(gradient, truth, rtol=1e-9, atol=1e-11)


def scrambled(x: int) -> int:
    """splitmix64's finaliser, in whole numbers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def sampled(
    seed: int, step: int, share: float, labels: list[int], num_classes: int = NUM_CLASSES
) -> list[int]:
    """The classes of a step: those of the batch, and others by their hash."""
    of_step = scrambled(step + scrambled(seed))
    hashes = [scrambled(scrambled(c + of_step)) >> 11 for c in range(num_classes)]
    return [c for c, x in enumerate(hashes) if c in labels or x / 2**53 < share]


@each_tile
@pytest.mark.parametrize("given", BATCHES.values(), ids=list(BATCHES))
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("norm_softmax", {}),
        ("subcenter_arcface", {"scale": 8.0, "margin_by": "power"}),
        ("magface", {"scale": 8.0}),
    ],
)
def test_sampled_classes_equal_the_loops_over_them(
    name: str, params: dict[str, Any], given: Embeddings, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several steps; rows of no class of the step have no place in the gradient."""
    if budget is not None:
        monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", budget)
    loss = build(name, params | {"sample": 0.4})
    seen = set()
    for step in range(3):
        classes = sampled(3, step, 0.4, given.y_N.tolist())
        seen.add(tuple(classes))
        total, count = loss(given)
        expected = reference(loss, given, classes)
        torch.testing.assert_close(total / count, expected, rtol=1e-11, atol=1e-12)
        found, wanted = (gradients(x, given, loss) for x in (total / count, expected))
        assert found[2].coalesce().indices()[0].tolist() == classes
        for gradient, truth in zip(found, wanted, strict=True):
            torch.testing.assert_close(gradient.to_dense(), truth, rtol=1e-9, atol=1e-11)
    assert any(len(classes) < NUM_CLASSES for classes in seen)


def test_a_sample_is_drawn_by_seed_step_and_class_in_training_alone() -> None:
    y_M = torch.tensor([9_999, 5])
    loss = NormSoftmax(10_000, DIM, sample=0.1, seed=3)
    assert loss.drawn(y_M).tolist() == sampled(3, 0, 0.1, y_M.tolist(), 10_000)
    assert 900 < len(loss.drawn(y_M)) < 1_100
    loss.num_steps += 1
    assert loss.drawn(y_M).tolist() == sampled(3, 1, 0.1, y_M.tolist(), 10_000)
    loss, given = build("norm_softmax", {"sample": 0.2}), BATCHES["one class"]
    full = build("norm_softmax", {})(given).total
    assert loss.eval()(given).total == full
    with torch.no_grad():
        without = loss.train()(given).total
    assert loss.num_steps == 0
    assert loss(given).total == without < full
    assert loss.num_steps == 1
    assert "num_steps" not in dict(build("norm_softmax", {"sample": 1.0}).named_buffers())


def test_cases_reach_what_their_formulas_tell_apart() -> None:
    """The loops above would prove nothing of a seam, of clipped norms or of hard classes if no anchor were there."""
    given = BATCHES["twelve"]
    for name, params in CASES:
        loss = build(name, params)
        loss(given)
        (vectors,) = loss.parameters()
        cos_BC = given.z_ND @ functional.normalize(vectors.reshape(NUM_CLASSES, -1, DIM)[:, 0]).T
        own_B = cos_BC.gather(1, given.y_N[:, None])[:, 0]
        seen: dict[str, Tensor] = {}
        if isinstance(loss, ArcFace) and loss.margin == 90:
            seen["seam"] = own_B.acos() + math.pi / 2 > math.pi
        if isinstance(loss, CurricularFace):
            seen["hard"] = cos_BC > (own_B.acos() + loss.margin).cos()[:, None]
            assert loss.t != 0
        if isinstance(loss, MagFace):
            assert given.norm_N is not None
            v_B = given.norm_N / loss.unit
            seen |= {"short": v_B < loss.lowest_norm, "positive": own_B > 0}
            seen["seam"] = own_B < -math.cos(loss.lowest_margin)
            assert loss.is_relative or (v_B > loss.highest_norm).any()
        for what, is_so in seen.items():
            assert is_so.any() or (what == "seam" and getattr(loss, "easy", False)), (name, params, what)
            assert not is_so.all(), (name, params, what)


X = Embeddings(
    torch.tensor(
        [(1, 0, 0), (0.8, 0.6, 0), (0.6, 0, 0.8), (0, 0.6, 0.8), (0, 0.96, -0.28), (-0.6, 0.8, 0)],
        dtype=torch.float64,
    ),
    torch.tensor([0, 0, 0, 1, 1, 2]),
    torch.arange(6),
    norm_N=torch.tensor([8.0, 10, 12, 20, 25, 15], dtype=torch.float64),
)
VECTORS = torch.tensor(
    [(0.96, 0.28, 0), (0.28, 0, 0.96), (-0.28, 0.96, 0), (0, -0.6, 0.8)], dtype=torch.float64
)
CENTERS = torch.tensor(
    [[(0.96, 0.28, 0), (0.6, 0.8, 0)], [(0.28, 0, 0.96), (0, 0.6, -0.8)], [(-0.28, 0.96, 0), (-1, 0, 0)]],
    dtype=torch.float64,
)
ABSOLUTE: dict[str, Any] = {"scale": 8.0, "norm_bounds": "absolute"}
BY_SIZE: dict[str, Any] = {
    "margin_by": "class_size",
    "lowest_margin": math.degrees(0.05),
    "highest_margin": math.degrees(0.5),
}
WORKED: list[tuple[str, dict[str, Any], float]] = [
    ("norm_softmax", {}, 5.1721277989),
    ("subcenter_arcface", {"centers": 2}, 16.3876144724),
    ("subcenter_arcface", {"centers": 2, "scale": 8.0}, 2.2453138568),
    ("subcenter_arcface", {"centers": 2, "scale": 8.0, **BY_SIZE}, 1.1076986929),
    ("adaface", {"scale": 8.0, "t_alpha": 1.0}, 3.5517605281),
    ("adaface", {"scale": 8.0}, 3.5322457273),
    ("magface", ABSOLUTE | {"norm_weight": 0.0}, 2.9716792097),
    ("magface", ABSOLUTE, 5.5826984934),
    ("magface", ABSOLUTE | {"norm_weight": 0.0, "easy": False}, 3.5458858918),
    ("curricularface", {"scale": 8.0}, 3.2770810799),
]


@pytest.mark.parametrize(("name", "params", "expected"), WORKED)
def test_six_points_worked_by_hand(name: str, params: dict[str, Any], expected: float) -> None:
    num_classes = 3 if name == "subcenter_arcface" else 4
    loss = catalogue.build(name, params, num_classes=num_classes, class_sizes=[3, 2, 1], dim=3).double()
    (vectors,) = loss.parameters()
    vectors.data = CENTERS if name == "subcenter_arcface" else VECTORS
    total, count = loss(X)
    assert (total / count).item() == pytest.approx(expected, abs=1e-9)
    if isinstance(loss, CurricularFace):
        assert loss.t.item() == pytest.approx(0.006512, abs=1e-12)
        loss.t.fill_(0.3)
        total, count = loss(X)
        assert (total / count).item() == pytest.approx(4.1187586851, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "params", "library"),
    [
        (
            "norm_softmax",
            {"temperature": 0.1},
            pml.NormalizedSoftmaxLoss(NUM_CLASSES, DIM, temperature=0.1),
        ),
        (
            "subcenter_arcface",
            {"scale": 16.0, "centers": 2},
            pml.SubCenterArcFaceLoss(
                num_classes=NUM_CLASSES, embedding_size=DIM, margin=28.6, scale=16, sub_centers=2
            ),
        ),
    ],
)
def test_value_and_gradient_equal_pytorch_metric_learning(
    name: str, params: dict[str, Any], library: nn.Module
) -> None:
    loss, given = build(name, params), BATCHES["twelve"]
    (vectors,) = loss.parameters()
    library.W = nn.Parameter(vectors.detach().flatten(0, -2).T.clone())
    h_ND = (2 * given.z_ND.detach()).requires_grad_()  # which the library normalises itself
    total, count = loss(given._replace(z_ND=functional.normalize(h_ND)))
    expected = library.double()(h_ND, given.y_N)
    torch.testing.assert_close(total / count, expected, rtol=1e-10, atol=1e-12)
    of_both = (torch.autograd.grad(value, h_ND)[0] for value in (total / count, expected))
    torch.testing.assert_close(*of_both, rtol=1e-8, atol=1e-10)


def test_proxy_nca_pp_is_that_of_squared_distances_off_the_sphere_too() -> None:
    loss, given = build("proxy_nca_pp", {}), BATCHES["twelve"]
    long = given._replace(z_ND=(3 * given.z_ND.detach()).requires_grad_())
    total, _ = loss(long)
    d_BC = (long.z_ND[:, None] - functional.normalize(loss.get_parameter("proxies_CD"))).square().sum(2)
    expected = functional.cross_entropy(-9 * d_BC, long.y_N, reduction="sum")
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, long.z_ND)[0] for each in (total, expected)), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("budget", [None, 40_000], ids=["whole", "some classes"])
@pytest.mark.parametrize(
    ("name", "params"), [("arcface", {"scale": 64.0}), ("norm_softmax", {"temperature": 0.05})]
)
def test_float32_keeps_the_digits_of_a_class_that_is_all_but_certain(
    name: str, params: dict[str, Any], budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anchors almost on their own vectors: 1 - p is far below the last digit of 1, and slopes are not lost."""
    if budget is not None:
        monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", budget)
    found = []
    for dtype in (torch.float64, torch.float32):
        loss = catalogue.build(name, params, num_classes=300, dim=DIM).to(dtype)
        w_CD = torch.eye(DIM, dtype=dtype).repeat(75, 1)
        w_CD[DIM:] *= -1
        loss.get_parameter("proxies_CD").data = w_CD
        z_BD = torch.eye(DIM, dtype=dtype)[:3] + 0.05
        z_BD = functional.normalize(z_BD).requires_grad_()
        total, _ = loss(Embeddings(z_BD, torch.arange(3), torch.arange(3)))
        total.backward()
        assert z_BD.grad is not None
        found.append((total.double(), z_BD.grad.double()))
    assert 0 < found[0][0] < 1e-6
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=0)


@pytest.mark.parametrize("budget", [None, 600], ids=["whole", "one class"])
def test_parameters_in_half_precision_get_gradients_of_their_type(
    budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if budget is not None:
        monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", budget)
    loss, given = build("curricularface", {}), BATCHES["twelve"]
    half = build("curricularface", {}).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = half(given._replace(z_ND=given.z_ND.float()))
        total.backward()
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), loss(given).total, rtol=0.05, atol=0)
    gradient = half.get_parameter("proxies_CD").grad
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16
    assert gradient.isfinite().all()


def adaface(**params: Any) -> AdaFace:
    loss = build("adaface", params)
    assert isinstance(loss, AdaFace)
    return loss


def test_running_statistics_go_with_the_loss_into_another_dtype() -> None:
    loss, given = adaface(t_alpha=0.25).float(), BATCHES["twelve"]
    assert given.norm_N is not None
    loss(given)
    assert loss.mean.dtype == torch.float32
    assert loss.mean.item() == pytest.approx(0.75 * 20 + 0.25 * given.norm_N.mean().item())


def test_running_statistics_are_those_of_all_ranks_norms_and_rest_in_use() -> None:
    loss, given = adaface(t_alpha=0.25), BATCHES["twelve"]
    assert given.norm_N is not None
    norm_N = given.norm_N.detach()
    loss(given.rows(slice(3)), given)  # this rank's anchors beside those of all
    assert loss.mean.item() == pytest.approx(0.75 * 20 + 0.25 * norm_N.mean().item())
    assert loss.deviation.item() == pytest.approx(0.75 * 100 + 0.25 * norm_N.std().item())
    before = [buffer.clone() for buffer in loss.buffers()]
    loss(BATCHES["one"].rows(slice(0)))
    loss.eval()(given)
    loss.train()
    with torch.no_grad():
        loss(given)
    assert all(torch.equal(a, b) for a, b in zip(before, loss.buffers(), strict=True))
    loss(BATCHES["one"])
    assert loss.deviation == before[1]
    assert loss.mean != before[0]


def test_state_does_not_depend_on_the_order_of_the_batch() -> None:
    """Bit for bit, as ranks gather their rows in one order or another."""
    given = BATCHES["twelve"]
    for name in ("adaface", "magface"):
        found = []
        for rows in (torch.arange(12), torch.randperm(12, generator=torch.Generator().manual_seed(0))):
            loss = build(name, {})
            loss(given.rows(rows))
            found.append(torch.stack(list(loss.buffers())))
        assert torch.equal(*found)


def test_the_unit_of_norms_is_settled_by_the_first_batch() -> None:
    loss, given = build("magface", {}), BATCHES["twelve"]
    assert given.norm_N is not None
    at_rest = loss.eval()(given).total
    assert loss.get_buffer("unit") == 0
    assert loss.train()(given).total == at_rest
    assert loss.get_buffer("unit").item() == pytest.approx(given.norm_N.quantile(0.5).item() / 50)
    loss(BATCHES["repeated"])
    assert loss.get_buffer("unit").item() == pytest.approx(given.norm_N.quantile(0.5).item() / 50)
    longer = given._replace(norm_N=1000 * given.norm_N)
    torch.testing.assert_close(build("magface", {})(longer).total, at_rest)


def test_backward_uses_the_state_of_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch comes between, as where gradients are accumulated, and moves t."""
    monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", 600)
    loss, given = build("curricularface", {}), BATCHES["twelve"]
    truth = gradients(loss(given).total, given, loss)
    loss = build("curricularface", {})
    total = loss(given).total
    loss.get_buffer("t").fill_(5.0)
    for gradient, expected in zip(gradients(total, given, loss), truth, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


def test_small_classes_have_large_margins() -> None:
    loss = build("subcenter_arcface", {"margin_by": "class_size"})
    angle_C = loss.get_buffer("angle_C").rad2deg()
    assert angle_C.argsort().tolist() == torch.tensor(SIZES).argsort(descending=True).tolist()
    assert angle_C.max().item() == pytest.approx(28.648)
    assert angle_C.min().item() == pytest.approx(2.865)
    alike = SubCenterArcFace(3, DIM, margin_by="class_size", class_sizes=[4, 4, 4])
    assert alike.angle_C.rad2deg().tolist() == pytest.approx([28.648] * 3)


def test_margins_by_a_power_do_not_depend_on_other_classes() -> None:
    """m = 0.5 n^-1/4 + 0.05 in radians, by default."""
    loss = build("subcenter_arcface", {"margin_by": "power"})
    found = loss.get_buffer("angle_C").tolist()
    assert found == pytest.approx([0.5 * n**-0.25 + 0.05 for n in SIZES], abs=1e-4)
    others = {"added_margin": 40.0, "lowest_margin": 10.0, "exponent": 1.0}
    alike = SubCenterArcFace(3, DIM, margin_by="power", class_sizes=[4, 4, 4], **others)  # type: ignore[arg-type]
    assert alike.angle_C.rad2deg().tolist() == pytest.approx([20.0] * 3)


@pytest.mark.parametrize("name", ["adaface", "magface"])
def test_in_a_loop_of_one_s_own_the_loss_takes_norms_itself(name: str) -> None:
    given = BATCHES["twelve"]
    assert given.norm_N is not None
    h_ND = (given.z_ND * given.norm_N[:, None]).detach().requires_grad_()
    loss = losses.build(name, num_classes=NUM_CLASSES, dim=DIM, scale=8.0).double()
    value = loss(h_ND, given.y_N)
    other = catalogue.build(name, {"scale": 8.0}, num_classes=NUM_CLASSES, dim=DIM).double()
    norm_N = h_ND.norm(dim=1)
    total, count = other(given._replace(z_ND=h_ND / norm_N[:, None], norm_N=norm_N))
    torch.testing.assert_close(value, total / count, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(x, h_ND)[0] for x in (value, total / count)))
    fresh = losses.build(name, num_classes=NUM_CLASSES, dim=DIM).double()
    with pytest.raises(ValueError, match=r"all embeddings have the norm 1, .* before they are normalised"):
        fresh(given.z_ND, given.y_N)
    with pytest.raises(ValueError, match="this loss needs norms"):
        other(given._replace(norm_N=None))


WRONG: list[tuple[Callable[..., Loss], dict[str, Any], str]] = [
    (NormSoftmax, {"temperature": 0.0}, "temperature=0.0 must be a finite number > 0"),
    (ProxyNCAPlusPlus, {"temperature": -1.0}, "temperature=-1.0"),
    (ArcFace, {"sample": 0.0}, "sample=0.0 must be a finite number > 0"),
    (CosFace, {"sample": 1.5}, "sample=1.5 must be at most 1"),
    (SubCenterArcFace, {"margin": 91.0}, "margin=91.0 must be an angle of at most 90 degrees"),
    (SubCenterArcFace, {"centers": 0}, "centers=0 must be a finite number >= 1"),
    (SubCenterArcFace, {"scale": 0.0}, "scale=0.0"),
    (SubCenterArcFace, {"margin_by": "size"}, "margin_by='size' is unknown.*class_size"),
    (SubCenterArcFace, {"margin_by": "class_size"}, "needs the number of training images of each class"),
    (SubCenterArcFace, {"margin_by": "class_size", "class_sizes": [1, 2]}, "must be num_classes=3 numbers"),
    (SubCenterArcFace, {"margin_by": "class_size", "class_sizes": [1, 0, 2]}, "of at least 1"),
    (SubCenterArcFace, {"lowest_margin": 40.0}, "highest_margin=28.648 must be a finite number >= 40.0"),
    (SubCenterArcFace, {"exponent": -0.1}, "exponent=-0.1"),
    (SubCenterArcFace, {"added_margin": -1.0}, "added_margin=-1.0"),
    (SubCenterArcFace, {"margin_by": "power"}, "'power' needs the number of training images of each class"),
    (
        SubCenterArcFace,
        {"margin_by": "power", "class_sizes": [1, 1, 2], "lowest_margin": 20.0, "added_margin": 80.0},
        r"lowest_margin \+ added_margin=100.0 must be an angle of at most 90",
    ),
    (CurricularFace, {"margin": 28.6}, "margin=28.6 must be an angle in radians"),
    (CurricularFace, {"scale": math.inf}, "scale=inf"),
    (AdaFace, {"margin": -0.1}, "margin=-0.1"),
    (AdaFace, {"concentration": math.nan}, "concentration=nan"),
    (AdaFace, {"t_alpha": 1.5}, "t_alpha=1.5 must be at most 1"),
    (MagFace, {"lowest_margin": 0.9}, "highest_margin=0.8 must be a finite number >= 0.9"),
    (MagFace, {"lowest_norm": 0.0}, "lowest_norm=0.0 must be a finite number > 0"),
    (MagFace, {"highest_norm": 5.0}, "highest_norm=5.0 must be a finite number > 10.0"),
    (MagFace, {"norm_weight": -1.0}, "norm_weight=-1.0"),
    (MagFace, {"norm_bounds": "none"}, "norm_bounds='none' is unknown"),
]


@pytest.mark.parametrize(("kind", "params", "message"), WRONG)
def test_impossible_parameters_are_refused(
    kind: Callable[..., Loss], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(num_classes=3, dim=DIM, **params)


def test_a_trial_counts_the_images_of_each_class_that_it_trains_on() -> None:
    images = data.load("digits").development
    loss_of = {"name": "subcenter_arcface", "params": {"margin_by": "class_size"}}
    trial = TrialConfig.model_validate(config(loss=loss_of))
    rows = np.arange(len(images))[: len(images) // 2]
    share = images.select(rows)
    one = EmbedderTrainer(trial, share, torch.device("cpu"), stream=0)
    _, sizes = np.unique(images.labels_N[rows], return_counts=True)
    wanted = SubCenterArcFace(len(sizes), 8, margin_by="class_size", class_sizes=sizes.tolist())
    assert one.module.loss.get_buffer("angle_C").tolist() == pytest.approx(wanted.angle_C.tolist())
    assert len(set(wanted.angle_C.tolist())) > 1
