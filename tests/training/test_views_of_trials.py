"""Trials with all ops of views and with canvases: the same digits on any world size, resumed, from any kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, failing_trial_with_cache, trial, trial_with_cache

from dmlstudy.records import TrialConfig
from dmlstudy.training.embedder_trainer import EmbedderTrainer
from dmlstudy.training.tasks import task_of

NOISY = ("images_per_second", "loader_images_per_second", "loader_wait_share")
VIEWS = {
    "crop": "random_resized",
    "flip": 0.5,
    "rotate": 10.0,
    "randaugment": 1,
    "jitter": 0.4,
    "hue": 0.1,
    "grey": 0.2,
    "blur": 0.3,
    "erase": 0.3,
}


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """A trial on eight classes of six pictures, each class of one colour, 20 x 16."""
    rng = np.random.default_rng(0)
    for c in range(8):
        colour = rng.integers(0, 256, 3)
        for i in range(6):
            pixels = (0.5 * colour + 0.5 * rng.integers(0, 256, (16, 20, 3))).astype(np.uint8)
            path = tmp_path / "set" / f"class{c}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    of_folder = {"name": "image_folder", "path": str(tmp_path / "set"), "image_size": 8, "resize_to": 10}
    return config(data=of_folder, batch__images_per_class=4, augmentation=VIEWS, num_folds=1)


def steady(reports: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in each.items() if name not in NOISY} for each in reports]


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_trial_is_the_same_with_a_canvas(
    raw: dict[str, Any], tmp_path: Path, kind: str, pool: GlooPool
) -> None:
    for phase in ("search", "verdict"):
        plain = trial(raw | {"phase": phase})
        kept = raw | {"phase": phase, "data": raw["data"] | {"canvas": kind}}
        reports, result = trial_with_cache(kept, str(tmp_path / kind))
        assert result == plain[1]
        assert steady(reports) == steady(plain[0])
        num_sides = 2 if kind == "disk" and phase == "verdict" else 1
        if kind == "disk":
            assert len(list((tmp_path / kind).rglob("*.canvas"))) == num_sides
    of_two = pool.run(2, trial_with_cache, kept, str(tmp_path / "of two"))
    for _, found in of_two:
        assert found == pytest.approx(result, abs=1e-5)


def test_a_canvas_without_room_fails_a_trial_on_all_ranks(
    raw: dict[str, Any], tmp_path: Path, pool: GlooPool
) -> None:
    small = raw | {"data": raw["data"] | {"canvas": "memory", "canvas_gib": 1e-9}}
    alone, folder = failing_trial_with_cache(small, str(tmp_path)), str(tmp_path / "of two")
    for found in (alone, *pool.run(2, failing_trial_with_cache, small, folder)):
        assert found.startswith(
            "data.canvas: memory needs 0.00 GiB for 24 pictures, more than data.canvas_gib"
        )


def test_two_processes_and_a_resumed_trial_see_the_same_views(
    raw: dict[str, Any], tmp_path: Path, pool: GlooPool
) -> None:
    reports, result = trial(raw)
    for _, found in pool.run(2, trial, raw):
        assert found == pytest.approx(result, abs=1e-5)
    again, broken_result, attempts = broken_trial(raw, str(tmp_path / "state"), "epoch")
    assert attempts >= 2
    assert broken_result == result
    assert steady(again)[-1] == steady(reports)[-1]
    assert trial(raw | {"augmentation": VIEWS | {"hue": 0.2}})[1] != result


def test_what_is_laid_bare_shows_the_backbone_s_mean(raw: dict[str, Any]) -> None:
    given = TrialConfig.model_validate(raw)
    task = task_of(given)
    development = task.dataset(given.data).development
    trainer = EmbedderTrainer(given, development, torch.device("cpu"), stream=0)
    assert trainer.loader is not None
    assert trainer.loader._augmentation is not None
    assert trainer.loader._augmentation.fill == (128, 128, 128)


def test_colours_of_grey_images_are_refused() -> None:
    for key in ("hue", "grey"):
        with pytest.raises(ValueError, match=rf"^augmentation\.{key}: the images are grey"):
            trial(config(augmentation={key: 0.1}))
    trial(config(augmentation={"rotate": 10.0, "jitter": 0.4, "erase": 0.5}, num_folds=1))
