"""Time and memory of errors over all pairs against the plain way, a sort of all scores, in one run.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/verification.py                 2,000 to 16,000 items, minutes
    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/verification.py --sizes 4000 --rounds 5

Both sides have the same unit vectors and find FNMR at FMR 1e-2, 1e-3 and 1e-4, and the EER. The plain way computes the
matrix of scores, takes the pairs of either kind out of it and sorts them. Ours counts bits in two sweeps of tiles. The
third column is all of ``verify``, with classes, OPIS and the curve, which the plain side has not.

Each call has a process forked for it alone, sides in turn, after a small call that loads the libraries. Shown are the
median of its seconds of processor time, on one thread, which a busy machine does not distort, and the largest peak of
resident memory that it adds. Values must agree within two genuine pairs,
for scores of other shapes of products differ by rounding.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fresh import cost_in_fresh_process
from numpy.typing import NDArray
from retrieval import batch

RATES = (1e-2, 1e-3, 1e-4)
LIMIT_SECONDS, LIMIT_GIB = 900, 16
SECONDS = "cpu_seconds"

Batch = tuple[NDArray[np.float32], NDArray[np.int64]]


def plain(z_ND: NDArray[np.float32], label_N: NDArray[np.int64]) -> dict[str, float]:
    """The errors from sorted scores of all pairs."""
    score_NN = z_ND @ z_ND.T
    upper_NN = np.triu(np.ones(score_NN.shape, bool), 1)
    same_NN = label_N[:, None] == label_N
    genuine = np.sort(score_NN[upper_NN & same_NN])
    impostors = np.sort(score_NN[upper_NN & ~same_NN])
    found = {}
    for rate in RATES:
        theta = impostors[len(impostors) - 1 - int(rate * len(impostors) + 1e-9)]
        found[f"{rate:g}"] = float(np.searchsorted(genuine, theta, "right")) / len(genuine)
    theta = np.concatenate([genuine, impostors])
    fmr = 1 - np.searchsorted(impostors, theta, "left") / len(impostors)
    fnmr = np.searchsorted(genuine, theta, "left") / len(genuine)
    best = np.argmin(np.abs(fmr - fnmr))
    return {**found, "eer": float(fmr[best] + fnmr[best]) / 2}


def ours(z_ND: NDArray[np.float32], label_N: NDArray[np.int64]) -> dict[str, float]:
    """The same by two sweeps."""
    from dmlstudy.retrieval.pairs import OrderStatistics, Pairs

    pairs = Pairs(z_ND, label_N)
    found = OrderStatistics(pairs, RATES, with_equal_errors=True)
    assert found.equal_errors is not None
    rejected = {f"{rate:g}": 1 - cut.num_genuine / pairs.num_genuine for rate, cut in found.cuts.items()}
    return {**rejected, "eer": found.equal_errors}


def whole(z_ND: NDArray[np.float32], label_N: NDArray[np.int64]) -> dict[str, float]:
    """All metrics of verification, by three sweeps."""
    from dmlstudy.retrieval import Pairs, verify

    return verify(Pairs(z_ND, label_N), {1e-3: 0.6}).metrics


SIDES = {"plain": plain, "ours": ours, "whole": whole}


def prepare(side: str, n: int, dim: int, per_class: int, answer: str) -> Callable[[], None]:
    """The measured call, which writes its values to a file."""
    SIDES[side](*batch(400, 16, per_class))
    z_ND, label_N = batch(n, dim, per_class)

    def call() -> None:
        started = time.process_time()
        values = SIDES[side](z_ND, label_N)
        Path(answer).write_text(json.dumps({**values, SECONDS: time.process_time() - started}))

    return call


def row(n: int, dim: int, per_class: int, rounds: int) -> list[str]:
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    peaks: dict[str, list[float]] = {side: [] for side in SIDES}
    values: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        answer = str(Path(folder, "values.json"))
        for number in range(rounds):
            for side in list(SIDES)[:: 1 if number % 2 == 0 else -1]:
                found = cost_in_fresh_process(
                    functools.partial(prepare, side, n, dim, per_class, answer),
                    most_seconds=LIMIT_SECONDS,
                    most_gib=LIMIT_GIB,
                )
                if isinstance(found, str):
                    raise SystemExit(f"{side}, N={n}, D={dim}: {found}")
                peaks[side].append(found[1])
                values[side] = json.loads(Path(answer).read_text())
                seconds[side].append(values[side].pop(SECONDS))
    num_genuine = n // per_class * per_class * (per_class - 1) / 2
    apart = max(abs(values["plain"][name] - values["ours"][name]) for name in values["plain"])
    if apart > 2 / num_genuine:
        raise SystemExit(f"N={n}, D={dim}: {values}: nothing is compared")
    median = {side: statistics.median(own) for side, own in seconds.items()}
    return [
        f"{n:,}",
        str(dim),
        f"{n * (n - 1) // 2 / 1e6:,.0f}",
        f"{median['ours']:.2f}",
        f"{median['plain']:.2f}",
        f"{median['plain'] / median['ours']:.1f}x",
        f"{median['whole']:.2f}",
        f"{max(peaks['ours']):,.0f}",
        f"{max(peaks['plain']):,.0f}",
        f"{max(peaks['whole']):,.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000, 4000, 8000, 16000])
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-class", type=int, default=10)
    asked = parser.parse_args()
    titles = ["items", "D", "million pairs", "CPU s", "plain CPU s", "faster", "all metrics CPU s"]
    titles += ["MiB added", "plain MiB", "all metrics MiB"]
    print(f"| {' | '.join(titles)} |\n|{'---:|' * len(titles)}", flush=True)
    for n in asked.sizes:
        for dim in asked.dims:
            print(f"| {' | '.join(row(n, dim, asked.per_class, asked.rounds))} |", flush=True)


if __name__ == "__main__":
    main()
