"""Trials whose retrieval has a second stage: NASA's structure embeddings, and k-reciprocal encodings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, saving_trial, trial

from dmlstudy import data, embedders
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError
from dmlstudy.studies import checks

NASA: dict[str, Any] = {
    "loss": {"name": "triplet", "params": {}},
    "regularizer": {"name": "structure", "params": {"weight": 4.0}},
    "training": {"epochs": 2, "lr": 3e-3},
}
FIRST = 12
TIMES = {"images_per_second", "search_ms_per_query", "rerank_ms_per_query"}


def nasa(rerank: str, **changes: Any) -> dict[str, Any]:
    return config(**NASA, retrieval={"rerank": rerank, "first": FIRST}, **changes)


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith(tuple(TIMES))}


def by_loops(z: np.ndarray, omega: np.ndarray, labels: np.ndarray, first: int) -> dict[str, float]:
    """Recall@1 and MAP@R after re-ranking, from the definitions (retrieval/README.md)."""
    recalls, precisions = [], []
    for q in range(len(z)):
        others = np.array([j for j in range(len(z)) if j != q])
        order = others[np.argsort(((z[others] - z[q]) ** 2).sum(axis=1), kind="stable")]
        head = order[:first]
        weighted = (omega[q] * (z[head] - z[q]) ** 2).sum(axis=1)
        order[:first] = head[np.argsort(weighted, kind="stable")]
        hits = labels[order] == labels[q]
        num_relevant = hits.sum()
        recalls.append(float(hits[0]))
        own = hits[:num_relevant]
        precisions.append(float((np.cumsum(own) / np.arange(1, num_relevant + 1) * own).sum() / num_relevant))
    return {"recall_at_1": float(np.mean(recalls)), "map_at_r": float(np.mean(precisions))}


def test_a_verdict_by_structure_is_the_definition_of_what_was_saved(tmp_path: Path) -> None:
    result = saving_trial(nasa("structure", phase="verdict"), str(tmp_path / "model"))
    test = data.load("digits").test
    embedder = embedders.load(tmp_path / "model")
    z, omega = embedders.embed_with_structure(embedder, test.images_NHWC)
    assert omega is not None
    assert 0.5 <= omega.min() < omega.max() <= 1.5
    for prefix, weights in (("test_", omega), ("test_first_stage_", np.ones_like(omega))):
        expected = by_loops(z, weights, test.labels_N, FIRST)
        for name, value in expected.items():
            assert result[prefix + name] == pytest.approx(value, abs=2e-5), prefix + name
    assert result["test_map_at_r"] != result["test_first_stage_map_at_r"]
    assert result["test_search_ms_per_query"] > 0
    assert result["test_rerank_ms_per_query"] > 0


@pytest.mark.parametrize("rerank", ["structure", "k_reciprocal"])
def test_the_first_stage_is_the_trial_without_a_second(rerank: str) -> None:
    reports, result = trial(nasa(rerank, num_folds=1))
    plain_reports, plain = trial(nasa("none", num_folds=1))
    for name in ("recall_at_1", "recall_at_4", "map_at_r", "r_precision"):
        assert result[f"first_stage_{name}"] == plain[name]
        assert reports[0][f"first_stage_{name}"] == plain_reports[0][name]
    assert result["map_at_r"] != plain["map_at_r"]
    assert not TIMES & result.keys()  # a search trial has no number that differs from run to run


def test_all_fold_models_together_weigh_each_by_its_own_structure(tmp_path: Path) -> None:
    raw = nasa("structure", phase="verdict", fold_models=True)
    unbroken = timeless(saving_trial(raw, str(tmp_path / "model")))
    assert unbroken["test_concatenated_map_at_r"] != unbroken["test_concatenated_first_stage_map_at_r"]
    assert unbroken["test_separate_map_at_r"] != unbroken["test_separate_first_stage_map_at_r"]
    _, broken, attempts = broken_trial(raw, str(tmp_path / "state"), "epoch")
    assert attempts > 2
    assert timeless(broken) == unbroken


def test_two_ranks_find_the_same(pool: GlooPool) -> None:
    raw = nasa("structure", num_folds=1)
    (reports, result), (other_reports, other) = pool.run(2, trial, raw)
    assert other == result
    assert [timeless(r) for r in other_reports] == [timeless(r) for r in reports]
    _, alone = trial(raw)
    for name in ("map_at_r", "first_stage_map_at_r"):
        assert result[name] == pytest.approx(alone[name], abs=2e-3)


def study(**family: Any) -> study_file.StudySpec:
    return study_file.parse(
        {
            "name": "reranked",
            "data": {"name": "digits"},
            "batch": {"classes": "all"},
            "protocol": {"num_folds": 2},
            "families": {"one": {"override": {"batch.classes": "all"}} | family},
        }
    )


def test_how_to_rank_is_searched_and_checked() -> None:
    wishes = {"retrieval.rerank": {"choice": ["none", "structure"]}, "retrieval.first": {"int": [8, 64]}}
    override = {"batch.classes": "all", **wishes}
    found = study(space="structure", override=override)
    checks.check_parts(found)
    points = {
        found.trial_config(found.families["one"], values).retrieval
        for values in found.corners(found.families["one"])
    }
    assert {point.rerank for point in points} == {"none", "structure"}
    assert {point.first for point in points} >= {8, 64}
    with pytest.raises(SpecError, match=r"families\.one\.retrieval\.rerank: structure needs .* regularizer"):
        checks.check_parts(study(space="triplet", override=override))
    with pytest.raises(SpecError, match=r"retrieval\.first: .* greater than or equal to 1, got 0"):
        study(space="structure", override={"retrieval.first": 0})
