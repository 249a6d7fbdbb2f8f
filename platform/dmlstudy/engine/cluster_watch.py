"""A watch on the Ray under a study, since what is left of a dead one neither answers nor fails."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import ray

from dmlstudy.engine.cluster import ClusterError, place_of
from dmlstudy.engine.ray_private import kill_started_ray, raylet_connection
from dmlstudy.engine.start_guard import ended_services, guards
from dmlstudy.files import remove_temporary_folders

EVERY_S = 2.0
DEAD_S = 10.0
"""So long is a node to be dead in Ray's own table: it may be told so while it comes up."""

SILENT_S = 40.0
"""So long is Ray's control service not to answer. After 60 s Ray ends the driver's process without a word."""

LAST_S = 52.0
"""After so long without a sign of life the driver is ended from here, for its main thread may wait for Ray."""

HEAD = "node:__internal_head__"
RAYLET_GONE = "its raylet on the driver's node is gone"


class ClusterWatch:
    """Asks Ray's table of nodes every few seconds, in a thread of its own, while the block lasts.

    ``why_gone`` says what has died. Where the block has not ended long after that, ``at_last`` is called with it, in
    another thread: the main one may be stuck in a call of Ray's that never returns. Of a Ray that this process has
    started, as its parent, the death of a service is certain at once.
    """

    def __init__(
        self, address: str | None, at_last: Callable[[str], None], *, every_s: float = EVERY_S
    ) -> None:
        self._where = place_of(address)
        self._at_last = at_last
        self._every_s = every_s
        self._over = threading.Event()
        self._ending = threading.Lock()
        """Held while ``at_last`` is called, so that the block does not end under it, and by the block's end."""
        self._has_connected = False
        self._unanswered: float | None = None
        """Since when questions are asked and not answered."""
        self._last_sign = time.monotonic()
        self._dead = ""

    def note_connected(self) -> None:
        """Note that Ray is connected: when it is not any more, its services have been ended on purpose."""
        self._has_connected = True

    def is_doubtful(self) -> bool:
        """True if Ray does not answer, within a few seconds, a request sent after this call."""
        called, end = time.monotonic(), time.monotonic() + 2 * self._every_s + 1
        while time.monotonic() < end and not self._over.wait(0.05):
            if self._last_sign > called:
                return False
        return True

    def why_gone(self) -> str:
        """One line on what has died; empty while Ray lives."""
        now = time.monotonic()
        if self._dead and now - self._last_sign > DEAD_S:
            return f"{self._where} has died: {self._dead}"
        asked = self._unanswered
        if asked is not None and now - asked > SILENT_S:
            return f"{self._where} has died: its control service does not answer"
        return ""

    @contextmanager
    def told_if_dead(self, then: str) -> Iterator[None]:
        """ClusterError, with what to do ``then``, in the place of what a Ray that has died makes of the block.

        It belongs inside the connection, because Ray cannot be queried after it. Ray reports its own death at once
        or never, so an error is doubted and a silence is left to ``at_last``. ValueError, of bad input, passes, and so
        does any other error while Ray answers: a server's that refuses a connection is reported as its own.

        Where the driver's own raylet dies, ``at_last`` is called at once. Ray ends the process with exit code 1 and not
        a word as soon as it uses its object store, which died with the raylet: at the latest when Ray's table has it
        that the node is dead, some 14 s later.
        """
        try:
            with self._raylet_heard():
                yield
        except ValueError:
            raise
        except Exception as error:
            # A broken pipe of Ray's would be taken for that of a reader of the output.
            if not is_broken_to_ray(error) and not self.is_doubtful():
                raise
            why = self.why_gone() or f"{self._where} has died: {self._dead or 'it does not answer'}"
            raise ClusterError(f"{why}; {then}") from error

    @contextmanager
    def _raylet_heard(self) -> Iterator[None]:
        """Hear in another thread, while the block lasts, of the death of the driver's raylet."""
        raylet = raylet_connection()
        if raylet is None:
            yield
            return
        is_over = threading.Event()
        hearing = threading.Thread(
            target=self._hear, args=(raylet, is_over), name="cluster-watch-raylet", daemon=True
        )
        hearing.start()
        try:
            yield
        finally:
            is_over.set()
            with suppress(OSError):  # as of a raylet that has died just now
                raylet.shutdown(socket.SHUT_RDWR)
            hearing.join()
            raylet.close()

    def _hear(self, raylet: socket.socket, is_over: threading.Event) -> None:
        with suppress(OSError):
            while raylet.recv(4096):  # nothing is asked, so what comes is not for us
                pass
        if not is_over.is_set():
            self._end(f"{self._where} has died: {RAYLET_GONE}")

    def __enter__(self) -> ClusterWatch:
        for target in (self._ask, self._judge):
            threading.Thread(target=target, name=f"cluster-watch{target.__name__}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ending:
            self._over.set()

    def _ask(self) -> None:
        while not self._over.wait(self._every_s):
            if not ray.is_initialized():  # not yet, or no longer
                self._alive(time.monotonic())
                continue
            asked = time.monotonic()
            if self._unanswered is None:
                self._unanswered = asked
            try:
                dead = dead_node()
            except Exception:  # as while Ray is being shut down
                continue
            self._unanswered = None
            if dead:
                self._dead = dead
            else:
                self._alive(asked)

    def _alive(self, when: float) -> None:
        self._unanswered, self._dead = None, ""
        self._last_sign = when

    def _judge(self) -> None:
        began = time.time()
        while not self._over.wait(self._every_s):
            reason = self._ended(began)
            if not reason and time.monotonic() - self._last_sign > LAST_S:
                reason = self.why_gone()
            if reason:
                self._end(reason)
                return

    def _end(self, reason: str) -> None:
        """Call ``at_last``, unless the block has ended while the reason was looked for."""
        with self._ending:
            if not self._over.is_set():
                self._at_last(reason)

    def _ended(self, began: float) -> str:
        """One line on what has ended of a Ray that was started in this block; empty while it is shut down."""
        is_up = ray.is_initialized()
        if self._has_connected and not is_up:
            return ""
        ended = ended_services(began)
        if not ended or ray.is_initialized() != is_up:
            return ""
        when = "" if self._has_connected else " as it started"
        return f"{self._where} has died: {' and '.join(ended)} ended{when}"


def dead_node() -> str:
    """The node that a study cannot do without and that has died: its driver's, or the head; nothing while both live."""
    own = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    alive = [node for node in nodes if node["Alive"]]
    if all(node["NodeID"] != own for node in alive):
        return RAYLET_GONE
    if all(HEAD not in node["Resources"] for node in alive):
        return "its head node is gone"
    return ""


def is_broken_to_ray(error: BaseException) -> bool:
    """True if Ray has lost a connection of its own; False if a task reports a lost connection."""
    if not isinstance(error, ConnectionError) or isinstance(error, ray.exceptions.RayTaskError):
        return False
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.partition(".")[0] == "ray" for name in modules)


def told_at_last(tell: Callable[[str], None], then: str) -> Callable[[str], None]:
    """Tell, as an error, what has died and what to do ``then``, and end this process."""

    def end(reason: str) -> None:
        tell(f"error: {reason}; {then}")
        end_process()

    return end


def end_process(code: int = 2) -> None:
    """End this process, whose main thread waits for a Ray that has died, after what it has started of that Ray.

    Ray itself would end it soon, without a word. Its temporary folders are deleted.
    """
    guards.dismiss()
    remove_temporary_folders()
    kill_started_ray()
    os._exit(code)
