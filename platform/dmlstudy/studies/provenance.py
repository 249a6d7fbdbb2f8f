"""Where a study's numbers come from, as it is kept with its runs: its data, its folds, its cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ray
import yaml

from dmlstudy.data import ZeroShotData, class_disjoint_folds
from dmlstudy.registry.environment import environment
from dmlstudy.registry.store import StoreError
from dmlstudy.studies.spec import StudySpec

SIDES = {"development_sha256": "development", "test_sha256": "test"}


def origin(spec: StudySpec, dataset: ZeroShotData) -> dict[str, str]:
    """What must be the same in every sitting of a study, or its numbers would not belong together."""
    search = spec.file.search
    return {
        "spec_fingerprint": spec.fingerprint(),
        "objective": spec.file.protocol.objective,
        **({"second_objective": search.second_objective} if search.second_objective else {}),
        "development_sha256": dataset.development.fingerprint(),
        "test_sha256": dataset.test.fingerprint(),
        "num_development_images": str(len(dataset.development)),
        "num_test_images": str(len(dataset.test)),
        "num_shared_images": str(dataset.num_shared_images),
    }


def check_data(name: str, known: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise StoreError where a study that is gone on with would see other images or labels than it has seen."""
    changed = [side for key, side in SIDES.items() if known.get(key, own[key]) != own[key]]
    if changed:
        raise StoreError(
            f"study {name!r}: its {' and '.join(changed)} data have changed since it began; bring them back,"
            " or give this study another name (--name)"
        )


def description(spec: StudySpec, dataset: ZeroShotData) -> dict[str, str]:
    """What is kept once with the study's run: its file, the resolved spaces, the classes of its folds."""
    tree = {name: family.tree() for name, family in spec.families.items()}
    return {
        "study.yaml": yaml.safe_dump(dict(spec.raw), sort_keys=False),
        "search_space.yaml": yaml.safe_dump(tree, sort_keys=False),
        "folds.json": json.dumps(folds(spec, dataset), indent=1),
    }


def folds(spec: StudySpec, dataset: ZeroShotData) -> dict[str, list[list[str]]]:
    """The validation classes of each fold, in the search and with each verdict seed that trains models of folds."""
    protocol = spec.file.protocol
    seeds = {"search": spec.file.search.seed}
    if protocol.fold_models and protocol.num_folds > 1:
        seeds |= {f"verdict seed {seed}": seed for seed in range(1, protocol.verdict_seeds + 1)}
    names, labels_N = dataset.development.class_names, dataset.development.labels_N
    return {
        what: [
            [names[c] for c in fold.validation_classes.tolist()]
            for fold in class_disjoint_folds(labels_N, protocol.num_folds, seed)
        ]
        for what, seed in seeds.items()
    }


def surroundings(spec: StudySpec) -> str:
    """What is kept of each sitting: code, packages, this machine, what a trial takes, the cluster's nodes, as JSON."""
    return json.dumps(
        environment() | {"resources": spec.file.resources.model_dump(), "nodes": _nodes()}, indent=1
    )


def of_each_trial(spec: StudySpec) -> dict[str, str]:
    """Tags of each trial's run: the world size and the kind of device that Ray Train gives its workers."""
    resources = spec.file.resources
    return {"workers": str(resources.workers), "device": "cuda" if resources.gpus_per_worker else "cpu"}


def _nodes() -> list[dict[str, Any]]:
    """The cluster's nodes as a sitting finds them; none where Ray is not connected."""
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
