"""The record of a server's requests: for each a line of the log, and the counts of ``/metrics``."""

from __future__ import annotations

import datetime
import logging
import math
import sys
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dmlstudy.text import counted

ITEMS = "dmlstudy.items"
"""The key of a scope under which an endpoint notes the number of a request's items."""

LOG = logging.getLogger("dmlstudy.serve")

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 120)


class Traffic:
    """An application, with each of its requests logged and counted.

    A line has the time, the client, method, path, status, milliseconds and items. It has no query, header or body, so
    no token; a path is as it was sent, in which no line can end.
    """

    def __init__(
        self, app: ASGIApp, paths: frozenset[str], is_logged: bool, registry: CollectorRegistry
    ) -> None:
        self._app, self._paths, self._is_logged = app, paths, is_logged
        self._requests = Counter("dmlstudy_requests", "Requests.", ("path", "status"), registry=registry)
        self._items = Counter("dmlstudy_items", "Items embedded.", ("path",), registry=registry)
        self._seconds = Histogram(
            "dmlstudy_request_seconds", "Seconds to an answer.", ("path",), buckets=SECONDS, registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started = 500, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            seconds, items = time.perf_counter() - started, scope.get(ITEMS, 0)
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._requests.labels(path, str(status)).inc()
            self._seconds.labels(path).observe(seconds)
            if items:
                self._items.labels(path).inc(items)
            if self._is_logged:
                _log(scope, status, seconds, items)


def _log(scope: Scope, status: int, seconds: float, items: int) -> None:
    client = scope["client"][0] if scope.get("client") else "-"
    raw = scope.get("raw_path") or scope["path"].encode()
    path = raw.partition(b"?")[0][:200].decode("ascii", "backslashreplace")
    shown = path.encode("unicode_escape").decode().replace(" ", "%20")
    num = counted(items, "item", "items")
    LOG.info("%s %s %s %d %.1f ms %s", client, scope["method"], shown, status, 1000 * seconds, num)


class Rare(logging.Filter):
    """At most one line in ``seconds`` of each message; the next one says how many there were meanwhile.

    uvicorn warns of each head that is not HTTP, which costs its sender a few bytes.
    """

    def __init__(self, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds, self._clock = seconds, clock
        self._told: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True if a warning is due; errors always are."""
        if record.levelno > logging.WARNING:
            return True
        now, message = self._clock(), str(record.msg)
        last, num_untold = self._told.get(message, (-math.inf, 0))
        if now - last < self._seconds:
            self._told[message] = last, num_untold + 1
            return False
        if num_untold:
            record.msg = f"{message} ({num_untold} more in {now - last:.0f} s)"
        self._told[message] = now, 0
        return True


def log_to_stderr() -> None:
    """Let the log's lines go to standard error, each with its time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_WithTime())
    LOG.handlers[:] = [handler]
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


class _WithTime(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        return f"{moment:%Y-%m-%dT%H:%M:%S}Z {record.getMessage()}"


def counts(registry: CollectorRegistry) -> bytes:
    """The counts, as Prometheus reads them."""
    return generate_latest(registry)
