"""Two gangs at once: they stay from generation to generation, and listen on loopback only."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from pathlib import Path

import psutil
import pytest

from .conftest import DMLSTUDY

pytestmark = pytest.mark.timeout(600)

SPEC = """
name: gangs
data: {name: digits}
embedder: {dim: 8, width: 4}
batch: {classes: all, images_per_class: 4, per_epoch: 4}
training: {epochs: 20, head_lr_mult: 1, lr: 1.0e-3}
families:
  red: {space: multi_similarity}
  blue: {space: triplet_weighting}
search: {trials_per_family: 3, scheduler: none}
protocol: {num_folds: 1, verdict_seeds: 1, fold_models: false}
resources: {workers: 1, cpus_per_worker: 1}
"""


def listening(mark: str) -> set[str]:
    """The addresses on which processes with the mark in their environment listen."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("DMLSTUDY_TEST") == mark:
                found |= {c.laddr.ip for c in process.net_connections("tcp") if c.status == "LISTEN"}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_gangs_stay_and_listen_on_loopback_only(tmp_path: Path, workers: int) -> None:
    mark, store = uuid.uuid4().hex, tmp_path / "store"
    (tmp_path / "study.yaml").write_text(SPEC.replace("workers: 1", f"workers: {workers}"))
    addresses: set[str] = set()
    with open(tmp_path / "shown", "wb") as file:
        study = subprocess.Popen(
            [*DMLSTUDY, "run", tmp_path / "study.yaml", "--store", store],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"DMLSTUDY_TEST": mark},
        )
        try:
            while study.poll() is None:
                addresses |= listening(mark)
                time.sleep(0.5)
        finally:
            study.kill()
            study.wait()
    assert study.returncode == 0, (tmp_path / "shown").read_text()
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert addresses
    assert len(list((store / "studies" / "gangs" / "ray").glob("gang-*"))) == 2 // workers
