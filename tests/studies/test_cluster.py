"""How many workers a cluster holds, the error where it holds too few, and the files that describe clusters."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import psutil
import pytest
import ray
import yaml
from ray._private import ray_constants
from ray.autoscaler._private.util import prepare_config, validate_config

from dmlstudy.records import ResourcesConfig
from dmlstudy.studies import cluster
from dmlstudy.studies.cluster import (
    ClusterError,
    check_capacity,
    check_room,
    concurrency,
    connected,
    num_workers_held,
    own_address,
    unreachable,
    variables,
)
from dmlstudy.studies.spec import StudyFile

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
    ],
)
def test_num_workers_held(cpus: float, gpus: float, nodes: Nodes, held: int) -> None:
    resources = ResourcesConfig(workers=1, cpus_per_worker=cpus, gpus_per_worker=gpus)
    assert num_workers_held(resources, nodes) == held


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
        (2, None, [{"CPU": 0.0}], {"CPU": 16}, 8),  # nothing there yet: as far as it may scale
        (2, None, [{"CPU": 0.0}, {"CPU": 16.0}], {"CPU": 16}, 8),  # there already: not counted twice
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
    state = SimpleNamespace(get_max_resources_from_cluster_config=lambda: ceiling)
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


def test_cluster_yaml_has_spot_workers_an_on_demand_head_and_this_package() -> None:
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
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
    for group, capacity in ((head, "on-demand"), (workers, "spot")):
        pod = group["template"]["spec"]
        assert pod["nodeSelector"] == {"karpenter.sh/capacity-type": capacity}
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["resources"]["requests"] == container["resources"]["limits"]
    assert int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) > 0


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


@pytest.mark.parametrize("own", ["10.0.0.1:6379", "127.0.0.1:6379", None])
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
        # Ray takes an address on loopback as it is then, and not as the machine's.
        assert ray_constants.ENABLE_RAY_CLUSTER is (own != "127.0.0.1:6379")
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
    """On a busy machine the dashboard takes too long, and Ray raises an Exception of its log's last lines."""

    def init(**options: object) -> None:
        assert "RAY_API_SERVER_ADDRESS" in os.environ
        raise Exception("The last 20 lines of dashboard.log:\nINFO one\nINFO two")

    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterError) as caught, connected(None, ResourcesConfig()):
        pytest.fail("there is no Ray")
    assert str(caught.value) == "no Ray cluster at this machine: The last 20 lines of dashboard.log:"
    assert "RAY_API_SERVER_ADDRESS" not in os.environ
