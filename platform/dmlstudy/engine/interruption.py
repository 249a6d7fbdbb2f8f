"""Interruption of a running study: Ctrl-C, SIGTERM, or another shell."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class StudyInterrupted(Exception):
    """The study was stopped before its end; what was finished is kept, and running it again resumes it."""


def interrupted(again: str) -> str:
    """The line of a command that was interrupted; ``again`` names the one that goes on."""
    return f"interrupted; what was finished is kept, {again} goes on from there"


class Interruption:
    """Requests to end the study that arrive in its block: Ctrl-C, `dmlstudy stop`, or SIGTERM as of `ray job stop`.

    Where requests are ``looked_at`` the first one is only noted, so that Tune ends its trials cleanly. A second
    one, and any at another time, is a KeyboardInterrupt. Only the main thread receives them.

    The first is also noted in the file ``noted_in``, for whoever asks may not wait until the end is recorded.
    """

    def __init__(self, noted_in: Path | None = None) -> None:
        self._noted_in = noted_in
        self._is_requested = False
        self._is_looked_at = False

    def is_requested(self) -> bool:
        return self._is_requested

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        self._is_looked_at = True
        try:
            yield
        finally:
            self._is_looked_at = False

    def __enter__(self) -> Interruption:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: object) -> None:
        is_first, self._is_requested = not self._is_requested, True
        if is_first and self._noted_in is not None:
            with suppress(OSError):
                self._noted_in.touch()
        if not (is_first and self._is_looked_at):
            raise KeyboardInterrupt
