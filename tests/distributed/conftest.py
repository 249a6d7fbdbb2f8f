"""One pool of gloo processes for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes find these modules by name

from support.gloo_pool import GlooPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    pool = GlooPool(4, tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()
