"""How many trials a study has and about how long it will take."""

from __future__ import annotations

import contextlib

from dmlstudy.data import ZeroShotData, class_disjoint_folds
from dmlstudy.records import TrialReport
from dmlstudy.studies.duration import duration
from dmlstudy.studies.spec import StudySpec, default_values
from dmlstudy.training.trial import TrialStopped, run_trial

START_S = 20.0
"""Starting Ray and the first workers."""


def describe(spec: StudySpec, dataset: ZeroShotData, *, measure: bool) -> list[str]:
    """Lines for people: trials, data, and the duration if ``measure`` may train a few batches."""
    search, protocol, resources = spec.file.search, spec.file.protocol, spec.file.resources
    development, test = dataset.development, dataset.test
    lines = [
        f"trials: {spec.num_search_trials} to search ({len(spec.families)} families x"
        f" {search.trials_per_family}), {spec.num_verdict_trials} for the verdict"
        f" ({protocol.verdict_seeds} seeds x {len(spec.families) + spec.num_untrained}, the untrained embedder"
        " included)",
        f"data: {dataset.name}, {len(development.labels_N)} images of {len(set(development.labels_N.tolist()))}"
        f" development classes in {protocol.num_folds} fold(s), {len(test.labels_N)} images of"
        f" {len(set(test.labels_N.tolist()))} test classes; {dataset.num_shared_images} images in both",
        f"a trial: {resources.workers} workers x {resources.cpus_per_worker:g} CPU"
        f" x {resources.gpus_per_worker:g} GPU",
    ]
    if measure:
        seconds = START_S + sum(_family_seconds(spec, dataset, name) for name in spec.families)
        lines.append(
            f"time: at most about {duration(seconds)} for one trial at a time on a machine like this one"
            " (measured on a few batches in one process; trials stopped early make it shorter)"
        )
    return lines


def _family_seconds(spec: StudySpec, dataset: ZeroShotData, name: str) -> float:
    """Seconds of all trials of a family, from the images per second at its default point."""
    family, protocol = spec.families[name], spec.file.protocol
    config = spec.trial_config(family, default_values(family))
    few = config.batch.model_copy(update={"per_epoch": 2})
    reports: list[TrialReport] = []

    def listen(report: TrialReport) -> None:
        reports.append(report)
        if report.step >= min(2, config.training.epochs):
            raise TrialStopped

    with contextlib.suppress(TrialStopped):
        run_trial(config.model_copy(update={"batch": few}), listen)
    rate = reports[-1].metrics["images_per_second"]
    labels_N = dataset.development.labels_N
    folds = class_disjoint_folds(labels_N, protocol.num_folds, config.seed)
    epochs = config.training.epochs
    # An epoch shows each training image about once; embedding an image costs a third of training on it.
    per_trial = sum(
        epochs * (len(fold.train_indices) + len(fold.validation_indices) / 3) / rate for fold in folds
    )
    verdict_parts = [len(labels_N)]
    if protocol.fold_models and protocol.num_folds > 1:
        verdict_parts += [len(fold.train_indices) for fold in folds]
    per_verdict = sum(epochs * part + len(dataset.test.labels_N) / 3 for part in verdict_parts) / rate
    return spec.file.search.trials_per_family * per_trial + protocol.verdict_seeds * per_verdict
