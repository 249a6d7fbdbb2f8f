"""An embedder as a folder (``model_folder``), and if added the same function for torch alone, ``embedder.pt2``:

``torch.export.load(path).module()(images)``
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dmlstudy import model_folder
from dmlstudy.embedders.embedder import Embedder, build, embed
from dmlstudy.embedders.heads import NO_CODE
from dmlstudy.embedders.program import write_program
from dmlstudy.model_folder import (
    JSON,
    WEIGHTS,
    add_example,
    clear,
    describe,
    read_description,
    read_extra,
    seal,
)

FORMAT_VERSION = 1
DESCRIPTION, PROGRAM = "embedder.json", "embedder.pt2"


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
    folder = clear(folder, PROGRAM)
    add_example(folder, example_NHWC, functools.partial(embed, embedder))
    original = copy.deepcopy(embedder).cpu().eval()
    save_file({k: v.contiguous() for k, v in original.state_dict().items()}, folder / WEIGHTS)
    describe(folder / DESCRIPTION, _describe(original), extra)
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
    return model_folder.largest_deviation(folder, functools.partial(embed, load(folder)))


def verify(folder: str | Path) -> None:
    """Check every file against the manifest. Raises ValueError naming the one that is missing or altered."""
    model_folder.verify(folder, DESCRIPTION)


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
    return read_extra(Path(folder) / DESCRIPTION)


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
    write_program(embedder, _random_images(embedder, 2), _random_images(embedder, 5), path)


def _random_images(embedder: Embedder, num_images: int) -> Tensor:
    architecture = embedder.architecture
    generator = torch.Generator().manual_seed(num_images)
    shape = (num_images, *architecture.image_size, architecture.in_channels)
    if not architecture.image_size:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Give the model the weights in its folder. Raises ValueError naming the file that does not fit."""
    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        reason = str(error).strip().replace("\n", " ")
        raise ValueError(f"{folder / WEIGHTS}: does not fit the architecture ({reason})") from error
