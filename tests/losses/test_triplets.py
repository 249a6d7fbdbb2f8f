"""The triplet loss against its formula as plain loops, and distance-weighted draws against their probabilities.

Loops work on scalars in float64; their own autograd gives the gradient to compare with.
"""

from __future__ import annotations

import math

import pytest
import torch
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from support.small_batch import DIM, INTERLEAVED, assert_same, balanced, embeddings, pair_sets
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import catalogue, tiles
from dmlstudy.losses.distances import euclidean
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.losses.mining import DistanceWeighted, distance_weighted
from dmlstudy.losses.pairs import Margin
from dmlstudy.losses.plan import pair_numbers
from dmlstudy.losses.tiles import Layout
from dmlstudy.losses.triplets import Triplet
from dmlstudy.records import Scalar

NUM_CLASSES = 5
BY_CLASS = [0, 5, 2, 3, 6, 1, 9, 8, 7, 4]
Draws = dict[tuple[int, int], int]
"""The row of the negative by (row of the anchor, row of the positive), rows numbered by ``row_number``."""


def draws(anchors: Embeddings, references: Embeddings, seed: int) -> Draws:
    """What is drawn for each positive pair, by rows of anchors and references."""
    layout, found = Layout(anchors, references, 8), {}
    z_BD, z_MD = anchors.z_ND[layout.anchor_order_B], references.z_ND[layout.reference_order_M]
    for tile, band in layout.tiles:
        d_TM = euclidean(z_BD[tile], z_MD).detach()
        draw = distance_weighted(layout.rows(d_TM, tile, band, DIM), seed, d_TM)
        for t, p in draw.drawn_TP.nonzero().tolist():
            i = int(layout.anchor_order_B[tile][t])
            j, k = (
                layout.reference_order_M[n] for n in (band.start + draw.place_TP[t, p], draw.column_TP[t, p])
            )
            found[i, int(j)] = int(k)
    return found


def probabilities(anchors: Embeddings, references: Embeddings, i: int) -> dict[int, float]:
    """1/q(D) of each negative of anchor i over their sum, as in Wu et al. with both cut-offs."""
    _, negatives = pair_sets(anchors, references, i)
    d = {k: (anchors.z_ND[i] - references.z_ND[k]).norm().item() for k in negatives}
    near = {k: max(x, 0.5) for k, x in d.items() if x < 1.4}
    weights = {
        k: 1 / (x ** (DIM - 2) * (1 - x**2 / 4) ** ((DIM - 3) / 2)) for k, x in near.items()
    } or dict.fromkeys(d, 1.0)
    return {k: weight / sum(weights.values()) for k, weight in weights.items()}


def added(terms: list[Tensor]) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64))


def triplet(
    anchors: Embeddings, references: Embeddings, loss: Triplet, mining: str, seed: int
) -> tuple[Tensor, float]:
    chosen = draws(anchors, references, seed) if mining == "distance_weighted" else {}
    terms = []
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        d = [
            (z - x).square().sum() if loss.squared else (z - x).square().sum().sqrt() for x in references.z_ND
        ]
        triplets = [(j, k) for j in positives for k in negatives]
        if mining == "distance_weighted":
            triplets = [(j, chosen[i, j]) for j in positives]
        elif mining == "semi_hard":
            triplets = [(j, k) for j, k in triplets if d[j] < d[k]]
        elif mining == "batch_hard" and triplets:
            triplets = [
                (max(positives, key=lambda j: d[j].item()), min(negatives, key=lambda k: d[k].item()))
            ]
        terms += [(d[j] - d[k] + loss.margin).relu() for j, k in triplets]
    count = len(terms) if mining == "distance_weighted" else sum(term > 0 for term in terms)
    return added(terms), float(count)


def margin(anchors: Embeddings, references: Embeddings, loss: Margin, seed: int) -> tuple[Tensor, float]:
    terms, betas = [], []
    for (i, j), k in draws(anchors, references, seed).items():
        z, beta = anchors.z_ND[i], loss.beta_C[anchors.y_N[i]]
        terms.append((z - references.z_ND[j]).square().sum().sqrt() - beta + loss.alpha)
        terms.append(beta - (z - references.z_ND[k]).square().sum().sqrt() + loss.alpha)
        betas.append(beta)
    terms = [term for term in terms if term > 0]
    return added(terms) + loss.nu * added(betas), len(terms)


CASES: dict[str, tuple[dict[str, Scalar], int]] = {
    "all": ({}, 0),
    "all-squared": ({"margin": 0.5, "distance": "squared_euclidean"}, 0),
    "semi_hard": ({"mining": "semi_hard"}, 0),
    "batch_hard": ({"mining": "batch_hard"}, 0),
    "distance_weighted": ({"mining": "distance_weighted"}, 3),
    "distance_weighted-squared": (
        {"margin": 0.4, "mining": "distance_weighted", "distance": "squared_euclidean"},
        4,
    ),
    "margin-distance_weighted": ({"alpha": 0.4, "nu": 0.01, "mining": "distance_weighted"}, 5),
}
"""Parameters and seed of the triplet loss, or of the margin loss where the name begins so."""

each_case = pytest.mark.parametrize("name", list(CASES))


def build(name: str) -> Loss:
    params, seed = CASES[name]
    entry = "margin" if name.startswith("margin") else "triplet"
    return catalogue.build(entry, params, num_classes=NUM_CLASSES, dim=DIM, seed=seed)


@pytest.mark.parametrize("order", [INTERLEAVED, BY_CLASS], ids=["interleaved", "by class"])
@pytest.mark.parametrize("rows", [slice(None), slice(2, 7)], ids=["own batch", "other references"])
@each_case
def test_value_and_gradient_equal_the_formula_s_loops(name: str, rows: slice, order: list[int]) -> None:
    loss, batch = build(name).double(), embeddings(order)
    params, seed = CASES[name]
    leaves = [batch.z_ND, *loss.parameters()]
    total, count = loss(batch.rows(rows), batch)
    if isinstance(loss, Margin):
        expected, expected_count = margin(batch.rows(rows), batch, loss, seed)
    else:
        assert isinstance(loss, Triplet)
        mining = str(params.get("mining", "all"))
        expected, expected_count = triplet(batch.rows(rows), batch, loss, mining, seed)
    assert expected.item() > 0, "the case selects nothing and proves nothing"
    assert count.item() == expected_count
    assert_same((total,), (expected,), 1e-10)
    wanted = torch.autograd.grad(expected, leaves)
    assert all(gradient.abs().max() > 1e-3 for gradient in wanted)
    assert_same(torch.autograd.grad(total, leaves), wanted, 1e-9)


@each_case
def test_tiles_of_one_row_and_the_batch_s_order_change_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, batch = build(name).double(), embeddings()
    leaves = [batch.z_ND, *loss.parameters()]
    whole = loss(batch)
    gradients = torch.autograd.grad(whole.total, leaves)
    permuted = batch.rows(torch.tensor(BY_CLASS))
    assert_same(loss(permuted), whole, 1e-12)
    monkeypatch.setattr(tiles, "BUDGET_BYTES", {"cpu": 1})
    in_rows = loss(batch)
    assert_same(in_rows, whole, 1e-12)
    assert_same(torch.autograd.grad(in_rows.total, leaves), gradients, 1e-12)


@each_case
def test_parts_of_the_anchors_sum_to_the_whole(name: str) -> None:
    loss, batch = build(name).double(), embeddings()
    whole = loss(batch)
    parts = [loss(batch.rows(rows), batch) for rows in (slice(0, 3), slice(3, 3), slice(3, 10))]
    assert_same(tuple(map(added, zip(*parts, strict=True))), whole, 1e-12)


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
    loss = build(name)
    total, count = loss(batch)
    assert total.dtype == torch.float32
    for gradient in torch.autograd.grad(total, [z_ND, *loss.parameters()]):
        assert gradient.isfinite().all()
    if isinstance(loss, Triplet):
        assert total.item() == count.item() == 0


def test_draws_follow_the_formula_s_probabilities() -> None:
    """Over 400 seeds, with distances below 0.5 and beyond 1.4 among them."""
    batch, num_seeds = embeddings(spread=1.5), 400
    z_ND = batch.z_ND.detach().clone()
    z_ND[7] = functional.normalize(z_ND[0] + 0.3 * z_ND[7], dim=0)
    batch = batch._replace(z_ND=z_ND)
    d_NN = euclidean(batch.z_ND, batch.z_ND)
    negative_NN = batch.y_N[:, None] != batch.y_N
    assert d_NN[negative_NN].min() < 0.5
    assert d_NN[negative_NN].max() > 1.4
    drawn = [draws(batch, batch, seed) for seed in range(num_seeds)]
    chi_squared, freedom = 0.0, 0
    for i in range(len(batch.y_N)):
        positives, _ = pair_sets(batch, batch, i)
        pairs = [(i, j) for j in positives if j != 9]  # two copies of one image draw the same
        found = [one[pair] for one in drawn for pair in pairs]
        expected = probabilities(batch, batch, i)
        assert set(found) <= set(expected)
        if found:
            chi_squared += sum(
                (found.count(k) - len(found) * p) ** 2 / (len(found) * p) for k, p in expected.items()
            )
            freedom += len(expected) - 1
    assert freedom > 20
    assert abs(chi_squared - freedom) < 4 * math.sqrt(2 * freedom)


def test_far_negatives_are_drawn_evenly_where_no_other_is_near() -> None:
    z_ND = functional.normalize(
        torch.tensor([[1.0, 0.1], [1, -0.1], [-1, 0.1], [-1, -0.1], [-1, 0.0]]).double()
    )
    z_ND = functional.pad(z_ND, (0, 2))
    batch = Embeddings(z_ND, torch.tensor([0, 0, 1, 2, 3]), torch.arange(5))
    found = [draws(batch, batch, seed)[0, 1] for seed in range(300)]
    assert {k: round(found.count(k) / 300, 1) for k in (2, 3, 4)} == {2: 0.3, 3: 0.3, 4: 0.3}
    assert set(found) == {2, 3, 4}


def test_draws_depend_on_the_pair_and_the_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = embeddings()
    whole = draws(batch, batch, 7)
    assert len(whole) == 3 * 2 + (3 + 3 + 2 + 2) + 2
    permuted = batch.rows(torch.tensor(BY_CLASS))
    moved = draws(permuted, permuted, 7)
    assert {(BY_CLASS[i], BY_CLASS[j]): BY_CLASS[k] for (i, j), k in moved.items()} == whole
    later = draws(batch.rows(slice(4, 10)), batch, 7)
    assert later == {(i - 4, j): k for (i, j), k in whole.items() if i >= 4}
    monkeypatch.setattr(tiles, "BUDGET_BYTES", {"cpu": 1})
    assert draws(batch, batch, 7) == whole
    assert draws(batch, batch, 8) != whole
    other_images = batch._replace(id_N=batch.id_N + 1000)
    assert draws(other_images, other_images, 7) != whole


def test_pair_numbers_count_the_pairs() -> None:
    batch = embeddings()
    for anchors in (batch, batch.rows(slice(2, 7)), batch.rows(slice(0, 0))):
        sets = [pair_sets(anchors, batch, i) for i in range(len(anchors.y_N))]
        positives_B, negatives_B = pair_numbers(anchors.labels, batch.labels)
        assert positives_B.tolist() == [len(positives) for positives, _ in sets]
        assert negatives_B.tolist() == [len(negatives) for _, negatives in sets]


@pytest.mark.parametrize("mining", ["all", "semi_hard", "batch_hard"])
def test_mined_triplets_equal_pml(mining: str) -> None:
    batch = balanced()
    plain = pml_distances.LpDistance(normalize_embeddings=False)
    chosen = {
        "all": lambda z_ND, y_N: None,
        "semi_hard": miners.TripletMarginMiner(0.2, "semihard", distance=plain),
        "batch_hard": miners.BatchHardMiner(distance=plain),
    }[mining](batch.z_ND, batch.y_N)
    theirs = pml.TripletMarginLoss(0.2, distance=plain)(batch.z_ND, batch.y_N, chosen)
    total, count = catalogue.build("triplet", {"mining": mining}, num_classes=3, dim=DIM)(batch)
    assert_same((total / count,), (theirs,), 1e-9)
    assert_same(*(torch.autograd.grad(x, batch.z_ND) for x in (total / count, theirs)), 1e-9)


def test_margin_over_drawn_triplets_equals_pml_given_the_same_triplets() -> None:
    """With nu and a beta per class."""
    batch = balanced()
    triplets = torch.tensor([(i, j, k) for (i, j), k in draws(batch, batch, 1).items()]).T
    plain = pml_distances.LpDistance(normalize_embeddings=False)
    their_loss = pml.MarginLoss(0.2, nu=0.03, beta=1.1, learn_beta=True, num_classes=3, distance=plain)
    theirs = their_loss(batch.z_ND, batch.y_N, tuple(triplets))
    loss = Margin(3, 0.2, 1.1, nu=0.03, negatives=DistanceWeighted(1))
    total, count = loss(batch)
    assert_same((total / count,), (theirs,), 1e-7)  # beta is a float32
    ours = torch.autograd.grad(total / count, [batch.z_ND, loss.beta_C])
    their = torch.autograd.grad(theirs, [batch.z_ND, their_loss.beta])
    assert_same(ours[:1], their[:1], 1e-9)
    assert_same(ours[1:], their[1:], 1e-6)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"margin": -0.1}, "margin=-0.1 must be a finite number >= 0"),
        ({"mining": "hard"}, "mining='hard' is unknown; .*batch_hard"),
        ({"mining": "semi_hard+all"}, r"mining='semi_hard\+all' is unknown"),
        ({"distance": "chebyshev"}, "distance='chebyshev' is unknown; .*euclidean"),
    ],
)
def test_mistakes_are_named(params: dict[str, Scalar], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        catalogue.build("triplet", params, num_classes=NUM_CLASSES, dim=DIM)
