"""A registered model without dmlstudy: what ``mlflow.pyfunc.load_model`` runs, with NumPy and torch alone.

``models.register`` ships this file with each model (``code/dmlstudy_model_1.py``), so it imports nothing of this
package. Beside it lies the model's folder: a manifest with the SHA-256 of each file, a description, and the model as a
program of ``torch.export``. Each file is checked before the program is read, and torch unpickles nothing but tensors.

The number in the file's name is raised with any change that an earlier model could not be loaded by, for a process
that loads two models imports the file of one.
Shapes: N items, H height, W width, C channels, F features, D embedding size.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

MANIFEST = "manifest.json"
ONLY_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""With this variable ``torch.load`` refuses whatever else is pickled, in ``torch.export.load`` too."""

BATCH = 256


class StandaloneModel:
    """``predict``: images uint8 (N, H, W, C), or vectors float32 (N, F), to embeddings or codes (N, D)."""

    def __init__(self, program: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
        self.program, self.shape = program, shape

    def predict(self, inputs: Any, params: dict[str, Any] | None = None) -> np.ndarray[Any, Any]:
        """Embeddings float32, of a hashing model codes int8 of +1 and -1.

        Raises ValueError for inputs of another shape or type, and for an item that the model has no number for.
        """
        x_N = self._checked(np.asarray(inputs))
        starts = range(0, len(x_N), BATCH)
        batches = [x_N[start : start + BATCH] for start in starts] or [np.zeros((1, *self.shape), x_N.dtype)]
        with torch.no_grad():
            parts = [self.program(torch.tensor(batch)).numpy() for batch in batches]
        z_ND: np.ndarray[Any, Any] = np.concatenate(parts)[: len(x_N)]
        finite_N = np.isfinite(z_ND).all(axis=1)
        if not finite_N.all():
            raise ValueError(f"item {int(np.argmin(finite_N))}: beyond what the model takes, or not finite")
        return z_ND

    def _checked(self, x_N: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        takes_images = len(self.shape) == 3
        what = "images" if takes_images else "vectors"
        if x_N.shape[1:] != self.shape:
            expected = ", ".join(map(str, ("N", *self.shape)))
            raise ValueError(f"{what}: expected shape ({expected}), got {x_N.shape}")
        if not takes_images:
            return x_N.astype(np.float32, copy=False)
        if x_N.dtype != np.uint8 and not (x_N.dtype.kind in "iu" and ((x_N >= 0) & (x_N <= 255)).all()):
            raise ValueError(f"images: expected whole numbers from 0 to 255 (uint8), got {x_N.dtype}")
        return x_N.astype(np.uint8, copy=False)


def _load_pyfunc(path: str) -> StandaloneModel:
    """The model below ``path``. Raises ValueError for a file that is missing, altered, or one too many."""
    found = sorted(Path(path).rglob(MANIFEST))
    if not found:
        raise ValueError(f"{path}: has no {MANIFEST}; fetch the model again")
    folder = found[0].parent
    _verify(folder)
    (program,) = folder.glob("*.pt2")
    with _only_tensors():
        module = torch.export.load(program).module()
    return StandaloneModel(module, _shape(folder))


def _verify(folder: Path) -> None:
    listed: dict[str, str] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for name in sorted(there ^ {MANIFEST, *listed}):
        raise ValueError(
            f"{folder / name}: {'not in the manifest' if name in there else 'missing'}; fetch it again"
        )
    for name, expected in listed.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
            raise ValueError(f"{folder / name}: altered, by its SHA-256 in {MANIFEST}; fetch the model again")


def _shape(folder: Path) -> tuple[int, ...]:
    """Of one item: (H, W, C) of an image, (F,) of a vector."""
    names = ("embedder.json", "hashing.json", "online.json")
    (about,) = (json.loads((folder / name).read_text()) for name in names if (folder / name).is_file())
    if "architecture" not in about:
        return (int(about["input"]["features"]),)
    architecture = about["architecture"]
    return (*architecture["image_size"], int(architecture["in_channels"]))


@contextmanager
def _only_tensors() -> Iterator[None]:
    before = os.environ.get(ONLY_TENSORS)
    os.environ[ONLY_TENSORS] = "1"
    try:
        yield
    finally:
        os.environ.pop(ONLY_TENSORS)
        if before is not None:
            os.environ[ONLY_TENSORS] = before
