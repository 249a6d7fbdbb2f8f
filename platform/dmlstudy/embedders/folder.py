"""An embedder as a folder that outlives this project: weights, description, a torch-only program, manifest.

``weights.safetensors``  parameters and buffers
``embedder.json``        how to build it, and what goes in and comes out
``example.safetensors``  if added, a few images and the embeddings that training computed of them
``embedder.pt2``         if added, the same function for torch alone:
                         ``torch.export.load(path).module()(images)``
``manifest.json``        SHA-256 of each other file in the folder, written last
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dmlstudy.embedders.embedder import Embedder, build, embed
from dmlstudy.embedders.heads import NO_CODE

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

FORMAT_VERSION = 1
WEIGHTS, DESCRIPTION, EXAMPLE, PROGRAM, MANIFEST = (
    "weights.safetensors",
    "embedder.json",
    "example.safetensors",
    "embedder.pt2",
    "manifest.json",
)


def save(
    embedder: Embedder,
    folder: str | Path,
    extra: Mapping[str, JSON] | None = None,
    example_NHWC: NDArray[np.uint8] | NDArray[np.float32] | None = None,
) -> None:
    """Write the embedder to ``folder`` (made if missing); ``extra`` goes into the description as ``extra``.

    ``example_NHWC`` are images that are kept with their embeddings as computed here and now, so that
    ``largest_deviation`` can tell later, elsewhere, whether the embedder still does the same.
    Every file already in the folder is sealed too. A crash midway leaves no manifest, so nothing that
    ``load`` accepts.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (MANIFEST, PROGRAM, EXAMPLE):  # of an embedder that was saved here before
        (folder / stale).unlink(missing_ok=True)
    if example_NHWC is not None:
        example = {"images": torch.tensor(example_NHWC), "z": torch.tensor(embed(embedder, example_NHWC))}
        save_file(example, folder / EXAMPLE)
    original = copy.deepcopy(embedder).cpu().eval()
    save_file({k: v.contiguous() for k, v in original.state_dict().items()}, folder / WEIGHTS)
    description = _describe(original) | {"extra": dict(extra or {})}
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
    seal(folder)


def add_program(folder: str | Path) -> None:
    """Add ``embedder.pt2`` to a saved embedder's folder, so that it runs with torch alone.

    Takes a second or two of ``torch.export``. Raises RuntimeError if the exported program differs from the
    embedder by over 1e-5.
    """
    folder = Path(folder)
    _export(load(folder), folder / PROGRAM)
    seal(folder)


def largest_deviation(folder: str | Path) -> float | None:
    """The largest difference between the example's embeddings as saved and as computed now; None without one."""
    path = Path(folder) / EXAMPLE
    if not path.is_file():
        return None
    example = load_file(path)
    z_ND = embed(load(folder), example["images"].numpy())
    return float(np.abs(z_ND - example["z"].numpy()).max())


def seal(folder: str | Path) -> None:
    """Write the manifest over every file now in ``folder``: call it again after adding files."""
    folder = Path(folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    manifest = {p.relative_to(folder).as_posix(): _sha256(p) for p in files}
    draft = folder / f".{MANIFEST}.{os.getpid()}.draft"
    draft.write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(draft, folder / MANIFEST)


def verify(folder: str | Path, needed: Sequence[str] = (WEIGHTS, DESCRIPTION)) -> None:
    """Check every file against the manifest, which must list those that are ``needed``.

    Raises ValueError naming the file that is missing, altered, or absent from the manifest.
    """
    folder = Path(folder)
    manifest = _read_json(folder / MANIFEST)
    for name in needed:
        if name not in manifest:
            raise ValueError(f"{folder / MANIFEST}: does not list {name}; save the model again")
    for name, expected in manifest.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{folder / MANIFEST}: {name!r} lies outside the folder; do not trust it")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: listed in the manifest, but missing; copy the folder again")
        if _sha256(folder / name) != expected:
            raise ValueError(f"{folder / name}: altered since it was saved (SHA-256); copy the folder again")


def load(folder: str | Path, verify: bool = True) -> Embedder:
    """Load an embedder in eval mode on the CPU; nothing in the folder is executed or unpickled.

    Raises ValueError naming the file that is missing, altered or not understood.
    """
    folder = Path(folder)
    if verify:
        _verify(folder)
    description = read_description(folder / DESCRIPTION, FORMAT_VERSION, f"save it again or use {PROGRAM}")
    try:
        architecture = dict(description["architecture"])
        architecture |= {"weights": None, "image_size": tuple(architecture["image_size"])}
        embedder = build(**architecture)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / DESCRIPTION}: architecture is not understood ({error})") from error
    embedder.architecture = dataclasses.replace(
        embedder.architecture, weights=description["architecture"].get("weights")
    )
    load_weights(embedder, folder)
    return embedder.eval()


_verify = verify


def extra(folder: str | Path) -> dict[str, Any]:
    """What was given to ``save`` beside the embedder; empty if nothing was."""
    return dict(_read_json(Path(folder) / DESCRIPTION).get("extra", {}))


def _describe(embedder: Embedder) -> dict[str, Any]:
    architecture = embedder.architecture
    return {
        "format_version": FORMAT_VERSION,
        "architecture": dataclasses.asdict(architecture),
        "preprocessing": {
            "dtype": "uint8",
            "layout": "NHWC",
            "channels": architecture.in_channels,
            "image_size": list(architecture.image_size),
            "scale": 1 / 255,
            "mean": embedder.mean_C.tolist(),
            "std": embedder.std_C.tolist(),
        }
        if architecture.image_size
        else {"dtype": "float32", "layout": "NF", "features": architecture.in_channels},
        "output": {"dim": architecture.dim, "unit_norm": True, "distance": "euclidean"}
        | ({} if architecture.code == NO_CODE else {"code": "signs of a unit vector: bits"}),
    }


def _export(embedder: Embedder, path: Path) -> None:
    """Export with a dynamic batch, and compare with the original on another batch size.

    The program is ``forward`` alone; the embedder loses its structure head, which that does not use.
    """
    embedder.structure_head = None
    first, second = _random_images(embedder, 2), _random_images(embedder, 5)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns about its own internals
        program = torch.export.export(embedder, (first,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        difference = (program.module()(second) - embedder(second)).abs().max().item()
        if not difference <= 1e-5:
            raise RuntimeError(f"{path}: the exported program differs from the embedder by {difference:.2g}")
        torch.export.save(program, path)


def _random_images(embedder: Embedder, num_images: int) -> Tensor:
    architecture = embedder.architecture
    generator = torch.Generator().manual_seed(num_images)
    shape = (num_images, *architecture.image_size, architecture.in_channels)
    if not architecture.image_size:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_weights(model: nn.Module, folder: Path) -> None:
    """Give the model the weights in its folder. Raises ValueError naming the file that does not fit."""
    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        reason = str(error).strip().replace("\n", " ")
        raise ValueError(f"{folder / WEIGHTS}: does not fit the architecture ({reason})") from error


def read_description(path: Path, format_version: int, mend: str) -> dict[str, Any]:
    """The description of a model. Raises ValueError for one of another format, with the ``mend``."""
    description = _read_json(path)
    if description.get("format_version") != format_version:
        raise ValueError(
            f"{path}: format version {description.get('format_version')!r}, this dmlstudy reads {format_version};"
            f" {mend}"
        )
    return description


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ValueError naming a file that is missing or holds anything else."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; is this the folder of a saved model?")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return content
