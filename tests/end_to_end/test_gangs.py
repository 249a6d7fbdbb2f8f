"""Gangs: they stay from generation to generation, listen on loopback only, and hand nothing from trial to trial."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from dmlstudy.engine.cluster import connected
from dmlstudy.engine.gang import Gang
from dmlstudy.engine.mailbox import Command, Reply
from dmlstudy.records import ResourcesConfig, TrialConfig

from .conftest import DMLSTUDY

pytestmark = pytest.mark.timeout(600)

SPEC = """
name: gangs
data: {name: digits}
embedder: {dim: 8, width: 4}
batch: {classes: all, images_per_class: 4, per_epoch: 4}
training: {epochs: 5, head_lr_mult: 1, lr: 1.0e-3}
families:
  red: {space: multi_similarity}
  blue: {space: triplet_weighting}
search: {trials_per_family: 2, scheduler: none}
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


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
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


TRIALS: dict[str, dict[str, Any]] = {
    "memory": {"loss": {"name": "contrastive"}, "batch": {"memory_size": 64}},
    "proxies": {"loss": {"name": "proxy_anchor"}},
    "random mining": {"loss": {"name": "triplet", "params": {"mining": "distance_weighted"}}},
    "structure": {"loss": {"name": "margin"}, "regularizer": {"name": "structure"}},
    "batch norm": {
        "loss": {"name": "multi_similarity"},
        "embedder": {"backbone": "resnet18", "freeze_bn": False},
    },
    "stopped": {"loss": {"name": "triplet"}, "training": {"epochs": 1000}},
    "diverging": {
        "loss": {"name": "multi_similarity"},
        "training": {"lr": 1e30, "optimizer": "sgd", "epochs": 20},
    },
}
"""All that a trial could leave behind: weights, proxies, a memory, statistics, random numbers, half an epoch."""


def of_one_gang(order: list[str], folder: Path) -> dict[str, list[Reply]]:
    """What each trial said, served by one gang in this order."""
    gang = Gang(ResourcesConfig(), str(folder / "train"), f"gang-{uuid.uuid4().hex}")
    said: dict[str, list[Reply]] = {}
    for name in order:
        changes = TRIALS[name]
        config = {
            "family": "f",
            "data": {"name": "digits"},
            "embedder": {"dim": 8, "width": 4} | changes.get("embedder", {}),
            "batch": {"classes": "all", "images_per_class": 4, "per_epoch": 4} | changes.get("batch", {}),
            "training": {"epochs": 3, "lr": 1e-3} | changes.get("training", {}),
            "loss": changes["loss"],
            "regularizer": changes.get("regularizer"),
        }
        trial = TrialConfig.model_validate(config).model_dump(mode="json")
        gang.hand_over(Command(name, trial, str(folder / name)))
        replies = [gang.next_reply(name)]
        while replies[-1].kind == "report" and name != "stopped":
            replies.append(gang.next_reply(name))
        if name == "stopped":
            gang.cancel(name)
        said[name] = [
            reply._replace(
                metrics={key: value for key, value in reply.metrics.items() if key != "images_per_second"}
            )
            for reply in replies
        ]
    assert gang.end(30)
    return said


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # those of Ray's own modules, which are imported in this process here
def test_no_trial_inherits_from_the_one_before(tmp_path: Path) -> None:
    """Served in another order, by other workers, every trial says the same, digit for digit."""
    order = list(TRIALS)
    with connected(None, ResourcesConfig()):
        first = of_one_gang(order, tmp_path / "first")
        second = of_one_gang([*order[::-2], *order[-2::-2]], tmp_path / "second")
    assert first == second
    kinds = {name: replies[-1].kind for name, replies in first.items()}
    assert kinds == dict.fromkeys(order, "finished") | {"stopped": "report", "diverging": "failed"}
    assert len(first["memory"]) == 4
    assert len({str(replies) for replies in first.values()}) == len(order)
