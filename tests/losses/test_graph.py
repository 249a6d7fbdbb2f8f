"""Graph consistency against the paper's sums, its two ways to sub-batches, and what is known of its minima."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy.data import TwoDraws
from dmlstudy.losses import graph, tiles
from dmlstudy.losses.graph import GraphConsistency, split, two_draws
from dmlstudy.losses.interface import ALONE, Embeddings

DIM = 5
LABELS = [2, 0, 1, 0, 2, 1, 0, 2, 1, 0, 0, 3, 2, 1]  # 5, 4, 4 images and a singleton
DRAWN = [2, 0, 1, 0, 2, 1, 3, 0, 2, 1, 3, 0, 1, 2]  # two draws of 2, 2, 2 images and 1
IMAGES = [
    0,
    1,
    2,
    1,
    4,
    5,
    6,
    7,
    0,
    9,
    6,
    11,
    12,
    8,
]  # row 3 is row 1's image, 8 row 0's, 10 row 6's, 13 row 8's
SETTINGS = [
    {"term": term, "sigma_mode": mode, "sigma": sigma, "draw": draw}
    for term in ("gc_bar", "gc_bar_squared", "gc")
    for mode, sigma in (("fixed", 1.0), ("fixed", 0.3), ("median", 1.0))
    for draw in ("split", "two_draws")
]
SPLIT_OF_LABELS = ([3, 9, 5, 8, 4, 12], [10, 6, 13, 2, 0, 7])
each_setting = pytest.mark.parametrize(
    "setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values()))
)


def embeddings(labels: list[int], *, dim: int = DIM, seed: int = 0, noise: float = 0.7) -> Embeddings:
    """Unit vectors around one centre per class, float64."""
    generator = torch.Generator().manual_seed(seed)
    y_N = torch.tensor(labels, dtype=torch.int64)
    centres_CD = torch.randn(max(labels, default=0) + 1, dim, dtype=torch.float64, generator=generator)
    z_ND = centres_CD[y_N] + noise * torch.randn(len(labels), dim, dtype=torch.float64, generator=generator)
    return Embeddings(functional.normalize(z_ND).requires_grad_(), y_N, 100 + 7 * torch.arange(len(labels)))


def batch_for(setting: dict[str, object], seed: int = 0) -> Embeddings:
    """A batch for the setting's draw; of two draws, one with an image twice in a half, and some in both."""
    if setting["draw"] == "split":
        return embeddings(LABELS, seed=seed)
    drawn = embeddings(DRAWN, seed=seed).rows(torch.tensor(IMAGES))
    return drawn._replace(z_ND=drawn.z_ND.detach().requires_grad_())


def halves(batch: Embeddings, setting: dict[str, object], seed: int) -> tuple[list[int], list[int]]:
    """Rows of X' and X'', class by class."""
    if setting["draw"] == "split":
        first_n, second_n = split(batch, seed)
        return first_n.tolist(), second_n.tolist()
    labels, middle = batch.y_N.tolist(), len(batch.y_N) // 2
    return tuple(  # type: ignore[return-value]
        [i for c in sorted(set(labels)) for i in rows if labels[i] == c]
        for rows in (range(middle), range(middle, len(labels)))
    )


def as_printed(x1_nD: Tensor, x2_nD: Tensor, setting: dict[str, object]) -> Tensor:
    """The loss of two sub-batches by its formula, with one number at a time."""
    sigma = setting["sigma"]
    if setting["sigma_mode"] == "median":
        squares = sorted(
            float(((x[i] - x[j]) ** 2).sum())
            for x in (x1_nD.detach(), x2_nD.detach())
            for i, j in itertools.permutations(range(len(x)), 2)
        )
        sigma = squares[(len(squares) - 1) // 2]

    def edge(x_nD: Tensor, i: int, j: int) -> Tensor:
        return torch.exp(-((x_nD[i] - x_nD[j]) ** 2).sum() / sigma)

    places = range(len(x1_nD))
    if setting["term"] == "gc":
        terms = [(edge(x1_nD, i, j) - edge(x2_nD, i, j)) ** 2 for i in places for j in places]
        return sum(terms[1:], terms[0])
    squares_ = []
    for i in places:
        for d in range(x1_nD.shape[1]):
            entries = [edge(x1_nD, i, j) * x1_nD[j, d] - edge(x2_nD, i, j) * x2_nD[j, d] for j in places]
            squares_.append(sum(entries[1:], entries[0]) ** 2)
    squared = sum(squares_[1:], squares_[0])
    return squared if setting["term"] == "gc_bar_squared" else squared.sqrt()


def value_of(x1_nD: Tensor, x2_nD: Tensor, term: str = "gc_bar", sigma: float = 1.0) -> float:
    return GraphConsistency(term, sigma=sigma)._value(x1_nD, x2_nD, ALONE).total.item()


@each_setting
def test_value_and_gradient_equal_the_formula(setting: dict[str, str]) -> None:
    batch = batch_for(setting)
    total, count = GraphConsistency(**setting, seed=3)(batch)
    first_n, second_n = halves(batch, setting, seed=3)
    expected = as_printed(batch.z_ND[first_n], batch.z_ND[second_n], setting)
    assert expected > 1e-3
    assert count == 1
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)
    (got,) = torch.autograd.grad(total, batch.z_ND)
    (wanted,) = torch.autograd.grad(expected, batch.z_ND)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@each_setting
def test_batch_order_and_tiles_change_nothing(
    setting: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two draws, the order of the classes within each."""
    loss, batch = GraphConsistency(**setting), batch_for(setting)
    whole = loss(batch).total
    (gradient,) = torch.autograd.grad(whole, batch.z_ND)
    order = torch.randperm(len(LABELS), generator=torch.Generator().manual_seed(1))
    if setting["draw"] == "two_draws":
        first, second = halves(batch, setting, 0)
        order = torch.tensor(first + second)
    permuted = Embeddings(batch.z_ND.detach()[order].requires_grad_(), batch.y_N[order], batch.id_N[order])
    other = loss(permuted).total
    torch.testing.assert_close(other, whole, rtol=1e-12, atol=0)
    (other_gradient,) = torch.autograd.grad(other, permuted.z_ND)
    torch.testing.assert_close(other_gradient, gradient[order], rtol=1e-10, atol=1e-13)
    monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", 1)
    tiled = loss(batch).total
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(tiled, batch.z_ND)[0], gradient, rtol=1e-11, atol=1e-12)


def test_the_split_depends_on_seed_and_ids_alone() -> None:
    batch = embeddings(LABELS)
    order = torch.randperm(len(LABELS), generator=torch.Generator().manual_seed(1))
    permuted = batch.rows(order)
    one, other = split(batch, 5), split(permuted, 5)
    for here, there in zip(one, other, strict=True):
        assert torch.equal(batch.id_N[here], permuted.id_N[there])
    reseeded = split(batch, 6)
    assert not all(torch.equal(a, b) for a, b in zip(one, reseeded, strict=True))
    again = split(batch._replace(id_N=batch.id_N + 1), 5)
    assert not all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


def test_the_split_keeps_its_draws() -> None:
    """Rows of X' and X'' as version 0.1.0 had them: what has been trained can be trained again."""
    first_n, second_n = split(embeddings(LABELS), 3)
    assert first_n.tolist() == SPLIT_OF_LABELS[0]
    assert second_n.tolist() == SPLIT_OF_LABELS[1]


def test_split_is_disjoint() -> None:
    labels = [c for c in range(6) for _ in range(4)] + [9] * 5 + [10]
    left_out = set()
    for seed in range(200):
        batch = embeddings(labels)
        first_n, second_n = split(batch, seed)
        assert batch.y_N[first_n].tolist() == sorted([c for c in range(6) for _ in range(2)] + [9, 9])
        assert not set(first_n.tolist()) & set(second_n.tolist())
        left_out |= set(range(24, 29)) - set(first_n.tolist()) - set(second_n.tolist())
    assert left_out == set(range(24, 29))  # each of five images is the odd one at some time


def test_two_draws_are_the_batch_as_it_was_drawn() -> None:
    """CGML's 2 x 13 classes x 10 images: 130 rows in X' and in X'', whatever images have come up twice."""
    labels_N = np.repeat(np.arange(15), 20)
    (drawn,) = TwoDraws(labels_N, 13, 10, batches_per_epoch=1, seed=0).epoch(0)
    assert len(set(drawn.tolist())) < len(drawn) == 260
    batch = embeddings(labels_N.tolist(), dim=32).rows(torch.from_numpy(drawn))
    first_n, second_n = two_draws(batch)
    assert sorted(first_n.tolist()) == list(range(130))
    assert sorted(second_n.tolist()) == list(range(130, 260))
    assert torch.equal(batch.y_N[first_n], batch.y_N[second_n])
    in_order = [i for c in range(15) for i in range(130) if batch.y_N[i] == c]
    assert first_n.tolist() == in_order
    x1_nD, x2_nD = (
        batch.z_ND[:130].detach(),
        batch.z_ND[130:].detach(),
    )  # one joint order of classes is any other
    expected = value_of(x1_nD, x2_nD)
    assert GraphConsistency(draw="two_draws")(batch).total.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("labels", [[0, 0, 0, 1], [0, 1, 0], [0, 1, 1, 0, 1, 0]])
def test_two_draws_of_other_classes_are_refused(labels: list[int]) -> None:
    with pytest.raises(ValueError, match=r"differ in their classes; draw batches with batch\.draw"):
        GraphConsistency(draw="two_draws")(embeddings(labels))


def test_each_image_is_as_likely_in_either_half() -> None:
    batch = embeddings([0] * 4)
    times = torch.zeros(4)
    for seed in range(600):
        times[split(batch, seed)[0]] += 1
    assert times.tolist() == pytest.approx([300] * 4, abs=60)


@each_setting
def test_an_image_drawn_twice_is_split_as_one(setting: dict[str, str]) -> None:
    batch = embeddings(LABELS)
    again = torch.cat([torch.arange(len(LABELS)), torch.tensor([3, 3, 11])])
    loss = GraphConsistency(**setting | {"draw": "split"})
    assert loss(batch.rows(again)).total == loss(batch).total


def test_one_id_in_two_classes_is_two_images() -> None:
    batch = embeddings([0, 0, 1, 1])._replace(id_N=torch.tensor([7, 8, 7, 8]))
    first_n, second_n = split(batch, 0)
    assert batch.y_N[first_n].tolist() == batch.y_N[second_n].tolist() == [0, 1]


def test_class_order_matters_and_a_joint_permutation_does_not() -> None:
    """12.66 becomes 21.99 when one half's classes are out of order; inside a class, little changes."""
    labels = [c for c in range(13) for _ in range(10)]
    batch = embeddings(labels, dim=512, noise=0.5)
    first_n, second_n = split(batch, 0)
    x1_nD, x2_nD = batch.z_ND.detach()[first_n], batch.z_ND.detach()[second_n]
    generator = torch.Generator().manual_seed(0)
    joint = torch.randperm(65, generator=generator)
    inside = torch.cat([5 * c + torch.randperm(5, generator=generator) for c in range(13)])
    for term, least in (("gc_bar", 1.5), ("gc", 1.2)):
        value = value_of(x1_nD, x2_nD, term)
        assert value_of(x1_nD[joint], x2_nD[joint], term) == pytest.approx(value, rel=1e-12)
        broken, shuffled = value_of(x1_nD, x2_nD[joint], term), value_of(x1_nD, x2_nD[inside], term)
        assert broken > least * value
        assert shuffled != value
        assert shuffled == pytest.approx(value, rel=0.05)
    assert 7 < value_of(x1_nD, x2_nD) < 15  # the scale at sigma = 1 and n = 5


def test_degenerate_minima() -> None:
    """Collapse is a minimum of both; points far apart are one of gc alone."""
    collapsed = torch.ones(65, 512, dtype=torch.float64) / 512**0.5
    for term in ("gc_bar", "gc_bar_squared", "gc"):
        assert value_of(collapsed, collapsed, term) == 0
    generator = torch.Generator().manual_seed(0)
    far_nD = 10 * functional.normalize(torch.randn(130, 512, dtype=torch.float64, generator=generator))
    assert value_of(far_nD[:65], far_nD[65:], "gc") < 1e-20
    assert value_of(far_nD[:65], far_nD[65:]) == pytest.approx(114, rel=0.02)


def test_a_narrow_sigma_has_no_signal() -> None:
    """At sigma = 0.1 unit vectors in 512 dimensions are no neighbours and S is the identity."""
    batch = embeddings([c for c in range(13) for _ in range(10)], dim=512, noise=1.5)
    assert GraphConsistency("gc", sigma=0.1)(batch).total < 1e-6
    assert GraphConsistency("gc", sigma=1.0)(batch).total > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_setting
def test_collapse_has_a_finite_gradient(setting: dict[str, str], dtype: torch.dtype) -> None:
    batch = batch_for(setting)
    z_ND = functional.normalize(torch.ones(len(LABELS), DIM, dtype=dtype)).requires_grad_()
    total, _ = GraphConsistency(**setting)(batch._replace(z_ND=z_ND))
    total.backward()
    assert total.abs() < 1e-5
    assert z_ND.grad.isfinite().all()


def test_equal_halves_have_no_gradient() -> None:
    """The root of a sum of squares has no slope at 0; the term has slope 0 there."""
    x_nD = embeddings([0, 1, 2]).z_ND
    total, _ = GraphConsistency()._value(x_nD, x_nD, ALONE)
    assert total == 0
    assert (torch.autograd.grad(total, x_nD)[0] == 0).all()


@pytest.mark.parametrize("labels", [[], [0], [0, 1, 2]])
@each_setting
def test_without_two_images_of_a_class_it_is_zero_on_the_graph(
    labels: list[int], setting: dict[str, str]
) -> None:
    drawn_twice = setting["draw"] == "two_draws"
    batch = embeddings(labels[:0] if drawn_twice else labels)  # no halves of one row or three
    total, count = GraphConsistency(**setting)(batch)
    assert total == count == 0
    total.backward()
    assert (batch.z_ND.grad == 0).all()


@each_setting
def test_two_images_of_one_class(setting: dict[str, str]) -> None:
    """One row in each half: S = 1, and gc_bar is their distance."""
    batch = embeddings([4, 4])
    total, count = GraphConsistency(**setting)(batch)
    distance = (batch.z_ND[0] - batch.z_ND[1]).norm()
    expected = {"gc_bar": distance, "gc_bar_squared": distance**2, "gc": 0 * distance}
    assert count == 1
    torch.testing.assert_close(total, expected[setting["term"]], rtol=1e-12, atol=1e-14)


def test_the_median_of_many_rows_is_that_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    x1_nD, x2_nD = (embeddings([0, 1, 2] * 40, seed=seed).z_ND.detach() for seed in (0, 1))
    exact = graph._median(x1_nD, x2_nD)
    monkeypatch.setattr(graph, "MEDIAN_ROWS", 60)
    of_some = graph._median(x1_nD, x2_nD)
    assert of_some == graph._median(x1_nD, x2_nD)
    assert of_some != exact
    torch.testing.assert_close(of_some, exact, rtol=0.1, atol=0)
    assert of_some == graph._median(x1_nD[::2], x2_nD[::2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@each_setting
def test_autocast_computes_in_full_precision(setting: dict[str, str], dtype: torch.dtype) -> None:
    loss, batch = GraphConsistency(**setting), batch_for(setting)
    batch = batch._replace(z_ND=batch.z_ND.detach().float().requires_grad_())
    plain = loss(batch).total
    with torch.autocast("cpu", dtype=dtype):
        under = loss(batch).total
    assert plain.dtype == under.dtype == torch.float32
    assert torch.equal(plain, under)
    half = loss(batch._replace(z_ND=batch.z_ND.to(dtype))).total
    assert half.dtype == torch.float32
    half.backward()
    assert batch.z_ND.grad.isfinite().all()


def test_faults() -> None:
    with pytest.raises(ValueError, match=r"term='gcbar' is unknown; did you mean 'gc_bar'"):
        GraphConsistency("gcbar")
    with pytest.raises(ValueError, match="sigma_mode='mean' is unknown"):
        GraphConsistency(sigma_mode="mean")
    with pytest.raises(ValueError, match="draw='three' is unknown"):
        GraphConsistency(draw="three")
    with pytest.raises(ValueError, match="sigma=0"):
        GraphConsistency(sigma=0)
