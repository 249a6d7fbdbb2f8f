"""A study of the store that began when a default was another: it goes on with that, and its plan is still its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmlstudy.spec import study_file
from dmlstudy.store import Store, StoreError
from dmlstudy.studies import run

RAW: dict[str, Any] = {"name": "old", "data": {"name": "digits"}, "families": {"a": {"space": "triplet"}}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """With a study that began when trials were stopped by halving, which its file does not name."""
    made = Store(tmp_path / "store")
    begun = study_file.parse({**RAW, "search": {"scheduler": "halving"}})
    made.write_state("old", "interrupted", fingerprint=begun.fingerprint(), spec=RAW)
    return made


def test_it_goes_on_as_it_began_and_says_so(store: Store) -> None:
    told: list[str] = []
    found = run._as_begun(study_file.parse(RAW), store, told.append)
    assert found.file.search.scheduler == "halving"
    assert not run._is_finished(found, store)
    assert told == [
        "search.scheduler: halving, the default when this study began; for a new one it is another"
    ]


def test_another_study_is_still_another(store: Store) -> None:
    told: list[str] = []
    for search in ({"scheduler": "asha"}, {"seed": 1}):
        found = run._as_begun(study_file.parse({**RAW, "search": search}), store, told.append)
        with pytest.raises(StoreError, match="from another study file"):
            run._is_finished(found, store)
    new = study_file.parse({**RAW, "name": "new"})
    assert run._as_begun(new, store, told.append) is new
    assert told == []
