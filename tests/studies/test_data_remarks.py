"""A study's data are told before it begins: by ``validate``, and by ``run``; what cannot be judged is refused."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from dmlstudy import cli
from dmlstudy.spec import study_file
from dmlstudy.store import Store
from dmlstudy.studies import checks
from dmlstudy.studies import run as studies

NUM_CLASSES = 24


def picture_set(folder: Path, num_double: int) -> Path:
    """24 classes of one picture, but for the first few of each half, which have two."""
    rng = np.random.default_rng(0)
    for label in range(NUM_CLASSES):
        for number in range(2 if label % (NUM_CLASSES // 2) < num_double else 1):
            path = folder / f"{label:02}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    return folder


def raw(folder: Path) -> dict[str, Any]:
    return {
        "name": "pictures",
        "data": {"name": "image_folder", "path": str(folder), "image_size": 8},
        "embedder": {"width": 4, "dim": 4},
        "batch": {"classes": 2, "images_per_class": 2},
        "training": {"epochs": 1},
        "families": {"contrastive": {"space": "contrastive"}},
        "search": {"trials_per_family": 1},
        "protocol": {"num_folds": 2, "verdict_seeds": 1},
    }


def test_validate_tells_what_is_odd_and_shows_no_raw_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = picture_set(tmp_path / "set", 6)
    shutil.copy(folder / "00" / "0.png", folder / "01" / "again.png")
    (folder / "02" / "notes.txt").touch()
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(raw(folder)))
    monkeypatch.setattr(sys, "argv", ["dmlstudy", "validate", str(tmp_path / "study.yaml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    said = capfd.readouterr()
    lines = said.out.splitlines()
    for line in (
        "left out: 1 .txt",
        "development: 6 of 12 classes have one image: never a hit, never a positive pair",
        "test: 6 of 12 classes have one image: never a hit, never a positive pair",
    ):
        assert line in lines
    assert any(line.startswith("the same picture under two labels: 2 images, as ") for line in lines)
    told = [line for line in lines if "a batch holds no two images of one class" in line]
    assert len(told) == 1
    assert told[0].startswith("training: a batch holds no two images of one class")
    assert "UserWarning" not in said.err + said.out


def test_a_study_in_which_no_query_can_have_a_hit_is_refused(tmp_path: Path) -> None:
    for kind in ("hits", "none"):
        study = study_file.parse(raw(picture_set(tmp_path / kind, 6 if kind == "hits" else 0)))
        if kind == "hits":
            checks.check_parts(study)
            continue
        with pytest.raises(
            study_file.SpecError, match="data: each of the 12 test classes of image_folder has one image"
        ):
            checks.check_parts(study)


def test_run_tells_it_at_its_start_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = picture_set(tmp_path / "set", 6)
    (folder / "02" / "notes.txt").touch()
    study, store, told = study_file.parse(raw(folder)), Store(tmp_path / "store"), list[str]()
    monkeypatch.setattr(studies, "connected", lambda *_: contextlib.nullcontext())
    kept: list[str] = []

    def run_here(*_: object) -> None:
        kept.extend((store.study_folder(study.name) / "progress.log").read_text().splitlines())

    monkeypatch.setattr(studies, "_run_here", run_here)
    studies.run_study(study, store, address=None, tell=told.append)
    assert told[0] == "left out: 1 .txt"
    assert told[1].startswith("development: 6 of 12 classes have one image")
    assert kept == told
