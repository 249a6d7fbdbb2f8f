"""An embedder as a folder (``model_folder``), and if added the same function for torch alone, ``embedder.pt2``:

``torch.export.load(path).module()(images)``
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dmlstudy import description, model_folder
from dmlstudy.data import Fit, preprocessing
from dmlstudy.embedders.ball import BALL
from dmlstudy.embedders.embedder import Architecture, Embedder, build, embed
from dmlstudy.embedders.heads import NO_CODE
from dmlstudy.embedders.program import write_program
from dmlstudy.model_folder import (
    JSON,
    WEIGHTS,
    add_example,
    clear,
    describe,
    read_extra,
    seal,
)
from dmlstudy.records import HYPERBOLIC
from dmlstudy.text import reason

FORMAT_VERSION = description.FORMAT_VERSION
DESCRIPTION, PROGRAM = "embedder.json", "embedder.pt2"

Module = TypeVar("Module", bound=nn.Module)


def save(
    embedder: Embedder,
    folder: str | Path,
    extra: Mapping[str, JSON] | None = None,
    example_NHWC: NDArray[np.uint8] | NDArray[np.float32] | None = None,
    fit: Fit | None = None,
) -> None:
    """Write the embedder to ``folder`` (made if missing); ``extra`` goes into the description as ``extra``.

    ``fit`` is how pictures became its images, described in full as ``preprocessing``.

    ``example_NHWC`` are images that are kept with their embeddings as a CPU computes them here and now, so that
    ``largest_deviation`` can tell later, elsewhere, whether the embedder still does the same.
    Every file already in the folder is sealed too. A crash midway leaves no manifest, so nothing that
    ``load`` accepts.
    """
    folder = clear(folder, PROGRAM)
    # Whoever compares may have no GPU: the example is a CPU's, in full float32, wherever the embedder was trained.
    original = copy.deepcopy(embedder).cpu().eval()
    add_example(folder, example_NHWC, functools.partial(embed, original))
    save_file({k: v.contiguous() for k, v in original.state_dict().items()}, folder / WEIGHTS)
    describe(folder / DESCRIPTION, _describe(original, fit), extra)
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
    path = folder / DESCRIPTION
    described = description.described(
        path, description.EmbedderDescription, f"save it again or use {PROGRAM}"
    ).architecture
    architecture: dict[str, Any] = described.model_dump(exclude_unset=True)
    architecture |= {"weights": None, "image_size": tuple(described.image_size)}
    embedder = built_as_described(lambda: build(**architecture), folder, path)
    embedder.architecture = dataclasses.replace(embedder.architecture, weights=described.weights)
    load_weights(embedder, folder)
    return embedder.eval()


def built_as_described(make: Callable[[], Module], folder: Path, path: Path) -> Module:
    """The network that a description asks for, made only if the folder's weights are its own.

    It is made without memory first, to compare its sizes. Raises ValueError naming the file at fault.
    """

    def made() -> Module:
        try:
            return make()
        except (ValueError, RuntimeError, TypeError, KeyError, AssertionError, ArithmeticError) as error:
            raise ValueError(f"{path}: not understood ({reason(error)}); save the model again") from None

    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in made().state_dict().items()}
    sizes = _sizes(folder / WEIGHTS)
    for name in sorted(expected.keys() | sizes.keys()):
        if expected.get(name) != sizes.get(name):
            raise ValueError(
                f"{folder / WEIGHTS}: does not fit the architecture ({name} is {_shown(sizes.get(name))}, by"
                f" {path.name} {_shown(expected.get(name))}); copy the folder again"
            )
    return made()


def _shown(size: tuple[int, ...] | None) -> str:
    return "missing" if size is None else " x ".join(map(str, size)) or "a number"


def _sizes(path: Path) -> dict[str, tuple[int, ...]]:
    """The sizes of the tensors in a file, none of which is read. Raises ValueError for a file that is none."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"{path}: does not fit the architecture ({reason(error)}); copy the folder again"
        ) from None


_verify = verify


def extra(folder: str | Path) -> dict[str, Any]:
    """The notes that were given to ``save`` beside the embedder; empty if there were none."""
    return read_extra(Path(folder) / DESCRIPTION)


def _preprocessing(embedder: Embedder, fit: Fit | None) -> dict[str, Any]:
    """The description of the embedder's inputs; pictures are resized to its size where no ``fit`` says more."""
    architecture = embedder.architecture
    if not architecture.image_size:
        return {"dtype": "float32", "layout": "NF", "features": architecture.in_channels}
    height, width = architecture.image_size
    return preprocessing.described(
        fit or Fit(),
        image_size=(height, width),
        channels=architecture.in_channels,
        mean=embedder.mean_C.tolist(),
        std=embedder.std_C.tolist(),
        network_order="BGR" if architecture.backbone == "bn_inception" else "RGB",
    )


def _describe(embedder: Embedder, fit: Fit | None) -> dict[str, Any]:
    architecture = embedder.architecture
    return {
        "format_version": FORMAT_VERSION,
        "architecture": dataclasses.asdict(architecture),
        "preprocessing": _preprocessing(embedder, fit),
        "output": _output(architecture)
        | ({} if architecture.code == NO_CODE else {"code": "signs of a unit vector: bits"}),
    }


def _output(architecture: Architecture) -> dict[str, Any]:
    """The size of an embedding, and the distance by which two are compared."""
    if architecture.space == BALL:
        return {
            "dim": architecture.dim,
            "unit_norm": False,
            "distance": HYPERBOLIC,
            "curvature": architecture.curvature,
        }
    return {"dim": architecture.dim, "unit_norm": architecture.unit_norm, "distance": "euclidean"}


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
        raise ValueError(f"{folder / WEIGHTS}: does not fit the architecture ({reason(error)})") from error
