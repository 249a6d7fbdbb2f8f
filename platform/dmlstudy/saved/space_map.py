"""A learned map from one model's embeddings to another's, as a folder of the form of a saved model.

| kind | f(z) | learned |
|---|---|---|
| linear | (z - m) A + b | A by ridge regression, in closed form |
| orthogonal | z A, A of orthonormal rows or columns | A by Procrustes, in closed form |
| mlp | (z - m) A + b + max(0, (z - m) W + c) V | A, b by ridge regression, then W, c and V on what is left |

Where the target's embeddings are unit vectors, f(z) / |f(z)| is. The folder holds ``map.json``, which names both models
by their fingerprints, ``weights.safetensors`` and ``manifest.json``; NumPy alone computes with it.

Shapes: N items, D size of the source's embeddings, E of the target's, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.numpy import save_file

from dmlstudy import model_folder
from dmlstudy.files import draft_folder, put_in_place
from dmlstudy.text import reason

MapKind: TypeAlias = Literal["linear", "orthogonal", "mlp"]
MAP_KINDS: tuple[MapKind, ...] = get_args(MapKind)

DESCRIPTION = "map.json"
FORMAT_VERSION = 1

_ROWS_AT_ONCE = 1 << 14
_Size = Annotated[int, Field(ge=1, le=1 << 16)]


class MapDescription(BaseModel):
    """Of ``map.json``; fields added by later versions are ignored.

    ``source`` and ``target`` are the fingerprints of the models, ``told`` is what is known of it: the data that it was
    fitted on and its scores on unseen classes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format_version: int
    kind: MapKind
    source: str
    target: str
    source_name: str
    target_name: str
    source_dim: _Size
    target_dim: _Size
    is_unit: bool
    told: dict[str, Any] = {}


@dataclass(frozen=True, eq=False)
class SpaceMap:
    """A map; ``weights`` are those of its kind, float32. ``digest`` is the SHA-256 of its folder's manifest.

    A map that was not saved has no digest.
    """

    described: MapDescription
    weights: Mapping[str, NDArray[np.float32]]
    digest: str = field(default="")

    @property
    def source(self) -> str:
        return self.described.source

    @property
    def target(self) -> str:
        return self.described.target

    def __call__(self, z_ND: NDArray[Any]) -> NDArray[np.float32]:
        """The embeddings (N, E) in the target's space. Raises ValueError for embeddings of another size."""
        if z_ND.ndim != 2 or z_ND.shape[1] != self.described.source_dim:
            raise ValueError(
                f"the map takes embeddings of size {self.described.source_dim}, not an array {z_ND.shape}"
            )
        out_NE = np.empty((len(z_ND), self.described.target_dim), np.float32)
        for start in range(0, len(z_ND), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            out_NE[rows] = self._mapped(np.asarray(z_ND[rows], np.float32))
        return out_NE

    def _mapped(self, z_BD: NDArray[np.float32]) -> NDArray[np.float32]:
        weights = self.weights
        if self.described.kind == "orthogonal":
            out_BE = z_BD @ weights["A"]
        else:
            z_BD = z_BD - weights["m"]
            out_BE = z_BD @ weights["A"] + weights["b"]
        if self.described.kind == "mlp":
            out_BE = out_BE + np.maximum(z_BD @ weights["W"] + weights["c"], 0) @ weights["V"]
        if not self.described.is_unit:
            return np.asarray(out_BE, np.float32)
        norm_B1 = np.linalg.norm(out_BE.astype(np.float64), axis=1, keepdims=True)
        return (out_BE / np.where(norm_B1 > 0, norm_B1, 1)).astype(np.float32)

    def save(self, folder: str | Path) -> SpaceMap:
        """The same in a new folder, whole or not at all, with its digest. Raises ValueError for one that is there."""
        folder = Path(folder)
        if folder.exists():
            raise ValueError(f"{folder}: exists already; name a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with draft_folder(folder) as draft:
            save_file(
                {name: np.ascontiguousarray(value, np.float32) for name, value in self.weights.items()},
                draft / model_folder.WEIGHTS,
            )
            model_folder.describe(draft / DESCRIPTION, self.described.model_dump(mode="json"), None)
            model_folder.seal(draft)
            put_in_place(draft, folder)
        return SpaceMap.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> SpaceMap:
        """The map in a folder, each of its files checked. Raises ValueError naming the file at fault."""
        folder = Path(folder)
        if not (folder / DESCRIPTION).is_file():
            raise ValueError(
                f"{folder}: holds no {DESCRIPTION}; name a folder that `dmlstudy compare --save-maps` made"
            )
        digest = model_folder.verify(folder, DESCRIPTION)
        path = folder / DESCRIPTION
        content = model_folder.read_json(path)
        if content.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path}: format {content.get('format_version')!r}, this version reads {FORMAT_VERSION}; fit the map"
                " anew"
            )
        try:
            described = MapDescription.model_validate(content)
        except ValidationError as error:
            raise ValueError(f"{path}: not understood ({reason(error)}); fit the map anew") from None
        weights = model_folder.read_arrays(folder / model_folder.WEIGHTS)
        _check_weights(described, weights, folder / model_folder.WEIGHTS)
        return cls(described, weights, digest)


def _check_weights(described: MapDescription, weights: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Raise ValueError where the arrays in a file are not those of the map's kind and sizes."""
    source, target = described.source_dim, described.target_dim
    shapes: dict[str, tuple[int, ...]] = {"A": (source, target)}
    if described.kind != "orthogonal":
        shapes |= {"m": (source,), "b": (target,)}
    if described.kind == "mlp":
        hidden = weights["c"].shape[0] if "c" in weights and weights["c"].ndim == 1 else 0
        shapes |= {"W": (source, hidden), "c": (hidden,), "V": (hidden, target)}
    found = {name: value.shape for name, value in weights.items()}
    if found != shapes or any(value.dtype != np.float32 for value in weights.values()):
        raise ValueError(f"{path}: holds {found}, expected {shapes} of float32; fit the map anew")
    if not all(np.isfinite(value).all() for value in weights.values()):
        raise ValueError(f"{path}: holds numbers that are not finite; fit the map anew")


def check_map_kind(text: str) -> MapKind:
    """The kind of a map. Raises ValueError for anything else."""
    known: dict[str, MapKind] = {each: each for each in MAP_KINDS}
    if text not in known:
        raise ValueError(f"--map {text}: choose from {', '.join(known)}")
    return known[text]
