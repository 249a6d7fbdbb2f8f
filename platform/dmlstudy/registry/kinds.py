"""The kinds of models that can be registered, told apart by the description in their folder.

Each is one function: inputs to embeddings or codes. Loading one waits for the libraries that it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dmlstudy import model_folder
from dmlstudy.model_folder import Compute


class Kind(NamedTuple):
    """What a model is called, its program for torch alone if it can have one, and what it computes."""

    name: str
    add_program: Callable[[Path], None] | None
    load: Callable[[Path], Compute]


def _load_embedder(folder: Path) -> Compute:
    """Images uint8 (N, H, W, C), or float32 vectors (N, F), to float32 unit vectors (N, D)."""
    from dmlstudy import embedders

    return functools.partial(embedders.embed, embedders.load(folder))


def _add_program(folder: Path) -> None:
    from dmlstudy import embedders

    embedders.add_program(folder)


def _load_codes(folder: Path) -> Compute:
    """Features float32 (N, F) to codes of +1 and -1, int8 (N, bits)."""
    from dmlstudy import hashing

    return hashing.load(folder).codes


def _load_learner(folder: Path) -> Compute:
    """Features float32 (N, D) to float32 vectors whose squared distances are the layers', weighted by alpha."""
    from dmlstudy import online

    return online.load(folder).embed


KINDS: Mapping[str, Kind] = {
    "embedder.json": Kind("embedder", _add_program, _load_embedder),
    "hashing.json": Kind("hashing model", None, _load_codes),
    "online.json": Kind("online learner", None, _load_learner),
}
"""By the name of their description."""


def kind_of(folder: str | Path) -> Kind:
    """The kind of model in a folder. Raises ValueError for a folder of none."""
    for description, kind in KINDS.items():
        if (Path(folder) / description).is_file():
            return kind
    raise ValueError(f"{folder}: holds none of {', '.join(KINDS)}; is this the folder of a saved model?")


def is_model(folder: str | Path) -> bool:
    """Whether the folder looks like that of a saved model."""
    return any((Path(folder) / description).is_file() for description in KINDS)


def takes_images(folder: str | Path) -> bool:
    """Whether the model's inputs are images, and not vectors."""
    path = Path(folder) / "embedder.json"
    return path.is_file() and bool(model_folder.read_json(path)["architecture"]["image_size"])


def verified(folder: str | Path) -> Compute:
    """The model in a folder, after each file was checked. Raises ValueError naming the file at fault."""
    folder = Path(folder)
    kind = kind_of(folder)
    model_folder.verify(folder)
    return kind.load(folder)


def extra(folder: str | Path) -> dict[str, Any]:
    """What was noted with the model: its family, configuration and origin."""
    (description,) = (name for name in KINDS if (Path(folder) / name).is_file())
    return model_folder.read_extra(Path(folder) / description)
