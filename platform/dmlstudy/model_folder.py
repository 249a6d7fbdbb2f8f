"""A model as a folder that outlives this project: weights, description, an example, a manifest. Nothing is unpickled.

``weights.safetensors``  what was learned
``<kind>.json``          how to build it, and what goes in and comes out: embedder.json, hashing.json or online.json
``example.safetensors``  if added, a few inputs ``x`` and the outputs ``z`` that training computed of them
``threshold.json``       if added, the least score that is accepted
``manifest.json``        SHA-256 of each other file in the folder, written last
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dmlstudy.files import sha256, written_whole
from dmlstudy.text import reason

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Compute: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]
"""A model as a function: inputs, first axis the items, to embeddings or codes."""

MOST_SIDE = 1 << 14
"""Pixels of a side that a picture is made to have: beyond it no memory is enough."""

WEIGHTS, EXAMPLE, MANIFEST = "weights.safetensors", "example.safetensors", "manifest.json"
THRESHOLD = "threshold.json"


def clear(folder: str | Path, *others: str) -> Path:
    """The folder, made if missing, without the manifest and further files of a model saved there before.

    So a crash before ``seal`` leaves nothing that ``verify`` accepts.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (MANIFEST, EXAMPLE, THRESHOLD, *others):
        (folder / stale).unlink(missing_ok=True)
    return folder


def describe(path: Path, description: Mapping[str, JSON], extra: Mapping[str, JSON] | None) -> None:
    """Write a model's description, with ``extra`` under this name."""
    path.write_text(json.dumps({**description, "extra": dict(extra or {})}, indent=2) + "\n")


def add_example(folder: Path, x_N: NDArray[Any] | None, compute: Compute) -> None:
    """Keep some inputs with what the model makes of them here and now; before ``seal``. None: no example."""
    if x_N is not None:
        save_file({"x": np.array(x_N, order="C"), "z": np.array(compute(x_N), order="C")}, folder / EXAMPLE)


def add_threshold(folder: Path, threshold: Mapping[str, JSON]) -> None:
    """Keep a threshold (``description.ThresholdDescription``) with a model; before ``seal``."""
    (folder / THRESHOLD).write_text(
        json.dumps({"format_version": 1, **threshold}, indent=2) + "\n", encoding="utf-8"
    )


def example(folder: str | Path) -> NDArray[Any] | None:
    """The inputs of a folder's example; None without one."""
    kept = read_example(folder)
    return None if kept is None else kept[0]


def largest_deviation(folder: str | Path, compute: Compute) -> float | None:
    """The largest difference between the example's outputs as saved and as computed now; None without one."""
    kept = read_example(folder)
    return None if kept is None else deviation(kept, compute)


def deviation(example: tuple[NDArray[Any], NDArray[Any]], compute: Compute) -> float:
    """The same of an example that was read."""
    x_N, z_N = example
    return float(np.abs(compute(x_N).astype(np.float64) - z_N).max(initial=0))


def read_example(folder: str | Path) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """The inputs of a folder's example and the outputs that were saved with them; None without one."""
    path = Path(folder) / EXAMPLE
    if not path.is_file():
        return None
    kept = read_arrays(path)
    name = "x" if "x" in kept else "images"  # images: as long as there were only embedders
    for each in (name, "z"):
        if each not in kept or kept[each].ndim == 0:
            raise ValueError(f"{path}: holds no array {each}; save the model again")
    if len(kept[name]) != len(kept["z"]):
        raise ValueError(
            f"{path}: {len(kept[name])} inputs and {len(kept['z'])} outputs; save the model again"
        )
    return kept[name], kept["z"]


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays in a file of safetensors. Raises ValueError naming a file that is anything else."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path}: not a readable safetensors file ({reason(error)}); copy the folder again"
        ) from None


def seal(folder: str | Path) -> None:
    """Write the manifest over every file now in ``folder``: call it again after adding files."""
    folder = Path(folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    manifest = {p.relative_to(folder).as_posix(): sha256(p) for p in files}
    with written_whole(folder / MANIFEST, folder / f".{MANIFEST}.{os.getpid()}.draft") as file:
        file.write(f"{json.dumps(manifest, indent=2)}\n".encode())


def verify(folder: str | Path, *needed: str, fingerprint: str | None = None) -> str:
    """Check every file against the manifest, which must list the weights and those that are ``needed``, and all others.

    Returns the SHA-256 (hex) of the manifest; ``fingerprint`` is what that must be. Raises ValueError naming the file
    that is missing, altered, a link, or absent from the manifest.
    """
    folder = Path(folder)
    content = _content(folder / MANIFEST)
    own = hashlib.sha256(content).hexdigest()
    if fingerprint not in (None, own):
        raise ValueError(f"{MANIFEST} is not the one that was registered; do not use it")
    manifest = _object(folder / MANIFEST, content)
    for name in (WEIGHTS, *needed):
        if name not in manifest:
            raise ValueError(f"{folder / MANIFEST}: does not list {name}; save the model again")
    for name, expected in manifest.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{folder / MANIFEST}: {name!r} lies outside the folder; do not trust it")
        if (folder / name).is_symlink():
            raise ValueError(f"{folder / name}: a link, not the file itself; copy the folder again")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: listed in the manifest, but missing; copy the folder again")
        if sha256(folder / name) != expected:
            raise ValueError(
                f"{folder / name}: altered since it was saved, by its SHA-256 in {MANIFEST}; copy the folder again"
            )
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or name in manifest or name == MANIFEST):
            raise ValueError(
                f"{path}: a {_called(path)} that the manifest does not list; take it out of the folder"
            )
    return own


def _called(path: Path) -> str:
    return "link" if path.is_symlink() else "file"


def read_extra(path: Path) -> dict[str, Any]:
    """The notes that were given to ``describe`` beside the description; empty if there were none."""
    return checked_extra(read_json(path), path)


def checked_extra(description: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The same of a description that was read from ``path``. Raises ValueError for notes of another form."""
    content = description.get("extra", {})
    try:
        _Extra.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{path}: extra.{reason(error)}; save the model again") from None
    return dict(content)


class _Seen(BaseModel):
    """The way pictures were read in training: the fields that are used again."""

    model_config = ConfigDict(strict=True)

    resize_to: Annotated[int, Field(ge=1, le=MOST_SIDE)] | None = None
    keep_aspect: bool = True


class _Config(BaseModel):
    data: _Seen = _Seen()


class _Extra(BaseModel):
    """Notes kept with a model: those that are used again; the rest may be anything."""

    config: _Config = _Config()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ValueError naming a file that is missing or holds anything else."""
    return _object(path, _content(path))


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; is this the folder of a saved model?")
    return path.read_bytes()


def _object(path: Path, encoded: bytes) -> dict[str, Any]:
    try:
        content = json.loads(encoded.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({reason(error)})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return content
