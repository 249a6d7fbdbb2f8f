"""Studies as jobs of a cluster, without one: what is sent, what is refused, how jobs are listed."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.job_submission import JobStatus

from dmlstudy.engine import jobs
from dmlstudy.engine.cluster import ClusterError
from dmlstudy.spec import study_file

RAW: dict[str, Any] = {
    "name": "s",
    "data": {"name": "digits"},
    "training": {"epochs": 4, "head_lr_mult": 1},
    "batch": {"classes": "all", "images_per_class": 4},
    "families": {"red": {"space": "contrastive"}},
}
ADDRESS = "http://127.0.0.1:8265"


class Client:
    """Stands for the Jobs API of a cluster."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.sent: list[dict[str, Any]] = []
        self.study: dict[str, Any] = {}

    def submit_job(self, **job: Any) -> None:
        logging.getLogger("ray.dashboard.modules.dashboard_sdk").info("Uploading package gcs://x")
        self.sent.append(job)
        self.study = yaml.safe_load((Path(job["runtime_env"]["working_dir"]) / "study.yaml").read_text())
        if self.refusal:
            raise RuntimeError(f"Request failed with status code 500: {self.refusal}")

    def list_jobs(self) -> list[Any]:
        return [
            details("b", JobStatus.RUNNING, 3000, None, {"study": "s"}),
            details("a", JobStatus.STOPPED, 1000, 61000, None),
            details(None, JobStatus.SUCCEEDED, 1, 2, None),  # a driver that nobody submitted
        ]

    def get_job_info(self, name: str) -> Any:
        return details(name, JobStatus.RUNNING, 3000, None, {"study": "s"})

    def get_job_logs(self, name: str) -> str:
        return "s: 1 families\n 5/24  red #4  left 2:30 min\nthe workers are still starting\n\n"


def details(
    name: str | None, status: JobStatus, start: int, end: int | None, metadata: dict[str, str] | None
) -> Any:
    return SimpleNamespace(
        submission_id=name, status=status, start_time=start, end_time=end, metadata=metadata
    )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Client:
    there = Client()
    monkeypatch.setattr(jobs, "client", lambda address: there)
    monkeypatch.setattr(jobs, "_check_capacity", lambda *_: None)
    return there


def submitted(raw: dict[str, Any] = RAW) -> str:
    return jobs.submit(study_file.parse(raw), ADDRESS, Path("store"), None, None)


def test_what_is_sent(cluster: Client, caplog: pytest.LogCaptureFixture) -> None:
    job = submitted()
    (sent,) = cluster.sent
    assert (sent["submission_id"], sent["metadata"]) == (job, {"study": "s"})
    assert cluster.study == RAW
    env = sent["runtime_env"]["env_vars"]
    assert (env["DMLSTUDY_JOB"], env["RAY_JOB_STOP_WAIT_TIME_S"]) == (job, "60")
    assert caplog.messages == [], "Ray tells of its uploads"


def test_data_beside_the_study_file_are_refused_before_anything_is_sent(cluster: Client) -> None:
    study = study_file.parse(RAW | {"data": {"name": "image_folder", "path": "pics"}})
    with pytest.raises(study_file.SpecError, match=r"data\.path"):
        jobs.submit(study, ADDRESS, Path("store"), None, None)
    assert cluster.sent == []


def test_a_head_without_an_agent_is_told_how_to_start_one(
    cluster: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    played = {"monotonic": lambda: now[0], "sleep": lambda s: now.__setitem__(0, now[0] + 10 + s)}
    monkeypatch.setattr(jobs, "time", SimpleNamespace(strftime=time.strftime, **played))
    cluster.refusal = "No available agent to submit job, please try again later."
    with pytest.raises(ClusterError, match=r"another --dashboard-agent-listen-port$") as caught:
        submitted()
    assert now[0] < 45
    assert "\n" not in str(caught.value)
    cluster.refusal = "no\nother"
    with pytest.raises(ClusterError, match=r"takes no job: Request failed with status code 500: no$"):
        submitted()


def test_jobs_are_listed_oldest_first(cluster: Client) -> None:
    first, second = jobs.jobs(ADDRESS)
    assert (first.job, first.study, first.state, first.seconds) == ("a", None, "stopped", 60)
    assert (second.job, second.study, second.state) == ("b", "s", "running")
    assert jobs.job("b", ADDRESS).last_line == "5/24  red #4  left 2:30 min"
