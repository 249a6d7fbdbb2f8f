"""What a trial costs beyond its training: Ray's documented recipe, and a gang that serves one trial after another.

    nice -n 5 .venv/bin/python tests/benchmarks/overhead.py [--trials 3] [--study 32] [--seconds 3]

The recipe is a Tune function that calls ``TorchTrainer.fit()``, one process group per trial, its workers on Ray's
default settings but for the CPU that the waiting function would take from them. Both run the same trials on 2
workers. Training is the time within ``train_epoch`` on rank 0; all else (evaluation, building the embedder, logging,
asking for the next trial, waiting) counts as overhead. Counted is from the end of the first trial to that of the
last, so the first start of the processes is in neither figure.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

EPOCHS, PER_EPOCH_AT_FIRST = 3, 20
CLASSES, IMAGES_PER_CLASS = 2, 10
SPEC = """
name: {name}
data: {{name: digits}}
embedder: {{dim: 16, width: 8}}
batch: {{classes: 2, images_per_class: 10, per_epoch: {per_epoch}}}
training: {{epochs: 3, head_lr_mult: 1, lr: 1.0e-3}}
families:
  ms: {{space: multi_similarity}}
search: {{trials_per_family: {trials}, scheduler: none}}
protocol: {{num_folds: 1, verdict_seeds: 1, fold_models: false}}
resources: {{workers: 2, cpus_per_worker: 1, max_concurrent_trials: 1}}
"""


class Report(NamedTuple):
    """An epoch's report as the driver heard it."""

    trial: str
    heard: float
    trained_s: float


class Cost(NamedTuple):
    """Of the trials after the first: their number, and the seconds of one, within training and in all."""

    num_trials: int
    trained_s: float
    total_s: float
    switch_s: float | None = None

    def row(self, name: str) -> str:
        beyond = self.total_s - self.trained_s
        switch = "" if self.switch_s is None else f"{self.switch_s:.2f}"
        share = f"{self.trained_s / self.total_s:.1%}"
        return f"| {name} | {self.num_trials} | {self.trained_s:.2f} | {beyond:.2f} | {switch} | {share} |"


def cost(reports: list[Report]) -> Cost:
    """Between the last report of the first trial and that of the last.

    A switch is from a trial's last report to the first training step of the next, less one evaluation.
    """
    by_trial: dict[str, list[Report]] = {}
    for report in reports:
        by_trial.setdefault(report.trial, []).append(report)
    trials = list(by_trial.values())
    num_counted = len(trials) - 1
    total = trials[-1][-1].heard - trials[0][-1].heard
    trained = sum(report.trained_s for trial in trials[1:] for report in trial)
    evaluations = [b.heard - a.heard - b.trained_s for t in trials for a, b in itertools.pairwise(t)]
    gaps = [b[0].heard - a[-1].heard - b[0].trained_s for a, b in itertools.pairwise(trials)]
    switch = statistics.median(gaps) - statistics.median(evaluations)
    return Cost(num_counted, trained / num_counted, total / num_counted, switch)


def trained_seconds(metrics: dict[str, Any], per_epoch: int) -> float:
    return per_epoch * CLASSES * IMAGES_PER_CLASS / float(metrics["images_per_second"])


def study(num_trials: int, per_epoch: int) -> Cost:
    """What a study of ours costs, its verdict left out."""
    from dmlstudy.engine.tune_adapter import StudyScheduler, metrics_of
    from dmlstudy.spec.study_file import load
    from dmlstudy.store import Store
    from dmlstudy.studies.run import run_study

    reports: list[Report] = []
    hear = StudyScheduler.on_trial_result

    def on_trial_result(self: Any, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if trial.config["trial"]["phase"] == "search":
            trained = trained_seconds(metrics_of(result), per_epoch)
            reports.append(Report(trial.trial_id, time.monotonic(), trained))
        return hear(self, tune_controller, trial, result)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.yaml"
        path.write_text(SPEC.format(name="overhead", trials=num_trials, per_epoch=per_epoch))
        with patch.object(StudyScheduler, "on_trial_result", on_trial_result):
            run_study(load(path), Store(Path(folder) / "store"), address=None, tell=lambda line: None)
    return cost(reports)


def recipe(num_trials: int, per_epoch: int) -> Cost:
    """What the documented recipe costs for the same trials."""
    import ray
    from ray import tune

    from dmlstudy.engine.tune_run import HEAD_NODE

    ended: list[float] = []
    trained: list[float] = []

    class Clock(tune.Callback):
        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            ended.append(time.monotonic())
            trained.append(trial.last_result["trained_s"])

    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", include_dashboard=True, log_to_driver=False)
        tune.Tuner(
            tune.with_resources(recipe_trial, tune.PlacementGroupFactory([HEAD_NODE])),
            param_space={"trial": trial_config(per_epoch), "per_epoch": per_epoch, "storage": folder},
            tune_config=tune.TuneConfig(num_samples=num_trials, max_concurrent_trials=1),
            run_config=tune.RunConfig(name="tune", storage_path=folder, callbacks=[Clock()], verbose=0),
        ).fit()
        ray.shutdown()
    assert len(ended) == num_trials, "a trial of the recipe failed"
    num_counted = num_trials - 1
    return Cost(num_counted, statistics.fmean(trained[1:]), (ended[-1] - ended[0]) / num_counted)


def recipe_trial(config: dict[str, Any]) -> None:
    import ray.train
    from ray import tune
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    TorchTrainer(
        recipe_worker,
        train_loop_config={"trial": config["trial"], "per_epoch": config["per_epoch"]},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name=f"train-{tune.get_context().get_trial_id()}",
            storage_path=config["storage"],
            callbacks=[TuneReportCallback()],
        ),
    ).fit()


def recipe_worker(config: dict[str, Any]) -> None:
    import ray.train
    import torch

    from dmlstudy.records import TrialConfig, TrialReport
    from dmlstudy.training.trial import run_trial

    torch.set_num_threads(1)
    trained = 0.0

    def report(report: TrialReport) -> None:
        nonlocal trained
        trained += trained_seconds(report.metrics, config["per_epoch"])
        ray.train.report({**report.metrics, "trained_s": trained})

    run_trial(TrialConfig.model_validate(config["trial"]), report)


def trial_config(per_epoch: int) -> dict[str, Any]:
    """The study's default trial."""
    from dmlstudy.spec.study_file import default_values, load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.yaml"
        path.write_text(SPEC.format(name="overhead", trials=1, per_epoch=per_epoch))
        spec = load(path)
    (family,) = spec.families.values()
    return spec.trial_config(family, default_values(family)).model_dump(mode="json")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=3, help="of the recipe; each takes about 20 s")
    parser.add_argument("--study", type=int, default=32, help="trials of our study")
    parser.add_argument("--seconds", type=float, default=3.0, help="of training in each trial of our study")
    options = parser.parse_args()
    short = study(6, PER_EPOCH_AT_FIRST)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, 2 workers per trial, 1 trial at once\n")
    print("| | trials | training s | beyond it s | of it the switch s | share in training |")
    print("|---|---:|---:|---:|---:|---:|")
    print(short.row("gang, short trials"), flush=True)
    if options.trials > 1:
        old = recipe(options.trials, PER_EPOCH_AT_FIRST)
        print(old.row("recipe, short trials"), flush=True)
    per_epoch = max(1, round(PER_EPOCH_AT_FIRST * options.seconds / short.trained_s))
    long = study(options.study, per_epoch)
    print(long.row(f"gang, trials of {options.seconds:g} s"))
    if options.trials > 1:
        ratio = (old.total_s - old.trained_s) / (short.total_s - short.trained_s)
        print(f"\nbeyond its training, a short trial costs {ratio:.0f} times less in a gang")


if __name__ == "__main__":
    sys.exit(main())
