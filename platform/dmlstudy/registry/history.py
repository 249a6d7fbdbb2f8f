"""A study in MLflow beside its scores: its texts, the times of its trials, its models; and its page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException

from dmlstudy.files import temporary_folder
from dmlstudy.records import Record
from dmlstudy.registry import connection, tracking
from dmlstudy.registry.runs import TRIALS, Run, StudyRuns
from dmlstudy.store import Store, StoreError
from dmlstudy.text import first_line

PAGE = "report.html"
"""The artifact of a study's run that is its page."""


class History(Record):
    """The tags of a study's run, its texts by file name, and its trials' runs, oldest first."""

    tags: dict[str, str]
    texts: dict[str, str]
    runs: list[Run]


def history(store: Store, study: str) -> History:
    """Read what is kept of a study; raises StoreError where there is no such study."""
    client = connection.connect(store)
    found = StudyRuns(client, tracking.experiment_of(client, store, study))
    runs = [run for run in found.every() if run.kind in TRIALS]
    return History(tags=found.study.tags, texts=_texts(client, found.study.id), runs=runs)


@contextmanager
def model_of(store: Store, study: str, family: str, seed: int) -> Iterator[Path]:
    """A copy, for the time being, of the model that a verdict trial has left. Raises StoreError where there is none."""
    client = connection.connect(store)
    runs = StudyRuns(client, tracking.experiment_of(client, store, study))
    own = [run for run in runs.judged(family) if run.seed == seed]
    if not own:
        raise StoreError(f"{family} was not judged with seed {seed} yet")
    with temporary_folder() as scratch:
        try:
            folder = tracking.fetch_model(client, own[-1].id, Path(scratch))
        except (MlflowException, OSError, ValueError) as error:
            raise StoreError(f"the model of {family} is not kept any more ({first_line(error)})") from None
        yield folder


def keep_page(store: Store, study: str, text: str) -> None:
    """Keep a study's page with its run, in place of an earlier one. Raises StoreError where it is not taken."""
    client = connection.connect(store)
    run_id = StudyRuns(client, tracking.experiment_of(client, store, study)).study.id
    try:
        client.log_text(run_id, text, PAGE)
    except (MlflowException, OSError) as error:
        raise StoreError(
            f"the MLflow store {store.tracking_uri} did not take {PAGE} ({first_line(error)})"
        ) from None


def _texts(client: Any, run_id: str) -> dict[str, str]:
    """The study's own texts; what is lost of them is left out."""
    try:
        names = [file.path for file in client.list_artifacts(run_id)]
        with temporary_folder() as scratch:
            return {
                name: Path(client.download_artifacts(run_id, name, scratch)).read_text(encoding="utf-8")
                for name in names
                if name.endswith((".yaml", ".json"))
            }
    except (MlflowException, OSError):
        return {}
