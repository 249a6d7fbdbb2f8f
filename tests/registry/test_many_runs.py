"""Ten thousand trials on MLflow's page: what its database counts, and how soon a browser shows and sorts them."""

from __future__ import annotations

import sqlite3
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright
from support.many_runs import replay
from support.ui import ui_of

from dmlstudy.registry import mlflow_view, row_counts, tracking
from dmlstudy.store import Store

NUM_TRIALS = 10_000
PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A study of 400 trials, as an earlier version leaves it: its database has counted nothing."""
    store = Store(tmp_path_factory.mktemp("few"))
    store.prepare()
    replay(store, "few", 400)
    forget_counts(store)
    return store


def forget_counts(store: Store) -> None:
    with sqlite3.connect(store.mlflow_file) as database:
        if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'").fetchone():
            database.execute("DELETE FROM sqlite_stat1")


def plan(store: Store) -> str:
    """The plan of the query by which MLflow sorts runs."""
    query = (
        "EXPLAIN QUERY PLAN SELECT runs.run_uuid FROM runs LEFT OUTER JOIN (SELECT value, run_uuid FROM"
        " latest_metrics WHERE key = 'map_at_r') AS m ON runs.run_uuid = m.run_uuid ORDER BY m.value DESC LIMIT 5"
    )
    with sqlite3.connect(store.mlflow_file) as database:
        return "\n".join(str(row[-1]) for row in database.execute(query))


def test_a_database_that_has_not_counted_does_so_when_it_is_opened(few: Store) -> None:
    tracking.connect(few)
    with sqlite3.connect(few.mlflow_file) as database:
        (counted,) = database.execute("SELECT stat FROM sqlite_stat1 WHERE tbl = 'runs'").fetchone()
        (num_runs,) = database.execute("SELECT count(*) FROM runs").fetchone()
    assert int(counted.split()[0]) == num_runs
    assert "AUTOMATIC" in plan(few) or "USING INDEX" in plan(few).partition("LEFT-JOIN")[0]
    assert not row_counts.refresh(few.mlflow_file), "nothing has changed"


def test_a_database_in_use_or_none_is_left_alone(few: Store, tmp_path: Path) -> None:
    forget_counts(few)
    with sqlite3.connect(few.mlflow_file) as other:
        other.execute("BEGIN IMMEDIATE")
        assert not row_counts.refresh(few.mlflow_file)
    assert row_counts.refresh(few.mlflow_file)
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database" * 100)
    assert not row_counts.refresh(damaged)
    assert not row_counts.refresh(tmp_path / "none" / "mlflow.db")


def test_few_runs_are_not_counted(store: Store) -> None:
    tracking.connect(store, create=True)
    assert not row_counts.refresh(store.mlflow_file)


def test_models_of_an_experiment_and_their_metrics_are_few(few: Store) -> None:
    """MLflow's page asks for all models of an experiment; trials have none of their own."""
    client = tracking.connect(few)
    experiment = client.get_experiment_by_name("few")
    assert experiment is not None
    assert len(client.search_logged_models([experiment.experiment_id])) <= 50


@pytest.fixture(scope="module")
def page_of_many(tmp_path_factory: pytest.TempPathFactory, chromium: str) -> Iterator[tuple[Page, str]]:
    """A browser, and the address of an experiment of 10,000 trials on `dmlstudy ui`."""
    store = Store(tmp_path_factory.mktemp("many"))
    store.prepare()
    replay(store, "many", NUM_TRIALS)
    with ui_of(store) as port, sync_playwright() as playwright:
        options: dict[str, Any] = {"args": ["--no-sandbox", "--disable-gpu"], "executable_path": chromium}
        browser = playwright.chromium.launch(**options)
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(PATIENCE_MS)
        yield page, mlflow_view.links(store, port)["many"].partition("?")[0]
        browser.close()


def shown_after(page: Page, address: str) -> float:
    """Seconds from asking for the experiment until its runs are on the page."""
    page.goto("about:blank")
    started = time.perf_counter()
    page.goto(address)
    page.locator("[role=row] [role=gridcell]").first.wait_for()
    page.get_by_text("copy").first.wait_for()
    return time.perf_counter() - started


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_trials_are_shown_and_sorted(
    page_of_many: tuple[Page, str], record_property: Any
) -> None:
    page, address = page_of_many
    opened = [shown_after(page, address) for _ in range(4)][1:]  # the first one fetches the page's program
    sorted_after = []
    for ascending in ("true", "false", "true"):
        query = f"{address}?orderByKey=metrics.%60map_at_r%60&orderByAsc={ascending}"
        sorted_after.append(shown_after(page, query))
    told = {
        "opens": statistics.median(opened),
        "sorts": statistics.median(sorted_after),
    }
    for name, seconds in told.items():
        record_property(f"{name}_s", round(seconds, 2))
        sys.stderr.write(f"{NUM_TRIALS} trials: {name} in {seconds:.2f} s\n")
