"""What a worker finds missing on its node, and the line that says so; Ray is played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dmlstudy import data
from dmlstudy.engine import preflight
from dmlstudy.records import TrialConfig

OTHER_NODE = {"node_id": "driver's", "source_sha256": "0" * 64}


@pytest.fixture(autouse=True)
def _on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_node_id=lambda: "this")
    monkeypatch.setattr(preflight.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(preflight.ray.util, "get_node_ip_address", lambda: "10.0.0.3")


def config(**changes: Any) -> TrialConfig:
    raw: dict[str, Any] = {"family": "f", "data": {"name": "digits"}, "loss": {"name": "contrastive"}}
    raw |= {"embedder": {}, "batch": {}, "training": {}}
    return TrialConfig.model_validate(raw | changes)


def test_the_driver_knows_itself_and_its_data() -> None:
    origin = {"num_development_images": "901", "num_test_images": "896", "development_sha256": "d"}
    expected = preflight.expectations(origin)
    assert expected["node_id"] == "this"
    assert len(expected["source_sha256"]) == 64
    assert expected["num_development_images"] == "901"
    assert preflight.wrong_with_node(0, expected) == ""
    assert preflight.differing_data(config(), expected) == ""


def test_another_version_on_another_node_is_told_and_an_edited_file_beside_the_driver_is_not() -> None:
    wrong = preflight.wrong_with_node(0, OTHER_NODE)
    assert wrong.startswith("node 10.0.0.3 has another dmlstudy (")
    assert "than the driver (000000000000); install the same version there" in wrong
    assert preflight.wrong_with_node(0, OTHER_NODE | {"node_id": "this"}) == ""
    same = preflight.expectations({})["source_sha256"]
    assert preflight.wrong_with_node(0, OTHER_NODE | {"source_sha256": same}) == ""


def test_a_gpu_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert preflight.wrong_with_node(0, {}) == ""
    wrong = preflight.wrong_with_node(0.5, {})
    assert wrong.startswith("node 10.0.0.3: a GPU was asked for, and torch ")
    assert "see that its driver is installed" in wrong
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert preflight.wrong_with_node(0.5, {}) == ""


def test_a_file_that_is_not_on_the_node_is_told(tmp_path: Path) -> None:
    gone = tmp_path / "birds"
    of_images = config(data={"name": "image_folder", "path": str(gone)})
    assert preflight.missing_file(of_images) == (
        f"node 10.0.0.3 has no {gone} (data.path); see that it is mounted there"
    )
    gone.mkdir()
    assert preflight.missing_file(of_images) == ""
    with_weights = config(embedder={"backbone": "resnet18", "weights": str(tmp_path / "w.pt")})
    assert "w.pt (embedder.weights)" in preflight.missing_file(with_weights)
    of_the_hub = config(embedder={"backbone": "resnet18", "weights": "IMAGENET1K_V1"})
    assert preflight.missing_file(of_the_hub) == ""
    coded = config(hashing={"features": str(tmp_path / "model")}, loss={"name": "sgh"})
    assert "model (features)" in preflight.missing_file(coded)


def test_other_data_than_the_drivers_are_told_and_unreadable_ones_are_the_trials_to_report(
    tmp_path: Path,
) -> None:
    known = {"num_development_images": "901", "num_test_images": "5"}
    assert preflight.differing_data(config(), known) == (
        "node 10.0.0.3 sees 896 test items in digits, the driver 5; give both the same files"
    )
    assert preflight.differing_data(config(), {}) == ""
    empty = config(data={"name": "image_folder", "path": str(tmp_path)})
    assert preflight.differing_data(empty, known) == ""


def folder_of(root: Path, seed: int, classes: str = "abcdefgh") -> Path:
    rng = np.random.default_rng(seed)
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.bmp")
    return root


def test_other_pictures_of_the_same_number_are_told(tmp_path: Path) -> None:
    drivers, copy = folder_of(tmp_path / "driver", 0), folder_of(tmp_path / "copy", 0)
    digest = data.files_digest(data.load("image_folder", str(drivers)), str(drivers))

    def told(path: Path) -> str:
        of_node = config(data={"name": "image_folder", "path": str(path)})
        counts = {"num_development_images": "12", "num_test_images": "12"}
        return preflight.differing_data(of_node, counts | {"files_digest": digest})

    assert told(copy) == ""
    renamed = folder_of(tmp_path / "renamed", 0)
    (renamed / "b" / "1.bmp").rename(renamed / "b" / "9.bmp")
    assert told(renamed) == (
        f"node 10.0.0.3 sees as many items in {renamed} as the driver, but others (by names, labels and sizes);"
        " give both the same files"
    )
    larger = folder_of(tmp_path / "larger", 0)
    Image.fromarray(np.zeros((7, 7, 3), np.uint8)).resize((6, 6)).save(larger / "c" / "0.bmp", "PNG")
    assert told(larger).startswith("node 10.0.0.3 sees as many items")
    assert told(folder_of(tmp_path / "classes", 0, "abcdefgx")).startswith("node 10.0.0.3 sees as many items")


def test_other_retention_data_are_told_to_the_trials_that_read_them(tmp_path: Path) -> None:
    drivers, copy = folder_of(tmp_path / "driver", 0), folder_of(tmp_path / "copy", 0)
    digest = data.files_digest(data.load("image_folder", str(drivers)), str(drivers))
    own = {"num_development_images": "901", "num_test_images": "896"}
    expected = own | {"num_retention_images": "12", "retention_files_digest": digest}

    def told(path: Path, phase: str = "verdict", expected: dict[str, str] = expected) -> str:
        elsewhere = {"name": "image_folder", "path": str(path)}
        return preflight.differing_data(config(retention=elsewhere, phase=phase), expected)

    assert told(copy) == ""
    smaller = folder_of(tmp_path / "smaller", 0, "abcdef")
    assert told(smaller) == (
        f"node 10.0.0.3 sees 9 test items in {smaller} (protocol.retention), the driver 12; give both the same files"
    )
    assert told(smaller, phase="search") == ""
    renamed = folder_of(tmp_path / "renamed", 0)
    (renamed / "g" / "1.bmp").rename(renamed / "g" / "9.bmp")
    assert told(renamed) == (
        f"node 10.0.0.3 sees as many items in {renamed} (protocol.retention) as the driver, but others (by names,"
        " labels and sizes); give both the same files"
    )
    assert told(renamed, expected=own) == ""
    (tmp_path / "empty").mkdir()
    assert told(tmp_path / "empty") == ""


def test_the_data_are_looked_at_once_and_not_for_each_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    digest, calls = data.files_digest(data.load("digits"), None), list[object]()
    monkeypatch.setattr(data, "files_digest", lambda *given: (calls.append(given), digest)[1])
    for _ in range(3):
        counts = {"num_development_images": "901", "num_test_images": "896"}
        assert preflight.differing_data(config(), counts | {"files_digest": digest}) == ""
    assert len(calls) == 1
