"""How many head-only trials an hour: the features of a frozen backbone kept, and computed in each epoch.

    nice -n 5 .venv/bin/python tests/benchmarks/features.py [--pictures 1000] [--epochs 10] [--trials 2]

Trials of `resnet18` (torchvision's, random weights of one file) with its backbone frozen, on pictures of 64 x 64 made
of noise and a colour for each class: a linear head of 128 dimensions, multi-similarity, one held-out half, scored after
each epoch. Both sides run the same trials, one after another in one process with two threads, and each trial has
another learning rate, as a search gives it. `auto` begins with an empty cache; what filling it costs is told apart.
Scores of both sides are compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

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


def measured(configs: list[TrialConfig]) -> tuple[list[float], list[float]]:
    """The seconds of each trial, and its scores."""
    seconds, scores = [], []
    for config in configs:
        started = time.perf_counter()
        metrics = run_trial(config, lambda report: None).metrics
        seconds.append(time.perf_counter() - started)
        scores += [metrics["map_at_r"], metrics["recall_at_1"]]
        print(f"  {config.training.feature_cache}: {seconds[-1]:.2f} s", flush=True)
    return seconds, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--trials", type=int, default=2, help="with features in each epoch")
    parser.add_argument("--kept-trials", type=int, default=12, help="with kept ones, after the first")
    given = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        folder, weights = Path(scratch) / "pictures", Path(scratch) / "resnet18.pt"
        made_pictures(folder, given.pictures)
        plain = embedders.build("resnet18", 128, in_channels=3, image_size=SIDE, seed=0)
        torch.save(plain.backbone.state_dict(), weights)
        rates = [10 ** (-2 - number / 4) for number in range(given.kept_trials + 1)]
        configs = {
            how: [trial(folder, weights, how, given.epochs, lr) for lr in rates] for how in ("off", "auto")
        }
        run_trial(
            trial(folder, weights, "off", 1, 1e-3), lambda report: None
        )  # the first of a process is slow
        off, off_scores = measured(configs["off"][: given.trials])
        (first, *kept), auto_scores = measured(configs["auto"])
    difference = float(np.abs(np.subtract(off_scores, auto_scores[: len(off_scores)])).max())
    per_hour = {"off": 3600 / float(np.mean(off)), "auto": 3600 / float(np.mean(kept))}
    print(
        f"\n{given.pictures} pictures, {given.epochs} epochs; the largest difference of scores is {difference:.1e}"
    )
    print("| feature_cache | trials | s a trial | trials an hour | |\n|---|---:|---:|---:|---|")
    print(f"| off | {len(off)} | {np.mean(off):.2f} | {per_hour['off']:.0f} | |")
    print(f"| auto, the first, which computes them | 1 | {first:.2f} | | |")
    print(
        f"| auto | {len(kept)} | {np.mean(kept):.2f} | {per_hour['auto']:.0f} |"
        f" {per_hour['auto'] / per_hour['off']:.0f}x |"
    )


if __name__ == "__main__":
    main()
