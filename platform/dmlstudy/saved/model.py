"""A saved model as one value: its folder is verified once, when it is opened, and its network is loaded once.

What needs a model is given this value, so a process holds one copy of the network. Opening waits for no torch: the
libraries that a kind needs are imported when its network is loaded.

Shapes: N items, Q queries, D embedding size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmlstudy import description, model_folder
from dmlstudy.records import CURVATURE

if TYPE_CHECKING:
    from dmlstudy.data import Fit
    from dmlstudy.saved.items import Items

Queries: TypeAlias = "tuple[NDArray[Any], NDArray[np.float32] | None]"
"""Embeddings of queries and, of a model with a structure head, their structure embeddings omega."""

MEND = "save the model again"
"""The advice on a description that is not understood."""


class Network(NamedTuple):
    """A loaded network with what it computes: of items, as a gallery has them, and of queries.

    ``layers``, of an embedding that is [sqrt(alpha^0) f^0, ..., sqrt(alpha^L) f^L], is the sizes and alpha.
    """

    network: Any
    compute: model_folder.Compute
    query: Callable[[NDArray[Any]], Queries]
    has_structure: bool = False
    layers: tuple[list[int], NDArray[np.float64]] | None = None


class Takes(NamedTuple):
    """A model's inputs: images of a size and channels, or vectors of so many features."""

    image_size: int | None
    channels: int
    num_features: int


class ModelKind(NamedTuple):
    """A kind of model: its name, how its network is loaded, and how its folder gets a program for torch alone.

    The flags are those of ``Model``.
    """

    name: str
    load: Callable[[Path, str, int], Network]
    add_program: Callable[[Path], None]
    gives_unit_vectors: bool = False
    is_symmetric: bool = True


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """An embedder, a hashing model or an online learner, opened from its folder; made by ``Model.open``.

    ``fingerprint`` is the SHA-256 (hex) of the manifest, which lists that of every file. An embedder computes on
    ``device``, the others on the CPU.
    """

    folder: Path
    fingerprint: str
    takes: Takes
    device: str
    batch_size: int
    name: str
    _kind: ModelKind
    _described: Mapping[str, Any]
    threshold: description.ThresholdDescription | None = None
    """The least score that is accepted, and what it does on unseen classes; None of a model that was given none."""

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        device: str = "cpu",
        batch_size: int = 256,
        name: str | None = None,
        fingerprint: str | None = None,
    ) -> Model:
        """The model in a folder, after each file was checked; a ``device`` 'auto' is a GPU if there is one.

        ``fingerprint`` is the one that it must have. ``name`` is what people call it, by default the folder.

        Raises ValueError naming the file at fault.
        """
        folder = Path(folder)
        file = _description(folder)
        own = model_folder.verify(folder, file, fingerprint=fingerprint)
        described = model_folder.read_json(folder / file)
        takes = _takes(folder / file, described)
        threshold = _threshold(folder)
        called = name or str(folder)
        return cls(folder, own, takes, device, batch_size, called, KINDS[file], described, threshold)

    @property
    def kind(self) -> str:
        """The name of its kind: embedder, hashing model or online learner."""
        return self._kind.name

    @property
    def gives_unit_vectors(self) -> bool:
        """True if embeddings have norm 1."""
        return (
            self._kind.gives_unit_vectors
            and self.curvature is None
            and self._described["architecture"].get("unit_norm", True) is True
        )

    @property
    def curvature(self) -> float | None:
        """The curvature of the ball that embeddings are points of, by hyperbolic distance; None of others."""
        architecture = self._described.get("architecture", {})
        if architecture.get("space", "sphere") != "ball":
            return None
        return float(architecture.get("curvature", CURVATURE))

    @property
    def uncut(self) -> str:
        """The reason why leading parts of its embeddings, and few bits of each number, mean nothing; empty if they do.

        The same reasons keep a study from scoring short vectors of it.
        """
        if self._kind.name != "embedder":
            return f"embeddings are of no embedder ({self._kind.name})"
        architecture = self._described["architecture"]
        reasons = {
            "embeddings are points of a ball": architecture.get("space", "sphere") == "ball",
            "embeddings have no unit norm": architecture.get("unit_norm", True) is not True,
            "embeddings are codes": architecture.get("code", "none") != "none",
            "embeddings are of several layers": bool(architecture.get("head_depth", 0)),
            "embeddings are of several heads": architecture.get("fusion", "none") in ("heads", "unit_heads"),
            "the model has a structure head": architecture.get("structure", "none") != "none",
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def dim(self) -> int | None:
        """The size of its embeddings, as its example has them; None of a model without an example."""
        return None if self.example is None else int(self.example[1].shape[1])

    @property
    def is_symmetric(self) -> bool:
        """True if queries are embedded as a gallery's items are."""
        return self._kind.is_symmetric

    @functools.cached_property
    def loaded(self) -> Network:
        """The network, loaded when it is first asked for. Raises ValueError naming the file at fault."""
        return self._kind.load(self.folder, self.device, self.batch_size)

    @property
    def compute(self) -> model_folder.Compute:
        """Embeddings (N, D), or codes, of items as the model takes them."""
        return self.loaded.compute

    @property
    def query(self) -> Callable[[NDArray[Any]], Queries]:
        """The same of queries, with what ``has_structure`` promises."""
        return self.loaded.query

    @property
    def has_structure(self) -> bool:
        """True if there is a structure head."""
        return self.loaded.has_structure

    @property
    def layers(self) -> tuple[list[int], NDArray[np.float64]] | None:
        """The sizes and weights of the layers that an embedding is made of; None where it is of one."""
        return self.loaded.layers

    def embed(self, items: Items) -> NDArray[Any]:
        """The embeddings (N, D), or codes, of the items in their order.

        An array holds images, uint8 NHW or NHWC, which become what the model was trained on; or vectors (N, F). A path
        is anything that ``dmlstudy embed`` reads, and there may be several. Raises ValueError for items of another kind
        or size, naming the file at fault.
        """
        from dmlstudy.saved import items as given

        return np.concatenate([self.compute(part_N) for part_N in given.batches(self, items)])

    @functools.cached_property
    def example(self) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """The inputs that were kept with the model, and what training computed of them; None without any."""
        return model_folder.read_example(self.folder)

    @functools.cached_property
    def notes(self) -> dict[str, Any]:
        """The notes saved with the model: its family, configuration and origin. Raises ValueError for other forms."""
        file = next(name for name, kind in KINDS.items() if kind is self._kind)
        return model_folder.checked_extra(self._described, self.folder / file)

    @functools.cached_property
    def preprocessing(self) -> dict[str, Any]:
        """The description of the preprocessing; empty if the model takes vectors and says no more."""
        return preprocessing_in(self._described)

    @functools.cached_property
    def fit(self) -> Fit | None:
        """The conversion of pictures to the model's images, as in its training; None for a model of vectors.

        A model from before ``preprocessing`` told it in full keeps its way. Raises ValueError where it is not
        understood.
        """
        from dmlstudy.data import preprocessing as described_fit

        if self.takes.image_size is None:
            return None
        fit = described_fit.fit_of(self.preprocessing, str(self.folder))
        if fit is not None:
            return fit
        before = self.notes.get("config", {}).get("data", {})
        return described_fit.fit_before(self.preprocessing, before, str(self.folder))

    def __repr__(self) -> str:
        size, channels, num_features = self.takes
        what = (
            f"images {size} x {size} x {channels}" if size else f"vectors of {num_features or 'any'} numbers"
        )
        return f"<{self.kind} {self.name} of {what}>"


def is_model(folder: str | Path) -> bool:
    """True if the folder looks like that of a saved model."""
    return any((Path(folder) / description).is_file() for description in KINDS)


def kind_of(folder: str | Path) -> ModelKind:
    """The kind of model in a folder, which is not verified. Raises ValueError for a folder of none."""
    return KINDS[_description(folder)]


def preprocessing_of(folder: str | Path) -> dict[str, Any]:
    """As ``Model.preprocessing``, of a folder that is not verified."""
    return preprocessing_in(model_folder.read_json(Path(folder) / _description(folder)))


def notes_of(folder: str | Path) -> dict[str, Any]:
    """As ``Model.notes``, of a folder that is not verified."""
    return model_folder.read_extra(Path(folder) / _description(folder))


def preprocessing_in(described: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a model's description that says how pictures become its inputs."""
    part = described.get("preprocessing", {})
    return dict(part) if isinstance(part, Mapping) else {}


def _description(folder: str | Path) -> str:
    """The name of the only description in a folder."""
    there = [name for name in KINDS if (Path(folder) / name).is_file()]
    if not there:
        raise ValueError(f"{folder}: holds none of {', '.join(KINDS)}; is this the folder of a saved model?")
    if len(there) > 1:
        raise ValueError(f"{folder}: holds {' and '.join(there)}, but is of one kind; copy the folder again")
    return there[0]


def _takes(path: Path, described: Mapping[str, Any]) -> Takes:
    """The inputs of the model of the description that was read from ``path``."""
    if path.name != "embedder.json":
        kind: type[description.HashingDescription | description.OnlineDescription] = (
            description.HashingDescription if path.name == "hashing.json" else description.OnlineDescription
        )
        return Takes(None, 0, description.understood(described, path, kind, MEND).input.features)
    read = description.understood(described, path, description.EmbedderDescription, MEND)
    architecture = read.architecture
    size, channels = architecture.image_size, architecture.in_channels
    return Takes(size[0] if size else None, channels, 0 if size else channels)


def _threshold(folder: Path) -> description.ThresholdDescription | None:
    """The threshold in a model's folder, if there is one. Raises ValueError naming a file that is not understood."""
    path = folder / model_folder.THRESHOLD
    if not path.is_file():
        return None
    return description.described(path, description.ThresholdDescription, "pull the model again")


def _load_embedder(folder: Path, device: str, batch_size: int) -> Network:
    """Images uint8 (N, H, W, C), or float32 vectors (N, F), to float32 vectors (N, D)."""
    import torch

    from dmlstudy import embedders

    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    network = embedders.load(folder, verify=False).to(place)
    how: dict[str, Any] = {"batch_size": batch_size, "device": place}
    return Network(
        network,
        functools.partial(embedders.embed, network, **how),
        functools.partial(embedders.embed_with_structure, network, **how),
        network.structure_head is not None,
        network.layers,
    )


def _load_codes(folder: Path, device: str, batch_size: int) -> Network:
    """Features float32 (N, F) to codes of +1 and -1, int8 (N, bits)."""
    from dmlstudy import hashing

    network = hashing.load(folder, verify=False)
    has_omega = network.structure is not None
    return Network(
        network,
        network.codes,
        lambda x_NF: (network.codes(x_NF), network.omega(x_NF) if has_omega else None),
        has_omega,
    )


def _load_learner(folder: Path, device: str, batch_size: int) -> Network:
    """Features float32 (N, F) to float32 vectors whose squared distances are the layers', weighted by alpha."""
    from dmlstudy import online

    learned = online.load(folder, verify=False)
    sizes = [f_1E.shape[1] for f_1E in learned.learner.embed(np.zeros((1, learned.learner.num_features)))]
    layers = (sizes, learned.learner.layer_weights) if len(sizes) > 1 else None
    return Network(learned, learned.embed, lambda x_NF: (learned.embed(x_NF, "query"), None), False, layers)


def _add_embedder(folder: Path) -> None:
    from dmlstudy import embedders

    embedders.add_program(folder)


def _add_codes(folder: Path) -> None:
    from dmlstudy.hashing.program import add_program

    add_program(folder)


def _add_learner(folder: Path) -> None:
    from dmlstudy.online.program import add_program

    add_program(folder)


KINDS: Mapping[str, ModelKind] = {
    "embedder.json": ModelKind("embedder", _load_embedder, _add_embedder, gives_unit_vectors=True),
    "hashing.json": ModelKind("hashing model", _load_codes, _add_codes),
    "online.json": ModelKind("online learner", _load_learner, _add_learner, is_symmetric=False),
}
"""By the name of their description."""
