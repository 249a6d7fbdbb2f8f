"""Paths in study files: relative to the file, or else to the current folder, never silently one of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.spec.study_paths import Places

MARGIN = "loss: {name: margin, alpha: {float: [0.1, 0.2]}}\n"


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The study file's folder, which is not the current one; the home folder is a third."""
    for name in ("beside", "current", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "beside"


def loaded(beside: Path, **changes: Any) -> StudySpec:
    raw = {
        "name": "small",
        "data": {"name": "image_folder", "path": "birds"},
        "families": {"a": {"space": "margin"}},
        **changes,
    }
    (beside / "study.yaml").write_text(yaml.safe_dump(raw))
    return study_file.load("../beside/study.yaml")


def test_a_relative_path_is_relative_to_the_study_file(beside: Path) -> None:
    (beside / "birds").mkdir()
    (beside / "net.pth").touch()
    (beside / "mine.yaml").write_text(MARGIN)
    found = loaded(
        beside,
        embedder={"backbone": "resnet18", "weights": "net.pth"},
        families={"a": {"space": "mine.yaml"}},
    )
    assert found.data.path == str(beside / "birds")
    family = found.families["a"]
    config = found.trial_config(family, study_file.default_values(family))
    assert config.data.path == str(beside / "birds")
    assert config.embedder.weights == str(beside / "net.pth")
    assert found.notes == []
    assert found.raw["data"]["path"] == "birds"  # as it was written, and so is the fingerprint
    assert (
        found.fingerprint()
        == loaded(beside, **{k: found.raw[k] for k in ("embedder", "families")}).fingerprint()
    )


def test_one_that_only_the_current_folder_has_is_taken_and_told(beside: Path) -> None:
    birds = beside.parent / "current" / "birds"
    birds.mkdir()
    found = loaded(beside)
    assert found.data.path == str(birds)
    (note,) = found.notes
    assert note.startswith("data.path: birds is not beside the study file but in the current folder, ")


def test_one_that_both_have_is_refused(beside: Path) -> None:
    (beside / "birds").mkdir()
    birds = beside.parent / "current" / "birds"
    birds.symlink_to(beside / "birds")
    assert loaded(beside).data.path == str(beside / "birds")  # the same folder by two names
    birds.unlink()
    birds.mkdir()
    with pytest.raises(
        SpecError, match=r"^data\.path: birds is .* beside the study file and .* the absolute path"
    ):
        loaded(beside)


def test_one_that_neither_has_is_beside_the_study_file(beside: Path) -> None:
    assert loaded(beside).data.path == str(beside / "birds")
    with pytest.raises(SpecError, match=rf"^{beside}/no\.yaml: no such file"):
        loaded(beside, families={"a": {"space": "no.yaml"}})


def test_the_home_folder_is_written_out(beside: Path) -> None:
    home = beside.parent / "home"
    (home / "net.pth").touch()
    found = loaded(
        beside,
        data={"name": "image_folder", "path": "~/birds"},
        embedder={"backbone": "resnet18", "weights": "~/net.pth"},
        resources={"storage_path": "~/state"},
    )
    family = found.families["a"]
    config = found.trial_config(family, study_file.default_values(family))
    assert (config.data.path, config.embedder.weights) == (str(home / "birds"), str(home / "net.pth"))
    assert found.file.resources.storage_path == str(home / "state")
    with pytest.raises(
        SpecError, match=r"data\.path: ~nobody-at-all/x begins with the home of a user who is not"
    ):
        loaded(beside, data={"name": "image_folder", "path": "~nobody-at-all/x"})


def test_what_is_a_name_and_no_path_stays(beside: Path) -> None:
    (beside / "default").mkdir()
    found = loaded(beside, embedder={"backbone": "resnet18", "weights": "default"})
    family = found.families["a"]
    assert found.trial_config(family, study_file.default_values(family)).embedder.weights == "default"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "data.path: birds"),
        ({"data": {"name": "image_folder", "path": "~/birds"}}, "data.path: ~/birds"),
        (
            {"data": {"name": "digits"}, "families": {"a": {"space": "mine.yaml"}}},
            "families.a.space: mine.yaml",
        ),
    ],
)
def test_a_job_takes_no_path_of_this_machine(beside: Path, changes: dict[str, Any], key: str) -> None:
    (beside / "mine.yaml").write_text(MARGIN)
    with pytest.raises(
        SpecError,
        match=rf"^{key} is relative, but a job runs in a folder and home of its own; give an absolute",
    ):
        loaded(beside, **changes).check_for_job()


def test_a_job_takes_absolute_paths(beside: Path) -> None:
    loaded(beside, data={"name": "image_folder", "path": "/data/birds"}).check_for_job()
    loaded(beside, data={"name": "digits"}).check_for_job()


def test_a_nul_is_told() -> None:
    with pytest.raises(ValueError, match=r"^key: 'a\\x00b' is no path; take the NUL out$"):
        Places().lead("key", "a\0b")
    assert not Places().leads("a\0b")
