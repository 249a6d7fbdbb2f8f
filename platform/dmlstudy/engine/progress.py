"""Progress for the person who runs a study: a line per trial, and none of the engines' noise."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO

from dmlstudy import metric_names
from dmlstudy.engine.stop_requests import BY_HAND
from dmlstudy.records import TrialConfig, is_untrained
from dmlstudy.search.study_search import Assignment
from dmlstudy.spec.epochs import place
from dmlstudy.spec.pace import Trials, Work, seconds_left
from dmlstudy.text import duration
from dmlstudy.trials import GOING_ON, Status

Tell = Callable[[str], None]


_OUTPUTS = [2]
"""Descriptors of the standard error output: as it is, and as it was before each block that redirects it."""


def error_output() -> int:
    """The descriptor that reaches whoever reads errors, also inside ``engine_noise_to``."""
    return _OUTPUTS[-1]


@contextmanager
def engine_noise_to(path: Path) -> Iterator[None]:
    """Send everything this process and its libraries print to a file, for the length of the block.

    File descriptors 1 and 2 themselves are redirected, so that output of Ray's C++ parts goes there too.
    ``terminal`` made before the block still reaches the terminal. A notebook's ``sys.stdout`` and ``sys.stderr`` write
    to neither descriptor: they are replaced, also where a logger holds them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path, "ab", buffering=0) as noise:
        saved = [os.dup(1), os.dup(2)]
        _OUTPUTS.append(saved[1])
        os.dup2(noise.fileno(), 1)
        os.dup2(noise.fileno(), 2)
        try:
            with _streams_elsewhere_to(noise.fileno()):
                yield
        except Exception:
            with suppress(OSError):  # as of a full disk, of which the error may tell
                noise.write(traceback.format_exc().encode())
            raise
        finally:
            _OUTPUTS.pop()
            _flush_or_drop(sys.stdout, 1)
            _flush_or_drop(sys.stderr, 2)
            for descriptor, original in zip((1, 2), saved, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


def standard_descriptor(stream: TextIO) -> int | None:
    """1 or 2 where the stream writes to this file descriptor; None of any other, such as a notebook's."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, io.UnsupportedOperation):
        return None
    return descriptor if descriptor in (1, 2) else None


@contextmanager
def _streams_elsewhere_to(descriptor: int) -> Iterator[None]:
    """Lead ``sys.stdout`` and ``sys.stderr`` to the descriptor where they write to neither 1 nor 2."""
    with ExitStack() as stack:
        for stream, redirected in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if standard_descriptor(stream) is None:
                noise = stack.enter_context(terminal(descriptor))
                stack.enter_context(redirected(noise))
                for handler in _handlers_of(stream):
                    handler.setStream(noise)
                    stack.callback(handler.setStream, stream)
        yield


def _handlers_of(stream: TextIO) -> list[logging.StreamHandler[TextIO]]:
    """The handlers of all loggers that write to a stream."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {each for logger in loggers for each in getattr(logger, "handlers", ())}
    return [each for each in handlers if isinstance(each, logging.StreamHandler) and each.stream is stream]


def _flush_or_drop(stream: TextIO, descriptor: int) -> None:
    """Flush a stream; what its file does not take, as on a full disk, is dropped."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), descriptor)
        stream.flush()


def terminal(descriptor: int = 1) -> TextIO:
    """A stream to where standard output, or the descriptor, leads now, whatever happens to it later."""
    return open(os.dup(descriptor), "w", encoding="utf-8", errors="replace", buffering=1)


def as_long_as_heard(tell: Tell) -> Tell:
    """Tell lines until that fails for good, as where the terminal is gone or ``| head`` has ended; a study goes on."""
    is_heard = True

    def tell_or_not(line: str) -> None:
        nonlocal is_heard
        if is_heard:
            try:
                tell(line)
            except OSError:
                is_heard = False

    return tell_or_not


STARTING_TOLD_S = 20.0
"""Time between two messages that nothing has been reported yet."""


class ProgressLines:
    """Tells of each trial that ends: its score, the best so far and the time left.

    ``left`` are the trials that are to end, of ``num_total``; ``num_at_once`` of them may run at once. ``is_bound``
    says that these are the most that there can be, as where seeds are added until the verdict is decided;
    ``is_search_bound`` that this holds as long as trials of the search are among them.
    """

    def __init__(
        self,
        tell: Tell,
        objective: str,
        left: Trials,
        num_total: int,
        width: int,
        work: Work,
        num_at_once: int = 1,
        *,
        is_bound: bool = False,
        is_search_bound: bool = False,
    ) -> None:
        self._tell = tell
        self._is_bound, self._is_search_bound = is_bound, is_search_bound
        self._num_at_once = num_at_once
        self._begun_at = self._starting_told = time.monotonic()
        self._is_training = False
        self._objective = objective
        self._left = left
        self._num_done = num_total - sum(left)
        self._num_total = num_total
        self._width = width
        self._work = work
        self._ends: list[tuple[float, float]] = []

    def tell(self, line: str) -> None:
        """Something else worth knowing."""
        self._tell(line)

    def beat(self, is_training: bool) -> None:
        """Say now and then that no epoch has ended yet, and once that one has."""
        now = time.monotonic()
        if self._is_training:
            return
        if is_training:
            self._is_training = True
            if self._starting_told > self._begun_at:
                self._tell(f"the first epoch has ended, {duration(now - self._begun_at)} after the start")
        elif now - self._starting_told >= STARTING_TOLD_S:
            self._starting_told = now
            since = duration(now - self._begun_at)
            self._tell(
                f"no epoch has ended yet, {since} after the start: workers start, then train the first one"
            )

    def ended(
        self,
        assignment: Assignment,
        seconds: float | None,
        best: tuple[float, str] | None,
        left: Trials | None = None,
    ) -> None:
        """One line for a trial that has ended or paused; ``left`` are those still to end, where that has changed.

        ``seconds`` are those at work.
        """
        if assignment.status in GOING_ON:
            how = "interrupted" + f", goes on later: {_shortened(assignment.reason)}" * bool(
                assignment.reason
            )
            if assignment.status == Status.PAUSED:
                self._is_training = True
                where = place(assignment.config, len(assignment.curve))
                how = f"{self._scored(assignment)} paused, {where}"
            self._tell(f"{'':>{2 * len(str(self._num_total))}}   {assignment.label:<{self._width}}  {how}")
            return
        self._num_done += 1
        self._is_training = True
        kind = _kind(assignment.config)
        self._ends.append((time.monotonic(), getattr(self._work, kind)))
        now_left = self._left._replace(**{kind: max(0, getattr(self._left, kind) - 1)})
        self._left = now_left if kind == "search" else now_left._replace(search=0)
        if left is not None:
            self._left, self._num_total = left, self._num_done + sum(left)
        # A bound is reached where nothing is left.
        may_be_fewer = self._is_bound or (self._is_search_bound and self._left.search > 0)
        at_most = "≤ " if may_be_fewer and any(self._left) else ""
        count = f"{self._num_done:>{len(str(self._num_total))}}/{at_most.strip()}{self._num_total}"
        champion = f"best {best[0]:.4f} {best[1]}" if best else "no best yet"
        took = f"{'':7}" if seconds is None else f"{seconds:5.1f} s"
        line = (
            f"{count}  {assignment.label:<{self._width}}  {self._outcome(assignment):<26}"
            f" {took}  left {at_most + self._time_left():<9}  {champion}"
        )
        self._tell(line)

    def _outcome(self, assignment: Assignment) -> str:
        if assignment.status == Status.FAILED:
            return f"failed: {_shortened(assignment.reason)}"
        text = self._scored(assignment)
        if assignment.status == Status.PRUNED:
            how = BY_HAND if assignment.reason.startswith(BY_HAND) else "stopped"
            text = f"{text} {how}, {place(assignment.config, len(assignment.curve))}"
        return text

    def _scored(self, assignment: Assignment) -> str:
        """The objective with its standard error."""
        is_search = assignment.config.phase == "search"
        name = self._objective if is_search else metric_names.on_test(self._objective)
        score = assignment.metrics.get(name, float("nan"))
        spread = assignment.metrics.get(metric_names.stderr(name))
        return f"{name} {score:.4f}" + ("" if spread is None else f" ± {spread:.4f}")

    def _time_left(self) -> str:
        seconds = seconds_left(self._ends, self._num_at_once, self._work, self._left)
        return "..." if seconds is None else duration(seconds)


def _kind(config: TrialConfig) -> str:
    """Whose work a trial does: a field of ``Work``."""
    if config.phase == "search":
        return "search"
    return "untrained" if is_untrained(config.family) else "verdict"


def _shortened(reason: str, length: int = 90) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= length else f"{line[: length - 3]}..."
