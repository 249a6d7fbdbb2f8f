"""Pictures per second and core: our loader without and with a canvas, and torch's DataLoader, on the same JPEGs.

    nice -n 5 .venv/bin/python tests/benchmarks/loader.py [--pictures 200] [--rounds 7]

All cut a random box, resize it to 224 x 224, and mirror every other picture, in batches of 80 of uint8. Ours cuts from
the picture with its shorter side at 256, torch's DataLoader from the whole one, as its users do, with torchvision's
transforms v2 on Pillow's pictures or on tensors. One thread or one worker each; a round takes all in turn.

A rate is of pictures per second of processor time, that of worker processes included: so other load on the machine
counts little. Ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, SIDE, RESIZE_TO, BATCH = 500, 375, 224, 256, 80
PLAIN, CANVAS = "dmlstudy", "dmlstudy, `canvas: disk`"
PILLOW, TENSORS = "DataLoader, transforms v2 on Pillow's pictures", "DataLoader, transforms v2 on tensors"
SMALLEST_SHARE = 0.08
"""Of a picture's area, the least that a box has: torchvision's default."""


def write_pictures(folder: Path, num_pictures: int) -> None:
    """Write smooth pictures with some noise, as JPEGs of about 65 kB: half of them for training."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(2 * num_pictures):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=np.float32)
        noisy = smooth + rng.normal(0, 12, smooth.shape).astype(np.float32)
        path = folder / f"class{number * 4 // (2 * num_pictures)}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=85)


class Decoded:
    """A data set of torch's: pictures by number, after a transform."""

    def __init__(
        self, paths: list[str], decode: Callable[[str], Any], transform: Callable[[Any], Any]
    ) -> None:
        self.paths, self.decode, self.transform = paths, decode, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Any:
        return self.transform(self.decode(self.paths[number]))


def by_pillow(path: str) -> Any:
    from PIL import Image

    with Image.open(path) as picture:
        return picture.convert("RGB")


def by_torchvision(path: str) -> Any:
    from torchvision.io import ImageReadMode, decode_image

    return decode_image(path, ImageReadMode.RGB)


def data_loader(paths: list[str], decode: Callable[[str], Any]) -> Any:
    """A DataLoader with one worker that lives through all epochs."""
    from torch.utils.data import DataLoader
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(SIDE, scale=(SMALLEST_SHARE, 1)), v2.RandomHorizontalFlip()]
    transform = v2.Compose([*steps, *([v2.PILToTensor()] if decode is by_pillow else [])])
    return DataLoader(
        Decoded(paths, decode, transform), BATCH, shuffle=True, num_workers=1, persistent_workers=True
    )


def processor_seconds() -> float:
    """Of this process and those that it has started."""
    import psutil

    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=200, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    import numpy as np
    import torch

    from dmlstudy import data

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        pictures = Path(folder) / "pictures"
        pictures.mkdir()
        write_pictures(pictures, options.pictures)
        sizes = [path.stat().st_size for path in pictures.rglob("*.jpg")]
        plain = data.load("image_folder", str(pictures), SIDE, RESIZE_TO).development
        kept = data.load("image_folder", str(pictures), SIDE, RESIZE_TO, canvas="disk").development
        assert isinstance(plain, data.LazyImages)
        started = processor_seconds()
        data.prepare(kept)
        making = processor_seconds() - started
        paths = [plain.pictures.place(int(row)) for row in plain.row_N]
        augmentation = data.Augmentation("random_resized", flip=0.5, scale_min=SMALLEST_SHARE)
        batches = np.array_split(np.arange(len(plain)), -(-len(plain) // BATCH))
        numbers = iter(range(10**9))

        def ours(images: Any) -> Callable[[], Iterable[Any]]:
            loader = data.Loader(images, augmentation, 0, threads=1)
            return lambda: loader.epoch(batches, next(numbers))

        torchs = {PILLOW: data_loader(paths, by_pillow), TENSORS: data_loader(paths, by_torchvision)}
        sides: dict[str, Callable[[], Iterable[Any]]] = {PLAIN: ours(plain), CANVAS: ours(kept)}
        sides |= {name: loader.__iter__ for name, loader in torchs.items()}
        one, other = (
            data.Loader(images, augmentation, 0, threads=1).epoch(batches, 5) for images in (plain, kept)
        )
        for images_BHWC, same_BHWC in zip(one, other, strict=True):
            np.testing.assert_array_equal(images_BHWC, same_BHWC)
        rates = measured(sides, len(plain), options.epochs, options.rounds)
    print(f"{len(plain)} JPEGs of {WIDTH}x{HEIGHT}, {statistics.fmean(sizes) / 1000:.0f} kB; "
          f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds\n")  # fmt: skip
    print("| | pictures/s per core | least, most | canvas beside it |")
    print("|---|---:|---:|---:|")
    for name, of in rates.items():
        ratio = statistics.median(a / b for a, b in zip(rates[CANVAS], of, strict=True))
        print(f"| {name} | {statistics.median(of):.0f} | {min(of):.0f}, {max(of):.0f} | {ratio:.1f}x |")
    print(f"\nmaking the canvas: {len(plain) / making:.0f} pictures/s per core, once")


def measured(
    sides: dict[str, Callable[[], Iterable[Any]]], num_pictures: int, epochs: int, rounds: int
) -> dict[str, list[float]]:
    """Pictures per second of processor time, of each side in each round, after one epoch that does not count."""
    for epoch in sides.values():
        assert sum(len(batch) for batch in epoch()) == num_pictures
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, epoch in sides.items():
            time.sleep(0.3)  # a worker that reads ahead comes to its end
            started = processor_seconds()
            for _ in range(epochs):
                for _ in epoch():
                    pass
            seconds = processor_seconds() - started
            if not seconds:
                sys.exit(f"{name}: too short for the system's clock of processor time; raise --epochs")
            rates[name].append(epochs * num_pictures / seconds)
    return rates


if __name__ == "__main__":
    sys.exit(main())
