"""Look at and end studies from another shell: status, logs, stop; by study name, or by job on a cluster.

MLflow and Ray take seconds to import, so what does not need them does not wait for them.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from dmlstudy.registry.store import Store, StoreError
from dmlstudy.studies.duration import duration

Write = Callable[[str], object]


def status(store: Store, study: str | None) -> list[list[str]]:
    """A row per study: name, state, trials finished, stopped early, failed and left, best, time spent."""
    names = [study] if study else store.studies()
    if not names:
        raise StoreError(f"no studies in the store {store.root}; start one with `dmlstudy run`")
    return [_status_row(store, name) for name in names]


def _status_row(store: Store, name: str) -> list[str]:
    from dmlstudy.registry.leaderboard import leaderboard

    state = store.read_state(name)
    rows = leaderboard(store, name).rows
    finished = sum(row.num_finished for row in rows)
    stopped = sum(row.num_pruned for row in rows)
    failed = sum(row.num_failed for row in rows)
    judged = sum(row.num_judged for row in rows)
    total = state["num_search_trials"] + state["num_verdict_trials"]
    left = 0 if state["state"] == "finished" else total - finished - stopped - failed - judged
    best = next(
        (f"{row.validation:.4f} {row.family}" for row in rows if row.validation is not None), "none yet"
    )
    end = time.time() if state["state"] == "running" else state["updated"]
    return [
        name,
        state["state"] + (f": {state['reason']}" if state["state"] == "failed" else ""),
        f"{finished} + {judged} judged",
        str(stopped),
        str(failed),
        str(left),
        best,
        duration(end - state["started"]),
    ]


def logs(store: Store, study: str | None, write: Write, *, engine: bool, follow: bool) -> None:
    """Write a study's progress lines, or its engines' log; with ``follow`` until the study ends."""
    if study is None:
        raise StoreError(
            f"name a study of the store {store.root}: {', '.join(store.studies()) or 'none yet'}"
        )
    store.read_state(study)
    path = store.study_folder(study) / ("engine.log" if engine else "progress.log")
    position = 0
    while True:
        running = follow and store.read_state(study)["state"] == "running"
        position += _write_from(path, position, write)
        if not running:
            return
        time.sleep(0.5)


def _write_from(path: Path, position: int, write: Write) -> int:
    if not path.is_file():
        return 0
    with open(path, "rb") as file:
        file.seek(position)
        content = file.read()
    write(content.decode(errors="replace"))
    return len(content)


def stop(store: Store, study: str | None) -> str:
    """Ask a running study to end, wait until it has, and say so."""
    if study is None:
        raise StoreError(
            f"name a study of the store {store.root}: {', '.join(store.studies()) or 'none yet'}"
        )
    state = store.read_state(study)
    if state["state"] != "running":
        return f"study {study} is not running: it is {state['state']}"
    if state["host"] != socket.gethostname():
        raise StoreError(
            f"study {study!r} runs on {state['host']}; stop it there, or its job:"
            f" dmlstudy stop --job {state['job'] or 'JOB'} --address http://HOST:8265"
        )
    os.kill(state["pid"], signal.SIGINT)
    for _ in range(600):
        if store.read_state(study)["state"] != "running":
            return f"study {study} is stopped; `dmlstudy run` goes on with it"
        time.sleep(0.1)
    return f"study {study} was asked to stop and is still ending its trials"


def job_status(job: str, address: str | None) -> str:
    """The state of a job, in one line."""
    from dmlstudy.studies import jobs

    return f"job {job}: {jobs.known_job(job, address).status.lower()}"


def job_logs(job: str, address: str | None, write: Write, *, follow: bool) -> None:
    """Write what a job has printed; with ``follow`` until it ends."""
    from dmlstudy.studies import jobs

    jobs.known_job(job, address)
    assert address is not None
    if follow:
        jobs.follow(job, address, write)
    else:
        write(jobs.client(address).get_job_logs(job))


def stop_job(job: str, address: str | None) -> str:
    """Ask a job to end; its study ends as by Ctrl-C."""
    from dmlstudy.studies import jobs

    jobs.known_job(job, address)
    stopped = jobs.client(address).stop_job(job)
    return f"job {job} is asked to stop" if stopped else f"job {job} had ended already"
