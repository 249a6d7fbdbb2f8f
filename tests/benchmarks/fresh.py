"""Peak memory and time of one call, in a process forked for it alone."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeAlias

FORK = multiprocessing.get_context("fork")
Found: TypeAlias = tuple[float, float] | str
"""(seconds, MiB) of a call, or why it could not be made."""


def cost_in_fresh_process(
    prepare: Callable[[], Callable[[], object]], *, most_seconds: int, most_gib: int
) -> Found:
    """What the call that ``prepare`` returns adds to the resident memory of its process, and its seconds.

    The calling process must not have computed with torch: threads do not survive a fork.
    """
    ours, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_answer, args=(theirs, prepare, most_gib))
    child.start()
    theirs.close()
    try:
        if not ours.poll(most_seconds + 30):
            return f"over {most_seconds} s"
        found: Found = ours.recv()
    except EOFError:
        child.join()
        if child.exitcode == 1:  # an exception, which the child has printed; the kernel's answer is a signal
            raise SystemExit("the measured call failed") from None
        return f"over {most_gib} GiB"
    finally:
        child.kill()
        child.join()
    return f"over {most_seconds} s" if isinstance(found, tuple) and found[0] > most_seconds else found


def _answer(pipe: Connection, prepare: Callable[[], Callable[[], object]], most_gib: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (most_gib * 2**30, resource.RLIM_INFINITY))
    try:
        call = prepare()
        before = _resident("VmRSS")
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
        started = time.perf_counter()
        call()
        pipe.send((time.perf_counter() - started, _resident("VmHWM") - before))
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error):
            raise
        pipe.send(f"over {most_gib} GiB")


def _resident(field: str) -> float:
    """A field of this process's status in MiB."""
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(field)]
    return int(line.split()[1]) / 1024
