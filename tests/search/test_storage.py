"""Optuna's storage on file systems of one machine and of several, and opened by one who only looks."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from dmlstudy import journal as journals
from dmlstudy.search import storage as storages
from dmlstudy.search.rows import end_trial
from dmlstudy.search.storage import number_of, open_storage, read_storage, to_disk
from dmlstudy.store import Store, StoreError

optuna.logging.set_verbosity(optuna.logging.WARNING)


NEW: dict[str, FrozenTrial] = {
    "all kinds": create_trial(
        state=TrialState.RUNNING,
        params={"lr": 1e-3, "k": 4, "mining": "hard", "on": True, "none": None},
        distributions={
            "lr": FloatDistribution(1e-5, 1e-1, log=True),
            "k": IntDistribution(1, 9),
            "mining": CategoricalDistribution(["easy", "hard"]),
            "on": CategoricalDistribution([True, False]),
            "none": CategoricalDistribution([None, 1]),
        },
        user_attrs={"family": "<b>", "generation": 3, "source": {"study": "earlier", "numbers": [1, 2]}},
        system_attrs={"tpe:relative_params": "{}", "constraints": [0.5]},
    ),
    "bare": create_trial(state=TrialState.RUNNING),
    "one waits": create_trial(state=TrialState.WAITING, user_attrs={"family": "a"}),
    "one ended with a score": create_trial(
        value=0.5, params={"k": 4}, distributions={"k": IntDistribution(1, 9)}, intermediate_values={1: 0.25}
    ),
}


def tables_of(storage: optuna.storages.RDBStorage) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of a storage; times are left out."""
    found = {}
    for name in sqlalchemy.inspect(storage.engine).get_table_names():
        with storage.engine.connect() as connection:
            asked = connection.execute(sqlalchemy.text(f"SELECT * FROM {name} ORDER BY 1"))
            found[name] = [
                tuple(value for key, value in row.items() if not key.startswith("datetime"))
                for row in asked.mappings()
            ]
    return found


def test_new_trials_are_the_rows_that_optuna_writes(tmp_path: Path) -> None:
    """Of several studies in one storage; and each gets the number that Optuna gives it."""
    plain = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'plain.db'}")
    ours = open_storage(Store(tmp_path))
    for storage in (plain, ours):
        for name in ("one", "two"):
            study_id = optuna.create_study(storage=storage, study_name=name)._study_id
            for trial in (*NEW.values(), NEW["all kinds"]):
                storage.create_new_trial(study_id, trial)
            storage.create_new_trial(study_id)
    assert tables_of(ours) == tables_of(plain)
    assert len(tables_of(ours)["trial_params"]) == 2 * (5 + 5 + 1)
    for found, wanted in zip(ours.get_all_trials(2), plain.get_all_trials(2), strict=True):
        assert (found.number, found.params, found.distributions, found.user_attrs, found.system_attrs) == (
            wanted.number,
            wanted.params,
            wanted.distributions,
            wanted.user_attrs,
            wanted.system_attrs,
        )


SCORES = {1: 0.25, 2: float("nan"), 3: float("inf"), 4: float("-inf"), 7: 0.5}

ENDS: tuple[tuple[TrialState, list[float] | None, dict[str, Any]], ...] = (
    (TrialState.COMPLETE, [0.5, float("inf")], {"settled": {"weight_decay": 1e-4}}),
    (TrialState.COMPLETE, [0.25, float("-inf")], {}),
    (TrialState.PRUNED, None, {"reason": "<b>too low</b>", "settled": {"lr": 0.1}}),
    (TrialState.FAIL, None, {"reason": "no\nmemory"}),
    (TrialState.FAIL, None, {}),
)


def test_scores_and_ends_are_the_rows_that_optuna_writes(tmp_path: Path) -> None:
    plain = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'plain.db'}")
    ours = open_storage(Store(tmp_path))
    for storage in (plain, ours):
        study = optuna.create_study(storage=storage, study_name="ends", directions=["maximize", "minimize"])
        for end in ENDS:
            trial_id = storage.create_new_trial(study._study_id, NEW["all kinds"])
            for step, score in SCORES.items():
                storage.set_trial_intermediate_value(trial_id, step, score)
            storage.set_trial_intermediate_value(trial_id, 7, 0.75)
            if storage is ours:
                end_trial(ours, trial_id, *end)
            else:
                end_as_in_optuna(storage, trial_id, *end)
    assert tables_of(ours) == tables_of(plain)
    assert len(tables_of(ours)["trial_intermediate_values"]) == len(ENDS) * len(SCORES)
    assert all(trial.datetime_complete for trial in ours.get_all_trials(1))


def end_as_in_optuna(
    storage: optuna.storages.BaseStorage,
    trial_id: int,
    state: TrialState,
    values: list[float] | None,
    attrs: dict[str, Any],
) -> None:
    for key, value in attrs.items():
        storage.set_trial_user_attr(trial_id, key, value)
    storage.set_trial_state_values(trial_id, state, values)


def test_an_end_replaces_the_reason_that_a_killed_driver_has_left(tmp_path: Path) -> None:
    storage = open_storage(Store(tmp_path))
    trial_id = storage.create_new_trial(optuna.create_study(storage=storage)._study_id, NEW["all kinds"])
    storage.set_trial_user_attr(trial_id, "reason", "too low")
    end_trial(storage, trial_id, TrialState.PRUNED, [0.5], {"reason": "too late"})
    assert storage.get_trial(trial_id).user_attrs == {**NEW["all kinds"].user_attrs, "reason": "too late"}


def test_a_trial_that_has_ended_and_one_that_is_not_there_take_nothing(tmp_path: Path) -> None:
    storage = open_storage(Store(tmp_path))
    study_id = optuna.create_study(storage=storage)._study_id
    trial_id = storage.create_new_trial(study_id, NEW["one ended with a score"])
    before = tables_of(storage)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        end_trial(storage, trial_id, TrialState.FAIL, None, {"reason": "too late"})
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        storage.set_trial_intermediate_value(trial_id, 9, 0.5)
    with pytest.raises(KeyError):
        end_trial(storage, trial_id + 1, TrialState.FAIL, None, {})
    with pytest.raises(KeyError):
        storage.set_trial_intermediate_value(trial_id + 1, 9, 0.5)
    assert tables_of(storage) == before


def test_an_end_that_cannot_be_stored_leaves_the_trial_open(tmp_path: Path) -> None:
    storage = open_storage(Store(tmp_path))
    trial_id = storage.create_new_trial(optuna.create_study(storage=storage)._study_id, NEW["all kinds"])
    before = tables_of(storage)
    with sqlite3.connect(tmp_path / "optuna.db") as database:
        database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON trial_user_attributes"
            " BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
        )
    with pytest.raises(sqlalchemy.exc.SQLAlchemyError, match="the disk is full"):
        end_trial(storage, trial_id, TrialState.PRUNED, [0.5], {"reason": "too low"})
    assert tables_of(storage) == before
    assert storage.get_trial(trial_id).state == TrialState.RUNNING


def test_a_trial_that_cannot_be_stored_leaves_nothing(tmp_path: Path) -> None:
    storage = open_storage(Store(tmp_path))
    study_id = optuna.create_study(storage=storage)._study_id
    before = tables_of(storage)
    with pytest.raises(TypeError):
        storage.create_new_trial(study_id, create_trial(state=TrialState.RUNNING, user_attrs={"a": object()}))
    assert tables_of(storage) == before
    assert storage.create_new_trial(study_id, NEW["bare"]) == 1


def mounted(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine's table of mounts say that the folder is of this kind."""
    table = folder.parent / "mounts"
    point = str(folder.resolve()).replace(" ", r"\040")
    table.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {point} {kind} rw 0 0\nproc /proc proc rw 0 0\n")
    monkeypatch.setattr(journals, "MOUNTS", table)


def journal(folder: Path) -> str:
    with sqlite3.connect(folder / "optuna.db") as connection:
        mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    connection.close()
    return str(mode)


def used(folder: Path) -> None:
    storage = open_storage(Store(folder))
    optuna.create_study(storage=storage, study_name="s", load_if_exists=True).enqueue_trial({})
    storage.remove_session()
    storage.engine.dispose()


@pytest.mark.parametrize(
    "kind",
    ["nfs", "nfs4", "cifs", "smb3", "fuse.s3fs", "lustre", "gpfs", "beegfs", "ceph", "9p", "glusterfs"],
)
def test_the_log_is_not_written_ahead_where_others_may_write(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, local = tmp_path / "a share", tmp_path / "local"
    for folder in (shared, local):
        folder.mkdir()
    mounted(shared, kind, monkeypatch)
    assert not journals.is_local(shared)
    assert not journals.is_local(shared / "deeper")
    assert journals.is_local(local)
    if kind == "nfs":
        used(shared)
        used(local)
        assert (journal(shared), journal(local)) == ("delete", "wal")


def test_a_storage_that_was_moved_to_a_share_leaves_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "store").mkdir()
    mounted(folder, "xfs", monkeypatch)
    used(folder)
    assert journal(folder) == "wal"
    mounted(folder, "nfs4", monkeypatch)
    used(folder)
    assert journal(folder) == "delete"


@pytest.mark.parametrize("kind", ["ext4", "nfs"])
def test_who_looks_writes_nothing_and_sees_what_is_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "a store").mkdir()
    mounted(folder, kind, monkeypatch)
    used(folder)
    looking = read_storage(Store(folder))
    study_id = looking.get_study_id_from_name("s")
    assert len(looking.get_all_trials(study_id)) == 1
    used(folder)
    assert len(looking.get_all_trials(study_id)) == 2
    with pytest.raises(optuna.exceptions.StorageInternalError):
        looking.delete_study(study_id)


KILLED = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size=1")
connection.execute("BEGIN")
connection.execute("CREATE TABLE x (i)")
connection.executemany("INSERT INTO x VALUES (?)", ((i,) for i in range(10_000)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_has_left_half_done_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "store").mkdir()
    mounted(folder, "nfs", monkeypatch)
    used(folder)
    subprocess.run([sys.executable, "-c", KILLED, folder / "optuna.db"], check=False)
    assert (folder / "optuna.db-journal").stat().st_size > 0
    looking = read_storage(Store(folder))
    assert len(looking.get_all_trials(looking.get_study_id_from_name("s"))) == 1


@pytest.mark.parametrize("damage", ["garbage", "another's tables", "an old schema"])
def test_a_database_that_cannot_be_read_is_one_line_with_the_fix(damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    if damage == "garbage":
        store.optuna_file.write_bytes(b"garbage" * 100)
    else:
        if damage == "an old schema":
            used(tmp_path)
        with sqlite3.connect(store.optuna_file) as database:
            if damage == "an old schema":
                database.execute("UPDATE alembic_version SET version_num = 'v2.4.0.a'")
            else:
                database.execute("CREATE TABLE version_info (a INTEGER)")
                database.execute("CREATE TABLE studies (a INTEGER)")
        database.close()
    fix = "optuna storage upgrade --storage" if damage == "an old schema" else "put a copy of it back"
    for ask in (open_storage, lambda store: storages.trials_of(store, "s")):
        with pytest.raises(StoreError, match=fix) as caught:
            ask(store)
        assert str(caught.value).startswith(f"{store.optuna_file}: ")
        assert "\n" not in str(caught.value)


def test_an_empty_file_counts_as_no_database(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.optuna_file.touch()
    assert storages.trials_of(store, "s") == []
    assert [path.name for path in tmp_path.glob(".*")] == [".making"]


def test_what_is_sent_to_disk_is_there_without_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power may take the log, which nobody has synchronised; the file alone is then what is found."""
    for folder in (store := tmp_path / "store", left := tmp_path / "left"):
        folder.mkdir()
    mounted(store, "xfs", monkeypatch)
    storage = open_storage(Store(store))
    study = optuna.create_study(storage=storage, study_name="s")

    def found() -> int:
        shutil.copy(store / "optuna.db", left / "optuna.db")
        return len(optuna.load_study(study_name="s", storage=f"sqlite:///{left / 'optuna.db'}").trials)

    to_disk(storage)
    study.tell(study.ask(), 1.0)
    assert found() == 0
    to_disk(storage)
    assert found() == 1
    storage.remove_session()
    storage.engine.dispose()


@pytest.mark.parametrize("is_file", [True, False])
def test_a_number_counts_the_trials_of_its_own_study(is_file: bool, tmp_path: Path) -> None:
    storage = open_storage(Store(tmp_path)) if is_file else optuna.storages.InMemoryStorage()
    for name in ("a", "b", "a", "a", "b"):
        study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
        made = storage.create_new_trial(study._study_id, optuna.trial.create_trial(value=1.0))
        assert number_of(storage, made) == storage.get_trial(made).number == len(study.trials) - 1


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_READONLY])
def test_nobody_is_told_to_move_a_database_away_because_the_disk_is_full(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        said = sqlite3.OperationalError("disk I/O error")
        said.sqlite_errorcode = code
        try:
            raise sqlalchemy.exc.OperationalError("PRAGMA", {}, said)
        except sqlalchemy.exc.OperationalError as error:
            raise optuna.exceptions.StorageInternalError("it failed") from error

    monkeypatch.setattr(optuna.storages, "RDBStorage", refuse)
    with pytest.raises(StoreError, match=r"optuna\.db: .* see that its disk has room") as caught:
        read_storage(Store(tmp_path))
    assert "move it away" not in str(caught.value)
