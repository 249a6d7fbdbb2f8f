"""Retention data are checked before anything starts, told, compared with the study's own, and must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.tune_simulator import study

from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.store import StoreError
from dmlstudy.studies import checks, estimate, provenance, retention


def pictures(folder: Path, classes: range, *, each: int = 4, side: int = 8, channels: int = 1) -> Path:
    for c in classes:
        rng = np.random.default_rng(c)
        for i in range(each):
            path = folder / f"class{c:02}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            shape = (side, side) if channels == 1 else (side, side, channels)
            Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path)
    return folder


def spec(path: Path | None = None, data: dict[str, Any] | None = None, **written: Any) -> StudySpec:
    own = {"name": "image_folder", **({} if path is None else {"path": str(path)}), **written}
    return study(data=data or {"name": "digits"}, protocol={"num_folds": 2, "retention": own})


def refused(found: StudySpec) -> str:
    with pytest.raises(SpecError) as error:
        checks.check_parts(found)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_data_that_cannot_be_scored_are_refused_in_one_line(tmp_path: Path) -> None:
    colours = pictures(tmp_path / "colours", range(4), channels=3)
    large = pictures(tmp_path / "large", range(4), side=9)
    single = pictures(tmp_path / "single", range(4), each=1)
    assert refused(spec(tmp_path / "gone")) == (
        f"protocol.retention.path: folder {tmp_path / 'gone'} does not exist"
    )
    assert refused(spec()).startswith("protocol.retention.path: image_folder needs a folder")
    assert refused(spec(colours)) == (
        "protocol.retention: image_folder has RGB images of 8 x 8, but the study's embedders take grey images of"
        " 8 x 8; name data of the same kind"
    )
    assert refused(spec(large)).endswith("grey images of 8 x 8; set protocol.retention.image_size: 8")
    assert refused(spec(single)) == (
        "protocol.retention: 0 of the 2 test classes of image_folder can have a hit, and scores need 2; give classes"
        " two images or more, or name other data"
    )
    checks.check_parts(spec(large, image_size=8))


def test_a_setting_that_is_the_studys_is_told_as_such(tmp_path: Path) -> None:
    own = {"name": "image_folder", "path": str(pictures(tmp_path / "own", range(8), each=8, side=12))}
    found = spec(None, data=own | {"image_size": 8, "resize_to": 9}, name="digits")
    line = refused(found)
    assert line.startswith("protocol.retention.resize_to: digits has images of one size")
    assert "it is that of data.resize_to, unless protocol.retention.resize_to is given" in line


def test_what_is_seen_of_it_is_said(tmp_path: Path) -> None:
    own = {"name": "image_folder", "path": str(pictures(tmp_path / "own", range(8)))}
    cases = {
        # the last half of its classes is the test side: 10, 11, 12 or 2, 3 or 6, 7
        "apart": (range(8, 13), ""),
        "trained": (range(4), "the study trains on 2 of the 2 classes and 8 of the 8 images"),
        "tested": (range(4, 8), "the study is tested on 2 of the 2 classes and 8 of the 8 images"),
    }
    for name, (classes, words) in cases.items():
        found = spec(pictures(tmp_path / name, classes), data=own)
        dataset = checks.check_parts(found)
        lines = retention.lines(found, dataset)
        assert lines[0].startswith(f"retention: image_folder, {name}, ")
        assert lines[1:] == ([f"note: protocol.retention: {words}"] if words else [])
        assert set(lines) <= set(estimate.describe(found, dataset, measure=False))
        assert provenance.origin(found, dataset).get("retention_seen", "") == words


def test_it_is_recorded_and_must_not_change(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "other", range(4))
    found = spec(folder)
    dataset = checks.check_parts(found)
    before = provenance.origin(found, dataset)
    assert before["num_retention_images"] == before["num_retention_queries"] == "8"
    assert before["num_retention_classes"] == "2"
    assert len(before["retention_sha256"]) == 64
    assert provenance.trial_tags(found, before)["retention_sha256"] == before["retention_sha256"]
    digest = retention.files_digest(found)
    pictures(folder / "class03" / "..", range(3, 4), each=5)
    again = provenance.origin(found, checks.check_parts(found))
    with pytest.raises(StoreError, match="its retention data have changed since it began"):
        provenance.check_data("x", before, again)
    assert retention.files_digest(found) != digest


def test_a_study_without_it_has_nothing_of_it() -> None:
    found = study()
    dataset = checks.check_parts(found)
    assert retention.lines(found, dataset) == []
    assert retention.files_digest(found) == ""
    assert not any("retention" in name for name in provenance.origin(found, dataset))
