"""Trials on data with cameras: folds and verdicts are judged without a class by its own camera."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dmlstudy import data, retrieval
from dmlstudy.records import BatchConfig, DataConfig, EmbedderConfig, LossConfig, TrainingConfig, TrialConfig
from dmlstudy.training.interface import Share
from dmlstudy.training.tasks import TASKS, task_of
from dmlstudy.training.tasks.class_checks import check_data

NUM_CLASSES = 8


def write(root: Path, num_cameras: int = 2) -> None:
    rng = np.random.default_rng(0)
    for number in range(NUM_CLASSES):
        (root / f"k{number}").mkdir(parents=True)
        for shot in range(6):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"k{number}" / f"c{shot % num_cameras}_{shot}.png")


def config(root: Path, **changes: object) -> TrialConfig:
    plain = TrialConfig(
        family="f",
        phase="verdict",
        data=DataConfig(name="image_folder", path=str(root), camera=r"c(\d)_"),
        embedder=EmbedderConfig(dim=4),
        batch=BatchConfig(classes=2, images_per_class=2),
        training=TrainingConfig(epochs=0),
        loss=LossConfig(name="contrastive"),
        reid=True,
        num_folds=2,
    )
    return plain.model_copy(update=changes)


@pytest.mark.parametrize("is_fold", [True, False])
def test_scores_are_those_of_rankings_without_the_same_camera(is_fold: bool, tmp_path: Path) -> None:
    write(tmp_path)
    own = config(tmp_path)
    task = task_of(own)
    dataset = task.dataset(own.data)
    assert isinstance(dataset, data.ZeroShotData)
    fold = task.folds(own)[0]
    share = Share(0, fold.train_indices, fold.validation_indices) if is_fold else Share(0, None, None)
    trainer = task.fit(own, share, torch.device("cpu"))
    judged = trainer.judge()
    side, camera_N = dataset.test, dataset.test_camera_N
    assert dataset.development_camera_N is not None
    if is_fold:
        side, camera_N = dataset.development.select(fold.validation_indices), dataset.development_camera_N
        camera_N = camera_N[fold.validation_indices]
    z_ND = trainer.outputs()["embeddings"].numpy()
    expected = retrieval.compare(z_ND, side.labels_N, {}, 1, camera_N=camera_N, reid=True)["none"]
    assert judged.metrics == pytest.approx(
        {name: value for name, value in expected.items() if name != "ms_per_query"}
    )
    assert judged.unit_scores is not None
    counted = sum(judged.unit_scores.counts)
    for name in ("cmc_at_1", "map", "minp", "map_at_r"):
        assert sum(judged.unit_scores.sums[name]) / counted == pytest.approx(judged.metrics[name])
    assert judged.metrics["num_queries_left_out"] == 0


def test_objectives_of_reidentification_are_known_where_they_are_asked_for(tmp_path: Path) -> None:
    known = TASKS["embedding"].metrics(config(tmp_path))
    assert {"cmc_at_1", "cmc_at_5", "cmc_at_10", "map", "minp"} <= set(known)
    assert not {"cmc_at_1", "map", "minp"} & set(TASKS["embedding"].metrics(config(tmp_path, reid=False)))


def test_classes_by_one_camera_alone_are_refused_when_the_study_is_checked(tmp_path: Path) -> None:
    write(tmp_path, num_cameras=1)
    own = config(tmp_path)
    dataset = task_of(own).dataset(own.data)
    assert isinstance(dataset, data.ZeroShotData)
    with pytest.raises(
        ValueError, match=r"data.camera: no class of the test of image_folder has pictures by two cameras"
    ):
        check_data([("families.f", own)], dataset)


def test_earlier_configurations_keep_their_fingerprints(tmp_path: Path) -> None:
    plain = config(tmp_path, reid=False, data=DataConfig(name="digits"))
    assert "reid" not in plain.model_dump()
    assert "camera" not in plain.model_dump()["data"]
    assert config(tmp_path).fingerprint() != config(tmp_path, reid=False).fingerprint()
