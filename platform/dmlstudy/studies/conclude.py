"""The end of a study: its best embedders registered and described, the winner offered as the default."""

from __future__ import annotations

from datetime import UTC, datetime

from dmlstudy.records import is_untrained
from dmlstudy.registry import models, promotion, tracking
from dmlstudy.registry.card import card
from dmlstudy.registry.folds import publish_folds
from dmlstudy.registry.leaderboard import Leaderboard, Row, leaderboard
from dmlstudy.registry.mlflow_view import publish, publish_study
from dmlstudy.registry.runs import Run
from dmlstudy.saved.model import notes_of, preprocessing_of
from dmlstudy.search.study_search import StudySearch
from dmlstudy.search.verdict_trials import SHIPPED_SEED
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.store import Store
from dmlstudy.training.lineage import told
from dmlstudy.verdict import thresholds


class StudyFailed(RuntimeError):
    """A study without a single finished trial, with the first reason."""


def conclude(
    spec: StudySpec,
    store: Store,
    tracker: tracking.StudyTracker,
    search: StudySearch,
) -> Leaderboard:
    """Register the winner and end the study's run."""
    tracker.write_note()
    tracker.log_verdict_scores()
    board = leaderboard(store, spec.name)
    winner = search.winner()
    if winner is None:
        reasons = search.failure_reasons()
        raise StudyFailed(
            f"no trial finished; the first failed with: {reasons[0] if reasons else 'no reason'}"
        )
    if spec.file.protocol.replicate_of:  # of its best nothing is shipped
        tracker.end_study("finished", {"winner": winner})
        return leaderboard(store, spec.name)
    trained = [row for row in board.rows if not is_untrained(row.family)]
    shipped = {row.family: tracker.verdict_run(row.family, SHIPPED_SEED) for row in trained}
    if shipped.get(winner) is None:
        raise StudyFailed(f"the retraining of {winner} failed; see `{store.command('logs', spec.name)}`")
    versions = {
        row.family: _registered(spec, store, tracker, board, row, run)
        for row in sorted(trained, key=lambda row: row.family != winner)
        if (run := shipped[row.family]) is not None
    }
    own, *others = versions.values()
    decision = promotion.offer(store, own, *others[:1])
    with_winner = board.model_copy(update={"winner": winner, "model": f"{own.name}/{own.version}"})
    publish(tracker.client, tracker.experiment_id, tracker.parent_id, with_winner, versions)
    publish_folds(
        tracker.client, tracker.experiment_id, versions, spec.file.protocol.objective, tracker.trial_tags
    )
    promotion.describe(store, own.name)  # again, for now the scores are there
    publish_study(
        tracker.client, tracker.experiment_id, tracker.parent_id, with_winner, versions, _settings(spec)
    )
    # Last of all, for a finished study is not resumed.
    tracker.end_study("finished", {"winner": winner, "model": with_winner.model, "decision": decision.reason})
    return leaderboard(store, spec.name)


def _settings(spec: StudySpec) -> dict[str, str]:
    """Settings of the study's file by which its run in MLflow is found and compared."""
    data, search, protocol = spec.data, spec.file.search, spec.file.protocol
    values = {
        "data": data.name,
        "families": ", ".join(spec.families),
        **{
            f"search.{name}": getattr(search, name)
            for name in ("sampler", "scheduler", "trials_per_family", "seed")
        },
        **{
            f"protocol.{name}": getattr(protocol, name)
            for name in ("num_folds", "verdict_seeds", "objective")
        },
    }
    if search.stop_when is not None:
        values["search.stop_when"] = search.stop_when.model_dump_json()
    return {name: str(value) for name, value in values.items()}


def _registered(
    spec: StudySpec, store: Store, tracker: tracking.StudyTracker, board: Leaderboard, row: Row, run: Run
) -> models.RegisteredVersion:
    """The version of a family's model of the run, registered now or by an earlier session."""
    objective = spec.file.protocol.objective
    threshold = thresholds.shipped(tracker.pair_counts(run))
    return models.register(
        store,
        spec.model_name,
        lambda scratch: tracker.fetch_model(run.id, scratch),
        run_id=run.id,
        tags={
            "study": spec.name,
            "family": row.family,
            "objective": objective,
            "spec_fingerprint": spec.fingerprint(),
        },
        card=lambda folder: card(
            board,
            row,
            limits=spec.task.limits,
            data=spec.data,
            trained=f"{datetime.fromtimestamp(run.ended or run.started, UTC):%Y-%m-%d}",
            origin=tracker.study_tags,
            protocol=spec.file.protocol.model_dump(),
            name=spec.model_name,
            preprocessing=preprocessing_of(folder),
            start=run.tags,
            notes=told(notes_of(folder)),
            threshold=threshold,
        ),
        threshold=None if threshold is None else thresholds.fields(threshold),
    )
