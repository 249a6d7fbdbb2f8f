"""Spawned processes find these modules, and the gloo pool, by name."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "distributed"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
