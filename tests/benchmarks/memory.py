"""Memory and time of one rank's losses at a global batch of N = 16,384, for 1, 2 and 4 ranks.

    .venv/bin/python tests/benchmarks/memory.py                    every pair and triplet loss, about 10 minutes
    .venv/bin/python tests/benchmarks/memory.py triplet --size 4096

A rank of W has N / W anchors and N references (4 images per class, D = 128, float32). Shown is what a forward and
backward adds to the resident memory of its process, and its seconds; the (B + M) x D gradients are included.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from torch.nn import functional

from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Embeddings

DIM, PER_CLASS = 128, 4
LOSSES = [
    name
    for name in catalogue.CATALOGUE
    if name not in ("proxy_nca", "proxy_nca_pp", "proxy_anchor", "soft_triple", "arcface", "cosface")
]
LIMIT_MIB = 512


def measure(name: str, n: int, num_anchors: int) -> tuple[float, float]:
    """(MiB added, seconds) of the first ``num_anchors`` anchors against all n references."""
    warm_up(name)
    generator = torch.Generator().manual_seed(0)
    y_N = (torch.arange(n) // PER_CLASS)[torch.randperm(n, generator=generator)]
    centres = torch.randn(n // PER_CLASS, DIM, generator=generator)
    z_ND = functional.normalize(centres[y_N] + torch.randn(n, DIM, generator=generator))
    omega_ND = torch.rand(n, DIM, generator=generator) + 0.5
    references = Embeddings(z_ND.requires_grad_(), y_N, torch.arange(n), omega_ND.requires_grad_())
    loss = built(name, n // PER_CLASS)
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    started = time.perf_counter()
    total, count = loss(references.rows(slice(num_anchors)), references)
    (total / count.clamp(min=1)).backward()
    return resident("VmHWM") - before, time.perf_counter() - started


def warm_up(name: str) -> None:
    """What libraries allocate at their first call is not the loss's."""
    z_ND = functional.normalize(torch.randn(64, DIM)).requires_grad_()
    omega_ND = torch.ones(64, DIM).requires_grad_()
    batch = Embeddings(z_ND, torch.arange(64) // PER_CLASS, torch.arange(64), omega_ND)
    built(name, 16)(batch).total.backward()


def built(name: str, num_classes: int) -> torch.nn.Module:
    """A loss by its name, or a regulariser beside the contrastive loss."""
    if name in catalogue.REGULARIZERS:
        return catalogue.build("contrastive", {}, regularizer=(name, {}), num_classes=num_classes, dim=DIM)
    return catalogue.build(name, {}, num_classes=num_classes, dim=DIM)


def resident(field: str) -> float:
    """A field of this process's status in MiB."""
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(field)]
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="default: every pair and triplet loss, and the regularisers")
    parser.add_argument("--size", type=int, default=16384, metavar="N")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names = options.names or [*LOSSES, *catalogue.REGULARIZERS]
    print(f"N = {options.size}, D = {DIM}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| loss | MiB W=1 | W=2 | W=4 | s W=1 | W=2 | W=4 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in names:
        found = [measure(name, options.size, options.size // ranks) for ranks in (1, 2, 4)]
        mib = " | ".join(f"{added:.0f}" for added, _ in found)
        seconds = " | ".join(f"{took:.2f}" for _, took in found)
        print(f"| {name} | {mib} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
