"""A store that several tests change, each its own copy."""

from __future__ import annotations

import shutil
from pathlib import Path

from dmlstudy.registry import artifact_places
from dmlstudy.store import Store


def copied(root: Path, to: Path) -> Store:
    """A copy of a store, which looks for its artifacts in its own folder."""
    shutil.copytree(root, to)
    store = Store(to)
    assert artifact_places.relocate(store) == root
    return store
