"""Where numbers come from: data, folds and code that are kept, and data that have changed."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.tune_simulator import study

from dmlstudy import bundled, data
from dmlstudy.registry import environment
from dmlstudy.registry.runs import ALIKE
from dmlstudy.store import Store, StoreError
from dmlstudy.studies import provenance
from dmlstudy.studies.run import run_study


def test_the_origin_of_a_study() -> None:
    found, digits = study(), data.load("digits")
    origin = provenance.origin(found, digits)
    assert origin["spec_fingerprint"] == found.fingerprint()
    assert origin["development_sha256"] == digits.development.fingerprint()
    assert origin["test_sha256"] == digits.test.fingerprint()
    assert origin["num_test_images"] == str(len(digits.test))
    assert origin["num_shared_images"] == "0"
    assert origin["objective"] == "map_at_r"
    assert "second_objective" not in origin
    two = {
        "trials_per_family": 4,
        "sampler": "nsga2",
        "second_objective": "embedding_dim",
        "scheduler": "none",
    }
    assert provenance.origin(study(search=two), digits)["second_objective"] == "embedding_dim"


def test_it_tells_which_families_are_alike() -> None:
    pair = {"far": {"space": "triplet"}, "near": {"space": "triplet", "like": "far"}}
    best = {"nearest": {"space": "triplet", "like": "far", "fix": "best"}}
    found, digits = study(families=pair | best), data.load("digits")
    assert json.loads(provenance.origin(found, digits)[ALIKE]) == {
        "near": "far's points, trial by trial",
        "nearest": "far's best configuration",
    }
    assert ALIKE not in provenance.origin(study(), digits)


@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_contents_are_hashed_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digits, hashed = data.load("digits"), 0
    if kind == "vectors":
        sides = [
            data.Features(data.as_features(side), side.labels_N, side.class_names)
            for side in (digits.development, digits.test)
        ]
        digits = data.ZeroShotData("digits", *sides)  # type: ignore[arg-type]
    blake2b = hashlib.blake2b

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal hashed
        hashed += 1
        return blake2b(*arguments, **named)

    monkeypatch.setattr(hashlib, "blake2b", counted)
    assert data.remarks(digits, None) == []
    provenance.origin(study(), digits)
    assert hashed == len(digits.development) + len(digits.test)


def test_the_origin_sees_who_is_query_and_what_is_in_two_classes() -> None:
    digits = data.load("digits")
    roles = np.arange(100), np.arange(100, 896)
    with_roles = data.ZeroShotData("digits", digits.development, digits.test, *roles)
    known, own = (provenance.origin(study(), each) for each in (digits, with_roles))
    assert known["development_sha256"] == own["development_sha256"]
    with pytest.raises(StoreError, match="its test data have changed"):
        provenance.check_data("s", known, own)
    labels_N = np.arange(len(digits.development)) % 5
    twice = data.ImageSet(digits.development.images_NHWC * 0, labels_N, digits.development.class_names)
    leaky = data.ZeroShotData("digits", twice, digits.test)
    assert known["num_shared_between_folds"] == "0"
    assert provenance.origin(study(), leaky)["num_shared_between_folds"] == "901"


def test_the_folds_are_those_that_trials_use() -> None:
    found, digits = study(), data.load("digits")
    folds = json.loads(provenance.description(found, digits)["folds.json"])
    assert list(folds) == ["search", "verdict seed 1", "verdict seed 2"]
    for what, seed in (("search", 5), ("verdict seed 2", 2)):
        used = data.class_disjoint_folds(digits.development.labels_N, 2, seed)
        assert folds[what] == [[str(c) for c in fold.validation_classes] for fold in used]
    alone = study(protocol={"num_folds": 1, "verdict_seeds": 2})
    assert list(provenance.folds(alone, digits)) == ["search"]


def test_each_trial_names_its_workers_device_data_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "commit", lambda: "abc")
    known = {"development_sha256": "d", "test_sha256": "t", "objective": "map_at_r"}
    assert provenance.trial_tags(study(resources={"workers": 3}), known) == {
        "workers": "3",
        "device": "cpu",
        "development_sha256": "d",
        "test_sha256": "t",
        "code_version": "abc",
    }
    monkeypatch.setattr(provenance, "commit", lambda: None)
    found = provenance.trial_tags(study(resources={"gpus_per_worker": 0.5}), {})
    assert found["device"] == "cuda"
    assert found["code_version"] == f"sources {environment.source_sha256()}"


def test_the_surroundings_of_a_session() -> None:
    found: dict[str, Any] = json.loads(provenance.surroundings(study(resources={"workers": 3})))
    assert {"ray", "torch", "optuna", "mlflow", "numpy", "scipy", "pyarrow"} <= found["packages"].keys()
    assert found["code"]["source_sha256"] == environment.source_sha256()
    assert found["hardware"]["cpu"]
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_gib"] > 0
    assert isinstance(found["hardware"]["gpus"], list)
    assert found["resources"]["workers"] == 3
    assert {"cuda", "python", "platform", "host", "nodes"} <= found.keys()


def test_the_code_is_known_by_its_commit_only_where_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "dmlstudy"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(bundled, "PACKAGE", package)
    monkeypatch.delenv(environment.COMMIT, raising=False)

    def git(*arguments: str) -> str:
        login = ["-c", "user.name=x", "-c", "user.email=x@x"]
        done = subprocess.run(["git", *login, *arguments], cwd=tmp_path, check=True, capture_output=True)
        return done.stdout.decode().strip()

    assert environment.commit() is None
    git("init", "-q")
    (tmp_path / "other").write_text("")
    git("add", "other")
    git("commit", "-qm", "another project's")
    assert environment.commit() is None
    monkeypatch.setenv(environment.COMMIT, "f00")  # a job is told
    assert environment.commit() == "f00"
    git("add", ".")
    git("commit", "-qm", "ours")
    head = git("rev-parse", "HEAD")
    assert environment.commit() == head
    before = environment.source_sha256()
    (package / "new.py").write_text("")
    assert environment.commit() == f"{head} (dirty)"
    assert environment.source_sha256() != before


def test_a_study_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = tmp_path / "images"
    for label in "abcdefgh":
        for number in range(4):
            path = images / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    found, store = study(data={"name": "image_folder", "path": str(images)}), Store(tmp_path / "store")
    config = found.file.data.model_dump()
    origin = provenance.origin(found, data.load(**config))
    store.write_state(found.name, "interrupted", fingerprint=found.fingerprint(), origin=origin)
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(images / "h" / "0.png")
    with pytest.raises(StoreError) as caught:
        run_study(found, store, address=None, tell=print)
    assert str(caught.value) == (
        "study 'simulated': its test data have changed since it began; bring them back, or give this study another"
        " name (--name); if it began before pictures were turned by EXIF and made opaque, data.orientation: as_stored"
        " and data.background: drop read them as then"
    )
    provenance.check_data(found.name, origin, origin)
