"""How many workers a cluster holds, the error where it holds too few, and the files that describe clusters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import psutil
import pytest
import ray
import torch
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _get_ray_resources_from_group_spec
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.core.generated.autoscaler_pb2 import ClusterConfig

from dmlstudy.engine import cluster, ray_private
from dmlstudy.engine.cluster import (
    ClusterError,
    check_capacity,
    check_room,
    concurrency,
    connected,
    idle_gpus,
    nodes_at_most,
    num_trials_held,
    num_workers_held,
    own_address,
    unreachable,
    variables,
)
from dmlstudy.records import ResourcesConfig
from dmlstudy.spec.study_file import StudyFile
from dmlstudy.studies.wall_time import room, this_machine

ROOT = Path(__file__).resolve().parents[2]
Nodes = list[dict[str, float]]

RAY_JOB_FIELDS = {
    "activeDeadlineSeconds",
    "backoffLimit",
    "entrypoint",
    "jobId",
    "metadata",
    "rayClusterSpec",
    "runtimeEnvYAML",
    "shutdownAfterJobFinishes",
    "submissionMode",
    "submitterConfig",
    "submitterPodTemplate",
    "suspend",
    "ttlSecondsAfterFinished",
}
RAY_CLUSTER_FIELDS = {
    "authOptions",
    "autoscalerOptions",
    "enableInTreeAutoscaling",
    "headGroupSpec",
    "rayVersion",
    "workerGroupSpecs",
}
WORKER_GROUP_FIELDS = {
    "groupName",
    "idleTimeoutSeconds",
    "maxReplicas",
    "minReplicas",
    "numOfHosts",
    "rayStartParams",
    "replicas",
    "template",
}


@pytest.mark.parametrize(
    ("cpus", "gpus", "nodes", "held"),
    [
        (1, 0, [{"CPU": 4.0}], 4),
        (1, 0, [], 0),
        (1, 0, [{"memory": 1e9}], 0),
        (2, 0, [{"CPU": 5.0}], 2),
        (0.5, 0, [{"CPU": 3.0}], 6),
        (0.1, 0, [{"CPU": 0.3}], 3),  # 0.3 / 0.1 is 2.9999999999999996
        (1 / 3, 0, [{"CPU": 1.0}], 3),
        (1, 0, [{"CPU": 0.99}], 0),
        (2, 0, [{"CPU": 3.0}, {"CPU": 3.0}], 2),  # 6 CPUs, but a worker never spans two nodes
        (4, 0, [{"CPU": 3.0}, {"CPU": 3.0}], 0),
        (1, 0, [{"CPU": 2.0}, {"CPU": 0.0}, {"CPU": 1.0}], 3),
        (1, 1, [{"CPU": 8.0, "GPU": 2.0}], 2),
        (4, 1, [{"CPU": 8.0, "GPU": 8.0}], 2),
        (1, 0.5, [{"CPU": 8.0, "GPU": 1.0}], 2),
        (1, 0.25, [{"CPU": 2.0, "GPU": 1.0}], 2),
        (1, 1, [{"CPU": 8.0}, {"CPU": 1.0, "GPU": 4.0}], 1),  # CPUs here and GPUs there do not make a worker
        (1, 2, [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0}], 0),
        (1, 0, [{"CPU": 8.0, "GPU": 0.0}], 8),
        (1, 0.3, [{"CPU": 64.0, "GPU": 4.0}], 12),  # three on each GPU, not 13 on all four
        (1, 0.6, [{"CPU": 64.0, "GPU": 4.0}], 4),
        (1, 0.5, [{"CPU": 64.0, "GPU": 1.5}], 3),  # what is free of two GPUs, one of which is half taken
        (1, 3, [{"CPU": 64.0, "GPU": 4.0}] * 8, 8),
        (1, 8, [{"CPU": 64.0, "GPU": 4.0}] * 8, 0),
    ],
)
def test_num_workers_held(cpus: float, gpus: float, nodes: Nodes, held: int) -> None:
    resources = ResourcesConfig(workers=1, cpus_per_worker=cpus, gpus_per_worker=gpus)
    assert num_workers_held(resources, nodes) == held


MIXED: Nodes = [
    {"CPU": 16.0, "GPU": 4.0, "accelerator_type:A10G": 1.0},
    {"CPU": 16.0, "GPU": 2.0, "accelerator_type:H100": 1.0},
    {"CPU": 16.0},
]


@pytest.mark.parametrize(("accelerator", "held"), [(None, 6), ("A10G", 4), ("H100", 2), ("L4", 0)])
def test_only_nodes_with_the_kind_of_gpu_count(accelerator: str | None, held: int) -> None:
    assert num_workers_held(ResourcesConfig(gpus_per_worker=1, accelerator=accelerator), MIXED) == held


@pytest.mark.parametrize(
    ("workers", "placement", "held"),
    [(2, "pack", 3), (2, "strict_pack", 3), (3, "pack", 2), (3, "strict_pack", 1), (5, "strict_pack", 0)],
)
def test_a_trial_that_is_packed_strictly_never_spans_nodes(workers: int, placement: Any, held: int) -> None:
    resources = ResourcesConfig(workers=workers, gpus_per_worker=1, placement=placement)
    assert num_trials_held(resources, MIXED) == held


def test_a_kind_of_gpu_that_is_not_there_and_a_node_too_small_are_said() -> None:
    with pytest.raises(ClusterError) as caught:
        check_room(ResourcesConfig(gpus_per_worker=1, accelerator="L4"), MIXED)
    assert str(caught.value) == (
        "resources.accelerator: no node with L4, the cluster has A10G and H100; name one that is there"
    )
    with pytest.raises(ClusterError, match="no node with L4, the cluster names none"):
        check_room(ResourcesConfig(gpus_per_worker=1, accelerator="L4"), [{"CPU": 8.0, "GPU": 1.0}])
    with pytest.raises(ClusterError) as caught:
        check_room(ResourcesConfig(workers=5, gpus_per_worker=1, placement="strict_pack"), MIXED)
    assert str(caught.value) == (
        "resources.workers: 5 workers with 1 CPU and 1 GPU each, but no node of the cluster (48 CPU, 6 GPU) holds"
        " them; set resources.workers to at most 4 or ask less per worker, or set resources.placement: pack"
    )


def of_autoscaler(*groups: tuple[int, dict[str, float]], **limits: float) -> ClusterConfig:
    """What the autoscaler tells Ray: of each kind of node the most there may be, and what it has."""
    config = ClusterConfig(max_resources={kind: int(limit) for kind, limit in limits.items()})
    for at_most, resources in groups:
        group = config.node_group_configs.add(max_count=at_most)
        for kind, amount in resources.items():
            group.resources[kind] = int(amount)
    return config


def test_an_autoscalers_nodes_are_not_one_great_node() -> None:
    gpu_node = {"CPU": 48, "GPU": 4}
    nodes = nodes_at_most(of_autoscaler((8, gpu_node), (1, {"CPU": 0})))
    assert nodes == [gpu_node] * 8 + [{"CPU": 0}]
    for gpus, held in ((3, 8), (4, 8), (8, 0)):
        assert num_workers_held(ResourcesConfig(gpus_per_worker=gpus), nodes) == held
    assert len(nodes_at_most(of_autoscaler((8, gpu_node), CPU=100))) == 2, "the cluster's own limit"
    assert len(nodes_at_most(of_autoscaler((-1, gpu_node)))) == 1000, "as many as one likes"


@pytest.mark.parametrize(
    ("gpus", "told"),
    [(0, "trials train on CPUs: resources.gpus_per_worker is 0, and the cluster has 6 GPU"), (0.5, "")],
)
def test_gpus_that_are_not_used_are_told(gpus: float, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.state.state", SimpleNamespace(get_cluster_config=lambda: None))
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": node} for node in MIXED])
    assert idle_gpus(ResourcesConfig(gpus_per_worker=gpus)) == told


@pytest.mark.parametrize(
    ("resources", "gpus", "told"),
    [
        ({"workers": 1}, 0, ""),
        ({"workers": 1, "gpus_per_worker": 1}, 1, ""),
        ({"workers": 1, "gpus_per_worker": 1, "accelerator": "A10G"}, 1, ""),
        ({"workers": 1, "gpus_per_worker": 1, "accelerator": "H100"}, 1, "4 CPU and 1 GPU"),
        ({"workers": 1, "gpus_per_worker": 1}, 0, "4 CPU and no GPU"),
        ({"workers": 1, "cpus_per_worker": 100}, 0, "4 CPU and no GPU"),
    ],
)
def test_a_machine_that_is_too_small_is_told_without_ray(
    resources: dict[str, Any], gpus: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SimpleNamespace(
        get_current_node_num_accelerators=lambda: gpus, get_current_node_accelerator_type=lambda: "A10G"
    )
    monkeypatch.setattr(ray_private, "get_accelerator_manager_for_resource", lambda kind: manager)
    monkeypatch.setattr(ray_private, "get_num_cpus", lambda **_: 4)
    line = room(ResourcesConfig.model_validate(resources), this_machine())
    assert line.startswith(f"this machine ({told}) cannot hold a trial:" if told else "here: ")


@pytest.mark.parametrize(
    ("workers", "cpus", "gpus", "nodes"),
    [
        (4, 1, 0, [{"CPU": 4.0}]),
        (4, 1, 0, [{"CPU": 2.0}, {"CPU": 2.0}]),
        (2, 0.5, 0, [{"CPU": 1.0}]),
        (2, 1, 1, [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]),
    ],
)
def test_enough_room_is_accepted(workers: int, cpus: float, gpus: float, nodes: Nodes) -> None:
    check_room(ResourcesConfig(workers=workers, cpus_per_worker=cpus, gpus_per_worker=gpus), nodes)


@pytest.mark.parametrize(
    ("workers", "cpus", "gpus", "nodes", "message"),
    [
        (
            8,
            1,
            0,
            [{"CPU": 2.0}, {"CPU": 1.0}],
            "resources.workers: 8 workers with 1 CPU and 0 GPU each, but the cluster (3 CPU, 0 GPU) holds 3;"
            " set resources.workers to at most 3 or ask less per worker",
        ),
        (
            1,
            4,
            0,
            [{"CPU": 3.0}, {"CPU": 3.0}],
            "resources.workers: 1 workers with 4 CPU and 0 GPU each, but the cluster (6 CPU, 0 GPU) holds 0;"
            " ask less per worker",
        ),
        (
            2,
            0.5,
            1,
            [{"CPU": 8.0, "GPU": 1.0}],
            "resources.workers: 2 workers with 0.5 CPU and 1 GPU each, but the cluster (8 CPU, 1 GPU)"
            " holds 1; set resources.workers to at most 1 or ask less per worker",
        ),
    ],
)
def test_too_little_room_is_named_with_the_mend(
    workers: int, cpus: float, gpus: float, nodes: Nodes, message: str
) -> None:
    resources = ResourcesConfig(workers=workers, cpus_per_worker=cpus, gpus_per_worker=gpus)
    with pytest.raises(ClusterError) as caught:
        check_room(resources, nodes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("workers", "at_most", "nodes", "ceiling", "at_once"),
    [
        (2, None, [{"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}], {}, 1),  # a trial may span nodes
        (1, None, [{"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}], {}, 3),
        (1, 2, [{"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}], {}, 2),
        (2, None, [{"CPU": 0.0}], {"CPU": 8}, 8),  # nothing there yet: as far as it may scale
        (
            2,
            None,
            [{"CPU": 0.0}, {"CPU": 8.0}, {"CPU": 8.0}],
            {"CPU": 8},
            8,
        ),  # there already: not counted twice
    ],
)
def test_trials_at_once(
    workers: int,
    at_most: int | None,
    nodes: Nodes,
    ceiling: dict[str, int],
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = of_autoscaler((2, dict(ceiling))) if ceiling else None
    state = SimpleNamespace(get_cluster_config=lambda: config)
    monkeypatch.setattr("ray._private.state.state", state)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": node} for node in nodes])
    resources = ResourcesConfig(workers=workers, max_concurrent_trials=at_most)
    check_capacity(resources)
    assert concurrency(resources) == at_once


def test_a_missing_token_is_named() -> None:
    error = unreachable("http://10.0.0.1:8265", ray.exceptions.AuthenticationError("401"))
    assert "asks for a token" in str(error)
    assert str(unreachable("h:1", OSError("down\nmore"))) == "no Ray cluster at h:1: down"


def test_cluster_yaml_is_one_that_ray_accepts() -> None:
    """Ray's own validator takes the file, and refuses it with a key it does not know."""
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    validate_config(prepare_config(dict(config)))
    with pytest.raises(jsonschema.ValidationError, match="bogus"):
        validate_config(prepare_config({**config, "bogus": 1}))


def cluster_yaml() -> tuple[str, dict[str, Any]]:
    text = (ROOT / "cluster.yaml").read_text()
    return text, prepare_config(yaml.safe_load(text))


def test_cluster_yaml_has_spot_workers_an_on_demand_head_and_this_package() -> None:
    _, config = cluster_yaml()
    head = config["available_node_types"][config["head_node_type"]]
    workers = [
        kind for name, kind in config["available_node_types"].items() if name != config["head_node_type"]
    ]
    assert "InstanceMarketOptions" not in head["node_config"]
    assert head["resources"] == {"CPU": 0}, "the head takes no trials"
    assert workers
    assert all(kind["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"} for kind in workers)
    assert all(kind["min_workers"] < kind["max_workers"] <= config["max_workers"] for kind in workers)
    assert any("pip install" in line and "~/dmlstudy" in line for line in config["setup_commands"])
    assert config["file_mounts"]["~/dmlstudy"] == "."


def test_cluster_yaml_names_its_images_and_says_how_they_are_found() -> None:
    """Ray's own word for an image, latest_dlami, is one of years ago: no Python 3.11, no driver for CUDA 13."""
    text, config = cluster_yaml()
    images = {kind["node_config"]["ImageId"] for kind in config["available_node_types"].values()}
    assert images == {"HEAD_IMAGE", "GPU_IMAGE"}
    said = text[: text.index("cluster_name:")]
    for name in (*images, "NFS_SERVER"):
        assert f"#   {name} " in said, "a name to replace is explained"
    lookups = [line for line in said.splitlines() if "--name /aws/service/" in line]
    assert [line.rpartition("/")[2] for line in lookups] == ["ami-id"] * 2
    assert all("24.04" in line for line in lookups), "whose Python is 3.12"
    assert sum("driver" in line for line in lookups) == 1
    major, _, _ = str(torch.version.cuda).partition(".")
    assert int(major) <= 13, "another CUDA: another driver is to be asked for"
    assert "580 or newer" in said


def test_cluster_yaml_mounts_what_it_calls_shared_and_refuses_what_does_not_fit() -> None:
    text, config = cluster_yaml()
    first = config["initialization_commands"]
    assert any("mount -t nfs4" in line and line.endswith("NFS_SERVER:/ /mnt/studies") for line in first)
    assert any("nfs-common" in line and "python3-venv" in line for line in first)
    assert "--store /mnt/studies" in text
    of_workers = config["worker_setup_commands"]
    assert of_workers[: len(config["setup_commands"])] == config["setup_commands"], "Ray puts them before"
    assert "cuda()" in of_workers[-1]
    for line in (*first, *of_workers, *config["head_setup_commands"]):
        subprocess.run(["bash", "-n", "-c", line], check=True)
    check = next(line for line in config["setup_commands"] if "version_info" in line)
    subprocess.run(["bash", "-c", check.replace("python3", sys.executable)], check=True)


@pytest.mark.long
def test_what_cluster_yaml_says_of_its_workers_is_what_amazon_offers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By moto's copy of Amazon's list of instance types, read as Ray's autoscaler reads it."""
    from moto import mock_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    text, config = cluster_yaml()
    with mock_aws():
        filled = AWSNodeProvider.fillout_available_node_types_resources(config)
    node = filled["available_node_types"]["gpu_spot"]["resources"]
    assert {kind: amount for kind, amount in node.items() if kind != "memory"} == {
        "CPU": 48,
        "GPU": 4,
        "accelerator_type:A10G": 1,
    }
    (said,) = (line for line in text.splitlines() if "accelerator: A10G}" in line)
    resources = ResourcesConfig.model_validate(yaml.safe_load(said[said.index("{") : said.index("}") + 1]))
    assert num_trials_held(resources, [node]) == 4, "as its first lines say"


def pods() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The groups of rayjob.yaml, the head's first, each with its pod."""
    _, job = yaml.safe_load_all((ROOT / "jobs" / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [(group, group["template"]["spec"]) for group in groups]


def test_rayjob_yaml_says_what_kuberay_documents() -> None:
    """The fields of KubeRay's reference, and nothing else; no Kubernetes is asked."""
    study, job = yaml.safe_load_all((ROOT / "jobs" / "rayjob.yaml").read_text())
    StudyFile.model_validate(yaml.safe_load(study["data"]["study.yaml"]))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert set(spec) <= RAY_JOB_FIELDS
    assert spec["entrypoint"].split()[:3] == ["dmlstudy", "run", "/etc/dmlstudy/study.yaml"]
    cluster = spec["rayClusterSpec"]
    assert set(cluster) <= RAY_CLUSTER_FIELDS
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert set(head) <= {"rayStartParams", "template", "serviceType", "headService", "enableIngress"}
    assert set(workers) <= WORKER_GROUP_FIELDS
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert head["rayStartParams"]["num-cpus"] == "0", "the head takes no trials"
    for (_, pod), capacity in zip(pods(), ("on-demand", "spot"), strict=True):
        assert pod["nodeSelector"]["karpenter.sh/capacity-type"] == capacity
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["resources"]["requests"] == container["resources"]["limits"]


def test_rayjobs_pods_may_write_to_the_store() -> None:
    """As the image's user `ray` (1000, group users): a new volume belongs to root."""
    claim = yaml.safe_load((ROOT / "jobs" / "store.yaml").read_text())
    assert (claim["kind"], claim["spec"]["accessModes"]) == ("PersistentVolumeClaim", ["ReadWriteMany"])
    for _, pod in pods():
        assert {key: pod["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {
            "runAsUser": 1000,
            "runAsGroup": 100,
            "fsGroup": 100,
        }
        (store,) = (volume for volume in pod["volumes"] if volume["name"] == "store")
        assert store["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        for container in pod["containers"]:
            assert "/mnt/studies" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_rayjobs_study_is_what_its_gpu_nodes_hold() -> None:
    """What KubeRay's autoscaler makes of a node, and the study's trials on it."""
    _, (workers, pod) = pods()
    study = next(yaml.safe_load_all((ROOT / "jobs" / "rayjob.yaml").read_text()))
    resources = StudyFile.model_validate(yaml.safe_load(study["data"]["study.yaml"])).resources
    assert resources.gpus_per_worker == 1
    node = _get_ray_resources_from_group_spec(workers, is_head=False)
    assert node["accelerator_type:A10G"] == 1
    assert num_trials_held(resources, [dict(node)]) == node["GPU"] == 4
    assert pod["nodeSelector"]["karpenter.k8s.aws/instance-gpu-name"] == "a10g"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert "580 or newer" in (ROOT / "jobs" / "rayjob.yaml").read_text()


class Ancestor:
    """A process as psutil tells of it."""

    def __init__(self, *cmdline: str, gone: bool = False) -> None:
        self._cmdline, self._gone = list(cmdline), gone

    def cmdline(self) -> list[str]:
        if self._gone:
            raise psutil.NoSuchProcess(1)
        return self._cmdline


def test_a_job_finds_the_raylet_that_it_descends_from(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = "--python_worker_command=/usr/bin/python default_worker.py --gcs-address=10.0.0.9:1"
    raylet = Ancestor("/ray/raylet", worker, "--gcs-address=10.0.0.1:6379", "--session-name=x")
    above = [Ancestor("sh", "-c", "dmlstudy"), Ancestor(gone=True), Ancestor("ray::JobSupervisor"), raylet]
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [*above, Ancestor("ray", "start")])
    assert own_address() == "10.0.0.1:6379"
    monkeypatch.setattr(psutil.Process, "parents", lambda self: above[:3])
    assert own_address() is None


@pytest.mark.parametrize("own", ["10.0.0.1:6379", None])
def test_auto_is_the_cluster_of_the_job_whatever_ray_has_told_it(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    monkeypatch.setattr(cluster, "own_address", lambda: own)
    monkeypatch.setattr(cluster, "_knock", lambda address: None)
    monkeypatch.setattr(cluster, "check_capacity", lambda resources: None)
    seen: list[object] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: seen.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with connected("auto", ResourcesConfig()):
        assert seen == [own or "auto"]
        assert os.environ["RAY_ADDRESS"] == (own or "10.0.0.2:6379")
    assert os.environ["RAY_ADDRESS"] == "10.0.0.2:6379"


def test_variables_are_set_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLSTUDY_A", "before")
    monkeypatch.delenv("DMLSTUDY_B", raising=False)
    with variables({"DMLSTUDY_A": None, "DMLSTUDY_B": "within"}):
        assert "DMLSTUDY_A" not in os.environ
        assert os.environ["DMLSTUDY_B"] == "within"
    assert os.environ["DMLSTUDY_A"] == "before"
    assert "DMLSTUDY_B" not in os.environ


def test_a_ray_that_does_not_start_here_is_one_line_and_leaves_no_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the dashboard takes too long, and Ray raises an Exception of its log's last lines.

    The last of them says what was wrong.
    """

    def init(**options: object) -> None:
        assert "RAY_API_SERVER_ADDRESS" in os.environ
        raise Exception("The last 20 lines of dashboard.log:\nINFO one\nINFO two")

    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterError) as caught, connected(None, ResourcesConfig()):
        pytest.fail("there is no Ray")
    assert str(caught.value) == (
        "Ray did not start on this machine: The last 20 lines of dashboard.log: … INFO two"
    )
    assert "RAY_API_SERVER_ADDRESS" not in os.environ


@pytest.mark.parametrize("is_early", [True, False])
def test_sigterm_is_heard_by_whoever_heard_it_before_ray(
    monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """Ray takes the signal for itself as soon as it starts, and ends the process without a line."""

    class Heard(BaseException):
        pass

    def hear(number: int, frame: object) -> None:
        raise Heard

    def send() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)

    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        if is_early:
            send()

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "check_capacity", lambda resources: None)
    before = signal.signal(signal.SIGTERM, hear)
    try:
        with pytest.raises(Heard), connected(None, ResourcesConfig()):
            send()
    finally:
        signal.signal(signal.SIGTERM, before)
