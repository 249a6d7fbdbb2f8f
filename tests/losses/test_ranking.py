"""Losses of ranks against their formulas, as plain loops in float64, and against values computed elsewhere.

The loops' own autograd gives the gradient to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pytorch_metric_learning import losses as pml
from support.small_batch import INTERLEAVED, assert_same, balanced, embeddings, pair_sets
from torch import Tensor

from dmlstudy.losses import catalogue, ranking, tiles
from dmlstudy.losses.interface import Embeddings, Loss, OneProcess
from dmlstudy.losses.memory import CrossBatchMemory
from dmlstudy.losses.ranking import RecallAtK, SmoothAP, SupAP, virtual_rows

BY_CLASS = [0, 2, 5, 9, 1, 6, 3, 8, 7, 4]
Reference = Callable[[Embeddings, Embeddings, Loss], Tensor]


def added(terms: list[Tensor]) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64))


def smooth_ap(anchors: Embeddings, references: Embeddings, loss: Loss) -> Tensor:
    terms = []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        if not positives:
            continue
        s = list(references.z_ND @ z)
        if loss.count_self:
            s.append(torch.ones((), dtype=torch.float64))
            positives.append(len(s) - 1)
        ratios = []
        for p in positives:
            rank = 1 + added([torch.sigmoid((s[j] - s[p]) / loss.tau) for j in positives if j != p])
            among_all = rank + added([torch.sigmoid((s[k] - s[p]) / loss.tau) for k in negatives])
            ratios.append(rank / among_all)
        terms.append(1 - added(ratios) / len(ratios))
    return added(terms)


def sup_ap(anchors: Embeddings, references: Embeddings, loss: Loss) -> Tensor:
    def bound(x: Tensor) -> Tensor:
        smooth = 1 / (1 + torch.exp(-x / loss.tau))
        if x <= 0:
            return smooth
        if x <= loss.delta:
            return loss.start + smooth
        offset = loss.jump + loss.start + 1 / (1 + math.exp(-loss.delta / loss.tau))
        return loss.rho * (x - loss.delta) + offset

    terms = []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        s = references.z_ND @ z
        ratios = []
        for p in positives:
            rank = 1 + sum(bool(s[j] >= s[p]) for j in positives if j != p)
            ratios.append(rank / (rank + added([bound(s[k] - s[p]) for k in negatives])))
        terms += [1 - added(ratios) / len(ratios)] if ratios else []
    return added(terms)


def recall(anchors: Embeddings, references: Embeddings, loss: Loss) -> Tensor:
    if loss.simix:
        anchors, references = mixed(anchors), mixed(references)
    terms = []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        if not positives:
            continue
        s = references.z_ND @ z
        ranks = [
            1 + added([torch.sigmoid((s[j] - s[p]) / loss.tau) for j in positives + negatives if j != p])
            for p in positives
        ]
        recalls = []
        for k in (min(k, len(references.y_N)) for k in loss.ks):
            found = added([torch.sigmoid((k - rank) / (loss.k_temperature or k)) for rank in ranks])
            recalls.append(found.clamp(max=k) / min(k, len(positives)))
        terms.append(1 - added(recalls) / len(recalls))
    return added(terms)


def scrambled(x: int) -> int:
    """Splitmix64's finaliser, of whole numbers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def mixed(batch: Embeddings) -> Embeddings:
    """The batch with a virtual row for each pair of its images of one class."""
    z_ND, y_N, id_N = list(batch.z_ND), batch.y_N.tolist(), batch.id_N.tolist()
    for i in range(len(batch.y_N)):
        for j in range(len(batch.y_N)):
            if y_N[i] == y_N[j] and id_N[i] < id_N[j]:
                name = scrambled(scrambled(scrambled(int(batch.id_N.sum())) + id_N[i]) + id_N[j])
                weight = (scrambled(name) >> 11) / 2**53
                z_ND.append(weight * z_ND[i] + (1 - weight) * z_ND[j])
                y_N.append(y_N[i])
                id_N.append(name - 2**64 if name >= 2**63 else name)
    return Embeddings(torch.stack(z_ND), torch.tensor(y_N), torch.tensor(id_N))


CASES: dict[str, tuple[Reference, Callable[[], Loss]]] = {
    "smooth_ap": (smooth_ap, SmoothAP),
    "smooth_ap-soft": (smooth_ap, lambda: SmoothAP(0.3)),
    "smooth_ap-self": (smooth_ap, lambda: SmoothAP(0.2, count_self=True)),
    "sup_ap": (sup_ap, SupAP),
    "sup_ap-fixed": (sup_ap, lambda: SupAP(offset_mode="fixed")),
    "sup_ap-wide": (sup_ap, lambda: SupAP(0.1, 10.0, 0.4, 0.0)),
    "recall_at_k": (recall, lambda: RecallAtK("1 2 4 8 16", 0.1)),
    "recall_at_k-few": (recall, lambda: RecallAtK("1 3", 0.2, k_temperature_mode="k")),
    "recall_at_k-simix": (recall, lambda: RecallAtK("1 2 4", 0.1, simix=True)),
}
each_case = pytest.mark.parametrize("name", list(CASES))


@pytest.mark.parametrize("order", [INTERLEAVED, BY_CLASS], ids=["interleaved", "by class"])
@pytest.mark.parametrize("rows", [slice(None), slice(2, 7)], ids=["own batch", "other references"])
@each_case
def test_value_and_gradient_equal_the_formula_s_loops(name: str, rows: slice, order: list[int]) -> None:
    (reference, construct), batch = CASES[name], embeddings(order)
    if name.endswith("simix"):  # whose anchors are the batch that it mixes
        batch = batch.rows(rows)
        rows = slice(None)
    loss = construct()
    total, count = loss(batch.rows(rows), batch)
    expected = reference(batch.rows(rows), batch, loss)
    assert count.item() == len((mixed(batch) if name.endswith("simix") else batch.rows(rows)).y_N)
    assert expected > 1e-3, "the case proves nothing"
    assert_same((total,), (expected,), 1e-12)
    (wanted,) = torch.autograd.grad(expected, batch.z_ND)
    assert wanted.abs().max() > 1e-3
    assert_same(torch.autograd.grad(total, batch.z_ND), (wanted,), 1e-10)


@each_case
def test_tiles_of_one_row_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, batch = CASES[name][1](), embeddings()
    whole = loss(batch)
    gradient = torch.autograd.grad(whole.total, batch.z_ND)
    monkeypatch.setattr(tiles, "BUDGET_BYTES", {"cpu": 1})
    in_rows = loss(batch)
    assert_same(in_rows, whole, 1e-12)
    assert_same(torch.autograd.grad(in_rows.total, batch.z_ND), gradient, 1e-11)


@each_case
@pytest.mark.parametrize(
    "labels", [[], [1], [2, 2, 2], [0, 1, 3]], ids=["none", "one", "one class", "singletons"]
)
@pytest.mark.filterwarnings("ignore:a batch holds no two images of one class")
def test_missing_pairs_give_0_on_the_graph(name: str, labels: list[int]) -> None:
    z_ND = embeddings().z_ND[: len(labels)].detach().float().requires_grad_()
    batch = Embeddings(z_ND, torch.tensor(labels, dtype=torch.int64), torch.arange(len(labels)))
    total, _ = CASES[name][1]()(batch)
    (gradient,) = torch.autograd.grad(total, z_ND)
    assert total.dtype == torch.float32
    if len(set(labels)) == len(labels) or not name.startswith("recall"):
        assert total == 0
        assert not gradient.any()
    assert gradient.isfinite().all()


X = torch.tensor(
    [(1, 0, 0), (0.8, 0.6, 0), (0.6, 0, 0.8), (0, 0.6, 0.8), (0, 0.96, -0.28), (-0.6, 0.8, 0)],
    dtype=torch.float64,
)
Y = [0, 0, 0, 1, 1, 2]
PAIRED, Y_OF_PAIRS = [0, 1, 3, 4, 2, 5], [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("loss", "rows", "labels", "value"),
    [
        (SmoothAP(0.1), [*range(6)], Y, 0.3149753948),
        (SmoothAP(), [*range(6)], Y, 0.3294532088),
        (SmoothAP(0.1, count_self=True), [0, 1, 3, 4], [0, 0, 1, 1], 0.0772743198),
        (SmoothAP(0.01, count_self=True), [0, 1, 3, 4], [0, 0, 1, 1], 0.0737289820),
        (SmoothAP(0.1, count_self=True), PAIRED, Y_OF_PAIRS, 0.2258717543),
        (SupAP(), [*range(6)], Y, 0.5102596584),
        (SupAP(offset_mode="fixed"), [*range(6)], Y, 0.5100621987),
        (RecallAtK("1 2 4"), PAIRED, Y_OF_PAIRS, 0.5953505345),
        (RecallAtK("1 2 4"), [*range(6)], Y, 0.4020602264),
        (RecallAtK("1 2 4", k_temperature_mode="k"), [*range(6)], Y, 0.4395745334),
    ],
)
def test_worked_examples_have_their_values(
    loss: Loss, rows: list[int], labels: list[int], value: float
) -> None:
    total, count = loss(Embeddings(X[rows], torch.tensor(labels), torch.tensor(rows)))
    assert (total / count).item() == pytest.approx(value, abs=5e-11)


def test_rows_mixed_half_and_half_have_the_value_of_the_worked_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranking, "unit_interval", lambda x: torch.full(x.shape, 0.5, dtype=torch.float64))
    total, count = RecallAtK("1 2 4", simix=True)(Embeddings(X, torch.tensor(Y), torch.arange(6)))
    assert count == 10
    assert (total / count).item() == pytest.approx(0.2304544543, abs=5e-11)


@pytest.mark.parametrize("tau", [0.01, 0.1])
def test_smooth_ap_with_the_anchor_counted_equals_pml(tau: float) -> None:
    """PML sums in float32, and reshapes the batch as if there were as many classes as images of one."""
    batch = balanced()
    batch = batch.rows(batch.y_N.argsort(stable=True))
    batch = batch._replace(z_ND=batch.z_ND.detach().requires_grad_())
    total, count = SmoothAP(tau, count_self=True)(batch)
    theirs = pml.SmoothAPLoss(tau)(batch.z_ND, batch.y_N)
    torch.testing.assert_close(total / count, theirs.double(), rtol=1e-6, atol=0)
    ours, their = (torch.autograd.grad(x, batch.z_ND)[0] for x in (total / count, theirs))
    tangent = [g - (g * batch.z_ND).sum(1, keepdim=True) * batch.z_ND for g in (ours, their)]
    torch.testing.assert_close(*tangent, rtol=1e-4, atol=1e-6)


def test_copies_of_an_image_have_equal_ranks_whatever_the_rounding() -> None:
    batch = embeddings()
    copies = Embeddings(torch.cat([batch.z_ND, batch.z_ND + 1e-9]), batch.y_N.repeat(2), batch.id_N.repeat(2))
    assert_same((SupAP()(copies).total,), (SupAP()(copies.rows(torch.arange(19, -1, -1))).total,), 1e-6)
    apart = Embeddings(torch.cat([batch.z_ND] * 2), copies.y_N, copies.id_N)
    assert_same((SupAP()(copies).total,), (SupAP()(apart).total,), 1e-6)


class SecondOfTwo(OneProcess):
    """The second of two ranks, of which the first has three of ten rows."""

    def sum(self, x: Tensor) -> Tensor:
        return x + 3

    def total(self, n: int) -> int:
        return n + 3

    def share(self, n: int) -> slice:
        return slice(n // 2, n)


def test_virtual_rows_are_dealt_to_the_ranks_and_made_of_the_batch_alone() -> None:
    """A memory's rows are references like others, which are not mixed and never virtual."""
    batch, loss = embeddings(), RecallAtK("1 2 4", 0.1, simix=True)
    older = Embeddings(batch.z_ND.detach().flip(0), batch.y_N, batch.id_N + 100)
    memory = CrossBatchMemory(40, batch.z_ND.shape[1])
    memory.references(older)
    references = memory.references(batch)
    virtual = virtual_rows(batch)
    total, count = loss(batch.rows(slice(3, 10)), references, SecondOfTwo())
    assert memory.filled == 20
    num_virtual = len(virtual.y_N)
    assert count == 7 + num_virtual - num_virtual // 2
    everything = Embeddings(*(torch.cat(parts) for parts in zip(references[:3], virtual[:3], strict=True)))
    chosen = torch.tensor([*range(3, 10), *range(20 + num_virtual // 2, 20 + num_virtual)])
    plain = RecallAtK("1 2 4", 0.1)
    assert_same((total,), (recall(everything.rows(chosen), everything, plain),), 1e-12)
    expected = recall(everything.rows(chosen), everything, plain)
    assert_same(
        torch.autograd.grad(total, batch.z_ND),
        torch.autograd.grad(expected, batch.z_ND),
        1e-10,
    )


def test_virtual_rows_depend_on_the_images_not_on_their_order() -> None:
    batch = embeddings()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    one, other = (virtual_rows(rows) for rows in (batch, batch.rows(order)))
    weights = [(scrambled(name % 2**64) >> 11) / 2**53 for name in one.id_N.tolist()]
    assert sorted(one.id_N.tolist()) == sorted(other.id_N.tolist())
    assert min(weights) < 0.3
    assert max(weights) > 0.7
    assert_same(
        (one.z_ND.sum(0), one.z_ND.square().sum()), (other.z_ND.sum(0), other.z_ND.square().sum()), 1e-12
    )


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: SmoothAP(0.0), "tau=0.0 must be a finite number > 0"),
        (lambda: SupAP(tau=-0.1), "tau=-0.1 must be a finite number > 0"),
        (lambda: SupAP(rho=-1.0), "rho=-1.0 must be a finite number >= 0"),
        (lambda: SupAP(delta=math.inf), "delta=inf must be a finite number >= 0"),
        (lambda: SupAP(start=-0.5), "start=-0.5 must be a finite number >= 0"),
        (lambda: SupAP(offset=-1.0), "offset=-1.0 must be a finite number >= 0"),
        (lambda: SupAP(offset_mode="none"), "offset_mode='none' is unknown; .*continuous, fixed"),
        (lambda: RecallAtK(tau=0.0), "tau=0.0 must be a finite number > 0"),
        (lambda: RecallAtK(k_temperature=0.0), "k_temperature=0.0 must be a finite number > 0"),
        (lambda: RecallAtK(k_temperature_mode="own"), "k_temperature_mode='own' is unknown; .*fixed, k"),
        *(
            (lambda ks=ks: RecallAtK(ks), f"ks='{ks}' must be different integers of 1 to 10000, like '1 2 4'")
            for ks in ("", "1,2", "0 1", "2 2", "-1", "1.5", "10001")
        ),
        (
            lambda: catalogue.build("recall_at_k", {"ks": 4}, num_classes=3, dim=3),
            "ks=4 must be of type str, like '1 2 4 8 16'",
        ),
    ],
)
def test_mistakes_are_named(construct: Callable[[], Loss], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        construct()
