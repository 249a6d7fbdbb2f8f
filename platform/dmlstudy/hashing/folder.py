"""A hashing model as a folder (``model_folder``)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file

from dmlstudy import model_folder
from dmlstudy.description import FORMAT_VERSION, HashingDescription, described
from dmlstudy.embedders.folder import built_as_described, load_weights
from dmlstudy.hashing.model import HashingModel, build
from dmlstudy.model_folder import JSON, WEIGHTS, add_example, clear, describe, seal

DESCRIPTION, PROGRAM = "hashing.json", "hashing.pt2"


def save(
    model: HashingModel,
    folder: str | Path,
    extra: Mapping[str, JSON] | None = None,
    example_NF: NDArray[np.float32] | None = None,
) -> None:
    """Write the model to ``folder`` (made if missing); ``extra`` goes into the description as ``extra``.

    ``example_NF`` are features that are kept with their codes. A crash midway leaves nothing that ``load`` accepts.
    """
    folder = clear(folder, PROGRAM)
    add_example(folder, example_NF, copy.deepcopy(model).cpu().codes)  # on a GPU a bit may come out otherwise
    save_file({k: v.cpu().contiguous() for k, v in model.state_dict().items()}, folder / WEIGHTS)
    description: dict[str, JSON] = {
        "format_version": FORMAT_VERSION,
        "model": model.recipe._asdict(),
        "input": {"dtype": "float32", "layout": "NF", "features": model.num_features},
        "output": {"codes": "int8, +1 and -1, layout ND", "bits": model.num_bits},
    }
    describe(folder / DESCRIPTION, description, extra)
    seal(folder)


def load(folder: str | Path, verify: bool = True) -> HashingModel:
    """Load a model in eval mode on the CPU.

    Raises ValueError naming the file that is missing, altered or not understood.
    """
    folder = Path(folder)
    if verify:
        model_folder.verify(folder, DESCRIPTION)
    path = folder / DESCRIPTION
    recipe = described(path, HashingDescription, "save the model again").model
    if recipe.term is not None and not (isinstance(recipe.term[0], str) and isinstance(recipe.term[1], dict)):
        raise ValueError(f"{path}: not understood (model.term: a name and parameters); save the model again")
    arguments: dict[str, Any] = recipe.model_dump()
    arguments["term"] = None if recipe.term is None else tuple(recipe.term)
    model = built_as_described(lambda: build(**arguments), folder, path)
    load_weights(model, folder)
    return model.eval()
