"""One MLflow store for all tests of this folder: making its database takes seconds."""

from __future__ import annotations

import pytest

from dmlstudy.registry import connection
from dmlstudy.store import Store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("registry") / "store")
    made.prepare()
    connection.connect(made, create=True)
    return made
