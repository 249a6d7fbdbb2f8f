"""Three Ray nodes on one machine, where another Ray runs, too: a trial spans two of them, two studies share them, one
is lost while it trains."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from support.ports import free_port
from support.rays import ray_head

from .conftest import DMLSTUDY, Record, board_of, runs_left_open, seconds_until_training, trials_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SPEC = """
name: {name}
data: {{name: digits}}
embedder: {{dim: 8, width: 4}}
batch: {{classes: all, images_per_class: 4, per_epoch: 4}}
training: {{epochs: {epochs}, head_lr_mult: 1, lr: 1.0e-3}}
families:
  multi-similarity: {{space: multi_similarity}}
search: {{trials_per_family: 3, scheduler: none}}
protocol: {{num_folds: 1, verdict_seeds: 1}}
resources: {{workers: 2, cpus_per_worker: 1, max_concurrent_trials: 1}}
"""
NUM_TRIALS = 3 + 2  # the verdict judges the untrained embedder and the family's best
TOKEN = secrets.token_hex(32)
ENVIRONMENT = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


NODES = """
import json, sys
from ray.cluster_utils import Cluster

cluster = Cluster(shutdown_at_exit=True)
def place(name):  # each node has its own disk and agent, as on machines of their own
    return {"num_cpus": 1, "dashboard_agent_listen_port": 0, "temp_dir": f"{sys.argv[2]}/{name}"}

cluster.add_node(
    **place("h"), include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=int(sys.argv[1])
)
for name in ("a", "b"):
    cluster.add_node(**place(name))
nodes = [cluster.head_node, *cluster.worker_nodes]
raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
sys.stdin.read()
cluster.shutdown()
"""
"""A head and two more nodes of one CPU each, until standard input ends."""


class Cluster(NamedTuple):
    """What the tests need to know of the nodes; ``raylets`` are the nodes' own processes, the head's first."""

    address: str
    dashboard: str
    raylets: list[psutil.Process]

    def with_workers(self) -> list[psutil.Process]:
        """The raylets under which workers of Ray Train live."""
        return [
            raylet
            for raylet in self.raylets
            if any("RayTrainWorker" in " ".join(child.cmdline()) for child in raylet.children())
        ]

    def held(self) -> list[str]:
        """Actors that live and placement groups that are held, once the studies' last have had 10 s to go."""
        end = time.monotonic() + 10
        while True:
            # Ray keeps one AutoscalingCoordinator per cluster.
            actors = [row["class_name"] for row in self._list("actors") if row["state"] != "DEAD"]
            held = [name for name in actors if "AutoscalingCoordinator" not in name]
            held += [row["name"] for row in self._list("placement_groups") if row["state"] != "REMOVED"]
            if not held or time.monotonic() > end:
                return held
            time.sleep(0.5)

    def _list(self, kind: str) -> list[dict[str, Any]]:
        request = urllib.request.Request(
            f"{self.dashboard}/api/v0/{kind}?limit=1000", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return list(json.load(response)["data"]["result"]["result"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes that only a holder of the token can speak to, on a machine where another Ray runs, too."""
    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, ray_head(Path(folder) / "other"):
        port = free_port()
        nodes = subprocess.Popen(
            [sys.executable, "-c", NODES, str(port), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        try:
            said = json.loads(nodes.stdout.readline())
            raylets = [psutil.Process(pid) for pid in said["raylets"]]
            yield Cluster(said["address"], f"http://127.0.0.1:{port}", raylets)
        finally:
            tree = psutil.Process(nodes.pid).children(recursive=True)
            nodes.stdin.close()
            nodes.stdout.close()
            nodes.wait(timeout=60)
            for left in psutil.wait_procs(tree, timeout=5)[1]:
                left.kill()


class Study:
    """``dmlstudy run`` on the cluster in a process of its own, or ``submit --wait``, which lets a job do it."""

    def __init__(
        self, cluster: Cluster, folder: Path, name: str, *, epochs: int, is_job: bool = False
    ) -> None:
        self.name, self.store, self.log = name, folder / "store", folder / f"{name}.shown"
        spec = folder / f"{name}.yaml"
        spec.write_text(SPEC.format(name=name, epochs=epochs))
        verb, address = ("submit", cluster.dashboard) if is_job else ("run", cluster.address)
        self.command = [*DMLSTUDY, verb, str(spec), "--store", str(self.store), "--address", address]
        self.command += ["--wait"] * is_job
        with open(self.log, "wb") as file:
            self.process = subprocess.Popen(
                self.command, stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT
            )

    def wait_for_line(self, pattern: str, timeout: float = 300) -> None:
        end = time.monotonic() + timeout
        while not re.search(pattern, self.log.read_text(), re.MULTILINE):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def test_two_studies_share_a_cluster_and_a_store_and_one_name_runs_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    first = Study(cluster, tmp_path, "first", epochs=8)
    second = Study(cluster, tmp_path, "second", epochs=8)  # two of three places: it waits for them
    try:
        first.wait_for_line("starting the workers")
        again = subprocess.run(
            first.command, capture_output=True, text=True, timeout=100, check=False, env=ENVIRONMENT
        )
        assert again.returncode == 2
        hint = f"see `dmlstudy status first --store {first.store}`"
        assert again.stderr.strip() == f"error: study 'first' is running already; {hint}"
        for study in (first, second):
            assert study.process.wait(timeout=300) == 0, study.log.read_text()
    finally:
        first.end()
        second.end()
    for study in (first, second):
        assert [trial.state.name for trial in trials_of(study.store, study.name)] == ["COMPLETE"] * 3
        assert board_of(study.store, study.name)["winner"] == "multi-similarity"
        assert runs_left_open(study.store, study.name) == []
    assert cluster.held() == []


def test_a_submitted_study_survives_the_loss_of_a_node(
    cluster: Cluster, tmp_path: Path, record_fault: Record
) -> None:
    study = Study(cluster, tmp_path, "spread", epochs=40, is_job=True)
    try:
        study.wait_for_line(f"^1/{NUM_TRIALS} ")
        hosts = cluster.with_workers()
        assert len(hosts) == 2, "one worker on each of two nodes"
        lost = next(raylet for raylet in hosts if raylet != cluster.raylets[0])
        for process in [lost, *lost.children(recursive=True)]:
            process.kill()
        removed = time.monotonic()
        recovered = seconds_until_training(study.store / "studies" / study.name, since=removed)
        assert study.process.wait(timeout=300) == 0, study.log.read_text()
    finally:
        study.end()
    trials = trials_of(study.store, study.name)
    assert len(trials) == 3
    failed = [trial for trial in trials if trial.state.name == "FAIL"]
    assert [trial.state.name for trial in trials].count("COMPLETE") == 3 - len(failed) >= 2
    for trial in failed:
        assert re.search("a worker of the trial was lost|the workers died", trial.user_attrs["reason"])
    (row,) = (row for row in board_of(study.store, study.name)["rows"] if row["family"] == "multi-similarity")
    assert (row["num_finished"], row["num_failed"]) == (3 - len(failed), len(failed))
    assert row["num_judged"] == 1
    assert runs_left_open(study.store, study.name) == []
    assert cluster.held() == []
    record_fault("node of three lost", len(failed), recovered)
