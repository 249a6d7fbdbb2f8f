"""A hashing model as a folder: ``weights.safetensors``, ``hashing.json`` (how to build it), ``manifest.json``.

The manifest holds the SHA-256 of the other files. Nothing in the folder is executed or unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dmlstudy.embedders.folder import JSON, MANIFEST, WEIGHTS, load_weights, read_description, seal, verify
from dmlstudy.hashing.model import HashingModel, build

FORMAT_VERSION = 1
DESCRIPTION = "hashing.json"


def save(model: HashingModel, folder: str | Path, extra: Mapping[str, JSON] | None = None) -> None:
    """Write the model to ``folder`` (made if missing); ``extra`` goes into the description as ``extra``.

    A crash midway leaves no manifest, so nothing that ``load`` accepts.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # of a model that was saved here before
    save_file({k: v.cpu().contiguous() for k, v in model.state_dict().items()}, folder / WEIGHTS)
    description = {
        "format_version": FORMAT_VERSION,
        "model": model.recipe._asdict(),
        "input": {"dtype": "float32", "layout": "NF", "features": model.num_features},
        "output": {"codes": "int8, +1 and -1, layout ND", "bits": model.num_bits},
        "extra": dict(extra or {}),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
    seal(folder)


def load(folder: str | Path) -> HashingModel:
    """Load a model in eval mode on the CPU.

    Raises ValueError naming the file that is missing, altered or not understood.
    """
    folder = Path(folder)
    verify(folder, (WEIGHTS, DESCRIPTION))
    description = read_description(folder / DESCRIPTION, FORMAT_VERSION, "save the model again")
    try:
        recipe: dict[str, Any] = dict(description["model"])
        term = recipe.pop("term")
        model = build(**recipe, term=None if term is None else (term[0], term[1]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / DESCRIPTION}: the model is not understood ({error})") from error
    load_weights(model, folder)
    return model.eval()
