"""Time and memory of a training step that recomputes activations (``training.checkpointing``) beside the plain step.

    .venv/bin/python tests/benchmarks/checkpointing.py             resnet18, resnet50 and a ViT
    .venv/bin/python tests/benchmarks/checkpointing.py --network resnet50 --image-size 224 --batch 16

The step is a trial's own: gradient, then Adam; frozen batch norm, contrastive loss, 4 images per class, D = 128.

For the time one process holds both steps, on one thread, and the two take turns; ratios are of the two steps of a
turn. Times are of the processor, not of the clock, so that what else the machine does hardly counts.

Memory is what one step adds to the resident memory of a process forked for it, Adam's state and gradients included,
after a step of 8 images. It does not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from fresh import FORK, cost_in_fresh_process
from training_step import PER_CLASS, training_step

PLAIN, RECOMPUTED = False, True


class Case(NamedTuple):
    """A network, the side of its images in pixels, and how many are in a batch."""

    network: str
    image_size: int
    batch: int


CASES = (
    Case("resnet18", 64, 32),
    Case("resnet18", 128, 32),
    Case("resnet50", 224, 8),
    Case("timm:vit_small_patch16_224", 224, 8),
)
"""The rows of the table where no network is named."""


def prepare(case: Case, is_recomputed: bool) -> Callable[[], None]:
    """A training step; what libraries allocate at their first call is behind."""
    torch.set_num_threads(1)
    training_step(case.network, case.image_size, 8, is_recomputed=is_recomputed)()
    return training_step(*case, is_recomputed=is_recomputed)


def take_turns(pipe: Connection, case: Case, turns: int) -> None:
    """Send of each turn the processor time of the plain step and of the recomputing one; the first turn is not sent."""
    steps = [prepare(case, which) for which in (PLAIN, RECOMPUTED)]
    for number in range(turns + 1):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            started = time.process_time()
            steps[which]()
            seconds[which] = time.process_time() - started
        if number:
            pipe.send(seconds)


def processor_seconds(case: Case, turns: int) -> list[list[float]]:
    """The same, of a process of their own, for this one may not compute before it forks."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=take_turns, args=(theirs, case, turns), daemon=True)
    process.start()
    theirs.close()
    found = [ours.recv() for _ in range(turns)]
    process.join()
    return found


def mebibytes(case: Case, is_recomputed: bool) -> float:
    found = cost_in_fresh_process(
        functools.partial(prepare, case, is_recomputed), most_seconds=600, most_gib=64
    )
    if isinstance(found, str):
        raise SystemExit(f"{case.network}, {case.image_size} x {case.image_size}: {found}")
    return found[1]


def row(case: Case, turns: int) -> str:
    plain, recomputed = (mebibytes(case, which) for which in (PLAIN, RECOMPUTED))
    found = processor_seconds(case, turns)
    before, after = (statistics.median(seconds) for seconds in zip(*found, strict=True))
    ratios = sorted(b / a for a, b in found)
    return (
        f"| {case.network} | {case.image_size} | {case.batch} | {before:.2f} | {after:.2f}"
        f" | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        f" | {plain:.0f} | {recomputed:.0f} | {recomputed / plain:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", help="this one alone; default: a table of several")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of an image's side")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="a multiple of 4")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    if options.batch < PER_CLASS or options.batch % PER_CLASS:
        parser.error(f"--batch: a multiple of {PER_CLASS}, the images per class")
    own = Case(options.network, options.image_size, options.batch)
    print(f"one thread, {options.turns} turns, torch {torch.__version__}\n")
    print(
        "| network | pixels | N | plain s | recomputing s | ratio (range) | plain MiB | recomputing MiB | ratio |"
    )
    print("|---|---:|---:|---:|---:|---|---:|---:|---:|")
    for case in (own,) if options.network else CASES:
        print(row(case, options.turns), flush=True)


if __name__ == "__main__":
    main()
