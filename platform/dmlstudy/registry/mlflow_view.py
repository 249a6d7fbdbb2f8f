"""A study's leaderboard on MLflow's own page: a run for each row, and a view of these with the columns that matter.

The runs are of the kind ``leaderboard``, nested in the study's run. The view is one of MLflow's shared views, a tag of
the experiment: ``#/experiments/ID/runs?viewStateShareKey=leaderboard`` opens it. The experiment's note has the
same table as text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, RunTag

from dmlstudy import metric_names
from dmlstudy.metric_names import VALIDATION
from dmlstudy.records import is_untrained
from dmlstudy.registry import connection
from dmlstudy.registry.leaderboard import Leaderboard, Row
from dmlstudy.registry.models import RegisteredVersion
from dmlstudy.registry.runs import KIND as KIND_TAG
from dmlstudy.registry.runs import PARENT, Run, RunKind, StudyRuns, begin
from dmlstudy.store import Store
from dmlstudy.trials import Status

KEY = "leaderboard"
VIEW = f"mlflow.sharedViewState.{KEY}"
NOTE = "mlflow.note.content"
EXPERIMENT_KIND = ("mlflow.experimentKind", "custom_model_development")
"""Without it MLflow's page opens on traces of language models."""
DIGITS = 4
"""Of scores in these rows, for columns are narrow; the verdicts' own runs have all of them."""
MOST_AT_ONCE = 100
"""Parameters that MLflow takes in a batch."""
MOST_PARAMS = 4
"""Hyperparameters among the view's columns."""


def publish(
    client: mlflow.MlflowClient,
    experiment_id: str,
    parent_id: str,
    board: Leaderboard,
    versions: Mapping[str, RegisteredVersion],
) -> None:
    """Write the leaderboard into a study's experiment; called again it completes the same runs.

    A row's scores are also those of its family's registered version, on MLflow's page of the model.
    """
    runs = StudyRuns(client, experiment_id)
    known = {run.family: run for run in runs.every(RunKind.LEADERBOARD)}
    for rank, row in enumerate(board.rows, 1):
        tags = {
            "family": row.family,
            "rank": f"{rank:03}",  # text orders like numbers
            "comparison": outcome(board, row.family),
            "model": named(versions).get(row.family, ""),
            "status": Status.FINISHED.value,
        }
        run = known.get(row.family) or _begun(client, experiment_id, parent_id, board.study, row)
        write(client, run, _metrics(row), row.params, tags)
        if row.family in versions:
            _score_model(client, run.id, row, versions[row.family])
        client.set_terminated(run.id, Status.FINISHED.in_mlflow)
    client.set_experiment_tag(experiment_id, *EXPERIMENT_KIND)
    client.set_experiment_tag(experiment_id, VIEW, json.dumps(view(board)))
    client.set_experiment_tag(experiment_id, NOTE, note(board, named(versions), experiment_id))


def publish_study(
    client: mlflow.MlflowClient,
    experiment_id: str,
    parent_id: str,
    board: Leaderboard,
    versions: Mapping[str, RegisteredVersion],
    settings: Mapping[str, str],
) -> None:
    """Write onto the study's own run what one looks for first: the winner's scores and parameters, and a description.

    ``settings`` are parameters beside them. Called again it completes the same.
    """
    row = next(row for row in board.rows if row.family == board.winner)
    tags = {NOTE: note(board, named(versions), experiment_id)}
    write(
        client,
        StudyRuns(client, experiment_id).get(parent_id),
        _metrics(row),
        {**row.params, **settings},
        tags,
    )


def write(
    client: mlflow.MlflowClient,
    run: Run,
    metrics: Iterable[tuple[str, float]],
    params: Mapping[str, str],
    tags: Mapping[str, str],
) -> None:
    """Log what a run has not yet; an existing parameter stays unchanged."""
    now = int(time.time() * 1000)
    missing = [Param(name, value) for name, value in params.items() if name not in run.params]
    for start in range(0, len(missing), MOST_AT_ONCE):
        client.log_batch(run.id, params=missing[start : start + MOST_AT_ONCE])
    rounded = {name: round(value, DIGITS) for name, value in metrics}
    client.log_batch(
        run.id,
        metrics=[
            Metric(name, value, now, 0) for name, value in rounded.items() if run.metrics.get(name) != value
        ],
        tags=[RunTag(name, value) for name, value in tags.items()],
    )


def named(versions: Mapping[str, RegisteredVersion]) -> dict[str, str]:
    """Families to NAME/VERSION."""
    return {family: f"{version.name}/{version.version}" for family, version in versions.items()}


def _score_model(client: mlflow.MlflowClient, run_id: str, row: Row, version: RegisteredVersion) -> None:
    """Give a registered version's model the scores of its row, where it has them not."""
    now = int(time.time() * 1000)
    scores = {name: round(value, DIGITS) for name, value in _metrics(row)}
    missing = [
        Metric(name, value, now, 0, model_id=version.model_id, run_id=run_id)
        for name, value in scores.items()
        if version.metrics.get(name) != value
    ]
    if missing and version.model_id:
        client.log_batch(run_id, metrics=missing)


def outcome(board: Leaderboard, family: str) -> str:
    """The comparison of a family with the study's winner, by the objective on the test classes."""
    if family == board.winner:
        return "winner"
    for each in board.comparisons:
        if {each.first, each.second} == {family, board.winner}:
            said = each.outcome if each.first == family else each.opposite
            p = "p < 0.001" if each.p < 0.001 else f"p {each.p:.3f}"
            return f"{said}{each.where}, {p}"
    return "not compared"


def view(board: Leaderboard) -> dict[str, Any]:
    """The state of MLflow's page: which runs, in which order, with which columns."""
    objective = metric_names.on_test(board.objective)
    interval = metric_names.low(objective), metric_names.high(objective)
    metrics = [VALIDATION, objective, *interval, *_others(board, objective)]
    if board.retention:
        metrics.append(metric_names.on_retention(board.objective))
    columns = [
        *(f"metrics.`{name}`" for name in metrics),
        "tags.`comparison`",
        "tags.`model`",
        *(f"params.`{name}`" for name in _differing(board)[:MOST_PARAMS]),
    ]
    return {
        "searchFilter": f"tags.{KIND_TAG} = '{RunKind.LEADERBOARD}'",
        "orderByKey": f"metrics.`{VALIDATION}`",
        "orderByAsc": False,
        "selectedColumns": columns,
        "columnOrder": columns,
        "viewMaximized": True,
    }


def note(board: Leaderboard, models: Mapping[str, str], experiment_id: str) -> str:
    """The leaderboard as Markdown. MLflow shows the first line alone at first, so it has the numbers and the link."""
    objective = metric_names.on_test(board.objective)
    lines = [
        f"[Leaderboard](#/experiments/{experiment_id}/runs?viewStateShareKey={KEY}): {_news(board)}",
        "",
        f"| family | validation | {board.objective} on the test classes (95% t-interval) |{_retention_head(board)} with"
        " the winner | model |",
        f"|---|---:|---:|{'---:|' * bool(board.retention)}---|---|",
    ]
    for row in board.rows:
        validation = "-" if row.validation is None else f"{row.validation:.4f}"
        test = str(row.test.get(objective, "-"))
        lines.append(
            f"| {row.family} | {validation} | {test} |{_retention_cell(board, row)} {outcome(board, row.family)} |"
            f" {models.get(row.family, '')} |"
        )
    return "\n".join(lines)


def _retention_head(board: Leaderboard) -> str:
    return f" on {board.retention.name} (retention) |" if board.retention else ""


def _retention_cell(board: Leaderboard, row: Row) -> str:
    metric = metric_names.on_retention(board.objective)
    return f" {row.retention.get(metric, '-')} |" if board.retention else ""


def _news(board: Leaderboard) -> str:
    """The winner, its scores, and those of its embedder untrained."""
    row = next((row for row in board.rows if row.family == board.winner), None)
    if row is None:
        return "no winner."
    objective = metric_names.on_test(board.objective)
    validation = "" if row.validation is None else f", validation {row.validation:.4f}"
    test = f", test {row.test[objective]}" if objective in row.test else ""
    untrained = next((each for each in board.rows if each.family == row.untrained), None)
    without = f"; untrained {untrained.test[objective]}" if untrained and objective in untrained.test else ""
    return f"**{board.winner}** wins by {board.objective}{validation}{test}{without}."


def links(store: Store, port: int) -> dict[str, str]:
    """The address of each study's leaderboard on MLflow's page at this port, newest first; raises StoreError."""
    return {
        experiment.name: f"http://127.0.0.1:{port}/#/experiments/{experiment.experiment_id}/runs?viewStateShareKey={KEY}"
        for experiment in connection.connect(store).search_experiments()
        if VIEW in experiment.tags
    }


def _begun(client: mlflow.MlflowClient, experiment_id: str, parent_id: str, study: str, row: Row) -> Run:
    tags = {PARENT: parent_id, KIND_TAG: RunKind.LEADERBOARD.value, "study": study, "family": row.family}
    return begin(client, experiment_id, row.family, tags)


def _metrics(row: Row) -> Iterator[tuple[str, float]]:
    if row.validation is not None:
        yield VALIDATION, row.validation
    if not is_untrained(row.family):
        yield "num_trials", float(row.num_tried)
    for name, estimate in (row.test | row.retention).items():
        yield name, estimate.mean
        if estimate.half_width is not None:
            yield metric_names.low(name), estimate.mean - estimate.half_width
            yield metric_names.high(name), estimate.mean + estimate.half_width


def _others(board: Leaderboard, objective: str) -> list[str]:
    """One more test metric: the first that is no count, and not the objective."""
    names = dict.fromkeys(name for row in board.rows for name in row.test)
    return [name for name in names if name != objective and not metric_names.is_count(name)][:1]


def _differing(board: Leaderboard) -> list[str]:
    """Hyperparameters in which the families' best differ, those of most families first."""
    names = dict.fromkeys(name for row in board.rows for name in row.params)
    values = {name: [row.params[name] for row in board.rows if name in row.params] for name in names}
    found = [name for name in names if len(set(values[name])) > 1 and not name.startswith("seed")]
    return sorted(found, key=lambda name: -len(values[name]))
