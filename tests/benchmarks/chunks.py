"""Time and memory of a training step in chunks (``batch.chunk``) beside the plain step, of one process.

    .venv/bin/python tests/benchmarks/chunks.py                    resnet18 on images of 64 x 64
    .venv/bin/python tests/benchmarks/chunks.py --chunk 32 --pairs 9 --no-memory

The step is a trial's own: gradient, then Adam; frozen batch norm, contrastive loss, 4 images per class, D = 128. Each
side has a process of its own. For the time the two take turns, step by step, and ratios are of the two steps of a
turn, so that what else the machine does falls on both; each step's processor time is told too, which feels it less.

Memory is what one step adds to the resident memory of a process forked for it, Adam's state and gradients included,
after a step of 8 images. It is taken of the plain step at the small batch and of chunks at the large one.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from fresh import FORK, Found, cost_in_fresh_process
from training_step import DIM, training_step

FLOAT32_BYTES, MIB = 4, 2**20


def prepare(backbone: str, side: int, size: int, chunk: int | None, threads: int) -> Callable[[], None]:
    """A training step; what libraries allocate at their first call is behind."""
    torch.set_num_threads(threads)
    training_step(backbone, side, 8, chunk=chunk and 4)()
    return training_step(backbone, side, size, chunk=chunk)


def serve(pipe: Connection, prepare_step: Callable[[], Callable[[], None]]) -> None:
    """A step for each word that comes, answered by its wall time and its processor time in seconds."""
    call = prepare_step()
    call()
    while True:
        pipe.send("ready")
        try:
            pipe.recv()
        except EOFError:
            return
        wall, processor = time.perf_counter(), time.process_time()
        call()
        pipe.send((time.perf_counter() - wall, time.process_time() - processor))


class Side:
    """One side of the comparison, in a process of its own."""

    def __init__(self, prepare_step: Callable[[], Callable[[], None]]) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(theirs, prepare_step), daemon=True)
        self.process.start()
        theirs.close()
        self.wait()

    def wait(self) -> None:
        assert self.pipe.recv() == "ready"

    def seconds(self) -> tuple[float, float]:
        """Wall time and processor time of a step."""
        self.pipe.send("go")
        wall, processor = self.pipe.recv()
        self.wait()
        return wall, processor

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def told_time(options: argparse.Namespace) -> None:
    plain, chunked = (
        Side(
            functools.partial(prepare, options.backbone, options.side, options.batch, chunk, options.threads)
        )
        for chunk in (None, options.chunk)
    )
    turns = []
    for number in range(options.pairs):
        if number % 2:
            found = plain.seconds(), chunked.seconds()
        else:
            found = tuple(reversed((chunked.seconds(), plain.seconds())))
        turns.append(found)
    plain.close()
    chunked.close()
    print("| | plain s | in chunks s | ratio, median | ratios |")
    print("|---|---:|---:|---:|---|")
    for row, kind in enumerate(("wall", "processor")):
        ratios = sorted(b[row] / a[row] for a, b in turns)
        medians = [statistics.median(side[row] for side in sides) for sides in zip(*turns, strict=True)]
        print(
            f"| {kind} | {medians[0]:.2f} | {medians[1]:.2f} | {statistics.median(ratios):.2f}"
            f" | {' '.join(f'{ratio:.2f}' for ratio in ratios)} |",
            flush=True,
        )


def told_memory(options: argparse.Namespace) -> None:
    print("\n| step | MiB |")
    print("|---|---:|")
    for size, chunk in ((options.batch, None), (options.large, options.chunk)):
        step = functools.partial(prepare, options.backbone, options.side, size, chunk, options.threads)
        found: Found = cost_in_fresh_process(step, most_seconds=600, most_gib=64)
        name = f"{size} images" + (f" in chunks of {chunk}" if chunk else ", plain")
        print(f"| {name} | {found if isinstance(found, str) else f'{found[1]:.0f}'} |", flush=True)
    print(f"| embeddings of {options.large} images | {options.large * DIM * FLOAT32_BYTES / MIB:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--side", type=int, default=64, help="pixels of an image's side")
    parser.add_argument("--batch", type=int, default=256, metavar="N")
    parser.add_argument("--large", type=int, default=2048, metavar="N")
    parser.add_argument("--chunk", type=int, default=64, metavar="C")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args()
    print(
        f"{options.backbone}, {options.side} x {options.side}, N = {options.batch}, chunks of {options.chunk},"
        f" {options.threads} threads, torch {torch.__version__}\n"
    )
    if not options.no_time:
        told_time(options)
    if not options.no_memory:
        told_memory(options)


if __name__ == "__main__":
    main()
