"""A connection of the server, with limits to how long a client may keep it waiting.

uvicorn ends a connection that is idle after an answer, and no other: neither one that never finishes the head of a
request, nor one that never reads its answer. Both cost their sender nothing.
"""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""From the opening of a connection, or the last answer, to a whole head of a request."""

PAUSE_SECONDS = 10.0
"""Seconds between checks that a client reads its answer."""

LEAST_RATE = 8192
"""Bytes a second that a client must read of its answer."""

BACKLOG = 128
"""Connections that the system keeps while they wait to be accepted."""


def most_connections() -> int:
    """The number of connections that may be open: at most half of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 512 if soft == resource.RLIM_INFINITY else max(16, min(512, soft // 2 - BACKLOG))


class Connection(H11Protocol):
    """uvicorn's own, closed where the head of a request takes too long, and where an answer is not read.

    Where ``most`` are open, a new one takes the place of that which has waited longest without a request: so who holds
    connections open keeps nobody out.
    """

    head_seconds, pause_seconds, most = HEAD_SECONDS, PAUSE_SECONDS, most_connections()

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.pause_seconds, self._check_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_head(self) -> None:
        """Start the time where no request is under way, and stop it where one is."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._head_timer is not None and not is_idle:
            self._head_timer.cancel()
            self._head_timer = None
        elif self._head_timer is None and is_idle and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_seconds, self._drop)

    def _check_reader(self) -> None:
        """End a connection whose client has read too little since the last look."""
        unread = self.transport.get_write_buffer_size()
        if self._unread - unread < self.pause_seconds * LEAST_RATE:
            self._drop()
            return
        self._unread = unread
        self._write_timer = self.loop.call_later(self.pause_seconds, self._check_reader)

    def _make_room(self) -> None:
        """End the connection that has waited longest without a request; this one, where all others have one."""
        waiting = [
            (each._head_timer.when(), number, each)
            for number, each in enumerate(self.connections)
            if isinstance(each, Connection) and each._head_timer is not None
        ]
        if waiting:
            min(waiting)[2]._drop()

    def _drop(self) -> None:
        self._stop_timers()
        self.connections.discard(self)
        self.transport.abort()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None
