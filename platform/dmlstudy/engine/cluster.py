"""The Ray cluster a study runs on: connect to it, and count how many trials it can hold at once."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil
import ray

from dmlstudy.engine import ray_private
from dmlstudy.engine.progress import error_output
from dmlstudy.engine.start_guard import guards
from dmlstudy.records import ResourcesConfig
from dmlstudy.text import REASON, first_line, one_line

Node = dict[str, float]
"""A node's resources, as Ray counts them."""
ACCELERATOR = "accelerator_type:"
"""The resource of which Ray gives a node one of its kind of GPU."""
WITHOUT_LIMIT = 1000
"""Nodes that count of a kind of which the autoscaler may start any number."""


class ClusterError(ValueError):
    """No Ray at the address, or too little in it for a single trial; one line with the fix."""


@contextmanager
def connected(
    address: str | None, resources: ResourcesConfig, note: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Connect to the cluster at ``address``, or start Ray here, until the end of the block.

    A Ray started here listens on loopback only. ``auto`` is the cluster whose job this process is, or else the one
    that Ray finds. ``note`` is called as soon as there is a connection, whose end is then on purpose.

    Raises ClusterError where none answers, or where it can never hold one trial.
    """
    own = own_address() if address == "auto" else None
    address = own or address
    if address not in (None, "auto"):
        assert address is not None
        _knock(address)
    if address is not None:
        present_token()
    with ExitStack() as told:
        if own is not None:
            told.enter_context(variables({"RAY_ADDRESS": own}))  # Ray may have told this job another's
        try:
            with guards.beside(place_of(address), error_output()), ray_private.sigterm_heard_as_before():
                if address is None:
                    # The State API frees the placement group of a gang that died. Its processes would look for it,
                    # and give up where several Rays run on this machine; they inherit where it is.
                    port = _free_port()
                    told.enter_context(variables({"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}"}))
                    with ray_private.on_loopback_only():
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
            raise (_not_started(error) if address is None else unreachable(address, error)) from None
        except BaseException:  # an interruption
            ray.shutdown()
            raise
        told.callback(ray.shutdown)
        note()
        check_capacity(resources)
        yield


def place_of(address: str | None) -> str:
    """The Ray at the address, as messages call it."""
    if address is None:
        return "Ray on this machine"
    return "the Ray cluster of this node" if address == "auto" else f"the Ray cluster at {address}"


def own_address() -> str | None:
    """The address of the cluster whose job this process is, or None where it is no job's.

    A job's process descends from the raylet of its node, which was told where its cluster is. RAY_ADDRESS, which
    Ray gives the job itself, may be that of any of several clusters on the machine.
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
    """The message for a Ray at the address that did not accept us."""
    if isinstance(error, ray.exceptions.AuthenticationError) or "authentication token" in str(error).lower():
        return ClusterError(
            f"the Ray cluster at {address} asks for a token, and yours is missing or another:"
            " put the cluster's into ~/.ray/auth_token (chmod 600) or RAY_AUTH_TOKEN"
        )
    return ClusterError(f"no Ray cluster at {address}: {first_line(error)}")


def _not_started(error: Exception) -> ClusterError:
    """The message for a Ray that did not start here. Where Ray quotes a log, its last line is the reason."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    told = [first_line(error)] + ([one_line(lines[-1], REASON)] if len(lines) > 1 else [])
    return ClusterError(f"Ray did not start on this machine: {' … '.join(told)}")


def present_token() -> None:
    """Speak to existing clusters with this user's Ray token where there is one, as ``ray start`` itself does."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray_private.enable_token()


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
    """Number of trials that run at once: as many as the cluster can hold, or fewer if the study says so.

    Tune reserves nothing for the workers of a trial, so this bound is what keeps trials from waiting for
    each other's placement groups. A cluster that scales counts at its largest, or it would never scale.
    """
    at_once = num_trials_held(resources, _nodes_at_most(resources))
    return max(1, min(at_once, resources.max_concurrent_trials or at_once))


def num_trials_held(resources: ResourcesConfig, nodes: list[Node]) -> int:
    """Number of trials that fit on nodes with these resources at once; one of ``strict_pack`` never spans two nodes."""
    if resources.placement == "strict_pack":
        return sum(_num_held(resources, node) // resources.workers for node in nodes)
    return num_workers_held(resources, nodes) // resources.workers


def num_workers_held(resources: ResourcesConfig, nodes: list[Node]) -> int:
    """Number of workers that fit on nodes with these resources.

    A worker never spans two nodes, and one that takes a part of a GPU never two GPUs.
    """
    return sum(_num_held(resources, node) for node in nodes)


def _num_held(resources: ResourcesConfig, node: Node) -> int:
    if resources.accelerator and not node.get(f"{ACCELERATOR}{resources.accelerator}"):
        return 0
    room = _room(node.get("CPU", 0.0), resources.cpus_per_worker)
    each = resources.gpus_per_worker
    if not each:
        return room
    there = node.get("GPU", 0.0)
    if each >= 1:
        return min(room, _room(there, each))
    whole = _room(there, 1)
    return min(room, whole * _room(1, each) + _room(there - whole, each))


def check_capacity(resources: ResourcesConfig) -> None:
    """Raise ClusterError where the cluster can never hold one trial; one that scales up is believed."""
    check_room(resources, _nodes_at_most(resources))


def check_room(resources: ResourcesConfig, nodes: list[Node]) -> None:
    """Raise ClusterError where nodes with these resources never hold the workers of one trial."""
    if num_trials_held(resources, nodes):
        return
    kinds = sorted({kind.removeprefix(ACCELERATOR) for node in nodes for kind in node if ACCELERATOR in kind})
    if resources.accelerator and resources.accelerator not in kinds:
        there = f"has {' and '.join(kinds)}" if kinds else "names none"
        raise ClusterError(
            f"resources.accelerator: no node with {resources.accelerator}, the cluster {there}; name one that is there"
        )
    held = num_workers_held(resources, nodes)
    where = "the cluster"
    if resources.placement == "strict_pack":
        held = max((_num_held(resources, node) for node in nodes), default=0)
        where = "no node of the cluster"
    mend = (
        f"set resources.workers to at most {held} or ask less per worker" if held else "ask less per worker"
    )
    if resources.placement == "strict_pack" and num_workers_held(resources, nodes) >= resources.workers:
        mend += ", or set resources.placement: pack"
    kind = f" on {resources.accelerator}" if resources.accelerator else ""
    raise ClusterError(
        f"resources.workers: {resources.workers} workers with {resources.cpus_per_worker:g} CPU"
        f" and {resources.gpus_per_worker:g} GPU each{kind}, but {where} ({_told(nodes)}) holds"
        f" {'them' if where.startswith('no') else held}; {mend}"
    )


def this_machine() -> Node:
    """This machine's resources as Ray would count them, a container's limit included; no Ray is started for it."""
    num_gpus, kind = ray_private.gpus_of_this_machine()
    here: Node = {"CPU": ray_private.cpus_of_this_machine(), "GPU": float(num_gpus)}
    if num_gpus:
        here[f"{ACCELERATOR}{kind}"] = 1.0
    return here


def busy(resources: ResourcesConfig) -> str:
    """A note for people if the cluster's free places hold no trial at this moment, else empty."""
    free = ray_private.free_of_each_node()
    if num_trials_held(resources, free):
        return ""
    cpus, gpus = _sum(free, "CPU"), _sum(free, "GPU")
    return (
        f"the cluster is busy or still growing ({cpus:g} CPU and {gpus:g} GPU are free now): trials wait for room,"
        f" up to resources.start_limit_s = {resources.start_limit_s:g} s"
    )


def idle_gpus(resources: ResourcesConfig) -> str:
    """A note for people whose cluster has GPUs that their trials do not use, else empty."""
    gpus = _sum(_nodes_at_most(resources), "GPU")
    if resources.gpus_per_worker or not gpus:
        return ""
    return f"trials train on CPUs: resources.gpus_per_worker is 0, and the cluster has {gpus:g} GPU"


def num_gpus() -> int:
    """GPUs of the connected cluster, at its largest."""
    return int(max(_sum(_nodes(), "GPU"), _sum(_ceiling(), "GPU")))


def _nodes_at_most(resources: ResourcesConfig) -> list[Node]:
    """The nodes there are, or those that the autoscaler may start, if they hold more."""
    return max(
        _nodes(),
        _ceiling(),
        key=lambda nodes: (num_trials_held(resources, nodes), num_workers_held(resources, nodes)),
    )


def _ceiling() -> list[Node]:
    """The nodes that the autoscaler may start; none where there is no autoscaler."""
    config = ray_private.autoscaler_config()
    return [] if config is None else nodes_at_most(config)


def nodes_at_most(config: Any) -> list[Node]:
    """The nodes of an autoscaler's configuration (Ray's ``ClusterConfig``): of each kind its maximum.

    The limits on the whole cluster's resources hold, too. A kind without a maximum counts ``WITHOUT_LIMIT`` times.
    """
    left = {kind: float(limit) for kind, limit in config.max_resources.items()}
    nodes: list[Node] = []
    for group in config.node_group_configs:
        node = {kind: float(amount) for kind, amount in group.resources.items()}
        for _ in range(WITHOUT_LIMIT if group.max_count == -1 else group.max_count):
            if any(amount > left.get(kind, math.inf) for kind, amount in node.items()):
                break
            left = {kind: limit - node.get(kind, 0.0) for kind, limit in left.items()}
            nodes.append(node)
    return nodes


def _nodes() -> list[Node]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"]]


def _told(nodes: list[Node]) -> str:
    return f"{_sum(nodes, 'CPU'):g} CPU, {_sum(nodes, 'GPU'):g} GPU"


def _sum(nodes: list[Node], kind: str) -> float:
    return sum(node.get(kind, 0.0) for node in nodes)


def _room(there: float, each: float) -> int:
    return math.floor(there / each + 1e-9)


def described_nodes() -> list[dict[str, Any]]:
    """The cluster's nodes as a session finds them; none where Ray is not connected."""
    if not ray.is_initialized():
        return []
    return [
        {
            "cpus": node["Resources"].get("CPU", 0.0),
            "gpus": node["Resources"].get("GPU", 0.0),
            "memory_gib": round(node["Resources"].get("memory", 0.0) / 2**30, 1),
            "accelerators": [
                name.partition(":")[2] for name in node["Resources"] if name.startswith("accelerator_type:")
            ],
        }
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
