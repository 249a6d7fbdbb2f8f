"""A search's budget in time, wall time and device hours, over all sessions."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that never go back."""

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def seconds_of(text: str) -> float:
    """The seconds of ``90s``, ``30min``, ``1.5h``, ``2d`` or ``1h 30min``; raises ValueError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|s|h|d)", text)
    if not re.fullmatch(r"\s*(\d+(?:\.\d+)?\s*(min|s|h|d)\s*)+", text):
        raise ValueError(f"expected a time such as 90s, 30min, 2h or 1h 30min, got {text!r}")
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if seconds == 0:
        raise ValueError(f"expected a time above zero, got {text!r}")
    return seconds


class TimeBudget:
    """Counts what a search spends, and says which budget it has spent.

    ``devices`` are what one trial occupies while it runs: workers x GPUs, or x CPUs where it has none.
    """

    def __init__(
        self,
        wall_seconds: float | None,
        device_seconds: float | None,
        devices: float,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.wall = self.device = 0.0
        self._most_wall = wall_seconds
        self._most_device = device_seconds
        self._devices = devices
        self._clock = clock
        self._seen: float | None = None

    @property
    def is_limited(self) -> bool:
        return self._most_wall is not None or self._most_device is not None

    def pass_time(self, num_running: int) -> None:
        """Count the time since the last call, in which so many trials were running."""
        now = self._clock()
        if self._seen is not None:
            self.wall += now - self._seen
            self.device += (now - self._seen) * num_running * self._devices
        self._seen = now

    def spent(self) -> str | None:
        """The budget that is spent, in words; None while there is time."""
        if self._most_wall is not None and self.wall >= self._most_wall:
            return "wall_time"
        if self._most_device is not None and self.device >= self._most_device:
            return "device_hours"
        return None
