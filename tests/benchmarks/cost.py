"""What a study of a large data set will cost: its training images, and how fast its embedder trains on this machine.

    .venv/bin/python tests/benchmarks/cost.py [search_spaces/studies/cub200.yaml ...] [--family pair-power]

Measured is a family at its default point with the study's own views, batch and embedder, through ``run_trial`` (so
decoding included), on noise of 500 x 375 pixels in JPEG files; weights do not change the speed and are left out. The
images are those that all trials show, if none is stopped early, with the published number of pictures. Embedding one
counts as a third of training on it; epochs with a frozen backbone, which are faster, count like others. Where the data
set itself lies on the machine, ``dmlstudy validate`` says the same.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dmlstudy.data import EXPECTED
from dmlstudy.records import TrialConfig
from dmlstudy.spec.study_file import StudySpec, default_values, load
from dmlstudy.studies.estimate import first_reports

STUDIES = [Path(f"search_spaces/studies/{name}.yaml") for name in ("cub200", "cars196", "sop", "inshop")]
CLASSES, PICTURES = 384, 5


def stand_in(folder: Path) -> None:
    """A folder of classes whose pictures are all of one size, as photographs are in number of bytes."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (47, 63, 3), dtype=np.uint8))
    coarse.resize((500, 375), Image.Resampling.BICUBIC).save(folder / "one.jpg", quality=90)
    for label in range(CLASSES):
        (folder / f"images/{label:03}").mkdir(parents=True)
        for number in range(PICTURES):
            (folder / f"images/{label:03}/{number}.jpg").symlink_to(folder / "one.jpg")


def images(spec: StudySpec) -> float:
    """Training images of all trials, embedded ones counted by a third."""
    sides = EXPECTED[spec.data.name]
    development = sides["development"].images
    test = sum(count.images for side, count in sides.items() if side != "development")
    search, protocol = spec.file.search, spec.file.protocol
    assert protocol.num_folds > 1
    total = 0.0
    for family in spec.families.values():
        config = spec.trial_config(family, default_values(family))
        trial = config.training.epochs * development * (protocol.num_folds - 1 + 1 / 3)
        of_folds = protocol.num_folds if config.fold_models else 0
        trained_on = development * (1 + of_folds * (1 - 1 / protocol.num_folds))
        verdict = config.training.epochs * trained_on + (1 + of_folds) * test / 3
        total += search.trials_per_family * trial + protocol.most_seeds * verdict
    return total


def images_per_second(config: TrialConfig, folder: Path, batches: int) -> float:
    """Of a second epoch of few batches, with the backbone learning; the first one starts the threads."""
    few = config.model_copy(
        update={
            "data": config.data.model_copy(update={"name": "image_folder", "path": str(folder / "images")}),
            "embedder": config.embedder.model_copy(update={"weights": None}),
            "batch": config.batch.model_copy(update={"per_epoch": batches}),
            "training": config.training.model_copy(update={"epochs": 2, "freeze_backbone_epochs": 0}),
            "num_folds": 1,
        }
    )
    return first_reports(few, torch.device("cpu"))[-1][1].metrics["images_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", type=Path, default=STUDIES)
    parser.add_argument("--family", default="pair-power")
    parser.add_argument("--batches", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, no GPU is used", flush=True)
    measured: dict[str, float] = {}
    for path in arguments.studies:
        spec = load(path)
        with tempfile.TemporaryDirectory() as scratch:
            stand_in(Path(scratch))
            own = spec.families[arguments.family]
            config = spec.trial_config(own, default_values(own))
            key = repr((config.embedder, config.augmentation, config.batch, config.data.image_size))
            if key not in measured:
                measured[key] = images_per_second(config, Path(scratch), arguments.batches)
        total, rate = images(spec), measured[key]
        print(
            f"{spec.name:8} {total / 1e6:8.1f} million images at most; {rate:5.1f} images/s of {arguments.family}"
            f" here: {total / rate / 86400:7.0f} days of one trial at a time"
        )


if __name__ == "__main__":
    main()
