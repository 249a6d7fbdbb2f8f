"""A guard beside the start of Ray: a process that says what has happened where this one cannot.

Ray's own code holds all threads of this process while it connects it. A raylet that dies then makes it end the process
at once, with status 1 and not a word. Where the control service dies, it does so after a minute.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

SERVICES = {"gcs_server": "its control service", "raylet": "its raylet"}
"""The processes that a Ray cannot do without, and what they are called in messages."""

HELD_S = 6.0
"""After so long a process that does not notice the end of a service is ended: its own watch is held."""

EVERY_S = 1.0
DISMISSED = b"."


class Guards:
    """The guards of this process: one for each connection of Ray's that is being made."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def beside(self, where: str, errors_to: int = 2) -> Iterator[None]:
        """While the block lasts, another process tells if this one ends, to the descriptor ``errors_to``.

        It ends this one where a service that it started, of the Ray called ``where``, has ended and no thread says so.
        """
        guard = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid()), str(time.time()), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors_to,
            start_new_session=True,  # so that an interruption from the keyboard is not its own
        )
        self._all.append(guard)
        try:
            yield
        finally:
            self.dismiss()

    def dismiss(self) -> None:
        """Tell all guards that what happens from here on is on purpose."""
        while self._all:
            guard = self._all.pop()
            with suppress(OSError):  # of one that was ended
                guard.communicate(DISMISSED)


guards = Guards()


def ended_services(since: float, process: psutil.Process | None = None) -> list[str]:
    """Services of a Ray that the process (this one) has started at this time or later, and that ended unnoticed.

    Until Ray is connected it looks after none of them, and waits for the control service until it ends the process
    without a word.
    """
    found = []
    for child in (process or psutil.Process()).children():
        with suppress(psutil.NoSuchProcess):
            has_ended = child.status() == psutil.STATUS_ZOMBIE and child.create_time() >= since - 1
            if has_ended and child.name() in SERVICES:
                found.append(SERVICES[child.name()])
    return found


def _guard(pid: int, since: float, where: str) -> str:
    """Wait until dismissed: nothing; or until the process has ended: one line."""
    ended_at = None
    while not select.select([0], [], [], EVERY_S)[0]:
        ended: list[str] = []
        with suppress(psutil.NoSuchProcess):  # of a process that ends just now, which closes the pipe
            process = psutil.Process(pid)
            ended = ended_services(since, process)
        if not ended:
            ended_at = None
        elif ended_at is None:
            ended_at = time.monotonic()
        elif time.monotonic() - ended_at > HELD_S:
            with suppress(psutil.NoSuchProcess):
                process.kill()
            return f"{where} has died: {' and '.join(ended)} ended as it started; run the same again"
    if os.read(0, 1) == DISMISSED:
        return ""
    return (
        "this process ended while Ray connected it: it was killed, or a service of Ray ended just then; "
        "run the same again"
    )


def main() -> None:
    pid, since, where = sys.argv[1:]
    with suppress(OSError):  # as of a reader that has gone
        if line := _guard(int(pid), float(since), where):
            sys.stderr.write(f"error: {line}\n")
            sys.stderr.flush()


if __name__ == "__main__":
    main()
