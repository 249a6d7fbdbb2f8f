"""Ask a running study, or one trial of it, to end: from any shell that sees its store."""

from __future__ import annotations

import os
import signal
import socket
import time

from dmlstudy.engine.stop_requests import (
    BY_HAND,
    request_stop,
    requested_stops,
    withdraw,
)
from dmlstudy.store import Store, StoreError
from dmlstudy.studies.logs import trial_state
from dmlstudy.studies.status import mend, named, running_now, search_trials


def stop(store: Store, study: str | None) -> str:
    """Ask a running study to end, wait until it has, and say so.

    Only the process that holds the study's lock is signalled, also while it is still starting Ray.
    """
    name = named(store, study)
    state, driver = store.read_state(name), store.driver(name)
    if driver is None:
        return f"study {name} is not running: it is {state['state']}"
    if driver.pid is None:
        raise StoreError(f"study {name!r} is only just starting; try again")
    if driver.host != socket.gethostname():
        raise StoreError(
            f"study {name!r} runs on {driver.host}; stop it there, or its job:"
            f" dmlstudy stop --job {state['job'] or 'JOB'} --address http://HOST:8265"
        )
    is_ending = state["state"] != "running" and (state["pid"], state["host"]) == driver[:2]
    if not is_ending:
        try:
            os.kill(driver.pid, signal.SIGINT)
        except OSError as error:
            raise StoreError(
                f"study {name!r}: its process {driver.pid} takes no signal from here ({error.strerror});"
                f" see `{store.command('status', name)}`, and stop it where and as whom it was started"
            ) from None
    for _ in range(600):
        if store.driver(name) != driver:
            break
        time.sleep(0.1)
    else:
        return f"study {name} was asked to stop and is still ending its trials"
    ended = store.read_state(name)
    if ended["state"] in ("finished", "failed") and ended["pid"] == driver.pid:
        return f"study {name} has come to its end by itself: it is {ended['state']}"
    return f"study {name} is stopped; `{store.command('resume', name)}` goes on with it"


def stop_trial(store: Store, study: str | None, number: int, *, timeout_s: float = 60.0) -> str:
    """End one running trial of a running study, wait until it has ended, and say so.

    The request travels through the study's folder, so it works from every machine that sees the store. Raises
    StoreError where the trial is not running.
    """
    name = named(store, study)
    state = store.read_state(name)
    folder = store.study_folder(name)
    if state["state"] != "running":
        raise StoreError(f"study {name!r} is not running: it is {state['state']}; {mend(store, name, state)}")
    running = running_now(folder, state)
    if number not in {trial.number for trial in running}:
        labels = ", ".join(trial.label for trial in running) or "none at this moment"
        raise StoreError(
            f"trial {number} of {name!r} is not running; running are: {labels}"
            " (trials of the verdict have no number: they are the study's end)"
        )
    request_stop(folder, number)
    end = time.monotonic() + timeout_s
    while number in requested_stops(folder):
        if store.read_state(name)["state"] != "running":
            withdraw(folder, number)
            raise StoreError(
                f"study {name!r} ended before it saw the request; see `{store.command('status', name)}`"
            )
        if time.monotonic() > end:
            return f"trial {number} of {name} was asked to stop, and ends when its study next looks"
        time.sleep(0.1)
    trial = search_trials(store, name)[number]
    reason = str(trial.user_attrs.get("reason", ""))
    if reason.startswith(BY_HAND):
        return f"trial {number} of {name} is {reason}"
    return f"trial {number} of {name} ended by itself before: {trial_state(trial, None)}"
