"""Every call of Ray that is not part of its public interface, as it is in Ray 2.60: the file to look at with a new Ray.

There are three kinds. Some change what Tune does for as long as a study of gangs runs. Some ask what Ray knows of its
cluster and has no public function for. Some start and kill a Ray of this machine alone.

Tune and Train take seconds to import, so they are imported where they are used.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import ray
from ray._private import ray_constants
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.utils import get_num_cpus

# Tune and Train


@contextmanager
def tune_mended() -> Iterator[None]:
    """Let Tune keep every gang, survive an actor that is lost for another reason than its own death, and keep the
    driver's cloud keys to itself.

    Tune's own cache keeps as many actors as trials are waiting at that moment, but one: between generations it would
    end all gangs but one. There are never more of them than trials at once, for an actor that is kept is used before a
    new one is started.
    """
    from ray.air.execution._internal import RayActorManager
    from ray.tune.execution import class_cache, tune_controller
    from ray.tune.utils.object_cache import _ObjectCache

    class AllActors(_ObjectCache):
        """Keeps every actor until the end of the search."""

        def cache_object(self, key: Any, obj: Any) -> bool:
            self._cached_objects[key].append(obj)
            self._num_cached_objects += 1
            return True

        def flush_cached_objects(self, force_all: bool = False) -> Generator[Any, None, None]:
            if force_all:
                yield from super().flush_cached_objects(force_all=True)

    task_failed = RayActorManager._actor_task_failed

    def as_lost_actor(self: Any, tracked_actor_task: Any, exception: Exception) -> None:
        """Take an actor that Ray has killed for memory, or whose node is gone, for a lost one.

        By itself Tune does so for ``RayActorError`` only, and ends the whole study at Ray's other errors.
        """
        known = (ray.exceptions.RayActorError, ray.exceptions.RayTaskError)
        if isinstance(exception, ray.exceptions.RayError) and not isinstance(exception, known):
            reason = f"{type(exception).__name__}: {told_shortly(exception)}"
            exception = ray.exceptions.RayActorError(error_msg=reason)
        task_failed(self, tracked_actor_task, exception)

    told = {name for name in class_cache.ENV_VARS_TO_PROPAGATE if not name.startswith("AWS_")}
    with (
        # Tune's own list puts them into every actor's runtime environment, which Ray writes into a log for all to read.
        patch.object(class_cache, "ENV_VARS_TO_PROPAGATE", told),
        patch.object(tune_controller, "_ObjectCache", AllActors),
        patch.object(RayActorManager, "_actor_task_failed", as_lost_actor),
    ):
        yield


def told_shortly(error: ray.exceptions.RayError) -> str:
    """The line of Ray's message that says why, for such messages begin with ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "memory" in line or "died" in line or "killed" in line]
    return (telling or lines or [type(error).__name__])[-1][:200]


def hand_on_to_train_workers(names: Sequence[str]) -> None:
    """Let Ray Train's processes have these environment variables of the one that starts them."""
    from ray.train.v2._internal import constants

    constants.ENV_VARS_TO_PROPAGATE.update(names)


@functools.cache
def loopback_backend() -> type[Any]:
    """Train's backend of torch for workers that listen on loopback only.

    Ray's own meets at a TCP store, which torch lets listen on every address; this one meets at a file.
    """
    from ray.train.torch.config import (
        _set_torch_distributed_env_vars,
        _setup_torch_process_group,
        _TorchBackend,
    )

    class LoopbackBackend(_TorchBackend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            self._folder = tempfile.mkdtemp(prefix=f"dmlstudy-meeting-{os.getpid()}-")  # see cleanup.py
            worker_group.execute(_set_torch_distributed_env_vars)
            worker_group.execute(_use_loopback)
            ray.get(
                [
                    worker_group.execute_single_async(
                        rank,
                        _setup_torch_process_group,
                        backend=backend_config.backend,
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

    return LoopbackBackend


def _use_loopback() -> None:
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


# What Ray knows


def free_of_each_node() -> list[dict[str, float]]:
    """Free resources of each node of the connected cluster."""
    return list(ray._private.state.available_resources_per_node().values())  # type: ignore[no-untyped-call]


def autoscaler_config() -> Any:
    """The connected cluster's ``ClusterConfig``, or None where it has no autoscaler."""
    return ray._private.state.state.get_cluster_config()


def cpus_of_this_machine() -> float:
    """CPUs as Ray would count them, a container's limit included."""
    return float(get_num_cpus(override_docker_cpu_warning=True))


def gpus_of_this_machine() -> tuple[int, str | None]:
    """GPUs as Ray would count them, and their kind."""
    of_gpus = get_accelerator_manager_for_resource("GPU")
    assert of_gpus is not None
    num_gpus = of_gpus.get_current_node_num_accelerators()
    return num_gpus, of_gpus.get_current_node_accelerator_type() if num_gpus else None


# How it is started and ended


def on_loopback_only() -> AbstractContextManager[Any]:
    """In its block a Ray that is started has loopback for its node's address: it is to be no part of a cluster."""
    return patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False)


@contextmanager
def sigterm_heard_as_before() -> Iterator[None]:
    """In its block a Ray may be connected to, and whoever heard SIGTERM still does.

    Ray takes SIGTERM for itself, and ends the process without a line. Where nobody heard it before, Ray may.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # what Ray makes of a SIGTERM
        if callable(before):
            before(signal.SIGTERM, None)
        raise
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def enable_token() -> None:
    """Let Ray's calls carry this user's token where there is one, as ``ray start`` itself does."""
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def raylet_connection() -> socket.socket | None:
    """An idle connection of its own to the connected driver's raylet, which ends when the raylet does.

    None where there is no raylet to connect to.
    """
    node: Any = ray._private.worker._global_node
    if node is None or not node.raylet_socket_name:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(node.raylet_socket_name)
    except OSError:
        connection.close()
        return None
    return connection


def kill_started_ray() -> None:
    """Kill the Ray processes that this one has started, if any, without asking them."""
    node: Any = ray._private.worker._global_node
    if node is not None:
        with suppress(Exception):
            node.kill_all_processes(check_alive=False, allow_graceful=False)
