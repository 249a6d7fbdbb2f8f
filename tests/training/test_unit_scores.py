"""Sums by class, image or row against the metrics that a real trial logs: each is the sums' mean, to 1e-12."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.ranks import config

from dmlstudy import data, retrieval
from dmlstudy.records import TrialConfig, TrialResult, UnitScores
from dmlstudy.spec import study_file
from dmlstudy.training.trial import run_trial


def trial(raw: dict[str, Any]) -> TrialResult:
    return run_trial(TrialConfig.model_validate(raw), lambda report: None)


def task_trial(family: str, phase: str = "verdict", **changes: Any) -> TrialResult:
    raw: dict[str, Any] = {
        "name": "s",
        "data": {"name": "digits"},
        "training": {"epochs": 1},
        "families": {family: {"space": family}},
        "protocol": {"num_folds": 2, "verdict_seeds": 2},
        "resources": {"workers": 1},
    }
    spec = study_file.parse(raw | changes)
    given = spec.trial_config(spec.families[family], study_file.default_values(spec.families[family]))
    return run_trial(given.model_copy(update={"phase": phase, "seed": 1}), lambda report: None)


def micro(scores: UnitScores, name: str) -> float:
    return sum(scores.sums[name]) / sum(scores.counts)


def macro(scores: UnitScores, name: str) -> float:
    means = [value / count for value, count in zip(scores.sums[name], scores.counts, strict=True)]
    return sum(means) / len(means)


def assert_means(result: TrialResult, *, without: set[str]) -> UnitScores:
    """Every logged score of the test but these is a mean of its sums."""
    scores = result.unit_scores
    assert scores is not None
    logged = {
        name.removeprefix("test_"): value
        for name, value in result.metrics.items()
        if name.startswith("test_") and "num_" not in name and "_ms_" not in name
    }
    assert logged.keys() - without == scores.sums.keys() | {
        name for name in logged if "macro_" in name and name not in without
    }
    for name in logged.keys() - without:
        expected = macro(scores, name.replace("macro_", "")) if "macro_" in name else micro(scores, name)
        assert logged[name] == pytest.approx(expected, abs=1e-12), name
    return scores


def test_a_verdict_with_a_macro_objective_models_of_folds_and_clusters() -> None:
    raw = config(phase="verdict", macro=True, objective="macro_map_at_r", fold_models=True, clusters=True)
    result = trial(raw)
    test = data.load("digits").test
    of_clusters = retrieval.evaluate_clusters(np.eye(len(test.labels_N), 2, dtype=np.float32), test.labels_N)
    without = {prefix + name for prefix in ("", "separate_", "concatenated_") for name in of_clusters}
    assert "nmi" in without
    scores = assert_means(result, without=without)
    classes, counts = np.unique(test.labels_N, return_counts=True)
    assert (scores.units, scores.counts) == (classes.tolist(), counts.tolist())
    assert {"map_at_r", "separate_map_at_r", "concatenated_map_at_r"} <= scores.sums.keys()


def test_a_re_ranked_verdict_has_both_stages() -> None:
    result = trial(
        config(phase="verdict", retrieval={"rerank": "k_reciprocal", "first": 40, "k1": 6, "k2": 2})
    )
    scores = assert_means(result, without=set())
    assert {"map_at_r", "first_stage_map_at_r"} <= scores.sums.keys()
    assert scores.sums["map_at_r"] != scores.sums["first_stage_map_at_r"]


def test_queries_against_a_gallery_are_of_their_class(tmp_path: Path) -> None:
    """As In-Shop: of seven pictures of a class three are queries, one of these in the gallery too."""
    rng, lines = np.random.default_rng(1), ["path,label,split,is_query,is_gallery"]
    for c in range(10):
        for i in range(7):
            Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / f"{c}{i}.png")
            side, is_query = "train" if c < 4 else "test", i < 3 - (c == 9)
            lines.append(f"{c}{i}.png,{c},{side},{is_query},{i > 1}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    given = {"name": "table", "path": str(tmp_path / "t.csv")}
    result = trial(config(phase="verdict", data=given, batch__images_per_class=4, macro=True))
    scores = assert_means(result, without=set())
    labels = [str(name) for name in data.load("table", given["path"]).test.labels_N[::7]]
    assert [str(unit) for unit in scores.units] == labels
    assert scores.counts == [3, 3, 3, 3, 3, 2]


def test_a_search_has_the_classes_of_each_fold_once() -> None:
    result = trial(config())
    development = np.unique(data.load("digits").development.labels_N).tolist()
    assert sorted(unit for fold in result.of_folds for unit in fold.units) == development
    for number, fold in enumerate(result.of_folds):
        assert micro(fold, "map_at_r") == pytest.approx(result.metrics[f"fold_{number}_map_at_r"], abs=1e-12)
    assert result.unit_scores is None


def test_images_of_closed_classes_are_units_each() -> None:
    sections: dict[str, Any] = {"hashing": {"num_bits": 16, "num_queries": 40}}
    sections["protocol"] = {"num_folds": 2, "verdict_seeds": 2, "objective": "map", "map_at": [100]}
    result = task_trial("greedyhash", **sections)
    scores = assert_means(result, without=set())
    assert scores.counts == [1] * 40
    closed = data.load_closed("digits")
    expected = np.sort(np.random.default_rng(0).permutation(len(closed.test))[:40])
    assert scores.units == expected.tolist()
    assert task_trial("greedyhash", **sections, phase="search").of_folds[0].counts == [1] * 40


@pytest.mark.parametrize("split", ["own", "shuffled"])
def test_rows_of_a_stream_are_units_each(split: str) -> None:
    online = {"num_seeds": 200, "num_implied": 0, "split": split, "num_pairs": 50, "measure_recall": True}
    protocol = {"num_folds": 2, "verdict_seeds": 2, "objective": "accuracy", "recall_at": [1, 4]}
    result = task_trial("rdml", online=online, protocol=protocol)
    scores = result.unit_scores
    assert scores is not None
    assert set(scores.counts) == {1}
    for name in ("accuracy", "error_rate", "recall_at_1", "recall_at_4"):
        assert micro(scores, name) == pytest.approx(result.metrics[f"test_{name}"], abs=1e-12)
    assert "auc" not in scores.sums
    assert "macro_f1" not in scores.sums
