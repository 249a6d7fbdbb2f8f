"""Triplets per second of OAHU against the plain autograd loop, in one run on one thread.

    .venv/bin/python tests/benchmarks/online.py                    about 1 minute
    .venv/bin/python tests/benchmarks/online.py --rounds 7 --triplets 2000

Both are at the paper's sizes (784 inputs, 5 hidden layers of 100 units, embeddings of 50) and start from the same
weights. The loop is what one writes with torch: one forward pass for the three points, the gradient of
sum_l alpha^l L^l by autograd, a step of SGD, the hedge update; its points are tensors already. Sides take turns; the
medians are compared. Equality is shown in float64 after all steps, at eta = 0.05 on unit vectors; with the paper's
eta = 0.3 a step makes rounding up to four times as large, so that two orders of the same sum are apart by 1e-3
after 50 steps: there the steps are compared one by one (tests/online/test_oahu.py), and only the speed here.
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
MOST_APART = 1e-6


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
        state = {name: torch.tensor(value) for name, value in learner.state().items()}
        size = learner.size
        self.weights = [
            each.clone().contiguous().requires_grad_()
            for each in (state["input"][:, size:], *state["hidden"])
        ]
        self.biases = [each.clone().requires_grad_() for each in state["bias"]]
        self.thetas = [
            each.clone().contiguous().requires_grad_() for each in (state["input"][:, :size], *state["theta"])
        ]
        self.alpha = state["alpha"].to(self.weights[0].dtype)

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

    def gap(self) -> float:
        """The largest difference from the learner's parameters."""
        size, state = self.learner.size, self.learner.state()
        theirs = [state["input"][:, size:], *state["hidden"], *state["bias"], state["input"][:, :size]]
        theirs += [*state["theta"], state["alpha"]]
        mine = [*self.weights, *self.biases, *self.thetas, self.alpha]
        return max(float(np.abs(a.detach().numpy() - b).max()) for a, b in zip(mine, theirs, strict=True))


def measure(precision: str, eta: float, x_T3D: np.ndarray, rounds: int) -> list[str]:
    x_T3D = x_T3D.astype(precision)
    points = list(torch.from_numpy(x_T3D))
    seconds: dict[str, list[float]] = {"loop": [], "ours": []}
    gap = math.nan
    for number in range(rounds):
        learner = online.OAHU(FEATURES, eta=eta, precision=precision)
        loop = PlainLoop(learner)
        for side in list(seconds) if number % 2 == 0 else list(seconds)[::-1]:
            started = time.perf_counter()
            if side == "ours":
                learner.partial_fit(online.Constraints(x_T3D))
            else:
                for x_3D in points:
                    loop.step(x_3D)
            seconds[side].append(time.perf_counter() - started)
        gap = loop.gap()
    theirs, ours = (len(x_T3D) / statistics.median(seconds[side]) for side in seconds)
    shown = f"{gap:.0e}" if precision == "float64" and eta < 0.1 else "-"
    if shown != "-" and gap > MOST_APART:
        raise SystemExit(f"parameters differ by {gap:.1e} after {len(x_T3D)} steps: nothing is compared")
    return [precision, f"{eta:g}", f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.1f}x", shown]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--triplets", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x_T3D = triplets(options.triplets)
    measure("float64", 0.05, x_T3D[:100], 1)  # what libraries allocate at first is behind
    head = ["precision", "eta", "plain loop, triplets/s", "OAHU, triplets/s", "faster", "parameters apart"]
    print("| " + " | ".join(head) + " |")
    print("|---|" + "---:|" * 5)
    for precision in ("float64", "float32"):
        for eta in (0.05, 0.3):
            print("| " + " | ".join(measure(precision, eta, x_T3D, options.rounds)) + " |", flush=True)


if __name__ == "__main__":
    main()
