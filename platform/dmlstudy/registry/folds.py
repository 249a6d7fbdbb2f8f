"""The folds of each family's best search trial as runs of their own, nested in the trial's run.

Every trial's run tells the score of each fold (``fold_0_map_at_r``). A run per fold of every trial would be most of
what MLflow keeps and of what a driver does, so only those that a reader looks at have one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import mlflow
from mlflow.entities import Metric

from dmlstudy.registry import tracking

KIND = "fold"

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
    for family in families:
        found = client.search_runs(
            [experiment_id],
            f"tags.dmlstudy_kind = 'search' and tags.status = 'finished' and tags.family = '{family}'",
            max_results=1,
            order_by=[f"metrics.`{objective}` DESC", "attributes.start_time ASC"],
        )
        for trial in found:
            _publish(client, experiment_id, trial, objective, tags)


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
    client: mlflow.MlflowClient, experiment_id: str, trial: Any, objective: str, tags: Mapping[str, str]
) -> None:
    named = (re.fullmatch(rf"fold_(\d+)_{re.escape(objective)}", name) for name in trial.data.metrics)
    num_folds = sum(match is not None for match in named)
    if num_folds < 2:
        return
    own = f"tags.dmlstudy_kind = '{KIND}' and tags.`{tracking.PARENT}` = '{trial.info.run_id}'"
    there = {
        run.data.tags["fold"]: run.info.run_id for run in tracking.search_all(client, experiment_id, own)
    }
    history = client.get_metric_history(trial.info.run_id, objective)
    curves = fold_curves({point.step: point.value for point in history if point.step}, num_folds)
    of_trial = {name: trial.data.tags[name] for name in TAKEN_OVER if name in trial.data.tags}
    about = {
        **tags,
        **of_trial,
        tracking.PARENT: trial.info.run_id,
        "dmlstudy_kind": KIND,
        "status": "finished",
    }
    for fold, curve in enumerate(curves):
        run_id = there.get(str(fold))
        if run_id is None:
            name = f"{trial.info.run_name} fold {fold}"
            made = client.create_run(experiment_id, tags={**about, "fold": str(fold)}, run_name=name)
            run_id = str(made.info.run_id)
        now = int(time.time() * 1000)
        last = max(curve, default=0)
        curve[last] = trial.data.metrics[f"fold_{fold}_{objective}"]  # as the trial itself has told it
        client.log_batch(
            run_id, metrics=[Metric(objective, value, now, epoch) for epoch, value in curve.items()]
        )
        client.set_terminated(run_id, "FINISHED")
