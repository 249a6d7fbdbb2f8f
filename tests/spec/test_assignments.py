"""``--set key=value``: what it replaces, and what is wrong with one in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError, StudySpec

RAW: dict[str, Any] = {
    "name": "small",
    "data": {"name": "digits"},
    "training": {"epochs": 2, "lr": {"float": [1.0e-5, 1.0e-3], "log": True}},
    "families": {
        "margin": {"space": "margin", "override": {"loss.beta": {"float": [1, 2], "default": 1.5}}},
        "v1.5": {"space": "contrastive"},
    },
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(RAW))
    return path


def at(study: StudySpec, *keys: str) -> Any:
    value: Any = study.raw
    for key in keys:
        value = value[key]
    return value


@pytest.mark.parametrize(
    ("assignment", "keys", "value"),
    [
        ("training.epochs=1", ("training", "epochs"), 1),
        ("training.lr=1e-4", ("training", "lr"), "1e-4"),
        ("training.lr.default=1.0e-4", ("training", "lr", "default"), 1e-4),
        ("training.lr={float: [1e-5, 1e-4]}", ("training", "lr"), {"float": ["1e-5", "1e-4"]}),
        ("search.trials_per_family = 3", ("search", "trials_per_family"), 3),
        ("protocol.recall_at=[1, 2]", ("protocol", "recall_at"), [1, 2]),
        ("data.path=", ("data", "path"), None),
        ("name=other", ("name",), "other"),
        ("families.margin.override.loss.beta=1.3", ("families", "margin", "override", "loss.beta"), 1.3),
        ("families.margin.override.loss.beta.default=1", ("families", "margin", "override", "loss.beta", "default"), 1),
        ("families.margin.override.loss.nu=1e-2", ("families", "margin", "override", "loss.nu"), "1e-2"),
        ("families.v1.5.override.training.lr=0.1", ("families", "v1.5", "override", "training.lr"), 0.1),
        ("families.triplet.space=triplet", ("families", "triplet", "space"), "triplet"),
        ("families={a: {space: margin}}", ("families",), {"a": {"space": "margin"}}),
        ("search={seed: 3}", ("search",), {"seed": 3}),
    ],
)  # fmt: skip
def test_an_assignment_replaces_a_value(
    file: Path, assignment: str, keys: tuple[str, ...], value: object
) -> None:
    found = study_file.load(file, assignments=[assignment])
    assert at(found, *keys) == value
    assert found.fingerprint() != study_file.load(file).fingerprint() or value is None
    assert yaml.safe_load(file.read_text()) == RAW


def test_assignments_follow_one_another_and_a_name_is_last(file: Path) -> None:
    found = study_file.load(file, "third", ["training.epochs=3", "training.epochs=4", "name=second"])
    assert (found.name, found.file.training["epochs"]) == ("third", 4)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.epochs", "--set 'training.epochs': expected key=value, as in --set training.epochs=1"),
        ("=1", "--set '=1': expected key=value"),
        ("training..epochs=1", "--set 'training..epochs=1': expected key=value"),
        ("trainig.epochs=1", "--set trainig.epochs: unknown key; did you mean 'training'?"),
        ("training.eopchs=1", "training.eopchs: unknown key; did you mean 'epochs'?"),
        (
            "families.margni.override.loss.beta=1",
            "--set families.margni.override.loss.beta: no family 'margni'; did",
        ),
        ("families.margin.overide.loss.beta=1", "families.margin.overide.loss.beta: unknown key"),
        (
            "families.margin.override.loss.betta=1",
            "families.margin.override.loss.betta: unknown parameter; did you",
        ),
        ("training.epochs.x=1", "--set training.epochs.x: epochs is 2, which has no keys; set epochs itself"),
        ("name.x=1", "--set name.x: name is 'small', which has no keys; set name itself"),
        ("training.epochs=[1", "--set training.epochs, line 1: not YAML: "),
        ("training.epochs=*a", "--set training.epochs, line 1: aliases and anchors are not read"),
        (
            "training.epochs=-1",
            "families.margin.training.epochs: input should be greater than or equal to 0, got -1",
        ),
    ],
)
def test_a_wrong_assignment_is_one_line(file: Path, assignment: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        study_file.load(file, assignments=[assignment])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
