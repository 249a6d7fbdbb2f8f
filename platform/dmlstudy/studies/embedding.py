"""Embedding by several processes of a cluster: Ray Data hands out the parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmlstudy.records import ResourcesConfig
from dmlstudy.studies.cluster import connected
from dmlstudy.use.embedding import Job, Runner


class _Maker:
    """One process: opens the model once, and makes the parts it is given; says why of one that it cannot make.

    What is wrong with an item goes back as text, for Ray would wrap an error in pages of its own.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, batch: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
        (number,) = batch["part"]
        try:
            self._job.make(int(number))
        except ValueError as error:
            return {"part": batch["part"], "refused": np.array([str(error)])}
        return {"part": batch["part"], "refused": np.array([""])}


def on_cluster(address: str | None, resources: ResourcesConfig) -> Runner:
    """Parts made by ``resources.workers`` processes of the cluster at ``address``, or of a Ray started here.

    The model's folder, the items and the output's folder must be on a file system that all nodes see.
    Raises ClusterError where no cluster answers, or where it cannot hold the processes, and ValueError as ``Job.make``.
    """

    def run(job: Job, numbers: Sequence[int]) -> Iterable[int]:
        if not numbers:
            return
        yield from _handed_out(dataclasses.replace(job), numbers)  # a copy without an opened model

    def _handed_out(job: Job, numbers: Sequence[int]) -> Iterator[int]:
        import ray.data

        with connected(address, resources):
            ray.data.DataContext.get_current().enable_progress_bars = False
            parts = ray.data.from_items(
                [{"part": number} for number in numbers], override_num_blocks=len(numbers)
            )
            made = parts.map_batches(
                _Maker,
                fn_constructor_args=(job,),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=min(resources.workers, len(numbers))),
                num_cpus=resources.cpus_per_worker,
                num_gpus=resources.gpus_per_worker,
            )
            for row in made.iter_rows():
                if row["refused"]:
                    raise ValueError(row["refused"])
                yield int(row["part"])

    return run
