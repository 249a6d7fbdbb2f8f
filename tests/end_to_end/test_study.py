"""The digits study through the command line: progress, Ctrl-C, MLflow, Optuna, and the same study as a job."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest

from dmlstudy import data

from .conftest import NUM_EPOCHS, NUM_FOLDS, NUM_TRIALS, SECRETS, Finished, called, command

pytestmark = pytest.mark.timeout(900)

KINDS = ("search", "verdict", "leaderboard", "fold")
FAMILIES = {"pair-power", "pair-exponential", "triplet", "multi-similarity"}
TRIAL_LINE = re.compile(
    r" ?(\d+)/26  (\S+) (#\d+|verdict seed \d) +(test_)?map_at_r [01]\.\d{4}"
    r"( ± [01]\.\d{4}| stopped, fold \d of \d, epoch \d of \d)?"
    r" +\d+\.\d s  left (\.\.\.|\d+ s|\d+:\d\d min) +(best [01]\.\d{4} \S+ #\d+|no best yet)"
)


def board_of(study: Finished) -> Any:
    result = called("leaderboard", "digits", "--json", "--store", study.store)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_ctrl_c_ends_soon_and_keeps_what_is_finished(interrupted_run: tuple[Path, int, float, str]) -> None:
    _, code, seconds, status = interrupted_run
    assert code == 130
    assert seconds < 30
    ended = re.search(r"digits +interrupted +(\d+) \+ 0 judged +(\d+)", status)  # to their ends, and before
    assert ended, status
    assert 1 <= sum(map(int, ended.groups())) < 16, "the search is not over"


def test_one_clear_line_per_trial_and_no_noise(submitted: Finished) -> None:
    lines = submitted.shown.splitlines()
    trials = [TRIAL_LINE.fullmatch(line.rstrip()) for line in lines if f"/{NUM_TRIALS} " in line]
    assert [match and int(match[1]) for match in trials] == list(range(1, NUM_TRIALS + 1)), submitted.shown
    told = ("job ", "digits:", "starting the workers", "* best", "test:", "trials:", "registered", "models:")
    told += ("MLflow's page:", "what the engines said:", "the workers ")
    told += ("test map_at_r, paired by seed", *(f"  {name} " for name in FAMILIES), "better, worse:", "[ ]:")
    told += ("power:", "the plan of the verdict is sealed", "on these classes:", "few classes, or")
    told += (
        "differing in few classes",
        "of these configurations:",
        "no epoch has ended yet",
        "the first epoch has",
    )
    paused = re.compile(r" +\S+ #\d+ +map_at_r [01]\.\d{4} paused, fold \d of \d, epoch \d of \d *")
    numbered = re.compile(r"\d+ of \d+ pairs are of these classes alone: ")
    table = (" family", *(f" {name}" for name in FAMILIES), " untrained")
    ours = [
        line
        for line in lines
        if line.strip()
        and f"/{NUM_TRIALS} " not in line
        and not line.startswith(told + table)
        and not numbered.match(line)
        and not paused.fullmatch(line)
    ]
    # Ray's own job manager says two lines before the job starts.
    assert all("Runtime env is" in line or "Running entrypoint" in line for line in ours), ours


def test_the_engines_noise_is_in_a_file(finished: Finished) -> None:
    log = called("logs", "digits", "--engine", "--store", finished.store).stdout
    assert "RayTrainWorker" in log
    assert f"{NUM_TRIALS}/{NUM_TRIALS}" in called("logs", "digits", "--store", finished.store).stdout


def test_nothing_secret_leaves_the_environment(finished: Finished) -> None:
    """Neither into the store nor into what Ray writes, which others on the machine may read and which stays."""
    assert finished.ray is not None
    read = [path for path in (*finished.ray.rglob("*"), *finished.store.rglob("*")) if path.is_file()]
    assert "runtime_env_agent.log" in {path.name for path in read}
    told = {
        (name, path.name)
        for path in read
        for name, value in SECRETS.items()
        if value.encode() in path.read_bytes()
    }
    assert told == set()


def test_equal_budget_a_winner_by_validation_and_an_untrained_row(finished: Finished) -> None:
    board = board_of(finished)
    rows = {row["family"]: row for row in board["rows"]}
    assert rows.keys() == FAMILIES | {"untrained"}
    for family in FAMILIES:
        row = rows[family]
        assert row["num_finished"] + row["num_pruned"] + row["num_failed"] == 4
        assert 0 < row["validation"] < 1
    assert all(row["test"]["test_map_at_r"]["num"] == 2 for row in rows.values())
    scores = [rows[row["family"]]["validation"] for row in board["rows"] if row["family"] in FAMILIES]
    assert scores == sorted(scores, reverse=True)
    assert board["winner"] == board["rows"][0]["family"]
    assert board["model"] == "digits-embedder/1"


def test_a_job_gives_the_same_leaderboard_as_an_interrupted_run(
    finished: Finished, submitted: Finished
) -> None:
    """Digit for digit: where it runs, and that it was stopped and continued, changes nothing."""
    assert board_of(submitted) == board_of(finished)
    models = called("models", "--store", submitted.store).stdout
    assert re.search(r"digits-embedder +1 +champion +digits", models), models


def test_mlflow_has_a_nested_run_per_trial_and_none_left_open(finished: Finished) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{finished.store / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    (parent,) = [run for run in runs if run.data.tags["dmlstudy_kind"] == "study"]
    of_kind = {kind: [run for run in runs if run.data.tags["dmlstudy_kind"] == kind] for kind in KINDS}
    assert sum(map(len, of_kind.values())) == len(runs) - 1
    trials = [*of_kind["search"], *of_kind["verdict"]]
    assert {run.data.tags["mlflow.parentRunId"] for run in trials} == {parent.info.run_id}
    ended = [run for run in trials if run.data.tags["status"] in ("finished", "pruned")]
    assert len(ended) == NUM_TRIALS
    left = {run.data.tags["status"] for run in trials if run not in ended}
    assert left <= {"interrupted"}, "of trials that were at work at Ctrl-C, if any were"
    assert {run.info.status for run in runs} <= {"FINISHED", "KILLED"}
    for run in ended:
        prefix = "test_" if run.data.tags["dmlstudy_kind"] == "verdict" else ""
        assert {f"{prefix}map_at_r", f"{prefix}recall_at_1"} <= run.data.metrics.keys()
        assert {"loss", "training.lr", "embedder.dim"} <= run.data.params.keys()
    search = next(
        run for run in ended if run.data.tags["status"] == "finished" and "trial_number" in run.data.tags
    )
    assert len(client.get_metric_history(search.info.run_id, "train_loss")) == NUM_FOLDS * NUM_EPOCHS
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert files >= {"study.yaml", "search_space.yaml", "folds.json", "environment.json"}
    tags = {
        name: {run.data.tags[name] for run in trials} for name in ("workers", "code_version", "test_sha256")
    }
    assert tags["workers"] == {"2"}
    assert len(tags["code_version"]) == 1
    assert tags["test_sha256"] == {parent.data.tags["test_sha256"]}
    rows, folds = of_kind["leaderboard"], of_kind["fold"]
    families = {run.data.tags["family"] for run in of_kind["search"]}
    assert {run.data.tags["family"] for run in rows} == {*families, "untrained"}
    assert {run.data.tags["mlflow.parentRunId"] for run in rows} == {parent.info.run_id}
    assert {(run.data.tags["family"], run.data.tags["fold"]) for run in folds} == {
        (family, fold) for family in families for fold in ("0", "1")
    }
    for run in folds:
        trial = client.get_run(run.data.tags["mlflow.parentRunId"])
        assert run.data.metrics["map_at_r"] == trial.data.metrics[f"fold_{run.data.tags['fold']}_map_at_r"]
        assert len(client.get_metric_history(run.info.run_id, "map_at_r")) == NUM_EPOCHS
    assert parent.data.tags["test_sha256"] == data.load("digits").test.fingerprint()


@pytest.mark.parametrize("name", ["mlflow.db", "optuna.db"])
def test_a_finished_study_leaves_each_database_as_one_file(finished: Finished, name: str) -> None:
    """So that it can be read where nothing can be written."""
    with contextlib.closing(sqlite3.connect(finished.store / name)) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert not list(finished.store.glob(f"{name}-*"))


def test_optuna_knows_the_truth_about_the_search(finished: Finished) -> None:
    study = optuna.load_study(study_name="digits", storage=f"sqlite:///{finished.store / 'optuna.db'}")
    states = [trial.state.name for trial in study.trials]
    assert len(states) == 16
    assert set(states) == {"COMPLETE", "PRUNED"}
    for trial in study.trials:
        if trial.state.name == "PRUNED":
            assert "stopped after " in trial.user_attrs["reason"]
            assert 1 <= len(trial.intermediate_values) < NUM_FOLDS * NUM_EPOCHS
        else:
            assert len(trial.intermediate_values) == NUM_FOLDS * NUM_EPOCHS


def test_running_a_finished_study_again_only_shows_it(spec: Path, finished: Finished) -> None:
    again = command("run", spec, "--store", finished.store)
    assert again.returncode == 0
    assert "finished already" in again.stdout
    assert "registered as digits-embedder/1 @champion" in again.stdout


def test_another_file_under_the_same_name_is_refused(spec: Path, finished: Finished, tmp_path: Path) -> None:
    other = tmp_path / "digits.yaml"
    other.write_text(spec.read_text().replace("trials_per_family: 4", "trials_per_family: 5"))
    result = called("run", other, "--store", finished.store)
    assert result.returncode == 2
    assert "--name" in result.stderr


def test_a_job_is_followed_from_another_shell(ray_head: str, submitted: Finished) -> None:
    job = submitted.shown.splitlines()[0].removeprefix("job ").strip()
    at: list[str] = ["--job", job, "--address", ray_head]
    assert "succeeded" in called("status", *at).stdout
    (listed,) = json.loads(called("jobs", "--address", ray_head, "--json").stdout)
    assert (listed["job"], listed["study"], listed["state"]) == (job, "digits", "succeeded")
    assert f"{NUM_TRIALS}/{NUM_TRIALS}" in called("logs", *at).stdout
    assert "had ended already" in called("stop", *at).stdout
    unknown = called("logs", "--job", "nope", "--address", ray_head)
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "no job 'nope'" in unknown.stderr


def test_more_workers_than_the_cluster_can_give_is_said_at_once(
    spec: Path, ray_head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # another cluster than --address names, which counts
    big = tmp_path / "big.yaml"
    big.write_text(
        spec.read_text().replace("workers: 2", "workers: 7").replace("name: digits", "name: big", 1)
    )
    result = command("submit", big, "--address", ray_head, "--store", tmp_path / "store", timeout=60)
    assert result.returncode == 2
    assert re.search(
        r"resources\.workers: 7 workers .* holds 2; set resources\.workers to at most 2", result.stderr
    )
    assert not (tmp_path / "store").exists()
