"""What a study leaves in MLflow: nested runs with parameters, curves, statuses and reasons."""

from __future__ import annotations

import itertools
import math
import re
import time
from pathlib import Path
from typing import Any, Literal

import mlflow
import pytest

from dmlstudy import model_folder
from dmlstudy.records import (
    BatchConfig,
    DataConfig,
    EmbedderConfig,
    LossConfig,
    TrainingConfig,
    TrialConfig,
)
from dmlstudy.registry import connection, tracking
from dmlstudy.registry.run_writer import ByClient
from dmlstudy.registry.runs import Run, raw_runs
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.store import Store, StoreError
from dmlstudy.trials import Status

NUMBER = itertools.count()


def config(
    family: str = "power",
    phase: Literal["search", "verdict"] = "search",
    seed: int = 0,
    regularizer: LossConfig | None = None,
) -> TrialConfig:
    return TrialConfig(
        family=family,
        phase=phase,
        seed=seed,
        data=DataConfig(name="digits"),
        embedder=EmbedderConfig(dim=8),
        batch=BatchConfig(classes="all"),
        training=TrainingConfig(lr=3e-4),
        loss=LossConfig(name="pair_weighting", params={"weighting": "power", "q": 2.0}),
        regularizer=regularizer,
        num_folds=2,
    )


@pytest.fixture
def tracker(store: Store) -> StudyTracker:
    return StudyTracker(store, f"tracked-{next(NUMBER)}", {"study.yaml": "name: x\n"})


def run_of(tracker: StudyTracker, run_id: str) -> Any:
    return tracker.client.get_run(run_id)


def test_a_study_is_an_experiment_with_a_parent_run(tracker: StudyTracker, store: Store) -> None:
    parent = run_of(tracker, tracker.parent_id)
    assert parent.info.experiment_id == tracker.experiment_id
    assert parent.data.tags["dmlstudy_kind"] == "study"
    assert parent.info.status == "RUNNING"
    folder = tracker.client.download_artifacts(tracker.parent_id, "study.yaml")
    assert Path(folder).read_text() == "name: x\n"
    assert (store.root / "artifacts" / tracker.study).is_dir()
    tracker.end_study("finished", {"winner": "power", "seconds": 12.5})
    parent = run_of(tracker, tracker.parent_id)
    assert parent.info.status == "FINISHED"
    assert (parent.data.tags["status"], parent.data.tags["winner"]) == ("finished", "power")
    assert parent.data.metrics == {"seconds": 12.5}


def test_a_trial_is_a_nested_run_with_its_hyperparameters(tracker: StudyTracker) -> None:
    run_id = tracker.start_trial("power #3", config(), 3)
    run = run_of(tracker, run_id)
    assert run.data.tags["mlflow.parentRunId"] == tracker.parent_id
    assert run.info.run_name == "power #3"
    assert run.info.status == "RUNNING"
    expected = {
        "dmlstudy_kind": "search",
        "study": tracker.study,
        "family": "power",
        "status": "running",
        "seed": "0",
        "trial_number": "3",
        "config_fingerprint": config().fingerprint(),
    }
    assert {name: run.data.tags.get(name) for name in expected} == expected
    params = run.data.params
    assert params["loss"] == "pair_weighting"
    assert params["loss.weighting"] == "power"
    assert params["loss.q"] == "2.0"
    assert params["training.lr"] == "0.0003"
    assert params["batch.classes"] == "all"
    assert (params["batch.draw"], params.get("batch.sampler")) == ("pk", None)
    assert params["num_folds"] == "2"
    assert "embedder.weights" not in params
    assert "regularizer" not in params
    nested = mlflow.search_runs(
        [tracker.experiment_id],
        f"tags.`mlflow.parentRunId` = '{tracker.parent_id}'",
        output_format="list",
    )
    assert [found.info.run_id for found in nested] == [run_id]


def test_parameters_that_an_earlier_version_logged_have_their_present_names(tracker: StudyTracker) -> None:
    own = {"dmlstudy_kind": "search", "mlflow.parentRunId": tracker.parent_id, "trial_number": "7"}
    run = tracker.client.create_run(tracker.experiment_id, tags=own)
    tracker.client.log_param(run.info.run_id, "batch.sampler", "two_draws")
    found = Run.of(run_of(tracker, run.info.run_id))
    assert found.params == {"batch.draw": "two_draws"}


def test_a_regulariser_is_logged_like_a_loss(tracker: StudyTracker) -> None:
    structure = LossConfig(name="structure", params={"weight": 2.0, "preset": "paper"})
    params = run_of(tracker, tracker.start_trial("x #0", config(regularizer=structure), 0)).data.params
    assert params["loss"] == "pair_weighting"
    assert params["regularizer"] == "structure"
    assert (params["regularizer.weight"], params["regularizer.preset"]) == ("2.0", "paper")


CURVE = [
    {"step": 1.0, "map_at_r": 0.5, "train_loss": 2.0, "recall_at_1": 0.6},
    {"step": 2.0, "map_at_r": 0.7, "train_loss": 1.0, "recall_at_1": 0.8},
]


@pytest.mark.parametrize(
    ("status", "in_mlflow"),
    [("finished", "FINISHED"), ("pruned", "FINISHED"), ("failed", "FAILED"), ("interrupted", "KILLED")],
)
def test_the_end_of_a_trial(
    status: Literal["finished", "pruned", "failed", "interrupted"], in_mlflow: str, tracker: StudyTracker
) -> None:
    run_id = tracker.start_trial("power #0", config(), 0)
    reason = "" if status == "finished" else "because"
    tracker.end_trial(run_id, status, CURVE, {"step": 2.0, "map_at_r": 0.75, "map_at_r_stderr": 0.1}, reason)
    run = run_of(tracker, run_id)
    assert run.info.status == in_mlflow
    assert run.info.end_time is not None
    assert run.data.tags["status"] == status
    assert run.data.tags.get("reason", "") == reason
    assert run.data.metrics["map_at_r"] == 0.75
    assert run.data.metrics["map_at_r_stderr"] == 0.1
    assert "step" not in run.data.metrics
    history = tracker.client.get_metric_history(run_id, "train_loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (2, 1.0)]
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in run.data.metrics)


def test_a_paused_run_is_known_where_it_paused_and_found_in_another_session(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = StudyTracker(store, "pausing", {})
    run_id = first.start_trial("power #3", config(), 3)
    assert first.take_up(3) is None
    first.end_trial(run_id, Status.PAUSED, [{"step": 1.0, "map_at_r": 0.5}], {})
    second = StudyTracker(store, "pausing", {})
    assert second.take_up(3) == run_id
    with monkeypatch.context() as patched:
        patched.setattr(tracking.StudyRuns, "every", None)  # the session in which it paused looks for nothing
        assert first.take_up(3) == run_id
    first.reopen(run_id)
    assert first.take_up(3) is None
    first.end_trial(run_id, Status.PAUSED, [], {})
    assert [first.take_up(3), first.take_up(3)] == [run_id, run_id]
    first.end_trial(run_id, Status.PRUNED, [], {}, "not among the best")
    assert first.take_up(3) is None
    assert run_of(first, run_id).info.status == "FINISHED"


def test_a_run_is_at_work_between_its_pauses_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    first = StudyTracker(store, "at-work", {})

    def at(seconds: float) -> Run:
        now[0] = seconds
        return Run.of(run_of(first, run_id))

    run_id = first.start_trial("power #3", config(), 3)
    now[0] = 1010
    first.end_trial(run_id, Status.PAUSED, [], {})
    assert at(1500).spans == [(1000, 1010)]
    second = StudyTracker(store, "at-work", {})
    second.reopen(run_id)
    assert at(1510).spans == []  # it runs
    assert at(1510).begun_last == 1500
    second.end_trial(run_id, Status.PAUSED, [], {})
    now[0] = 9000
    second.end_trial(run_id, Status.PRUNED, [], {}, "given up")
    assert at(9999).spans == [(1000, 1010), (1500, 1510)]
    assert at(9999).seconds == 20
    assert at(9999).worker_hours == pytest.approx(20 / 3600)


@pytest.mark.parametrize("moment", ["in the run's own record", "in its tags", "at work"])
def test_a_run_that_goes_on_and_is_killed(moment: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By MLflow's client; rows are all written at once."""
    name, now = f"going-on-{next(NUMBER)}", [1000.0]
    monkeypatch.setattr(tracking, "writer_of", lambda store, client: ByClient(client))
    monkeypatch.setattr(time, "time", lambda: now[0])
    first = StudyTracker(store, name, {})
    run_id = first.start_trial("power #3", config(), 3)
    now[0] = 1010
    first.end_trial(run_id, Status.PAUSED, [], {})
    now[0] = 1500
    if moment == "at work":
        first.reopen(run_id)
    else:
        failing = "set_terminated" if moment == "in the run's own record" else "log_batch"
        with monkeypatch.context() as patched:
            patched.setattr(mlflow.MlflowClient, failing, lambda *a, **k: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                first.reopen(run_id)
    now[0] = 9000  # the next morning
    second = StudyTracker(store, name, {}, left_at=1520)
    run = Run.of(run_of(second, run_id))
    if moment == "at work":
        assert (run.status, run.spans) == (Status.INTERRUPTED, [(1000, 1010), (1500, 1520)])
        assert second.take_up(3) is None
    else:
        assert (run.status, run.spans) == (Status.PAUSED, [(1000, 1010)])
        assert second.take_up(3) == run_id


def test_a_trial_that_failed_at_once(tracker: StudyTracker) -> None:
    run_id = tracker.start_trial("power #0", config(), 0)
    tracker.end_trial(run_id, "failed", [], {}, "x" * 20000)
    run = run_of(tracker, run_id)
    assert run.info.status == "FAILED"
    assert run.data.metrics == {}
    assert run.data.tags["reason"].startswith("xxx")


def test_numbers_that_are_not_finite_are_left_out(tracker: StudyTracker) -> None:
    run_id = tracker.start_trial("power #0", config(), 0)
    tracker.end_trial(run_id, "failed", [{"step": 1.0, "train_loss": math.nan, "map_at_r": 0.5}], {}, "nan")
    assert run_of(tracker, run_id).data.metrics == {"map_at_r": 0.5}


@pytest.mark.parametrize("num_epochs", [250, 1000])
def test_a_long_curve_is_kept_whole(num_epochs: int, tracker: StudyTracker) -> None:
    """MLflow takes at most 1000 items at once, tags included."""
    run_id = tracker.start_trial("power #0", config(), 0)
    names = ("map_at_r", "train_loss", "recall_at_1", "recall_at_2")
    curve = [{"step": float(e), **dict.fromkeys(names, e / 2)} for e in range(1, num_epochs + 1)]
    tracker.end_trial(run_id, "pruned", curve, curve[-1], "stopped")
    for name in names:
        steps = [point.step for point in tracker.client.get_metric_history(run_id, name)]
        assert sorted(set(steps)) == list(range(1, num_epochs + 1))
    assert run_of(tracker, run_id).data.tags["status"] == "pruned"


def test_a_second_session_finds_the_first_one(store: Store) -> None:
    name = f"tracked-{next(NUMBER)}"
    first = StudyTracker(store, name, {"study.yaml": "name: x\n"})
    left = first.start_trial("power #0", config(), 0)
    ended = first.start_trial("power #1", config(), 1)
    first.end_trial(ended, "finished", CURVE, {"map_at_r": 0.7})
    other = StudyTracker(store, f"{name}-other", {})
    running = other.start_trial("power #0", config(), 0)

    second = StudyTracker(store, name, {"study.yaml": "name: x\n"})
    assert second.parent_id == first.parent_id
    assert second.experiment_id == first.experiment_id
    killed = run_of(second, left)
    assert (killed.info.status, killed.data.tags["status"]) == ("KILLED", "interrupted")
    assert run_of(second, ended).info.status == "FINISHED"
    assert run_of(second, second.parent_id).info.status == "RUNNING"
    assert run_of(second, running).info.status == "RUNNING"  # another study's


def test_another_stores_study_of_the_same_name_is_left_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"tracked-{next(NUMBER)}"
    first = StudyTracker(store, name, {}, origin={"spec_fingerprint": "f00"})
    running = first.start_trial("power #0", config(), 0)
    with pytest.raises(StoreError, match=r"another study .*, with another spec_fingerprint; .* \(--name\)$"):
        StudyTracker(store, name, {}, origin={"spec_fingerprint": "f11"})
    with monkeypatch.context() as other:
        other.setattr(Store, "identity", lambda self: "other")
        with pytest.raises(StoreError, match=rf"another study '{name}' already, another store's; .*--name"):
            StudyTracker(store, name, {}, origin={"spec_fingerprint": "f00"})
    assert run_of(first, running).info.status == run_of(first, first.parent_id).info.status == "RUNNING"
    assert run_of(first, running).data.tags["status"] == "running"
    assert StudyTracker(store, name, {}, origin={"spec_fingerprint": "f00"}).parent_id == first.parent_id


def test_each_session_leaves_its_environment_and_trials_name_theirs(store: Store) -> None:
    name = f"tracked-{next(NUMBER)}"
    for session, file in ((1, "environment.json"), (2, "environment-2.json")):
        tracker = StudyTracker(
            store,
            name,
            {"study.yaml": f"session: {session}"},
            environment=f"machine {session}",
            trial_tags={"workers": "2", "device": "cpu"},
        )
        text = Path(tracker.client.download_artifacts(tracker.parent_id, file)).read_text()
        assert text == f"machine {session}"
        tags = run_of(tracker, tracker.start_trial("power #0", config(), 0)).data.tags
        assert (tags["environment"], tags["workers"], tags["device"]) == (file, "2", "cpu")
    text = Path(tracker.client.download_artifacts(tracker.parent_id, "study.yaml")).read_text()
    assert text == "session: 1"


@pytest.mark.parametrize("status", ["finished", "pruned", "failed"])
def test_a_run_that_had_ended_stays_what_it_was(status: Any, tracker: StudyTracker, store: Store) -> None:
    """A kill while a model is registered from a run leaves that run open in MLflow."""
    run_id = tracker.start_trial("x", config("power", "verdict", 1), None)
    tracker.end_trial(run_id, status, [], {"test_map_at_r": 0.5})
    tracker.client.update_run(run_id, status="RUNNING")
    again = StudyTracker(store, tracker.study, {})
    run = run_of(again, run_id)
    assert (run.info.status, run.data.tags["status"]) == (Status(status).in_mlflow, status)
    assert again.finished_verdicts() == ({("power", 1)} if status == "finished" else set())


def test_runs_of_others_in_the_experiment_are_left_alone(tracker: StudyTracker, store: Store) -> None:
    foreign = tracker.client.create_run(tracker.experiment_id, tags={"status": "running"}).info.run_id
    StudyTracker(store, tracker.study, {}).end_study("finished", {})
    run = run_of(tracker, foreign)
    assert (run.info.status, run.data.tags["status"]) == ("RUNNING", "running")


def test_a_finished_study_that_goes_on_is_running_again(tracker: StudyTracker, store: Store) -> None:
    tracker.end_study("interrupted", {})
    assert run_of(tracker, tracker.parent_id).info.status == "KILLED"
    StudyTracker(store, tracker.study, {})
    assert run_of(tracker, tracker.parent_id).info.status == "RUNNING"


def test_finished_verdicts(tracker: StudyTracker) -> None:
    assert tracker.finished_verdicts() == set()
    assert tracker.verdict_run("power", 1) is None
    for family, seed, phase, status in (
        ("power", 1, "verdict", "finished"),
        ("untrained", 2, "verdict", "finished"),
        ("power", 2, "verdict", "failed"),
        ("power", 3, "verdict", "interrupted"),
        ("margin", 0, "search", "finished"),
    ):
        run_id = tracker.start_trial("x", config(family, phase, seed), None)  # type: ignore[arg-type]
        tracker.end_trial(run_id, status, [], {"test_map_at_r": 0.5})  # type: ignore[arg-type]
    tracker.start_trial("x", config("power", "verdict", 4), None)
    assert tracker.finished_verdicts() == {("power", 1), ("untrained", 2)}
    found = tracker.verdict_run("power", 1)
    assert found is not None
    assert (found.family, found.seed) == ("power", 1)
    assert tracker.verdict_run("power", 2) is None
    assert tracker.verdict_run("margin", 0) is None


def test_a_model_comes_back_as_it_was_without_what_lies_beside_it(
    tracker: StudyTracker, tmp_path: Path
) -> None:
    run_id = tracker.start_trial("x", config(), 0)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    files = {"weights.safetensors": bytes(range(256)), "deep/card.md": b"card"}
    for name, content in files.items():
        (tmp_path / "in" / name).write_bytes(content)
    model_folder.seal(tmp_path / "in")
    tracker.log_model(run_id, str(tmp_path / "in"))
    tracker.client.log_text(run_id, "of MLflow", "embedder/MLmodel")
    (tmp_path / "out").mkdir()
    folder = tracker.fetch_model(run_id, tmp_path / "out")
    model_folder.verify(folder)
    assert {name: (folder / name).read_bytes() for name in files} == files
    assert not (folder / "MLmodel").exists()


def test_more_runs_than_one_page(tracker: StudyTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        tracker.start_trial(f"power #{number}", config(), number)
    search = tracker.client.search_runs

    def two_at_once(*arguments: Any, **named: Any) -> Any:
        return search(*arguments, **{**named, "max_results": 2})

    monkeypatch.setattr(tracker.client, "search_runs", two_at_once)
    found = list(raw_runs(tracker.client, tracker.experiment_id, "tags.dmlstudy_kind = 'search'"))
    assert sorted(run.data.tags["trial_number"] for run in found) == list("01234")


def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError) as caught:
        connection.connect(Store(tmp_path))
    assert "does not answer" in str(caught.value)
    assert "check --store or --tracking-uri" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_study_names_the_known_ones(tracker: StudyTracker, store: Store) -> None:
    client = connection.connect(store)
    assert tracking.experiment_of(client, store, tracker.study) == tracker.experiment_id
    with pytest.raises(StoreError, match=rf"^no study 'nothing' in the store .*{tracker.study}"):
        tracking.experiment_of(client, store, "nothing")


def test_looking_makes_no_database(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"^no studies in the store .*; start one with"):
        connection.connect(Store(tmp_path))
    assert list(tmp_path.iterdir()) == []
