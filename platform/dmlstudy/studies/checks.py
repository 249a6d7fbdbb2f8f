"""Checks of a study that need the parts it names: data sets, losses, backbones, metrics."""

from __future__ import annotations

from dmlstudy import data
from dmlstudy.data import state_file
from dmlstudy.embedders import BACKBONES
from dmlstudy.losses import catalogue
from dmlstudy.naming import nearest
from dmlstudy.records import TrialConfig
from dmlstudy.studies.spec import SpecError, StudySpec

PROBE = ".probe"
"""The folder of a file that is kept to see whether one can be; no trial's has this name."""


def check_parts(spec: StudySpec) -> data.ZeroShotData:
    """Check everything that can be before a cluster is started, and return the data; raises SpecError.

    Every family is built at its default point and at each bound of its space, so that no trial fails later
    for a value the file allows.
    """
    protocol = spec.file.protocol
    known = ["map_at_r", "r_precision", *(f"recall_at_{k}" for k in protocol.recall_at)]
    if protocol.objective not in known:
        raise SpecError(
            f"protocol.objective: no metric {protocol.objective!r}{nearest(protocol.objective, known)}"
        )
    for name, family in spec.families.items():
        for values in spec.corners(family):
            config = spec.trial_config(family, values, path=f"families.{name}")
            if config.embedder.backbone not in BACKBONES:
                backbone = config.embedder.backbone
                raise SpecError(f"embedder.backbone: no backbone {backbone!r}{nearest(backbone, BACKBONES)}")
            _check_loss(config, name)
    try:
        dataset = data.load(**spec.file.data.model_dump())
        folds = data.class_disjoint_folds(
            dataset.development.labels_N, protocol.num_folds, spec.file.search.seed
        )
    except ValueError as error:
        raise SpecError(str(error)) from None
    smallest = min(len(fold.train_classes) for fold in folds)
    for name, family in spec.families.items():
        for values in spec.corners(family):
            _check_batch(spec.trial_config(family, values), smallest, name)
    return dataset


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
        reason = (error.strerror or str(error).strip() or type(error).__name__).splitlines()[0]
        raise SpecError(
            f"resources.storage_path: {root} cannot be written and read ({reason}); make the folder or bucket, give"
            " this machine and all nodes the right to it, or name another"
        ) from None


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
    except ValueError as error:
        section = "regularizer" if str(error).startswith("regularizer") else "loss"
        raise SpecError(f"families.{family}.{section}: {error}") from None


def _check_batch(config: TrialConfig, num_classes: int, family: str) -> None:
    classes = config.batch.classes
    if classes != "all" and classes > num_classes:
        raise SpecError(
            f"families.{family}.batch.classes: up to {classes} classes per batch, but a fold trains on"
            f" {num_classes}; set batch.classes to at most {num_classes} or to all"
        )
