"""A trial on pictures not in memory: same digits, any world size, resumed, damaged files, query and gallery."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, failing_trial, failing_trial_of_own_files, trial

from dmlstudy import data, embedders
from dmlstudy.data import pictures
from dmlstudy.records import TrialConfig
from dmlstudy.training.trial import run_trial

NOISY = ("images_per_second", "loader_images_per_second", "loader_wait_share")


def steady(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in NOISY}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight classes of seven noisy pictures, each class of one colour, 20 x 16."""
    rng = np.random.default_rng(0)
    for c in range(8):
        colour = rng.integers(0, 256, 3)
        for i in range(7):
            pixels = (0.5 * colour + 0.5 * rng.integers(0, 256, (16, 20, 3))).astype(np.uint8)
            path = tmp_path / "set" / f"class{c}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return tmp_path / "set"


def on(folder: Path, **changes: Any) -> dict[str, Any]:
    kind = "table" if folder.suffix == ".csv" else "image_folder"
    of_folder = {"name": kind, "path": str(folder), "image_size": 8, **changes.pop("data", {})}
    return config(**{"data": of_folder, "batch__images_per_class": 4, **changes})


LOADED = {"resize_to": 10}  # never kept decoded, in whichever process
VIEWS = {"crop": "random_resized", "flip": 0.5}


def test_lazy_pictures_give_the_digits_of_those_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes in ({}, {"phase": "verdict"}, {"augmentation": VIEWS}):
        kept = trial(on(folder, **changes))
        with monkeypatch.context() as patch:
            patch.setattr(pictures, "IN_MEMORY_BYTES", 0)
            other = data.load("image_folder", str(folder), 8, resize_to=None)
            assert isinstance(other.test, data.LazyImages)
            patch.setattr("dmlstudy.training.dataset_cache.zero_shot", lambda config, other=other: other)
            lazy = trial(on(folder, **changes))
        assert lazy[1] == kept[1]
        assert [steady(report) for report in lazy[0]] == [steady(report) for report in kept[0]]
        assert all(("loader_wait_share" in report) == ("augmentation" in changes) for report in kept[0])
        assert all(0 <= report["loader_wait_share"] <= 1 for report in lazy[0])
        assert all(report["loader_images_per_second"] > 0 for report in lazy[0])


def test_views_change_what_is_learnt(folder: Path) -> None:
    losses = {
        trial(on(folder, augmentation=augmentation, data=LOADED))[0][-1]["train_loss"]
        for augmentation in ({}, {"flip": 0.5}, {"crop": "random"}, VIEWS)
    }
    assert len(losses) == 4


@pytest.mark.parametrize(
    ("draw", "regularizer"),
    [
        ("pk", None),
        ("two_draws", None),
        ("random", None),
        ("two_draws", {"name": "graph_consistency", "params": {"draw": "two_draws", "weight": 1.0}}),
    ],
)
def test_two_processes_find_what_one_finds(
    draw: str, regularizer: dict[str, Any] | None, folder: Path, pool: GlooPool
) -> None:
    raw = on(
        folder,
        data=LOADED,
        augmentation=VIEWS,
        batch__draw=draw,
        batch__classes=2,
        regularizer=regularizer,
    )
    reports, result = trial(raw)
    for other_reports, other_result in pool.run(2, trial, raw):
        for report, other in zip(reports, other_reports, strict=True):
            assert steady(other) == pytest.approx(steady(report), abs=1e-5)
        assert other_result == pytest.approx(result, abs=1e-5)


def test_a_trial_goes_on_with_the_same_views(folder: Path, tmp_path: Path) -> None:
    raw = on(folder, data=LOADED, augmentation=VIEWS, training__epochs=3)
    reports, result = trial(raw)
    again, broken_result, attempts = broken_trial(raw, str(tmp_path / "state"), "epoch")
    assert attempts >= 2
    assert broken_result == result
    last = {report["step"]: steady(report) for report in again}
    assert list(last.values()) == [steady(report) for report in reports]


def test_queries_are_scored_against_the_gallery(folder: Path, tmp_path: Path) -> None:
    lines = ["label,path,split,is_query,is_gallery"]
    for c in range(8):
        side = "train" if c < 4 else "test"
        lines += [f"{c},set/class{c}/{i}.png,{side},{i < 3},{i > 1}" for i in range(7)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    raw = on(tmp_path / "t.csv", phase="verdict", fold_models=True)
    result = run_trial(
        TrialConfig.model_validate(raw), lambda report: None, save_to=tmp_path / "embedder"
    ).metrics
    found = data.load("table", str(tmp_path / "t.csv"), 8)
    z_ND = embedders.embed(embedders.load(tmp_path / "embedder"), found.test.read(np.arange(28)))
    hits, average = [], []
    for q in (i for i in range(28) if i % 7 < 3):
        gallery = [i for i in range(28) if i % 7 > 1 and i != q]
        ranked = sorted(gallery, key=lambda i: (float(np.square(z_ND[i] - z_ND[q]).sum()), i))
        relevant = [i // 7 == q // 7 for i in ranked]
        num = sum(relevant)
        hits.append(relevant[0])
        average.append(sum(relevant[k] * sum(relevant[: k + 1]) / (k + 1) for k in range(num)) / num)
    assert result["test_recall_at_1"] == pytest.approx(np.mean(hits), abs=1e-12)
    assert result["test_map_at_r"] == pytest.approx(np.mean(average), abs=1e-9)
    assert 0 < result["test_separate_map_at_r"] <= 1


def test_a_damaged_picture_fails_a_trial_and_is_named(folder: Path, pool: GlooPool) -> None:
    """Of a validation class, met as it is judged, or of a training class; alike on every rank."""
    raw = on(folder, data=LOADED, batch__per_epoch=12)
    for name in ("class0/3.png", "class3/3.png"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:90])
        alone = failing_trial(raw)
        assert alone.startswith("epoch 1: ")
        assert f"{name}: not a readable image" in alone
        assert pool.run(2, failing_trial, raw) == [alone, alone]
        (folder / name).write_bytes(whole)
    assert failing_trial(raw) == "no failure"


def test_damaged_pictures_that_were_left_out_are_told(folder: Path) -> None:
    (folder / "class0" / "3.png").write_bytes(b"")
    (folder / "class7" / "3.png").write_bytes(io.BytesIO(b"GIF89a").read())
    for phase in ("search", "verdict"):
        _, result = trial(on(folder, phase=phase, data=LOADED | {"on_corrupt": "skip"}))
        assert result["num_damaged_images"] == 2


def test_workers_that_leave_out_different_pictures_are_found_out(
    folder: Path, tmp_path: Path, pool: GlooPool
) -> None:
    """As many of the same class, so that nothing but the pictures themselves differs."""
    folders = []
    for rank, damaged in enumerate(("class0/3.png", "class0/4.png")):
        own = shutil.copytree(folder, tmp_path / f"rank{rank}")
        (own / damaged).write_bytes(b"")
        folders.append(str(own))
    raw = on(folder, data=LOADED | {"on_corrupt": "skip"})
    failure = "workers see different data: 1, 1 pictures cannot be decoded on ranks 0 to 1; give all nodes"
    for found in pool.run(2, failing_trial_of_own_files, raw, folders):
        assert found.startswith(failure)
    assert pool.run(2, failing_trial_of_own_files, raw, folders[:1] * 2) == ["no failure"] * 2


def test_a_crop_without_room_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"augmentation\.crop: a random crop"):
        trial(on(folder, augmentation={"crop": "random"}))
