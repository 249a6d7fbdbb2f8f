"""The retention data of a study: checked before anything starts, told, and kept with its runs."""

from __future__ import annotations

from pathlib import PurePath

from dmlstudy import data
from dmlstudy.data import ImageSet, ZeroShotData, known_classes
from dmlstudy.data.images import num_shared
from dmlstudy.spec.retention import KEY
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.training import dataset_cache
from dmlstudy.training.interface import TrialData
from dmlstudy.training.tasks import retention_checks


def loaded(spec: StudySpec) -> ZeroShotData | None:
    """The retention data, read once; None where the study has none. Raises SpecError for data that cannot be read."""
    written, config = spec.file.protocol.retention, spec.retention
    if written is None or config is None:
        return None
    try:
        return dataset_cache.retention(config)
    except ValueError as error:
        where = "" if "does not exist" not in str(error) else spec.places.looked_in(f"{KEY}.path")
        raise SpecError(f"{written.told(error)}{where}") from None


def check(spec: StudySpec, dataset: TrialData) -> None:
    """Raise SpecError for retention data on which the study's models cannot be scored."""
    found = loaded(spec)
    if found is None:
        return
    assert isinstance(dataset, ZeroShotData)
    try:
        retention_checks.check(found, dataset, KEY)
    except ValueError as error:
        raise SpecError(error) from None


def origin(spec: StudySpec, dataset: TrialData) -> dict[str, str]:
    """Facts on the retention data that must be the same in every session; none where there are none."""
    found = loaded(spec)
    if found is None:
        return {}
    test = found.test
    facts = {
        "retention": called(spec),
        "retention_sha256": found.test_fingerprint,
        "num_retention_images": str(len(test)),
        "num_retention_queries": str(len(test) if found.test_query is None else len(found.test_query)),
        "num_retention_classes": str(len(set(test.labels_N.tolist()))),
    }
    return facts | ({"retention_seen": words} if (words := seen(found, dataset)) else {})


def lines(spec: StudySpec, dataset: TrialData) -> list[str]:
    """Lines for people on the retention data, and on what of them the study's models are trained on."""
    found = loaded(spec)
    if found is None:
        return []
    num_classes = len(set(found.test.labels_N.tolist()))
    told = [f"retention: {called(spec)}, {len(found.test)} images of {num_classes} test classes"]
    words = seen(found, dataset)
    return told + ([f"note: {KEY}: {words}"] if words else [])


def files_digest(spec: StudySpec) -> str:
    """A digest of the retention data's files, by which workers see whether their node has the same; empty without."""
    found = loaded(spec)
    if found is None or spec.retention is None:
        return ""
    return data.files_digest(found, spec.retention.path)


def called(spec: StudySpec) -> str:
    """The name of the retention data for people, and the last part of their path."""
    assert spec.retention is not None
    path = spec.retention.path
    return spec.retention.name + (f", {PurePath(path).name}" if path else "")


def seen(retention: ZeroShotData, dataset: TrialData) -> str:
    """A line on test classes and images of the retention data that the study trains or is tested on; empty for most.

    Images are compared where both sets are kept in the same way, decoded or as they are stored.
    """
    assert isinstance(dataset, ZeroShotData)
    parts = []
    for side, does in ((dataset.development, "trains"), (dataset.test, "is tested")):
        is_alike = isinstance(side, ImageSet) == isinstance(retention.test, ImageSet)
        num_images = num_shared(side, retention.test) if is_alike else 0
        images = f"{num_images} of the {len(retention.test)} images" if num_images else ""
        if told := " and ".join(filter(None, [known_classes.in_both(side, retention.test), images])):
            parts.append(f"the study {does} on {told}")
    return "; ".join(parts)
