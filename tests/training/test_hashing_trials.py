"""Trials of hashing: codes of frozen features of a closed set, from a study file to scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmlstudy import data, embedders, hashing, retrieval
from dmlstudy.data import row_folds
from dmlstudy.records import HashingConfig, TrialReport, TrialResult
from dmlstudy.search.verdict_trials import VerdictTrials
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError
from dmlstudy.store import StoreError
from dmlstudy.studies import checks, provenance
from dmlstudy.studies.estimate import describe
from dmlstudy.training.interface import TrialFailed, derived_seed
from dmlstudy.training.trial import run_trial
from dmlstudy.verdict.sequential import Plan

METHODS = ("sgh", "ssdh", "greedyhash", "tbh")


def study(**changes: Any) -> study_file.StudySpec:
    raw: dict[str, Any] = {
        "name": "codes",
        "data": {"name": "digits"},
        "training": {"epochs": 2},
        "hashing": {"num_bits": 16, "num_queries": 40},
        "families": {name: {"space": name} for name in ("greedyhash", "nasa_greedyhash")},
        "protocol": {"num_folds": 2, "verdict_seeds": 2, "objective": "map", "map_at": [100]},
        "resources": {"workers": 1},
    }
    return study_file.parse(raw | changes)


def trial(of: study_file.StudySpec, family: str, **changes: Any) -> tuple[list[TrialReport], TrialResult]:
    config = of.trial_config(of.families[family], study_file.default_values(of.families[family]))
    reports: list[TrialReport] = []
    return reports, run_trial(config.model_copy(update=changes), reports.append)


def pixels(rows: Any) -> np.ndarray:
    flat: np.ndarray = rows.images_NHWC.reshape(len(rows), -1).astype(np.float64) / 255
    return flat


def test_a_verdict_is_what_its_parts_give_by_hand(tmp_path: Path) -> None:
    """Trained on all training rows; the database is these and the test rows that are no queries."""
    found = study(hashing={"num_bits": 16, "num_queries": 200})
    config = found.trial_config(
        found.families["nasa_greedyhash"], study_file.default_values(found.families["nasa_greedyhash"])
    )
    reports: list[TrialReport] = []
    verdict = config.model_copy(update={"phase": "verdict", "seed": 3})
    result = run_trial(verdict, reports.append, save_to=tmp_path / "codes")
    assert [report.step for report in reports] == [1, 2]
    assert "map" not in reports[-1].metrics
    closed = data.load_closed("digits")
    train, test = (pixels(side).astype(np.float32) for side in (closed.development, closed.test))
    query = np.sort(np.random.default_rng(0).permutation(len(test))[:200])
    others = np.setdiff1d(np.arange(len(test)), query)
    database = np.concatenate([train, test[others]])
    labels = np.concatenate([closed.development.labels_N, closed.test.labels_N[others]])
    among_ties = retrieval.tie_order(len(database))
    database, labels = database[among_ties], labels[among_ties]
    assert config.hashing is not None
    given = HashingConfig(
        loss=config.loss,
        regularizer=config.regularizer,
        hashing=config.hashing,
        training=config.training,
        seed=derived_seed(3, 0),
    )
    model = hashing.train_hashing(given, train, lambda report, model: None)
    np.testing.assert_array_equal(hashing.load(tmp_path / "codes").codes(test), model.codes(test))
    codes, items, omega = model.codes(test[query]), model.codes(database), model.omega(test[query])
    precisions = {"test_first_stage_map": [], "test_map": []}
    for q, label in enumerate(closed.test.labels_N[query]):
        order = np.argsort((codes[q] != items).sum(axis=1), kind="stable")
        differs = codes[q] != items[order]
        again = order[np.argsort((differs * omega[q].astype(np.float64)).sum(axis=1), kind="stable")]
        for name, ranking in (("test_first_stage_map", order), ("test_map", again)):
            hits = labels[ranking] == label
            precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
            precisions[name].append((precision * hits).sum() / hits.sum())
    for name, each in precisions.items():
        assert result.metrics[name] == pytest.approx(np.mean(each), rel=1e-9), name
    assert result.metrics["test_map"] != result.metrics["test_first_stage_map"]


def test_a_search_trial_reports_means_over_folds_and_repeats_itself() -> None:
    reports, result = trial(study(), "greedyhash")
    assert [report.step for report in reports] == [1, 2, 3, 4]
    assert result.metrics["map"] == pytest.approx(
        (result.metrics["fold_0_map"] + result.metrics["fold_1_map"]) / 2
    )
    assert reports[1].metrics["map"] == result.metrics["fold_0_map"]
    assert reports[3].metrics["map"] == result.metrics["map"]
    of_found, of_reachable, of_relevant = (
        result.metrics[f"map_at_100_of_{name}"] for name in ("found", "reachable", "relevant")
    )
    assert of_found > of_reachable > of_relevant
    again, repeated = trial(study(), "greedyhash")
    assert repeated.metrics == result.metrics
    assert [r.metrics["train_loss"] for r in again] == [r.metrics["train_loss"] for r in reports]


@pytest.mark.parametrize("num_folds", [1, 3])
def test_folds_of_rows(num_folds: int) -> None:
    folds = row_folds(31, num_folds, seed=1)
    assert len(folds) == num_folds
    held_out = [row for fold in folds for row in fold.validation_indices.tolist()]
    assert len(set(held_out)) == len(held_out) == (31 if num_folds > 1 else 7)
    for fold in folds:
        assert sorted([*fold.train_indices, *fold.validation_indices]) == list(range(31))
    with pytest.raises(ValueError, match="num_folds: 3 of 5 rows"):
        row_folds(5, 3, 0)


def test_learned_codes_beat_untrained_ones() -> None:
    found = study(training={"epochs": 10})
    _, trained = trial(found, "greedyhash", phase="verdict")
    _, untrained = trial(study(training={"epochs": 0}), "greedyhash", phase="verdict")
    assert trained.metrics["test_map"] > untrained.metrics["test_map"] + 0.02


def test_features_of_an_embedder(tmp_path: Path) -> None:
    embedder = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=(8, 8), seed=0)
    embedders.save(embedder, tmp_path / "model")
    found = study(hashing={"num_bits": 16, "num_queries": 40, "features": str(tmp_path / "model")})
    checks.check_parts(found)
    before = provenance.origin(found, data.load_closed("digits"))
    other = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=(8, 8), seed=1)
    _, by_model = trial(found, "greedyhash")
    _, by_pixels = trial(study(), "greedyhash")
    assert by_model.metrics["map"] != by_pixels.metrics["map"]
    embedders.save(other, tmp_path / "model")
    with pytest.raises(StoreError, match="its features have changed"):
        provenance.check_data("codes", before, provenance.origin(found, data.load_closed("digits")))


def test_features_from_files(tmp_path: Path) -> None:
    closed = data.load_closed("digits")
    for side, rows in (("train", closed.development), ("test", closed.test)):
        np.savez(tmp_path / f"{side}.npz", x=pixels(rows).astype(np.float32), y=rows.labels_N)
    found = study(data={"name": "features", "path": str(tmp_path)})
    dataset = checks.check_parts(found)
    assert dataset.num_shared_images == 0
    assert dataset.development.fingerprint() != dataset.test.fingerprint()
    _, of_files = trial(found, "greedyhash")
    _, of_images = trial(study(), "greedyhash")
    assert of_files.metrics["map"] == pytest.approx(of_images.metrics["map"], abs=1e-3)


def test_untrained_codes_are_judged_once_for_each_method_and_length() -> None:
    found = study()
    best = {
        name: found.trial_config(family, study_file.default_values(family))
        for name, family in found.families.items()
    }
    assert found.num_untrained == 1
    left = VerdictTrials(Plan.of(found.file.protocol), []).left(best)
    assert [(config.family, config.training.epochs) for config in left] == [
        ("untrained", 0),
        ("untrained", 0),
        *[(name, 2) for name in best for _ in range(2)],
    ]
    assert all(config.keep_embedder == (config.seed == 1) for config in left)
    assert left[0].regularizer is None
    backwards = VerdictTrials(Plan.of(found.file.protocol), []).left(dict(reversed(best.items())))
    of_either = [run_trial(first[0], lambda report: None).metrics for first in (left, backwards)]
    assert of_either[0] == of_either[1]
    both = study(families={name: {"space": name} for name in METHODS})
    assert both.num_untrained == 4


def test_every_method_is_estimated_and_described_with_data_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, read = study(families={name: {"space": name} for name in METHODS}), []
    whole = data.load_closed
    monkeypatch.setattr(data, "load_closed", lambda **named: read.append(named) or whole(**named))
    lines = describe(found, checks.check_parts(found), measure=True)
    assert len(read) == 1
    checks.check_parts(found)
    assert len(read) == 2, "files that have changed since would not be seen"
    assert any("1438 images of 10" in line for line in lines)
    assert lines[-1].startswith("time: at most about")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resources": {"workers": 2}}, r"resources\.workers: one process"),
        ({"embedder": {"dim": 8}}, "embedder: means nothing to codes"),
        (
            {"families": {"codes": {"space": "sgh"}, "other": {"space": "triplet"}}},
            r"families\.other: has a section (training|batch)",
        ),
        (
            {"families": {"codes": {"space": "sgh"}, "other": {"space": "triplet"}}, "hashing": {}},
            r"families\.other: trains an embedder, but codes",
        ),
        ({"protocol": {"clusters": True}}, r"protocol\.clusters: is not measured of codes"),
        (
            {"search": {"sampler": "nsga2", "scheduler": "none", "second_objective": "latency_ms"}},
            r"search\.second_objective: latency_ms is not measured of codes",
        ),
        ({"hashing": {"num_bits": 12}}, r"hashing\.num_bits: .* multiple of 8"),
        ({"protocol": {"objective": "recall_at_1"}}, r"protocol\.objective: no metric 'recall_at_1'"),
        ({"data": {"name": "cub200", "path": "/"}}, r"data\.name: no closed set 'cub200'"),
        ({"hashing": {"features": "/nowhere"}}, r"families\.greedyhash\.hashing\.features: "),
        (
            {"families": {"sgh": {"space": "sgh", "override": {"loss.name": "triplet"}}}},
            r"families\.sgh: .*'triplet'",
        ),
    ],
)
def test_what_is_wrong_with_a_study_of_hashing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        checks.check_parts(study(**changes))


def test_codes_that_diverge_fail_with_their_reason() -> None:
    with pytest.raises(TrialFailed, match="the loss is"):
        trial(study(training={"epochs": 3, "lr": 1e18, "optimizer": "sgd"}), "greedyhash")


def test_packed_codes_agree_with_the_index() -> None:
    """What a study scores and what an index finds in use: the same but for the order of ties, and who of the last
    that tie is within the ten.
    """
    found = study()
    config = found.trial_config(
        found.families["greedyhash"], study_file.default_values(found.families["greedyhash"])
    )
    assert config.hashing is not None
    closed = data.load_closed("digits")
    x = pixels(closed.development).astype(np.float32)
    given = HashingConfig(loss=config.loss, hashing=config.hashing, training=config.training)
    packed = retrieval.pack_codes(hashing.train_hashing(given, x, lambda report, model: None).codes(x))
    index = retrieval.CodeIndex("flat", 16, model_version="codes/1").add(packed, np.arange(len(packed)))
    (_, nearest, distances), *_ = retrieval.hamming_neighbours(packed[:5], packed, 10)
    found_ids, found_distances = index.search(packed[:5], 10)
    np.testing.assert_array_equal(found_distances, distances)
    for q in range(5):
        assert len(set(found_ids[q].tolist())) == 10
        measured = np.bitwise_count(packed[q] ^ packed[found_ids[q]]).sum(axis=1)
        np.testing.assert_array_equal(found_distances[q], measured)
        for distance in set(distances[q, distances[q] < distances[q, -1]].tolist()):
            at_this = distances[q] == distance
            assert set(found_ids[q, at_this].tolist()) == set(nearest[q, at_this].tolist())
