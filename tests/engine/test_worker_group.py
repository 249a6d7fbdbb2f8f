"""What Ray Train is asked for a trial's workers; nothing is started here, and no GPU is asked."""

from __future__ import annotations

from typing import Any

import pytest

from dmlstudy.engine.worker_group import LoopbackConfig, process_group, scaling
from dmlstudy.records import ResourcesConfig


@pytest.mark.parametrize("is_loopback", [True, False])
@pytest.mark.parametrize(
    ("workers", "gpus", "backend"),
    [
        (1, 0, "gloo"),
        (4, 0, "gloo"),
        (1, 0.5, "cpu:gloo,cuda:nccl"),
        (2, 0.5, "gloo"),  # perhaps both on one GPU, which NCCL refuses
        (2, 1, "cpu:gloo,cuda:nccl"),
        (2, 2, "cpu:gloo,cuda:nccl"),
    ],
)
def test_workers_that_may_share_a_gpu_speak_gloo(
    workers: int, gpus: float, backend: str, is_loopback: bool
) -> None:
    group = process_group(ResourcesConfig(workers=workers, gpus_per_worker=gpus), is_loopback=is_loopback)
    assert group.backend == backend
    assert isinstance(group, LoopbackConfig) is is_loopback


@pytest.mark.parametrize("silence", [20, 1800, 0.5])
def test_a_hang_is_the_trials_silence_before_it_is_the_process_groups(silence: float) -> None:
    group = process_group(ResourcesConfig(silence_limit_s=silence), is_loopback=False)
    assert group.timeout_s >= silence + 60


def test_the_kind_of_gpu_and_the_placement_reach_ray_train() -> None:
    given: dict[str, Any] = {"workers": 3, "cpus_per_worker": 2, "gpus_per_worker": 0.5}
    plain = scaling(ResourcesConfig(**given))
    assert plain.as_placement_group_factory().bundles[-1] == {"CPU": 2.0, "GPU": 0.5}
    assert plain.placement_strategy == "PACK"
    packed = scaling(ResourcesConfig(**given, accelerator="A10G", placement="strict_pack"))
    asked = packed.as_placement_group_factory()
    assert asked.bundles[-3:] == [{"CPU": 2.0, "GPU": 0.5, "accelerator_type:A10G": 0.001}] * 3
    assert packed.placement_strategy == "STRICT_PACK"
    assert packed.num_workers == 3
