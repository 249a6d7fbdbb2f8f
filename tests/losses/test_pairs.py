"""Pair losses against their formulas, as plain loops over anchors and pairs in float64.

The loops' own autograd gives the gradient to compare with.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners, reducers
from support.small_batch import BY_CLASS, DIM, INTERLEAVED, assert_same, balanced, embeddings, pair_sets
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import catalogue, tiles
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.losses.pair_weighting import PairWeighting
from dmlstudy.losses.pairs import (
    Angular,
    BinomialDeviance,
    Circle,
    GeneralizedLiftedStructure,
    LiftedStructure,
    LiftedStructureGPW,
    Margin,
    MultiSimilarityDistance,
    NPair,
    RankedList,
)
from dmlstudy.losses.weighting import Exponential

NUM_CLASSES = 5
Reference = Callable[[Embeddings, Embeddings, Loss], tuple[Tensor, float]]


def d(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum().sqrt()


def added(terms: list[Tensor]) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64))


def log_sum(exponents: list[Tensor], start: float = 0.0) -> Tensor:
    return torch.log(start + added([torch.exp(x) for x in exponents]))


def multi_similarity(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    total, start = [], 1.0 if loss.plus_one else 0.0
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        near = min((d(z, references.z_ND[k]) for k in negatives), default=torch.tensor(math.inf))
        far = max((d(z, references.z_ND[j]) for j in positives), default=torch.tensor(-math.inf))
        pull = [d(z, references.z_ND[j]) for j in positives]
        push = [d(z, references.z_ND[k]) for k in negatives]
        pull = [loss.alpha * (x - loss.margin) for x in pull if x >= near - loss.rule.epsilon]
        push = [loss.beta * (loss.margin - x) for x in push if x <= far + loss.rule.epsilon]
        total += [log_sum(pull, start) / loss.alpha] if pull else []
        total += [log_sum(push, start) / loss.beta] if push else []
    return added(total), len(anchors.z_ND)


def binomial(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    pulls, pushes = [], []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        s = references.z_ND @ z
        rate = loss.negative_weight * loss.alpha
        pulls += [torch.log(1 + torch.exp(-loss.alpha * (s[j] - loss.beta))) for j in positives]
        pushes += [torch.log(1 + torch.exp(rate * (s[k] - loss.beta))) for k in negatives]
    mean = added(pulls) / len(pulls) + added(pushes) / len(pushes)
    return mean * len(anchors.z_ND), len(anchors.z_ND)


def margin(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    terms, betas = [], []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        beta = loss.beta_C[anchors.y_N[i]]
        betas += [beta] * len(positives)
        terms += [d(z, references.z_ND[j]) - beta + loss.alpha for j in positives]
        terms += [beta - d(z, references.z_ND[k]) + loss.alpha for k in negatives]
    terms = [term for term in terms if term > 0]
    return added(terms) + loss.nu * added(betas), len(terms)


def ranked_list(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    low, high = loss.positive_margin, loss.negative_margin
    total = []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        pull = [d(z, references.z_ND[j]) - low for j in positives]
        push = [high - d(z, references.z_ND[k]) for k in negatives]
        for excesses, rate, share in (
            ([x for x in pull if x > 0], loss.positive_weighting.rate, 1 - loss.imbalance),
            ([x for x in push if x > 0], loss.negative_weighting.rate, loss.imbalance),
        ):
            weights = [torch.exp(rate * x) for x in excesses]
            products = [w * x for w, x in zip(weights, excesses, strict=True)]
            total += [share * added(products) / added(weights)] if weights else []
    return added(total), len(anchors.z_ND)


def circle(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    total, m = [], loss.margin
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        s = references.z_ND @ z
        pull = [-loss.gamma * max(0, 1 + m - s[j].item()) * (s[j] - (1 - m)) for j in positives]
        push = [loss.gamma * max(0, s[k].item() + m) * (s[k] - m) for k in negatives]
        both = added([torch.exp(x) for x in pull]) * added([torch.exp(x) for x in push])
        total.append(torch.log(1 + both))
    return added(total), len(anchors.z_ND)


def n_pair(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    total = []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        s = references.z_ND @ z
        if loss.positive == "nearest" and positives:
            positives = [max(positives, key=lambda j: s[j].item())]
        logs = [log_sum([loss.scale * (s[k] - s[j]) for k in negatives], 1.0) for j in positives]
        total += [added(logs) / len(logs)] if logs else []
        total.append(loss.l2 * z.square().sum())
    return added(total), len(anchors.z_ND)


def n_pair_of_classes(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    """The first two images of each class by id, whatever the anchors: ranks share the pairs, not the rows."""
    pairs = []
    for y in sorted(set(references.y_N.tolist())):
        rows = [j for j in range(len(references.y_N)) if references.y_N[j] == y]
        rows.sort(key=lambda j: int(references.id_N[j]))
        others = [j for j in rows if references.id_N[j] != references.id_N[rows[0]]]
        pairs += [(rows[0], others[0])] if others else []
    total = []
    for a, p in pairs:
        z = references.z_ND[a]
        gaps = [z @ (references.z_ND[k] - references.z_ND[p]) for _, k in pairs if k != p]
        total += [log_sum([loss.scale * gap for gap in gaps], 1.0), loss.l2 * z.square().sum()]
    return added(total), len(pairs)


def generalized_lifted(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    total = []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        if positives and negatives:
            pull = log_sum([d(z, references.z_ND[j]) for j in positives])
            push = log_sum([loss.margin - d(z, references.z_ND[k]) for k in negatives])
            total.append((pull + push).relu())
    return added(total), len(anchors.z_ND)


def lifted(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    total, count = [], 0
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        for j in positives:
            push = [loss.margin - d(z, references.z_ND[k]) for k in negatives]
            other = references.z_ND[j]
            push += [
                loss.margin - d(other, references.z_ND[k]) for k in pair_sets(references, references, j)[1]
            ]
            total.append((d(z, other) + log_sum(push)).relu() ** 2 / 2)
            count += 1
    return added(total), count


def lifted_gpw(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    total, count = [], 0
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        push = log_sum([loss.margin - d(z, references.z_ND[k]) for k in negatives])
        for j in positives:
            other = references.z_ND[j]
            others = pair_sets(references, references, j)[1]
            push_other = log_sum([loss.margin - d(other, references.z_ND[k]) for k in others])
            total.append((d(z, other) + push + push_other).relu())
            count += 1
    return added(total), count


def angular(anchors: Embeddings, references: Embeddings, loss: Loss) -> tuple[Tensor, float]:
    t = math.tan(loss.angle * math.pi / 180) ** 2
    total = []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        for j in positives:
            p = references.z_ND[j]
            f = [
                4 * t * torch.dot(z + p, references.z_ND[k]) - 2 * (1 + t) * torch.dot(z, p)
                for k in negatives
            ]
            total.append(log_sum(f, 1.0))
    return added(total), len(total)


CASES: dict[str, tuple[Reference, Callable[[], Loss]]] = {
    "multi_similarity-v1": (multi_similarity, MultiSimilarityDistance),
    "multi_similarity-v2": (multi_similarity, lambda: MultiSimilarityDistance(1.0, 20.0, 0.9, 0.2, "v2")),
    "binomial": (binomial, BinomialDeviance),
    "binomial-even": (binomial, lambda: BinomialDeviance(3.0, 0.2, 1.0)),
    "margin": (margin, lambda: Margin(NUM_CLASSES)),
    "margin-nu": (margin, lambda: Margin(NUM_CLASSES, 0.4, 1.0, nu=0.01)),
    "ranked_list": (ranked_list, RankedList),
    "ranked_list-pulled": (ranked_list, lambda: RankedList(1.4, 0.8, 2.0, 3.0, 0.3)),
    "circle": (circle, Circle),
    "circle-soft": (circle, lambda: Circle(0.25, 3.0)),
    "n_pair": (n_pair, NPair),
    "n_pair-all": (n_pair, lambda: NPair(3.0, 0.1, "all")),
    "n_pair-classes": (n_pair_of_classes, lambda: NPair(3.0, 0.1, "one_per_class")),
    "generalized_lifted": (generalized_lifted, GeneralizedLiftedStructure),
    "generalized_lifted-low": (generalized_lifted, lambda: GeneralizedLiftedStructure(0.0)),
    "lifted": (lifted, LiftedStructure),
    "lifted-low": (lifted, lambda: LiftedStructure(0.0)),
    "lifted_gpw": (lifted_gpw, LiftedStructureGPW),
    "lifted_gpw-low": (lifted_gpw, lambda: LiftedStructureGPW(0.0)),
    "angular": (angular, Angular),
    "angular-wide": (angular, lambda: Angular(55.0)),
}

each_case = pytest.mark.parametrize("name", list(CASES))


def build(name: str) -> Loss:
    loss = CASES[name][1]().double()
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter += torch.linspace(-0.1, 0.1, NUM_CLASSES, dtype=torch.float64)
    return loss


@pytest.mark.parametrize("order", [INTERLEAVED, BY_CLASS], ids=["interleaved", "by class"])
@pytest.mark.parametrize("rows", [slice(None), slice(2, 7)], ids=["own batch", "other references"])
@each_case
def test_value_and_gradient_equal_the_formula_s_loops(name: str, rows: slice, order: list[int]) -> None:
    loss, batch = build(name), embeddings(order)
    leaves = [batch.z_ND, *loss.parameters()]
    total, count = loss(batch.rows(rows), batch)
    expected, expected_count = CASES[name][0](batch.rows(rows), batch, loss)
    assert expected.item() != 0, "the case selects nothing and proves nothing"
    assert count.item() == expected_count
    assert not count.requires_grad
    assert_same((total,), (expected,), 1e-10)
    wanted = torch.autograd.grad(expected, leaves)
    assert all(gradient.abs().max() > 1e-3 for gradient in wanted)
    assert_same(torch.autograd.grad(total, leaves), wanted, 1e-9)


@each_case
def test_tiles_of_one_row_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, batch = build(name), embeddings()
    leaves = [batch.z_ND, *loss.parameters()]
    whole = loss(batch)
    gradients = torch.autograd.grad(whole.total, leaves)
    monkeypatch.setattr(tiles, "BUDGET_BYTES", {"cpu": 1})
    in_rows = loss(batch)
    assert_same(in_rows, whole, 1e-12)
    assert_same(torch.autograd.grad(in_rows.total, leaves), gradients, 1e-12)


class Meeting:
    """Ranks as threads of one process: what one sees of the others keeps its graph."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.said = threading.Barrier(num_ranks, timeout=100), [torch.zeros(())] * num_ranks

    def all_of(self, rank: int, x: Tensor) -> list[Tensor]:
        self.said[rank] = x
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        return heard


class Rank:
    """One rank's world in a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank
        self.size = len(meeting.said)

    def gather(self, x_B: Tensor) -> Tensor:
        return torch.cat(self.meeting.all_of(self.rank, x_B))

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.all_of(self.rank, x)).sum(0)

    def total(self, n: int) -> int:
        return int(self.sum(torch.tensor(n)))

    def max(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.all_of(self.rank, x)).amax(0)

    def share(self, n: int) -> slice:
        num_ranks = len(self.meeting.said)
        return slice(self.rank * n // num_ranks, (self.rank + 1) * n // num_ranks)


@each_case
def test_ranks_change_nothing(name: str) -> None:
    loss, batch = build(name), embeddings()
    leaves = [batch.z_ND, *loss.parameters()]
    alone = loss(batch)
    gradients = torch.autograd.grad(alone.total, leaves)
    shares = (slice(0, 3), slice(3, 3), slice(3, 10))
    meeting = Meeting(len(shares))

    def run(rank: int) -> tuple[Tensor, Tensor]:
        ranks_own = copy.copy(loss)  # shares the parameters, as ranks' copies have equal ones
        return ranks_own(batch.rows(shares[rank]), batch, Rank(meeting, rank))

    with ThreadPoolExecutor(len(shares)) as pool:
        sums = list(pool.map(run, range(len(shares))))
    total, count = added([one[0] for one in sums]), added([one[1] for one in sums])
    assert_same((total, count), (alone.total, alone.count), 1e-12)
    assert_same(torch.autograd.grad(total, leaves), gradients, 1e-12)


@each_case
@pytest.mark.parametrize(
    "labels", [[], [1], [2, 2, 2], [0, 1, 3]], ids=["none", "one", "one class", "singletons"]
)
@pytest.mark.filterwarnings("ignore:a batch holds no two images of one class")
def test_missing_pairs_are_finite_and_on_the_graph(name: str, labels: list[int]) -> None:
    z_ND = functional.normalize(torch.randn(len(labels), DIM, generator=torch.Generator().manual_seed(1)))
    batch = Embeddings(
        z_ND.requires_grad_(), torch.tensor(labels, dtype=torch.int64), torch.arange(len(labels))
    )
    loss = CASES[name][1]()
    total, _ = loss(batch)
    assert total.dtype == torch.float32
    for gradient in torch.autograd.grad(total, [z_ND, *loss.parameters()]):
        assert gradient.isfinite().all()
    has_both_signs = len(set(labels)) not in (0, 1, len(labels))
    if not has_both_signs and name.split("-")[0] in (
        "circle",
        "generalized_lifted",
        "lifted",
        "lifted_gpw",
        "angular",
    ):
        assert total == 0


@each_case
def test_coinciding_and_antipodal_points_are_finite(name: str) -> None:
    """Positives at distance 0 and 2, negatives at 0 and 2, in float32."""
    north = functional.one_hot(torch.tensor(0), DIM).float()
    batch = Embeddings(
        torch.stack([north, -north, north, -north, north, north]).requires_grad_(),
        torch.tensor([0, 0, 1, 1, 2, 2]),
        torch.arange(6),
    )
    total, _ = CASES[name][1]()(batch)
    (gradient,) = torch.autograd.grad(total, batch.z_ND)
    assert total.isfinite()
    assert gradient.isfinite().all()


def test_multi_similarity_v1_equals_pml_with_euclidean_distances_and_miner() -> None:
    batch, distance = balanced(), pml_distances.LpDistance()
    chosen = miners.MultiSimilarityMiner(0.1, distance=distance)(batch.z_ND, batch.y_N)
    theirs = pml.MultiSimilarityLoss(2, 50, 1.0, distance=distance)(batch.z_ND, batch.y_N, chosen)
    total, count = MultiSimilarityDistance()(batch)
    torch.testing.assert_close(total / count, theirs, rtol=1e-9, atol=0)


def test_ranked_list_equals_pml_up_to_its_row_epsilon_and_half_of_gpw_undetached() -> None:
    batch = balanced()
    for tn, tp in ((4.0, 0.0), (2.0, 3.0)):
        total, count = RankedList(1.2, 0.4, tn, tp)(batch)
        plain = pml_distances.LpDistance(normalize_embeddings=False)
        theirs = pml.RankedListLoss(margin=0.4, Tn=tn, alpha=1.2, Tp=tp, distance=plain)(
            batch.z_ND, batch.y_N
        )
        torch.testing.assert_close(total / count, theirs, rtol=1e-4, atol=0)
        gpw = PairWeighting(0.8, 1.2, Exponential(tp), Exponential(tn), detach_weights=False)(batch).total
        torch.testing.assert_close(2 * total, gpw, rtol=1e-12, atol=0)
        ours, their, half = (torch.autograd.grad(x, batch.z_ND)[0] for x in (total / count, theirs, gpw / 18))
        torch.testing.assert_close(ours, their, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(ours, half, rtol=1e-10, atol=1e-12)


def test_circle_equals_pml_in_the_mean_over_anchors() -> None:
    batch = balanced()
    theirs = pml.CircleLoss(reducer=reducers.MeanReducer())(batch.z_ND, batch.y_N)
    total, count = Circle()(batch)
    torch.testing.assert_close(total / count, theirs, rtol=1e-9, atol=0)


def test_lifted_structure_equals_pml() -> None:
    batch = balanced()
    total, count = LiftedStructure()(batch)
    plain = pml_distances.LpDistance(normalize_embeddings=False)
    theirs = pml.LiftedStructureLoss(distance=plain)(batch.z_ND, batch.y_N)
    torch.testing.assert_close(total / count, theirs, rtol=1e-6, atol=0)
    ours, their = (torch.autograd.grad(x, batch.z_ND)[0] for x in (total / count, theirs))
    torch.testing.assert_close(ours, their, rtol=1e-6, atol=1e-9)


def test_generalized_lifted_structure_equals_pml() -> None:
    batch = balanced()
    total, count = GeneralizedLiftedStructure()(batch)
    theirs = pml.GeneralizedLiftedStructureLoss()(batch.z_ND, batch.y_N)
    torch.testing.assert_close(total / count, theirs, rtol=1e-9, atol=0)


def test_angular_equals_pml() -> None:
    batch = balanced()
    total, count = Angular()(batch)
    torch.testing.assert_close(total / count, pml.AngularLoss()(batch.z_ND, batch.y_N), rtol=1e-9, atol=0)


def test_n_pair_of_one_pair_per_class_equals_pml() -> None:
    batch = balanced(num_classes=4, per_class=2)
    total, count = NPair(scale=1.0, l2=0.0, positive="one_per_class")(batch)
    theirs = pml.NPairsLoss()(batch.z_ND, batch.y_N)
    torch.testing.assert_close(total / count, theirs, rtol=1e-9, atol=0)


def test_a_satisfied_margin_gives_0_whatever_nu() -> None:
    z_ND = functional.one_hot(torch.tensor([0, 0, 1, 1]), DIM).double().requires_grad_()
    batch = Embeddings(z_ND, torch.tensor([0, 0, 1, 1]), torch.arange(4))
    total, count = Margin(NUM_CLASSES, alpha=0.1, beta=1.2, nu=1.0).double()(batch)
    assert total.item() == count.item() == 0
    assert total.requires_grad


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: MultiSimilarityDistance(alpha=0.0), "alpha=0.0 must be a finite number > 0"),
        (lambda: MultiSimilarityDistance(epsilon=-0.1), "epsilon=-0.1 must be a finite number >= 0"),
        (lambda: MultiSimilarityDistance(version="v3"), "version='v3' is unknown; .*v1, v2"),
        (lambda: BinomialDeviance(negative_weight=0.0), "negative_weight=0.0 must be a finite number > 0"),
        (lambda: BinomialDeviance(alpha=math.nan), "alpha=nan must be a finite number"),
        (lambda: Margin(0), "num_classes=0 must be a finite number >= 1"),
        (lambda: Margin(3, nu=-1.0), "nu=-1.0 must be a finite number >= 0"),
        (lambda: catalogue.margin(3, mining="distance"), "mining='distance' is unknown; .*distance_weighted"),
        (lambda: RankedList(alpha=0.3), "alpha=0.3 must be a finite number >= 0.4"),
        (lambda: RankedList(imbalance=1.5), r"imbalance=1.5 must lie in 0\.\.1"),
        (lambda: RankedList(negative_temperature=-1.0), "negative_temperature=-1.0 must be"),
        (lambda: Circle(gamma=0.0), "gamma=0.0 must be a finite number > 0"),
        (lambda: Circle(margin=-0.1), "margin=-0.1 must be a finite number >= 0"),
        (lambda: NPair(scale=0.0), "scale=0.0 must be a finite number > 0"),
        (lambda: NPair(positive="farthest"), "positive='farthest' is unknown; .*all, nearest"),
        (lambda: GeneralizedLiftedStructure(-1.0), "margin=-1.0 must be a finite number >= 0"),
        (lambda: LiftedStructure(-1.0), "margin=-1.0 must be a finite number >= 0"),
        (lambda: Angular(0.0), "angle=0.0 must be a finite number > 0"),
        (lambda: Angular(90.0), "angle=90.0 must be below 90 degrees"),
    ],
)
def test_mistakes_are_named(construct: Callable[[], Loss], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        construct()


def test_labels_beyond_the_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_classes=4"):
        Margin(4)(embeddings())
