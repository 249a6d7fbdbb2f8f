"""The campaign of random kills: its plan, its comparison of stores, its record; and a few kills for real."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from dmlstudy.store import Store

from ..support.copied_store import copied
from ..support.made_study import Maker
from .campaign.plan import COMMAND, KINDS, STUDY_KINDS, planned
from .campaign.record import EQUAL, OVER, ROUND, CampaignRecord, Row, table
from .campaign.stores import STUDY, contents, differences, ended, opened
from .conftest import left

ROOT = Path(__file__).resolve().parents[2]


def test_a_round_is_a_function_of_its_seed_and_number() -> None:
    rounds = [planned(3, number) for number in range(40)]
    assert rounds == [planned(3, number) for number in range(40)]
    assert len(set(rounds)) == 40
    assert rounds[0] != planned(4, 0)
    assert {kill.kind for each in rounds for kill in each.kills} == set(STUDY_KINDS)
    assert {len(command.shares) for each in rounds for command in each.commands} == {1, 2, 3, 4}
    assert all(0 <= kill.share < 1 for each in rounds for kill in each.kills)
    only = [planned(3, number, ["raylet"]) for number in range(10)]
    assert {kill.kind for each in only for kill in each.kills} == {"raylet"}
    assert not any(each.commands for each in only)
    assert not planned(3, 0, ["command"]).kills


def test_a_record_goes_on_and_leaves_out_what_a_kill_has_torn(tmp_path: Path) -> None:
    path = tmp_path / "kills.csv"
    rows = [
        Row(1, 0, "driver", 0, 2.5, "dmlstudy", "start", 7.5),
        Row(1, 0, ROUND),
        Row(1, 1, "gcs", num_lost=1),
        Row(1, 1, COMMAND, process="pull", state=OVER),
    ]
    for row in rows:
        CampaignRecord(path).add(row)
    with path.open("a") as file:
        file.write("1,1,raylet,0,")
    record = CampaignRecord(path)
    assert record.rows == rows
    assert (record.num_kills, record.done(1), record.done(2)) == (2, {0}, set())
    record.add(Row(1, 1, "worker", result="runs: other"))
    assert CampaignRecord(path).rows == record.rows
    assert table(record.rows, KINDS).splitlines()[2:] == [
        "| driver | 1 | 0 | 0 | 0 | 0 | 8 s | 8 s |",
        "| worker | 1 | 0 | 0 | 0 | 1 |  |  |",
        "| gcs | 1 | 1 | 0 | 0 | 0 |  |  |",
        "| command | 0 | 0 | 0 | 0 | 0 |  |  |",
        "| whole rounds, compared at their end | 1 | 0 | 0 | 0 | 0 |  |  |",
    ]
    assert EQUAL not in table(record.rows, KINDS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a small study, of which nothing was broken."""
    folder = tmp_path_factory.mktemp("made") / "store"
    store = Store(folder)
    store.prepare()
    maker = Maker(store, STUDY)
    maker.search("alpha", "finished", 0.5, {1: 0.4, 2: 0.5}, training__lr=1e-3)
    maker.judge("alpha", 1, 0.6, (0.3, 0.2))
    maker.keep_embedder(maker.judge("alpha", 2, 0.7), "alpha", 2)
    maker.end("alpha")
    return folder


def sql(statement: str, database: str = "mlflow.db") -> Callable[[Path], None]:
    def change(store: Path) -> None:
        with closing(sqlite3.connect(store / database)) as opened, opened:
            assert opened.execute(statement).rowcount

    return change


def stray(store: Path) -> None:
    (store / "studies" / STUDY / ".study.json.77").touch()


VERSION = (
    "INSERT INTO model_versions (name, version, source, run_id, status, creation_time, workspace)"
    " SELECT 'tiny-embedder', 3, 'models:/m-1', run_uuid, 'READY', 0, 'default' FROM runs LIMIT 1"
)
PLANTED = {
    "run removed": (
        sql("UPDATE tags SET value = 'interrupted' WHERE key = 'status' AND value = 'finished'"),
        "runs: ",
    ),
    "metric changed": (
        sql("UPDATE metrics SET value = value + 1e-9 WHERE key = 'test_map_at_r'"),
        "runs: .*metrics",
    ),
    "metric twice": (
        sql(
            "INSERT INTO metrics SELECT key, value, 1, run_uuid, step, 0, 'x' FROM metrics LIMIT 1".replace(
                ", 'x'", ""
            )
        ),
        "runs: .*metrics",
    ),
    "run left open": (sql("UPDATE runs SET status = 'RUNNING' WHERE name LIKE '%seed 2'"), "runs left open"),
    "verdict twice": (sql("UPDATE tags SET value = '2' WHERE key = 'seed'"), "runs: twice: verdict alpha 2"),
    "stray file": (stray, r"files: more \[\"studies/tiny/.study.json.77\"\]"),
    "version too many": (sql(VERSION), "versions: more"),
    "trial's score changed": (sql("UPDATE trial_values SET value = 0.25", "optuna.db"), "search: more"),
    "trial removed": (sql("DELETE FROM trials", "optuna.db"), "search: more"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_the_comparison_finds_what_is_planted(tmp_path: Path, made: Path, planted: str) -> None:
    store = copied(made, tmp_path / "store").root
    before = contents(store)
    assert differences(before, contents(made)) == []
    change, line = PLANTED[planted]
    change(store)
    found = differences(contents(store), before)
    assert any(re.match(line, each) for each in found), found
    if planted in ("run removed", "metric changed"):
        assert ended(store) != ended(made)


def test_a_store_that_does_not_open_is_bricked(tmp_path: Path, made: Path) -> None:
    store = copied(made, tmp_path / "store").root
    (store / "mlflow.db").write_bytes(b"torn")
    assert any("refused" in key for key in opened(store))


def test_an_orphan_is_found() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env=os.environ | {"DMLSTUDY_TEST": "campaign-orphan"},
    )
    try:
        assert [each.pid for each in left("campaign-orphan", 0)] == [process.pid]
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_few_kills_for_real(tmp_path: Path) -> None:
    record = tmp_path / "kills.csv"
    command = [
        sys.executable,
        "-m",
        "tests.faults.campaign",
        "--kills",
        "6",
        "--folder",
        tmp_path,
        "--record",
        record,
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=3600)
    rows = CampaignRecord(record).rows
    assert sum(row.kind != ROUND for row in rows) >= 6
    assert {row.result for row in rows} == {EQUAL}
