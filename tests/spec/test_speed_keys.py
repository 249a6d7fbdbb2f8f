"""Keys that change no number: a study, and a trial, are the same with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmlstudy.records import DataConfig
from dmlstudy.spec.study_file import StudySpec, default_values, load

STUDY = """
name: faster
data: {{name: digits{further}}}
augmentation: {{flip: 0.5, jitter: {{float: [0.0, 0.4]}}}}
families:
  ms: {{space: multi_similarity}}
"""


def spec(folder: Path, further: str = "") -> StudySpec:
    path = folder / "study.yaml"
    path.write_text(STUDY.format(further=further))
    return load(path)


@pytest.mark.parametrize("further", [", canvas: disk", ", canvas: memory, canvas_gib: 3"])
def test_a_study_may_be_resumed_with_another_canvas(tmp_path: Path, further: str) -> None:
    plain, other = spec(tmp_path), spec(tmp_path, further)
    assert other.data.canvas != plain.data.canvas
    assert other.fingerprint() == plain.fingerprint()

    def config(of: StudySpec) -> Any:
        (family,) = of.families.values()
        return of.trial_config(family, default_values(family))

    assert config(other).fingerprint() == config(plain).fingerprint()
    assert config(other).data.canvas == other.data.canvas  # and workers hear of it
    assert set(DataConfig.SPEED) <= set(DataConfig.LATER)


def test_views_are_searched(tmp_path: Path) -> None:
    (family,) = spec(tmp_path).families.values()
    assert "augmentation.jitter" in family.space
