"""What a server tells of its model's data and ancestors, and whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from starlette.testclient import TestClient

from dmlstudy import embedders
from dmlstudy.saved import Model
from dmlstudy.serving import origin
from dmlstudy.serving.guards import Access, Limits
from dmlstudy.serving.server import Service, app

NOTES = {
    "trained_on": "image_folder",
    "development_fingerprint": "d" * 64,
    "num_trained_images": 20,
    "num_trained_classes": 4,
    "config": {"data": {"path": "/home/someone/<i>birds"}, "start": {"seen": "was trained on 2"}},
    "start": [{"source": "/home/someone/first.pt", "sha256": "a" * 64}],
}


def saved(folder: Path, notes: dict[str, object]) -> Model:
    made = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0)
    embedders.save(made, folder, notes, np.zeros((2, 8, 8, 1), np.uint8))  # type: ignore[arg-type]
    return Model.open(folder)


def test_it_tells_data_and_ancestors_without_folders(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", NOTES)
    assert origin.of(model) == {
        "trained": "trained on image_folder, <i>birds: 20 images of 4 classes, SHA-256 dddddddddddd",
        "ancestry": [{"source": "first.pt", "sha256": "a" * 64}],
        "seen": "was trained on 2",
    }


def test_notes_that_tell_nothing_are_null(tmp_path: Path, models: dict[str, Path]) -> None:
    nothing = {"trained": None, "ancestry": None, "seen": None}
    assert origin.of(saved(tmp_path / "model", {"start": "yesterday"})) == nothing
    for folder in models.values():
        assert origin.of(Model.open(folder)) == nothing


def test_who_has_no_token_is_told_nothing(tmp_path: Path) -> None:
    token = "a-secret-of-the-tests-0123456789"
    service = Service(saved(tmp_path / "model", NOTES), None, Limits())
    with TestClient(app(service, Access(token))) as asked:
        assert asked.get("/model").status_code == 401
        answer = asked.get("/model", headers={"authorization": f"Bearer {token}"})
        assert answer.json()["ancestry"][0]["source"] == "first.pt"
        assert answer.json()["digest"] == service.digest
