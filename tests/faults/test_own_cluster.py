"""Several Rays on one machine: a job runs on the one that it was sent to, whatever Ray tells it."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray
from support.rays import ray_head

from dmlstudy import bundled
from dmlstudy.engine.cluster import connected
from dmlstudy.engine.jobs import client
from dmlstudy.records import ResourcesConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

JOB = """
import json, os
import ray
from dmlstudy.records import ResourcesConfig
from dmlstudy.engine.cluster import connected

with connected("auto", ResourcesConfig(workers=1)):
    print(json.dumps([os.environ["RAY_ADDRESS"], ray.get_runtime_context().gcs_address]))
"""
"""Where the job's libraries look for Ray, and where it is. With one folder, Ray's own answer is one of both for all."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as path:
        yield Path(path)


def ports_seen_by_a_job(dashboard: str) -> list[int]:
    there = client(dashboard)
    end = time.monotonic() + 120
    entrypoint = f"{shlex.quote(sys.executable)} -c {shlex.quote(JOB)}"
    environment = {"env_vars": {"PYTHONPATH": str(bundled.PACKAGE.parent)}}
    while True:
        try:
            job = there.submit_job(entrypoint=entrypoint, runtime_env=environment)
            break
        except RuntimeError:  # a head that has just started has no agent yet
            assert time.monotonic() < end
            time.sleep(0.5)
    while not there.get_job_status(job).is_terminal():
        assert time.monotonic() < end, there.get_job_logs(job)
        time.sleep(0.2)
    *_, said = there.get_job_logs(job).strip().splitlines()
    return [int(address.rpartition(":")[2]) for address in json.loads(said)]


@pytest.mark.parametrize("shares_a_folder", [True, False])
def test_a_job_runs_on_the_ray_that_it_was_sent_to(
    folder: Path, shares_a_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ExitStack() as both:
        first = both.enter_context(ray_head(folder / "a"))
        second = both.enter_context(ray_head(folder / ("a" if shares_a_folder else "b")))
        for head in (first, second):
            assert ports_seen_by_a_job(head.dashboard) == [head.port, head.port]


def test_a_job_runs_there_also_beside_a_study_that_has_a_ray_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``dmlstudy run`` starts listens on loopback alone: a job that takes it for its own cluster finds nothing."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with connected(None, ResourcesConfig(workers=1)), ray_head(folder / "a") as head:
        assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")
        assert ports_seen_by_a_job(head.dashboard) == [head.port, head.port]
