"""Training of ResNet-50 from memory and from JPEG bytes, beside a bare loop of forward, backward and optimiser."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from bench import Bench

from dmlstudy.metric_names import IMAGES_PER_SECOND
from dmlstudy.training.embedder_trainer import EmbedderTrainer
from sections.trainers import batch_size, config, jpegs, pixels, trainer

BARE = "x bare"
MOST = 1.10

COMPILING_S = 60
"""The most that compiling may take, which is begun last."""

FAST = {"precision": "bf16", "channels_last": True}
HOW: dict[str, dict[str, Any]] = {
    "bf16, channels last": FAST,
    "bf16, channels last, repeatable": FAST | {"deterministic": "always"},
    "float32": {},
    "fp16, channels last": {"precision": "fp16", "channels_last": True},
}
ON_CPU: dict[str, dict[str, Any]] = {"float32": {}}
"""Few CPUs have bf16."""


def measure(bench: Bench) -> None:
    images = pixels(bench)
    how = bench.sized(ON_CPU, HOW)
    fastest, fast = next(iter(how.items()))
    bare_s = _bare(bench, fast)
    bench.row(f"bare loop, {fastest}, {batch_size(bench)} images", 1e3 * bare_s, "ms")
    for name, own in how.items():
        if bench.left() < 20:
            bench.row(f"from memory, {name}", 0, "ms", problem="out of time")
            continue
        step_s = _trained(bench, f"from memory, {name}", trainer(bench, images, config(bench, **own)))
        if own is fast:
            bench.row(f"from memory, {name}", step_s / bare_s, BARE, MOST)
    step_s = _trained(
        bench,
        f"from JPEG, {fastest}",
        trainer(bench, jpegs(bench), config(bench, crop="random_resized", **fast)),
    )
    bench.row(f"from JPEG, {fastest}", step_s / bare_s, BARE, MOST)
    if bench.left() > COMPILING_S and not bench.is_small:
        compiled = trainer(bench, images, config(bench, **fast, compile=True))
        step_s = _trained(bench, f"from memory, {fastest}, compiled", compiled)
        bench.row(f"from memory, {fastest}, compiled", step_s / bare_s, BARE, MOST)


def _trained(bench: Bench, what: str, own: EmbedderTrainer) -> float:
    """Tell of an epoch after the first one; its seconds per step."""
    own.train_epoch(0)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    with bench.utilisation() as percents:
        told = own.train_epoch(1)
    gib = torch.cuda.max_memory_allocated(bench.device) / 2**30 if bench.device.type == "cuda" else 0.0
    with bench.host_waits() as waits:
        own.train_epoch(2)
    step_s = batch_size(bench) / told[IMAGES_PER_SECOND]
    num_steps = len(own.batches)
    per_step = {place: round(num / num_steps, 2) for place, num in waits.most_common()}
    busy = statistics.fmean(percents) if percents else 0.0
    where = " ".join(f"{place}x{num:g}" for place, num in list(per_step.items())[:6])
    bench.row(what, 1e3 * step_s, "ms", note=f"GPU {busy:.0f}% busy, {gib:.1f} GiB", details=told)
    bench.row(
        f"{what}: waits of the host per step",
        sum(waits.values()) / num_steps,
        "",
        note=where,
        details={"waits": per_step},
    )
    if "loader_images_per_second" in told:
        note = f"waited for {100 * told['loader_wait_share']:.0f}% of the time"
        bench.row(f"{what}: the loader alone", told["loader_images_per_second"], "images/s", note=note)
    return step_s


def _bare(bench: Bench, how: dict[str, Any]) -> float:
    """Seconds of a step without loss, loader and waits, on images that are there."""
    images = pixels(bench)
    own = trainer(bench, images, config(bench, **how))
    own.embedder.train()
    batch = torch.from_numpy(images.images_NHWC[: batch_size(bench)]).to(bench.device)

    def step() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16, enabled="precision" in how):
            z_ND, _ = own.embedder.embed_with_structure(batch)
        z_ND.square().sum().backward()
        own.optimizer.step()
        own.optimizer.zero_grad(set_to_none=True)

    return bench.seconds(step, bench.sized(1, 20), bench.sized(1, 5))
