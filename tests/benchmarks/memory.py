"""Memory and time of one rank's losses at a global batch of N = 16,384, for 1, 2 and 4 ranks.

    .venv/bin/python tests/benchmarks/memory.py                    every pair and triplet loss and regulariser
    .venv/bin/python tests/benchmarks/memory.py triplet --size 4096 --ranks 1 8

A rank of W has N / W anchors and N references (4 images per class, D = 128, float32). Shown is what a forward and
backward adds to the resident memory of a process forked for it alone, and its seconds; the (N / W + N) x D
gradients are included. A regulariser stands beside the contrastive loss; its terms are for all rows of the batch,
of which a rank takes its share.
"""

from __future__ import annotations

import argparse
import functools
import json
import warnings
from collections.abc import Callable

import torch
from fresh import Found, cost_in_fresh_process
from torch import Tensor
from torch.nn import functional

from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.losses.proxies import ProxyLoss
from dmlstudy.records import Scalar

DIM, PER_CLASS = 128, 4
PROXIES = {name for name in catalogue.CATALOGUE if issubclass(catalogue.kind_of(name), ProxyLoss)}
PARAMS: dict[str, dict[str, Scalar]] = {"potential_field": {"proxies": 2}}
"""Parameters that are not the defaults: proxies are pairs beside those of the batch."""
NAMES = [name for name in catalogue.CATALOGUE | catalogue.REGULARIZERS if name not in PROXIES]


class OneOf:
    """A world as rank 0 of several sees it, without the others: its share, and its own part of sums."""

    def __init__(self, num_ranks: int, num_rows: int) -> None:
        self.size = num_ranks
        self.num_rows = num_rows

    def gather(self, x_B: Tensor) -> Tensor:
        return torch.cat([x_B] * self.size)[: self.num_rows]

    def sum(self, x: Tensor) -> Tensor:
        return x * self.size

    def max(self, x: Tensor) -> Tensor:
        return x

    def total(self, n: int) -> int:
        return self.num_rows

    def share(self, n: int) -> slice:
        return slice(0, n // self.size)


def prepare(name: str, n: int, num_ranks: int) -> Callable[[], None]:
    """A forward and backward of rank 0; what libraries allocate at their first call is behind."""
    step(name, 64, 1)()
    return step(name, n, num_ranks)


def step(name: str, n: int, num_ranks: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    y_N = (torch.arange(n) // PER_CLASS)[torch.randperm(n, generator=generator)]
    centres = torch.randn(n // PER_CLASS, DIM, generator=generator)
    z_ND = functional.normalize(centres[y_N] + torch.randn(n, DIM, generator=generator))
    omega_ND = torch.rand(n, DIM, generator=generator) + 0.5
    references = Embeddings(
        z_ND.requires_grad_(), y_N, torch.arange(n), omega_ND.requires_grad_(), drift_N=torch.rand(n)
    )
    anchors = references.rows(slice(n // num_ranks))
    loss = build(name, n // PER_CLASS)

    def call() -> None:
        total, count = loss(anchors, references, OneOf(num_ranks, n))
        (total / count.clamp(min=1)).backward()

    return call


def build(name: str, num_classes: int) -> Loss:
    if name in catalogue.REGULARIZERS:
        return catalogue.build("contrastive", {}, regularizer=(name, {}), num_classes=num_classes, dim=DIM)
    return catalogue.build(name, PARAMS.get(name, {}), num_classes=num_classes, dim=DIM)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="default: every pair and triplet loss, and the regularisers")
    parser.add_argument("--size", type=int, default=16384, metavar="N")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="W")
    parser.add_argument("--json", action="store_true", help="one JSON object: name to MiB for each W")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names = options.names or NAMES
    if not options.json:
        print(
            f"N = {options.size}, D = {DIM}, torch {torch.__version__}, {torch.get_num_threads()} threads\n"
        )
        print("| loss | " + " | ".join(f"MiB, W={w} | s, W={w}" for w in options.ranks) + " |")
        print("|---|" + "---:|" * (2 * len(options.ranks)))
    all_found: dict[str, list[Found]] = {}
    for name in names:
        all_found[name] = [
            cost_in_fresh_process(
                functools.partial(prepare, name, options.size, ranks), most_seconds=600, most_gib=64
            )
            for ranks in options.ranks
        ]
        cells = [x if isinstance(x, str) else f"{x[1]:.0f} | {x[0]:.2f}" for x in all_found[name]]
        if not options.json:
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if options.json:
        print(json.dumps(all_found))


if __name__ == "__main__":
    main()
