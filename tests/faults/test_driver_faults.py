"""The driver killed with SIGKILL at random moments and at the two worst ones, and resumed; and one trial ended from
another shell."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import optuna
import pytest
import safetensors
from PIL import Image
from support.postgres import stoppable_postgres

from dmlstudy.store import OPTUNA_URL

from .conftest import DMLSTUDY, Driver, Record, board_of, marked, seconds_until_training, trials_of

pytestmark = pytest.mark.timeout(1500)

SPEC = """
name: tiny
data: {name: digits}
embedder: {dim: 8, width: 4}
batch: {classes: all, images_per_class: 4, per_epoch: 10}
training: {epochs: 12, head_lr_mult: 1, lr: {float: [1.0e-4, 1.0e-2], log: true, default: 1.0e-3}}
families:
  red: {space: multi_similarity}
  blue: {space: triplet_weighting}
search: {trials_per_family: 3}
protocol: {num_folds: 1, verdict_seeds: 1, fold_models: false}
"""
SLOW = SPEC.replace("epochs: 12", "epochs: 80")
"""Workers outlive their raylet by some seconds: in which the study must not come to its end."""
ENDLESS = (
    SPEC.replace("epochs: 12", "epochs: 100000")
    .replace("  blue: {space: triplet_weighting}\n", "")
    .replace("trials_per_family: 3", "trials_per_family: 2")
)


def called(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Another shell's ``dmlstudy``."""
    return subprocess.run([*DMLSTUDY, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start(log: Path, *arguments: str | Path) -> Driver:
        drivers.append(Driver(log, *arguments))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


def statuses_in_mlflow(store: Path) -> set[str]:
    client = mlflow.MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    return {run.info.status for run in client.search_runs([experiment.experiment_id], max_results=1000)}


BEGUN = """
SELECT kind.run_uuid, family.value FROM tags kind JOIN tags family ON family.run_uuid = kind.run_uuid
WHERE kind.key = 'dmlstudy_kind' AND kind.value = 'verdict' AND family.key = 'family' AND family.value != 'untrained'
AND EXISTS (SELECT 1 FROM params WHERE params.run_uuid = kind.run_uuid)
"""
"""Runs, with their families, of the verdict trials that have been begun."""


def in_mlflow(store: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{store / 'mlflow.db'}?mode=ro", uri=True, timeout=20)) as database:
        return database.execute(query).fetchall()


def states_kept(store: Path, family: str) -> Iterator[dict[str, Any]]:
    """What the states of the family's verdict trials say of themselves."""
    for path in (store / "studies" / "tiny" / "checkpoints").glob(f"{family}-verdict-*/trial.safetensors"):
        with safetensors.safe_open(path, "np") as file:
            yield json.loads(file.metadata()["trial"])


def killed_between_an_end_and_its_record(driver: Driver, store: Path, known: set[str]) -> dict[str, Any]:
    """Kill the driver when a verdict trial that is not ``known`` has trained its last epoch; the state it has kept.

    Its record is held up by a lock on MLflow's database, for as long as SQLite waits: 20 s.
    """
    begun: dict[str, str] = {}

    def has_begun() -> bool:
        begun.update(row for row in in_mlflow(store, BEGUN) if row[0] not in known)
        return bool(begun)

    driver.wait_until(has_begun, every=0.01)
    (family,) = begun.values()
    with closing(sqlite3.connect(store / "mlflow.db", timeout=20, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        driver.wait_until(
            lambda: any(state["epoch"] == 12 for state in states_kept(store, family)), every=0.01
        )
        time.sleep(0.5)  # the result is with the driver
        driver.kill()
        database.execute("ROLLBACK")
    (kept,) = states_kept(store, family)
    return {"family": family, **kept}


def judged(store: Path) -> dict[tuple[str, str], str]:
    """The finished verdict runs by family and seed: never two of one."""
    client = mlflow.MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    runs = client.search_runs(
        [experiment.experiment_id], "tags.dmlstudy_kind = 'verdict' and tags.status = 'finished'"
    )
    found = {(run.data.tags["family"], run.data.tags["seed"]): run.info.run_id for run in runs}
    assert len(found) == len(runs), "a verdict was recorded twice"
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the study, run without a fault."""
    return unbroken(tmp_path_factory.mktemp("whole"), SPEC)


@pytest.fixture(scope="module")
def whole_slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unbroken(tmp_path_factory.mktemp("whole-slow"), SLOW)


def unbroken(folder: Path, text: str) -> Path:
    """The store of a study that was run to its end in this folder."""
    (folder / "tiny.yaml").write_text(text)
    driver = Driver(folder / "shown", "run", folder / "tiny.yaml", "--store", folder / "store")
    try:
        assert driver.process.wait(timeout=400) == 0, driver.log.read_text()
    finally:
        driver.end()
    return folder / "store"


def assert_equal(broken: Path, whole: Path) -> None:
    """Both have the same leaderboard and the same trials, digit for digit."""
    assert board_of(broken, "tiny") == board_of(whole, "tiny")
    for kept, expected in zip(trials_of(broken, "tiny"), trials_of(whole, "tiny"), strict=True):
        for what in ("number", "state", "params", "value", "intermediate_values"):
            assert getattr(kept, what) == getattr(expected, what), (kept.number, what)
    assert statuses_in_mlflow(broken) <= {"FINISHED", "KILLED"}


def interrupted(store: Path) -> str:
    """The reason that an interrupted study's state gives."""
    gone = json.loads(called("status", "tiny", "--json", "--store", store).stdout)
    assert gone["state"] == "interrupted"
    return str(gone["reason"])


def assert_resumed_is(whole: Path, store: Path, drive: Callable[..., Driver]) -> None:
    """Resumed, the study ends as the unbroken one."""
    resumed = drive(store.with_name("resumed"), "resume", "tiny", "--store", store)
    assert resumed.process.wait(timeout=400) == 0, resumed.log.read_text()
    assert_equal(store, whole)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["raylet/raylet", "gcs_server"])
def test_a_ray_that_dies_ends_the_study_in_one_line_and_it_can_be_resumed(
    tmp_path: Path, drive: Callable[..., Driver], record_fault: Record, whole_slow: Path, victim: str
) -> None:
    (tmp_path / "tiny.yaml").write_text(SLOW)
    store = tmp_path / "store"
    driver = drive(tmp_path / "0", "run", tmp_path / "tiny.yaml", "--store", store)
    driver.wait_until(driver.said("^starting the workers"))
    (process,) = marked(driver.mark, f"/{victim} ")
    driver.wait_until(driver.said("^1/9 "))
    process.kill()
    killed = time.monotonic()
    assert driver.process.wait(timeout=100) == 2, driver.log.read_text()
    seconds = time.monotonic() - killed
    line = driver.log.read_text().splitlines()[-1]
    again = re.escape(f"`dmlstudy resume tiny --store {store}` goes on")
    assert re.fullmatch(rf"error: Ray on this machine has died: .*; {again}", line), line
    record_fault(f"{Path(victim).name} killed, until the study has ended", 0, seconds)
    assert interrupted(store) == line.removeprefix("error: ")
    assert driver.left() == [], "a process outlived its driver"
    assert_resumed_is(whole_slow, store, drive)


@pytest.mark.long
def test_a_whole_group_that_is_told_to_end_interrupts_the_study(
    tmp_path: Path, drive: Callable[..., Driver], record_fault: Record, whole: Path
) -> None:
    """As of `timeout` and batch systems: Ray's own processes hear it too."""
    (tmp_path / "tiny.yaml").write_text(SPEC)
    store = tmp_path / "store"
    driver = drive(tmp_path / "0", "run", tmp_path / "tiny.yaml", "--store", store)
    driver.wait_until(driver.said("^1/9 "))
    os.killpg(driver.process.pid, signal.SIGTERM)
    told = time.monotonic()
    assert driver.process.wait(timeout=100) == 130, driver.log.read_text()
    record_fault("SIGTERM for the group, until the study has ended", 0, time.monotonic() - told)
    line = driver.log.read_text().splitlines()[-1]
    again = f"`dmlstudy resume tiny --store {store}`"
    assert line == f"interrupted; what was finished is kept, {again} goes on from there"
    assert interrupted(store) == ""
    assert driver.left() == [], "a process outlived its driver"
    assert_resumed_is(whole, store, drive)


@pytest.mark.long
def test_a_vault_and_a_mailbox_that_are_killed_cost_nothing(
    tmp_path: Path, drive: Callable[..., Driver], record_fault: Record, whole: Path
) -> None:
    """The vault in the search, and twice as the first verdict's embedder comes to it; the mailbox once."""
    (tmp_path / "tiny.yaml").write_text(SPEC)
    store = tmp_path / "store"
    folder = store / "studies" / "tiny"
    driver = drive(tmp_path / "0", "run", tmp_path / "tiny.yaml", "--store", store)
    driver.wait_until(driver.said("^1/9 "))
    for name in ("ray::Vault", "ray::Mailbox"):
        (process, *_) = marked(driver.mark, name)
        process.kill()
        killed = time.monotonic()
        record_fault(f"{name} killed", 0, seconds_until_training(folder, since=killed))
    kill_the_vault_as_an_embedder_comes(driver, store)
    assert driver.process.wait(timeout=400) == 0, driver.log.read_text()
    assert_equal(store, whole)
    assert driver.left() == [], "a process outlived its driver"


def kill_the_vault_as_an_embedder_comes(driver: Driver, store: Path) -> None:
    """Kill the vault when the first verdict trial has trained its last epoch, and again as soon as it is back."""
    begun: dict[str, str] = {}

    def has_begun() -> bool:
        begun.update(row for row in in_mlflow(store, BEGUN))
        return bool(begun)

    driver.wait_until(has_begun, every=0.01)
    (family,) = begun.values()
    driver.wait_until(lambda: any(state["epoch"] == 12 for state in states_kept(store, family)), every=0.01)
    for _ in range(2):
        driver.wait_until(lambda: marked(driver.mark, "ray::Vault"))
        for vault in marked(driver.mark, "ray::Vault"):
            vault.kill()


@pytest.mark.long
def test_a_killed_driver_loses_nothing(
    tmp_path: Path, drive: Callable[..., Driver], record_fault: Record, whole: Path
) -> None:
    """Killed while it starts, while trials run, between the end of one and its record, and while it registers the
    winner, and resumed each time at once, it ends as if unbroken, and runs no verdict twice."""
    (tmp_path / "tiny.yaml").write_text(SPEC)
    broken = tmp_path / "broken"

    moments = random.Random(seed := random.SystemRandom().randrange(1000))
    sys.stdout.write(f"moments of seed {seed}\n")
    first = drive(tmp_path / "0", "run", tmp_path / "tiny.yaml", "--store", broken)
    first.wait_until((broken / "studies" / "tiny" / "study.json").exists)
    time.sleep(moments.uniform(0, 3))
    first.kill()
    gone = json.loads(called("status", "tiny", "--json", "--store", broken).stdout)
    assert (gone["state"], gone["running"]) == ("interrupted", [])
    assert f"its process is gone; `dmlstudy resume tiny --store {broken}` goes on" in gone["notes"][0]

    second = drive(tmp_path / "1", "resume", "tiny", "--store", broken)
    second.wait_until(second.said(rf"^{moments.randint(1, 5)}/9 "))
    time.sleep(moments.uniform(0, 1))
    second.kill()
    ended = {trial.number for trial in trials_of(broken, "tiny") if trial.state.is_finished()}

    known = {run for run, _ in in_mlflow(broken, BEGUN)}
    killed = time.monotonic()
    third = drive(tmp_path / "2", "resume", "tiny", "--store", broken)
    again = seconds_until_training(broken / "studies" / "tiny", since=killed)
    record_fault("driver killed with SIGKILL, and resumed", 0, again)
    known |= {run for run, _ in in_mlflow(broken, BEGUN)}
    kept = killed_between_an_end_and_its_record(third, broken, known)
    before = judged(broken)
    assert (kept["family"], "1") not in before

    fourth = drive(tmp_path / "3", "resume", "tiny", "--store", broken)
    fourth.wait_until(lambda: in_mlflow(broken, "SELECT 1 FROM logged_models"), every=0.005)
    fourth.kill()
    registering = judged(broken)
    assert registering.keys() == {("untrained", "1"), ("red", "1"), ("blue", "1")}
    assert before.items() <= registering.items()
    history = mlflow.MlflowClient(f"sqlite:///{broken / 'mlflow.db'}").get_metric_history(
        registering[kept["family"], "1"], "images_per_second"
    )
    speeds = {step: metrics["images_per_second"] for step, metrics in kept["reports"]}
    assert {point.step: point.value for point in history} == speeds, "an epoch was trained again"

    fifth = drive(tmp_path / "4", "resume", "tiny", "--store", broken)
    assert fifth.process.wait(timeout=400) == 0, fifth.log.read_text()
    assert judged(broken) == registering
    resumed = (third, fourth, fifth)
    assert not any(
        f"#{number} " in line for number in ended for driver in resumed for line in lines_of_trials(driver)
    ), "a trial that had ended was run again"
    assert (
        called("pull", "tiny-embedder@champion", "--to", tmp_path / "model", "--store", broken).returncode
        == 0
    )

    assert_equal(broken, whole)
    status = json.loads(called("status", "tiny", "--json", "--store", broken).stdout)
    assert (status["state"], status["num_left"]) == ("finished", 0)
    for driver in (first, second, *resumed):
        assert driver.left() == [], "a process outlived its driver"


@pytest.mark.long
def test_a_study_is_taken_over_from_a_driver_that_lost_its_lock(
    tmp_path: Path, drive: Callable[..., Driver], whole_slow: Path
) -> None:
    """As by another machine when the lock of the first one was lost with its connection to the file server."""
    (tmp_path / "tiny.yaml").write_text(SLOW)
    store = tmp_path / "store"
    first = drive(tmp_path / "0", "run", tmp_path / "tiny.yaml", "--store", store)
    first.wait_until(first.said("red #0 .* paused"))
    lock = store / "studies" / "tiny" / "lock"
    known = lock.read_text()
    lock.unlink()
    lock.write_text(known)
    second = drive(tmp_path / "1", "resume", "tiny", "--store", store)
    assert first.process.wait(timeout=60) == 2, first.log.read_text()
    line = first.log.read_text().splitlines()[-1]
    assert re.fullmatch(
        rf"error: study 'tiny' is driven by process {second.process.pid} on \S+ now, which took it over when the lock"
        " of this one was lost; this one ends",
        line,
    ), line
    assert second.process.wait(timeout=400) == 0, second.log.read_text()
    assert_equal(store, whole_slow)
    assert [driver.left() for driver in (first, second)] == [[], []]


@pytest.mark.long
def test_searches_on_a_postgresql_that_is_away_are_those_of_a_file(
    tmp_path: Path,
    drive: Callable[..., Driver],
    record_fault: Record,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Away for a while, which the study waits for, and then for longer than it waits, after which it is resumed."""
    (tmp_path / "tiny.yaml").write_text(SPEC)
    store = tmp_path / "store"
    with stoppable_postgres() as server:
        url = f"postgresql+psycopg://{server.address}"
        monkeypatch.setenv(OPTUNA_URL, url)
        first = drive(
            tmp_path / "0", "run", tmp_path / "tiny.yaml", "--store", store, "--tracking-timeout", "20"
        )
        first.wait_until(first.said(r"red #0 .* paused"))
        server.stop()
        first.wait_until(
            first.said(r"^the PostgreSQL at \S+ does not answer; the study waits up to 20 s for it$")
        )
        server.start()
        returned = time.monotonic()
        first.wait_until(first.said(r"^the PostgreSQL is back after \d+ s$"))
        record_fault("PostgreSQL of the searches away for a while", 0, time.monotonic() - returned)
        first.wait_until(first.said(r"blue #1 .* paused"))
        server.stop()
        assert first.process.wait(timeout=90) == 2, first.log.read_text()
        assert re.fullmatch(
            r"error: no PostgreSQL at \S+ for \d+ s; when it is back, run the study again, it goes on from there",
            first.log.read_text().splitlines()[-1],
        )
        server.start()
        second = drive(tmp_path / "1", "resume", "tiny", "--store", store)
        assert second.process.wait(timeout=400) == 0, second.log.read_text()
        assert board_of(store, "tiny") == board_of(whole, "tiny")
        storage = optuna.storages.RDBStorage(url)
        trials = optuna.load_study(study_name="tiny", storage=storage).trials
        storage.remove_session()
        storage.engine.dispose()
        for kept, expected in zip(trials, trials_of(whole, "tiny"), strict=True):
            for what in ("number", "state", "params", "value", "intermediate_values"):
                assert getattr(kept, what) == getattr(expected, what), (kept.number, what)
    assert [driver.left() for driver in (first, second)] == [[], []]


def lines_of_trials(driver: Driver) -> list[str]:
    """Start of each line on a trial, without the best so far."""
    return [line[:30] for line in driver.log.read_text().splitlines() if "/9 " in line]


def test_one_trial_is_ended_from_another_shell(tmp_path: Path, drive: Callable[..., Driver]) -> None:
    (tmp_path / "tiny.yaml").write_text(ENDLESS)
    store = tmp_path / "store"
    at: list[str | Path] = ["tiny", "--store", store]
    driver = drive(tmp_path / "log", "run", tmp_path / "tiny.yaml", "--store", store)
    running = store / "studies" / "tiny" / "running.json"
    driver.wait_until(lambda: running.exists() and '"epoch": 3' in running.read_text())

    status = json.loads(called("status", *at, "--json").stdout)
    assert status["state"] == "running"
    (trial,) = status["running"]
    assert (trial["number"], trial["family"]) == (0, "red")
    assert trial["epoch"] >= 3
    assert 0 < trial["score"] < 1
    (family,) = status["families"]
    assert (family["num_running"], family["num_waiting"]) == (1, 1)

    wrong = called("stop", *at, "--trial", "7")
    assert wrong.returncode == 2
    assert "trial 7 of 'tiny' is not running; running are: red #0" in wrong.stderr
    again = called("resume", *at)
    assert again.returncode == 2
    assert "is running on" in again.stderr

    started = time.monotonic()
    stopped = called("stop", *at, "--trial", "0")
    assert re.search(r"trial 0 of tiny is stopped by hand after epoch \d+", stopped.stdout), stopped
    assert time.monotonic() - started < 30
    (first, *_) = trials_of(store, "tiny")
    assert first.state.name == "PRUNED"
    assert "stopped by hand after epoch" in first.user_attrs["reason"]
    driver.wait_until(lambda: '"label": "red #1"' in running.read_text())
    told = called("logs", *at, "--trial", "0").stdout
    assert "stopped early" in told
    assert "reason: stopped by hand" in told
    assert "loss: multi_similarity" in told
    called("stop", *at, "--trial", "1")
    assert driver.process.wait(timeout=60) == 1, driver.log.read_text()
    assert "no trial finished" in driver.log.read_text()
    assert [trial.state.name for trial in trials_of(store, "tiny")] == ["PRUNED", "PRUNED"]
    assert statuses_in_mlflow(store) <= {"FINISHED", "FAILED"}
    assert driver.left() == []


NUM_EMBEDDED = 60_000
EMBEDDER = """
import sys
from dmlstudy import embedders
made = embedders.build("small_conv", 6, width=64, in_channels=1, image_size=64, seed=0)
import numpy as np
example = np.random.default_rng(1).integers(0, 256, (2, 64, 64, 1), dtype=np.uint8)
embedders.save(made, sys.argv[1], {"family": "test"}, example)
"""


def assert_ended_by_dead_ray(driver: Driver, victim: str, then: str) -> float:
    """What drives Ray ends in one line after one of Ray's own processes is killed; the seconds until then."""
    (process,) = marked(driver.mark, f"/{victim} ")
    process.kill()
    killed = time.monotonic()
    assert driver.process.wait(timeout=100) == 2, driver.log.read_text()
    seconds = time.monotonic() - killed
    line = driver.log.read_text().splitlines()[-1]
    assert re.fullmatch(rf"error: Ray on this machine has died: .*; {re.escape(then)}", line), line
    assert driver.left() == [], "a process outlived its driver"
    return seconds


@pytest.mark.long
@pytest.mark.parametrize("victim", ["raylet/raylet", "gcs_server"])
def test_a_ray_that_dies_ends_an_embedding_in_one_line_and_it_goes_on_from_its_parts(
    tmp_path: Path, drive: Callable[..., Driver], record_fault: Record, victim: str
) -> None:
    subprocess.run([sys.executable, "-c", EMBEDDER, tmp_path / "model"], check=True)
    (tmp_path / "pictures").mkdir()
    picture = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "pictures" / "a.png")
    for number in range(NUM_EMBEDDED):
        (tmp_path / "pictures" / f"{number}.png").hardlink_to(tmp_path / "pictures" / "a.png")
    output = tmp_path / "z.parquet"
    command = ["embed", tmp_path / "model", tmp_path / "pictures", "-o", output, "--device", "cpu"]
    driver = drive(tmp_path / "0", *command, "--workers", "2")
    driver.wait_until(lambda: list((tmp_path / "z.parquet.parts").glob("*.parquet")))
    seconds = assert_ended_by_dead_ray(driver, victim, "run the same again, which goes on from its parts")
    record_fault(f"{Path(victim).name} killed, until the embedding has ended", 0, seconds)
    assert not output.exists()
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "z.parquet.parts").glob("*.parquet")}
    assert parts
    again = drive(tmp_path / "1", *command)
    again.wait_until(lambda: len(list((tmp_path / "z.parquet.parts").glob("*.parquet"))) > len(parts))
    assert {path: path.stat().st_mtime_ns for path in parts} == parts


@pytest.mark.long
@pytest.mark.parametrize("victim", ["raylet/raylet", "gcs_server"])
def test_a_ray_that_dies_ends_a_selfcheck_in_one_line(
    tmp_path: Path, drive: Callable[..., Driver], record_fault: Record, victim: str
) -> None:
    driver = drive(tmp_path / "0", "selfcheck", "--cpus-per-worker", "0.5")
    driver.wait_until(driver.said("exact$"))
    seconds = assert_ended_by_dead_ray(driver, victim, "run the same again")
    record_fault(f"{Path(victim).name} killed, until the self-check has ended", 0, seconds)


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("victim", ["raylet/raylet", "gcs_server"])
def test_a_ray_that_dies_as_it_starts_ends_a_selfcheck_in_one_line(
    tmp_path: Path, drive: Callable[..., Driver], record_fault: Record, victim: str, after_s: float
) -> None:
    """Ray's own code holds the process then, or ends it without a word."""
    driver = drive(tmp_path / "0", "selfcheck", "--cpus-per-worker", "0.5")
    driver.wait_until(lambda: marked(driver.mark, f"/{victim} "), every=0.01)
    time.sleep(after_s)
    for process in marked(driver.mark, f"/{victim} "):
        process.kill()
    killed = time.monotonic()
    assert driver.process.wait(timeout=100) != 0, driver.log.read_text()
    seconds = time.monotonic() - killed
    name = Path(victim).name
    record_fault(f"{name} killed {after_s:g} s after it began, until the self-check has ended", 0, seconds)
    said = driver.log.read_text()
    assert said.count("error: ") == 1, said
    assert re.fullmatch(r"error: .*; run the same again", said.splitlines()[-1]), said
    assert driver.left() == [], "a process outlived its driver"
