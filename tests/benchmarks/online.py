"""Triplets per second of OAHU against the plain autograd loop, in one run on one thread.

    .venv/bin/python tests/benchmarks/online.py                    about 1 minute
    .venv/bin/python tests/benchmarks/online.py --rounds 7 --triplets 2000

Both are at the paper's sizes (784 inputs, 5 hidden layers of 100 units, embeddings of 50) and start from the same
weights. The loop is what one writes with torch: one forward pass for the three points, the gradient of
sum_l alpha^l L^l by autograd, a step of SGD, the hedge update; its points are tensors already. Sides take turns; the
medians are compared. Equality is shown in float64 and must hold before any speed is printed: of every step from the
same parameters, at each eta, and of all steps in a row at eta = 0.02. With larger steps the method itself is chaotic:
the loop run again with points off by 2e-16 parts from itself as far as from OAHU, and the last column shows both.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
if __name__ == "__main__" and any(os.environ.get(name) != "1" for name in THREADS):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **dict.fromkeys(THREADS, "1")})

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import normalize  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "platform"))
from dmlstudy import online  # noqa: E402

FEATURES = 784
TURN = 96  # triplets: two of OAHU's blocks
MOST_APART = 1e-6
ETAS = (0.02, 0.3)
STEADY = 0.02  # the largest of them at which rounding does not grow with the steps


def triplets(num: int) -> np.ndarray:
    """Centred unit vectors of 10 classes, (T, 3, D)."""
    rng = np.random.default_rng(0)
    centre = rng.normal(size=(10, FEATURES))
    own, step = rng.integers(0, 10, num), rng.integers(1, 10, num)
    classes = np.stack([own, own, (own + step) % 10], axis=1)
    x = centre[classes] + 2 * rng.normal(size=(num, 3, FEATURES))
    return x / np.linalg.norm(x, axis=2, keepdims=True)


class PlainLoop:
    """OAHU as one writes it with torch, from a learner's weights."""

    def __init__(self, learner: online.OAHU) -> None:
        self.learner = learner
        self.follow()

    def follow(self) -> None:
        """Takes the learner's parameters as they are now."""
        *groups, self.alpha = (
            [torch.tensor(each) for each in group] if isinstance(group, list) else torch.tensor(group)
            for group in parameters(self.learner)
        )
        self.weights, self.biases, self.thetas = (
            [each.contiguous().requires_grad_() for each in group] for group in groups
        )

    def step(self, x_3D: Tensor) -> None:
        learner, losses = self.learner, []
        h, hidden = x_3D, [x_3D]
        for weight, bias in zip(self.weights, self.biases, strict=True):
            h = torch.relu(torch.addmm(bias, h, weight))
            hidden.append(h)
        for h, theta in zip(hidden, self.thetas, strict=True):
            anchor, positive, negative = normalize(h @ theta, dim=1)
            plus, minus = (anchor - positive).norm(), (anchor - negative).norm()
            similar = learner.tau / (math.e**2 - 1) * (plus.detach().exp() - 1)
            dissimilar = 2 - learner.tau + learner.tau / (1 - math.e**-2) * (1 - (-minus.detach()).exp())
            attractive = torch.relu((plus - similar) / (2 - similar))
            losses.append((attractive + torch.relu(1 - minus / dissimilar)) / 2)
        loss_L = torch.stack(losses)
        parameters = [*self.weights, *self.biases, *self.thetas]
        gradients = torch.autograd.grad((self.alpha * loss_L).sum(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=learner.eta)
            loss_L = loss_L.detach()
            beta = learner.beta
            is_hedged_L = beta ** loss_L.min() * loss_L.log() > beta - 1
            factor_L = torch.where(is_hedged_L, beta**loss_L, 1 - (1 - beta) * loss_L)
            alpha = (self.alpha * factor_L).clamp(min=learner.smoothing / len(loss_L))
            self.alpha = alpha / alpha.sum()

    def gap(self, other: online.OAHU | PlainLoop) -> float:
        """The largest difference from another's parameters."""
        theirs = flat(parameters(other)) if isinstance(other, online.OAHU) else other.flat()
        return max(float(np.abs(a - b).max()) for a, b in zip(self.flat(), theirs, strict=True))

    def flat(self) -> list[np.ndarray]:
        mine = [*self.weights, *self.biases, *self.thetas, self.alpha]
        return [each.detach().numpy() for each in mine]


def parameters(
    learner: online.OAHU,
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], np.ndarray]:
    """W, b and Theta of each layer, and alpha."""
    state, size = learner.state(), learner.size
    weights = [state["input"][:, size:], *state["hidden"]]
    return weights, list(state["bias"]), [state["input"][:, :size], *state["theta"]], state["alpha"]


def flat(groups: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], np.ndarray]) -> list[np.ndarray]:
    return [*groups[0], *groups[1], *groups[2], groups[3]]


def one_step_apart(eta: float, x_T3D: np.ndarray) -> float:
    """The largest difference that any one step makes, each from the same parameters."""
    learner = online.OAHU(FEATURES, eta=eta)
    loop, largest = PlainLoop(learner), 0.0
    for x_3D in x_T3D:
        loop.follow()
        loop.step(torch.from_numpy(x_3D))
        learner.partial_fit(online.Constraints(x_3D[None]))
        largest = max(largest, loop.gap(learner))
    return largest


def all_steps_apart(eta: float, x_T3D: np.ndarray) -> tuple[float, float]:
    """After all steps: the loop from OAHU in blocks, and from itself with points off by rounding."""
    learner = online.OAHU(FEATURES, eta=eta)
    loop, rounded = PlainLoop(learner), PlainLoop(learner)
    learner.partial_fit(online.Constraints(x_T3D))
    for x_3D in x_T3D:
        loop.step(torch.from_numpy(x_3D))
        rounded.step(torch.from_numpy(x_3D * (1 + np.finfo(float).eps)))
    return loop.gap(learner), loop.gap(rounded)


def speeds(precision: str, eta: float, x_T3D: np.ndarray, rounds: int) -> tuple[float, float]:
    """Triplets per second of the loop and of OAHU, which take turns by ``TURN`` triplets."""
    x_T3D = x_T3D.astype(precision)
    points = list(torch.from_numpy(x_T3D))
    seconds: dict[str, list[float]] = {"loop": [], "ours": []}
    for _ in range(rounds):
        learner = online.OAHU(FEATURES, eta=eta, precision=precision)
        loop = PlainLoop(learner)
        for start in range(0, len(x_T3D) - TURN + 1, TURN):
            started = time.perf_counter()
            learner.partial_fit(online.Constraints(x_T3D[start : start + TURN]))
            between = time.perf_counter()
            for x_3D in points[start : start + TURN]:
                loop.step(x_3D)
            seconds["ours"].append(between - started)
            seconds["loop"].append(time.perf_counter() - between)
    theirs, ours = (TURN / statistics.median(each) for each in seconds.values())
    return theirs, ours


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--triplets", type=int, default=1000, help=f"at least {TURN}")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.triplets < TURN:
        parser.error(f"--triplets {options.triplets}: a turn has {TURN}")
    torch.set_num_threads(1)
    x_T3D = triplets(options.triplets)
    head = ["eta", "one step apart, at most", "all steps apart", "the loop from itself"]
    print(f"| {' | '.join(head)} |")
    print("|---:|" + "---:|" * 3)
    for eta in ETAS:
        one, (whole, itself) = one_step_apart(eta, x_T3D), all_steps_apart(eta, x_T3D)
        print(f"| {eta:g} | {one:.0e} | {whole:.0e} | {itself:.0e} |", flush=True)
        if one > MOST_APART or (eta <= STEADY and whole > MOST_APART):
            raise SystemExit(f"parameters differ by more than {MOST_APART:g}: no speed is compared")
    print()
    head = ["precision", "eta", "plain loop, triplets/s", "OAHU, triplets/s", "faster"]
    print(f"| {' | '.join(head)} |")
    print("|---|" + "---:|" * 4)
    for precision in ("float64", "float32"):
        for eta in ETAS:
            theirs, ours = speeds(precision, eta, x_T3D, options.rounds)
            print(
                f"| {precision} | {eta:g} | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.1f}x |", flush=True
            )


if __name__ == "__main__":
    main()
