"""A learner as a folder (``model_folder``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dmlstudy.model_folder import (
    JSON,
    WEIGHTS,
    add_example,
    clear,
    describe,
    read_arrays,
    read_description,
    seal,
    verify,
)
from dmlstudy.online.catalogue import build
from dmlstudy.online.learner import OnlineLearner, Side
from dmlstudy.online.preparation import Preparation
from dmlstudy.records import Scalar

FORMAT_VERSION = 1
DESCRIPTION, PROGRAM = "online.json", "online.pt2"


class Learned(NamedTuple):
    """A learner, what its points must go through first, and what it was built from."""

    learner: OnlineLearner
    preparation: Preparation
    name: str
    params: Mapping[str, Scalar]

    def embed(self, x_ND: NDArray[np.floating], side: Side = "gallery") -> NDArray[np.float32]:
        """All layers side by side, each times the root of its weight: ||z_i - z_j||^2 = sum_l alpha^l D^l(i, j)^2.

        ``side`` matters to a learner of a similarity that is no distance (``OnlineLearner.embed``).
        """
        layers = self.learner.embed(self.preparation(x_ND), side)
        weighted = [
            np.sqrt(alpha) * f_NE for alpha, f_NE in zip(self.learner.layer_weights, layers, strict=True)
        ]
        return np.concatenate(weighted, axis=1).astype(np.float32)


def save(
    learned: Learned,
    folder: str | Path,
    extra: Mapping[str, JSON] | None = None,
    example_ND: NDArray[np.floating] | None = None,
) -> None:
    """Write to ``folder`` (made if missing); ``extra`` goes into the description as ``extra``.

    ``example_ND`` are points, not yet prepared, that are kept with their embeddings. A crash midway leaves nothing
    that ``load`` accepts.
    """
    folder = clear(folder, PROGRAM)
    add_example(folder, example_ND, learned.embed)
    learner, preparation = learned.learner, learned.preparation
    arrays = {f"learner.{name}": value for name, value in learner.state().items()}
    arrays |= {"shift": preparation.shift_D, "scale": preparation.scale_D}
    save_file({name: np.array(value, order="C") for name, value in arrays.items()}, folder / WEIGHTS)
    description: dict[str, JSON] = {
        "format_version": FORMAT_VERSION,
        "learner": {"name": learned.name, "params": dict(learned.params)},
        "scaling": preparation.kind,
        "input": {"dtype": "float32", "layout": "ND", "features": learner.num_features},
    }
    describe(folder / DESCRIPTION, description, extra)
    seal(folder)


def load(folder: str | Path) -> Learned:
    """Load a learner. Raises ValueError naming the file that is missing, altered or not understood."""
    folder = Path(folder)
    verify(folder, DESCRIPTION)
    description = read_description(folder / DESCRIPTION, FORMAT_VERSION, "save the learner again")
    arrays = read_arrays(folder / WEIGHTS)
    try:
        name, params = description["learner"]["name"], description["learner"]["params"]
        learner = build(name, params, num_features=description["input"]["features"])
        preparation = Preparation(description["scaling"], arrays.pop("shift"), arrays.pop("scale"))
        learner.restore({name.removeprefix("learner."): value for name, value in arrays.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / DESCRIPTION}: the learner is not understood ({error})") from error
    return Learned(learner, preparation, name, params)
