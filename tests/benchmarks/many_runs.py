"""How long MLflow takes to find the first hundred of 10,000 trials, in the orders its page asks for.

    python tests/benchmarks/many_runs.py [--trials 10000] [--repeats 3]

SQLite is asked as MLflow leaves it, and once it has counted its rows, as every command of dmlstudy and a study's driver
see to. Beside it stand the same rows in PostgreSQL. Times are those of the wall, since PostgreSQL works in processes of
its own: run it on a quiet machine.

The page itself, in a browser: ``pytest -m long tests/registry/test_many_runs.py -s``.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path

import mlflow
import sqlalchemy
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.many_runs import replay
from support.postgres import running_postgres

from dmlstudy.registry import row_counts
from dmlstudy.store import Store

ORDERS = {
    "newest": "attributes.start_time DESC",
    "by a metric": "metrics.`map_at_r` DESC",
    "by a parameter": "params.`training.lr` DESC",
}


def asked(uri: str, experiment_id: str, repeats: int) -> dict[str, float]:
    """The median seconds of each question."""
    client, found = mlflow.MlflowClient(uri), {}
    for name, order in ORDERS.items():
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            client.search_runs([experiment_id], "", order_by=[order], max_results=100)
            times.append(time.perf_counter() - started)
        found[name] = statistics.median(times)
    return found


def copied(source: str, target: str) -> None:
    """MLflow's tables at ``target``, with the rows of the database at ``source``."""
    SqlAlchemyStore(target, "unused")  # type: ignore[no-untyped-call]
    old, new = sqlalchemy.create_engine(source), sqlalchemy.create_engine(target)
    there, here = sqlalchemy.MetaData(), sqlalchemy.MetaData()
    there.reflect(old)
    here.reflect(new)
    with old.connect() as reading, new.begin() as writing:
        for table in reversed(here.sorted_tables):
            writing.execute(table.delete())
        for table in here.sorted_tables:
            rows = reading.execute(there.tables[table.name].select()).mappings().all()
            if rows:
                writing.execute(table.insert(), [dict(row) for row in rows])
        writing.execute(sqlalchemy.text("ANALYZE"))  # as its autovacuum does within a minute
    old.dispose()
    new.dispose()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        store.prepare()
        experiment_id = replay(store, "many", options.trials).tracker.experiment_id
        with sqlite3.connect(store.mlflow_file) as database:
            database.execute("DROP TABLE IF EXISTS sqlite_stat1")
            database.execute("DROP TABLE IF EXISTS sqlite_stat4")
        before = asked(store.tracking_uri, experiment_id, options.repeats)
        started = time.perf_counter()
        assert row_counts.refresh(store.mlflow_file)
        print(f"{options.trials} trials; SQLite counts them in {time.perf_counter() - started:.2f} s")
        after = asked(store.tracking_uri, experiment_id, options.repeats)
        with running_postgres() as address:
            uri = f"postgresql+psycopg://{address}"
            copied(store.tracking_uri, uri)
            postgres = asked(uri, experiment_id, options.repeats)
    print(f"{'order':16} {'not counted':>12} {'counted':>9} {'ratio':>7} {'PostgreSQL':>11}")
    for name in ORDERS:
        ratio = before[name] / after[name]
        print(f"{name:16} {before[name]:10.2f} s {after[name]:7.2f} s {ratio:6.1f}x {postgres[name]:9.2f} s")


if __name__ == "__main__":
    main()
