"""Durations for people."""

from __future__ import annotations

from collections.abc import Sequence


def duration(seconds: float) -> str:
    """``42 s``, ``3:07 min`` or ``2:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"


def pace(moments: Sequence[float], num_at_once: int, most: int = 30) -> float | None:
    """Seconds from one end of a trial to the next, of the last ends; None where there are too few to say.

    Trials that run at once begin at once, and end in a burst: the first of these bursts, which has paid for the start,
    does not count.
    """
    last = sorted(moments)[-max(most, 2 * num_at_once) :]
    if len(last) < 2 * num_at_once or last[-1] == last[num_at_once - 1]:
        return None
    return (last[-1] - last[num_at_once - 1]) / (len(last) - num_at_once)
