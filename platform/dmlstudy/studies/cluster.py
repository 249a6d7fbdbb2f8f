"""The Ray cluster a study runs on: connect to it, and count how many trials it can hold at once."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from unittest.mock import patch

import psutil
import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from dmlstudy.records import ResourcesConfig


class ClusterError(ValueError):
    """No Ray at the address, or too little in it for a single trial; one line with the mend."""


@contextmanager
def connected(address: str | None, resources: ResourcesConfig) -> Iterator[None]:
    """Connect to the cluster at ``address``, or start Ray here, until the end of the block.

    A Ray started here listens on loopback only. ``auto`` is the cluster whose job this process is, or else the one
    that Ray finds. Raises ClusterError where none answers, or where it can never hold one trial.
    """
    own = own_address() if address == "auto" else None
    address = own or address
    if address not in (None, "auto"):
        assert address is not None
        _knock(address)
    if address is not None:
        present_token()
    told = ExitStack()
    try:
        if own is not None:
            told.enter_context(variables({"RAY_ADDRESS": own}))  # Ray may have told this job another's
            if own.startswith("127."):
                # Ray would look for it at the machine's own address.
                told.enter_context(patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False))
        if address is None:
            # The State API frees the placement group of a gang that died. Its processes would look for it,
            # and give up where several Rays run on this machine; they inherit where it is.
            port = _free_port()
            told.enter_context(variables({"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}"}))
            # The node's address is loopback where Ray thinks that there is no cluster to be part of.
            with patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False):
                ray.init(
                    address="local",
                    include_dashboard=True,
                    dashboard_host="127.0.0.1",
                    dashboard_port=port,
                    log_to_driver=True,
                    logging_level=logging.WARNING,
                )
        else:
            ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
    except Exception as error:  # of a dashboard that does not start, Ray raises just that
        told.close()
        raise unreachable(address or "this machine", error) from None
    try:
        check_capacity(resources)
        yield
    finally:
        ray.shutdown()
        told.close()


def own_address() -> str | None:
    """The address of the cluster whose job this process is, or None where it is no job's.

    A job's process descends from the raylet of its node, which was told where its cluster is. What Ray tells the job
    itself (RAY_ADDRESS) is the address of any cluster on the machine where there are several.
    """
    try:
        ancestors = psutil.Process().parents()
    except psutil.Error:
        return None
    for ancestor in ancestors:
        with suppress(psutil.Error):
            for argument in ancestor.cmdline():
                flag, _, address = argument.partition("=")
                if flag == "--gcs-address" and address:
                    return address
    return None


@contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """This process's environment with these variables (None: without) until the end of the block."""
    before = {name: os.environ.get(name) for name in values}
    _set_variables(values)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def unreachable(address: str, error: Exception) -> ClusterError:
    """What to say where Ray at the address did not take us."""
    if isinstance(error, ray.exceptions.AuthenticationError) or "authentication token" in str(error).lower():
        return ClusterError(
            f"the Ray cluster at {address} asks for a token, and yours is missing or another:"
            " put the cluster's into ~/.ray/auth_token (chmod 600) or RAY_AUTH_TOKEN"
        )
    return ClusterError(f"no Ray cluster at {address}: {first_line(error)}")


def first_line(error: Exception) -> str:
    """An error's message, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def present_token() -> None:
    """Speak to existing clusters with this user's Ray token where there is one, as ``ray start`` itself does."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _knock(address: str) -> None:
    """Raise ClusterError where nothing listens, for Ray itself would wait for it for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdigit():
        raise ClusterError(
            f"--address {address}: expected HOST:PORT of the cluster's head (as 10.0.0.1:6379) or auto;"
            " from another machine send the study with `dmlstudy submit`"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(f"no Ray cluster at {address}: {error.strerror or error}") from None


def concurrency(resources: ResourcesConfig) -> int:
    """How many trials run at once: as many as the cluster can hold, or fewer if the study says so.

    Tune reserves nothing for the workers of a trial, so this bound is what keeps trials from waiting for
    each other's placement groups. A cluster that scales counts at its largest, or it would never scale.
    """
    at_once = num_workers_held(resources, _nodes_at_most(resources)) // resources.workers
    return max(1, min(at_once, resources.max_concurrent_trials or at_once))


def num_workers_held(resources: ResourcesConfig, nodes: list[dict[str, float]]) -> int:
    """How many workers fit on nodes with these resources; a worker never spans two nodes."""
    held = 0
    for node in nodes:
        room = [_room(node.get("CPU", 0.0), resources.cpus_per_worker)]
        if resources.gpus_per_worker:
            room.append(_room(node.get("GPU", 0.0), resources.gpus_per_worker))
        held += min(room)
    return held


def check_capacity(resources: ResourcesConfig) -> None:
    """Raise ClusterError where the cluster can never hold one trial; one that scales up is believed."""
    check_room(resources, _nodes_at_most(resources))


def check_room(resources: ResourcesConfig, nodes: list[dict[str, float]]) -> None:
    """Raise ClusterError where nodes with these resources never hold the workers of one trial."""
    held = num_workers_held(resources, nodes)
    if held < resources.workers:
        cpus, gpus = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
        mend = (
            f"set resources.workers to at most {held} or ask less per worker"
            if held
            else "ask less per worker"
        )
        raise ClusterError(
            f"resources.workers: {resources.workers} workers with {resources.cpus_per_worker:g} CPU"
            f" and {resources.gpus_per_worker:g} GPU each, but the cluster ({cpus:g} CPU, {gpus:g} GPU)"
            f" holds {held}; {mend}"
        )


def busy(resources: ResourcesConfig) -> str:
    """What to tell people where the cluster's free places hold no trial at this moment, or nothing."""
    free = ray._private.state.available_resources_per_node().values()  # type: ignore[no-untyped-call]
    if num_workers_held(resources, list(free)) >= resources.workers:
        return ""
    cpus, gpus = (sum(node.get(kind, 0.0) for node in free) for kind in ("CPU", "GPU"))
    return (
        f"the cluster is busy or still growing ({cpus:g} CPU and {gpus:g} GPU are free now): trials wait for room,"
        f" up to resources.start_limit_s = {resources.start_limit_s:g} s"
    )


def _nodes_at_most(resources: ResourcesConfig) -> list[dict[str, float]]:
    """The nodes there are, or what the autoscaler may start (Ray tells only its sum), if that holds more."""
    ceiling = ray._private.state.state.get_max_resources_from_cluster_config() or {}
    at_most = [{kind: float(amount) for kind, amount in ceiling.items()}]
    return max(_nodes(), at_most, key=lambda nodes: num_workers_held(resources, nodes))


def num_gpus() -> int:
    """GPUs of the connected cluster, at its largest."""
    ceiling = ray._private.state.state.get_max_resources_from_cluster_config() or {}
    present = sum(node.get("GPU", 0.0) for node in _nodes())
    return int(max(present, float(ceiling.get("GPU", 0.0))))


def _nodes() -> list[dict[str, float]]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"]]


def _room(there: float, each: float) -> int:
    return math.floor(there / each + 1e-9)
