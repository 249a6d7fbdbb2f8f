"""A worker's checks before a trial: the driver's package, the data, the weights and a device on its node.

What is missing is the node's fault and not the configuration's, so no trial fails for it: the study ends with one
line that names the node, and can be resumed once that is fixed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import ray
import torch

from dmlstudy import data
from dmlstudy.records import DataConfig, TrialConfig
from dmlstudy.registry.environment import source_sha256
from dmlstudy.training import dataset_cache
from dmlstudy.training.dataset_cache import GREY, PIXELS
from dmlstudy.training.tasks import TASKS, task_of

COUNTS = {"num_development_images": "development", "num_test_images": "test"}
FILES = "files_digest"
RETENTION_COUNT, RETENTION_FILES = "num_retention_images", "retention_files_digest"
MEND = "give both the same files"


def expectations(origin: Mapping[str, str]) -> dict[str, str]:
    """Facts that each worker is to find on its node, from the study's ``origin`` and ``data.files_digest``."""
    counts = {name: origin[name] for name in (*COUNTS, RETENTION_COUNT) if name in origin}
    node = ray.get_runtime_context().get_node_id()
    files = {name: origin[name] for name in (FILES, RETENTION_FILES) if name in origin}
    return {"node_id": node, "source_sha256": source_sha256(), **counts, **files}


def wrong_with_node(gpus: float, expected: Mapping[str, str]) -> str:
    """A line on what this node lacks for any trial, with its name and the fix; empty if it is fit."""
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
    """A line on a file that a trial names and this node lacks, with the node's name and the fix."""
    for key, path in _files(config).items():
        if not Path(path).exists():
            return f"{here()} has no {path} ({key}); see that it is mounted there"
    return ""


def _files(config: TrialConfig) -> dict[str, str]:
    """Files and folders that the configuration names, by their keys; the name of a hub's weights is not one."""
    weights = config.start.place if config.start and config.start.place else config.embedder.weights
    named = {"data.path": config.data.path, "embedder.weights": weights}
    features = task_of(config).features(config)
    named["features"] = None if features in (PIXELS, GREY) else features
    named["protocol.retention.path"] = None if config.retention is None else config.retention.path
    return {key: path for key, path in named.items() if path is not None and Path(path).is_absolute()}


def differing_data(config: TrialConfig, expected: Mapping[str, str]) -> str:
    """A message, with the node's name and the fix, if this node sees other items than the driver; checked once.

    It reads the data that the trial will use. The trial itself reports a data set that cannot be read.
    """
    if not any(name in expected for name in COUNTS):
        return ""
    known = tuple((name, expected[name]) for name in (*COUNTS, FILES) if name in expected)
    found = _differing(config.data, task_of(config).name, known)
    if found or config.retention is None or config.phase != "verdict":
        return found
    return _differing_retention(
        config.retention, expected.get(RETENTION_COUNT, ""), expected.get(RETENTION_FILES, "")
    )


@functools.lru_cache(maxsize=1)
def _differing(config: DataConfig, task: str, known: tuple[tuple[str, str], ...]) -> str:
    expected = dict(known)
    try:
        dataset = TASKS[task].dataset(config)
    except Exception:
        return ""
    where = config.path or config.name
    for name, side in COUNTS.items():
        found = str(len(getattr(dataset, side)))
        if expected.get(name, found) != found:
            return f"{here()} sees {found} {side} items in {where}, the driver {expected[name]}; {MEND}"
    if FILES in expected and data.files_digest(dataset, config.path) != expected[FILES]:
        return f"{here()} sees as many items in {where} as the driver, but others (by names, labels and sizes); {MEND}"
    return ""


@functools.lru_cache(maxsize=1)
def _differing_retention(config: DataConfig, num_images: str, digest: str) -> str:
    try:
        dataset = dataset_cache.retention(config)
    except Exception:
        return ""
    where = f"{config.path or config.name} (protocol.retention)"
    found = str(len(dataset.test))
    if num_images and found != num_images:
        return f"{here()} sees {found} test items in {where}, the driver {num_images}; {MEND}"
    if digest and data.files_digest(dataset, config.path) != digest:
        return f"{here()} sees as many items in {where} as the driver, but others (by names, labels and sizes); {MEND}"
    return ""


def here() -> str:
    """This node, as people know it."""
    return f"node {ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
