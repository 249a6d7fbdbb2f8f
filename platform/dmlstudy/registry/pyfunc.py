"""What ``mlflow.pyfunc.load_model`` runs: the saved folder's embedder, images in, unit embeddings out.

MLflow imports this module by the name in the model's MLmodel file. Weights come from safetensors; nothing
is unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmlstudy import embedders


class EmbedderModel:
    """``predict(images)``: uint8 images (N, H, W, C), or float32 vectors (N, F), to float32 unit-norm embeddings."""

    def __init__(self, embedder: embedders.Embedder) -> None:
        self.embedder = embedder

    def predict(self, images: Any, params: dict[str, Any] | None = None) -> NDArray[np.float32]:
        images_NHWC = np.asarray(images)
        if not self.embedder.architecture.image_size:
            return embedders.embed(self.embedder, images_NHWC.astype(np.float32, copy=False))
        if images_NHWC.ndim != 4:
            raise ValueError(f"images: expected shape (N, H, W, C), got {images_NHWC.shape}")
        return embedders.embed(self.embedder, images_NHWC.astype(np.uint8, copy=False))


def _load_pyfunc(path: str) -> EmbedderModel:
    folder = Path(path)
    found = sorted(folder.glob("**/embedder.json"))
    return EmbedderModel(embedders.load(found[0].parent if found else folder))
