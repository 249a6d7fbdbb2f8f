"""What a worker finds missing on its node, and the line that says so; Ray is played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
