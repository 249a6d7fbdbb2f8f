"""Durations for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``42 s``, ``3:07 min`` or ``2:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"
