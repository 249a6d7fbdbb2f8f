"""A store that is moved, copied or reached by another path: nothing is lost, and no store writes into another."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from support.made_study import Maker
from typer.testing import CliRunner

from dmlstudy.cli.app import app
from dmlstudy.registry import artifact_places, connection, models
from dmlstudy.registry.tracking import fetch_model
from dmlstudy.store import Store, StoreError, sole_driver


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a registered model, at a place that URLs write in another way."""
    store = Store(tmp_path_factory.mktemp("a b%20?#ü") / "store")
    store.prepare()
    maker = Maker(store, "small")
    maker.search("alpha", "finished", 0.5)
    run_id = maker.judge("alpha", 1, 0.4)
    maker.keep_embedder(run_id, "alpha", 1)
    with_model = fetch_model(maker.tracker.client, run_id, store.root.parent / "fetched")
    models.register(
        store,
        "small-embedder",
        lambda _: with_model,
        run_id=run_id,
        tags={"study": "small", "family": "alpha", "spec_fingerprint": "f"},
        card=lambda preprocessing: "card",
    )
    maker.end("alpha")
    connection.disconnect(store)
    return store.root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """Beside the store that it is a copy of."""
    return Path(shutil.copytree(made, tmp_path / "ä copy"))


def places(store: Path) -> list[str]:
    """Every text in MLflow's database that holds the path of a folder."""
    found = []
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for row in database.execute(f'SELECT * FROM "{table}"'):
                found += [each for each in row if isinstance(each, str) and each.startswith(("file:", "/"))]
    return found


def files(store: Path) -> dict[str, bytes]:
    """Everything kept of runs and studies beside the databases."""
    folders = (store / "artifacts", store / "studies")
    return {str(path): path.read_bytes() for each in folders for path in each.rglob("*") if path.is_file()}


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, " ".join(f"{done.output} {done.exception or ''}".split())


COMMANDS = [
    ["leaderboard", "small"],
    ["report", "small", "-o", "small.html"],
    ["models"],
    ["pull", "small-embedder/1", "--to", "model"],
    ["ui"],
    ["delete", "small", "--yes"],
    ["prune"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_copy_is_refused_in_one_line_with_the_fix(
    made: Path, copy: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = files(made), files(copy), places(made), places(copy)
    code, said = run(*words, "--store", str(copy))
    assert code
    assert f"this store is a copy of {made}" in said
    assert f"`dmlstudy relocate --store '{copy}'` sets that right" in said
    assert (files(made), files(copy), places(made), places(copy)) == before
    assert not (tmp_path / "model").exists()


def test_a_copy_is_then_a_store_of_its_own(made: Path, copy: Path, tmp_path: Path) -> None:
    before = files(made), places(made)
    assert run("relocate", "--store", str(copy)) == (0, f"{copy}: no longer looks in {made}")
    assert run("relocate", "--store", str(copy)) == (0, f"{copy}: is in its place")
    there = places(copy)
    assert len(there) >= 6
    assert {each.startswith(f"{Store(copy).artifacts}/") for each in there} == {True}
    assert run("leaderboard", "small", "--store", str(copy))[0] == 0
    report = str(tmp_path / "report.html")
    assert run("report", "small", "-o", report, "--store", str(copy))[0] == 0
    assert run("pull", "small-embedder/1", "--to", str(tmp_path / "model"), "--store", str(copy))[0] == 0
    again = Maker(Store(copy), "small")
    again.keep_embedder(again.judge("alpha", 2, 0.4), "alpha", 2)
    again.end("alpha")
    assert run("delete", "small", "--yes", "--models", "--store", str(copy))[0] == 0
    assert (files(made), places(made)) == before
    assert not any((copy / "artifacts" / "small").rglob("*"))


def test_a_moved_store_is_told_so_and_mended(copy: Path, tmp_path: Path) -> None:
    run("relocate", "--store", str(copy))
    moved = copy.rename(tmp_path / "moved")
    code, said = run("models", "--store", str(moved))
    assert code
    assert f"this store was moved or copied from {copy}," in said
    assert run("relocate", "--store", str(moved))[0] == 0
    assert run("pull", "small-embedder/1", "--to", str(tmp_path / "model"), "--store", str(moved))[0] == 0


def test_the_same_folder_by_another_path_is_the_store(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(made)
    assert run("models", "--store", str(link))[0] == 0
    assert artifact_places.relocate(Store(link)) is None
    monkeypatch.chdir(made.parent)
    assert run("models", "--store", made.name)[0] == 0


def test_not_while_a_study_runs(copy: Path) -> None:
    store = Store(copy)
    before = places(copy)
    with (
        sole_driver(store, "small"),
        pytest.raises(StoreError, match="'small' is running; wait for its end, or"),
    ):
        artifact_places.relocate(store)
    assert places(copy) == before


def test_all_or_nothing(copy: Path) -> None:
    before = places(copy)
    with contextlib.closing(sqlite3.connect(copy / "mlflow.db")) as database, database:
        database.execute(
            "CREATE TRIGGER full BEFORE UPDATE ON model_versions BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
    with pytest.raises(StoreError, match=r"mlflow\.db: cannot be written \(disk full\); nothing was changed"):
        artifact_places.relocate(Store(copy))
    assert places(copy) == before


def test_where_nothing_is_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no studies in the store .*nothing; name another with --store"):
        artifact_places.relocate(Store(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(
        StoreError, match=r"its runs are at http://127\.0\.0\.1:5000, which has its own places"
    ):
        artifact_places.relocate(Store(tmp_path, server="http://127.0.0.1:5000"))


def test_a_database_of_another_program_is_left_alone(copy: Path) -> None:
    with contextlib.closing(sqlite3.connect(copy / "mlflow.db")) as database, database:
        database.execute("UPDATE experiments SET artifact_location = 's3://bucket/0' WHERE experiment_id = 0")
    before = places(copy)
    assert artifact_places.relocate(Store(copy)) is None
    assert places(copy) == before
