"""``protocol.retention``: what it does not say is the study's, and studies without it are what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tune_simulator import study

from dmlstudy.records import DataConfig
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import ProtocolConfig, SpecError, StudySpec, default_values

LENDING = {"name": "image_folder", "path": "/own", "image_size": 32, "resize_to": 40, "background": "black"}


def spec(retention: dict[str, Any] | None, own: dict[str, Any] = LENDING) -> StudySpec:
    protocol = {"num_folds": 2} | ({} if retention is None else {"retention": retention})
    return study(data=own, protocol=protocol)


def test_what_it_does_not_say_is_the_studys() -> None:
    found = spec({"name": "hf_parquet", "path": "/other"}).retention
    assert found == DataConfig(**LENDING | {"name": "hf_parquet", "path": "/other"})
    said = {"name": "hf_parquet", "path": "/other", "resize_to": None, "background": "white"}
    assert spec(said).retention == DataConfig(name="hf_parquet", path="/other", image_size=32)
    assert spec({"name": "features", "path": "/x.npz"}).retention == DataConfig(
        name="features", path="/x.npz"
    )


def test_a_key_said_at_its_default_is_another_study_than_one_left_out() -> None:
    lent = spec({"name": "digits"})
    said = spec({"name": "digits", "resize_to": None})
    assert lent.retention != said.retention
    assert lent.fingerprint() != said.fingerprint()
    assert lent.fingerprint() == spec({"name": "digits"}).fingerprint()
    assert spec({"name": "digits", "canvas": "disk"}).fingerprint() == lent.fingerprint()


def test_a_study_without_it_is_what_it_was() -> None:
    assert "retention" not in ProtocolConfig().model_dump()
    plain = spec(None)
    assert plain.retention is None
    family = next(iter(plain.families.values()))
    assert "retention" not in plain.trial_config(family, default_values(family)).model_dump()
    assert spec({"name": "digits"}).fingerprint() != plain.fingerprint()


def test_it_travels_to_trials_with_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    found = spec({"name": "image_folder", "path": "other"})
    family = next(iter(found.families.values()))
    config = found.trial_config(family, default_values(family), phase="verdict")
    assert config.retention is not None
    assert config.retention.path == str(tmp_path / "other")
    with pytest.raises(SpecError, match=r"protocol\.retention\.path: other is relative"):
        found.check_for_job()


@pytest.mark.parametrize(
    ("retention", "line"),
    [
        ({"path": "/x"}, "protocol.retention.name: is missing; add it"),
        ({"name": "digits", "colour": 1}, "protocol.retention.colour: unknown key"),
        ({"name": "digits", "image_size": 0}, "protocol.retention.image_size: "),
        ("digits", "protocol.retention: expected a section"),
    ],
)
def test_faults_are_told_by_their_key(retention: Any, line: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec(retention)
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize("task", ["hashing", "online"])
def test_codes_and_streams_refuse_it(task: str) -> None:
    spaces = {"hashing": "sgh", "online": "oahu"}
    raw = {
        "name": "other",
        "data": {"name": "digits"},
        "families": {"a": {"space": spaces[task]}},
        "resources": {"workers": 1},
    }
    study_file.parse(raw)
    with pytest.raises(SpecError, match=r"protocol\.retention: is not measured of .*; leave it out"):
        study_file.parse(raw | {"protocol": {"retention": {"name": "digits"}}})
