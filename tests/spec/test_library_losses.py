"""Losses of pytorch-metric-learning in a study: what they cost is said, and the same loss of the catalogue named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_metric_learning.losses
import yaml

from dmlstudy.losses import catalogue
from dmlstudy.spec import library_losses, study_file


def notes(folder: Path, **loss: Any) -> list[str]:
    space = folder / "space.yaml"
    space.write_text(yaml.safe_dump({"loss": loss}))
    study = {
        "name": "s",
        "data": {"name": "digits"},
        "embedder": {"backbone": "small_conv", "dim": 8},
        "families": {"x": {"space": str(space)}},
    }
    return [note for note in study_file.parse(study).notes if note.startswith("loss.name")]


def test_a_study_says_what_they_cost_and_what_has_not_that_cost(tmp_path: Path) -> None:
    native, other = notes(
        tmp_path, name={"choice": ["pml:SupConLoss", "pml:TupletMarginLoss", "contrastive"]}
    )
    assert native.startswith("loss.name: pml:SupConLoss is computed by every worker for the whole batch")
    assert native.endswith("loss.name: supcon is the same loss, in tiles shared by the workers")
    assert other.endswith("all its pairs or triplets in memory at once")


def test_a_study_without_them_says_nothing(tmp_path: Path) -> None:
    assert not notes(tmp_path, name="contrastive")


def test_both_libraries_have_the_losses_that_are_named() -> None:
    for name, native in library_losses.NATIVE.items():
        assert hasattr(pytorch_metric_learning.losses, name)
        assert native in catalogue.CATALOGUE
