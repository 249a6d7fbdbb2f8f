"""A stopped study, to be resumed: its file as given, and the place of its run."""

from __future__ import annotations

import os

from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.spec.study_paths import Places
from dmlstudy.store import Store, StoreError, spec_of
from dmlstudy.studies.status import named, served


def resume(store: Store, study: str | None) -> tuple[StudySpec, Store]:
    """The study as it was given, and the store with its MLflow server, to resume it.

    Its relative paths lead where they led when it was started. Raises StoreError where it is running, and SpecError
    where its file names others that are not there any more.
    """
    name = named(store, study)
    state = store.read_state(name)
    if state["state"] == "running":
        raise StoreError(
            f"study {name!r} is running on {state['host']}; see `{store.command('status', name)}`"
        )
    # Where its relative paths were looked for; a store of an earlier version has the current folder alone.
    folders = state.get("folders") or [state.get("cwd", os.getcwd())]
    return study_file.parse({**spec_of(store, name, state), "name": name}, Places(*folders)), served(
        store, state
    )
