"""Studies that are deleted, also by a process killed in between, and what killed commands have left."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import optuna
import pytest

from dmlstudy import cli, embedders
from dmlstudy.files import draft_of
from dmlstudy.registry import connection, deletion, models, tracking
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.search.storage import open_storage, trials_of
from dmlstudy.store import Store, StoreError, sole_driver
from dmlstudy.studies import cleanup

optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("cleanup") / "store")
    made.prepare()
    connection.connect(made, create=True)
    return made


def ran(store: Store, name: str, alias: str = "", **spec: Any) -> str:
    """A study with a trial, a state and, where an alias is given, a registered model; its run's id."""
    with sole_driver(store, name):
        store.write_state(
            name, "running", started=1.0, fingerprint="f", spec={"families": {"red": {}}, **spec}, job=""
        )
        tracker = StudyTracker(store, name, {"study.yaml": "x" * 5000})
        study = optuna.create_study(storage=open_storage(store), study_name=name)
        study.tell(study.ask(), 0.5)
        store.write_state(name, "finished")
    (store.study_folder(name) / "checkpoints").mkdir()
    (store.study_folder(name) / "checkpoints" / "state").write_text("x" * 1000)
    if alias:
        folder = store.root / f"{name}-model"
        embedder = embedders.build("small_conv", 6, width=4, in_channels=1, image_size=8, seed=0)
        embedders.save(embedder, folder, {}, np.zeros((2, 8, 8, 1), np.uint8))
        tags = {"study": name, "family": "red", "spec_fingerprint": "f"}
        version = models.register(
            store,
            f"{name}-embedder",
            lambda _: folder,
            run_id=tracker.parent_id,
            tags=tags,
            card=lambda preprocessing: "card",
        )
        tracker.client.set_registered_model_alias(version.name, alias, str(version.version))
    return tracker.parent_id


def is_there(store: Store, name: str) -> bool:
    client = connection.connect(store)
    return bool(
        client.get_experiment_by_name(name)
        or trials_of(store, name)
        or store.study_folder(name).exists()
        or (store.root / "artifacts" / name).exists()
    )


def test_a_study_is_deleted_and_its_name_is_free(store: Store) -> None:
    ran(store, "gone")
    kept = ran(store, "kept")
    there = cleanup.extent(store, "gone")
    assert (there.num_runs, there.num_trials, there.versions) == (1, 1, [])
    assert there.num_bytes > 6000
    assert cleanup.delete(store, "gone") == there
    assert not is_there(store, "gone")
    with pytest.raises(StoreError, match=r"no study 'gone' in the store .*there are: kept"):
        cleanup.delete(store, "gone")
    assert connection.connect(store).get_run(kept).info.lifecycle_stage == "active"
    assert len(trials_of(store, "kept")) == 1
    ran(store, "gone")
    assert cleanup.extent(store, "gone").num_runs == 1
    cleanup.delete(store, "gone")


def test_a_study_goes_with_the_searches_that_were_done_again(store: Store) -> None:
    again = {"protocol": {"replicate_of": {"study": "again", "number": 2}}}
    for name, spec in (("again", {}), ("again.search2", again), ("again.search3", {})):
        ran(store, name, **spec)
    there = cleanup.extent(store, "again")
    assert (there.searches, there.num_runs, there.num_trials) == (["again.search2"], 2, 2)
    assert cleanup.delete(store, "again") == there
    assert not is_there(store, "again")
    assert not is_there(store, "again.search2")
    assert is_there(store, "again.search3"), "a study of that name that says nothing of the other"
    cleanup.delete(store, "again.search3")


POINTS = [
    (mlflow.MlflowClient, "delete_registered_model"),
    (mlflow.MlflowClient, "delete_experiment"),
    (deletion, "_database"),
    (cleanup, "_delete_search"),
    (cleanup, "_delete_states"),
    (cleanup.shutil, "rmtree"),
]


@pytest.mark.parametrize(("where", "call"), POINTS, ids=[call for _, call in POINTS])
def test_a_deletion_killed_in_between_is_done_again(
    where: Any, call: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(store, "broken", "champion")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as kill:
        kill.setattr(where, call, killed)
        with pytest.raises(KeyboardInterrupt):
            cleanup.delete(store, "broken", with_models=True)
    assert store.study_folder("broken").exists(), "its folder goes last"
    cleanup.delete(store, "broken", with_models=True)
    assert not is_there(store, "broken")
    assert not connection.connect(store).search_registered_models("name = 'broken-embedder'")
    experiments = connection.connect(store).search_experiments(view_type=mlflow.entities.ViewType.ALL)
    assert not [each.name for each in experiments if each.name.startswith("broken")]


def test_a_study_that_runs_and_a_model_in_use_are_not_deleted(store: Store) -> None:
    ran(store, "used", alias="champion")
    with sole_driver(store, "used"), pytest.raises(StoreError, match="is running already"):
        cleanup.delete(store, "used", with_models=True)
    with pytest.raises(
        StoreError, match=r"models in use \(champion or challenger\): used-embedder/1; .*--models"
    ):
        cleanup.delete(store, "used")
    assert is_there(store, "used")
    assert cleanup.delete(store, "used", with_models=True).in_use == ["used-embedder/1"]
    assert not is_there(store, "used")
    assert models.versions(store) == []


def test_a_study_of_another_store_is_not_deleted(store: Store) -> None:
    ran(store, "theirs")
    client = connection.connect(store)
    client.set_tag(
        tracking.runs_of(store, "theirs").study.id,
        tracking.STORE,
        "another",
    )
    with pytest.raises(StoreError, match="is not of the store"):
        cleanup.delete(store, "theirs")
    assert is_there(store, "theirs")


def aged(path: Path, text: str = "x" * 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for each in (path, path.parent):
        os.utime(each, (time.time() - 10 * 86400,) * 2)
    return path


def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_what_killed_commands_have_left_is_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (scratch := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(cleanup.tempfile, "gettempdir", lambda: str(scratch))
    place = Store(tmp_path / "store")
    place.prepare()
    run_id = ran(place, "s")
    ran(place, "driven")
    client = connection.connect(place)
    client.delete_run(run_id)
    folder = place.study_folder("s")
    left = [
        aged(draft_of(place.optuna_file)),
        aged(folder / ".study.json.77"),
        aged(folder / "checkpoints" / "state"),
        aged(scratch / f"dmlstudy-meeting-{gone()}-a" / "port"),
        aged(scratch / f"dmlstudy-files-{gone()}-a" / "weights"),
        aged(aged(tmp_path / "models" / ".pull-x" / "content" / "weights").parent.parent / "lock"),
        aged(tmp_path / "models" / f".report.html.{'0a' * 16}.draft"),
        aged(tmp_path / "models" / ".gallery.dmlstudy.draft" / "items.parquet"),
    ]
    kept = [
        aged(place.study_folder("driven") / ".study.json.78"),
        aged(tmp_path / "models" / "o.parquet.parts" / "job.json"),
        aged(tmp_path / "models" / "own.parts" / "score.txt"),
        aged(tmp_path / "models" / ".pull-requests" / "mine.txt"),
        aged(tmp_path / "models" / ".letter.draft"),
        held := aged(tmp_path / "models" / f".report.html.{'1b' * 16}.draft"),
        aged(scratch / f"dmlstudy-meeting-{os.getpid()}-a" / "port"),
        aged(scratch / "dmlstudy-meeting-a" / "port"),
        aged(scratch / f"dmlstudy-files-{os.getpid()}-a" / "weights"),
    ]
    young = tmp_path / "models" / ".pull-y" / "content" / "weights"
    young.parent.mkdir(parents=True)
    young.write_text("just written")
    (young.parent.parent / "lock").touch()

    def called(*more: object) -> list[str]:
        arguments = ["prune", "--store", place.root, "--also", tmp_path / "models", *more]
        monkeypatch.setattr(sys, "argv", ["dmlstudy", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return capfd.readouterr().out.splitlines()

    with sole_driver(place, "driven"), held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        aged(kept[0])
        shown = called("--dry-run")
        assert all(path.exists() for path in [*left, *kept, young])
        assert shown[-1].startswith("would free ")
        for what, path, num_bytes in (
            ("model", left[-3].parent, 200),
            ("file", left[-2], 100),
            ("folder", left[-1].parent, 100),
        ):
            assert f"draft of a {what}: {path} ({num_bytes} B)" in shown
        assert not any(str(path) in line for path in kept for line in shown)
        called()
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in [*kept, young])
        called("--older-than", "0s")
        assert client.search_runs(["1"], run_view_type=mlflow.entities.ViewType.DELETED_ONLY) == []
        assert not young.exists()
        said = "\n".join(called("--parts", "--json"))
        assert [each["what"] for each in json.loads(said)] == ["parts of an embed"]
    assert [path for path in kept if not path.exists()] == [kept[1]]


def test_pruning_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--also .*/nothere: no such folder"):
        cleanup.prune(Store(tmp_path / "store"), 0, also=[tmp_path, tmp_path / "nothere"])
    named = Store(tmp_path / "store", given={"--store": "store"})
    with pytest.raises(StoreError, match=r"no store in .*/store; name another with --store"):
        cleanup.prune(named, 0)
    assert cleanup.prune(Store(tmp_path / "store"), 0, also=[tmp_path]) is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["7", "x", "1w", "-1d", ""])
def test_an_age_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number and s, m, h or d"):
        cleanup.age(text)


def test_bytes_for_people() -> None:
    told = [cleanup.bytes_told(num) for num in (0, 1023, 1434, 3 * 2**30, 5000 * 2**30)]
    assert told == ["0 B", "1023 B", "1.4 KiB", "3.0 GiB", "5000.0 GiB"]
