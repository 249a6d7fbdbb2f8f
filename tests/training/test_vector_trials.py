"""Trials on feature matrices: a linear or small network metric, trained, judged, saved and used like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.ranks import config, trial

from dmlstudy import embedders
from dmlstudy.records import TrialConfig
from dmlstudy.registry.pyfunc import _load_pyfunc
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError
from dmlstudy.studies import checks
from dmlstudy.training.trial import run_trial


def matrix(folder: Path) -> str:
    """Ten classes whose signal is in 3 of 20 dimensions, the others being louder noise."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 30)
    x = 3.0 * rng.normal(size=(300, 20))
    x[:, :3] = rng.normal(size=(10, 3))[y] + 0.3 * rng.normal(size=(300, 3))
    np.savez(folder / "x.npz", x=x.astype(np.float32), y=y)
    return str(folder / "x.npz")


@pytest.mark.parametrize("backbone", ["linear", "mlp1"])
def test_a_metric_is_learned_on_vectors(backbone: str, tmp_path: Path) -> None:
    raw = config(
        data={"name": "features", "path": matrix(tmp_path)},
        embedder={"backbone": backbone, "dim": 4, "width": 16},
        batch={"classes": "all", "images_per_class": 10, "per_epoch": 40},
        training={"epochs": 3, "lr": 1e-2},
        num_folds=1,
        phase="verdict",
    )
    found = TrialConfig.model_validate(raw)
    metrics = run_trial(found, lambda report: None, save_to=tmp_path / "model").metrics
    untrained = trial(raw | {"training": {"epochs": 0}})[1]
    assert metrics["test_map_at_r"] > untrained["test_map_at_r"] + 0.1
    assert embedders.largest_deviation(tmp_path / "model") == pytest.approx(0, abs=1e-6)
    x = np.random.default_rng(1).normal(size=(5, 20))
    z = _load_pyfunc(str(tmp_path / "model")).predict(x)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)


def test_what_vectors_cannot_have(tmp_path: Path) -> None:
    raw = {
        "name": "vectors",
        "data": {"name": "features", "path": matrix(tmp_path)},
        "embedder": {"backbone": "linear", "dim": 4},
        "batch": {"classes": "all"},
        "families": {"pairs": {"space": "pair_weighting", "override": {"batch.classes": "all"}}},
        "protocol": {"num_folds": 2},
    }
    checks.check_parts(study_file.parse(raw))
    with pytest.raises(SpecError, match=r"augmentation: features are vectors"):
        checks.check_parts(study_file.parse(raw | {"augmentation": {"flip": 0.5}}))
    with pytest.raises(SpecError, match=r"embedder\.backbone: .*small_conv"):
        checks.check_parts(study_file.parse(raw | {"embedder": {"backbone": "small_conv", "dim": 4}}))
