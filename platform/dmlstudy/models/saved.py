"""The kinds of models that can be registered, told apart by the description in their folder.

Each is one function: inputs to embeddings or codes. Loading one waits for the libraries that it needs.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy import model_folder
from dmlstudy.model_folder import Compute

if TYPE_CHECKING:
    from dmlstudy.data import Fit


class Kind(NamedTuple):
    """A kind of model: its name, how its folder gets a program for torch alone, and what it computes."""

    name: str
    add_program: Callable[[Path], None]
    load: Callable[[Path, str, int], Compute]


class Takes(NamedTuple):
    """A model's inputs: images of a size and channels, or vectors of so many features."""

    image_size: int | None
    channels: int
    num_features: int


def _place(device: str) -> str:
    """The device itself; of "auto" a GPU if there is one."""
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _load_embedder(folder: Path, device: str, batch_size: int) -> Compute:
    """Images uint8 (N, H, W, C), or float32 vectors (N, F), to float32 unit vectors (N, D)."""
    from dmlstudy import embedders

    place = _place(device)
    embedder = embedders.load(folder).to(place)
    return functools.partial(embedders.embed, embedder, batch_size=batch_size, device=place)


def _add_embedder(folder: Path) -> None:
    from dmlstudy import embedders

    embedders.add_program(folder)


def _add_codes(folder: Path) -> None:
    from dmlstudy.hashing.program import add_program

    add_program(folder)


def _add_learner(folder: Path) -> None:
    from dmlstudy.online.program import add_program

    add_program(folder)


def _load_codes(folder: Path, device: str, batch_size: int) -> Compute:
    """Features float32 (N, F) to codes of +1 and -1, int8 (N, bits)."""
    from dmlstudy import hashing

    return hashing.load(folder).codes


def _load_learner(folder: Path, device: str, batch_size: int) -> Compute:
    """Features float32 (N, D) to float32 vectors whose squared distances are the layers', weighted by alpha."""
    from dmlstudy import online

    return online.load(folder).embed


KINDS: Mapping[str, Kind] = {
    "embedder.json": Kind("embedder", _add_embedder, _load_embedder),
    "hashing.json": Kind("hashing model", _add_codes, _load_codes),
    "online.json": Kind("online learner", _add_learner, _load_learner),
}
"""By the name of their description."""


def kind_of(folder: str | Path) -> Kind:
    """The kind of model in a folder. Raises ValueError for a folder of none."""
    return KINDS[_description(folder)]


def _description(folder: str | Path) -> str:
    """The name of the only description in a folder."""
    there = [name for name in KINDS if (Path(folder) / name).is_file()]
    if not there:
        raise ValueError(f"{folder}: holds none of {', '.join(KINDS)}; is this the folder of a saved model?")
    if len(there) > 1:
        raise ValueError(f"{folder}: holds {' and '.join(there)}, but is of one kind; copy the folder again")
    return there[0]


def is_model(folder: str | Path) -> bool:
    """Whether the folder looks like that of a saved model."""
    return any((Path(folder) / description).is_file() for description in KINDS)


def takes(folder: str | Path) -> Takes:
    """The inputs of the model in a folder. Raises ValueError for a folder of none."""
    from dmlstudy import description

    path = Path(folder) / _description(folder)
    if path.name != "embedder.json":
        kind: type[description.HashingDescription | description.OnlineDescription] = (
            description.HashingDescription if path.name == "hashing.json" else description.OnlineDescription
        )
        return Takes(None, 0, description.described(path, kind, "save the model again").input.features)
    architecture = description.described(
        path, description.EmbedderDescription, "save the model again"
    ).architecture
    size, channels = architecture.image_size, architecture.in_channels
    return Takes(size[0] if size else None, channels, 0 if size else channels)


def gives_unit_vectors(folder: str | Path) -> bool:
    """Whether the embeddings of the model in a folder have norm 1. Raises ValueError for a folder of none."""
    return kind_of(folder).name == "embedder"


def verified(folder: str | Path, *, device: str = "cpu", batch_size: int = 256) -> Compute:
    """The model in a folder, after each file was checked.

    An embedder computes on ``device``, for "auto" on a GPU if there is one; the others on the CPU. Raises ValueError
    naming the file at fault.
    """
    folder = Path(folder)
    kind = kind_of(folder)
    model_folder.verify(folder)
    return kind.load(folder, device, batch_size)


class Parts(NamedTuple):
    """The parts of a model that search needs: ``embed`` gives queries' embeddings and, with a structure head, omega.

    ``layers``, of an embedding that is [sqrt(alpha^0) f^0, ..., sqrt(alpha^L) f^L], is the sizes and alpha.
    """

    embed: Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[np.float32] | None]]
    has_structure: bool
    layers: tuple[list[int], NDArray[np.float64]] | None


def parts(folder: str | Path, device: str = "cpu") -> Parts:
    """The parts of the model in a folder, after each file was checked. Raises ValueError as ``verified``."""
    folder = Path(folder)
    kind = kind_of(folder)
    model_folder.verify(folder)
    if kind.name == "hashing model":
        from dmlstudy import hashing

        model = hashing.load(folder)
        has_omega = model.structure is not None
        return Parts(
            lambda x_NF: (model.codes(x_NF), model.omega(x_NF) if has_omega else None), has_omega, None
        )
    if kind.name == "online learner":
        from dmlstudy import online

        learned = online.load(folder)
        sizes = [f_1E.shape[1] for f_1E in learned.learner.embed(np.zeros((1, learned.learner.num_features)))]
        layers = (sizes, learned.learner.layer_weights) if len(sizes) > 1 else None
        return Parts(lambda x_ND: (learned.embed(x_ND, "query"), None), has_structure=False, layers=layers)
    from dmlstudy import embedders

    place = _place(device)
    embedder = embedders.load(folder).to(place)
    return Parts(
        functools.partial(embedders.embed_with_structure, embedder, device=place),
        embedder.structure_head is not None,
        embedder.layers,
    )


def fingerprint(folder: str | Path) -> str:
    """The SHA-256 (hex) of the manifest, which lists that of every file."""
    return hashlib.sha256((Path(folder) / model_folder.MANIFEST).read_bytes()).hexdigest()


def extra(folder: str | Path) -> dict[str, Any]:
    """Notes kept with the model: its family, configuration and origin. Raises ValueError for a folder of none."""
    return model_folder.read_extra(Path(folder) / _description(folder))


def preprocessing(folder: str | Path) -> dict[str, Any]:
    """A model's description of its preprocessing; empty if it takes vectors and says no more."""
    described = model_folder.read_json(Path(folder) / _description(folder)).get("preprocessing", {})
    return dict(described) if isinstance(described, Mapping) else {}


def fit_of(folder: str | Path) -> Fit | None:
    """How pictures become the model's images, as in its training; None for a model of vectors.

    A model from before ``preprocessing`` told it in full keeps its way. Raises ValueError where it is not understood.
    """
    from dmlstudy.data import preprocessing as described_fit

    if takes(folder).image_size is None:
        return None
    described = preprocessing(folder)
    fit = described_fit.fit_of(described, str(folder))
    if fit is not None:
        return fit
    return described_fit.fit_before(described, extra(folder).get("config", {}).get("data", {}), str(folder))
