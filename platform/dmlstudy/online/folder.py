"""A learner as a folder (``model_folder``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dmlstudy import model_folder
from dmlstudy.description import FORMAT_VERSION, OnlineDescription, described
from dmlstudy.model_folder import (
    JSON,
    WEIGHTS,
    add_example,
    clear,
    describe,
    read_arrays,
    seal,
)
from dmlstudy.online.catalogue import build
from dmlstudy.online.learner import OnlineLearner, Side
from dmlstudy.online.preparation import Preparation
from dmlstudy.records import OF_STRUCTURE, Scalar
from dmlstudy.text import reason

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


def load(folder: str | Path, verify: bool = True) -> Learned:
    """Load a learner. Raises ValueError naming the file that is missing, altered or not understood."""
    folder = Path(folder)
    if verify:
        model_folder.verify(folder, DESCRIPTION)
    path = folder / DESCRIPTION
    read = described(path, OnlineDescription, "save the learner again")
    arrays = read_arrays(folder / WEIGHTS)
    name, params, num_features = read.learner.name, read.learner.params, read.input.features
    try:
        most = sum(value.size for value in arrays.values())
        if arrays["shift"].shape != (num_features,) or any(
            isinstance(params.get(key), int) and int(params[key]) > most for key in OF_STRUCTURE
        ):
            raise ValueError(f"it is larger than what {WEIGHTS} holds")
        learner = build(name, params, num_features=num_features)
        preparation = Preparation(read.scaling, arrays.pop("shift"), arrays.pop("scale"))
        learner.restore({name.removeprefix("learner."): value for name, value in arrays.items()})
    except (KeyError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else reason(error)
        raise ValueError(f"{path}: the learner is not understood ({why}); save it again") from None
    return Learned(learner, preparation, name, params)
