"""Embed images or vectors into one Parquet file: part by part, on any number of processes, going on after a stop.

Beside the file ``out.parquet`` its parts are kept in ``out.parquet.parts`` until they are all there.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmlstudy import data
from dmlstudy.data import Fit, Inputs
from dmlstudy.registry import kinds

PART = 4096
"""Items of a part: what is read and embedded between two files, and lost at most by a stop."""

Runner = Callable[["Job", Sequence[int]], Iterable[int]]
"""Makes the parts of these numbers, in any order, and tells of each that is there."""


@dataclass(frozen=True)
class Job:
    """A model's folder, what it is to embed, and where to; each process opens it for itself."""

    model: str
    inputs: str
    output: str
    batch_size: int = 256
    device: str = "auto"

    @property
    def parts(self) -> Path:
        """The folder of the parts."""
        return Path(f"{self.output}.parts")

    def part(self, number: int) -> Path:
        return self.parts / f"{number:06}.parquet"

    @functools.cached_property
    def items(self) -> Inputs:
        """What is to be embedded. Raises ValueError naming what is missing or of another kind than the model takes."""
        return opened(self.model, self.inputs)

    @functools.cached_property
    def compute(self) -> Callable[[NDArray[Any]], NDArray[Any]]:
        """The model."""
        return kinds.verified(self.model, device=self.device, batch_size=self.batch_size)

    def make(self, number: int) -> int:
        """Write a part, whole or not at all; its number."""
        rows = range(number * PART, min((number + 1) * PART, len(self.items)))
        batches = [
            self.compute(self.items.read(range(start, min(start + self.batch_size, rows.stop))))
            for start in range(rows.start, rows.stop, self.batch_size)
        ]
        ids, labels = self.items.ids[rows.start : rows.stop], self.items.labels
        data.write_embeddings(
            self.part(number),
            ids,
            None if labels is None else labels[rows.start : rows.stop],
            np.concatenate(batches),
        )
        return number


def one_by_one(job: Job, numbers: Sequence[int]) -> Iterator[int]:
    """In this process."""
    for number in numbers:
        yield job.make(number)


def opened(model: str | Path, inputs: str | Path) -> Inputs:
    """Items as the model takes them: seen as its training images were, or vectors of its size.

    Raises ValueError naming what is missing, or of another kind.
    """
    takes, fit = kinds.takes(model), fit_of(model)
    if fit is None:
        return data.open_vectors(inputs, takes.num_features)
    return data.open_images(inputs, fit, takes.channels)


def fit_of(model: str | Path) -> Fit | None:
    """How pictures become the model's images, as in its training; None for a model of vectors."""
    takes = kinds.takes(model)
    if takes.image_size is None:
        return None
    trained_on = kinds.extra(model).get("config", {}).get("data", {})
    return Fit(takes.image_size, trained_on.get("resize_to"), trained_on.get("keep_aspect", True))


def embed_into(
    job: Job,
    run: Runner = one_by_one,
    follow: Callable[[Iterable[int], int], Iterable[int]] = lambda each, _: each,
) -> tuple[int, int]:
    """Embed all items; the number of rows of ``job.output`` and the size of an embedding.

    Parts that an earlier call has left are not made again, if it was of the same model and items. ``follow`` is given
    the numbers of parts as they come to be, and how many there will be, to show progress. Raises ValueError naming what
    is missing, unreadable or of another kind, for an output that may not be written (``data.check_output``), and where
    the parts of something else are in the way; the output is replaced when all is done, or not at all.
    """
    output = data.check_output(job.output, "a Parquet file", data.PARQUET)
    num_items = len(job.items)
    numbers = range(-(-num_items // PART))
    _claim(job)
    missing = [number for number in numbers if not job.part(number).is_file()]
    for _ in follow(run(job, missing), len(missing)):
        pass
    origin = {"model": kinds.fingerprint(job.model), "source": job.inputs}
    dim = data.join_embeddings([job.part(number) for number in numbers], output, origin)
    shutil.rmtree(job.parts)
    return num_items, dim


def _claim(job: Job) -> None:
    """Make the folder of the parts, or take over what a broken-off call of the same job has left there."""
    about = {
        "model": kinds.fingerprint(job.model),
        "inputs": job.inputs,
        "items": job.items.fingerprint,
        "part": PART,
    }
    noted = job.parts / "job.json"
    if noted.is_file():
        if json.loads(noted.read_text()) != about:
            raise ValueError(
                f"{job.parts}: holds parts of another model or other items; remove it, or name another output"
            )
        return
    job.parts.mkdir(exist_ok=True)
    noted.write_text(json.dumps(about))
