"""The start of a trial's embedder: checked when it is built, and kept with its model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dmlstudy import embedders
from dmlstudy.data import known_classes
from dmlstudy.data.images import LabelledImages
from dmlstudy.embedders.weights import EMBEDDER
from dmlstudy.model_folder import read_extra
from dmlstudy.records import TrialConfig
from dmlstudy.training.interface import TrialFailed
from dmlstudy.training.lineage import SHOWN, lineage


def weights_of(config: TrialConfig) -> str | None:
    """The weights to build with: where the study's start was put, or else as they are written."""
    return config.start.place if config.start and config.start.place else config.embedder.weights


def check(config: TrialConfig, embedder: embedders.Embedder) -> None:
    """Have the embedder named by what was written, and see that its weights are those the study began with.

    Raises TrialFailed where they have changed since.
    """
    start = config.start
    written = config.embedder.weights
    embedder.architecture = dataclasses.replace(embedder.architecture, weights=written)
    if start is None:
        return
    for what, loaded, then in (
        ("other weights", embedder.loaded_sha256, start.sha256),
        ("another head or normalisation", embedder.loaded_head_sha256, start.head_sha256),
    ):
        if then and loaded != then:
            raise TrialFailed(
                f"embedder.weights: {start.source} holds {what} than when the study began (SHA-256"
                f" {str(loaded)[:SHOWN]}, then {then[:SHOWN]}); bring them back, or give this study another name"
            )


def notes(config: TrialConfig, embedder: embedders.Embedder, images: LabelledImages) -> dict[str, Any]:
    """Notes that are kept with a model: its lineage, and the classes that it and its ancestors were trained on."""
    own = classes = known_classes.of_images(images) if config.training.epochs else []
    weights = weights_of(config)
    if weights is not None and (Path(weights) / EMBEDDER).is_file():
        before = read_extra(Path(weights) / EMBEDDER)
        classes = known_classes.joined(classes, before.get("trained_classes", []))
    return {
        "start": [each.model_dump() for each in lineage(config, embedder.loaded_sha256)],
        "trained_classes": classes,
        "num_trained_classes": len(own),
        "num_trained_images": len(images) if own else 0,
    }
