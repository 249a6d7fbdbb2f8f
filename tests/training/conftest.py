"""Trials on one thread; spawned processes find these modules, and the gloo pool, by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from gloo_pool import GlooPool

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "distributed"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    from gloo_pool import GlooPool

    pool = GlooPool(2, tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()
