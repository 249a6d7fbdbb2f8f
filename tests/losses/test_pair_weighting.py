"""General pair-based weighting and multi-similarity against their formulas, as plain loops over pairs.

Reference loops work on scalars in float64. Weights become Python floats, so they are frozen, and the
loop's own autograd gives the gradient to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import catalogue, tiles
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.records import Scalar

NUM_CLASSES, DIM = 5, 4
Params = dict[str, Scalar]
Reference = Callable[[Loss, Embeddings, Embeddings, Params], tuple[Tensor, int]]


def embeddings(seed: int = 0) -> Embeddings:
    """Ten unit vectors of four classes, one class a singleton, and one image drawn twice
    (differently augmented)."""
    generator = torch.Generator().manual_seed(seed)
    z_ND = torch.randn(10, DIM, dtype=torch.float64, generator=generator)
    y_N = torch.tensor([0, 1, 0, 1, 2, 0, 1, 2, 4, 1])
    id_N = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17, 18, 13])
    z_ND[9] = z_ND[3] + 0.1 * z_ND[9]
    z_ND += 1.5 * functional.one_hot(y_N % DIM, DIM)
    return Embeddings(functional.normalize(z_ND).requires_grad_(), y_N, id_N)


def squared(a: Tensor, b: Tensor) -> Tensor:
    return sum(((a[d] - b[d]) ** 2 for d in range(len(a))), torch.zeros((), dtype=torch.float64))


def pair_sets(anchors: Embeddings, references: Embeddings, i: int) -> tuple[list[int], list[int]]:
    others = [j for j in range(len(references.y_N)) if references.id_N[j] != anchors.id_N[i]]
    positives = [j for j in others if references.y_N[j] == anchors.y_N[i]]
    return positives, [j for j in others if references.y_N[j] != anchors.y_N[i]]


def weighted_sum(
    excesses: list[Tensor], kind: str, exponent: float, rate: float, normalize: str, detach: bool
) -> Tensor:
    raw = {
        "constant": lambda x: 1.0,
        "power": lambda x: x**exponent,
        "exponential": lambda x: math.e ** (rate * x),
    }[kind]
    weights = [raw(excess.item() if detach else excess) for excess in excesses]
    if normalize == "anchor" and sum(weights) > 0:
        weights = [weight / sum(weights) for weight in weights]
    total = torch.zeros((), dtype=torch.float64)
    for weight, excess in zip(weights, excesses, strict=True):
        total = total + weight * excess
    return total


def distance_of(params: Params) -> Callable[[Tensor, Tensor], Tensor]:
    if params.get("distance", "euclidean") == "squared_euclidean":
        return squared
    return lambda a, b: squared(a, b).sqrt()


def pair_weighting(
    loss: Loss, anchors: Embeddings, references: Embeddings, params: Params
) -> tuple[Tensor, int]:
    p = {**catalogue.parameters_of("pair_weighting"), **params}
    distance = distance_of(params)
    total = torch.zeros((), dtype=torch.float64)
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        d = {j: distance(z, references.z_ND[j]) for j in positives + negatives}
        pull = [j for j in positives if d[j] >= p["positive_margin"]]
        push = [k for k in negatives if d[k] <= p["negative_margin"]]
        if "margin" in p["mining"]:
            nearest = min((d[k].item() for k in negatives), default=math.inf)
            farthest = max((d[j].item() for j in positives), default=-math.inf)
            pull = [j for j in pull if d[j] >= nearest - p["epsilon"]]
            push = [k for k in push if d[k] <= farthest + p["epsilon"]]
        if "batch_hard" in p["mining"]:
            pull = [j for j in pull if d[j] == max(d[j] for j in positives)]
            push = [k for k in push if d[k] == min(d[k] for k in negatives)]
        how = (p["normalize"], p["detach_weights"])
        pulls, pushes = (
            [d[j] - p["positive_margin"] for j in pull],
            [p["negative_margin"] - d[k] for k in push],
        )
        total = total + weighted_sum(pulls, p["weighting"], p["p"], p["alpha"], *how)
        total = total + weighted_sum(pushes, p["weighting"], p["q"], p["beta"], *how)
    return total, len(anchors.z_ND)


def contrastive(
    loss: Loss, anchors: Embeddings, references: Embeddings, params: Params
) -> tuple[Tensor, int]:
    low, high = params.get("positive_margin", 0.0), params.get("negative_margin", 0.8)
    total = torch.zeros((), dtype=torch.float64)
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        pulls = [squared(z, references.z_ND[j]).sqrt() - low for j in positives]
        pushes = [high - squared(z, references.z_ND[k]).sqrt() for k in negatives]
        for hinges in ([x for x in pulls if x >= 0], [x for x in pushes if x >= 0]):
            if hinges:
                total = total + sum(hinges[1:], hinges[0]) / len(hinges)
    return total, len(anchors.z_ND)


def triplet_weighting(
    loss: Loss, anchors: Embeddings, references: Embeddings, params: Params
) -> tuple[Tensor, int]:
    p = {**catalogue.parameters_of("triplet_weighting"), **params}
    distance = distance_of(params)
    total = torch.zeros((), dtype=torch.float64)
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        d = {j: distance(z, references.z_ND[j]) for j in positives + negatives}
        pull, push = positives, negatives
        rules = p["mining"].split("+")
        if positives and negatives and "margin" in rules:
            pull = [j for j in pull if d[j] >= min(d[k] for k in negatives) - p["epsilon"]]
            push = [k for k in push if d[k] <= max(d[j] for j in positives) + p["epsilon"]]
        if "batch_hard" in rules:
            pull = [j for j in pull if d[j] == max(d[j] for j in positives)]
            push = [k for k in push if d[k] == min(d[k] for k in negatives)]
        if "threshold" in rules:
            pull = [j for j in pull if d[j] >= p["positive_margin"]]
            push = [k for k in push if d[k] <= p["negative_margin"]]
        pairs = [(j, k) for j in pull for k in push if "semi_hard" not in rules or d[j] < d[k]]
        violating = [e for e in (d[j] - d[k] + p["margin"] for j, k in pairs) if e >= 0]
        how = (p["weighting"], p["p"], p["alpha"], p["normalize"], p["detach_weights"])
        total = total + weighted_sum(violating, *how)
    return total, len(anchors.z_ND)


def multi_similarity(
    loss: Loss, anchors: Embeddings, references: Embeddings, params: Params
) -> tuple[Tensor, int]:
    p = {**catalogue.parameters_of("multi_similarity"), **params}
    total = torch.zeros((), dtype=torch.float64)
    for i, z in enumerate(anchors.z_ND):
        positives, negatives = pair_sets(anchors, references, i)
        s = {j: torch.dot(z, references.z_ND[j]) for j in positives + negatives}
        if positives and negatives:
            most, least = max(s[k] for k in negatives), min(s[j] for j in positives)
            pull = [
                torch.exp(-p["alpha"] * (s[j] - p["threshold"]))
                for j in positives
                if s[j] - p["epsilon"] < most
            ]
            push = [
                torch.exp(p["beta"] * (s[k] - p["threshold"]))
                for k in negatives
                if s[k] + p["epsilon"] > least
            ]
            one = torch.ones((), dtype=torch.float64)
            total = total + torch.log(sum(pull, one)) / p["alpha"] + torch.log(sum(push, one)) / p["beta"]
    return total, len(anchors.z_ND)


REFERENCES: dict[str, tuple[Reference, list[Params]]] = {
    "pair_weighting": (
        pair_weighting,
        [
            {},
            {"weighting": "constant"},
            {"weighting": "constant", "normalize": "none", "negative_margin": 1.4},
            {"weighting": "power"},
            {"weighting": "power", "p": 0.5, "q": 5.0, "negative_margin": 1.3, "positive_margin": 0.3},
            {"weighting": "power", "p": 1.0, "q": 1.0, "normalize": "none", "negative_margin": 1.0},
            {"alpha": 2.0, "beta": 50.0, "negative_margin": 1.5},
            {"alpha": 1.0, "beta": 10.0, "normalize": "none", "negative_margin": 1.2},
            {"mining": "threshold+margin", "negative_margin": 1.4},
            {"mining": "threshold+margin", "epsilon": 0.02, "weighting": "power", "q": 2.0},
            {"weighting": "constant", "distance": "squared_euclidean"},
            {"distance": "squared_euclidean", "mining": "threshold+margin", "negative_margin": 1.4},
            {"mining": "batch_hard", "negative_margin": 1.4},
            {"mining": "margin+batch_hard", "negative_margin": 1.4, "weighting": "power"},
            {"detach_weights": False, "alpha": 2.0, "beta": 5.0, "negative_margin": 1.4},
            {"detach_weights": False, "normalize": "none", "alpha": 1.0, "negative_margin": 1.2},
            {"detach_weights": False, "weighting": "power", "p": 0.5, "q": 3.0, "negative_margin": 1.4},
            {"detach_weights": False, "weighting": "power", "p": 1, "q": 1, "normalize": "none"},
            {"detach_weights": False, "weighting": "constant", "negative_margin": 1.4},
        ],
    ),
    "contrastive": (contrastive, [{}, {"positive_margin": 0.4, "negative_margin": 1.3}]),
    "triplet_weighting": (
        triplet_weighting,
        [
            {},
            {"weighting": "constant", "margin": 0.2},
            {"weighting": "constant", "normalize": "none", "margin": 0.5},
            {"weighting": "power"},
            {"weighting": "power", "p": 0.0, "margin": 0.4},
            {"weighting": "power", "p": 0.5, "normalize": "none", "margin": 0.4},
            {"alpha": 1.0, "normalize": "none"},
            {"weighting": "constant", "distance": "squared_euclidean"},
            {"mining": "semi_hard", "margin": 0.5},
            {"mining": "batch_hard", "margin": 0.5},
            {"mining": "margin", "epsilon": 0.05, "margin": 0.5},
            {"mining": "threshold", "positive_margin": 0.4, "negative_margin": 1.2, "margin": 0.5},
            {"mining": "margin+semi_hard", "epsilon": 0.3, "margin": 0.5, "weighting": "power"},
            {"detach_weights": False, "margin": 0.4, "alpha": 5.0},
            {"detach_weights": False, "margin": 0.4, "alpha": 2.0, "normalize": "none"},
            {"detach_weights": False, "margin": 0.4, "weighting": "power", "p": 2.0},
            {"detach_weights": False, "margin": 0.4, "weighting": "constant"},
        ],
    ),
    "multi_similarity": (
        multi_similarity,
        [{}, {"alpha": 1.0, "beta": 20.0, "threshold": 0.7, "epsilon": 0.3}, {"epsilon": 0.0}],
    ),
}


CASES = [
    pytest.param(name, params, id="-".join([name, *(f"{k}={v}" for k, v in params.items())]))
    for name, (_, settings) in REFERENCES.items()
    for params in settings
]


@pytest.mark.parametrize("case", ["own batch", "other references"])
@pytest.mark.parametrize(("name", "params"), CASES)
def test_value_and_gradient_equal_the_paper_s_loops(name: str, params: Params, case: str) -> None:
    loss = catalogue.build(name, params, num_classes=NUM_CLASSES, dim=DIM).double()
    batch = embeddings()
    rows = slice(None) if case == "own batch" else slice(2, 7)
    anchors = batch.rows(rows)
    leaves = [batch.z_ND, *loss.parameters()]

    total, count = loss(anchors, batch)
    got = torch.autograd.grad(total, leaves)
    reference = REFERENCES[name][0]
    expected, expected_count = reference(loss, anchors, batch, params)
    wanted = torch.autograd.grad(expected, leaves)

    assert expected.item() > 0, "the case selects nothing and proves nothing"
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)
    assert count.item() == expected_count
    assert not count.requires_grad
    for gradient, reference_gradient in zip(got, wanted, strict=True):
        assert reference_gradient.abs().max() > 1e-3
        torch.testing.assert_close(gradient, reference_gradient, rtol=1e-9, atol=1e-10)


def test_weights_are_detached() -> None:
    """A pair's gradient is its weight: with p=q=1 un-normalised it is half that of the squared hinge."""
    batch = embeddings()
    loss = catalogue.build(
        "pair_weighting",
        {"weighting": "power", "p": 1, "q": 1, "normalize": "none"},
        num_classes=NUM_CLASSES,
        dim=DIM,
    )
    (gradient,) = torch.autograd.grad(loss(batch).total, batch.z_ND)
    squared_hinges = torch.zeros((), dtype=torch.float64)
    for i, z in enumerate(batch.z_ND):
        positives, negatives = pair_sets(batch, batch, i)
        for j in positives:
            squared_hinges = squared_hinges + squared(z, batch.z_ND[j])
        for k in negatives:
            squared_hinges = squared_hinges + (0.8 - squared(z, batch.z_ND[k]).sqrt()).relu() ** 2
    (full,) = torch.autograd.grad(squared_hinges, batch.z_ND)
    torch.testing.assert_close(2 * gradient, full, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", REFERENCES)
def test_tiles_do_not_change_the_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = catalogue.build(name, {}, num_classes=NUM_CLASSES, dim=DIM)
    whole, tiled = embeddings(), embeddings()
    expected = loss(whole).total
    expected.backward()
    monkeypatch.setitem(tiles.BUDGET_BYTES, "cpu", 1)
    total = loss(tiled).total
    total.backward()
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(tiled.z_ND.grad, whole.z_ND.grad, rtol=1e-12, atol=1e-14)
