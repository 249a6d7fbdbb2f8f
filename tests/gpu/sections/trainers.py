"""A trainer of the project on made images: ResNet-50 on a GPU, a small network on a CPU."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from bench import Bench
from PIL import Image

from dmlstudy import records
from dmlstudy.data import ImageSet
from dmlstudy.data.images import Fit
from dmlstudy.data.pictures import LazyImages
from dmlstudy.training.embedder_trainer import EmbedderTrainer, HeldOut

PER_CLASS = 4
NUM_STORED = 64
"""Different pictures; more are the same ones again."""


def side(bench: Bench) -> int:
    return bench.sized(16, 224)


def batch_size(bench: Bench) -> int:
    return bench.sized(8, 128)


def config(
    bench: Bench, *, crop: str = "none", num_batches: int = 20, **training: Any
) -> records.TrialConfig:
    """A trial of contrastive loss; all that is not given is as it is in a study file without it."""
    size = side(bench)
    return records.TrialConfig(
        family="measured",
        data=records.DataConfig(
            name="image_folder", image_size=size, resize_to=None if crop == "none" else size * 8 // 7
        ),
        embedder=records.EmbedderConfig(
            backbone=bench.sized("small_conv", "resnet50"), dim=bench.sized(16, 128), width=8
        ),
        augmentation=records.AugmentationConfig(crop=crop, flip=0.0 if crop == "none" else 0.5),
        batch=records.BatchConfig(
            classes=batch_size(bench) // PER_CLASS,
            images_per_class=PER_CLASS,
            per_epoch=bench.sized(2, num_batches),
        ),
        training=records.TrainingConfig(epochs=9, lr=1e-4, **training),
        loss=records.LossConfig(name="contrastive", params={}),
        recall_at=(1,),
    )


def pixels(bench: Bench, num: int | None = None) -> ImageSet:
    """Images in memory."""
    num = num or 2 * batch_size(bench)
    shape = (num, side(bench), side(bench), 3)
    images_NHWC = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    labels_N = np.arange(num) // PER_CLASS
    return ImageSet(images_NHWC, labels_N, tuple(map(str, range(labels_N[-1] + 1))))


def trainer(bench: Bench, images: ImageSet | LazyImages, config: records.TrialConfig) -> EmbedderTrainer:
    return EmbedderTrainer(config, images, bench.device, stream=0, held_out=HeldOut(images))


class Encoded:
    """JPEG pictures in memory, as a data set's files."""

    def __init__(self, num: int, width: int, height: int) -> None:
        self._num = num
        self._stored = [_jpeg(seed, width, height) for seed in range(min(num, NUM_STORED))]

    def __len__(self) -> int:
        return self._num

    def place(self, row: int) -> str:
        return f"picture {row}"

    def encoded(self, row: int) -> bytes:
        return self._stored[row % len(self._stored)]


def jpegs(bench: Bench) -> LazyImages:
    """Pictures of a usual size, 2,048 of them on a GPU."""
    num, width, height = bench.sized((32, 50, 40), (2048, 500, 375))
    labels_N = np.arange(num) // PER_CLASS
    size = side(bench)
    names = tuple(map(str, range(labels_N[-1] + 1)))
    fit = Fit(size, size * 8 // 7)
    return LazyImages(Encoded(num, width, height), np.arange(num), labels_N, names, fit, (size, size, 3))


def _jpeg(seed: int, width: int, height: int) -> bytes:
    """A picture of smooth blots and some noise, which has about as many bytes as a photograph."""
    rng = np.random.default_rng(seed)
    blots = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
    smooth = np.asarray(blots.resize((width, height), Image.Resampling.BILINEAR), np.int16)
    noisy = np.clip(smooth + rng.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8)
    stored = io.BytesIO()
    Image.fromarray(noisy).save(stored, "JPEG", quality=90)
    return stored.getvalue()
