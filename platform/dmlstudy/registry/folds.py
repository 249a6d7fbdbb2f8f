"""The folds of each family's best search trial as runs of their own, nested in the trial's run.

Every trial's run has the score of each fold (``fold_0_map_at_r``). A run per fold of every trial would be most of
what MLflow keeps and of what a driver does, so only those that a reader looks at have one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import mlflow
from mlflow.entities import Metric

from dmlstudy import metric_names
from dmlstudy.registry.runs import KIND, PARENT, Run, RunKind, StudyRuns, begin
from dmlstudy.trials import Status

TAKEN_OVER = ("study", "family", "seed", "trial_number", "config_fingerprint")
"""Tags that a fold's run has of its trial's."""


def publish_folds(
    client: mlflow.MlflowClient,
    experiment_id: str,
    families: Iterable[str],
    objective: str,
    tags: Mapping[str, str] = {},
) -> None:
    """Write a run for each fold of the best finished search trial of each family, with its learning curve.

    ``tags`` are those of each trial. Called again it adds what is missing; a trial without folds has no such runs.
    """
    runs = StudyRuns(client, experiment_id)
    for family in families:
        trial = runs.best(family)
        if trial is not None:
            _publish(client, runs, trial, objective, tags)


def fold_curves(means: Mapping[int, float], num_folds: int) -> list[dict[int, float]]:
    """The score of each fold by its epochs, from 1, out of what the trial has reported.

    ``means`` maps a step, which counts epochs over all folds from 1, to the mean of the ended folds' last scores and
    the present one's: s_fe = (f + 1) m_fe - f m_(f-1)E for fold f from 0 and epoch e of E. Steps that are missing, for
    their score was not finite, are left out.
    """
    num_epochs = max(means, default=0) // num_folds
    curves: list[dict[int, float]] = []
    before: float | None = 0.0
    for fold in range(num_folds):
        first = fold * num_epochs
        own = {
            step - first: means[step] for step in range(first + 1, first + num_epochs + 1) if step in means
        }
        curves.append(
            {}
            if before is None
            else {epoch: (fold + 1) * value - fold * before for epoch, value in own.items()}
        )
        before = own.get(num_epochs)
    return curves


def _publish(
    client: mlflow.MlflowClient, runs: StudyRuns, trial: Run, objective: str, tags: Mapping[str, str]
) -> None:
    num_folds = metric_names.num_folds(trial.metrics, objective)
    if num_folds < 2:
        return
    there = {run.tags["fold"]: run for run in runs.every(RunKind.FOLD, parent=trial.id)}
    means = {step: value for step, value in runs.curve(trial, objective).items() if step}
    curves = fold_curves(means, num_folds)
    of_trial = {name: trial.tags[name] for name in TAKEN_OVER if name in trial.tags}
    about = {
        **tags,
        **of_trial,
        PARENT: trial.id,
        KIND: RunKind.FOLD.value,
        "status": Status.FINISHED.value,
    }
    for fold, curve in enumerate(curves):
        run = there.get(str(fold))
        if run is None:
            name = f"{trial.name} fold {fold}"
            run = begin(client, runs.experiment_id, name, {**about, "fold": str(fold)})
        now = int(time.time() * 1000)
        last = max(curve, default=0)
        curve[last] = trial.metrics[metric_names.of_fold(fold, objective)]  # as the trial itself has told it
        known = runs.curve(run, objective)
        missing = [
            Metric(objective, value, now, epoch) for epoch, value in curve.items() if epoch not in known
        ]
        client.log_batch(run.id, metrics=missing)
        client.set_terminated(run.id, Status.FINISHED.in_mlflow)
