"""The description in a model's folder, read strictly: each field of its type and within its bounds.

Folders are copied between people: a description may have been changed by anyone, and must not take a machine's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dmlstudy.model_folder import MOST_SIDE, read_json
from dmlstudy.records import CLIP_RADIUS, CURVATURE
from dmlstudy.text import reason

FORMAT_VERSION = 1

Text: TypeAlias = Annotated[str, Field(max_length=500)]
Size: TypeAlias = Annotated[int, Field(ge=1, le=1 << 16)]
Features: TypeAlias = Annotated[int, Field(ge=1, le=1 << 22)]
Side: TypeAlias = Annotated[int, Field(ge=1, le=MOST_SIDE)]
Parameters: TypeAlias = dict[Text, bool | Annotated[int, Field(ge=-(1 << 40), le=1 << 40)] | float | Text]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class _Part(BaseModel):
    """Of which only some fields are read here."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", protected_namespaces=())


def _none_or_two(sides: list[int]) -> list[int]:
    if len(sides) == 1:
        raise ValueError("is [height, width], or [] for vectors")
    return sides


class ArchitectureFields(_Strict):
    """The arguments that an embedder is built with again."""

    backbone: Text
    dim: Size
    width: Size
    weights: Text | None
    freeze_bn: bool
    in_channels: Features
    image_size: Annotated[list[Side], Field(max_length=2), AfterValidator(_none_or_two)]
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    structure: Text = "none"
    fusion: Text = "none"
    pooling: Text = "own"
    head_norm: bool = False
    code: Text = "none"
    head_depth: Annotated[int, Field(ge=0, le=64)] = 0
    head_width: Size = 100
    head: Text = "linear"
    structure_input: Text = "none"
    unit_norm: bool = True
    space: Literal["sphere", "ball"] = "sphere"
    curvature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = CURVATURE
    clip_radius: Annotated[float, Field(gt=0, allow_inf_nan=False)] = CLIP_RADIUS


class EmbedderDescription(_Part):
    """Of ``embedder.json``."""

    architecture: ArchitectureFields


class RecipeFields(_Strict):
    """The arguments that a hashing model is built with again."""

    name: Text
    num_bits: Size
    num_features: Features
    params: Parameters
    term: Annotated[list[Text | Parameters], Field(min_length=2, max_length=2)] | None = None


class InputFields(_Part):
    """The inputs of a model of vectors."""

    features: Features


class HashingDescription(_Part):
    """Of ``hashing.json``."""

    model: RecipeFields
    input: InputFields


class LearnerFields(_Strict):
    """The arguments that an online learner is built with again."""

    name: Text
    params: Parameters


class OnlineDescription(_Part):
    """Of ``online.json``."""

    learner: LearnerFields
    scaling: Text
    input: InputFields


Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Count: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]


class RateFields(_Strict):
    """A share of pairs, with intervals over classes; null where there is none."""

    num: Count
    total: Annotated[int, Field(ge=1, lt=1 << 63)]
    rate: Share
    low: Share | None
    high: Share | None
    new_low: Share | None
    new_high: Share | None


class ThresholdDescription(_Part):
    """Of ``threshold.json``: the least score that is accepted, and what it does on unseen classes.

    The score is the cosine of two embeddings.
    """

    tau: Annotated[float, Field(ge=-1.01, le=1.01)]
    wanted_fmr: Share
    num_classes: Count
    fmr: RateFields
    fnmr: RateFields
    words: Text
    on_new_classes: Text
    warnings: Annotated[list[Text], Field(max_length=10)]


T = TypeVar("T", bound=BaseModel)


def described(path: Path, kind: type[T], mend: str) -> T:
    """The description in a file. Raises ValueError naming the file, the field and the ``mend``."""
    return understood(read_json(path), path, kind, mend)


def understood(content: Mapping[str, Any], path: Path, kind: type[T], mend: str) -> T:
    """The same of what was read from ``path``. Raises ValueError for another format, too."""
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format version {version!r}, this dmlstudy reads {FORMAT_VERSION}; {mend}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{path}: not understood ({reason(error)}); {mend}") from None
