"""The provenance of a study's numbers, kept with its runs: its data, folds and cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from dmlstudy.data import ClosedSet, ZeroShotData, class_disjoint_folds
from dmlstudy.engine.cluster import described_nodes
from dmlstudy.model_folder import MANIFEST
from dmlstudy.registry.environment import commit, environment, source_sha256
from dmlstudy.registry.runs import ALIKE, COST_PER_HOUR, PLAN, REPLICATE_OF
from dmlstudy.registry.tracking import MOST_IN_A_TAG
from dmlstudy.spec import yaml_file
from dmlstudy.spec.study_file import StudySpec
from dmlstudy.store import StoreError
from dmlstudy.studies import retention
from dmlstudy.training.dataset_cache import GREY, PIXELS
from dmlstudy.training.interface import TrialData
from dmlstudy.verdict.sequential import Plan

SIDES = {
    "development_sha256": "development data",
    "test_sha256": "test data",
    "features_sha256": "features",
    "retention_sha256": "retention data",
}


def origin(spec: StudySpec, dataset: TrialData) -> dict[str, str]:
    """Facts that must be the same in every session of a study, or its numbers would not belong together."""
    search, protocol = spec.file.search, spec.file.protocol
    return {
        "spec_fingerprint": spec.fingerprint(),
        "objective": spec.file.protocol.objective,
        **({"second_objective": search.second_objective} if search.second_objective else {}),
        "development_sha256": dataset.development_fingerprint,
        "test_sha256": dataset.test_fingerprint,
        "num_development_images": str(len(dataset.development)),
        "num_test_images": str(len(dataset.test)),
        "num_development_classes": str(len(dataset.development.class_names)),
        "num_test_classes": str(len(dataset.test.class_names)),
        "num_shared_images": str(dataset.num_shared_images),
        "num_shared_between_folds": str(dataset.num_shared_between_folds),
        **_plan(spec),
        **_alike(spec),
        **({REPLICATE_OF: protocol.replicate_of.study} if protocol.replicate_of else {}),
        **_damaged(dataset),
        **_features(spec),
        **retention.origin(spec, dataset),
    }


def _plan(spec: StudySpec) -> dict[str, str]:
    """The rule of the verdict; nothing where all pairs are compared on a fixed number of seeds."""
    plan = Plan.of(spec.file.protocol)
    return {PLAN: plan.model_dump_json()} if plan.is_in_steps or plan.compare != "all" else {}


def _alike(spec: StudySpec) -> dict[str, str]:
    """The points that families take from others; nothing where none does, or where a tag would not hold it."""
    taken = json.dumps({name: f"{each.leader}'s {each.points}" for name, each in spec.likenesses.items()})
    return {ALIKE: taken} if spec.likenesses and len(taken) <= MOST_IN_A_TAG else {}


def _features(spec: StudySpec) -> dict[str, str]:
    """A digest of the saved embedders whose embeddings are the features of codes, if there are any."""
    configs = (
        spec.trial_config(each, values) for each in spec.families.values() for values in spec.corners(each)
    )
    features = {spec.task.features(each) for each in configs}
    folders = sorted(each for each in features if each not in (None, PIXELS, GREY))
    manifests = b"".join(Path(folder, MANIFEST).read_bytes() for folder in folders)
    return {"features_sha256": hashlib.sha256(manifests).hexdigest()} if folders else {}


def _damaged(dataset: TrialData) -> dict[str, str]:
    if isinstance(dataset, ClosedSet) or not dataset.num_damaged:
        return {}
    return {"num_damaged_images": str(dataset.num_damaged)}


def check_data(name: str, known: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise StoreError where a study that is resumed would see other images or labels than it has seen."""
    changed = [side for key, side in SIDES.items() if key in own and known.get(key, own[key]) != own[key]]
    if changed:
        raise StoreError(
            f"study {name!r}: its {' and '.join(changed)} have changed since it began; bring them back,"
            " or give this study another name (--name); if it began before pictures were turned by EXIF and made"
            " opaque, data.orientation: as_stored and data.background: drop read them as then"
        )


def description(spec: StudySpec, dataset: TrialData) -> dict[str, str]:
    """Texts kept once with the study's run: its file, the resolved spaces, the classes of its folds."""
    tree = {name: spec.tree(name) for name in spec.families}
    return {
        "study.yaml": yaml_file.dump(spec.raw),
        "search_space.yaml": yaml_file.dump(tree),
        # Folds of rows, where classes are on both sides, are their seed's.
        **(
            {}
            if isinstance(dataset, ClosedSet)
            else {"folds.json": json.dumps(folds(spec, dataset), indent=1)}
        ),
    }


def folds(spec: StudySpec, dataset: ZeroShotData) -> dict[str, list[list[str]]]:
    """The validation classes of each fold, in the search and with each verdict seed that trains models of folds."""
    protocol = spec.file.protocol
    seeds = {"search": spec.file.search.seed}
    if protocol.fold_models and protocol.num_folds > 1:
        seeds |= {f"verdict seed {seed}": seed for seed in range(1, protocol.most_seeds + 1)}
    names, labels_N = dataset.development.class_names, dataset.development.labels_N
    return {
        what: [
            [names[c] for c in fold.validation_classes.tolist()]
            for fold in class_disjoint_folds(labels_N, protocol.num_folds, seed)
        ]
        for what, seed in seeds.items()
    }


def surroundings(spec: StudySpec) -> str:
    """The environment of a session as JSON: code, packages, this machine, a trial's resources, the cluster's nodes."""
    return json.dumps(
        environment() | {"resources": spec.file.resources.model_dump(), "nodes": described_nodes()}, indent=1
    )


def trial_tags(spec: StudySpec, known: Mapping[str, str]) -> dict[str, str]:
    """Tags of each trial's run: world size, kind of device, an hour's cost, and of the ``origin`` the data's digests.

    ``code_version`` is the commit, or the digest of the sources where that is not known.
    """
    resources = spec.file.resources
    return {
        "workers": str(resources.workers),
        "device": "cuda" if resources.gpus_per_worker else "cpu",
        **({} if resources.cost_per_hour is None else {COST_PER_HOUR: str(resources.cost_per_hour)}),
        **{name: known[name] for name in SIDES if name in known},
        "code_version": commit() or f"sources {source_sha256()}",
    }
