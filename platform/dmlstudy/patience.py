"""Waiting for a server that a running study needs and that is away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dmlstudy.store import StoreError

T = TypeVar("T")

ATTEMPTS = 5
"""Calls that may fail while the server answers other questions."""

PAUSE_S = 1.0
"""Seconds between a call that failed and the next attempt."""


class ServerPatience:
    """Waits for one server, at most ``left_s`` an outage; ``kind`` and ``place`` name it in messages.

    After an outage that lasted longer nothing is waited for any more, so that the study ends soon. ``answers`` asks
    whether the server is there, and ``tell`` gets a line on what is waited for.
    """

    def __init__(
        self,
        kind: str,
        place: str,
        left_s: float,
        answers: Callable[[], bool],
        tell: Callable[[str], object],
    ) -> None:
        self._kind, self._place = kind, place
        self._left_s = left_s
        self._answers = answers
        self._tell = tell
        self.gives_up: Callable[[], bool] = lambda: False
        """True once the study is to end, so that waiting stops."""
        self.failure: StoreError | None = None
        """The error of the outage that lasted too long."""

    @contextmanager
    def speaks_first(self) -> Iterator[None]:
        """Raise the error of the outage, in the place of what others have made of it in the block."""
        try:
            yield
        except Exception:
            if self.failure is not None:
                raise self.failure from None
            raise

    @property
    def is_over(self) -> bool:
        """True if nothing is waited for any more."""
        return not self._left_s

    def call(
        self,
        call: Callable[[], T],
        is_outage: Callable[[Exception], bool],
        again: Callable[[], T] | None = None,
    ) -> T:
        """The result of ``call``, or after an outage of ``again``, by default the same.

        Raises what is no outage, and StoreError after too long a one.
        """
        left = ATTEMPTS
        while True:
            try:
                return call()
            except Exception as error:
                if not left or self.is_over or not is_outage(error):
                    raise
                left, call = left - 1, again or call
                time.sleep(PAUSE_S)
                self.wait(error)

    def wait(self, error: Exception) -> None:
        """Return when the server answers again; raise StoreError, because of ``error``, after too long."""
        started, told = time.monotonic(), False
        while not self._answers():
            waited = time.monotonic() - started
            if waited > self._left_s or self.gives_up():
                self._left_s = 0.0
                self.failure = StoreError(
                    f"no {self._kind} at {self._place} for {waited:.0f} s; when it is back,"
                    " run the study again, it goes on from there"
                )
                raise self.failure from error
            if not told:
                self._tell(
                    f"the {self._kind} at {self._place} does not answer; the study waits"
                    f" up to {self._left_s:.0f} s for it"
                )
                told = True
            time.sleep(1)
        if told:
            self._tell(f"the {self._kind} is back after {time.monotonic() - started:.0f} s")
