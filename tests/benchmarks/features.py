"""How many head-only trials an hour: the features of a frozen backbone kept, and computed in each epoch.

    nice -n 5 .venv/bin/python tests/benchmarks/features.py [--pictures 1000] [--epochs 10] [--rounds 3]

Trials of `resnet18` (torchvision's, random weights of one file) with its backbone frozen, on pictures of 64 x 64 made
of noise and a colour for each class: a linear head of 128 dimensions, multi-similarity, one held-out half, scored after
each epoch. Both sides run in one process with two threads, by turns: a round is one trial with features in each epoch,
the same one on an empty cache, and further ones of other learning rates, as a search gives them. The table has medians;
scores of the first two are compared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from dmlstudy import embedders
from dmlstudy.records import TrialConfig
from dmlstudy.training.trial import run_trial

SIDE, NUM_CLASSES = 64, 20


def made_pictures(folder: Path, num: int) -> None:
    """PNG pictures of noise around a colour for each class."""
    rng = np.random.default_rng(0)
    for label in range(NUM_CLASSES):
        colour = rng.integers(0, 256, 3)
        (folder / f"class{label:02}").mkdir(parents=True)
        for number in range(num // NUM_CLASSES):
            noise = rng.integers(0, 256, (SIDE, SIDE, 3))
            Image.fromarray((0.4 * colour + 0.6 * noise).astype(np.uint8)).save(
                folder / f"class{label:02}" / f"{number}.png"
            )


def trial(folder: Path, weights: Path, how: str, epochs: int, lr: float) -> TrialConfig:
    """A search trial of the head alone."""
    raw: dict[str, Any] = {
        "family": "multi_similarity",
        "data": {"name": "image_folder", "path": str(folder), "image_size": SIDE},
        "embedder": {"backbone": "resnet18", "dim": 128, "weights": str(weights)},
        "batch": {"classes": 5, "images_per_class": 16},
        "training": {"epochs": epochs, "lr": lr, "freeze_backbone_epochs": epochs, "feature_cache": how},
        "loss": {"name": "multi_similarity"},
        "num_folds": 1,
    }
    return TrialConfig.model_validate(raw)


class Measured(NamedTuple):
    """Trials one after another: of each the seconds on the clock and of processors, and two scores."""

    seconds: list[float]
    processor_s: list[float]
    scores: list[float]

    def run(self, config: TrialConfig) -> None:
        started, used = time.perf_counter(), time.process_time()
        metrics = run_trial(config, lambda report: None).metrics
        self.seconds.append(time.perf_counter() - started)
        self.processor_s.append(time.process_time() - used)
        self.scores.extend([metrics["map_at_r"], metrics["recall_at_1"]])
        print(f"  {config.training.feature_cache}: {self.seconds[-1]:.2f} s", flush=True)

    def row(self, name: str, worth: str) -> str:
        middle, processor = statistics.median(self.seconds), statistics.median(self.processor_s)
        return f"| {name} | {len(self.seconds)} | {middle:.2f} | {processor:.2f} | {3600 / middle:.0f} | {worth} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3, help="each one trial with features in each epoch")
    parser.add_argument(
        "--kept-trials", type=int, default=5, help="of a round with kept ones, after the first"
    )
    given = parser.parse_args()
    torch.set_num_threads(2)
    off, first, kept = (Measured([], [], []) for _ in range(3))
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        folder, weights = Path(scratch) / "pictures", Path(scratch) / "resnet18.pt"
        made_pictures(folder, given.pictures)
        plain = embedders.build("resnet18", 128, in_channels=3, image_size=SIDE, seed=0)
        torch.save(plain.backbone.state_dict(), weights)
        run_trial(
            trial(folder, weights, "off", 1, 1e-3), lambda report: None
        )  # the first of a process is slow
        for number in range(given.rounds):
            rate = 10 ** (-2 - number / 4)
            off.run(trial(folder, weights, "off", given.epochs, rate))
            shutil.rmtree(f"{scratch}/cache", ignore_errors=True)
            first.run(trial(folder, weights, "auto", given.epochs, rate))
            for further in range(given.kept_trials):
                kept.run(trial(folder, weights, "auto", given.epochs, rate / (2 + further)))
    difference = float(np.abs(np.subtract(off.scores, first.scores)).max())
    worth = statistics.median(off.seconds) / statistics.median(kept.seconds)
    print(
        f"\n{given.pictures} pictures, {given.epochs} epochs; the largest difference of scores is {difference:.1e}"
    )
    print(
        "| feature_cache | trials | s a trial | processor s | trials an hour | |\n|---|---:|---:|---:|---:|---|"
    )
    print(off.row("off", ""))
    print(first.row("auto, of an empty cache", ""))
    print(kept.row("auto", f"{worth:.0f}x"))


if __name__ == "__main__":
    main()
