"""Embeddings that are not of unit norm: trained, scored, saved, opened and served by Euclidean distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import config, saving_trial, trial

from dmlstudy import data, embedders
from dmlstudy.embedders import add_program
from dmlstudy.records import EmbedderConfig
from dmlstudy.saved.model import Model
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError
from dmlstudy.studies import checks

RAW: dict[str, Any] = {
    "embedder": {"dim": 8, "width": 4, "unit_norm": False},
    "loss": {"name": "triplet", "params": {"mining": "distance_weighted"}},
    "regularizer": {"name": "structure", "params": {"weight": 1.0}},
    "training": {"epochs": 3, "lr": 3e-3},
}


def test_a_raw_embedder_is_scored_and_saved_by_euclidean_distance(tmp_path: Path) -> None:
    found = saving_trial(config(**RAW, phase="verdict"), str(tmp_path / "model"))
    saved = embedders.load(tmp_path / "model")
    test = data.load("digits").test
    z_ND = embedders.embed(saved, test.images_NHWC)
    norm_N = np.linalg.norm(z_ND, axis=1)
    assert norm_N.std() > 0.01 * norm_N.mean()  # not on any sphere
    distance_NN = np.linalg.norm(z_ND[:, None] - z_ND[None], axis=2)
    np.fill_diagonal(distance_NN, np.inf)
    is_hit_N = test.labels_N[distance_NN.argmin(1)] == test.labels_N
    assert found["test_recall_at_1"] == pytest.approx(is_hit_N.mean(), abs=2e-3)
    model = Model.open(tmp_path / "model")
    assert not model.gives_unit_vectors
    few = test.images_NHWC[:5]  # some CPUs round a small batch otherwise than a large one
    np.testing.assert_array_equal(model.embed(few), embedders.embed(saved, few))
    add_program(tmp_path / "model")
    program = torch.export.load(tmp_path / "model" / "embedder.pt2").module()
    np.testing.assert_allclose(
        program(torch.from_numpy(test.images_NHWC[:3])), z_ND[:3], rtol=1e-4, atol=1e-5
    )


def test_a_model_of_before_the_key_gives_unit_vectors(tmp_path: Path) -> None:
    embedder = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0)
    embedders.save(embedder, tmp_path)
    assert Model.open(tmp_path).gives_unit_vectors
    assert "unit_norm" not in EmbedderConfig().model_dump()


def test_training_without_the_sphere_learns() -> None:
    reports, _ = trial(config(**RAW | {"training": {"epochs": 8, "lr": 3e-3}}, num_folds=1))
    assert reports[-1]["map_at_r"] > reports[0]["map_at_r"]
    assert all(np.isfinite(report["train_loss"]) for report in reports)


@pytest.mark.parametrize(
    ("space", "override", "said"),
    [
        ("multi_similarity", {}, r"beside loss\.name: multi_similarity"),
        ("triplet", {"batch.memory_size": 64}, r"beside batch\.memory_size: 64"),
        ("triplet", {"embedder.code": "sign"}, r"beside embedder\.code: sign"),
    ],
)
def test_what_needs_the_sphere_is_refused_in_one_line(
    space: str, override: dict[str, Any], said: str
) -> None:
    raw = {
        "name": "raw",
        "data": {"name": "digits"},
        "protocol": {"num_folds": 2},
        "families": {
            "one": {
                "space": space,
                "override": {"embedder.unit_norm": False, "batch.classes": "all"} | override,
            }
        },
    }
    with pytest.raises(
        SpecError, match=rf"families\.one\.embedder\.unit_norm: false has no meaning {said}"
    ) as caught:
        checks.check_parts(study_file.parse(raw))
    assert "\n" not in str(caught.value)


def test_a_threshold_is_a_cosine_and_needs_the_sphere() -> None:
    raw = {
        "name": "raw",
        "data": {"name": "digits"},
        "embedder": {"unit_norm": False},
        "batch": {"classes": "all"},
        "protocol": {"num_folds": 2, "verification": True},
        "families": {"one": {"space": "triplet"}},
    }
    with pytest.raises(SpecError, match=r"false has no meaning beside protocol\.verification: true"):
        checks.check_parts(study_file.parse(raw))
