"""A trial that diverges and a worker that is killed: recorded with the reason, and the study goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import optuna
import psutil
import pytest

pytestmark = pytest.mark.timeout(400)

SPEC = """
name: faults
data: {name: digits}
embedder: {dim: 8, width: 4}
batch: {classes: all, images_per_class: 4, per_epoch: 4}
training: {epochs: 40, head_lr_mult: 1, lr: 1.0e-3}
families:
  diverging: {space: multi_similarity, override: {training.lr: 1.0e+30, training.optimizer: sgd}}
  sound: {space: multi_similarity}
search: {trials_per_family: 3}
protocol: {num_folds: 1, verdict_seeds: 1}
resources: {retries: 0}
"""


def marked(mark: str) -> list[psutil.Process]:
    """Every process that inherited the mark in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DMLSTUDY_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def kill_a_worker(mark: str, log: Path) -> None:
    """Kill one worker as soon as the first trial has ended, so that a trial is running."""
    end = time.monotonic() + 120
    while not re.search(r"^1/9", log.read_text(), re.MULTILINE):
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    worker = next(process for process in marked(mark) if "RayTrainWorker" in " ".join(process.cmdline()))
    worker.send_signal(signal.SIGKILL)


def test_a_study_survives_diverging_trials_and_a_killed_worker(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(SPEC)
    mark = uuid.uuid4().hex
    store = tmp_path / "store"
    command = [sys.executable, "-m", "dmlstudy"]
    log = tmp_path / "shown"
    with open(log, "wb") as file:
        study = subprocess.Popen(
            [*command, "run", tmp_path / "study.yaml", "--store", store],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"DMLSTUDY_TEST": mark},
        )
        try:
            kill_a_worker(mark, log)
            assert study.wait(timeout=300) == 0, log.read_text()
        finally:
            study.kill()
            study.wait()

    shown = log.read_text()
    assert re.search(r"diverging #\d+ +failed: (epoch 1, batch \d+: |embeddings are not finite)", shown), (
        shown
    )
    trials = optuna.load_study(study_name="faults", storage=f"sqlite:///{store / 'optuna.db'}").trials
    diverging, sound = trials[0::2], trials[1::2]
    assert {trial.state.name for trial in diverging} == {"FAIL"}
    (lost,) = [trial for trial in sound if trial.state.name == "FAIL"]
    assert re.search("a worker of the trial was lost|the workers died", lost.user_attrs["reason"])
    assert all(
        "not finite" in t.user_attrs["reason"] or "is nan" in t.user_attrs["reason"] for t in diverging
    )
    shown = subprocess.run(
        [*command, "leaderboard", "faults", "--json", "--store", store], capture_output=True, check=True
    ).stdout
    board = json.loads(shown)
    assert board["winner"] == "sound"
    assert {row["family"]: row["num_failed"] for row in board["rows"]}["diverging"] == 3
    assert marked(mark) == [], "a process outlived its study"
