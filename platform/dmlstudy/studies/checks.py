"""Checks of a study that need the parts it names: data sets, losses, backbones, metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from dmlstudy import data, embedders, hashing, online
from dmlstudy.data import state_file
from dmlstudy.losses import catalogue
from dmlstudy.records import AugmentationConfig, TrialConfig
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.text import first_line, nearest, one_line
from dmlstudy.training import dataset_cache

StudyData: TypeAlias = data.ZeroShotData | data.ClosedSet
"""Of a study that trains embedders, and of one of hashing."""

PROBE = ".probe"
"""The folder of a file that is kept to see whether one can be; no trial's has this name."""


def check_parts(spec: StudySpec) -> StudyData:
    """Check everything that can be before a cluster is started, and return the data; raises SpecError.

    Every family is built at its default point and at each bound of its space, so that no trial fails later
    for a value the file allows.
    """
    dataset_cache.forget()  # files may have changed since they were read last
    if spec.kind == "hashing":
        return _check_hashing(spec)
    if spec.kind == "online":
        return _check_online(spec)
    protocol = spec.file.protocol
    known = ["map_at_r", "r_precision", *(f"recall_at_{k}" for k in protocol.recall_at)]
    known += [name for k in protocol.map_at for name in hashing.metrics_at(k)] + ["map"] * protocol.full_map
    _check_objective(protocol.objective, known + [f"macro_{name}" for name in known] * protocol.macro)
    for name, family in spec.families.items():
        for values in spec.corners(family):
            config = spec.trial_config(family, values, path=f"families.{name}")
            _check_embedder(config)
            _check_loss(config, name)
            _check_augmentation(config, name)
            _check_retrieval(config, name)
    dataset = _loaded(spec)
    counts = _check_classes(dataset, protocol.num_folds)
    folds = data.class_disjoint_folds(dataset.development.labels_N, protocol.num_folds, spec.file.search.seed)
    try:
        data.check_hits(dataset, folds)
    except ValueError as error:
        raise SpecError(str(error)) from None
    num_classes = min(len(fold.train_classes) for fold in folds)
    num_images = min(len(fold.train_indices) for fold in folds)
    counts += f", of which a fold holds {max(len(fold.validation_classes) for fold in folds)} out"
    for name, family in spec.families.items():
        for values in spec.corners(family):
            config = spec.trial_config(family, values)
            _check_batch(config, num_classes, num_images, name, counts)
            _check_input(config, dataset)
    return dataset


def _loaded(spec: StudySpec) -> data.ZeroShotData:
    try:
        return dataset_cache.zero_shot(spec.data)
    except ValueError as error:
        where = "" if "does not exist" not in str(error) else spec.places.looked_in("data.path")
        raise SpecError(f"{error}{where}") from None


TOO_LARGE = (MemoryError, OverflowError, RuntimeError)
"""Errors of numbers that ask for more than this machine can hold."""


@contextmanager
def _refused(key: str) -> Iterator[None]:
    """Turn the error of a part that is built in the block into a SpecError."""
    try:
        yield
    except (ValueError, *TOO_LARGE) as error:
        raise SpecError(f"{key}: {_said(error)}") from None


def _said(error: Exception) -> str:
    if isinstance(error, TOO_LARGE):
        return (
            f"cannot be built on this machine ({one_line(error, 160) or 'too large'}); set its numbers lower"
        )
    return str(error)


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


def _check_hashing(spec: StudySpec) -> data.ClosedSet:
    """The same of a study of hashing."""
    protocol = spec.file.protocol
    of_first = [name for k in protocol.map_at for name in hashing.metrics_at(k)]
    _check_objective(protocol.objective, [*hashing.METRICS, *of_first])
    for name, family in spec.families.items():
        for values in spec.corners(family):
            config = spec.trial_config(family, values, path=f"families.{name}")
            codes, term = config.hashing, config.regularizer
            assert codes is not None
            with _refused(f"families.{name}"):
                hashing.build(
                    config.loss.name,
                    codes.num_bits,
                    2,
                    config.loss.params,
                    term=(term.name, term.params) if term else None,
                )
            _check_features(codes.features, f"families.{name}.hashing.features")
    try:
        dataset = dataset_cache.closed(spec.data)
        data.row_folds(len(dataset.development), protocol.num_folds, spec.file.search.seed)
    except ValueError as error:
        raise SpecError(str(error)) from None
    return dataset


def _check_online(spec: StudySpec) -> data.ClosedSet:
    """The same of a study of online learners."""
    protocol = spec.file.protocol
    known = ["accuracy", "macro_f1", "auc", *(f"recall_at_{k}" for k in protocol.recall_at)]
    _check_objective(protocol.objective, known)
    for name, family in spec.families.items():
        for values in spec.corners(family):
            config = spec.trial_config(family, values, path=f"families.{name}")
            stream = config.online
            assert stream is not None
            with _refused(f"families.{name}"):
                learner = online.build(config.loss.name, config.loss.params, num_features=2)
            if config.regularizer is not None:
                raise SpecError(
                    f"families.{name}.regularizer: means nothing to an online learner; leave it out"
                )
            needs = {
                "auc": ("num_pairs", stream.num_pairs > 0),
                "recall": ("measure_recall", stream.measure_recall),
            }
            for metric, (setting, is_set) in needs.items():
                if protocol.objective.startswith(metric) and not is_set:
                    raise SpecError(
                        f"protocol.objective: {protocol.objective} needs online.{setting}; set it"
                    )
            if stream.on_drift == "reopen" and not isinstance(learner, online.CanReopen):
                raise SpecError(
                    f"families.{name}.online.on_drift: {config.loss.name} cannot begin anew; set ignore"
                )
            _check_features(stream.features, f"families.{name}.online.features")
    try:
        dataset = dataset_cache.closed(spec.data)
        if dataset.concepts is not None:
            raise SpecError(
                "data.name: items with several labels have no class to be told; choose another set"
            )
        data.row_folds(len(dataset.development), protocol.num_folds, spec.file.search.seed)
    except ValueError as error:
        raise SpecError(str(error)) from None
    return dataset


def _check_features(features: str, key: str) -> None:
    if features in (dataset_cache.PIXELS, dataset_cache.GREY):
        return
    try:
        embedders.verify(features)
    except (ValueError, OSError) as error:
        raise SpecError(f"{key}: {error}") from None


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
        reason = first_line(error.strerror or error)
        reason = reason.partition(" (Request ID")[0]  # a cloud's, of a hundred characters
        raise SpecError(
            f"resources.storage_path: {root} cannot be written and read ({reason}); make the folder or bucket, give"
            " this machine and all nodes the right to it, or name another"
        ) from None


def _check_embedder(config: TrialConfig) -> None:
    embedder = config.embedder
    try:
        embedders.check_backbone(embedder.backbone, embedder.weights, embedder.fusion)
    except ValueError as error:
        raise SpecError(str(error)) from None


def _check_input(config: TrialConfig, dataset: data.ZeroShotData) -> None:
    try:
        embedders.check_input(
            config.embedder.backbone, takes_vectors=len(dataset.development.image_shape) == 1
        )
    except ValueError as error:
        raise SpecError(str(error)) from None


def _check_loss(config: TrialConfig, family: str) -> None:
    regularizer = config.regularizer
    try:
        catalogue.build(
            config.loss.name,
            config.loss.params,
            regularizer=(regularizer.name, regularizer.params) if regularizer else None,
            memory=config.batch.memory_size > 0,
            num_classes=2,
            dim=config.embedder.dim,
        )
    except (ValueError, *TOO_LARGE) as error:
        section = "regularizer" if str(error).startswith("regularizer") else "loss"
        raise SpecError(f"families.{family}.{section}: {_said(error)}") from None


def _check_augmentation(config: TrialConfig, family: str) -> None:
    if config.data.name == "features" and config.augmentation != AugmentationConfig():
        raise SpecError(
            f"families.{family}.augmentation: features are vectors, of which there are no views; leave it out"
        )
    try:
        data.check_augmentation(
            data.Augmentation(**config.augmentation.model_dump()),
            config.data.image_size,
            config.data.resize_to,
        )
    except ValueError as error:
        raise SpecError(f"families.{family}.{error}") from None


def _check_retrieval(config: TrialConfig, family: str) -> None:
    regularizer = config.regularizer
    if config.retrieval.rerank == "structure" and (regularizer is None or regularizer.name != "structure"):
        raise SpecError(
            f"families.{family}.retrieval.rerank: structure needs structure embeddings, which the regularizer"
            " structure trains; set regularizer.name: structure, or another rerank"
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
