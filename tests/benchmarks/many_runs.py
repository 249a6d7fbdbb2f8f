"""How long MLflow takes to find the first hundred of 10,000 trials, in the orders its page asks for.

    python tests/benchmarks/many_runs.py [--trials 10000] [--repeats 3]

The same database is asked as MLflow leaves it, and once SQLite has counted its rows, as every command of dmlstudy and
a study's driver see to. The page itself, in a browser: ``pytest -m long tests/registry/test_many_runs.py -s``.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.many_runs import replay

from dmlstudy.registry import row_counts
from dmlstudy.store import Store

ORDERS = {
    "newest": "attributes.start_time DESC",
    "by a metric": "metrics.`map_at_r` DESC",
    "by a parameter": "params.`training.lr` DESC",
}


def asked(client: mlflow.MlflowClient, order: str, repeats: int) -> float:
    """The median CPU seconds of a question; a busy machine changes them little."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        client.search_runs(["1"], "", order_by=[order], max_results=100)
        times.append(time.process_time() - started)
    return statistics.median(times)


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
        replay(store, "many", options.trials)
        with sqlite3.connect(store.mlflow_file) as database:
            database.execute("DROP TABLE IF EXISTS sqlite_stat1")
            database.execute("DROP TABLE IF EXISTS sqlite_stat4")
        before = {
            name: asked(mlflow.MlflowClient(store.tracking_uri), order, options.repeats)
            for name, order in ORDERS.items()
        }
        started = time.perf_counter()
        assert row_counts.refresh(store.mlflow_file)
        print(f"{options.trials} trials; SQLite counts them in {time.perf_counter() - started:.2f} s")
        print(f"{'order':16} {'not counted':>12} {'counted':>9} {'ratio':>7}")
        for name, order in ORDERS.items():
            after = asked(mlflow.MlflowClient(store.tracking_uri), order, options.repeats)
            print(f"{name:16} {before[name]:10.2f} s {after:7.2f} s {before[name] / after:6.1f}x")


if __name__ == "__main__":
    main()
