"""What a worker looks at before a trial: whether its node has the driver's package, the data, the weights and a device.

What is missing is the node's fault and not the configuration's, so no trial fails for it: the study ends with one line
that names the node, and goes on when that is put right.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch

from dmlstudy.records import TrialConfig
from dmlstudy.registry.environment import source_sha256
from dmlstudy.training import dataset_cache
from dmlstudy.training.dataset_cache import GREY, PIXELS

COUNTS = {"num_development_images": "development", "num_test_images": "test"}


def expectations(origin: Mapping[str, str]) -> dict[str, str]:
    """What the driver knows and each worker is to find, from the study's ``origin``."""
    counts = {name: origin[name] for name in COUNTS if name in origin}
    node = ray.get_runtime_context().get_node_id()
    return {"node_id": node, "source_sha256": source_sha256(), **counts}


def wrong_with_node(gpus: float, expected: Mapping[str, str]) -> str:
    """What this node lacks for any trial, with the node's name and the fix; nothing where it is fit."""
    if gpus and not torch.cuda.is_available():
        return (
            f"{here()}: a GPU was asked for, and torch {torch.__version__} (CUDA {torch.version.cuda}) finds no usable"
            " one; see that its driver is installed and new enough (`nvidia-smi` on that node)"
        )
    # On the driver's own node it is the same folder, which someone may be editing.
    is_elsewhere = expected.get("node_id", "") != ray.get_runtime_context().get_node_id()
    digest = expected.get("source_sha256", "")
    if digest and is_elsewhere and (own := source_sha256()) != digest:
        return (
            f"{here()} has another dmlstudy ({own[:12]}) than the driver ({digest[:12]}); install the same version"
            " there, or send the study with `dmlstudy submit`, which takes its code along"
        )
    return ""


def missing_file(config: TrialConfig) -> str:
    """What this node lacks of the files that a trial names, with the node's name and the fix."""
    for key, path in _files(config).items():
        if not Path(path).exists():
            return f"{here()} has no {path} ({key}); see that it is mounted there"
    return ""


def _files(config: TrialConfig) -> dict[str, str]:
    """Files and folders that the configuration names, by their keys; a name of a hub's weights is none."""
    named = {"data.path": config.data.path, "embedder.weights": config.embedder.weights}
    frozen = config.hashing or config.online
    if frozen is not None:
        named["features"] = None if frozen.features in (PIXELS, GREY) else frozen.features
    return {key: path for key, path in named.items() if path is not None and Path(path).is_absolute()}


def differing_data(config: TrialConfig, expected: Mapping[str, str]) -> str:
    """Whether this node sees another number of items than the driver, with the node's name and the fix.

    The data that are read for it are those that the trial will use. A set that cannot be read is the trial's to report.
    """
    if not any(name in expected for name in COUNTS):
        return ""
    is_closed = config.hashing is not None or config.online is not None
    try:
        dataset: Any = (
            dataset_cache.closed(config.data) if is_closed else dataset_cache.zero_shot(config.data)
        )
    except Exception:
        return ""
    for name, side in COUNTS.items():
        found = str(len(getattr(dataset, side)))
        if expected.get(name, found) != found:
            where, known = config.data.path or config.data.name, expected[name]
            return (
                f"{here()} sees {found} {side} items in {where}, the driver {known}; give both the same files"
            )
    return ""


def here() -> str:
    """This node, as people know it."""
    return f"node {ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
