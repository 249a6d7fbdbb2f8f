"""Frozen value types that travel between floors: a trial's configuration, reports and result.

They are strict pydantic models: an unknown key or a value out of range is a ``ValidationError`` that
carries the key's path. They are unpacked at the border of each floor; components take plain parameters.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dmlstudy.trials import Status

Scalar: TypeAlias = bool | int | float | str
"""A hyperparameter's value."""

LARGEST_SIDE = 4096
"""Pixels of a side."""

MANY = 1_000_000
"""The most rows, results or batches, lest a typing error fill the memory."""

REGISTERED = "models:/"
"""The beginning of ``embedder.weights`` that name a registered model."""

UNTRAINED = "untrained"
"""The row of the embedder before training; no family can have this name."""


OF_STRUCTURE = ("num_hidden", "width", "size", "initial")
"""Parameters of an online learner that say what it is before it learns."""


def _joined(value: object) -> object:
    """Numbers of a list as one text, which is a value that can be searched and logged."""
    if isinstance(value, list | tuple):
        return " ".join(str(each) for each in value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


NumberList: TypeAlias = Annotated[str, BeforeValidator(_joined)]
"""Several numbers as one text with spaces between them; a list of them, or one number, is read as that."""


def _shares(value: object) -> object:
    """A share as a number; several, given as a list or a text, as a text in rising order without repetitions."""
    words = [value] if isinstance(value, int | float) else str(_joined(value)).replace(",", " ").split()
    try:
        shares = sorted({float(word) for word in words})
    except ValueError:
        shares = []
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise PydanticCustomError(
            "shares", "expected a number from 0 to 1, or a list of them as [0.3, 0.5, 1.0]"
        )
    return shares[0] if len(shares) == 1 else " ".join(map(str, shares))


ShareList: TypeAlias = Annotated[Annotated[float, Field(ge=0, le=1)] | str, BeforeValidator(_shares)]
"""A number from 0 to 1, or several as one text."""

NUMBER_LISTS = frozenset({"training.step_at", "training.wise_ft", "embedder.matryoshka", "loss.ks"})
"""Keys of it."""


def number_list(key: str, value: object) -> object:
    """The text of a list of numbers, where the key ``section.parameter`` takes one; else the value as it is."""
    is_list = isinstance(value, list) and all(isinstance(each, int | float | str) for each in value)
    return _joined(value) if key in NUMBER_LISTS and is_list else value


EARLIER_KEYS = {"batch.sampler": "batch.draw"}
"""Keys of a configuration as earlier versions wrote them, and their present names."""

_EARLIER = {present: earlier for earlier, present in EARLIER_KEYS.items()}


def present_key(key: str) -> str:
    """The present name of a key ``section.parameter`` or ``section.parameter@option``, which may be an earlier one."""
    name, at, option = key.partition("@")
    return EARLIER_KEYS.get(name, name) + at + option


def earlier_key(key: str) -> str:
    """The name under which fingerprints and Optuna's storage know a key."""
    name, at, option = key.partition("@")
    return _EARLIER.get(name, name) + at + option


class Record(BaseModel):
    """A frozen value that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Grown(Record):
    """A record whose later keys are left out at their defaults, so that earlier studies keep their fingerprints."""

    LATER: ClassVar[tuple[str, ...]]

    @model_serializer(mode="wrap")
    def _without_later_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        for key in self.LATER:
            if key in values and values[key] == type(self).model_fields[key].default:
                del values[key]
        return values


class DataConfig(Grown):
    """The images, and their division into development and test classes."""

    LATER = ("orientation", "background", "max_pixels", "canvas", "canvas_gib", "camera")
    SPEED: ClassVar = ("canvas", "canvas_gib")
    """Keys that change no number, and so no fingerprint: an interrupted study may be resumed with others."""

    name: Annotated[
        str,
        Field(
            description="digits | image_folder | hf_parquet | hf_datasets | table | wildlife | shards | cub200 |"
            " cars196 | sop | inshop | inaturalist2018 | omniglot | market1501 | msmt17 | veri776 | uned |"
            " cifar10 | cifar100 | mnist | fashion_mnist | kmnist | emnist | features; for hashing also flickr25k |"
            " nuswide21"
        ),
    ]
    path: Annotated[
        str | None, Field(description="folder (table: file) of the data set; digits needs none")
    ] = None
    image_size: Annotated[
        PositiveInt | None,
        Field(le=LARGEST_SIDE, description="side in pixels images are resized to; default: as they are"),
    ] = None
    resize_to: Annotated[
        PositiveInt | None,
        Field(
            le=LARGEST_SIDE,
            description="pixels pictures are resized to before image_size is cut out; default: nothing is",
        ),
    ] = None
    keep_aspect: Annotated[
        bool, Field(description="resize_to is of the shorter side; false: of both sides")
    ] = True
    on_corrupt: Annotated[
        Literal["error", "skip"],
        Field(
            description="a picture that cannot be decoded ends a trial, or all are looked at first and it is left out"
        ),
    ] = "error"
    orientation: Annotated[
        Literal["exif", "as_stored"],
        Field(description="pictures are turned as their EXIF tag says, or left as they are stored"),
    ] = "exif"
    background: Annotated[
        str,
        Field(
            description="behind transparent pixels: white | black | grey | '#rrggbb'; drop: what is stored under them"
        ),
    ] = "white"
    max_pixels: Annotated[
        PositiveInt,
        Field(description="of a picture; a larger one is refused, for it may be a decompression bomb"),
    ] = 178_956_970
    canvas: Annotated[
        Literal["none", "memory", "disk"],
        Field(
            description="pictures too many to be kept decoded are decoded once, and views are cut from that: in the"
            " machine's shared memory or in a file below the cache folder; what is seen is the same"
        ),
    ] = "none"
    canvas_gib: Annotated[
        PositiveFloat, Field(le=10_000, description="the most that canvas: memory may take on a machine")
    ] = 8.0

    camera: Annotated[
        str | None,
        Field(
            description="a column (table, wildlife, hf_datasets; of shards a key of the .json), or a regular expression"
            r" of a picture's path with one group, as '_c(\d+)s'; a query is not to find its class by its own camera"
        ),
    ] = None

    @field_validator("background")
    @classmethod
    def _names_a_colour(cls, text: str) -> str:
        if re.fullmatch("white|black|grey|drop|#[0-9a-fA-F]{6}", text) is None:
            raise PydanticCustomError(
                "colour", "choose from white, black, grey, drop, or write a colour as '#ff8800'"
            )
        return text


class AugmentationConfig(Grown):
    """Random views of training images, each a function of (seed, epoch, image) alone."""

    LATER = (
        "rotate",
        "randaugment",
        "magnitude",
        "jitter",
        "hue",
        "jitter_p",
        "grey",
        "blur",
        "erase",
    )

    crop: Annotated[
        Literal["none", "random", "random_resized"],
        Field(description="of image_size from resize_to or padding; or of any area, resized"),
    ] = "none"
    flip: Annotated[float, Field(ge=0, le=1, description="probability of exchanging left and right")] = 0.0
    padding: Annotated[
        int, Field(ge=0, le=LARGEST_SIDE, description="black pixels on each side before a random crop")
    ] = 0
    scale_min: Annotated[float, Field(gt=0, le=1, description="least area of a random_resized crop")] = 0.16
    scale_max: Annotated[float, Field(gt=0, le=1, description="largest area, as a share of the whole")] = 1.0
    ratio_min: Annotated[
        float, Field(gt=0, le=1, description="least width / height of it; the largest is 1 / ratio_min")
    ] = 0.75
    rotate: Annotated[
        float, Field(ge=0, le=180, description="degrees; turned by an angle uniform in [-rotate, rotate]")
    ] = 0.0
    randaugment: Annotated[
        int, Field(ge=0, le=10, description="ops drawn with replacement of RandAugment's 14; 0: none")
    ] = 0
    magnitude: Annotated[int, Field(ge=0, le=30, description="of RandAugment's ops, 30 is the strongest")] = 9
    jitter: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="brightness, contrast and saturation times factors uniform in [1 - jitter, 1 + jitter]",
        ),
    ] = 0.0
    hue: Annotated[
        float,
        Field(ge=0, le=0.5, description="shift of the hue, uniform in [-hue, hue]; 1 is the whole circle"),
    ] = 0.0
    jitter_p: Annotated[
        float, Field(ge=0, le=1, description="probability of jitter and hue, which change a view together")
    ] = 0.8
    grey: Annotated[float, Field(ge=0, le=1, description="probability of a view without colours")] = 0.0
    blur: Annotated[
        float,
        Field(ge=0, le=1, description="probability of a Gaussian blur, sigma uniform in [0.1, 2] pixels"),
    ] = 0.0
    erase: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="probability of a box of the backbone's mean colour over 2% to 33% of a view",
        ),
    ] = 0.0


LIBRARY_PREFIX = "pml:"
"""The beginning of a loss's name that is followed by a class of pytorch-metric-learning."""

HYPERBOLIC = "hyperbolic"
"""The distance of points of a ball, by its name in a loss."""

CURVATURE = 0.1
"""The curvature c of the ball of hyperbolic embeddings unless another is said: its radius is 1 / sqrt(c)."""

CLIP_RADIUS = 2.3
"""The length to which features are cut before they are mapped into the ball."""

NUM_FUSED = 3
"""Stages of a backbone whose features are put together by ``embedder.fusion``."""


class EmbedderConfig(Grown):
    """Backbone and head of the embedder f: image -> unit sphere in R^size, all of R^size, or a ball in it."""

    LATER = (
        "head",
        "dim_per",
        "structure_input",
        "unit_norm",
        "matryoshka",
        "space",
        "curvature",
        "clip_radius",
    )

    backbone: Annotated[
        str,
        Field(
            description="small_conv | bn_inception | a torchvision classifier by name (resnet50, googlenet,"
            " convnext_tiny, vit_b_16) | timm:<name> | timm:hf-hub:<owner>/<repository>; for feature vectors linear |"
            " mlp1 | mlp2 | mlp3 (hidden layers)"
        ),
    ] = "small_conv"
    dim: Annotated[
        int, Field(ge=2, le=4096, description="embedding size D, of all heads together; of a code its bits")
    ] = 64
    dim_per: Annotated[
        Literal["whole", "head"],
        Field(
            description="what dim is the size of: the whole embedding, or each of the heads of fusion: heads or"
            " unit_heads, so that the whole has 3 dim"
        ),
    ] = "whole"
    width: Annotated[
        int,
        Field(ge=4, le=1024, description="channels of small_conv's first stage, units of an MLP's layers"),
    ] = 32
    weights: Annotated[
        str | None,
        Field(
            description="'default' for the hub's, a torchvision entry's name, a file, the folder of a pulled model, or"
            " a registered one: models:/NAME@champion, models:/NAME/3; none: random"
        ),
    ] = None
    freeze_bn: Annotated[bool, Field(description="batch norm in eval mode, affine part trainable")] = True
    fusion: Annotated[
        Literal["none", "features", "heads", "unit_heads"],
        Field(
            description="pooled features of the last three stages: with one head, or with a head for each that gives a"
            " third of D (unit_heads: of unit norm each); none: the last stage alone"
        ),
    ] = "none"
    pooling: Annotated[
        Literal["own", "avg", "max", "avg+max"],
        Field(description="of stages' maps over positions; own: the backbone's, with fusion avg"),
    ] = "own"
    head: Annotated[
        Literal["linear", "none"],
        Field(
            description="a linear layer from the backbone's features to D numbers; none: the features themselves, of"
            " which D must be the number"
        ),
    ] = "linear"
    head_norm: Annotated[bool, Field(description="layer norm without parameters before the head")] = False
    head_depth: Annotated[
        int,
        Field(
            ge=0,
            le=32,
            description="hidden layers of a head in which the features and each layer have an embedding, of"
            " D / (depth + 1) numbers; adaptive_bound weighs them",
        ),
    ] = 0
    head_width: Annotated[PositiveInt, Field(le=65_536, description="units of each of these layers")] = 100
    code: Annotated[
        Literal["none", "tanh", "sign"],
        Field(
            description="codes of D bits over sqrt(D): tanh in training and its sign in use, or the sign with the"
            " identity's gradient; none: real numbers"
        ),
    ] = "none"
    unit_norm: Annotated[
        bool,
        Field(
            description="false: embeddings are as the head gives them, compared by Euclidean distance; the loss gets"
            " a batch's over their mean distance; for triplet, triplet_weighting, pair_weighting by Euclidean distances"
        ),
    ] = True
    space: Annotated[
        Literal["sphere", "ball"],
        Field(
            description="ball: embeddings are points of a ball, compared by hyperbolic distance; for loss.distance:"
            " hyperbolic; sphere: unit vectors"
        ),
    ] = "sphere"
    curvature: Annotated[
        float, Field(gt=0, le=100, description="of the ball, c: its radius is 1 / sqrt(c)")
    ] = CURVATURE
    clip_radius: Annotated[
        float, Field(gt=0, le=100, description="length to which features are cut before they enter the ball")
    ] = CLIP_RADIUS
    structure_input: Annotated[
        Literal["none", "center", "standardize"],
        Field(
            description="features that a structure head gets: as they are; less their running mean over batches of all"
            " workers; also over the root of their running mean variance"
        ),
    ] = "none"

    matryoshka: Annotated[
        NumberList | None,
        Field(
            pattern=r"^[0-9]{1,5}( [0-9]{1,5}){0,15}$",
            description="sizes below D, as [32, 64], whose leading parts of the embedding are trained by the same loss;"
            " the loss is the mean over these and the whole",
        ),
    ] = None

    @property
    def size(self) -> int:
        """Numbers of an embedding."""
        return embedding_size(self.dim, self.dim_per)

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of the leading parts that are trained as well."""
        return tuple(map(int, (self.matryoshka or "").split()))

    @property
    def ball_curvature(self) -> float | None:
        """The curvature of the ball that embeddings are points of; None of vectors by Euclidean distance."""
        return self.curvature if self.space == "ball" else None


def embedding_size(dim: int, dim_per: str) -> int:
    """Numbers of an embedding whose ``dim`` is that of the whole, or of each of the heads of fused stages."""
    return dim * NUM_FUSED if dim_per == "head" else dim


class BatchConfig(Grown):
    """Batches, drawn globally and sliced by rank: P classes with K images each, or P*K images of any class."""

    LATER = ("chunk",)

    draw: Annotated[
        Literal["pk", "two_draws", "random"],
        Field(
            description="P*K images; the same P classes twice, K images drawn anew; any P*K images of an epoch's order"
        ),
    ] = "pk"
    classes: Annotated[
        Annotated[int, Field(ge=2, le=MANY)] | Literal["all"],
        Field(description="P, or all classes trained on"),
    ] = 16
    images_per_class: Annotated[
        int,
        Field(
            ge=1,
            le=10_000,
            description="K, images per class; 1 for losses with class vectors or with a memory",
        ),
    ] = 5
    per_epoch: Annotated[
        PositiveInt | None,
        Field(le=MANY, description="batches per epoch; default: images // (P*K), at least 1"),
    ] = None
    memory_size: Annotated[
        int,
        Field(
            ge=0,
            le=10 * MANY,
            description="embeddings of earlier batches kept as further references (cross-batch memory); 0: none",
        ),
    ] = 0
    memory_warmup: Annotated[int, Field(ge=0, le=MANY, description="batches before the memory is used")] = 0
    chunk: Annotated[
        PositiveInt | None,
        Field(
            le=MANY,
            description="images of a worker's share that are embedded at once, each twice: the same gradient in the"
            " memory of so many images; default: all",
        ),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_keys(cls, values: Any) -> Any:
        """Read configurations that earlier versions left in stores and beside models."""
        if not isinstance(values, Mapping) or "draw" in values:
            return values
        return {present_key(f"batch.{name}").removeprefix("batch."): value for name, value in values.items()}


def draw_mismatch(batch: BatchConfig, regularizer: LossConfig | None) -> str | None:
    """An error's line if graph consistency and the batches differ about the two draws, else None."""
    if regularizer is None or regularizer.name != "graph_consistency":
        return None
    draw = regularizer.params.get("draw", "split")
    if (draw == "two_draws") == (batch.draw == "two_draws"):
        return None
    if draw == "two_draws":
        return (
            f"regularizer.draw: two_draws needs batches of two draws, not batch.draw: {batch.draw};"
            " set batch.draw: two_draws, or regularizer.draw: split"
        )
    return (
        f"regularizer.draw: {draw} would mix the two draws of batch.draw: two_draws;"
        " set regularizer.draw: two_draws, or batch.draw: pk"
    )


class TrainingConfig(Grown):
    """Optimiser and schedule."""

    LATER = (
        "deterministic",
        "loss_lr",
        "schedule",
        "warmup_epochs",
        "warmup_steps",
        "lr_floor",
        "step_at",
        "step_factor",
        "layer_decay",
        "unfreeze_last",
        "decay_norms",
        "clip_norm",
        "clip_loss_norm",
        "fused",
        "checkpointing",
        "ema_decay",
        "wise_ft",
        "l2_sp",
        "feature_cache",
        "cached_views",
        "adapter",
        "lora_rank",
        "lora_alpha",
        "lora_targets",
        "lora_blocks",
        "structure_lr_mult",
        "class_shards",
    )

    epochs: Annotated[
        int,
        Field(
            ge=0,
            le=100_000,
            description="passes over the training images, in each fold; 0: the untrained embedder",
        ),
    ] = 20
    optimizer: Annotated[Literal["adam", "adamw", "sgd"], Field(description="PyTorch's")] = "adam"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False, description="learning rate")] = 1e-5
    weight_decay: Annotated[
        float,
        Field(ge=0, allow_inf_nan=False, description="of the embedder's weights, not the loss's own"),
    ] = 0.0
    head_lr_mult: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="learning-rate multiplier of the head")
    ] = 1.0
    structure_lr_mult: Annotated[
        PositiveFloat | None,
        Field(
            allow_inf_nan=False,
            description="the same of the structure head; default: head_lr_mult",
        ),
    ] = None
    loss_lr_mult: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False, description="the same of the loss's own parameters"),
    ] = 1.0
    loss_lr: Annotated[
        PositiveFloat | None,
        Field(
            allow_inf_nan=False,
            description="learning rate of the loss's own parameters (1e-5 to 10), in place of lr x loss_lr_mult",
        ),
    ] = None
    schedule: Annotated[
        Literal["constant", "cosine", "linear", "step"],
        Field(description="of every learning rate, over the planned epochs"),
    ] = "constant"
    warmup_epochs: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="first epochs, or a part of one, in which rates rise to their full size",
        ),
    ] = 0.0
    warmup_steps: Annotated[
        int, Field(ge=0, le=10**9, description="the same in batches, in place of warmup_epochs")
    ] = 0
    lr_floor: Annotated[
        float, Field(ge=0, le=1, description="share of the rates at the end of cosine and linear")
    ] = 0.0
    step_at: Annotated[
        NumberList,
        Field(
            description="where the schedule step lowers rates: shares of the epochs (0.5 0.75), or epochs (40 60 80)"
        ),
    ] = "0.5 0.75"
    step_factor: Annotated[float, Field(gt=0, le=1, description="by which it multiplies them")] = 0.1
    layer_decay: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="learning rate of a backbone's block over that of the block after it; the head's is full",
        ),
    ] = 1.0
    unfreeze_last: Annotated[
        Annotated[int, Field(ge=0, le=10_000)] | Literal["all"],
        Field(description="last blocks of the backbone that are trained, the rest staying as it is; 0: none"),
    ] = "all"
    decay_norms: Annotated[
        bool,
        Field(description="weight decay also on norms, biases, and learned positions and tokens"),
    ] = True
    clip_norm: Annotated[
        PositiveFloat | None,
        Field(allow_inf_nan=False, description="largest L2 norm of the embedder's gradient; none: any"),
    ] = None
    clip_loss_norm: Annotated[
        PositiveFloat | None,
        Field(allow_inf_nan=False, description="the same of the loss's own parameters"),
    ] = None
    freeze_backbone_epochs: Annotated[
        int, Field(ge=0, le=100_000, description="first epochs, in which the backbone stays wholly as it is")
    ] = 0
    precision: Annotated[
        Literal["float32", "bf16", "fp16"],
        Field(description="of the embedder in training (autocast); losses and evaluation are float32"),
    ] = "float32"
    channels_last: Annotated[bool, Field(description="memory layout of the backbone's weights")] = False
    compile: Annotated[
        bool,
        Field(
            description="torch.compile the embedder's training step and, on a GPU, a loss's tiles; the first step takes"
            " a minute"
        ),
    ] = False
    fused: Annotated[
        bool, Field(description="PyTorch's fused optimiser on GPUs, faster and equal but for rounding")
    ] = False
    checkpointing: Annotated[
        bool,
        Field(
            description="recompute each block's activations in the backward pass: less memory, 20 to 30% more time"
        ),
    ] = False
    class_shards: Annotated[
        bool,
        Field(
            description="each worker keeps the vectors of a share of the classes, and what the optimiser knows of them,"
            " of a loss that is a softmax over classes; for very many classes"
        ),
    ] = False
    deterministic: Annotated[
        Literal["where_possible", "always", "never"],
        Field(
            description="of kernels on GPUs: those that repeat digit for digit where PyTorch has them, or a trial that"
            " needs another fails, or the fastest; CPUs repeat anyway"
        ),
    ] = "where_possible"
    ema_decay: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="of a moving average of the embedder's weights, scored and kept in their place; 0: none",
        ),
    ] = 0.0
    wise_ft: Annotated[
        ShareList,
        Field(
            description="share of the trained weights in what is scored and kept, the rest being the start's; of"
            " weights that came from a file; 1: the trained ones; [0.3, 0.5, 1.0]: the best of these on the folds"
        ),
    ] = 1.0
    l2_sp: Annotated[
        float,
        Field(
            ge=0,
            le=100,
            description="decay towards the weights that training began with, of what came from a file, instead of"
            " weight_decay there; 0: none",
        ),
    ] = 0.0
    feature_cache: Annotated[
        Literal["off", "auto"],
        Field(
            description="auto: a backbone that is frozen in all epochs computes each view of an image once, and trials,"
            " folds and workers share the kept features; needs augmentation off, or cached_views"
        ),
    ] = "off"
    cached_views: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description="V different views of an image: epoch e shows view e mod V, the same in all trials; 0: a new"
            " one in each epoch",
        ),
    ] = 0
    adapter: Annotated[
        Literal["none", "lora"],
        Field(
            description="lora: of the backbone, low-rank terms of weights are trained in their place, and merged into"
            " them in what is scored and kept"
        ),
    ] = "none"
    lora_rank: Annotated[
        PositiveInt, Field(le=4096, description="r of W0 + (alpha / r) B A; at most a weight's smaller side")
    ] = 8
    lora_alpha: Annotated[
        PositiveFloat | None, Field(allow_inf_nan=False, description="default: the rank, for a factor of 1")
    ] = None
    lora_targets: Annotated[
        Literal["all", "attention", "mlp"],
        Field(
            description="linear layers and convolutions (of one group) that are adapted: all, the projections of"
            " attention, or those of its MLPs"
        ),
    ] = "all"
    lora_blocks: Annotated[
        Annotated[int, Field(ge=1, le=10_000)] | Literal["all"],
        Field(description="last blocks of the backbone that are adapted, with what follows them"),
    ] = "all"


class RetrievalConfig(Record):
    """Retrieval when embeddings are judged: by distance, and a second look at the first results."""

    rerank: Annotated[
        Literal["none", "structure", "k_reciprocal"],
        Field(
            description="what puts a query's first results in another order: its structure embedding, or k-reciprocal"
            " encodings"
        ),
    ] = "none"
    first: Annotated[
        int, Field(ge=1, le=100_000, description="how many results of a query are looked at again")
    ] = 32
    k1: Annotated[int, Field(ge=2, le=10_000, description="neighbours of a k-reciprocal encoding")] = 20
    k2: Annotated[int, Field(ge=1, le=10_000, description="neighbours that it is averaged over")] = 6
    distance_weight: Annotated[
        float, Field(ge=0, le=1, description="of the plain distance beside the encodings'")
    ] = 0.3


def _whole_or_a_part(gpus: float) -> float:
    if gpus > 1 and gpus != int(gpus):
        raise PydanticCustomError("whole_gpus", "above 1 a worker takes whole GPUs")
    return gpus


class ResourcesConfig(Record):
    """Resources of one trial, and how many trials run at once (default: as many as the cluster holds)."""

    workers: Annotated[
        PositiveInt, Field(le=10_000, description="processes that train one trial together, by DDP")
    ] = 2
    cpus_per_worker: Annotated[
        PositiveFloat, Field(le=10_000, description="CPUs that each takes, also as threads")
    ] = 1
    gpus_per_worker: Annotated[
        float,
        Field(
            ge=0,
            le=64,
            allow_inf_nan=False,
            description="GPUs that each takes, whole ones or a part of one; 0: it trains on CPUs",
        ),
        AfterValidator(_whole_or_a_part),
    ] = 0
    accelerator: Annotated[
        str | None,
        Field(description="kind of GPU, by Ray's name (T4, A10G, L4, A100, H100); default: any, also mixed"),
    ] = None
    placement: Annotated[
        Literal["pack", "strict_pack"],
        Field(
            description="of a trial's workers: together where there is room, or always on one node, for which they wait"
        ),
    ] = "pack"
    max_concurrent_trials: Annotated[
        PositiveInt | None,
        Field(le=MANY, description="trials at once; default: as many as the cluster holds"),
    ] = None
    isolation: Annotated[
        Literal["gang", "process"],
        Field(description="workers serve one trial after another, or are started afresh for each"),
    ] = "gang"
    recycle_after: Annotated[
        int, Field(ge=0, le=MANY, description="trials after which workers are started afresh; 0: never")
    ] = 100
    recycle_growth_mib: Annotated[
        PositiveInt,
        Field(
            le=2**30,
            description="as soon as a trial's workers together hold this much more than after their first",
        ),
    ] = 2048
    start_limit_s: Annotated[
        PositiveFloat,
        Field(
            le=10**7,
            description="how long workers wait for room on the cluster; then the study stops, to be resumed",
        ),
    ] = 3600
    silence_limit_s: Annotated[
        PositiveFloat,
        Field(
            le=10**7,
            description="a trial whose workers report nothing and finish no batch for this long is failed",
        ),
    ] = 1800
    storage_path: Annotated[
        str | None,
        Field(
            description="where running trials keep their state, below the study's name: a folder that all nodes see,"
            " or a URI (s3://bucket/folder, gs://, hdfs://, abfss://, file://); default: in the store"
        ),
    ] = None
    retries: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description="how often in a row a trial goes on with fresh workers after it lost one, without an epoch in"
            " between; each further epoch begins the count anew",
        ),
    ] = 1
    cost_per_hour: Annotated[
        PositiveFloat | None,
        Field(
            allow_inf_nan=False,
            description="what an hour of one worker costs, in your currency; validate and report tell the money then",
        ),
    ] = None


def untrained_name(family: str | None = None) -> str:
    """The row of the untrained embedder; of this family's, where families have different ones."""
    return UNTRAINED if family is None else f"{UNTRAINED} ({family})"


def is_untrained(name: str) -> bool:
    """True for the row of an untrained embedder; a family's name has no space."""
    return name == UNTRAINED or name.startswith(f"{UNTRAINED} (")


class LossConfig(Record):
    """An entry of the catalogue, a loss or a regulariser, with its parameters."""

    name: str
    params: dict[str, Scalar] = {}


class CodesConfig(Record):
    """Binary codes of frozen features, and how they are ranked."""

    num_bits: Annotated[int, Field(ge=8, le=1024, multiple_of=8, description="bits D of a code")] = 64
    batch_size: Annotated[int, Field(ge=2, le=MANY, description="rows of features in a batch")] = 128
    features: Annotated[
        str,
        Field(
            description="of an image: pixels, or the folder of a saved embedder, whose embeddings they are; vectors are"
            " their own"
        ),
    ] = "pixels"
    standardize: Annotated[
        bool,
        Field(description="features less the mean of those trained on, over the root of their mean variance"),
    ] = True
    num_train: Annotated[
        PositiveInt | None,
        Field(le=10**9, description="rows drawn of the database to train on; default: all"),
    ] = None
    num_queries: Annotated[
        PositiveInt | None,
        Field(le=10**9, description="queries drawn of a fold's, or of the test rows; none: all"),
    ] = 1000
    rerank: Annotated[
        int,
        Field(
            ge=0,
            le=MANY,
            description="first results put in order by the query's structure embedding; 0: none",
        ),
    ] = 2000


class HashingConfig(Record):
    """Everything that the training of a hashing model needs beside its features."""

    loss: Annotated[LossConfig, Field(description="a method: sgh | ssdh | greedyhash | tbh")]
    regularizer: Annotated[LossConfig | None, Field(description="point_ranking (NASA), or none")] = None
    hashing: CodesConfig = CodesConfig()
    training: TrainingConfig = TrainingConfig()
    seed: int = 0


class OnlineConfig(Record):
    """A stream of constraints for an online learner, and how what it has learned is judged."""

    num_seeds: Annotated[
        PositiveInt, Field(le=10**7, description="constraints drawn at random from labels")
    ] = 5000
    num_implied: Annotated[
        int,
        Field(ge=0, le=10**7, description="constraints after them that these imply (transitive closure)"),
    ] = 5000
    features: Annotated[
        str,
        Field(
            description="of an image: pixels, grey (its luma alone), or the folder of a saved embedder, whose"
            " embeddings they are; vectors are their own"
        ),
    ] = "pixels"
    scaling: Annotated[
        Literal["none", "unit", "standardize", "centred_unit", "contrast"],
        Field(
            description="of features: none; over each point's norm; each feature to mean 0 and variance 1; less the"
            " mean, then over the norm; less the point's own mean, then over the norm"
        ),
    ] = "none"
    split: Annotated[
        Literal["shuffled", "own"],
        Field(description="all rows shuffled by the seed and cut in halves, or the data's own two sides"),
    ] = "shuffled"
    k: Annotated[
        PositiveInt, Field(le=MANY, description="neighbours, in each layer, that a class is told by")
    ] = 5
    vote: Annotated[
        Literal["own", "similarity", "majority"],
        Field(
            description="neighbours' similarities added, or each counted once; own: by the learner's rule, if it has"
            " one (slda, nearest_class_mean), else the former for layers"
        ),
    ] = "own"
    num_pairs: Annotated[
        int,
        Field(
            ge=0, le=10**7, description="held-out pairs, half of them similar, for the metric auc; 0: none"
        ),
    ] = 0
    measure_recall: Annotated[
        bool, Field(description="recall_at_K of distinct held-out items among each other")
    ] = False
    on_drift: Annotated[
        Literal["ignore", "reopen"],
        Field(description="where the loss has risen: go on, or let a fresh learner prove better (oahu)"),
    ] = "ignore"
    sensitivity: Annotated[
        float, Field(gt=0, lt=1, description="of the detector (ADWIN's delta); larger hears sooner")
    ] = 0.002
    probation: Annotated[
        int, Field(ge=2, le=10**7, description="constraints that a fresh learner has to prove itself on")
    ] = 3000


class MetricsConfig(Record):
    """Metrics of every ranking beside MAP@R and R-precision; means over queries."""

    recall_at: Annotated[
        tuple[Annotated[PositiveInt, Field(le=MANY)], ...],
        Field(max_length=100, description="k of Recall@k"),
    ] = (1, 2, 4, 8)
    map_at: Annotated[
        tuple[Annotated[PositiveInt, Field(le=MANY)], ...],
        Field(
            max_length=100,
            description="K of MAP@K, under each of its denominators: map_at_K_of_found, _relevant, _reachable",
        ),
    ] = ()
    full_map: Annotated[bool, Field(description="map, over the whole ranking: Q x M sorted")] = False
    macro: Annotated[
        bool, Field(description="macro_: means over classes of their queries' means as well")
    ] = False
    reid: Annotated[
        bool,
        Field(
            description="metrics of re-identification, over the whole ranking: cmc_at_1, _5, _10, map and minp; with"
            " data.camera, or of a set that has cameras of its own"
        ),
    ] = False
    clusters: Annotated[
        bool,
        Field(description="nmi, nmi_geometric and f1 of k-means of the test embeddings, in verdict trials"),
    ] = False
    short_vectors: Annotated[
        tuple[Annotated[PositiveInt, Field(le=MANY)], ...] | None,
        Field(
            max_length=16,
            description="sizes of leading parts of the embedding that verdict trials are scored with as well, each of"
            " 32, 8 and 1 bit a number, and so the whole; default: those that embedder.matryoshka trains",
        ),
    ] = None
    verification: Annotated[
        bool,
        Field(
            description="errors over all pairs of test images in verdict trials: fnmr_at_fmr_1e-3, eer, opis, rejection"
            " of unknown classes; and a threshold, set on the folds, that ships with the model"
        ),
    ] = False
    fmr: Annotated[
        float,
        Field(
            ge=1e-6,
            le=0.5,
            description="share of impostors, pairs of two classes, that the shipped threshold is to accept; with"
            " verification",
        ),
    ] = 1e-3


class Ancestor(Grown):
    """A model, file or hub's entry that weights come from, with what is known of it; empty is unknown."""

    LATER: ClassVar[tuple[str, ...]] = (
        "data",
        "data_sha256",
        "num_images",
        "num_classes",
        "entry",
        "url",
        "licence",
    )

    source: Annotated[str, Field(description="models:/NAME/VERSION, a folder, a file, or the hub's entry")]
    sha256: Annotated[str, Field(description="of its tensors (embedders.weights.digest)")] = ""
    data: Annotated[str, Field(description="the data set it was trained on, and the name of its folder")] = ""
    data_sha256: Annotated[str, Field(description="of the images it was trained on")] = ""
    num_images: Annotated[int | None, Field(description="that it was trained on itself")] = None
    num_classes: Annotated[int | None, Field(description="of these images, or as its hub says")] = None
    entry: Annotated[str, Field(description="of a hub: the weights' own name there")] = ""
    url: Annotated[str, Field(description="of a hub: where the weights are")] = ""
    licence: Annotated[str, Field(description="of a hub: the licence that its library states")] = ""


class StartConfig(Ancestor):
    """The weights of an embedder before training, settled once for all trials of a study.

    A registered model is named by its version, whatever became of the alias that was written. ``sha256`` is
    ``embedders.weights.digest`` of the backbone's tensors, ``head_sha256`` of what a saved model has beside them.
    """

    LATER = (*Ancestor.LATER, "head_sha256")

    place: Annotated[str | None, Field(description="the folder or file; none: the hub")] = None
    ancestors: Annotated[
        tuple[Ancestor, ...], Field(description="what it was trained from, nearest first")
    ] = ()
    seen: Annotated[str, Field(description="what it has seen of the study's classes, in words")] = ""
    head_sha256: Annotated[
        str, Field(description="of a saved model's heads and normalisation; empty: they are not compared")
    ] = ""

    @property
    def digests(self) -> str:
        """Both digests as one text; a start of before there were two has one."""
        return f"{self.sha256} {self.head_sha256}".rstrip()

    @property
    def lineage(self) -> tuple[Ancestor, ...]:
        """The start itself and what it was trained from, nearest first."""
        own = {name: getattr(self, name) for name in Ancestor.model_fields}
        return (Ancestor.model_validate(own), *self.ancestors)


class TrialConfig(MetricsConfig, Grown):
    """Everything one trial needs; equal configurations on one machine give equal scores."""

    LATER = ("start", "retention", "verification", "fmr", "thresholds", "short_vectors", "reid")

    family: str
    phase: Literal["search", "verdict"] = "search"
    data: DataConfig
    embedder: EmbedderConfig
    batch: BatchConfig
    training: TrainingConfig
    augmentation: AugmentationConfig = AugmentationConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    hashing: Annotated[
        CodesConfig | None, Field(description="codes of frozen features are learned, and no embedder")
    ] = None
    online: Annotated[
        OnlineConfig | None, Field(description="a learner of a stream of constraints, and no embedder")
    ] = None
    loss: LossConfig
    regularizer: Annotated[LossConfig | None, Field(description="added to the loss; none: nothing is")] = None
    num_folds: Annotated[int, Field(ge=1, description="1: one held-out fold")] = 1
    fold_models: Annotated[bool, Field(description="a verdict trial trains a model per fold as well")] = False
    seed: int = 0
    objective: str = "map_at_r"
    measure_latency: Annotated[
        bool, Field(description="a search trial tells embed_ms_per_image, which no two runs measure alike")
    ] = False
    keep_embedder: Annotated[bool, Field(description="a verdict trial leaves its trained embedder")] = False
    start: Annotated[
        StartConfig | None, Field(description="what embedder.weights stood for when the study began")
    ] = None
    retention: Annotated[
        DataConfig | None,
        Field(description="data whose test classes a verdict trial's model is scored on as well"),
    ] = None
    thresholds: Annotated[
        dict[str, float],
        Field(
            description="of a verdict: scores that accept a pair, by wanted FMR, medians over the search's folds"
        ),
    ] = {}

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON: equal if and only if the configs are."""
        # A search trial computes the same with and without retention data.
        apart = {"start"} if self.phase == "verdict" else {"start", "retention"}
        values = self.model_dump(mode="json", exclude=apart)
        if self.start is not None and self.start.source.startswith(
            REGISTERED
        ):  # an alias may mean another later
            values["start"] = self.start.digests
        for earlier, present in EARLIER_KEYS.items():
            section, name = present.split(".")
            values[section][earlier.removeprefix(f"{section}.")] = values[section].pop(name)
        for key in DataConfig.SPEED:
            values["data"].pop(key, None)
            values.get("retention", {}).pop(key, None)
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class TrialReport(Record):
    """A trial's report after an epoch: ``step`` counts epochs over all folds, from 1."""

    step: int
    metrics: dict[str, float]


Unit: TypeAlias = Literal["class", "image", "row"]
"""A thing that stands for others of its kind in a verdict; a class with all its queries is one."""


Compared: TypeAlias = Literal["winner", "all"] | tuple[tuple[str, str], ...]
"""The pairs of families that a verdict compares: those with the winner, all, or these."""


MOST_SEEDS_IN_STEPS = 100
"""The most seeds of a verdict that adds them until it is decided."""


class SeedRange(Record):
    """Seeds of a verdict that adds them until it is decided: so many at first, and so many at most."""

    fewest: Annotated[
        int, Field(alias="from", ge=3, le=MOST_SEEDS_IN_STEPS, description="seeds before the first look")
    ]
    most: Annotated[int, Field(alias="to", ge=4, le=MOST_SEEDS_IN_STEPS, description="seeds at most")]

    @model_validator(mode="after")
    def _in_order(self) -> SeedRange:
        if self.fewest >= self.most:
            raise PydanticCustomError(
                "seed_range", "'from' must be less than 'to'; for a fixed number write the number alone"
            )
        return self

    def __str__(self) -> str:
        return f"{self.fewest} to {self.most}"


class UnitScores(Record):
    """Sums of a trial's metrics over the queries of each unit: a held-out class, or a single query.

    A query without a relevant item adds 0. A metric that is no mean over queries, as of clusters, is not among them.
    """

    units: list[int]
    """Labels of classes or numbers of queries, ascending."""
    counts: list[int]
    """Queries of each."""
    sums: dict[str, list[float]]
    """By the metric's bare name."""

    def digest(self) -> str:
        """The SHA-256 of units and counts: equal for trials that were judged by the same queries."""
        return hashlib.sha256(json.dumps([self.units, self.counts]).encode()).hexdigest()


class PairCounts(Record):
    """Pairs of test items that the thresholds of a verdict's model accept or reject, by class.

    Thresholds are by the rate of accepted impostors that they were set for on development classes, as ``1e-3``.
    """

    units: list[int]
    """Labels of classes, ascending."""
    impostors: list[int]
    """Pairs of an item of the class with one of another."""
    genuine: list[int]
    """Pairs of two items of the class."""
    shipped: str
    """The rate whose threshold ships with the model."""
    thresholds: dict[str, float]
    """The least score that is accepted."""
    accepted: dict[str, list[int]]
    """Of the impostors those that are accepted."""
    rejected: dict[str, list[int]]
    """Of the genuine pairs those that are not."""
    class_pairs: dict[str, int]
    """Different pairs of classes among accepted impostors; 5 stands for more, too."""
    curve: list[tuple[float, float, float]] = []
    """Score, FMR and FNMR, scores ascending."""


class TrialResult(Record):
    """The result of a trial that ends by itself."""

    metrics: dict[str, float]
    unit_scores: Annotated[UnitScores | None, Field(description="of a verdict whose task has units")] = None
    of_folds: Annotated[
        tuple[UnitScores, ...], Field(description="of a search: of each fold's held-out items")
    ] = ()
    pair_counts: Annotated[PairCounts | None, Field(description="of a verdict with thresholds")] = None
    embedder_folder: Annotated[str | None, Field(description="where the trained embedder was saved")] = None


class RecordedEnd(NamedTuple):
    """The end of a search trial's run; ``values`` are the trial's objectives if it finished."""

    run_id: str
    status: Status
    reason: str
    values: list[float]
    settled: Mapping[str, float] = {}
    """The choices of the folds, by their names among the metrics."""
