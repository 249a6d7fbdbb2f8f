"""Ray Train as gangs and the self-check use it: one run of a loop on the workers of a trial."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import (
    _set_torch_distributed_env_vars,
    _setup_torch_process_group,
    _TorchBackend,
)
from ray.train.v2._internal import constants

from dmlstudy.records import ResourcesConfig
from dmlstudy.studies.cluster import variables

HEALTH_CHECK_INTERVAL_S = 0.2
"""Train notices starts and ends of workers only then."""


def fit(
    loop: Callable[[dict[str, Any]], None],
    loop_config: dict[str, Any],
    resources: ResourcesConfig,
    *,
    name: str,
    storage: str,
) -> None:
    """Run the loop once, on the workers of one trial; nothing is tried again. Raises what Ray Train raises.

    The helper that frees the workers' placement group when their controller is gone asks Ray's State API, and that
    asks whichever cluster it finds on the machine first. Where there are several, another than ours: which does not
    know the controller, so that the helper takes it for dead and takes the workers' places away as they train.
    So each of the run's processes is told which cluster is its own; this one forgets it when the run is over.
    """
    address = ray.get_runtime_context().gcs_address
    constants.ENV_VARS_TO_PROPAGATE.add("RAY_ADDRESS")
    per_worker: dict[str, float] = {"CPU": resources.cpus_per_worker}
    if resources.gpus_per_worker:
        per_worker["GPU"] = resources.gpus_per_worker
    trainer = TorchTrainer(
        loop,
        train_loop_config=loop_config,
        torch_config=LoopbackConfig() if address.startswith("127.0.0.1:") else TorchConfig(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=resources.workers,
            use_gpu=resources.gpus_per_worker > 0,
            resources_per_worker=per_worker,
        ),
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
    with variables(told):
        trainer.fit()


@dataclass
class LoopbackConfig(TorchConfig):
    """The process group of workers on a Ray that listens on loopback only: it does, too."""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _LoopbackBackend


class _LoopbackBackend(_TorchBackend):
    """Ray's own meets at a TCP store, which torch lets listen on every address; this one meets at a file."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        self._folder = tempfile.mkdtemp(prefix=f"dmlstudy-meeting-{os.getpid()}-")  # see cleanup.py
        worker_group.execute(_set_torch_distributed_env_vars)
        worker_group.execute(_use_loopback)
        has_gpu = worker_group.get_resources_per_worker().get("GPU", 0) > 0
        ray.get(
            [
                worker_group.execute_single_async(
                    rank,
                    _setup_torch_process_group,
                    backend="nccl" if has_gpu else "gloo",
                    world_rank=rank,
                    world_size=len(worker_group),
                    init_method=f"file://{self._folder}/store",
                    timeout_s=backend_config.timeout_s,
                )
                for rank in range(len(worker_group))
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        super().on_shutdown(worker_group, backend_config)
        shutil.rmtree(self._folder, ignore_errors=True)


def _use_loopback() -> None:
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
