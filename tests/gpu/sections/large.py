"""Losses of large batches: all pairs of 65,536 embeddings, and 4,096 anchors beside a memory of a million."""

from __future__ import annotations

import torch
from bench import Bench, unit_rows

from dmlstudy.losses import catalogue
from dmlstudy.losses.fused import fuse
from dmlstudy.losses.interface import Embeddings, Loss
from dmlstudy.records import Scalar

DIM = 512
PER_CLASS = 4

ALL_PAIRS = (
    ("multi_similarity", "float32", "", 0.394),
    ("multi_similarity", "float32", "tiles", None),
    ("multi_similarity", "float32", "compiled tiles", None),
    ("multi_similarity", "bf16x3", "", 0.080),
    ("multi_similarity", "bf16x3", "compiled tiles", None),
    ("multi_similarity", "bf16", "", None),
    ("contrastive", "float32", "", None),
    ("contrastive", "bf16x3", "", None),
    ("circle", "float32", "", None),
    ("supcon", "float32", "", None),
    ("triplet", "float32", "", None),
    ("triplet", "float32", "compiled tiles", None),
    ("proxy_anchor", "float32", "", None),
    ("norm_softmax", "float32", "", None),
)
"""Loss, precision of its products, what computes its tiles if not kernels, and the most seconds it should take."""

GIB = 2.0
"""The most that a loss should add."""


def measure(bench: Bench) -> None:
    num, dim = bench.sized(256, 65536), bench.sized(16, DIM)
    z_ND, y_N, id_N = unit_rows(num, dim, PER_CLASS, bench.device)
    z_ND.requires_grad_()
    for name, precision, how, target in ALL_PAIRS:
        own = f"{name}, {precision}" + (f", {how}" if how else "")
        if bench.left() < 25:
            bench.row(own, 0, "s", problem="out of time")
            continue
        loss = _loss(name, precision, num // PER_CLASS + 1, dim, bench, how=how)

        def both(loss: Loss = loss) -> None:
            z_ND.grad = None
            _mean(loss, Embeddings(z_ND, y_N, id_N), Embeddings(z_ND, y_N, id_N)).backward()

        _told(bench, f"{own}: {num} x {dim}", both, target)
    num_anchors, num_rows = bench.sized(16, 4096), bench.sized(512, 1_000_000)
    z_MD, y_M, id_M = unit_rows(num_rows, dim, PER_CLASS, bench.device)
    own_ND, rest_MD = z_MD[:num_anchors].clone().requires_grad_(), z_MD[num_anchors:]
    for precision in ("float32", "bf16x3"):
        loss = _loss("multi_similarity", precision, 2, dim, bench, memory=True)

        def beside_memory(loss: Loss = loss) -> None:
            own_ND.grad = None
            anchors = Embeddings(own_ND, y_M[:num_anchors], id_M[:num_anchors])
            rows = Embeddings(torch.cat([own_ND.detach(), rest_MD]), y_M, id_M, live_LD=own_ND)
            _mean(loss, anchors, rows).backward()

        what = f"multi_similarity, {precision}, {num_anchors} beside {num_rows}"
        _told(bench, what, beside_memory, 0.250 if precision == "float32" else None, gib=None)


def _told(bench: Bench, what: str, run, seconds: float | None, gib: float | None = GIB) -> None:  # type: ignore[no-untyped-def]
    try:
        run()  # kernels are compiled here
        bench.row(f"memory of {what}", bench.peak_gib(run), "GiB", gib)
        bench.row(what, bench.seconds(run, 2, 0), "s", seconds)
    except torch.OutOfMemoryError as error:
        bench.row(what, 0, "s", seconds, problem=f"out of memory: {error}"[:150])


def _loss(
    name: str,
    precision: str,
    num_classes: int,
    dim: int,
    bench: Bench,
    *,
    how: str = "",
    memory: bool = False,
) -> Loss:
    params: dict[str, Scalar] = {} if precision == "float32" else {"precision": precision}
    if how and catalogue.BACKEND in catalogue.parameters_of(name):
        params[catalogue.BACKEND] = "tiles"
    loss = catalogue.build(name, params, memory=memory, num_classes=num_classes, dim=dim)
    if how.startswith("compiled"):
        fuse(loss)
    return loss.to(bench.device)


def _mean(loss: Loss, anchors: Embeddings, references: Embeddings) -> torch.Tensor:
    total, count = loss(anchors, references)
    return total / count.clamp(min=1)
