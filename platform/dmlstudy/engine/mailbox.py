"""The actor between a Tune actor and the workers of its gang: commands one way, replies the other.

Metrics travel through it, since ``ray.train.report`` blocks to one report per health check of Ray Train.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal, NamedTuple

import ray

REPORTS_AHEAD = 1
EMBEDDER = "embedder"
"""The folder of a verdict trial's model among its files."""
UNIT_SCORES = "classes.parquet"
"""The file of a verdict trial's scores by class."""
FOLD_SCORES = "validation_classes.parquet"
"""The file of a search trial's scores by class of each fold."""
PAIR_COUNTS = "pairs.parquet"
"""The file of what its thresholds do, class by class, where it has thresholds."""


class Command(NamedTuple):
    """An order to the workers: run this trial, from its checkpoint if there is one and up to the step after which it
    is to pause, or go home (``config`` is None)."""

    trial: str = ""
    config: dict[str, Any] | None = None
    checkpoint: str = ""
    pause_after: int | None = None


GO_HOME = Command()


class Reply(NamedTuple):
    """An answer of the workers: that the trial has begun, an epoch's report, that it has paused, the result with its
    files, or the reason of a failure.

    After ``failed`` every rank has left the trial cleanly; after ``broken``, the trial's own error, ``lost``,
    another rank's end, and ``unfit``, a node that lacks what every trial needs, the gang is of no more use.
    """

    kind: Literal["begun", "report", "paused", "finished", "failed", "broken", "lost", "unfit"]
    metrics: dict[str, float] = {}
    files: dict[str, bytes] = {}
    reason: str = ""
    energy_wh: float | None = None
    """Used by all workers since the reply before; None where one cannot tell, or is gone."""


@ray.remote(num_cpus=0)
class Mailbox:
    """Between one Tune actor and its workers; every wait is an await, so no call blocks another."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._posted = asyncio.Condition()
        self._replies: dict[str, asyncio.Queue[Reply]] = {}
        self._cancelled: set[str] = set()
        self._placement_group: Any = None
        self._resident_mib: dict[int, list[float]] = {}
        self._last_sign = time.monotonic()

    async def enlist(self, placement_group: Any) -> None:
        """The workers are up, in this placement group."""
        self._placement_group = placement_group

    async def placement_group(self) -> Any:
        """The workers' placement group; None before they are up."""
        return self._placement_group

    async def post(self, command: Command) -> None:
        """Tell every rank, in order."""
        async with self._posted:
            self._commands.append(command)
            self._posted.notify_all()

    async def command(self, position: int, rank: int, resident_mib: float) -> Command:
        """The command at ``position``, waited for; the rank says how much memory it holds."""
        if position > 0:  # what a process holds before its first trial says nothing
            first_and_last = self._resident_mib.setdefault(rank, [resident_mib, resident_mib])
            first_and_last[1] = resident_mib
        async with self._posted:
            await self._posted.wait_for(lambda: len(self._commands) > position)
        return self._commands[position]

    async def growth_mib(self) -> float:
        """By how much the workers' memory, summed, has grown since their first trial."""
        return sum(last - first for first, last in self._resident_mib.values())

    async def beat(self) -> None:
        """A worker has come further, with nothing to report yet."""
        self._last_sign = time.monotonic()

    async def silence_s(self) -> float:
        """Seconds since the last sign of life of any worker."""
        return time.monotonic() - self._last_sign

    async def reply(self, trial: str, reply: Reply) -> bool:
        """Deliver a reply; False if the trial was cancelled. Waits until the one before was read, so that
        training runs at most ``REPORTS_AHEAD`` epochs ahead of the scheduler's decision."""
        self._last_sign = time.monotonic()
        while trial not in self._cancelled:
            try:
                await asyncio.wait_for(self._queue(trial).put(reply), timeout=0.05)
                return trial not in self._cancelled
            except TimeoutError:
                continue
        return False

    async def next_reply(self, trial: str) -> Reply:
        """The trial's next reply, waited for; the trial may be posted later."""
        return await self._queue(trial).get()

    async def cancel(self, trial: str) -> None:
        """The trial's replies are no longer wanted; its workers end it at their next report."""
        self._cancelled.add(trial)

    def _queue(self, trial: str) -> asyncio.Queue[Reply]:
        return self._replies.setdefault(trial, asyncio.Queue(maxsize=REPORTS_AHEAD))
