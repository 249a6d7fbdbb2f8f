"""Evaluation: exact retrieval on the device, digit for digit; k-means; embedding, and its digits beside the CPU's."""

from __future__ import annotations

import time

import numpy as np
import stand_ins
import torch
from bench import Bench, unit_rows

from dmlstudy import embedders, retrieval
from dmlstudy.retrieval.device_products import DeviceProduct
from sections.trainers import config, jpegs, pixels, trainer

K = 10
TOLERANCE = 1e-3
"""The most that a saved model's embeddings may differ from its example, so that it can be pulled."""


def measure(bench: Bench) -> None:
    _retrieval(bench)
    _k_means(bench)
    _indexes(bench)
    _embedding(bench)


def _retrieval(bench: Bench) -> None:
    """A CPU's direct kernel beside the device's candidates; then the size of SOP's test classes."""
    num, dim = bench.sized((2500, 16), (20_000, 512))
    z_ND, labels_N = _embeddings(num, dim, bench)
    for device in (None, bench.device):
        _neighbours(z_ND[: num // 4], device)  # both have begun
    on_cpu, cpu_s = _neighbours(z_ND, None)
    found, device_s = _neighbours(z_ND, bench.device)
    same = all(np.array_equal(ours, theirs) for ours, theirs in zip(found, on_cpu, strict=True))
    bench.row(f"retrieval of {num} x {dim} by the CPU", cpu_s, "s")
    bench.row(
        "the same with the device", device_s, "s", problem="" if same else "its digits are not the CPU's"
    )
    num = bench.sized(2500, 60_502)
    z_ND, labels_N = _embeddings(num, dim, bench)
    started = time.perf_counter()
    retrieval.evaluate(z_ND, labels_N, device=bench.device)
    bench.row(f"evaluate of {num} x {dim} with the device", time.perf_counter() - started, "s")

    right_ME = np.column_stack([z_ND, np.full(num, -1, np.float32), np.full(num, -0.5, np.float32)])
    product = DeviceProduct(np.ascontiguousarray(right_ME), np.arange(64), bench.device)
    left_BE = np.column_stack([z_ND, np.full(num, 0.5, np.float32), np.ones(num, np.float32)])[:1024]
    floor_B = product.floor(left_BE, np.arange(len(left_BE)), 8)

    def tile() -> int:
        return sum(len(row_H) for row_H, _, _ in product.above(left_BE, floor_B + 1, np.arange(len(left_BE))))

    bench.row(f"product and floor of {len(left_BE)} queries", 1e3 * bench.seconds(tile, 5, 1), "ms")


def _embeddings(num: int, dim: int, bench: Bench) -> tuple[np.ndarray, np.ndarray]:
    z_ND, y_N, _ = unit_rows(num, dim, 5, torch.device("cpu"))
    return z_ND.numpy(), y_N.numpy()


def _neighbours(z_ND: np.ndarray, device: torch.device | None) -> tuple[list[np.ndarray], float]:
    started = time.perf_counter()
    parts = list(retrieval.in_itself(z_ND, K, device=device))
    seconds = time.perf_counter() - started
    return [
        np.concatenate([getattr(part, name) for part in parts]) for name in ("index_QK", "distance_QK")
    ], seconds


def _k_means(bench: Bench) -> None:
    if "faiss" in stand_ins.used():
        bench.row("k-means", 0, "s", note="left out: faiss is not here")
        return
    num, num_clusters = bench.sized((200, 10), (20_000, 4_000))
    z_ND, _ = _embeddings(num, bench.sized(8, 512), bench)
    for name, device in (("the CPU", None), ("the device", bench.device)):
        started = time.perf_counter()
        retrieval.k_means(z_ND, num_clusters, num_restarts=1, device=device)
        what = f"k-means by {name}, {num} items, {num_clusters} clusters, 1 restart"
        bench.row(what, time.perf_counter() - started, "s")


def _indexes(bench: Bench) -> None:
    """What a server searches: the same vectors and queries by faiss on the CPU and on the GPU."""
    if "faiss" in stand_ins.used():
        bench.row("indexes", 0, "s", note="left out: faiss is not here")
        return
    num, dim = bench.sized((1_000, 16), (200_000, 128))
    z_ND, _ = _embeddings(num, dim, bench)
    queries_QD = z_ND[: bench.sized(50, 5_000)]
    tuning = retrieval.Tuning(num_cells=bench.sized(4, 1024), code_bytes=8)
    exact_QK = None
    for kind in ("flat", "ivf", "ivf_pq"):
        for device in ("cpu", "gpu") if bench.device.type == "cuda" else ("cpu",):
            index = retrieval.EmbeddingIndex(kind, dim, model_version="m", tuning=tuning, device=device)
            started = time.perf_counter()
            index.train(z_ND).add(z_ND, np.arange(num))
            made_s = time.perf_counter() - started
            index.search(queries_QD[:8], K)  # it has begun
            started = time.perf_counter()
            found_QK, _ = index.search(queries_QD, K)
            rate = len(queries_QD) / (time.perf_counter() - started)
            exact_QK = found_QK if exact_QK is None else exact_QK
            recall = np.mean(
                [np.isin(ours, exact).mean() for ours, exact in zip(found_QK, exact_QK, strict=True)]
            )
            note = f"made in {made_s:.3g} s; {recall:.4f} of the exact {K} neighbours"
            bench.row(f"{kind} of {num} x {dim} on the {device}", rate, "queries/s", note=note)


def _embedding(bench: Bench) -> None:
    images = pixels(bench, bench.sized(16, 1024))
    own = trainer(bench, images, config(bench))
    if not bench.is_small:
        own.embed(pixels(bench, 256))
    for name, each in (("memory", images), ("JPEG", jpegs(bench))):
        started = time.perf_counter()
        own.embed(each)
        rate = len(each) / (time.perf_counter() - started)
        bench.row(f"images embedded for evaluation, float32, from {name}", rate, "images/s")
    few_NHWC = images.images_NHWC[: bench.sized(4, 16)]
    on_device = embedders.embed(own.embedder, few_NHWC, device=bench.device)
    off = np.abs(on_device - embedders.embed(own.embedder, few_NHWC, device="cpu")).max()
    bench.row("embeddings beside the CPU's", off, "of z", TOLERANCE)
