"""A hashing model as a folder (``model_folder``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file

from dmlstudy.embedders.folder import load_weights
from dmlstudy.hashing.model import HashingModel, build
from dmlstudy.model_folder import JSON, WEIGHTS, add_example, clear, describe, read_description, seal, verify

FORMAT_VERSION = 1
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
    add_example(folder, example_NF, model.codes)
    save_file({k: v.cpu().contiguous() for k, v in model.state_dict().items()}, folder / WEIGHTS)
    description: dict[str, JSON] = {
        "format_version": FORMAT_VERSION,
        "model": model.recipe._asdict(),
        "input": {"dtype": "float32", "layout": "NF", "features": model.num_features},
        "output": {"codes": "int8, +1 and -1, layout ND", "bits": model.num_bits},
    }
    describe(folder / DESCRIPTION, description, extra)
    seal(folder)


def load(folder: str | Path) -> HashingModel:
    """Load a model in eval mode on the CPU.

    Raises ValueError naming the file that is missing, altered or not understood.
    """
    folder = Path(folder)
    verify(folder, DESCRIPTION)
    description = read_description(folder / DESCRIPTION, FORMAT_VERSION, "save the model again")
    try:
        recipe: dict[str, Any] = dict(description["model"])
        term = recipe.pop("term")
        model = build(**recipe, term=None if term is None else (term[0], term[1]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / DESCRIPTION}: the model is not understood ({error})") from error
    load_weights(model, folder)
    return model.eval()
