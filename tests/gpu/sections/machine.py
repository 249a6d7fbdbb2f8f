"""Ceilings of the card: products by precision, the product of a loss's tile, copies."""

from __future__ import annotations

import numpy as np
import torch
from bench import Bench

from dmlstudy.losses.products import PRODUCTS

TERA = 1e12


def measure(bench: Bench) -> None:
    size = bench.sized(128, 8192)
    a = torch.randn(size, size, device=bench.device)
    for name, product in PRODUCTS.items():
        seconds = bench.seconds(lambda product=product: product(a, a))
        bench.row(f"product of {size} x {size}, {name}", 2 * size**3 / seconds / TERA, "TFLOP/s")
    half = a.bfloat16()
    bench.row("the same, bfloat16 alone", 2 * size**3 / bench.seconds(lambda: half @ half) / TERA, "TFLOP/s")
    _copied(bench)

    num_rows, num_columns = bench.sized((8, 512), (204, 65536))
    for dim in (512, 514, 520):
        left, right = (torch.randn(num, dim, device=bench.device) for num in (num_rows, num_columns))
        seconds = bench.seconds(lambda left=left, right=right: left @ right.T)
        flop = 2 * num_rows * num_columns * dim
        bench.row(f"tile of {num_rows} x {num_columns} x {dim}", flop / seconds / TERA, "TFLOP/s")

    images = torch.from_numpy(np.zeros((bench.sized(4, 128), 224, 224, 3), np.uint8))
    bench.row("a batch of images to the device", 1e3 * bench.seconds(lambda: images.to(bench.device)), "ms")
    if not bench.is_small:
        pinned = images.pin_memory()
        seconds = bench.seconds(lambda: pinned.to(bench.device, non_blocking=True))
        bench.row("the same from pinned memory", 1e3 * seconds, "ms")


def _copied(bench: Bench) -> None:
    there = torch.empty(bench.sized(1 << 16, 1 << 29), device=bench.device)
    other = torch.empty_like(there)
    seconds = bench.seconds(lambda: other.copy_(there))
    bench.row("memory read and written", 2 * there.nbytes / seconds / TERA, "TB/s")
