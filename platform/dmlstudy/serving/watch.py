"""A record of how far queries are from their nearest items, window by window, and whether they leave the range.

The record is a file of JSON lines that grows: a first line that names the format; for each start of a server the range
of distances; for each window its number of queries, quantiles and test. No picture, name or vector of a query is in it.

Queries are noted in passing: a thread sorts them into windows, and memory is that of a window and a bounded queue.
Of a server that is killed the window that was under way is lost, and nothing else.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dmlstudy.serving import drift
from dmlstudy.serving.drift import DistanceRange, Finite, Quantiles
from dmlstudy.serving.traffic import LOG
from dmlstudy.text import counted, first_line, reason

HEAD = b'{"dmlstudy": "watch", "format_version": 1}\n'
"""The first line of a record."""

MOST_LINE = 1 << 16
"""Bytes of a line; longer ones are no record's."""

WAITING = 4096
"""Requests whose distances may wait for the thread; of more the queries are counted as not watched."""

LARGEST_WINDOW = 100_000

END_SECONDS = 10.0
"""Seconds that the end of a server waits for its last window."""

Count: TypeAlias = Annotated[int, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Name: TypeAlias = Annotated[str, Field(max_length=500)]
Moment: TypeAlias = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]


class Served(BaseModel):
    """The model and the gallery of a server: names, and SHA-256 of the manifest, of ``gallery.json`` and of a map."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, protected_namespaces=())

    model: Name
    model_digest: Name
    gallery: Name
    gallery_digest: Name
    query_map: Name | None = None
    distance: Name


class WatchStart(BaseModel):
    """A server's start: what it serves, the range of distances and the windows it makes."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    kind: Literal["start"] = "start"
    at: Moment
    served: Served
    range: DistanceRange
    window: Count
    seconds: Finite


class Window(BaseModel):
    """Queries of a window: their nearest distances, and whether these are outside the range.

    ``number`` counts the record's windows from 1. ``chance`` is that of so many queries beyond the range where they are
    as the reference's were, ``alpha`` the most that is called outside. ``unwatched`` are queries that came too fast.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    kind: Literal["window"] = "window"
    number: Annotated[int, Field(ge=1)]
    start: Moment
    end: Moment
    queries: Annotated[int, Field(ge=1)]
    quantiles: Quantiles
    beyond: Count
    share_beyond: Share
    chance: Share
    alpha: Share
    is_outside: bool
    accepted: Count | None = None
    share_accepted: Share | None = None
    unwatched: Count = 0
    served: Served


Line: TypeAlias = Annotated[WatchStart | Window, Field(discriminator="kind")]
_LINE: TypeAdapter[WatchStart | Window] = TypeAdapter(Line)


class WatchPlan(NamedTuple):
    """The record's file, the largest number of queries and of seconds of a window, and queries that set the range."""

    file: Path
    window: int = 1000
    seconds: float = 600.0
    reference: Path | None = None

    def checked(self) -> WatchPlan:
        """The same. Raises ValueError for a window of no or too many queries, and of no time."""
        if not 1 <= self.window <= LARGEST_WINDOW:
            raise ValueError(f"--watch-window {self.window}: give 1 to {LARGEST_WINDOW} queries")
        if not 0 < self.seconds <= 366 * 86400:
            raise ValueError(f"--watch-minutes {self.seconds / 60:g}: give more than 0, and a year at most")
        return self


class WatchFile:
    """A record that grows by whole lines, with a lock on it; what a loss of power left of a last line is cut off.

    Raises ValueError for a file that is none, damaged, or written by another server, and a folder that is missing.
    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent}: no such folder; make it or name another file with --watch")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: is no file; name another with --watch")
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._head = b""
        try:
            self._lock()
            self.num_windows = self._continued()
        except BaseException:
            os.close(self._file)
            raise

    def append(self, line: WatchStart | Window) -> None:
        """Write a line, whole or not at all. Raises OSError where the disk does not take it."""
        self._write(self._head + line.model_dump_json().encode() + b"\n")
        self._head = b""

    def close(self) -> None:
        """Give the file free; one without a line is deleted."""
        if os.fstat(self._file).st_size == 0:
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self._path}: another server writes to it; name another file with --watch"
            ) from None

    def _continued(self) -> int:
        """Check what is there, and give the number of its windows."""
        with self._path.open("rb") as file:
            head = file.read(len(HEAD))
        if head != HEAD and HEAD.startswith(head):  # new, or broken off in its first line
            os.ftruncate(self._file, 0)
            self._head = HEAD
            return 0
        end, num = len(HEAD), 0
        for line, at in _lines(self._path):
            end, num = at, num + isinstance(line, Window)
        os.ftruncate(self._file, end)
        return num

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise


def read_record(path: str | Path) -> Iterator[WatchStart | Window]:
    """The lines of a record, without a last one that is not whole.

    Raises ValueError for a file that is missing, no record, or damaged, naming the line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; `dmlstudy serve --watch FILE` writes one")
    return (line for line, _ in _lines(path))


def _lines(path: Path) -> Iterator[tuple[WatchStart | Window, int]]:
    """Each line of a record, with the number of bytes up to its end."""
    with path.open("rb") as file:
        if file.readline(MOST_LINE) != HEAD:
            raise ValueError(f"{path}: no record of `dmlstudy serve --watch`; name another file")
        end, number, has_start = len(HEAD), 1, False
        while (raw := file.readline(MOST_LINE)).endswith(b"\n"):
            number, end = number + 1, end + len(raw)
            try:
                line = _LINE.validate_json(raw)
            except ValueError as error:
                raise _damaged(path, number, reason(error)) from None
            has_start = has_start or isinstance(line, WatchStart)
            if not has_start:
                raise _damaged(path, number, "a window before any start")
            yield line, end
        if len(raw) == MOST_LINE:
            raise _damaged(path, number + 1, "it has no end")


def _damaged(path: Path, number: int, why: str) -> ValueError:
    return ValueError(f"{path}: line {number} is damaged ({why}); take the line out, or name another file")


class QueryWatch:
    """Windows of a server's queries, which a thread writes and tests.

    ``learn`` gives the range of distances. Raises ValueError as it, ``WatchFile`` and ``WatchPlan.checked`` do, and
    OSError where the first lines cannot be written.
    """

    def __init__(
        self,
        plan: WatchPlan,
        served: Served,
        learn: Callable[[], DistanceRange],
        *,
        has_threshold: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._served, self._clock = plan.checked(), served, clock
        self._file = WatchFile(plan.file)
        self._number = self._file.num_windows
        try:
            self.range = learn()
            self._file.append(
                WatchStart(
                    at=_now(), served=served, range=self.range, window=plan.window, seconds=plan.seconds
                )
            )
        except BaseException:
            self._file.close()
            raise
        self._waiting: queue.Queue[tuple[list[float], list[bool] | None] | None] = queue.Queue(WAITING)
        self._unwatched, self._lock = 0, threading.Lock()
        self._distances: list[float] = []
        self._accepted: list[bool] | None = [] if has_threshold else None
        self._started, self._deadline, self._was_outside = "", 0.0, False
        self._last: Window | None = None
        self._windows = self._outside = 0
        self._counted: dict[str, Counter] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def lines(self) -> list[str]:
        """The range and the windows for people."""
        plan = self._plan
        more = (
            []
            if self._accepted is not None
            else ["no threshold, so no share of accepted queries is recorded"]
        )
        return [
            f"watch: {'; '.join([*self.range.lines, *more])}; a window is {counted(plan.window, 'query', 'queries')} or"
            f" {plan.seconds / 60:g} minutes, into {plan.file}"
        ]

    @property
    def facts(self) -> dict[str, Any]:
        """The last window for programs, without what is served."""
        last = self._last
        window = None if last is None else last.model_dump(exclude={"kind", "served"})
        return {
            "is_outside": last is not None and last.is_outside,
            "windows": self._windows,
            "windows_outside": self._outside,
            "upper": self.range.upper,
            "last": window,
        }

    def note(self, distances: Sequence[float], accepted: Sequence[bool] | None) -> None:
        """Have the nearest distances of a request's queries watched, and whether each was accepted; never waits."""
        try:
            self._waiting.put_nowait((list(distances), None if accepted is None else list(accepted)))
        except queue.Full:
            with self._lock:
                self._unwatched += len(distances)

    def close(self) -> None:
        """Write the window that is under way, and end."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=END_SECONDS)
        self._thread.join(END_SECONDS)

    def tell(self, registry: CollectorRegistry) -> None:
        """Put the watch's counts into those of ``/metrics``."""
        for name, text, value in (
            ("dmlstudy_watch_outside", "1 where the last window is outside the range.", self._is_outside),
            ("dmlstudy_watch_share_beyond", "Share of the last window beyond the range.", self._share_beyond),
        ):
            Gauge(name, text, registry=registry).set_function(value)
        self._counted = {
            name: Counter(f"dmlstudy_watch_{name}", text, registry=registry)
            for name, text in (
                ("windows", "Windows of queries."),
                ("windows_outside", "Windows outside the range."),
                ("queries", "Queries in windows."),
            )
        }

    def _is_outside(self) -> float:
        return float(self._last is not None and self._last.is_outside)

    def _share_beyond(self) -> float:
        return 0.0 if self._last is None else self._last.share_beyond

    def _run(self) -> None:
        while True:
            wait = max(0.0, self._deadline - self._clock()) if self._distances else None
            try:
                noted = self._waiting.get(timeout=wait)
            except queue.Empty:
                self._end_window()
                continue
            if noted is None:
                break
            if self._distances and self._clock() >= self._deadline:
                self._end_window()
            self._take(*noted)
        self._end_window()
        self._file.close()

    def _take(self, distances: Sequence[float], accepted: Sequence[bool] | None) -> None:
        pairs = zip(distances, accepted or [False] * len(distances), strict=True)
        for distance, is_accepted in pairs:
            if not np.isfinite(distance):
                continue
            if not self._distances:
                self._started, self._deadline = _now(), self._clock() + self._plan.seconds
            self._distances.append(distance)
            if self._accepted is not None:
                self._accepted.append(is_accepted)
            if len(self._distances) >= self._plan.window:
                self._end_window()

    def _end_window(self) -> None:
        if not self._distances:
            return
        self._number += 1
        with self._lock:
            unwatched, self._unwatched = self._unwatched, 0
        window = window_of(
            self._number,
            np.array(self._distances),
            self.range,
            self._served,
            start=self._started,
            end=_now(),
            accepted=None if self._accepted is None else sum(self._accepted),
            unwatched=unwatched,
        )
        self._distances = []
        self._accepted = None if self._accepted is None else []
        try:
            self._file.append(window)
        except OSError as error:
            LOG.warning("watch: window %d is not recorded (%s)", window.number, first_line(error))
        self._windows, self._outside = self._windows + 1, self._outside + window.is_outside
        self._last = window
        for name, more in (
            ("windows", 1),
            ("windows_outside", window.is_outside),
            ("queries", window.queries),
        ):
            if name in self._counted:
                self._counted[name].inc(more)
        if window.is_outside != self._was_outside:
            LOG.warning("watch: %s", told(window, self.range.upper))
        self._was_outside = window.is_outside


def window_of(
    number: int,
    distance_Q: drift.Distances,
    learned: DistanceRange,
    served: Served,
    *,
    start: str,
    end: str,
    accepted: int | None = None,
    unwatched: int = 0,
) -> Window:
    """The window of these nearest distances, tested against the range."""
    num, beyond = len(distance_Q), int((distance_Q > learned.upper).sum())
    chance, alpha = learned.chance(beyond, num), drift.alpha_of(number)
    return Window(
        number=number,
        start=start,
        end=end,
        queries=num,
        quantiles=drift.quantiles(distance_Q),
        beyond=beyond,
        share_beyond=beyond / num,
        chance=chance,
        alpha=alpha,
        is_outside=chance <= alpha,
        accepted=accepted,
        share_accepted=None if accepted is None else accepted / num,
        unwatched=unwatched,
        served=served,
    )


def told(window: Window, upper: float) -> str:
    """A line on a window that leaves the range, or is back in it."""
    what = (
        f"window {window.number}: {window.beyond} of {counted(window.queries, 'query is', 'queries are')} beyond"
        f" {upper:.4g}, where 1% belong (chance {window.chance:.1e})"
    )
    if window.is_outside:
        return f"{what}; queries leave the range, as new classes or other pictures do"
    return f"{what}; queries no longer leave the range"


def _now() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
