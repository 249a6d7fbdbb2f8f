"""Embeddings that are points of a ball: trained, scored and saved by hyperbolic distance, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.ranks import config, saving_trial, trial

from dmlstudy import data, embedders
from dmlstudy.records import EmbedderConfig, TrialConfig
from dmlstudy.saved.model import Model
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError
from dmlstudy.studies import checks
from dmlstudy.training import assembly

RAW: dict[str, Any] = {
    "embedder": {"dim": 8, "width": 4, "space": "ball", "curvature": 1.0},
    "loss": {"name": "triplet", "params": {"distance": "hyperbolic", "margin": 0.5}},
    "training": {"epochs": 3, "lr": 3e-3},
}


def test_a_trial_is_scored_and_saved_by_hyperbolic_distance(tmp_path: Path) -> None:
    found = saving_trial(config(**RAW, phase="verdict"), str(tmp_path / "model"))
    saved = embedders.load(tmp_path / "model")
    test = data.load("digits").test
    z_ND = embedders.embed(saved, test.images_NHWC).astype(np.float64)
    square_N = (z_ND**2).sum(1)
    assert square_N.std() > 0.01 * square_N.mean()  # not on any sphere
    order_NN = ((z_ND[:, None] - z_ND[None]) ** 2).sum(2) / (1 - square_N)
    np.fill_diagonal(order_NN, np.inf)
    is_hit_N = test.labels_N[order_NN.argmin(1)] == test.labels_N
    assert found["test_recall_at_1"] == pytest.approx(is_hit_N.mean(), abs=1e-3)
    assert Model.open(tmp_path / "model").curvature == 1.0


def test_training_in_a_ball_learns() -> None:
    reports, _ = trial(config(**RAW | {"training": {"epochs": 8, "lr": 3e-3}}, num_folds=1))
    assert reports[-1]["map_at_r"] > reports[0]["map_at_r"]
    assert all(np.isfinite(report["train_loss"]) for report in reports)


def test_the_loss_has_the_embedders_curvature_and_older_records_are_as_they_were() -> None:
    trial_config = TrialConfig.model_validate(config(**RAW))
    loss = assembly.make_loss(trial_config, [4] * 5, 0, "cpu")  # type: ignore[arg-type]
    assert loss.distance.curvature == 1.0
    assert not {"space", "curvature", "clip_radius"} & EmbedderConfig().model_dump().keys()
    assert EmbedderConfig().ball_curvature is None


def study(override: dict[str, Any], space: str = "triplet", **protocol: Any) -> dict[str, Any]:
    return {
        "name": "ball",
        "data": {"name": "digits"},
        "protocol": {"num_folds": 2} | protocol,
        "families": {"one": {"space": space, "override": {"batch.classes": "all"} | override}},
    }


def test_the_example_of_the_search_spaces_is_a_study() -> None:
    readme = (Path(__file__).parents[2] / "search_spaces" / "README.md").read_text(encoding="utf-8")
    (block,) = (each for each in readme.split("```yaml\n") if each.startswith("families:\n  hyperbolic:"))
    family = yaml.safe_load(block.split("```")[0])["families"]["hyperbolic"]
    raw = study(family["override"], family["space"])
    checks.check_parts(study_file.parse(raw))


BALL = {"embedder.space": "ball", "loss.distance": "hyperbolic", "loss.mining": "all"}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            study({"loss.distance": "hyperbolic", "loss.mining": "all"}),
            r"loss\.distance: hyperbolic needs points",
        ),
        (study({"embedder.space": "ball"}), r"embedder\.space: ball is compared by hyperbolic distance"),
        (
            study({"embedder.space": "ball"}, "multi_similarity"),
            r"embedder\.space: ball .* loss\.name: multi_similarity is not set to",
        ),
        (study(BALL | {"embedder.code": "sign"}), r"space: ball has no meaning beside embedder\.code: sign"),
        (study(BALL | {"embedder.unit_norm": False}), r"no meaning beside embedder\.unit_norm: false"),
        (study(BALL | {"embedder.head_depth": 2}), r"no meaning beside embedder\.head_depth: 2"),
        (study(BALL | {"retrieval.rerank": "k_reciprocal"}), r"beside retrieval\.rerank: k_reciprocal"),
        (
            study(BALL | {"regularizer": {"name": "structure"}}),
            r"no meaning beside regularizer\.name: structure",
        ),
        (study(BALL, verification=True), r"no meaning beside protocol\.verification: true"),
        (study(BALL, clusters=True), r"no meaning beside protocol\.clusters: true"),
        (study(BALL | {"loss.mining": "distance_weighted"}), "draws by Euclidean distances"),
        (study(BALL | {"loss.curvature": 1.0}), "curvature"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        checks.check_parts(study_file.parse(raw))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("space", ["triplet_weighting", "pair_weighting"])
def test_each_loss_that_names_a_distance_may_be_searched_in_a_ball(space: str) -> None:
    override = {
        "embedder.space": "ball",
        "loss.distance": "hyperbolic",
        "embedder.curvature": {"float": [0.01, 1.0], "log": True, "default": 0.1},
    }
    checks.check_parts(study_file.parse(study(override, space)))
