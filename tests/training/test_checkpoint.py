"""A trial that is broken off goes on from its last checkpoint, and ends with an unbroken one's digits."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gloo_pool import GlooPool
from support.ranks import broken_trial, config, one_sided_trial, paused_trial, refused_trial, steady, trial

from dmlstudy import data, embedders
from dmlstudy.data import state_file
from dmlstudy.data.state_file import FILE
from dmlstudy.records import TrialConfig, TrialReport, UnitScores
from dmlstudy.training import checkpoint as checkpoints
from dmlstudy.training.checkpoint import Checkpoint, Progress
from dmlstudy.training.embedder_trainer import EmbedderTrainer
from dmlstudy.training.interface import TrialFailed
from dmlstudy.training.trial import TrialStopped, run_trial

STATISTICS = {"backbone": "batch_normed", "width": 4, "dim": 8, "freeze_bn": False}


def longer(**changes: Any) -> dict[str, Any]:
    """A trial of a second and of epochs enough to be broken off."""
    return config(**{"training__epochs": 3} | changes)


TRIALS: dict[str, dict[str, Any]] = {
    "adam": longer(),
    "memory": longer(
        loss={"name": "contrastive"},
        batch__memory_size=100,
        batch__memory_warmup=2,
        training__optimizer="sgd",
    ),
    "adaptive depth": longer(
        loss={"name": "adaptive_bound", "params": {"beta": 0.9}}, embedder__head_depth=2
    ),
    "curricularface": longer(loss={"name": "curricularface"}),
    "adaface": longer(loss={"name": "adaface", "params": {"t_alpha": 0.1}}),
    "magface": longer(loss={"name": "magface"}),
    "structure": longer(regularizer={"name": "structure", "params": {"weight": 0.5}}),
    "distance_levels": longer(regularizer={"name": "distance_levels", "params": {"weight": 0.5}}),
    "batch_statistics": longer(
        embedder=STATISTICS,
        training__lr=1e-3,
    ),
    "random_triplets": longer(
        loss={"name": "pml:TripletMarginLoss", "params": {"triplets_per_anchor": 2}}, training__lr=1e-3
    ),
    "replaced_buffers": longer(loss={"name": "pml:LargeMarginSoftmaxLoss"}, num_folds=1),
    "sampled_classes": longer(
        loss={"name": "norm_softmax", "params": {"sample": 0.3}}, batch__classes=2, training__lr=1e-3
    ),
    "proxies_adamw": longer(loss={"name": "proxy_anchor"}, training__optimizer="adamw"),
    "frozen_backbone": longer(
        training__freeze_backbone_epochs=2, loss={"name": "margin"}, training__weight_decay=1e-3
    ),
    "verdict": longer(phase="verdict", fold_models=True),
    "verdict_statistics": longer(
        phase="verdict",
        embedder=STATISTICS,
        training__lr=1e-3,
    ),
}


def by_step(reports: list[dict[str, float]]) -> dict[float, dict[str, float]]:
    """The reports by step, after checking that those made twice are equal."""
    found: dict[float, dict[str, float]] = {}
    for report in reports:
        assert found.setdefault(report["step"], steady(report)) == steady(report)
    return found


pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must:DeprecationWarning")
"""Of pytorch-metric-learning's LargeMarginSoftmaxLoss."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, s3_keys: None) -> Iterator[GlooPool]:
    pool = GlooPool(2, tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()


def by_attempt(reports: list[dict[str, float]]) -> list[list[dict[str, float]]]:
    """Cut where a report is the first one again."""
    starts = [index for index, report in enumerate(reports) if report["step"] == 1]
    return [reports[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def stopped_after(steps: int, folder: str | Path, raw: dict[str, Any]) -> list[int]:
    """A trial stopped in the report after ``steps``, whose state is kept; the steps it reported."""
    seen: list[int] = []

    def report(given: TrialReport) -> None:
        seen.append(given.step)
        if len(seen) > steps:
            raise TrialStopped

    with pytest.raises(TrialStopped):
        run_trial(TrialConfig.model_validate(raw), report, checkpoint=folder, min_seconds_between=0)
    return seen


def continued(folder: str | Path, raw: dict[str, Any]) -> tuple[list[int], dict[str, float]]:
    steps: list[int] = []
    result = run_trial(
        TrialConfig.model_validate(raw),
        lambda report: steps.append(report.step),
        checkpoint=folder,
        min_seconds_between=0,
    )
    return steps, result.metrics


@pytest.mark.parametrize("name", TRIALS)
def test_a_broken_trial_ends_with_the_digits_of_an_unbroken_one(name: str, tmp_path: Path) -> None:
    reports, result = trial(TRIALS[name])
    for where in ("epoch", "report"):
        again, broken_result, attempts = broken_trial(TRIALS[name], str(tmp_path / where), where)
        assert attempts >= 2
        assert broken_result == result
        assert list(by_step(again).values()) == [steady(report) for report in reports]
        steps = [[int(report["step"]) for report in attempt] for attempt in by_attempt(again)]
        assert len(steps) == attempts
        assert all(made == list(range(1, len(made) + 1)) for made in steps), "each says all from the first on"
        if where == "epoch":  # no epoch is trained again: what is said again is what was kept
            said = {int(report["step"]): report for report in reversed(again)}
            assert all(report == said[int(report["step"])] for report in again)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("adam", "report"),
        ("memory", "epoch"),
        ("adaface", "epoch"),
        ("sampled_classes", "epoch"),
        ("distance_levels", "epoch"),
        ("batch_statistics", "epoch"),
        ("random_triplets", "epoch"),
        ("verdict", "report"),
        ("verdict_statistics", "epoch"),
    ],
)
def test_two_ranks_go_on_too(name: str, where: str, pool: GlooPool, tmp_path: Path) -> None:
    plain = pool.run(2, trial, TRIALS[name])
    assert plain[0][1] == plain[1][1]
    answers = pool.run(2, broken_trial, TRIALS[name], str(tmp_path), where)
    for (reports, result), (again, broken_result, attempts) in zip(plain, answers, strict=True):
        assert attempts >= 2
        assert broken_result == result
        assert list(by_step(again).values()) == [steady(report) for report in reports]


@pytest.mark.parametrize("name", ["adam", "memory", "structure", "batch_statistics"])
def test_a_trial_that_pauses_at_rungs_ends_with_the_digits_of_an_unbroken_one(
    name: str, tmp_path: Path
) -> None:
    """At an epoch within a fold, at a fold's end and in the next one; its state is kept however little time passed.

    A call that is made again, for who made it was killed before it knew of the pause, pauses there again.
    """
    reports, result = trial(TRIALS[name])
    rungs = [1, 1, 3, 3, 4, 4, 4]
    again, paused_result = paused_trial(TRIALS[name], str(tmp_path), rungs)
    assert paused_result == result
    expected = [step for end in (*rungs, len(reports)) for step in range(1, end + 1)]
    assert [int(report["step"]) for report in again] == expected
    assert list(by_step(again).values()) == [steady(report) for report in reports]


def test_two_ranks_pause_together(pool: GlooPool, tmp_path: Path) -> None:
    plain = pool.run(2, trial, TRIALS["adam"])
    for (_, result), (_, paused_result) in zip(
        plain, pool.run(2, paused_trial, TRIALS["adam"], str(tmp_path), [2, 2, 3]), strict=True
    ):
        assert paused_result == result


def test_a_verdict_that_went_on_leaves_the_same_embedder(tmp_path: Path) -> None:
    raw = longer(phase="verdict")
    given = TrialConfig.model_validate(raw)
    run_trial(given, lambda report: None, save_to=tmp_path / "unbroken")
    stopped_after(2, tmp_path / "state", raw)
    run_trial(given, lambda report: None, save_to=tmp_path / "broken", checkpoint=tmp_path / "state")
    weights = [embedders.load(tmp_path / name).state_dict() for name in ("unbroken", "broken")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_what_training_changes_is_kept() -> None:
    """Each tensor that differs after an epoch is in the state, and restoring it brings all of them back."""
    raw = longer(
        loss={"name": "contrastive"},
        batch__memory_size=50,
        regularizer={"name": "distance_levels"},
        embedder=STATISTICS,
    )
    given = TrialConfig.model_validate(raw)
    development = data.load("digits").development

    def learner() -> EmbedderTrainer:
        return EmbedderTrainer(given, development, torch.device("cpu"), stream=0)

    trained, fresh = learner(), learner()
    trained.train_epoch(0)
    state = {name: value.clone() for name, value in trained.state().items()}
    assert {"memory.z", "memory.filled", "memory.num_batches", "loss.regularizer.running_mean"} <= set(state)
    assert "embedder.backbone.1.running_mean" in state
    assert any(name.startswith("optimizer.0.exp_avg") for name in state)
    fresh.restore(state, 1)
    assert all(torch.equal(value, state[name]) for name, value in fresh.state().items())
    assert set(fresh.state()) == set(state)
    fresh.train_epoch(1)
    trained.train_epoch(1)
    assert all(torch.equal(value, trained.state()[name]) for name, value in fresh.state().items())


def test_training_draws_nothing_from_global_generators() -> None:
    """Why their states are not kept."""
    import numpy as np

    for name in TRIALS:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        trial(TRIALS[name])
        assert torch.equal(torch.get_rng_state(), before[0]), name
        assert np.random.get_state()[1].tolist() == before[1], name
        assert random.getstate() == before[2], name


def test_nothing_is_written_without_a_folder_or_before_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0]))
    written: list[dict[str, Any]] = []

    def tensors() -> dict[str, torch.Tensor]:
        written.append({})
        return {}

    Checkpoint(None, "a").offer(0, 1, [], tensors)
    kept = Checkpoint(tmp_path, "a", min_seconds_between=0.2)
    kept.offer(0, 1, [], tensors)
    assert written == []
    now[0] = 0.25
    kept.offer(0, 2, [], tensors)
    kept.offer(0, 3, [], tensors)
    assert len(written) == 1
    assert Checkpoint(tmp_path, "a").load() == Progress(0, 2, (), {})
    kept.offer(1, 0, [], tensors, is_required=True)
    assert Checkpoint(tmp_path, "a").load() == Progress(1, 0, (), {})


def test_numbers_and_tensors_come_back_exactly(tmp_path: Path) -> None:
    tensors = {
        "a": torch.tensor([0.1, -0.0, float("inf"), float("nan")]),
        "b": torch.tensor(3),
        "c": torch.arange(6, dtype=torch.float64).reshape(2, 3).T,
        "d": torch.tensor([], dtype=torch.bool),
        "e": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    }
    tensors["same memory"] = tensors["b"]
    scores = [{"x": 0.1 + 0.2, "y": float("nan"), "z": 1e-320}]
    reports = [TrialReport(step=1, metrics={"x": 0.1 + 0.2, "y": float("nan")})]
    of_folds = [UnitScores(units=[3], counts=[2], sums={"x": [0.1 + 0.2]})]
    Checkpoint(tmp_path, "a", 0).offer(1, 2, scores, lambda: tensors, reports, of_folds=of_folds)
    fold, epoch, back, loaded, said, _, by_unit = Checkpoint(tmp_path, "a").load()
    assert list(by_unit) == of_folds
    assert (fold, epoch, repr(list(back)), repr(list(said))) == (1, 2, repr(scores), repr(reports))
    assert set(loaded) == set(tensors)
    for name, value in tensors.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, equal_nan=True)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_the_state_of_another_configuration_is_refused(tmp_path: Path, pool: GlooPool) -> None:
    stopped_after(1, tmp_path, longer())
    other = longer(seed=1)
    answers = {refused_trial(other, str(tmp_path)), *pool.run(2, refused_trial, other, str(tmp_path))}
    assert len(answers) == 1
    (said,) = answers
    assert said.startswith(f"{tmp_path / FILE}: the state of another configuration (fingerprint ")
    assert (tmp_path / FILE).exists()


def test_the_state_of_another_version_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "FORMAT_VERSION", 0)
        stopped_after(2, tmp_path, longer())
    with pytest.warns(RuntimeWarning, match="starts over: it was made by .*'format': '0'"):
        steps, _ = continued(tmp_path, longer())
    assert steps == [1, 2, 3, 4, 5, 6]


def damaged(content: bytes, how: str) -> bytes:
    if how == "truncated":
        return content[: len(content) * 2 // 3]
    if how == "header only":
        return content[:40]
    if how == "empty":
        return b""
    if how == "one bit":
        place = len(content) - 100
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    if how == "one score":
        return content.replace(b"map_at_r", b"map_at_s", 1)
    assert how == "noise"
    return random.Random(0).randbytes(len(content))


@pytest.mark.parametrize("how", ["truncated", "header only", "empty", "one bit", "one score", "noise"])
def test_a_damaged_file_means_starting_over(how: str, tmp_path: Path) -> None:
    assert stopped_after(4, tmp_path, longer()) == [1, 2, 3, 4, 5]
    path = tmp_path / FILE
    path.write_bytes(damaged(path.read_bytes(), how))
    with pytest.warns(RuntimeWarning, match="starts over: it cannot be read") as caught:
        steps, result = continued(tmp_path, longer())
    assert len(caught) == 1
    assert steps == [1, 2, 3, 4, 5, 6]
    assert result == trial(longer())[1]


def test_ranks_that_do_not_see_one_file_start_over(tmp_path: Path, pool: GlooPool) -> None:
    raw = longer()
    stopped_after(1, tmp_path / "one", raw)
    stopped_after(2, tmp_path / "two", raw)
    one, two, none = (str(tmp_path / name) for name in ("one", "two", "none"))
    for folders in ([one, two], [none, one], [two, none]):
        answers = pool.run(2, one_sided_trial, raw, folders)
        assert [steps for steps, _ in answers] == [[1, 2, 3, 4, 5, 6]] * 2
        assert any("shared file system" in message for _, messages in answers for message in messages)
        for number, folder in enumerate((one, two, none)):  # as before the two ranks
            Path(folder, FILE).unlink(missing_ok=True)
            if folder != none:
                stopped_after(number + 1, Path(folder), raw)


@pytest.mark.parametrize("call", ["replace", "fsync", "mkdir"])
def test_a_full_disk_costs_one_warning(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    if call == "mkdir":
        monkeypatch.setattr(Path, "mkdir", full)
    else:
        monkeypatch.setattr(os, call, full)
    with pytest.warns(RuntimeWarning, match="the trial goes on, .*No space left") as caught:
        steps, result = continued(tmp_path / "state", longer())
    assert len(caught) == 1
    assert steps == [1, 2, 3, 4, 5, 6]
    monkeypatch.undo()
    assert result == trial(longer())[1]
    assert list((tmp_path / "state").glob("*")) == []


def test_a_full_disk_leaves_the_older_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Checkpoint(tmp_path, "a", 0)
    kept.offer(0, 1, [], dict)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.warns(RuntimeWarning, match="full"):
            kept.offer(0, 2, [], dict)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert Checkpoint(tmp_path, "a").load().epoch == 1


@pytest.mark.parametrize("phase", ["search", "verdict"])
def test_a_trial_that_has_ended_ends_again_at_once(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver may be killed until the result is recorded; no epoch is trained a second time."""
    given = TrialConfig.model_validate(longer(phase=phase, fold_models=phase == "verdict"))
    ends: list[Any] = []
    for name in ("first", "second"):
        reports: list[TrialReport] = []
        save_to = tmp_path / name if phase == "verdict" else None
        result = run_trial(given, reports.append, save_to=save_to, checkpoint=tmp_path / "state")
        ends.append((reports, result.metrics))
        monkeypatch.setattr(
            EmbedderTrainer, "train_epoch", lambda *_: pytest.fail("an epoch was trained again")
        )
    assert ends[0] == ends[1]
    if phase == "verdict":
        weights = [embedders.load(tmp_path / name).state_dict() for name in ("first", "second")]
        assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_state_stays_until_it_is_removed(tmp_path: Path) -> None:
    raw = longer(training__lr=1e36)
    (tmp_path / "another").touch()
    with pytest.raises(TrialFailed):
        continued(tmp_path, raw)
    Checkpoint(tmp_path, "a", 0).offer(0, 1, [], dict)
    state_file.at(tmp_path).remove()
    assert [path.name for path in tmp_path.iterdir()] == ["another"]
    (tmp_path / "another").unlink()
    state_file.at(tmp_path).remove()
    assert not tmp_path.exists()


def test_killed_three_times_in_the_middle_it_ends_with_the_same_digits(tmp_path: Path) -> None:
    raw = longer(embedder={"dim": 16, "width": 16}, training__epochs=12, batch__per_epoch=10)
    reports, result = trial(raw)
    log, folder = tmp_path / "log", tmp_path / "state"
    log.touch()
    moments = random.Random(time.time_ns())
    script = Path(__file__).parents[1] / "support" / "ranks.py"
    command = [sys.executable, str(script), json.dumps(raw), str(folder), str(log)]

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]

    attempts: list[list[dict[str, Any]]] = []
    for kills_left in (3, 2, 1, 0):
        seen = len(lines())
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            if kills_left:
                deadline = time.monotonic() + 60
                while len(lines()) < seen + 2:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.005)
                time.sleep(moments.uniform(0, 0.25))
                process.send_signal(signal.SIGKILL)
            assert process.wait(120) == (-signal.SIGKILL if kills_left else 0)
        finally:
            process.kill()
            process.wait()
        attempts.append(lines()[seen:])
    assert attempts[-1].pop() == {"result": result}
    steps = [[report["step"] for report in attempt] for attempt in attempts]
    assert all(made == list(range(1, len(made) + 1)) for made in steps), steps
    for before, after in itertools.pairwise(attempts):
        kept = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
        assert len(kept) >= len(before) - 1, "only the last one before a kill is found again"
    assert list(by_step([report for attempt in attempts for report in attempt]).values()) == [
        steady(report) for report in reports
    ]
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_a_draft_of_a_killed_process_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / f".{FILE}.0123.draft").write_bytes(b"half")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert continued(tmp_path, longer(training__epochs=1))[0] == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


# Kept on a server of the S3 protocol


@pytest.mark.parametrize(("name", "where"), [("adam", "epoch"), ("verdict", "report")])
def test_over_s3_too_a_broken_trial_ends_with_the_digits_of_an_unbroken_one(
    name: str, where: str, s3: Any
) -> None:
    reports, result = trial(TRIALS[name])
    again, broken_result, attempts = broken_trial(TRIALS[name], s3.uri("study/trial"), where)
    assert attempts >= 2
    assert broken_result == result
    assert list(by_step(again).values()) == [steady(report) for report in reports]
    if where == "epoch":  # no epoch is trained again: what is said again is what was kept
        said = {report["step"]: report for report in reversed(again)}
        assert all(report == said[report["step"]] for report in again)
    assert s3.files() == [f"study/trial/{FILE}"]


def test_over_s3_two_ranks_go_on_too(pool: GlooPool, s3: Any) -> None:
    plain = pool.run(2, trial, TRIALS["adam"])
    answers = pool.run(2, broken_trial, TRIALS["adam"], s3.uri("trial"), "epoch")
    for (reports, result), (again, broken_result, attempts) in zip(plain, answers, strict=True):
        assert attempts >= 2
        assert broken_result == result
        assert list(by_step(again).values()) == [steady(report) for report in reports]


def test_over_s3_a_damaged_state_means_starting_over(s3: Any) -> None:
    stopped_after(4, s3.uri("trial"), longer())
    path = f"{s3.bucket}/trial/{FILE}"
    with s3.filesystem().open_input_stream(path) as file:
        content = file.read()
    with s3.filesystem().open_output_stream(path) as file:
        file.write(damaged(content, "truncated"))
    with pytest.warns(RuntimeWarning, match=f"trial/{FILE}.*starts over: it cannot be read") as caught:
        steps, result = continued(s3.uri("trial"), longer())
    assert len(caught) == 1
    assert steps == [1, 2, 3, 4, 5, 6]
    assert result == trial(longer())[1]


def test_without_its_bucket_a_trial_is_warned_of_once_and_ends(s3: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"the trial goes on, .*NO_SUCH_BUCKET") as caught:
        steps, result = continued(s3.uri("trial", bucket="no-such"), longer())
    assert len(caught) == 1
    assert steps == [1, 2, 3, 4, 5, 6]
    assert result == trial(longer())[1]


def test_a_server_that_goes_costs_one_warning_and_little_time(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow tries for 6 seconds, so that the next try is a while away, but for the last state's."""
    monkeypatch.setattr(checkpoints, "MAX_SHARE", 0.2)
    raw = longer(training__epochs=6)
    kept = 0

    def report(given: TrialReport) -> None:
        nonlocal kept
        if given.step == 4:
            kept = len(s3.files())
            s3.stop()
        time.sleep(0.3)

    started = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"the trial goes on, .*connect") as caught:
        result = run_trial(
            TrialConfig.model_validate(raw), report, checkpoint=s3.uri("trial"), min_seconds_between=0.01
        )
    assert len(caught) == 1
    assert kept == 1
    assert time.monotonic() - started < 35
    assert result.metrics == trial(raw)[1]
