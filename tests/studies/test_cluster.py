"""How many workers a cluster holds, and the error where it holds too few for one trial."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from dmlstudy.records import ResourcesConfig
from dmlstudy.studies.cluster import ClusterError, check_room, num_workers_held

Nodes = list[dict[str, float]]


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


def test_cluster_yaml_is_one_that_ray_accepts() -> None:
    """Ray's own validator takes the file, and refuses it with a key it does not know."""
    path = Path(__file__).resolve().parents[2] / "cluster.yaml"
    config = yaml.safe_load(path.read_text())
    validate_config(prepare_config(dict(config)))
    with pytest.raises(jsonschema.ValidationError, match="bogus"):
        validate_config(prepare_config({**config, "bogus": 1}))
