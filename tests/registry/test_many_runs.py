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
from support.many_runs import FAMILIES, NUM_JUDGED, ORIGINALS, replay
from support.ui import ui_of

from dmlstudy.registry import connection, mlflow_view, row_counts
from dmlstudy.registry.runs import raw_runs
from dmlstudy.store import Store

NUM_TRIALS = 10_000
PATIENCE_MS = 120_000
ROW = "[role=row][row-index]:not([row-id^=load_more])"


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
    connection.connect(few)
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


def test_few_runs_are_not_counted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.prepare()
    made = replay(store, "handful", ORIGINALS)
    made.tracker.client.search_experiments()
    with sqlite3.connect(store.mlflow_file) as database:
        assert 0 < database.execute("SELECT count(*) FROM runs").fetchone()[0] < row_counts.FEWEST_RUNS
        assert not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'").fetchone()
    assert not row_counts.refresh(store.mlflow_file)


def test_models_of_an_experiment_and_their_metrics_are_few(few: Store) -> None:
    """MLflow's page asks for all models of an experiment. Every judged trial keeps a network, few are registered."""
    client = connection.connect(few)
    experiment = client.get_experiment_by_name("few")
    assert experiment is not None
    judged = list(raw_runs(client, experiment.experiment_id, "tags.dmlstudy_kind = 'verdict'"))
    assert len(judged) == NUM_JUDGED * len(FAMILIES)
    found = client.search_logged_models([experiment.experiment_id])
    assert len(found) == len(FAMILIES) <= 50
    assert all(0 < len(model.metrics or []) <= 1000 for model in found)


@pytest.fixture(scope="module")
def page_of_many(
    tmp_path_factory: pytest.TempPathFactory, chromium: str
) -> Iterator[tuple[Page, str, list[str]]]:
    """A browser, the address of an experiment of 10,000 trials on `dmlstudy ui`, and their runs, the best first."""
    store = Store(tmp_path_factory.mktemp("many"))
    store.prepare()
    made = replay(store, "many", NUM_TRIALS)
    trials = raw_runs(made.tracker.client, made.tracker.experiment_id, "tags.dmlstudy_kind = 'search'")
    scores = {run.info.run_id: run.data.metrics["map_at_r"] for run in trials}
    best_first = sorted(scores, key=scores.__getitem__, reverse=True)
    with ui_of(store) as port, sync_playwright() as playwright:
        options: dict[str, Any] = {"args": ["--no-sandbox", "--disable-gpu"], "executable_path": chromium}
        browser = playwright.chromium.launch(**options)
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(PATIENCE_MS)
        yield page, mlflow_view.links(store, port)["many"].partition("?")[0], best_first
        browser.close()


def opened_after(page: Page, address: str) -> float:
    """Seconds from asking for the experiment until a run is on the page."""
    page.goto("about:blank")
    started = time.perf_counter()
    page.goto(address)
    page.locator(f"{ROW} [role=gridcell]").first.wait_for()
    return time.perf_counter() - started


def shown(page: Page) -> list[str]:
    """The ids of the runs on the page, in its order."""
    found = page.locator(ROW).evaluate_all(
        "rows => rows.map(row => [+row.ariaRowIndex, row.getAttribute('row-id')])"
    )
    return [run_id for _, run_id in sorted({tuple(each) for each in found})]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_trials_are_shown_and_sorted(
    page_of_many: tuple[Page, str, list[str]], record_property: Any
) -> None:
    """What the page shows is what MLflow's client finds in that order; the times are told, not judged."""
    page, address, best_first = page_of_many
    opened = [opened_after(page, address) for _ in range(4)][1:]  # the first one fetches the page's program
    sorted_after = []
    for order, expected in {"false": best_first, "true": best_first[::-1]}.items():
        query = f"{address}?orderByKey=metrics.%60map_at_r%60&orderByAsc={order}"
        sorted_after.append(opened_after(page, query))
        page.locator(f"{ROW}[row-id='{expected[0]}']").first.wait_for()
        found = shown(page)
        assert len(found) >= 5
        assert found == expected[: len(found)]
    for name, seconds in {"opens": opened, "sorts": sorted_after}.items():
        record_property(f"{name}_s", round(statistics.median(seconds), 2))
        sys.stderr.write(f"{NUM_TRIALS} trials: {name} in {statistics.median(seconds):.2f} s\n")
