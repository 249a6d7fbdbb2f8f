"""A study's leaderboard on MLflow's own page: a run for each row, and a view of these with the columns that matter.

The runs are of the kind ``leaderboard``, nested in the study's run. The view is one of MLflow's shared views, a tag of
the experiment: ``#/experiments/ID/runs?viewStateShareKey=leaderboard`` opens it. The experiment's note has the
same table as text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, RunTag

from dmlstudy.records import is_untrained
from dmlstudy.registry import tracking
from dmlstudy.registry.leaderboard import Leaderboard, Row
from dmlstudy.registry.store import Store

KIND = "leaderboard"
KEY = "leaderboard"
VIEW = f"mlflow.sharedViewState.{KEY}"
NOTE = "mlflow.note.content"
EXPERIMENT_KIND = ("mlflow.experimentKind", "custom_model_development")
"""Without it MLflow's page opens on traces of language models."""
DIGITS = 4
"""Of scores in these rows, for columns are narrow; the verdicts' own runs have all of them."""
MOST_PARAMS = 4
"""Hyperparameters among the view's columns."""


def publish(
    client: mlflow.MlflowClient,
    experiment_id: str,
    parent_id: str,
    board: Leaderboard,
    models: Mapping[str, str],
) -> None:
    """Write the leaderboard into a study's experiment; called again it writes the same runs anew.

    ``models`` are the registered versions of families, as NAME/VERSION.
    """
    known = {
        run.data.tags["family"]: run.info.run_id
        for run in tracking.search_all(client, experiment_id, f"tags.dmlstudy_kind = '{KIND}'")
    }
    for rank, row in enumerate(board.rows, 1):
        tags = {
            "family": row.family,
            "rank": f"{rank:03}",  # text orders like numbers
            "comparison": outcome(board, row.family),
            "model": models.get(row.family, ""),
            "status": "finished",
        }
        run_id = known.get(row.family) or _begun(client, experiment_id, parent_id, board.study, row)
        now = int(time.time() * 1000)
        client.log_batch(
            run_id,
            metrics=[Metric(name, round(value, DIGITS), now, 0) for name, value in _metrics(row)],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        client.set_terminated(run_id, "FINISHED")
    client.set_experiment_tag(experiment_id, *EXPERIMENT_KIND)
    client.set_experiment_tag(experiment_id, VIEW, json.dumps(view(board)))
    client.set_experiment_tag(experiment_id, NOTE, note(board, models))


def outcome(board: Leaderboard, family: str) -> str:
    """How a family compares with the study's winner, by the objective on the test classes."""
    if family == board.winner:
        return "winner"
    for each in board.comparisons:
        if {each.first, each.second} == {family, board.winner}:
            said = each.outcome if each.first == family else each.opposite
            p = "p < 0.001" if each.adjusted_p_value < 0.001 else f"p {each.adjusted_p_value:.3f}"
            return f"{said}, {p}"
    return "not compared"


def view(board: Leaderboard) -> dict[str, Any]:
    """The state of MLflow's page: which runs, in which order, with which columns."""
    objective = f"test_{board.objective}"
    metrics = ["validation", objective, f"{objective}_low", f"{objective}_high", *_others(board, objective)]
    columns = [
        *(f"metrics.`{name}`" for name in metrics),
        "tags.`comparison`",
        "tags.`model`",
        *(f"params.`{name}`" for name in _differing(board)[:MOST_PARAMS]),
    ]
    return {
        "searchFilter": f"tags.dmlstudy_kind = '{KIND}'",
        "orderByKey": "metrics.`validation`",
        "orderByAsc": False,
        "selectedColumns": columns,
        "columnOrder": columns,
        "viewMaximized": True,
    }


def note(board: Leaderboard, models: Mapping[str, str]) -> str:
    """The leaderboard as Markdown."""
    objective = f"test_{board.objective}"
    lines = [
        f"**{board.study}**: {board.winner or 'no family'} wins by the validation {board.objective}.",
        "",
        f"| family | validation | {board.objective} on the test classes (95% t-interval) | with the winner | model |",
        "|---|---:|---:|---|---|",
    ]
    for row in board.rows:
        validation = "-" if row.validation is None else f"{row.validation:.4f}"
        test = str(row.test.get(objective, "-"))
        lines.append(
            f"| {row.family} | {validation} | {test} | {outcome(board, row.family)} |"
            f" {models.get(row.family, '')} |"
        )
    return "\n".join(lines)


def links(store: Store, port: int) -> dict[str, str]:
    """The address of each study's leaderboard on MLflow's page at this port, newest first; raises StoreError."""
    return {
        experiment.name: f"http://127.0.0.1:{port}/#/experiments/{experiment.experiment_id}/runs?viewStateShareKey={KEY}"
        for experiment in tracking.connect(store).search_experiments()
        if VIEW in experiment.tags
    }


def _begun(client: mlflow.MlflowClient, experiment_id: str, parent_id: str, study: str, row: Row) -> str:
    tags = {tracking.PARENT: parent_id, "dmlstudy_kind": KIND, "study": study, "family": row.family}
    run_id = str(client.create_run(experiment_id, run_name=row.family, tags=tags).info.run_id)
    client.log_batch(run_id, params=[Param(name, value) for name, value in row.params.items()])
    return run_id


def _metrics(row: Row) -> Iterator[tuple[str, float]]:
    if row.validation is not None:
        yield "validation", row.validation
    if not is_untrained(row.family):
        yield "num_trials", float(row.num_tried)
    for name, estimate in row.test.items():
        yield name, estimate.mean
        if estimate.half_width is not None:
            yield f"{name}_low", estimate.mean - estimate.half_width
            yield f"{name}_high", estimate.mean + estimate.half_width


def _others(board: Leaderboard, objective: str) -> list[str]:
    """One more test metric: the first that is no count, and not the objective."""
    names = dict.fromkeys(name for row in board.rows for name in row.test)
    return [name for name in names if name != objective and not name.startswith("test_num_")][:1]


def _differing(board: Leaderboard) -> list[str]:
    """Hyperparameters in which the families' best differ, those of most families first."""
    names = dict.fromkeys(name for row in board.rows for name in row.params)
    values = {name: [row.params[name] for row in board.rows if name in row.params] for name in names}
    found = [name for name in names if len(set(values[name])) > 1 and not name.startswith("seed")]
    return sorted(found, key=lambda name: -len(values[name]))
