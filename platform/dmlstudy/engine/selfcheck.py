"""The law of the training step, checked where trials will run: the user's cluster, devices and processes."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dmlstudy.engine.cluster import ClusterError, connected
from dmlstudy.engine.cluster_watch import ClusterWatch, told_at_last
from dmlstudy.engine.progress import Tell, engine_noise_to
from dmlstudy.files import temporary_folder
from dmlstudy.records import ResourcesConfig
from dmlstudy.text import last_line, nearest
from dmlstudy.training.exactness import CASES, Finding

AGAIN = "run the same again"


class SelfcheckFailed(RuntimeError):
    """The check could not be carried through; with the reason and where the engine's log is."""


def case_names(wanted: Sequence[str]) -> list[str]:
    """The cases in which one of the wanted losses or regularisers takes part, or all.

    Raises ValueError where there is none.
    """
    parts = {
        name: {case.loss, case.regularizer[0] if case.regularizer else ""} for name, case in CASES.items()
    }
    for part in wanted:
        known = sorted(set().union(*parts.values()) - {""})
        if part not in known:
            raise ValueError(f"no loss {part!r}{nearest(part, known, listed=True)}")
    return [name for name in CASES if not wanted or parts[name] & set(wanted)]


def run_selfcheck(
    names: Sequence[str],
    resources: ResourcesConfig,
    *,
    address: str | None,
    on_finding: Callable[[Finding], None],
    tell: Tell,
) -> None:
    """Check these cases on the workers of one trial; ``on_finding`` gets each as it arrives.

    What the engine prints goes to a temporary file, which is kept if something breaks. Raises ClusterError where the
    cluster cannot hold the workers or dies, and SelfcheckFailed where they break. If a dead cluster does not even
    release this process, ``tell`` reports it and the process ends.
    """
    descriptor, name = tempfile.mkstemp(prefix="dmlstudy-selfcheck-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    telling = threading.Lock()

    def hear(finding: Finding) -> None:
        with telling:
            on_finding(finding)

    def last_words(line: str) -> None:
        telling.acquire(timeout=1)  # for good: no finding is told after it
        tell(line)

    with (
        engine_noise_to(log),
        ClusterWatch(address, told_at_last(last_words, AGAIN)) as watch,
        connected(address, resources, watch.note_connected),
        temporary_folder() as folder,
        watch.told_if_dead(AGAIN),
    ):
        _follow(names, resources, folder, watch, hear, log)
    log.unlink()


def _follow(
    names: Sequence[str],
    resources: ResourcesConfig,
    folder: str,
    watch: ClusterWatch,
    on_finding: Callable[[Finding], None],
    log: Path,
) -> None:
    """Start the workers and collect their findings, each of which must arrive within the silence limit."""
    from ray.util.queue import Empty, Queue

    findings = Queue()
    errors: list[BaseException] = []
    workers = threading.Thread(
        target=_run, args=(list(names), findings, resources, folder, errors), daemon=True
    )
    workers.start()
    num_missing = len(names)
    # Waiting for room on the cluster has a limit of its own.
    patience_s = resources.start_limit_s + resources.silence_limit_s
    last_heard = time.monotonic()
    while num_missing:
        try:
            on_finding(findings.get(timeout=0.5))
            num_missing -= 1
            last_heard, patience_s = time.monotonic(), resources.silence_limit_s
        except Empty:
            if reason := watch.why_gone():
                raise ClusterError(f"{reason}; {AGAIN}") from None
            if time.monotonic() - last_heard > patience_s:
                raise SelfcheckFailed(f"no finding for {patience_s:g} s; see {log}") from None
            if not workers.is_alive() and findings.empty():
                reason = last_line(errors[0] if errors else "no reason given")
                raise SelfcheckFailed(f"the workers broke: {reason}; see {log}") from None
    workers.join()


def _run(
    names: list[str], findings: Any, resources: ResourcesConfig, folder: str, errors: list[BaseException]
) -> None:
    from dmlstudy.engine.worker_group import fit

    loop_config = {"names": names, "findings": findings}
    try:
        fit(_check_on_worker, loop_config, resources, name="selfcheck", storage=folder)
    except BaseException as error:
        errors.append(error)


def _check_on_worker(loop_config: dict[str, Any]) -> None:
    from ray.train.torch import get_device

    from dmlstudy import distributed
    from dmlstudy.training import exactness

    for name in loop_config["names"]:
        finding = exactness.check(CASES[name], get_device())
        if distributed.rank() == 0:
            loop_config["findings"].put(finding)
