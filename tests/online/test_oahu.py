"""OAHU against the paper's equations by autograd, one step at a time, and its laws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dmlstudy.losses.adaptive import hedged
from dmlstudy.online.learner import Constraints
from dmlstudy.online.oahu import OAHU, adaptive_bound_loss, bounds

TAUS = (0.05, 0.1, 0.3, 0.66, 1.2, 1.99)


def triplets(num: int, num_features: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=(5, num_features))
    own, other = rng.integers(0, 5, num), rng.integers(1, 5, num)
    centres = np.stack([centre[own], centre[own], centre[(own + other) % 5]], axis=1)
    x = centres + rng.normal(size=(num, 3, num_features))
    return x / np.linalg.norm(x, axis=2, keepdims=True)


def unit(f_NE: Tensor) -> Tensor:
    """What has no length stays at the origin, without gradient (and not 0 / 0)."""
    norm_N1 = f_NE.norm(dim=1, keepdim=True)
    has_length_N1 = norm_N1 > 1e-12
    return torch.where(has_length_N1, f_NE / torch.where(has_length_N1, norm_N1, 1), 0 * f_NE)


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Of two that are equal but for rounding, as where a layer has one unit that is not 0: no gradient."""
    apart = (one - other).norm()
    return apart if apart > 1e-12 else apart.detach() + 0 * apart


class ByAutograd:
    """Algorithm 1 as it is printed, with the learner's parameters."""

    def __init__(self, learner: OAHU) -> None:
        size = learner.size
        state = {name: torch.tensor(value, dtype=torch.float64) for name, value in learner.state().items()}
        self.learner = learner
        self.theta = [state["input"][:, :size], *state["theta"]]
        self.weight = [state["input"][:, size:], *state["hidden"]][: learner.num_hidden]
        self.bias = list(state["bias"])
        self.alpha = state["alpha"]
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def parameters(self) -> list[Tensor]:
        return [*self.theta, *self.weight, *self.bias]

    def embed(self, x_ND: Tensor) -> list[Tensor]:
        h = x_ND
        raw = [h @ self.theta[0]]
        for weight, bias, theta in zip(self.weight, self.bias, self.theta[1:], strict=True):
            h = torch.relu(h @ weight + bias)
            raw.append(h @ theta)
        return [unit(f) for f in raw]

    def losses(self, x_3D: Tensor) -> Tensor:
        tau, losses = self.learner.tau, []
        for anchor, positive, negative in self.embed(x_3D):
            plus, minus = distance(anchor, positive), distance(anchor, negative)
            a1 = tau / (math.e**2 - 1)
            a2 = tau / (1 - math.e**-2)
            similar = a1 * plus.detach().exp() - a1
            dissimilar = -a2 * (-minus.detach()).exp() + 2 - tau + a2
            attractive = torch.relu(plus / (2 - similar) - similar / (2 - similar))
            repulsive = torch.relu(1 - minus / dissimilar)
            losses.append((attractive + repulsive) / 2)
        return torch.stack(losses)

    def step(self, x_3D: np.ndarray) -> float:
        loss_L = self.losses(torch.tensor(x_3D))
        overall = (self.alpha * loss_L).sum()
        gradients = torch.autograd.grad(overall, self.parameters())
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters(), gradients, strict=True):
                parameter -= self.learner.eta * gradient
            loss_L = loss_L.detach()
            for layer in range(len(loss_L)):
                own, beta = loss_L[layer], self.learner.beta
                if self.learner.rule == "hedge" or (
                    self.learner.rule == "printed" and own > 0 and beta ** loss_L.min() * own.log() > beta - 1
                ):
                    self.alpha[layer] *= beta**own
                else:
                    self.alpha[layer] *= 1 - (1 - beta) * own
            self.alpha = self.alpha.clamp(min=self.learner.smoothing / len(self.alpha))
            self.alpha /= self.alpha.sum()
        return float(overall.detach())

    def gap(self) -> float:
        other = ByAutograd(self.learner)
        both = zip([*self.parameters(), self.alpha], [*other.parameters(), other.alpha], strict=True)
        gap = torch.stack([(a - b).detach().abs().max() for a, b in both if a.numel()]).max()
        assert not gap.isnan()
        return float(gap)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden": 0},
        {"num_hidden": 1},
        {"rule": "hedge", "beta": 0.5},
        {"rule": "linear", "smoothing": 0.0},
        {"rule": "printed", "beta": 0.3, "smoothing": 1.0},
        {"tau": 0.6, "width": 3, "size": 2},
    ],
    ids=str,
)
def test_steps_are_those_of_autograd(changes: dict[str, Any]) -> None:
    learner = OAHU(14, **{"num_hidden": 4, "width": 9, "size": 6, "eta": 0.05, **changes})
    reference = ByAutograd(learner)
    x = triplets(130, 14)
    expected = [reference.step(each) for each in x]
    losses = learner.partial_fit(Constraints(x))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)
    assert reference.gap() < 1e-9


def test_each_step_at_the_papers_settings_is_that_of_autograd() -> None:
    """With eta = 0.3 rounding grows from step to step (2e-17 to 1e-3 in 50), so steps are compared one by one."""
    learner = OAHU(784)
    for block in np.split(triplets(96, 784), 16):
        references = []
        state = learner.state()
        for each in block:
            references.append(ByAutograd(learner))
            references[-1].step(each)
            learner.partial_fit(Constraints(each[None]))
            assert references[-1].gap() < 1e-12
        one_by_one = learner.state()
        learner.restore(state)
        learner.partial_fit(Constraints(block))
        for name, value in learner.state().items():
            np.testing.assert_allclose(value, one_by_one[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tau", TAUS)
def test_bounds_and_losses_keep_what_the_paper_claims(tau: float) -> None:
    distance = np.linspace(0, 2, 2001)
    similar, dissimilar = bounds(distance, distance, tau)
    np.testing.assert_allclose(similar[[0, -1]], [0, tau], atol=1e-15)
    np.testing.assert_allclose(dissimilar[[0, -1]], [2 - tau, 2], atol=1e-15)
    assert (similar <= distance + 1e-15).all()
    assert (dissimilar >= distance - 1e-15).all()
    assert (np.diff(similar) > 0).all()
    assert (np.diff(dissimilar) > 0).all()
    loss = adaptive_bound_loss(distance[:, None], distance[None], tau)
    assert loss.min() == 0
    assert np.argwhere(loss < 1e-15).tolist() == [[0, 2000]]
    assert loss.max() <= 1 + 1e-15


@pytest.mark.parametrize("rule", ["printed", "hedge", "linear"])
def test_the_hedge_update_is_that_of_the_paper(rule: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        alpha = rng.dirichlet(np.ones(6))
        loss = rng.choice([0.0, 1.0, 0.995, 0.5, rng.random()], 6)
        beta, s = rng.choice([0.5, 0.9, 0.99]), rng.choice([0.0, 0.1, 1.0])
        expected = []
        for a, own in zip(alpha, loss, strict=True):
            is_hedged = rule == "hedge" or (
                rule == "printed" and own > 0 and beta ** min(loss) * math.log(own) > beta - 1
            )
            expected.append(max(a * (beta**own if is_hedged else 1 - (1 - beta) * own), s / 6))
        found = hedged(alpha, loss, beta, s, rule)
        np.testing.assert_allclose(found, np.array(expected) / sum(expected), rtol=1e-14)
        assert found.min() >= s / (6 * (1 + s)) - 1e-15
    one = hedged(np.array([1.0]), np.array([0.0]), 0.99, 0.1, rule)
    assert one.tolist() == [1.0]


def test_every_triplet_is_used_and_embeddings_are_unit_vectors() -> None:
    learner = OAHU(20, width=12, size=7, eta=0.02)  # no layer dies, which would give embeddings of 0
    losses = learner.partial_fit(Constraints(triplets(400, 20)))
    assert learner.counts.utilization == 1
    assert ((losses > 0) & (losses <= 1)).all()
    assert learner.layer_weights.sum() == pytest.approx(1)
    for f in learner.embed(triplets(9, 20)[:, 0]):
        np.testing.assert_allclose(np.linalg.norm(f, axis=1), 1)


def test_a_point_at_the_origin_of_a_layer_gives_no_gradient_and_no_nan() -> None:
    learner = OAHU(6, num_hidden=2, width=3, size=4)
    state = learner.state()
    state["bias"][:] = -1e6  # all hidden units are off
    learner.restore(state)
    x = triplets(5, 6)
    x[0, 0] = 0
    losses = learner.partial_fit(Constraints(x))
    assert np.isfinite(losses).all()
    assert all(np.isfinite(value).all() for value in learner.state().values())
    assert [float(np.abs(f).sum()) for f in learner.embed(x[:, 0])[1:]] == [0.0, 0.0]
    np.testing.assert_array_equal(learner.state()["theta"], state["theta"])


def test_it_learns_what_no_linear_metric_can() -> None:
    """The class is the sign of x0 x1; of any linear map's neighbours half are of the other class."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (3000, 2))
    label = (x[:, 0] * x[:, 1] > 0).astype(int)
    a, p, n = rng.integers(0, 3000, (3, 60_000))
    keep = (label[a] == label[p]) & (label[a] != label[n]) & (a != p)
    learner = OAHU(2, num_hidden=2, width=32, size=8, eta=0.1)
    learner.partial_fit(Constraints(np.stack([x[a[keep]], x[p[keep]], x[n[keep]]], axis=1)))

    def apart(f: np.ndarray) -> float:
        centre = np.stack([f[label == c].mean(axis=0) for c in (0, 1)])
        nearest = np.linalg.norm(f[:, None] - centre, axis=2).argmin(axis=1)
        return float((nearest == label).mean())

    linear, *deeper = (apart(f) for f in learner.embed(x))
    assert linear < 0.7
    assert max(deeper) > 0.9
    assert learner.layer_weights[1:].sum() > 0.8


def test_single_precision_follows_double() -> None:
    x = triplets(60, 30)
    double, single = (
        OAHU(30, precision=precision, eta=0.01, width=20, size=10) for precision in ("float64", "float32")
    )
    a, b = (learner.partial_fit(Constraints(x)) for learner in (double, single))
    np.testing.assert_allclose(a, b, atol=1e-5)
    assert single.state()["theta"].dtype == np.float32


def test_another_beginning_is_another_network_each_time_and_the_same_again() -> None:
    learner = OAHU(8, tau=0.3, width=7, rule="hedge", initial="he", precision="float32", on_invalid="skip")
    first, second, third = (each.state()["theta"] for each in (learner, learner.anew(1), learner.anew(2)))
    np.testing.assert_array_equal(learner.anew(1).state()["theta"], second)
    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)
    assert {**learner.anew(1).settings, "seed": 0} == learner.settings


@pytest.mark.parametrize(
    ("initial", "limits"),
    [
        ("fan_in", {"Theta^0": 0.2, "W^1": 0.2, "W^2": 0.25, "Theta^1": 0.25}),
        (
            "he",
            {
                "Theta^0": (6 / 25) ** 0.5,
                "W^1": (6 / 25) ** 0.5,
                "W^2": (6 / 16) ** 0.5,
                "Theta^1": (6 / 16) ** 0.5,
            },
        ),
        (
            "glorot",
            {
                "Theta^0": (6 / 225) ** 0.5,
                "W^1": (6 / 41) ** 0.5,
                "W^2": (6 / 32) ** 0.5,
                "Theta^1": (6 / 216) ** 0.5,
            },
        ),
    ],
)
def test_weights_start_within_their_limits_and_reach_them(initial: str, limits: dict[str, float]) -> None:
    learner = OAHU(25, num_hidden=2, width=16, size=200, initial=initial)
    state = learner.state()
    found = {
        "Theta^0": state["input"][:, :200],
        "W^1": state["input"][:, 200:],
        "W^2": state["hidden"][0],
        "Theta^1": state["theta"][0],
    }
    for name, limit in limits.items():
        assert limit * 0.95 < np.abs(found[name]).max() <= limit, name
    assert bool(state["bias"].any()) == (initial == "fan_in")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tau": 0.0}, "tau=0.0 must lie between 0 and 2"),
        ({"tau": 2.0}, "tau=2.0"),
        ({"beta": 1.0}, "beta=1.0"),
        ({"smoothing": 1.5}, "at most 1"),
        ({"eta": 0.0}, "eta=0.0"),
        ({"rule": "hedges"}, "hedge"),
        ({"precision": "float16"}, "precision"),
        ({"num_hidden": -1}, "num_hidden"),
        ({"width": 0}, "width"),
        ({"on_invalid": "drop"}, "error or skip"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OAHU(4, **changes)
