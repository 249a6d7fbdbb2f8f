"""Trials on one thread; spawned processes find these modules, and the gloo pool, by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.gloo_pool import GlooPool


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    pool = GlooPool(2, tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()
