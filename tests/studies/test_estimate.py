"""What ``validate`` says of the machine it runs on; a GPU is named here, but none is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dmlstudy.embedders import precision
from dmlstudy.engine import ray_private
from dmlstudy.records import TrialConfig, TrialReport
from dmlstudy.spec import study_file
from dmlstudy.studies import checks, estimate

STUDY = """
name: small
data: {name: digits}
embedder: {dim: 8, width: 4}
batch: {classes: all, images_per_class: 4}
training: {epochs: 2}
families: {contrastive: {space: contrastive}}
search: {trials_per_family: 2}
protocol: {num_folds: 2, verdict_seeds: 1}
resources: {workers: 1, gpus_per_worker: 1}
"""
TOO_SMALL = "cannot hold a trial: it needs a cluster that can (--address), or smaller resources"


@pytest.fixture
def study(tmp_path: Path) -> study_file.StudySpec:
    path = tmp_path / "small.yaml"
    path.write_text(STUDY)
    return study_file.load(path)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_study_for_gpus_is_measured_on_one_or_the_line_says_that_it_is_not(
    study: study_file.StudySpec, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X1")
    manager = type("Manager", (), {"get_current_node_num_accelerators": staticmethod(lambda: int(has_gpu))})
    manager.get_current_node_accelerator_type = staticmethod(lambda: "X1")  # type: ignore[attr-defined]
    monkeypatch.setattr(ray_private, "get_accelerator_manager_for_resource", lambda kind: manager)
    devices = []

    def run_trial(config: TrialConfig, report: Any, *, device: torch.device) -> None:
        devices.append(device.type)
        report(TrialReport(step=2, metrics={"images_per_second": 1000.0}))

    monkeypatch.setattr(estimate, "run_trial", run_trial)
    *lines, time = estimate.describe(study, checks.check_parts(study), measure=True)
    assert devices == ["cuda" if has_gpu else "cpu"]
    on = "on NVIDIA X1" if has_gpu else "on this machine's CPU, for it has no GPU"
    assert f"(measured on a few batches in one process {on};" in time
    assert any(TOO_SMALL in line for line in lines) is not has_gpu


@pytest.mark.parametrize("is_emulated", [False, True])
def test_a_precision_that_the_processor_only_emulates_is_told(
    tmp_path: Path, is_emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains ten times slower, for an hour before the first line of progress says so."""
    monkeypatch.setattr(precision, "is_emulated", lambda name: is_emulated and name == "bf16")
    path = tmp_path / "small.yaml"
    file = STUDY.replace("epochs: 2", "epochs: 2, precision: {choice: [float32, bf16], default: bf16}")
    path.write_text(file.replace(", gpus_per_worker: 1", ""))
    spec = study_file.load(path)
    lines = estimate.describe(spec, checks.check_parts(spec), measure=False)
    said = [
        line
        for line in lines
        if line.startswith("training.precision: this machine's processor only emulates bf16")
    ]
    assert len(said) == is_emulated
    path.write_text(file)
    assert checks.slowness(study_file.load(path)) == []  # trials have GPUs


def test_a_frozen_backbone_that_runs_in_each_epoch_is_told_where_the_study_runs_too(tmp_path: Path) -> None:
    """Head-only trials are fifty times as fast with kept features, and only `validate` said so."""
    path = tmp_path / "small.yaml"
    file = STUDY.replace("epochs: 2", "epochs: 2, freeze_backbone_epochs: 2")
    path.write_text(file)
    (line,) = checks.slowness(study_file.load(path))
    assert line.startswith(
        "the backbone is frozen in all epochs, and yet runs in each; training.feature_cache: auto "
    )
    path.write_text(file.replace("epochs: 2, f", "epochs: 2, feature_cache: auto, f"))
    assert checks.slowness(study_file.load(path)) == []


def test_a_study_for_cpus_says_nothing_of_gpus(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(STUDY.replace(", gpus_per_worker: 1", ""))
    small = study_file.load(path)
    lines = estimate.describe(small, checks.check_parts(small), measure=False)
    assert not any("this machine" in line for line in lines)
