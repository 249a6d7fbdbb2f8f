"""One training step on random images, which `chunks.py` and `checkpointing.py` measure."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dmlstudy import embedders
from dmlstudy.distributed import GlobalLabels
from dmlstudy.embedders.recomputation import recompute_blocks
from dmlstudy.losses import catalogue
from dmlstudy.losses.interface import Labels
from dmlstudy.training.gradients import gradients_of
from dmlstudy.training.step import Step

DIM, PER_CLASS = 128, 4


def training_step(
    backbone: str, side: int, size: int, *, chunk: int | None = None, is_recomputed: bool = False
) -> Callable[[], None]:
    """A step of ``size`` images of ``side`` pixels, contrastive, on the CPU; activations may be recomputed."""
    embedder = embedders.build(backbone, DIM, in_channels=3, image_size=side, seed=0)
    embedder.train()
    if is_recomputed:
        recompute_blocks(embedder.backbone)
    step = Step(embedder, catalogue.build("contrastive", {}, num_classes=size // PER_CLASS, dim=DIM), None)
    gradients = gradients_of(step, chunk)
    optimizer = torch.optim.Adam(step.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (size, side, side, 3), dtype=torch.uint8, generator=generator)
    labels = Labels(torch.arange(size) // PER_CLASS, torch.arange(size))
    known = GlobalLabels(labels, [size], torch.device("cpu"))

    def call() -> None:
        optimizer.zero_grad(set_to_none=True)
        gradients(images, known)
        optimizer.step()

    return call
