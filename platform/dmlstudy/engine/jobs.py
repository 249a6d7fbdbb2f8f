"""Studies as Ray jobs: pack the code and the study file, submit, follow."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from dmlstudy import bundled
from dmlstudy.engine.cluster import ClusterError, check_room, present_token, unreachable, variables
from dmlstudy.files import temporary_folder
from dmlstudy.records import Record
from dmlstudy.registry import environment
from dmlstudy.spec import yaml_file
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.store import refuse_login
from dmlstudy.text import duration, first_line

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
NODES_TIMEOUT_S = 60.0
AGENT_TIMEOUT_S = 30.0
"""Time for a head to get an agent for jobs; each of Ray's own attempts takes up to 10 s of it."""
STOP_PATIENCE_S = 60
"""Time for a job to record that it was asked to stop, before Ray kills it."""
ELSEWHERE: dict[str, str | None] = {"RAY_ADDRESS": None, "RAY_API_SERVER_ADDRESS": None}
"""Ray lets these overrule the address that it is given."""
EXIT_CODES = {JobStatus.SUCCEEDED: 0, JobStatus.FAILED: 1, JobStatus.STOPPED: 130}


def client(address: str | None) -> JobSubmissionClient:
    """A client of the Jobs API at the address, whatever Ray's variables say; ClusterError where none answers."""
    if address is None:
        raise ClusterError("a job needs the cluster it runs on: give --address http://HOST:8265")
    present_token()
    try:
        with variables(ELSEWHERE):
            return JobSubmissionClient(address)
    except Exception as error:  # its own RuntimeErrors and those of requests
        raise unreachable(address, error) from None


def submit(
    study: StudySpec, address: str, store: Path, tracking_uri: str | None, tracking_timeout: float | None
) -> str:
    """Ship this package with the study and start ``jobs/study.py`` there; returns the job's id.

    Raises ClusterError where no cluster answers, where it can never hold one trial, or where it is remote
    and ``store`` is not an absolute path on it, SpecError for a path of this machine in
    the study, and StoreError for a login in ``tracking_uri``.
    """
    refuse_login(tracking_uri)
    study.check_for_job()
    there = client(address)
    here = urlparse(address).hostname in LOOPBACK
    if not here and not store.is_absolute() and tracking_uri is None:
        raise ClusterError(f"{address} is another machine: give --store with an absolute path on the cluster")
    _check_capacity(study, address)
    job = f"{study.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    with temporary_folder() as scratch:
        staged = Path(scratch)
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(bundled.PACKAGE, staged / "platform" / "dmlstudy", ignore=ignore)
        for name in ("search_spaces", "jobs"):
            shutil.copytree(bundled.folder(name), staged / name, ignore=ignore)
        (staged / "study.yaml").write_text(yaml_file.dump(study.raw), encoding="utf-8")
        # A cluster has its own `python`; one on this machine was started by this one.
        python = sys.executable if here else "python"
        command = (
            f"{shlex.quote(python)} jobs/study.py study.yaml --store {shlex.quote(str(store.absolute()))}"
        )
        if tracking_uri:
            command += f" --tracking-uri {shlex.quote(tracking_uri)}"
        if tracking_timeout is not None:
            command += f" --tracking-timeout {tracking_timeout:g}"
        _submit_patiently(
            there,
            address,
            entrypoint=command,
            submission_id=job,
            runtime_env={
                "working_dir": str(staged),
                "env_vars": {
                    "DMLSTUDY_JOB": job,
                    "PYTHONPATH": "platform",
                    "PYTHONUNBUFFERED": "1",
                    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_PATIENCE_S),
                    environment.COMMIT: environment.commit() or "",
                },
            },
            metadata={"study": study.name},
        )
    return job


def _submit_patiently(there: JobSubmissionClient, address: str, **job: Any) -> None:
    """Submit a job; a head that has just started answers before it can take one."""
    end = time.monotonic() + AGENT_TIMEOUT_S
    for name in ("ray", "ray.dashboard.modules.dashboard_sdk"):  # they tell of each upload
        logging.getLogger(name).setLevel(logging.WARNING)
    while True:
        try:
            there.submit_job(**job)
            return
        except RuntimeError as error:
            if "No available agent" not in str(error):
                raise ClusterError(
                    f"the Ray cluster at {address} takes no job: {first_line(error)}"
                ) from None
            if time.monotonic() > end:
                raise ClusterError(
                    f"the Ray cluster at {address} takes no job: its head has no job agent that answers; where two Rays"
                    " share a machine their agents' ports collide: start the head with another"
                    " --dashboard-agent-listen-port"
                ) from None
        time.sleep(1)


class Job(Record):
    """A job of a cluster: a study that ``submit`` sent, or another's; times are seconds since 1970."""

    job: str
    study: str | None
    state: str
    started: float | None
    ended: float | None
    last_line: str = ""
    """Its last line about its trials, or else its last line, if requested."""

    @property
    def seconds(self) -> float | None:
        """Seconds that it has run."""
        return None if self.started is None else (self.ended or time.time()) - self.started


def jobs(address: str | None) -> list[Job]:
    """The jobs of a cluster that were submitted to it, oldest first; raises ClusterError where none answers."""
    try:
        known = client(address).list_jobs()
    except RuntimeError as error:
        raise ClusterError(f"the Ray cluster at {address} lists no jobs: {first_line(error)}") from None
    found = [_job(each) for each in known if each.submission_id]
    return sorted(found, key=lambda each: (each.started or 0.0, each.job))


def job(name: str, address: str | None) -> Job:
    """One job of a cluster, with what it printed last; raises ClusterError where there is none."""
    found = _job(known_job(name, address))
    lines = [line.strip() for line in client(address).get_job_logs(name).splitlines() if line.strip()]
    of_trials = [line for line in lines if re.match(r"\d+/\d+ ", line)]
    return found.model_copy(update={"last_line": (of_trials or lines or [""])[-1]})


def _job(details: JobDetails) -> Job:
    return Job(
        job=str(details.submission_id),
        study=(details.metadata or {}).get("study"),
        state=details.status.lower(),
        started=details.start_time / 1000 if details.start_time else None,
        ended=details.end_time / 1000 if details.end_time else None,
    )


def known_job(job: str, address: str | None) -> JobDetails:
    """The cluster's record of a job; raises ClusterError if it has none."""
    try:
        return client(address).get_job_info(job)
    except RuntimeError:
        raise ClusterError(
            f"no job {job!r} at {address}; `dmlstudy jobs --address {address}` lists them"
        ) from None


def follow_job(job: str, address: str, write: Callable[[str], object]) -> int:
    """Write the job's output as it comes; returns the exit code that its end means."""
    there = client(address)
    shown = 0
    while True:
        status = there.get_job_status(job)
        output = there.get_job_logs(job)
        write(output[shown:])
        shown = len(output)
        if status.is_terminal():
            return EXIT_CODES[status]
        time.sleep(1)


def job_row(job: Job) -> list[str]:
    """Id, study, state, when it began and how long it ran."""
    began = "" if job.started is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.started))
    return [job.job, job.study or "-", job.state, began, "" if job.seconds is None else duration(job.seconds)]


def job_lines(job: Job) -> list[str]:
    """A job's state and time; below it the study's last progress line, with its trials and the time left."""
    ran = "" if job.seconds is None else f", for {duration(job.seconds)}"
    return [f"job {job.job}: {job.state}{ran}", *([job.last_line] if job.last_line else [])]


def job_logs(job: str, address: str | None, write: Callable[[str], object], *, follow: bool) -> None:
    """Write what a job has printed; with ``follow`` until it ends."""
    known_job(job, address)
    assert address is not None
    if follow:
        follow_job(job, address, write)
    else:
        write(client(address).get_job_logs(job))


def stop_job(job: str, address: str | None) -> str:
    """Ask a job to end; its study ends as by Ctrl-C."""
    known_job(job, address)
    stopped = client(address).stop_job(job)
    return f"job {job} is asked to stop" if stopped else f"job {job} had ended already"


def _check_capacity(study: StudySpec, address: str) -> None:
    """Refuse what the cluster can never hold; where the head has no CPU the cluster scales (cluster.yaml),
    and the job itself asks the autoscaler how far."""
    from ray.util.state import list_nodes

    end = time.monotonic() + NODES_TIMEOUT_S
    with variables(ELSEWHERE):
        while not (nodes := [node for node in list_nodes(address=address) if node.state == "ALIVE"]):
            if time.monotonic() > end:
                raise ClusterError(
                    f"the Ray cluster at {address} has no node; start one with `ray start --head`"
                )
            time.sleep(1)
    if any(node.is_head_node and not (node.resources_total or {}).get("CPU") for node in nodes):
        return
    check_room(study.file.resources, [dict(node.resources_total or {}) for node in nodes])
