"""A study of the store that began when a default was another: it goes on with that, and its plan is still its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmlstudy.spec import study_file
from dmlstudy.store import Store, StoreError
from dmlstudy.studies import run

RAW: dict[str, Any] = {"name": "old", "data": {"name": "digits"}, "families": {"a": {"space": "triplet"}}}


THEN = [
    ({"sampler": "tpe"}, "search.sampler: tpe"),
    ({"sampler": "tpe", "scheduler": "halving"}, "search.sampler: tpe and search.scheduler: halving"),
]
"""What was the default once, and what is told of it."""


def store_with(begun: dict[str, Any], folder: Path) -> Store:
    """With a study that began by these values, which its file does not name."""
    made = Store(folder / "store")
    fingerprint = study_file.parse({**RAW, "search": begun}).fingerprint()
    made.write_state("old", "interrupted", fingerprint=fingerprint, spec=RAW)
    return made


@pytest.mark.parametrize(("begun", "values"), THEN)
def test_it_goes_on_as_it_began_and_says_so(begun: dict[str, Any], values: str, tmp_path: Path) -> None:
    store, told = store_with(begun, tmp_path), list[str]()
    found = run._as_begun(study_file.parse(RAW), store, told.append)
    assert {key: getattr(found.file.search, key) for key in begun} == begun
    assert not run._is_finished(found, store)
    assert told == [f"{values}, by default when this study began; for a new one it would be otherwise"]


@pytest.mark.parametrize(("begun", "values"), THEN)
def test_another_study_is_still_another(begun: dict[str, Any], values: str, tmp_path: Path) -> None:
    store, told = store_with(begun, tmp_path), list[str]()
    for search in ({"scheduler": "median"}, {"sampler": "cma"}, {"seed": 1}):
        found = run._as_begun(study_file.parse({**RAW, "search": search}), store, told.append)
        with pytest.raises(StoreError, match="from another study file"):
            run._is_finished(found, store)
    new = study_file.parse({**RAW, "name": "new"})
    assert run._as_begun(new, store, told.append) is new
    assert told == []
