"""One MLflow store for all tests of this folder: making its database takes seconds."""

from __future__ import annotations

import pytest

from dmlstudy.registry import tracking
from dmlstudy.registry.store import Store

MLFLOWS_OWN = (
    "The ``noload`` loader strategy is deprecated",
    ".*Any type hint is inferred as AnyType",
    ".*Add type hints to the `predict` method",
)
"""Warnings that MLflow raises about its own use of other libraries."""


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("registry") / "store")
    made.prepare()
    tracking.connect(made, create=True)
    return made


def pytest_configure(config: pytest.Config) -> None:
    for warning in MLFLOWS_OWN:
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")
