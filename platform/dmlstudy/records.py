"""Frozen value types that travel between floors: what a trial is told and what it tells.

They are strict pydantic models: an unknown key or a value out of range is a ``ValidationError`` that
carries the key's path. They are unpacked at the border of each floor; components take plain parameters.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

Scalar: TypeAlias = bool | int | float | str
"""A hyperparameter's value."""

UNTRAINED = "untrained"
"""The row of the embedder before training; no family can have this name."""


class Record(BaseModel):
    """A frozen value that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Record):
    """Which images, and how they are cut into development and test classes."""

    name: Annotated[str, Field(description="digits | image_folder | hf_parquet")]
    path: Annotated[str | None, Field(description="folder of the data set; digits needs none")] = None
    image_size: Annotated[
        PositiveInt | None, Field(description="side in pixels images are resized to; default: as they are")
    ] = None


class EmbedderConfig(Record):
    """Backbone and head of the embedder f: image -> unit sphere in R^dim."""

    backbone: str = "small_conv"
    dim: Annotated[int, Field(ge=2, le=4096, description="embedding size D")] = 64
    width: Annotated[int, Field(ge=4, le=1024, description="channels of the first stage (small_conv)")] = 32
    weights: Annotated[str | None, Field(description="'default' for the hub's, or a file; none: random")] = (
        None
    )
    freeze_bn: Annotated[bool, Field(description="batch norm in eval mode, affine part trainable")] = True


class BatchConfig(Record):
    """PK batches: P classes with K images each, drawn globally and sliced by rank."""

    classes: Annotated[
        Annotated[int, Field(ge=2)] | Literal["all"], Field(description="P, or all classes trained on")
    ] = 16
    images_per_class: Annotated[int, Field(ge=2, description="K, images per class")] = 5
    per_epoch: Annotated[
        PositiveInt | None, Field(description="batches per epoch; default: images // (P*K), at least 1")
    ] = None
    memory_size: Annotated[
        int,
        Field(
            ge=0,
            description="embeddings of earlier batches kept as further references (cross-batch memory); 0: none",
        ),
    ] = 0
    memory_warmup: Annotated[int, Field(ge=0, description="batches before the memory is used")] = 0


class TrainingConfig(Record):
    """Optimiser and schedule."""

    epochs: Annotated[int, Field(ge=0, description="0: the untrained embedder")] = 20
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    head_lr_mult: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="learning-rate multiplier of the head")
    ] = 1.0
    loss_lr_mult: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="the same for the loss's own parameters")
    ] = 1.0
    freeze_backbone_epochs: Annotated[int, Field(ge=0)] = 0


class ResourcesConfig(Record):
    """What one trial takes, and how many run at once (default: as many as the cluster holds)."""

    workers: PositiveInt = 2
    cpus_per_worker: PositiveFloat = 1
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0
    max_concurrent_trials: PositiveInt | None = None
    isolation: Annotated[
        Literal["gang", "process"],
        Field(description="workers serve one trial after another, or are started afresh for each"),
    ] = "gang"
    recycle_after: Annotated[
        int, Field(ge=0, description="trials after which workers are started afresh; 0: never")
    ] = 100
    recycle_growth_mib: Annotated[
        PositiveInt,
        Field(description="as soon as a trial's workers together hold this much more than after their first"),
    ] = 2048
    start_limit_s: Annotated[
        PositiveFloat,
        Field(
            description="how long workers wait for room on the cluster; then the study stops, to be resumed"
        ),
    ] = 3600
    silence_limit_s: Annotated[
        PositiveFloat, Field(description="a trial that reports nothing for this long is failed")
    ] = 1800
    storage_path: Annotated[
        str | None,
        Field(
            description="where running trials keep their state, below the study's name: a folder that all nodes see,"
            " or a URI (s3://bucket/folder, gs://, hdfs://, abfss://, file://); default: in the store"
        ),
    ] = None
    retries: Annotated[
        int, Field(ge=0, description="how often a trial goes on with fresh workers after a worker was lost")
    ] = 1


def untrained_name(family: str | None = None) -> str:
    """The row of the untrained embedder; of this family's, where families have different ones."""
    return UNTRAINED if family is None else f"{UNTRAINED} ({family})"


def is_untrained(name: str) -> bool:
    """Whether a row is an untrained embedder's; a family's name has no space."""
    return name == UNTRAINED or name.startswith(f"{UNTRAINED} (")


class LossConfig(Record):
    """An entry of the catalogue, a loss or a regulariser, with its parameters."""

    name: str
    params: dict[str, Scalar] = {}


class TrialConfig(Record):
    """Everything one trial needs; equal configurations on one machine give equal scores."""

    family: str
    phase: Literal["search", "verdict"] = "search"
    data: DataConfig
    embedder: EmbedderConfig
    batch: BatchConfig
    training: TrainingConfig
    loss: LossConfig
    regularizer: Annotated[LossConfig | None, Field(description="added to the loss; none: nothing is")] = None
    num_folds: Annotated[int, Field(ge=1, description="1: one held-out fold")] = 1
    fold_models: Annotated[bool, Field(description="a verdict trial trains a model per fold as well")] = False
    seed: int = 0
    recall_at: tuple[PositiveInt, ...] = (1, 2, 4, 8)
    objective: str = "map_at_r"
    measure_latency: Annotated[
        bool, Field(description="a search trial tells embed_ms_per_image, which no two runs measure alike")
    ] = False
    keep_embedder: Annotated[bool, Field(description="a verdict trial leaves its trained embedder")] = False

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON: equal if and only if the configs are."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class TrialReport(Record):
    """What a trial says after each epoch: ``step`` counts epochs over all folds, from 1."""

    step: int
    metrics: dict[str, float]


class TrialResult(Record):
    """What a trial leaves when it ends by itself."""

    metrics: dict[str, float]
    embedder_folder: Annotated[str | None, Field(description="where the trained embedder was saved")] = None
