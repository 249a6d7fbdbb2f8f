"""The actor between a Tune actor and the workers of its gang: commands one way, replies the other.

Metrics travel through it, since ``ray.train.report`` blocks to one report per health check of Ray Train.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, NamedTuple

import ray

REPORTS_AHEAD = 1


class Command(NamedTuple):
    """What the workers are told: run this trial, or go home (``config`` is None)."""

    trial: str
    config: dict[str, Any] | None


class Reply(NamedTuple):
    """What comes back: an epoch's report, the result with the files it left, or the reason of a failure.

    After ``failed`` every rank has left the trial in good order; after ``broken`` the gang is lost.
    """

    kind: Literal["report", "finished", "failed", "broken"]
    metrics: dict[str, float] = {}
    files: dict[str, bytes] = {}
    reason: str = ""


@ray.remote(num_cpus=0)
class Mailbox:
    """Between one Tune actor and its workers; every wait is an await, so no call blocks another."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._posted = asyncio.Condition()
        self._replies: dict[str, asyncio.Queue[Reply]] = {}
        self._cancelled: set[str] = set()

    async def post(self, command: Command) -> None:
        """Tell every rank, in order."""
        async with self._posted:
            self._replies[command.trial] = asyncio.Queue(maxsize=REPORTS_AHEAD)
            self._commands.append(command)
            self._posted.notify_all()

    async def command(self, position: int) -> Command:
        """The command at ``position``, waited for."""
        async with self._posted:
            await self._posted.wait_for(lambda: len(self._commands) > position)
        return self._commands[position]

    async def reply(self, trial: str, reply: Reply) -> bool:
        """Deliver a reply; False if the trial was cancelled. Waits until the one before was read, so that
        training runs at most ``REPORTS_AHEAD`` epochs ahead of the scheduler's decision."""
        while trial not in self._cancelled:
            try:
                await asyncio.wait_for(self._replies[trial].put(reply), timeout=0.05)
                return trial not in self._cancelled
            except TimeoutError:
                continue
        return False

    async def next_reply(self, trial: str) -> Reply:
        """The trial's next reply, waited for."""
        return await self._replies[trial].get()

    async def cancel(self, trial: str) -> None:
        """The trial's replies are no longer wanted; its workers end it at their next report."""
        self._cancelled.add(trial)
