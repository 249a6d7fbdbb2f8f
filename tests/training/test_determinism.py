"""What a trial sets aside for as long as it trains; a GPU is named here, but none is asked."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.ranks import config

from dmlstudy.records import TrialConfig, TrialReport
from dmlstudy.training.determinism import WORKSPACE, repeatable
from dmlstudy.training.interface import TrialFailed
from dmlstudy.training.trial import run_trial

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Settings = tuple[str, bool, bool]


def settings() -> Settings:
    mode = ("off", "warn", "error")[torch.get_deterministic_debug_mode()]
    return mode, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark


@pytest.fixture(autouse=True)
def without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, "")  # so that it is put back
    monkeypatch.delenv(WORKSPACE)


@pytest.mark.parametrize(
    ("how", "within"),
    [
        ("where_possible", ("warn", True, False)),
        ("always", ("error", True, False)),
        ("never", ("off", False, True)),
    ],
)
def test_a_gpu_repeats_itself_during_a_trial_only(
    how: str, within: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = settings()
    with repeatable(how, CUDA):
        assert settings() == within
    assert settings() == before
    assert os.environ[WORKSPACE] == ":4096:8", "cuBLAS reads it once, so it is there from the first trial on"


def test_a_workspace_of_ones_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with repeatable("always", CUDA):
        assert os.environ[WORKSPACE] == ":16:8"


@pytest.mark.parametrize("how", ["where_possible", "always", "never"])
def test_a_cpu_is_left_alone(how: str) -> None:
    before = settings()
    seen: list[Settings] = []
    raw = config(training__deterministic=how, training__epochs=1, num_folds=1)
    run_trial(TrialConfig.model_validate(raw), lambda report: seen.append(settings()))
    assert seen == [before]
    assert WORKSPACE not in os.environ


def test_an_operation_that_cannot_repeat_is_named() -> None:
    message = (
        "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set ..."
    )
    with pytest.raises(TrialFailed) as caught, repeatable("always", CUDA):
        raise RuntimeError(message)
    assert str(caught.value) == (
        "training.deterministic: always, but PyTorch has no deterministic adaptive_avg_pool2d_backward_cuda on CUDA;"
        " set it to where_possible"
    )
    for how, text in (("always", "out of luck"), ("never", message)):
        with pytest.raises(RuntimeError, match=text[:11]), repeatable(how, CUDA):
            raise RuntimeError(text)


def test_losses_and_scores_are_in_full_float32_whatever_a_library_has_set() -> None:
    seen: list[Any] = []

    def report(report: TrialReport) -> None:
        seen.append(torch.get_float32_matmul_precision())

    torch.set_float32_matmul_precision("medium")
    try:
        run_trial(TrialConfig.model_validate(config(training__epochs=1, num_folds=1)), report)
        assert seen == ["highest"]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("device", [CUDA, CPU])
def test_a_trial_gives_its_gpus_memory_back_however_it_ends(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    monkeypatch.setattr("dmlstudy.training.trial._Trial", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_trial(TrialConfig.model_validate(config()), lambda report: None, device=device)
    assert given_back == [True] * (device.type == "cuda")
