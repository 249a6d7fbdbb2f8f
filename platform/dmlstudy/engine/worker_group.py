"""Ray Train as gangs and the self-check use it: one run of a loop on the workers of a trial."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from dmlstudy.engine import ray_private
from dmlstudy.engine.cluster import variables
from dmlstudy.records import ResourcesConfig

HEALTH_CHECK_INTERVAL_S = 0.2
"""Train notices starts and ends of workers only then."""
HANG_GRACE_S = 60.0
"""For which a collective operation may hang beyond the time in which a trial must report."""

ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""The variable of torch's memory on GPUs."""


def fit(
    loop: Callable[[dict[str, Any]], None],
    loop_config: dict[str, Any],
    resources: ResourcesConfig,
    *,
    name: str,
    storage: str,
) -> None:
    """Run the loop once, on the workers of one trial; nothing is tried again. Raises what Ray Train raises.

    A helper of Ray Train frees the workers' placement group when their controller is gone. It asks Ray's State API,
    which asks the first cluster it finds on the machine. Of several that may be another than ours, which
    does not know the controller: the helper would take it for dead and free the places of working trials.

    So each of the run's processes is given the address of its own cluster; this one forgets it when the run is over.
    """
    address = ray.get_runtime_context().gcs_address
    ray_private.hand_on_to_train_workers(("RAY_ADDRESS", ALLOCATOR))
    trainer = TorchTrainer(
        loop,
        train_loop_config=loop_config,
        torch_config=process_group(resources, is_loopback=address.startswith("127.0.0.1:")),
        scaling_config=scaling(resources),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=ray.train.FailureConfig(
                max_failures=0,
                controller_failure_limit=0,  # type: ignore[call-arg]
                max_preemption_failures=0,
            ),
        ),
    )
    told = {
        "RAY_ADDRESS": address,
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(HEALTH_CHECK_INTERVAL_S),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(resources.start_limit_s),
    }
    if (
        resources.gpus_per_worker
    ):  # trials of many shapes share a process, and would leave its memory in pieces
        told[ALLOCATOR] = os.environ.get(ALLOCATOR, "expandable_segments:True")
    with variables(told):
        trainer.fit()


def scaling(resources: ResourcesConfig) -> ray.train.ScalingConfig:
    """Workers and resources that Ray Train places for one trial."""
    per_worker: dict[str, float] = {"CPU": resources.cpus_per_worker}
    if resources.gpus_per_worker:
        per_worker["GPU"] = resources.gpus_per_worker
    return ray.train.ScalingConfig(
        num_workers=resources.workers,
        use_gpu=resources.gpus_per_worker > 0,
        resources_per_worker=per_worker,
        accelerator_type=resources.accelerator,
        placement_strategy=resources.placement.upper(),
    )


def process_group(resources: ResourcesConfig, *, is_loopback: bool) -> TorchConfig:
    """The backend through which a trial's workers communicate.

    Beside NCCL, gloo carries what lies in the hosts' memory, such as flags, so that no GPU is waited for.

    NCCL refuses two ranks on one GPU, so workers that have a part of one use gloo, which copies through the
    CPU. An operation that hangs is given up later than the trial is (``silence_limit_s``): the reason is then always
    that limit, and not that a worker, which NCCL ends, was lost.
    """
    backend = "cpu:gloo,cuda:nccl" if resources.gpus_per_worker else "gloo"
    if resources.workers > 1 and 0 < resources.gpus_per_worker < 1:
        backend = "gloo"
    timeout_s = math.ceil(resources.silence_limit_s + HANG_GRACE_S)
    kind = LoopbackConfig if is_loopback else TorchConfig
    return kind(backend=backend, timeout_s=timeout_s)


@dataclass
class LoopbackConfig(TorchConfig):
    """The process group of workers on a Ray that listens on loopback only: it does, too."""

    @property
    def backend_cls(self) -> type[Any]:
        return ray_private.loopback_backend()
