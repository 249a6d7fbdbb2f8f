"""A study of thousands of trials in MLflow, replayed: runs of a few real ones are copied within its database."""

from __future__ import annotations

import random

import sqlalchemy
from support.made_study import Maker

from dmlstudy.registry import mlflow_view, models
from dmlstudy.registry.leaderboard import leaderboard
from dmlstudy.store import Store

FAMILIES = ("contrastive", "triplet", "multi_similarity", "margin")
EPOCHS = 10
NUM_JUDGED = 5
ORIGINALS = 40
TABLES = {
    "runs": "run_uuid",
    "tags": "run_uuid",
    "params": "run_uuid",
    "metrics": "run_uuid",
    "latest_metrics": "run_uuid",
}


def replay(store: Store, study: str, num_trials: int) -> Maker:
    """A finished study with ``num_trials`` search trials of four families, its verdict, models and leaderboard.

    Copies differ from their originals in their numbers and names, and in their scores.
    """
    rng = random.Random(0)
    made = Maker(store, study)
    for number in range(ORIGINALS):
        family, score = FAMILIES[number % len(FAMILIES)], rng.uniform(0.2, 0.6)
        curve = {epoch: score * epoch / EPOCHS for epoch in range(1, EPOCHS + 1)}
        made.search(
            family, "finished", score, curve, training__lr=10 ** rng.uniform(-4, -2), loss__margin=0.2
        )
    versions = {}
    for family in FAMILIES:
        judged = [made.judge(family, seed, rng.uniform(0.3, 0.5)) for seed in range(NUM_JUDGED)]
        for seed, run_id in enumerate(judged):
            made.keep_embedder(run_id, family, seed)
        versions[family] = _registered(made, family, judged[0])
    made.end(FAMILIES[0])
    _copy(store.tracking_uri, num_trials)
    tracker = made.tracker
    mlflow_view.publish(
        tracker.client, tracker.experiment_id, tracker.parent_id, leaderboard(store, study), versions
    )
    return made


def _registered(made: Maker, family: str, run_id: str) -> models.RegisteredVersion:
    return models.register(
        made.store,
        f"{made.study}-{family}",
        lambda scratch: made.tracker.fetch_model(run_id, scratch),
        run_id=run_id,
        tags={"study": made.study, "family": family, "spec_fingerprint": "f"},
        card=lambda _: "",
    )


def _copy(uri: str, num_trials: int) -> None:
    """Copy the runs of search trials, with all that MLflow keeps of them, until there are so many."""
    engine = sqlalchemy.create_engine(uri)
    with engine.begin() as connection:
        tables = sqlalchemy.MetaData()
        tables.reflect(connection, only=list(TABLES))
        runs, tags = tables.tables["runs"], tables.tables["tags"]
        is_search = sqlalchemy.and_(tags.c.key == "dmlstudy_kind", tags.c.value == "search")
        originals = connection.scalars(sqlalchemy.select(tags.c.run_uuid).where(is_search)).all()
        assert len(originals) == ORIGINALS
        for name in TABLES:
            table = tables.tables[name]
            kept = connection.execute(table.select().where(table.c.run_uuid.in_(originals))).mappings().all()
            for copy in range(1, -(-num_trials // ORIGINALS)):
                rows = [_changed(dict(row), copy) for row in kept]
                connection.execute(table.insert(), rows)
        assert connection.scalar(sqlalchemy.select(sqlalchemy.func.count()).select_from(runs)) > num_trials
    engine.dispose()


def _changed(row: dict[str, object], copy: int) -> dict[str, object]:
    """A row of the original's copy of this number."""
    row["run_uuid"] = f"{copy:06x}{str(row['run_uuid'])[6:]}"
    if "name" in row:
        row["name"] = f"{row['name']} copy {copy}"
        row["start_time"] = int(str(row["start_time"])) - copy
    if row.get("key") == "trial_number":
        row["value"] = str(int(str(row["value"])) + copy * ORIGINALS)
    if isinstance(row.get("value"), float):
        row["value"] = float(str(row["value"])) * (1 - copy / 1e4)
    return row
