"""How many trials a study has and about how long it will take."""

from __future__ import annotations

import contextlib
import time

import torch

from dmlstudy.data import ClosedSet, class_disjoint_folds, row_folds
from dmlstudy.data.folds import HELD_OUT
from dmlstudy.data.images import Labels
from dmlstudy.records import TrialConfig, TrialReport
from dmlstudy.studies.checks import StudyData
from dmlstudy.studies.cluster import no_room_here
from dmlstudy.studies.duration import duration
from dmlstudy.studies.spec import StudySpec, default_values
from dmlstudy.training.trial import TrialStopped, run_trial

START_S = 20.0
"""Starting Ray and the first workers."""


def describe(spec: StudySpec, dataset: StudyData, *, measure: bool) -> list[str]:
    """Lines for people: trials, data, and the duration if ``measure`` may train a few batches."""
    search, protocol, resources = spec.file.search, spec.file.protocol, spec.file.resources
    lines = [
        f"trials: {spec.num_search_trials} to search ({len(spec.families)} families x"
        f" {search.trials_per_family}), {spec.num_verdict_trials} for the verdict"
        f" ({protocol.verdict_seeds} seeds x {len(spec.families) + spec.num_untrained}, what is untrained included)",
        *_of_data(spec, dataset),
        f"a trial: {resources.workers} workers x {resources.cpus_per_worker:g} CPU"
        f" x {resources.gpus_per_worker:g} GPU",
    ]
    if too_small := no_room_here(resources):
        lines.append(too_small)
    if measure:
        seconds = START_S + sum(_family_seconds(spec, dataset, name) for name in spec.families)
        lines.append(
            f"time: at most about {duration(seconds)} for one trial at a time on a machine like this one"
            f" (measured on a few batches in one process{_measured_on(spec)}; trials stopped early make it shorter)"
        )
    return lines


def device_of(spec: StudySpec) -> torch.device:
    """What a little training is measured on: a GPU if the study's trials have one and there is one here."""
    has_gpu = spec.file.resources.gpus_per_worker > 0 and torch.cuda.is_available()
    return torch.device("cuda" if has_gpu else "cpu")


def _measured_on(spec: StudySpec) -> str:
    if not spec.file.resources.gpus_per_worker:
        return ""
    if device_of(spec).type == "cuda":
        return f" on {torch.cuda.get_device_name()}"
    return " on this machine's CPU, for it has no GPU"


def _of_data(spec: StudySpec, dataset: StudyData) -> list[str]:
    """Lines on the data and how they are split."""
    development, test, num_folds = dataset.development, dataset.test, spec.file.protocol.num_folds
    num_classes, num_test_classes = (len(set(side.labels_N.tolist())) for side in (development, test))
    shared = f"{dataset.num_shared_images} images in both"
    if not isinstance(dataset, ClosedSet):
        return [
            f"data: {dataset.name}, {len(development)} images of {num_classes} development classes in {num_folds}"
            f" fold(s), {len(test)} images of {num_test_classes} test classes; {shared}"
            + (f"; {dataset.num_damaged} damaged ones left out" if dataset.num_damaged else "")
        ]
    lines = [
        f"data: {dataset.name}, {len(development)} images of {num_classes} classes for development, {len(test)} of"
        f" {num_test_classes} for the test; {shared}"
    ]
    family = next(iter(spec.families.values()))
    stream = spec.trial_config(family, default_values(family)).online
    if stream is not None and stream.split == "shuffled":
        lines.append(
            f"split: all {len(development) + len(test)} are shuffled by each verdict seed and cut in halves; the search"
            f" has {num_folds} fold(s) of one such half"
        )
    return lines


def _family_seconds(spec: StudySpec, dataset: StudyData, name: str) -> float:
    """Seconds of all trials of a family, from a little training at its default point."""
    family = spec.families[name]
    config = spec.trial_config(family, default_values(family))
    if not config.training.epochs:
        return 0.0
    of_trial = {"embedder": _trial_of_embedder, "hashing": _trial_of_codes, "online": _trial_of_stream}[
        spec.kind
    ]
    num_test, device = len(dataset.test.labels_N), device_of(spec)
    search, verdict = of_trial(config, dataset.development.labels_N, num_test, device)
    return spec.file.search.trials_per_family * search + spec.file.protocol.verdict_seeds * verdict


def _trial_of_embedder(
    config: TrialConfig, labels_N: Labels, num_test: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of a search trial and of a verdict trial, from the images per second of a few batches."""
    # Epochs with a frozen backbone are the first and the fast ones.
    few = {
        "batch": config.batch.model_copy(update={"per_epoch": 2}),
        "training": config.training.model_copy(update={"freeze_backbone_epochs": 0}),
    }
    rate = first_reports(config.model_copy(update=few), device)[-1][1].metrics["images_per_second"]
    folds = class_disjoint_folds(labels_N, config.num_folds, config.seed)
    sizes = [(len(fold.train_indices), len(fold.validation_indices)) for fold in folds]
    # An epoch shows each training image about once; embedding an image costs a third of training on it.
    epochs = config.training.epochs
    search = sum(epochs * (train + validation / 3) for train, validation in sizes) / rate
    trained_on = [len(labels_N)] + [train for train, _ in sizes] * config.fold_models
    return search, sum(epochs * part + num_test / 3 for part in trained_on) / rate


def _trial_of_codes(
    config: TrialConfig, labels_N: Labels, num_test: int, device: torch.device
) -> tuple[float, float]:
    """The same of codes, from whole epochs: what takes long is the ranking of a whole database after each."""
    assert config.hashing is not None
    started = time.perf_counter()
    (first, report), *further = first_reports(config, device)
    per_epoch = further[-1][0] - first if further else first - started
    rate = report.metrics["rows_per_second"]
    folds = row_folds(len(labels_N), config.num_folds, config.seed)
    most = config.hashing.num_train or len(labels_N)
    ranking = max(0.0, per_epoch - min(most, len(folds[0].train_indices)) / rate)
    items = (len(labels_N) + num_test) / len(labels_N)
    epochs = config.training.epochs
    return epochs * len(folds) * per_epoch, epochs * min(most, len(labels_N)) / rate + items * ranking


def _trial_of_stream(
    config: TrialConfig, labels_N: Labels, num_test: int, device: torch.device
) -> tuple[float, float]:
    """The same of streams, from the first part and from judging alone, whose time grows with queries x gallery."""
    parts = []
    for epochs in (0, config.training.epochs):
        training = config.training.model_copy(update={"epochs": epochs})
        started = time.perf_counter()
        parts.append(first_reports(config.model_copy(update={"training": training}), device)[0][0] - started)
    judging, learning = parts[0], max(0.0, parts[1] - parts[0])
    folds, epochs = config.num_folds, config.training.epochs
    num_rows = len(labels_N) + num_test
    assert config.online is not None
    num_development = num_rows // 2 if config.online.split == "shuffled" else len(labels_N)
    held_out = num_development / (folds if folds > 1 else HELD_OUT)
    growth = (num_rows - num_development) * num_development / (held_out * (num_development - held_out))
    return folds * epochs * (learning + judging), epochs * (learning + growth * judging)


def first_reports(config: TrialConfig, device: torch.device) -> list[tuple[float, TrialReport]]:
    """When a trial made its first reports, two at most, and what they were."""
    reports: list[tuple[float, TrialReport]] = []

    def listen(report: TrialReport) -> None:
        reports.append((time.perf_counter(), report))
        if report.step >= min(2, config.training.epochs):
            raise TrialStopped

    with contextlib.suppress(TrialStopped):
        run_trial(config, listen, device=device)
    return reports
