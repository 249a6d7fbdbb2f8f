"""The code behind ``mlflow.pyfunc.load_model``: the saved folder's model, inputs in, embeddings or codes out.

MLflow imports this module by the name in the model's MLmodel file. Weights come from safetensors; nothing
is unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmlstudy.model_folder import MANIFEST
from dmlstudy.saved import Model


class RegisteredModel:
    """``predict(inputs)``: images uint8 (N, H, W, C), or vectors float32 (N, F), to what the model makes of them."""

    def __init__(self, model: Model) -> None:
        self.compute, self.takes_images = model.compute, model.takes.image_size is not None

    def predict(self, inputs: Any, params: dict[str, Any] | None = None) -> NDArray[Any]:
        x_N = np.asarray(inputs)
        if not self.takes_images:
            return self.compute(x_N.astype(np.float32, copy=False))
        if x_N.ndim != 4:
            raise ValueError(f"images: expected shape (N, H, W, C), got {x_N.shape}")
        return self.compute(x_N.astype(np.uint8, copy=False))


def _load_pyfunc(path: str) -> RegisteredModel:
    folder = Path(path)
    found = sorted(folder.glob(f"**/{MANIFEST}"))
    folder = found[0].parent if found else folder
    return RegisteredModel(Model.open(folder))
