"""Embedding by several processes of a cluster: Ray Data hands out the parts."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from dmlstudy.engine import cluster
from dmlstudy.engine.cluster import ClusterError, connected
from dmlstudy.engine.cluster_watch import ClusterWatch, told_at_last
from dmlstudy.records import ResourcesConfig
from dmlstudy.serving.embed import EmbedJob, Runner

AGAIN = "run the same again, which goes on from its parts"

logger = logging.getLogger(__name__)


class _Maker:
    """One process: opens the model once, and makes the parts it is given; says why of one that it cannot make.

    What is wrong with an item goes back as text, for Ray would wrap an error in pages of its own.
    """

    def __init__(self, job: EmbedJob) -> None:
        self._job = job

    def __call__(self, batch: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
        (number,) = batch["part"]
        try:
            list(self._job.make([int(number)]))
        except ValueError as error:
            return {"part": batch["part"], "refused": np.array([str(error)])}
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            return {"part": batch["part"], "refused": np.array([f"{place}{error.strerror or error}"])}
        return {"part": batch["part"], "refused": np.array([""])}


@contextmanager
def quiet_engine() -> Iterator[None]:
    """Send what Ray prints to a temporary file until the end of the block; it stays where Ray breaks."""
    from dmlstudy.engine.progress import engine_noise_to

    descriptor, name = tempfile.mkstemp(prefix="dmlstudy-embed-", suffix=".log")
    os.close(descriptor)
    try:
        with engine_noise_to(Path(name)):
            yield
    except (ClusterError, ray.exceptions.RayError):
        raise
    except BaseException:
        Path(name).unlink()
        raise
    Path(name).unlink()


def on_cluster(
    address: str | None, resources: ResourcesConfig, tell: Callable[[str], None] = logger.error
) -> Runner:
    """Parts made by ``resources.workers`` processes of the cluster at ``address``, or of a Ray started here.

    Each has its own GPU where the job's device is 'cuda', or 'auto' and the cluster has GPUs; else none has one. The
    model's folder, the items and the output's folder must be on a file system that all nodes see.

    Raises ClusterError where no cluster answers, where it cannot hold the processes and where it dies, and ValueError
    as ``EmbedJob.make``. If a dead cluster does not release this process, ``tell`` reports it and the process ends.
    """

    def run(job: EmbedJob, numbers: Sequence[int]) -> Iterable[int]:
        if not numbers:
            return
        yield from _handed_out(job, numbers)

    def _handed_out(job: EmbedJob, numbers: Sequence[int]) -> Iterator[int]:
        import ray.data

        with (
            ClusterWatch(address, told_at_last(tell, AGAIN)) as watch,
            connected(address, resources, watch.note_connected),
            watch.told_if_dead(AGAIN),
        ):
            device, own = placed(job.device, resources)
            ray.data.DataContext.get_current().enable_progress_bars = False
            parts = ray.data.from_items(
                [{"part": number} for number in numbers], override_num_blocks=len(numbers)
            )
            made = parts.map_batches(
                _Maker,
                # A copy without an opened model.
                fn_constructor_args=(dataclasses.replace(job, device=device),),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=min(own.workers, len(numbers))),
                num_cpus=own.cpus_per_worker,
                num_gpus=own.gpus_per_worker,
            )
            for row in made.iter_rows():
                if row["refused"]:
                    raise ValueError(row["refused"])
                yield int(row["part"])

    return run


def placed(device: str, resources: ResourcesConfig) -> tuple[str, ResourcesConfig]:
    """The device of each process and what it reserves: with 'auto' a GPU each where the connected cluster has any.

    A process that reserves none computes on CPUs, for Ray does not hide a GPU from it. Raises ClusterError where there
    are fewer GPUs than processes.
    """
    num_gpus = cluster.num_gpus()
    if device == "cpu" or (device == "auto" and not num_gpus):
        return "cpu", resources.model_copy(update={"gpus_per_worker": 0})
    own = resources.model_copy(update={"gpus_per_worker": 1})
    try:
        cluster.check_capacity(own)
    except ClusterError:
        raise ClusterError(
            f"--workers {own.workers}: each takes a GPU and {own.cpus_per_worker:g} CPU, of which the cluster has"
            f" {num_gpus} GPU; set --workers lower, or --device cpu"
        ) from None
    return "cuda", own
