"""What each rank runs in the tests of a distributed trial."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dmlstudy import data, distributed
from dmlstudy.data import canvas
from dmlstudy.embedders.backbones import BACKBONES, Backbone
from dmlstudy.records import PairCounts, TrialConfig, TrialReport
from dmlstudy.training import dataset_cache
from dmlstudy.training.embedder_trainer import EmbedderTrainer
from dmlstudy.training.interface import TrialFailed
from dmlstudy.training.trial import TrialPaused, TrialStopped, run_trial


def batch_normed(in_channels: int, width: int, weights: str | None) -> Backbone:
    """A small backbone with batch statistics."""
    network = nn.Sequential(
        nn.Conv2d(in_channels, width, 3, stride=2),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    return Backbone(network, 4 * width, in_channels, (0.5,) * in_channels, (0.5,) * in_channels)


cast(dict[str, Any], BACKBONES)["batch_normed"] = batch_normed


def config(**changes: Any) -> dict[str, Any]:
    """A trial of a second, changed at names such as ``training__epochs``."""
    raw: dict[str, Any] = {
        "family": "power",
        "data": {"name": "digits"},
        "embedder": {"dim": 8, "width": 4},
        "batch": {"classes": "all", "images_per_class": 8, "per_epoch": 3},
        "training": {"epochs": 2, "lr": 1e-2},
        "loss": {"name": "pair_weighting", "params": {"weighting": "power", "q": 1.0}},
        "num_folds": 2,
        "seed": 0,
        "recall_at": [1, 4],
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        raw[section] = {**raw[section], key: value} if key else value
    return raw


def steady(metrics: dict[str, float]) -> dict[str, float]:
    """Without the number that depends on the machine's mood."""
    return {name: value for name, value in metrics.items() if name != "images_per_second"}


def counting_trial(raw: dict[str, Any]) -> PairCounts | None:
    """What the thresholds of a verdict do."""
    return run_trial(TrialConfig.model_validate(raw), lambda _: None).pair_counts


def trial(raw: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Every report's metrics (its step among them), and the result's."""
    reports: list[TrialReport] = []
    result = run_trial(TrialConfig.model_validate(raw), reports.append)
    return [{"step": report.step, **report.metrics} for report in reports], result.metrics


def saving_trial(raw: dict[str, Any], folder: str) -> dict[str, float]:
    return run_trial(TrialConfig.model_validate(raw), lambda report: None, save_to=Path(folder)).metrics


def failing_trial(raw: dict[str, Any]) -> str:
    try:
        run_trial(TrialConfig.model_validate(raw), lambda report: None)
    except TrialFailed as error:
        return str(error)
    return "no failure"


def failing_trial_of_own_files(raw: dict[str, Any], folders: list[str]) -> str:
    """The failure where each rank's machine has a folder of its own under the name of the data."""
    return failing_trial(raw | {"data": raw["data"] | {"path": folders[distributed.rank()]}})


def stopped_trial(raw: dict[str, Any]) -> int:
    """How many reports were made before one of them stopped the trial."""
    reports: list[TrialReport] = []

    def report(given: TrialReport) -> None:
        reports.append(given)
        if len(reports) == 2:
            raise TrialStopped

    try:
        run_trial(TrialConfig.model_validate(raw), report)
    except TrialStopped:
        return len(reports)
    return -1


def moved(raw: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """How far each parameter of the embedder and the loss goes in the first epoch, by name."""
    images = data.load("digits").development
    one = EmbedderTrainer(TrialConfig.model_validate(raw), images, torch.device("cpu"), stream=0)
    before = {name: value.detach().clone() for name, value in one.state().items()}
    one.train_epoch(0)
    after = one.state()
    return {name: (value - after[name].detach()).numpy() for name, value in before.items()}


class Broken(Exception):
    """Stands for a kill, on every rank at once."""


def broken_trial(
    raw: dict[str, Any], folder: str, where: str, interval: float = 0
) -> tuple[list[dict[str, float]], dict[str, float], int]:
    """A trial that breaks again and again, each attempt going on from what the one before has kept.

    ``where``: 'report' breaks each attempt in the report of its second epoch, before the state after it is kept;
    'epoch' in its second epoch, after the state of the first was kept. Returns the reports of all attempts, the
    result and the number of attempts.
    """
    reports: list[dict[str, float]] = []
    begun: list[int] = []
    attempts = 0
    result = None
    train_epoch = EmbedderTrainer.train_epoch
    while result is None:
        attempts += 1
        begun.clear()

        def report(given: TrialReport) -> None:
            reports.append({"step": given.step, **given.metrics})
            if where == "report" and len(begun) == 2:
                raise Broken

        def breaking(self: Any, epoch: int) -> dict[str, float]:
            begun.append(epoch)
            if where == "epoch" and len(begun) == 2:
                train_epoch(self, epoch)  # lost
                raise Broken
            return train_epoch(self, epoch)

        with mock.patch.object(EmbedderTrainer, "train_epoch", breaking):
            try:
                result = run_trial(
                    TrialConfig.model_validate(raw),
                    report,
                    checkpoint=folder,
                    min_seconds_between=interval,
                )
            except Broken:
                continue
    return reports, result.metrics, attempts


def paused_trial(
    raw: dict[str, Any], folder: str, rungs: list[int]
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Pauses at each rung and goes on from its state: all that was reported, and the result."""
    reports: list[dict[str, float]] = []

    def report(given: TrialReport) -> None:
        reports.append({"step": given.step, **given.metrics})

    for rung in rungs:
        try:
            run_trial(
                TrialConfig.model_validate(raw),
                report,
                checkpoint=folder,
                min_seconds_between=1e9,
                pause_after=rung,
            )
        except TrialPaused:
            assert reports[-1]["step"] == rung
        else:
            raise AssertionError(f"it has not paused after {rung}")
    result = run_trial(TrialConfig.model_validate(raw), report, checkpoint=folder, min_seconds_between=1e9)
    return reports, result.metrics


def one_sided_trial(raw: dict[str, Any], folders: list[str]) -> tuple[list[int], list[str]]:
    """Each rank looks into a folder of its own: the steps reported, and what was warned of."""
    steps: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_trial(
            TrialConfig.model_validate(raw),
            lambda report: steps.append(report.step),
            checkpoint=Path(folders[distributed.rank()]),
        )
    return steps, [str(warning.message) for warning in caught if warning.category is RuntimeWarning]


def refused_trial(raw: dict[str, Any], folder: str) -> str:
    try:
        run_trial(TrialConfig.model_validate(raw), lambda report: None, checkpoint=Path(folder))
    except ValueError as error:
        return str(error)
    return "not refused"


def main() -> None:
    """A trial in a process to be killed: every report is a line of a file, and so is the result."""
    torch.set_num_threads(1)
    raw, folder, log = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    with log.open("a", buffering=1) as file:

        def report(given: TrialReport) -> None:
            file.write(json.dumps({"step": given.step, **given.metrics}) + "\n")

        result = run_trial(TrialConfig.model_validate(raw), report, checkpoint=folder, min_seconds_between=0)
        file.write(json.dumps({"result": result.metrics}) + "\n")


if __name__ == "__main__":
    main()


@contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    """Have caches, on disk and in shared memory, in a folder, and no data kept beyond."""
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),
        mock.patch.object(canvas, "SHARED_MEMORY", Path(folder)),
    ):
        try:
            yield
        finally:
            dataset_cache.forget()


def trial_with_cache(raw: dict[str, Any], folder: str) -> tuple[list[dict[str, float]], dict[str, float]]:
    """As ``trial``, with caches in a folder."""
    with _cache_in(folder):
        return trial(raw)


def failing_trial_with_cache(raw: dict[str, Any], folder: str) -> str:
    """As ``failing_trial``, with caches in a folder."""
    with _cache_in(folder):
        return failing_trial(raw)
