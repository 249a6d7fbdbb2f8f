"""Signs of life of a long computation, for whoever watches it.

``beat`` stands in the loops that a trial can spend minutes in: batches, pieces of images, tiles of a ranking. It
costs nothing without a listener. It is called where work was done and nowhere else, so what hangs falls silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_S = 2.0
LEAST_SHARE = 0.02
"""Of a processor, that a thread which computes gets on a crowded machine."""

Listener = Callable[[], None]

_listener: Listener | None = None


def beat() -> None:
    """Say that the computation has come further."""
    if _listener is not None:
        _listener()


@contextmanager
def heard_by(listener: Listener, *, every_s: float) -> Iterator[None]:
    """Send beats of all threads to the listener until the end of the block, at most once in ``every_s`` seconds."""
    global _listener
    before, told = _listener, time.monotonic()

    def sometimes() -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= every_s:
            told = now
            listener()

    _listener = sometimes
    try:
        yield
    finally:
        _listener = before


@contextmanager
def beating_while_it_computes() -> Iterator[None]:
    """Beat for one long call of a library that says nothing meanwhile, as long as this thread uses its processor.

    A call that waits for something uses none, and falls silent. Without a per-thread clock nothing is reported.
    """
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if _listener is None or clock_of is None:
        yield
        return
    clock, over = clock_of(threading.get_ident()), threading.Event()

    def watch() -> None:
        used = time.clock_gettime(clock)
        while not over.wait(LOOK_S):
            before, used = used, time.clock_gettime(clock)
            if used - before >= LEAST_SHARE * LOOK_S:
                beat()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
