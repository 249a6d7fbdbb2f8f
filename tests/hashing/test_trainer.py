"""Training on frozen features: deterministic, reported, stoppable, and better than no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dmlstudy import model_folder
from dmlstudy.hashing import METHODS, HashingFailed, HashingModel, evaluate, load, save, train_hashing
from dmlstudy.records import CodesConfig, HashingConfig, LossConfig, TrainingConfig, TrialReport

each_method = pytest.mark.parametrize("name", sorted(METHODS))
SMALL = {"tbh": {"hidden": 32, "continuous": 16}, "ssdh": {"hidden": 32}}


def clusters(num_rows: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Six Gaussian clouds in 12 dimensions, of variance about 1 in each."""
    centres_CF = np.random.default_rng(0).normal(size=(6, 12))
    rng = np.random.default_rng(seed)
    labels_N = rng.integers(0, 6, num_rows)
    x_NF = 0.9 * centres_CF[labels_N] + 0.6 * rng.normal(size=(num_rows, 12))
    return x_NF.astype(np.float32), labels_N


def config(name: str = "greedyhash", nasa: dict[str, Any] | None = None, **changes: Any) -> HashingConfig:
    training = {"epochs": 4, "lr": 5e-3} | changes.pop("training", {})
    return HashingConfig(
        loss=LossConfig(name=name, params=SMALL.get(name, {}) | changes.pop("params", {})),
        regularizer=None if nasa is None else LossConfig(name="point_ranking", params=nasa),
        hashing=CodesConfig(num_bits=16, batch_size=32),
        training=TrainingConfig(**training),
        **changes,
    )


def trained(
    setting: HashingConfig, x_NF: NDArray[np.float32] | None = None
) -> tuple[HashingModel, list[TrialReport]]:
    reports: list[TrialReport] = []
    x_NF = clusters(200, seed=1)[0] if x_NF is None else x_NF
    return train_hashing(setting, x_NF, lambda report, _: reports.append(report)), reports


def same(one: HashingModel, other: HashingModel) -> bool:
    pairs = zip(one.method.state_dict().values(), other.method.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@each_method
@pytest.mark.parametrize("nasa", [None, {"neighbours": 4, "preset": "paper"}], ids=["plain", "nasa"])
def test_equal_configurations_give_equal_models(name: str, nasa: dict[str, Any] | None) -> None:
    model, reports = trained(config(name, nasa, training={"epochs": 2}))
    torch.manual_seed(7)
    again, reports_again = trained(config(name, nasa, training={"epochs": 2}))
    assert same(model, again)
    for one, other in zip(reports, reports_again, strict=True):
        drop = {"rows_per_second"}
        assert {k: v for k, v in one.metrics.items() if k not in drop} == {
            k: v for k, v in other.metrics.items() if k not in drop
        }
    assert [report.step for report in reports] == [1, 2]
    assert not same(model, trained(config(name, nasa, seed=1, training={"epochs": 2}))[0])


@each_method
def test_nasa_of_weight_zero_leaves_the_method_alone_and_of_weight_one_does_not(name: str) -> None:
    plain, _ = trained(config(name, training={"epochs": 2}))
    zero, reports = trained(config(name, {"weight": 0.0}, training={"epochs": 2}))
    one, _ = trained(config(name, {"weight": 1.0}, training={"epochs": 2}))
    assert same(plain, zero)
    assert not same(plain, one)
    metrics = reports[-1].metrics
    assert metrics["ranking_loss"] > 0
    assert metrics["train_loss"] == metrics["method_loss"]


@each_method
def test_trained_codes_find_the_clusters(name: str) -> None:
    x_NF, labels_N = clusters(300, seed=1)
    query_QF, query_labels_Q = clusters(60, seed=2)
    scores = {
        epochs: evaluate(
            trained(config(name, {}, training={"epochs": epochs, "lr": 5e-3}), x_NF)[0],
            query_QF, query_labels_Q, x_NF, labels_N, at=(20,), rerank=100,
        )
        for epochs in (0, 30)
    }  # fmt: skip
    assert scores[30]["map"] > max(scores[0]["map"] + 0.05, 0.6)
    assert scores[30]["first_stage_map"] > 0.6


def test_the_ranking_loss_falls() -> None:
    _, reports = trained(config(nasa={"weight": 10.0}, training={"epochs": 15}))
    first, last = reports[0].metrics["ranking_loss"], reports[-1].metrics["ranking_loss"]
    assert last < 0.95 * first


def test_optimizers_and_the_head_s_rate() -> None:
    plain, _ = trained(config(nasa={}))
    for training in (
        {"optimizer": "sgd"},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"head_lr_mult": 5.0},
    ):
        assert not same(plain, trained(config(nasa={}, training=training))[0])


def test_fewer_rows_than_a_batch_and_no_epochs() -> None:
    x_NF = clusters(20, seed=3)[0]
    model, reports = trained(config(), x_NF)
    assert len(reports) == 4
    untrained, none = trained(config(training={"epochs": 0}), x_NF)
    assert none == []
    assert not same(model, untrained)


@pytest.mark.parametrize("standardize", [True, False])
def test_features_are_standardised_by_those_trained_on(standardize: bool) -> None:
    """(x - mean) / root of the mean variance: shift and common scale of features change nothing, or all."""
    x_NF, _ = clusters(120, seed=1)
    other_NF, _ = clusters(30, seed=2)
    setting = config(nasa={}).model_copy(
        update={"hashing": CodesConfig(num_bits=16, batch_size=32, standardize=standardize)}
    )
    model, _ = trained(setting, x_NF)
    moved, _ = trained(setting, 8 * x_NF + 64)
    alike = np.mean(model.codes(other_NF) == moved.codes(8 * other_NF + 64))
    assert (alike > 0.99) == standardize
    mean_F, scale = (x_NF.mean(axis=0), np.sqrt(x_NF.var(axis=0).mean())) if standardize else (0.0, 1.0)
    np.testing.assert_allclose(model.mean_F, np.zeros(12) + mean_F, atol=1e-6)
    np.testing.assert_allclose(model.scale, scale, rtol=1e-6)


@each_method
@pytest.mark.parametrize("nasa", [None, {"neighbours": 4, "preset": "paper"}], ids=["plain", "nasa"])
def test_a_saved_model_gives_the_same_codes(name: str, nasa: dict[str, Any] | None, tmp_path: Path) -> None:
    model, _ = trained(config(name, nasa, training={"epochs": 1}))
    save(model, tmp_path / "codes", {"family": name})
    again = load(tmp_path / "codes")
    x_NF, _ = clusters(50, seed=4)
    np.testing.assert_array_equal(again.codes(x_NF), model.codes(x_NF))
    if nasa is not None:
        np.testing.assert_array_equal(again.omega(x_NF), model.omega(x_NF))
    assert again.recipe == model.recipe
    weights = tmp_path / "codes" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"weights\.safetensors: altered"):
        load(tmp_path / "codes")


def test_what_is_no_hashing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"manifest\.json: no such file"):
        load(tmp_path)
    save(trained(config(training={"epochs": 0}))[0], tmp_path)
    description = tmp_path / "hashing.json"
    description.write_text(description.read_text().replace('"greedyhash"', '"gredyhash"'))
    model_folder.seal(tmp_path)
    with pytest.raises(ValueError, match=r"hashing\.json: not understood .*greedyhash"):
        load(tmp_path)


def test_what_report_raises_ends_the_training() -> None:
    class Stop(Exception): ...

    def report(each: TrialReport, model: HashingModel) -> None:
        assert not model.training
        if each.step == 2:
            raise Stop

    with pytest.raises(Stop):
        train_hashing(config(), clusters(64, seed=1)[0], report)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (config(training={"freeze_backbone_epochs": 1}), "mean nothing on frozen features"),
        (config(training={"loss_lr_mult": 2.0}), "mean nothing on frozen features"),
        (config(training={"schedule": "cosine"}), "training.schedule: belongs to the training of embedders"),
        (config("gredy"), "did you mean 'greedyhash'"),
    ],
)
def test_settings_without_meaning_are_refused(setting: HashingConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(setting)


def test_faults_of_features() -> None:
    x_NF = clusters(50, seed=1)[0]
    broken_NF = x_NF.copy()
    broken_NF[7, 3] = np.nan
    for features_NF, message in (
        (broken_NF, "training features: row 7 is not finite"),
        (x_NF.astype(np.float64), "expected float32"),
        (x_NF[:1], "1 rows; needs at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            trained(config(), features_NF)
    with pytest.raises(HashingFailed, match="epoch 1, batch 1: the loss is"):
        trained(
            config("sgh").model_copy(
                update={"hashing": CodesConfig(num_bits=16, batch_size=32, standardize=False)}
            ),
            np.full((40, 12), 3e38, np.float32) * np.linspace(-1, 1, 40, dtype=np.float32)[:, None],
        )
    model, _ = trained(config())
    with pytest.raises(
        ValueError, match=r"expected float32 of shape \(N, 12\), got float32 of shape \(5, 3\)"
    ):
        model.codes(np.zeros((5, 3), np.float32))
    with pytest.raises(ValueError, match="has no structure head"):
        model.omega(x_NF)


def test_numbers_of_bits_are_checked_in_the_record() -> None:
    for num_bits in (0, 12, 2048):
        with pytest.raises(ValueError, match="num_bits"):
            CodesConfig(num_bits=num_bits)
