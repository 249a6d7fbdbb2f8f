"""A trial on the digits: steps, folds, equal digits for equal configurations, failures, world sizes."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo_pool import GlooPool
from support.ranks import config, failing_trial, saving_trial, steady, stopped_trial, trial

from dmlstudy import data, embedders, retrieval
from dmlstudy.records import TrialConfig, TrialReport
from dmlstudy.training.interface import TrialFailed
from dmlstudy.training.trial import TrialStopped, run_trial


@pytest.fixture(scope="module")
def plain() -> tuple[list[dict[str, float]], dict[str, float]]:
    return trial(config())


def test_steps_count_up_over_folds(plain: tuple[list[dict[str, float]], dict[str, float]]) -> None:
    reports, _ = plain
    assert [report["step"] for report in reports] == [1, 2, 3, 4]
    expected = {"step", "map_at_r", "r_precision", "recall_at_1", "recall_at_4", "train_loss"}
    expected |= {"images_per_second", "num_queries_without_positive"}
    for report in reports:
        assert set(report) == expected
        assert all(math.isfinite(value) for value in report.values())
        assert 0 < report["map_at_r"] < report["recall_at_1"] <= report["recall_at_4"] <= 1
        assert report["images_per_second"] > 0


def test_a_report_is_the_mean_over_the_folds_so_far(
    plain: tuple[list[dict[str, float]], dict[str, float]],
) -> None:
    reports, result = plain
    folds = [result["fold_0_map_at_r"], result["fold_1_map_at_r"]]
    assert folds[0] != folds[1]
    assert reports[1]["map_at_r"] == folds[0]
    assert reports[3]["map_at_r"] == pytest.approx(statistics.fmean(folds), abs=1e-15)
    assert result["map_at_r"] == reports[3]["map_at_r"]
    assert result["recall_at_1"] == reports[3]["recall_at_1"]
    assert result["map_at_r_stderr"] == pytest.approx(abs(folds[0] - folds[1]) / 2)
    # What the second fold scored after its first epoch lies between the report and the first fold.
    assert reports[2]["map_at_r"] != reports[1]["map_at_r"]


def test_one_fold_has_no_standard_error() -> None:
    reports, result = trial(config(num_folds=1, training__epochs=1))
    assert [report["step"] for report in reports] == [1]
    assert "map_at_r_stderr" not in result
    assert result["fold_0_map_at_r"] == result["map_at_r"]


def test_the_objective_is_the_one_asked_for() -> None:
    _, result = trial(config(objective="recall_at_1", training__epochs=1))
    assert "recall_at_1_stderr" in result
    assert "map_at_r_stderr" not in result


def test_a_fold_is_judged_on_classes_it_was_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []
    rank = retrieval.rank

    def listening(z_ND: Any, labels_N: Any, *arguments: Any, **sides: Any) -> retrieval.Ranked:
        seen.append(set(labels_N.tolist()))
        return rank(z_ND, labels_N, *arguments, **sides)

    trained: list[set[int]] = []
    batches = data.PKBatches.__init__

    def noting(self: Any, labels_N: Any, *arguments: Any) -> None:
        trained.append(set(labels_N.tolist()))
        batches(self, labels_N, *arguments)

    monkeypatch.setattr(retrieval, "rank", listening)
    monkeypatch.setattr(data.PKBatches, "__init__", noting)
    trial(config(training__epochs=1))
    folds = data.class_disjoint_folds(data.load("digits").development.labels_N, 2, 0)
    assert seen == [set(fold.validation_classes.tolist()) for fold in folds]
    assert [len(classes) for classes in trained] == [len(fold.train_classes) for fold in folds]
    assert seen[0] | seen[1] == {0, 1, 2, 3, 4}
    assert not seen[0] & seen[1]


def test_the_same_configuration_gives_the_same_digits(
    plain: tuple[list[dict[str, float]], dict[str, float]],
) -> None:
    trial(config(seed=7, loss={"name": "margin"}, training__optimizer="sgd"))  # leaves nothing behind
    torch.manual_seed(99)
    np.random.seed(99)
    reports, result = trial(config())
    assert [steady(report) for report in reports] == [steady(report) for report in plain[0]]
    assert result == plain[1]


def test_a_trial_inherits_nothing_from_those_before_it() -> None:
    """Weights, generators, batch statistics, memory queue: any order gives the same digits."""
    statistics_of_batches = {"backbone": "batch_normed", "width": 4, "dim": 8, "freeze_bn": False}
    trials = {
        "memory": config(
            loss={"name": "contrastive"}, batch__memory_size=100, embedder=statistics_of_batches
        ),
        "structure": config(
            loss={"name": "proxy_nca"},
            regularizer={"name": "structure", "params": {"weight": 0.5}},
            embedder=statistics_of_batches,
        ),
        "levels": config(
            loss={"name": "proxy_nca"}, regularizer={"name": "distance_levels"}, training__optimizer="sgd"
        ),
        "random": config(
            loss={"name": "pml:TripletMarginLoss", "params": {"triplets_per_anchor": 2}}, training__lr=1e-3
        ),
        "verdict": config(phase="verdict", fold_models=True, embedder=statistics_of_batches),
    }
    names = list(trials)
    seen: dict[str, list[Any]] = {name: [] for name in names}
    for order in (names, names[::-1], [*names[2:], *names[:2]], ["random", "random", "memory", "memory"]):
        for name in order:
            reports, result = trial(trials[name])
            seen[name].append(([steady(report) for report in reports], result))
    for name in names:
        assert len(seen[name]) >= 3
        assert all(found == seen[name][0] for found in seen[name]), name


def test_what_is_saved_scores_as_two_processes_said(pool: GlooPool, tmp_path: Path) -> None:
    """Also where each rank has batch statistics of its own."""
    raw = config(
        phase="verdict", embedder={"backbone": "batch_normed", "width": 4, "dim": 8, "freeze_bn": False}
    )
    answers = pool.run(2, saving_trial, raw, str(tmp_path / "embedder"))
    assert answers[0] == answers[1]
    test = data.load("digits").test
    z_ND = embedders.embed(embedders.load(tmp_path / "embedder"), test.images_NHWC)
    scores = retrieval.evaluate(z_ND, test.labels_N, (1, 4))
    assert answers[0] == pytest.approx({f"test_{name}": value for name, value in scores.items()}, abs=1e-6)


def test_a_loss_with_random_proxies_gives_the_same_digits_again() -> None:
    raw = config(loss={"name": "proxy_nca"}, num_folds=1)
    torch.manual_seed(1)
    first = trial(raw)
    torch.manual_seed(2)
    again = trial(raw)
    assert [steady(report) for report in first[0]] == [steady(report) for report in again[0]]
    assert first[1] == again[1]


def test_another_seed_or_parameter_gives_other_digits(
    plain: tuple[list[dict[str, float]], dict[str, float]],
) -> None:
    for changed in (
        config(seed=1),
        config(loss__params={"weighting": "constant"}),
        config(training__lr=1e-3),
    ):
        assert trial(changed)[1]["map_at_r"] != plain[1]["map_at_r"]


def test_training_teaches() -> None:
    _, untrained = trial(config(training__epochs=0, num_folds=1))
    _, trained = trial(config(training__epochs=4, num_folds=1, batch__per_epoch=10))
    reports, _ = trial(config(training__epochs=4, num_folds=1, batch__per_epoch=10))
    assert reports[-1]["train_loss"] < 0.7 * reports[0]["train_loss"]
    assert trained["map_at_r"] != untrained["map_at_r"]


def test_no_epochs_means_the_untrained_embedder() -> None:
    reports, result = trial(config(training__epochs=0))
    assert [report["step"] for report in reports] == [1, 2]
    assert "train_loss" not in reports[0]
    assert 0 < result["map_at_r"] < 1


def test_a_stop_passes_through() -> None:
    assert stopped_trial(config()) == 2


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("loss", ["pair_weighting", "margin", "proxy_nca"])
def test_a_diverging_trial_says_where(optimizer: str, loss: str) -> None:
    raw = config(loss={"name": loss}, training__lr=1e36, training__optimizer=optimizer)
    said = failing_trial(raw)
    assert re.fullmatch(
        r"epoch 1, batch 2: rank 0: the embeddings of \d+ of \d+ images are not finite, .*", said
    )


def test_diverging_in_the_last_batch_is_a_failure_too() -> None:
    raw = config(training__lr=1e36, training__optimizer="sgd", training__epochs=1, batch__per_epoch=1)
    message = failing_trial(raw)
    assert message == "embeddings are not finite after epoch 1"


def test_a_frozen_backbone_stays_and_the_head_learns(tmp_path: Path) -> None:
    def weights(**changes: Any) -> dict[str, torch.Tensor]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        raw = config(phase="verdict", training__optimizer="sgd", **changes)
        run_trial(TrialConfig.model_validate(raw), lambda report: None, save_to=folder)
        return embedders.load(folder).state_dict()

    start = weights(training__epochs=0)
    frozen = weights(training__freeze_backbone_epochs=2)
    free = weights()
    for name, value in start.items():
        if name.startswith("backbone"):
            assert torch.equal(frozen[name], value)
    assert not torch.equal(frozen["head.weight"], start["head.weight"])
    assert any(not torch.equal(free[n], v) for n, v in start.items() if n.startswith("backbone"))


def test_a_verdict_leaves_an_embedder_that_scores_as_it_said(tmp_path: Path) -> None:
    reports: list[TrialReport] = []
    raw = config(phase="verdict", seed=3)
    result = run_trial(TrialConfig.model_validate(raw), reports.append, save_to=tmp_path / "embedder")
    assert [report.step for report in reports] == [1, 2]
    assert not [name for report in reports for name in report.metrics if "map" in name or "recall" in name]
    assert result.embedder_folder == str(tmp_path / "embedder")
    assert set(result.metrics) == {
        "test_map_at_r",
        "test_r_precision",
        "test_recall_at_1",
        "test_recall_at_4",
        "test_num_queries_without_positive",
    }
    embedder = embedders.load(tmp_path / "embedder")
    test = data.load("digits").test
    assert set(test.labels_N.tolist()) == {5, 6, 7, 8, 9} or len(test.class_names) == 5
    scores = retrieval.evaluate(embedders.embed(embedder, test.images_NHWC), test.labels_N, (1, 4))
    assert result.metrics == {f"test_{name}": value for name, value in scores.items()}
    extra = json.loads((tmp_path / "embedder" / "embedder.json").read_text())["extra"]
    assert extra["config"] == TrialConfig.model_validate(raw).model_dump(mode="json")
    assert extra["development_fingerprint"] == data.load("digits").development.fingerprint()
    assert extra["test_fingerprint"] == test.fingerprint()
    assert (extra["num_shared_images"], extra["workers"], extra["device"]) == (0, 1, "cpu")


def test_fold_models_are_scored_one_by_one_and_concatenated(monkeypatch: pytest.MonkeyPatch) -> None:
    embedded: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    trained: list[int] = []
    rank, batches = retrieval.rank, data.PKBatches.__init__

    def listening(z_ND: Any, *arguments: Any, **sides: Any) -> retrieval.Ranked:
        embedded.append(z_ND)
        return rank(z_ND, *arguments, **sides)

    def noting(self: Any, labels_N: Any, *arguments: Any) -> None:
        trained.append(len(labels_N))
        batches(self, labels_N, *arguments)

    monkeypatch.setattr(retrieval, "rank", listening)
    monkeypatch.setattr(data.PKBatches, "__init__", noting)
    reports, result = trial(config(phase="verdict", seed=3, fold_models=True))
    assert [report["step"] for report in reports] == [1, 2, 3, 4, 5, 6]
    development, test = data.load("digits").development, data.load("digits").test
    folds = data.class_disjoint_folds(development.labels_N, 2, 3)
    assert trained == [len(fold.train_indices) for fold in folds] + [len(development.labels_N)]
    first, second, together, full = embedded
    assert first.shape == second.shape == full.shape
    np.testing.assert_allclose(together @ together.T, (first @ first.T + second @ second.T) / 2, atol=1e-5)
    scores = [retrieval.evaluate(z_ND, test.labels_N, (1, 4))["map_at_r"] for z_ND in embedded]
    assert result["test_separate_map_at_r"] == pytest.approx((scores[0] + scores[1]) / 2)
    assert result["test_concatenated_map_at_r"] == scores[2]
    assert result["test_map_at_r"] == scores[3]
    assert result["test_map_at_r"] == trial(config(phase="verdict", seed=3))[1]["test_map_at_r"]


def test_a_verdict_depends_on_its_seed_and_nothing_else(tmp_path: Path) -> None:
    def verdict(seed: int) -> dict[str, float]:
        return trial(config(phase="verdict", seed=seed, training__epochs=1))[1]

    assert verdict(1) == verdict(1)
    assert verdict(1) != verdict(2)


def test_a_verdict_without_training_makes_no_report() -> None:
    reports, result = trial(config(phase="verdict", training__epochs=0))
    assert reports == []
    assert 0 < result["test_map_at_r"] < 1


def test_a_search_leaves_no_embedder(tmp_path: Path) -> None:
    raw = config(training__epochs=0, num_folds=1)
    result = run_trial(TrialConfig.model_validate(raw), lambda report: None, save_to=tmp_path / "embedder")
    assert result.embedder_folder is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": {"name": "margin"}, "batch__images_per_class": 5, "training__optimizer": "sgd"},
        {"loss": {"name": "proxy_nca"}, "batch__classes": 2, "training__lr": 1e-3},
        {"phase": "verdict", "loss": {"name": "multi_similarity"}},
        {"loss": {"name": "subcenter_arcface", "params": {"margin_by": "class_size"}}},
        {"loss": {"name": "magface"}},
    ],
    ids=["pair_weighting", "margin-ragged", "proxy_nca", "verdict", "class sizes", "norms"],
)
def test_two_processes_find_what_one_finds(changes: dict[str, Any], pool: GlooPool) -> None:
    raw = config(**changes)
    reports, result = trial(raw)
    answers = pool.run(2, trial, raw)
    for other_reports, other_result in answers:
        assert [r["step"] for r in other_reports] == [r["step"] for r in reports]
        for report, other in zip(reports, other_reports, strict=True):
            assert steady(other) == pytest.approx(steady(report), abs=1e-5)
        assert other_result == pytest.approx(result, abs=1e-5)
    assert answers[0][1] == answers[1][1]
    assert [steady(r) for r in answers[0][0]] == [steady(r) for r in answers[1][0]]


def test_two_processes_weigh_layers_as_one_does(pool: GlooPool) -> None:
    """Neighbours that are all but equally near may change places, and a query's score with them; weights may not.

    For one epoch: a second one makes float32's rounding ten times as large. That a step is exact is shown in float64
    (``tests/distributed``).
    """
    params = {"beta": 0.05}  # so that weights move far in few steps
    raw = config(
        loss={"name": "adaptive_bound", "params": params}, embedder__head_depth=2, training__epochs=1
    )
    reports, _ = trial(raw)
    assert abs(reports[-1]["layer_weight_0"] - 1 / 3) > 1e-3
    for other_reports, _ in pool.run(2, trial, raw):
        for report, other in zip(reports, other_reports, strict=True):
            assert steady(other) == pytest.approx(steady(report), abs=5e-3)
            for name in ("train_loss", "layer_weight_0", "layer_weight_1", "layer_weight_2"):
                assert other[name] == pytest.approx(report[name], abs=1e-5)


def test_two_processes_fail_alike(pool: GlooPool) -> None:
    raw = config(training__lr=1e36, training__optimizer="sgd")
    answers = pool.run(2, failing_trial, raw)
    assert answers[0] == answers[1]
    assert answers[0].startswith("epoch 1, batch 2: rank 0: the embeddings of 8 of 8 images are not finite")
    assert failing_trial(raw).startswith("epoch 1, batch 2: rank 0: the embeddings of 16 of 16 images")
    last = config(training__lr=1e36, training__optimizer="sgd", training__epochs=1, batch__per_epoch=1)
    answers = pool.run(2, failing_trial, last)
    assert answers[0] == answers[1] == failing_trial(last)


def test_two_processes_stop_alike_and_go_on_with_the_next(
    pool: GlooPool, plain: tuple[list[dict[str, float]], dict[str, float]]
) -> None:
    assert pool.run(2, stopped_trial, config()) == [2, 2]
    assert pool.run(2, trial, config())[0][1] == pytest.approx(plain[1], abs=1e-5)


def test_errors_are_of_the_kinds_a_study_knows() -> None:
    assert issubclass(TrialFailed, RuntimeError)
    assert not issubclass(TrialStopped, TrialFailed)


def test_a_trial_tells_how_long_an_image_takes_if_it_is_asked() -> None:
    def told(**changes: Any) -> float:
        """Of a network of this width; none where nobody asked."""
        asked = TrialConfig.model_validate(config(**changes))
        return run_trial(asked, lambda report: None).metrics.get("embed_ms_per_image", 0.0)

    assert 0 < told(measure_latency=True) < told(measure_latency=True, embedder__width=256)
    assert told() == 0
