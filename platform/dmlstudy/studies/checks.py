"""Checks of a study that need the parts it names: data sets, losses, backbones, metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from dmlstudy import data, embedders
from dmlstudy.data import state_file
from dmlstudy.records import TrialConfig
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.text import first_line, nearest
from dmlstudy.training import dataset_cache

StudyData: TypeAlias = data.ZeroShotData | data.ClosedSet
"""Of a study that trains embedders, and of one of another task."""

PROBE = ".probe"
"""The folder of a file that is kept to see whether one can be; no trial's has this name."""


def check_parts(spec: StudySpec) -> StudyData:
    """Check everything that can be before a cluster is started, and return the data; raises SpecError.

    Every family is built at its default point and at each bound of its space, so that no trial fails later
    for a value the file allows.
    """
    dataset_cache.forget()  # files may have changed since they were read last
    task, protocol = spec.task, spec.file.protocol
    _check_objective(protocol.objective, task.metrics(protocol))
    for name, family in spec.families.items():
        for values in spec.corners(family):
            key = f"families.{name}"
            with _refused():
                task.check(spec.trial_config(family, values, path=key), key)
    dataset = _loaded(spec)
    if isinstance(dataset, data.ZeroShotData):
        _check_class_folds(spec, dataset)
    else:
        with _refused():
            data.row_folds(len(dataset.development), protocol.num_folds, spec.file.search.seed)
    return dataset


def _check_class_folds(spec: StudySpec, dataset: data.ZeroShotData) -> None:
    """Raise SpecError where folds of classes leave too little to learn from, or to be judged by."""
    num_folds = spec.file.protocol.num_folds
    counts = _check_classes(dataset, num_folds)
    folds = data.class_disjoint_folds(dataset.development.labels_N, num_folds, spec.file.search.seed)
    with _refused():
        data.check_hits(dataset, folds)
    num_classes = min(len(fold.train_classes) for fold in folds)
    num_images = min(len(fold.train_indices) for fold in folds)
    counts += f", of which a fold holds {max(len(fold.validation_classes) for fold in folds)} out"
    for name, family in spec.families.items():
        for values in spec.corners(family):
            config = spec.trial_config(family, values)
            _check_batch(config, num_classes, num_images, name, counts)
            _check_input(config, dataset)


def _loaded(spec: StudySpec) -> StudyData:
    try:
        return spec.task.dataset(spec.data)
    except ValueError as error:
        where = "" if "does not exist" not in str(error) else spec.places.looked_in("data.path")
        raise SpecError(f"{error}{where}") from None


@contextmanager
def _refused() -> Iterator[None]:
    """Turn a ValueError of the block into a SpecError."""
    try:
        yield
    except ValueError as error:
        raise SpecError(error) from None


LEAST_CLASSES = 4
"""Classes that development needs: two are trained on, two held out."""


def _check_classes(dataset: data.ZeroShotData, num_folds: int) -> str:
    own, test = (len(set(side.labels_N.tolist())) for side in (dataset.development, dataset.test))
    return check_class_counts(own, test, num_folds)


def check_class_counts(own: int, test: int, num_folds: int) -> str:
    """The division of ``own + test`` classes in words; raises SpecError if they are too few for so many folds."""
    counts = f"of {own + test} classes {test} are kept for the test and {own} are to learn from"
    if own < LEAST_CLASSES or test < 2:
        raise SpecError(
            f"data.path: {counts}, which must be at least 2 and {LEAST_CLASSES}, as scores are of classes that are held"
            f" out; add classes, {2 * LEAST_CLASSES - 1} in all where half are kept for the test"
        )
    if num_folds > own // 2:
        raise SpecError(
            f"protocol.num_folds: {num_folds} folds need {2 * num_folds} classes, two to be held out by each, and"
            f" {counts}; set protocol.num_folds to at most {own // 2}, or add classes"
        )
    return counts


def _check_objective(objective: str, known: Sequence[str]) -> None:
    if objective not in known:
        raise SpecError(f"protocol.objective: no metric {objective!r}{nearest(objective, known)}")


def check_storage(spec: StudySpec) -> None:
    """Keep a file where the study's trials will keep theirs, read it and remove it; raises SpecError."""
    root = spec.file.resources.storage_path
    if root is None:
        return
    probe = state_file.at(state_file.join(root, spec.name, PROBE))
    try:
        probe.write(b"probe")
        with probe.local_copy() as copy:
            copy.read_bytes()
        probe.remove()
    except OSError as error:
        said, _, _ = str(error.strerror or error).partition(
            " (Request ID"
        )  # a cloud's, of a hundred characters
        reason = first_line(said.strip() or error)
        raise SpecError(
            f"resources.storage_path: {root} cannot be written and read ({reason}); make the folder or bucket, give"
            " this machine and all nodes the right to it, or name another"
        ) from None


def _check_input(config: TrialConfig, dataset: data.ZeroShotData) -> None:
    with _refused():
        embedders.check_input(
            config.embedder.backbone, takes_vectors=len(dataset.development.image_shape) == 1
        )


def _check_batch(config: TrialConfig, num_classes: int, num_images: int, family: str, counts: str) -> None:
    batch = config.batch
    classes = num_classes if batch.classes == "all" else batch.classes
    if batch.draw == "random":
        if classes * batch.images_per_class > num_images:
            raise SpecError(
                f"families.{family}.batch: up to {classes} x {batch.images_per_class} images per batch, but a fold"
                f" trains on {num_images}; set batch.classes or batch.images_per_class lower"
            )
    elif classes > num_classes:
        raise SpecError(
            f"families.{family}.batch.classes: up to {classes} classes per batch, but a fold trains on"
            f" {num_classes} ({counts}); set batch.classes to at most {num_classes} or to all"
        )
