"""Time and memory of the softmax over 100,000 classes, against pytorch-metric-learning and plain PyTorch, in one run.

    .venv/bin/python tests/benchmarks/classes.py
    .venv/bin/python tests/benchmarks/classes.py arcface --classes 10000 --rounds 3
    .venv/bin/python tests/benchmarks/classes.py --sample 0.1

Each cell is one forward and backward of N unit vectors of size D, by their labels. All sides have the same vectors of
classes, and their values must agree to 1e-3, or the run fails. They run in one process by turns, in another order in
each round; shown is the median of rounds after a warm-up, in seconds of processor time, which other load changes least.

With ``--sample`` our softmax over that share of the classes stands beside that over all, and its value is another.

Peak memory is what one call adds to the resident memory of a process forked for it alone, in which the vectors lie
already: with the vectors' gradient, which each side must make, and without.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence

import pytorch_metric_learning as library
import torch
from fresh import Found, cost_in_fresh_process
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.nn import functional

from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings

DIM = 128
SIDES = ("ours", "PML", "plain")
LOSSES = ("norm_softmax", "arcface")
Step = Callable[[], float]


def logits(name: str, z_ND: Tensor, w_CD: Tensor, y_N: Tensor) -> Tensor:
    """The logits as one writes them in PyTorch."""
    s_NC = z_ND @ functional.normalize(w_CD).T
    if name == "norm_softmax":
        return s_NC / 0.05
    m = math.radians(28.6)
    own_N1 = s_NC.gather(1, y_N[:, None])
    wide_N1 = own_N1 * math.cos(m) - (1 - own_N1.square()).clamp(min=1e-12).sqrt() * math.sin(m)
    beyond_N1 = own_N1 - m * math.sin(m)
    return 64 * s_NC.scatter(1, y_N[:, None], torch.where(own_N1 >= -math.cos(m), wide_N1, beyond_N1))


def step(name: str, side: str, num_classes: int, n: int, sample: float = 1.0) -> Step:
    """A forward and backward of one side, of a ``sample`` of the classes where it is ours; the value."""
    generator = torch.Generator().manual_seed(0)
    z_ND = functional.normalize(torch.randn(n, DIM, generator=generator)).requires_grad_()
    y_N = torch.randint(0, num_classes, (n,), generator=generator)
    ours = catalogue.build(name, {"sample": sample}, num_classes=num_classes, dim=DIM)
    (vectors,) = ours.parameters()
    w_CD = vectors.detach()
    module: nn.Module = ours
    value: Callable[[], Tensor]
    if side == "ours":
        batch = Embeddings(z_ND, y_N, torch.arange(n))

        def value() -> Tensor:
            total, count = ours(batch)
            return total / count

    elif side == "PML":
        sizes = {"num_classes": num_classes, "embedding_size": DIM}
        kinds = {
            "norm_softmax": functools.partial(pml.NormalizedSoftmaxLoss, temperature=0.05),
            "arcface": pml.ArcFaceLoss,
        }
        module = kinds[name](**sizes)
        module.W = nn.Parameter(w_CD.T.contiguous())

        def value() -> Tensor:
            found: Tensor = module(z_ND, y_N)
            return found

    else:
        parameter = nn.Parameter(w_CD)
        module = nn.ParameterList([parameter])

        def value() -> Tensor:
            return functional.cross_entropy(logits(name, z_ND, parameter, y_N), y_N)

    def call() -> float:
        module.zero_grad(set_to_none=True)
        z_ND.grad = None
        found = value()
        found.backward()
        return found.item()

    return call


def prepare(name: str, side: str, num_classes: int, n: int, sample: float = 1.0) -> Step:
    """The call whose memory is measured; what libraries allocate at their first call is behind."""
    step(name, side, 500, n, sample)()
    return step(name, side, num_classes, n, sample)


def cost(name: str, side: str, num_classes: int, n: int, sample: float = 1.0) -> Found:
    return cost_in_fresh_process(
        functools.partial(prepare, name, side, num_classes, n, sample), most_seconds=300, most_gib=32
    )


def medians(name: str, num_classes: int, n: int, rounds: int) -> dict[str, float]:
    """Median seconds of processor time of each side, by turns, after their values were compared."""
    steps = {side: step(name, side, num_classes, n) for side in SIDES}
    values = {side: call() for side, call in steps.items()}
    if any(abs(each - values["plain"]) > 1e-3 * values["plain"] for each in values.values()):
        raise SystemExit(f"{name}: values {values} differ; nothing is compared")
    return by_turns(steps, rounds)


def by_turns(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of processor time of each step, in another order in each round."""
    sides = list(steps)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            started = time.process_time()
            steps[side]()
            times[side].append(time.process_time() - started)
    return {side: statistics.median(each) for side, each in times.items()}


def compare_samples(names: Sequence[str], num_classes: int, n: int, rounds: int, sample: float) -> None:
    """Print a table of our softmax over all classes and over a sample of them."""
    print("| loss | sample | s | MiB added |\n|---|---:|---:|---:|")
    for name in names:
        steps = {f"{each:g}": step(name, "ours", num_classes, n, each) for each in (1.0, sample)}
        for call in steps.values():
            call()
        seconds = by_turns(steps, rounds)
        for each, found in seconds.items():
            peak = cost(name, "ours", num_classes, n, float(each))
            added = peak if isinstance(peak, str) else f"{peak[1]:.0f}"
            print(f"| {name} | {each} | {found:.3f} | {added} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(LOSSES)}")
    parser.add_argument("--classes", type=int, default=100_000, metavar="C")
    parser.add_argument("--size", type=int, default=256, metavar="N")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--sample", type=float, metavar="SHARE", help="compare with this share of the classes"
    )
    options = parser.parse_args()
    names = options.names or LOSSES
    if options.sample is not None:
        compare_samples(names, options.classes, options.size, options.rounds, options.sample)
        return
    peaks = {(n, s): cost(n, s, options.classes, options.size) for n in names for s in SIDES}
    print(
        f"C = {options.classes}, N = {options.size}, D = {DIM}, torch {torch.__version__}, pytorch-metric-learning"
        f" {library.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores\n"
    )
    print("| loss | side | s | MiB added | without the gradient of vectors |\n|---|---|---:|---:|---:|")
    for name in names:
        seconds = medians(name, options.classes, options.size, options.rounds)
        gradient = options.classes * DIM * 4 / 2**20
        ours = peaks[name, "ours"]
        for side in SIDES:
            found = peaks[name, side]
            if isinstance(found, str) or isinstance(ours, str):
                print(f"| {name} | {side} | {seconds[side]:.2f} | {found} | |", flush=True)
                continue
            ratio = f"{seconds[side] / seconds['ours']:.1f}x"
            more, beyond = found[1] / ours[1], (found[1] - gradient) / max(1.0, ours[1] - gradient)
            print(
                f"| {name} | {side} | {seconds[side]:.2f} ({ratio}) | {found[1]:.0f} ({more:.1f}x) |"
                f" {found[1] - gradient:.0f} ({beyond:.1f}x) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
