"""Use a registered embedder on a user's images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from dmlstudy import data, embedders
from dmlstudy.registry import kinds, models
from dmlstudy.registry.store import Store

BATCH = 256


def embed_into(
    store: Store,
    reference: str,
    images: Path,
    output: Path,
    follow: Callable[[Iterable[range]], Iterable[range]] = iter,
) -> tuple[int, int]:
    """Embed ``images`` into the Parquet file ``output``; returns the number of rows and the embedding size.

    ``reference`` is a registered model or a pulled folder; ``follow`` wraps the batches to show progress.
    Raises ValueError naming what is missing or unreadable; then ``output`` is not touched.
    """
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent}: no such folder; make it or name another output")
    with models.fetched(store, reference) as folder:
        if not kinds.takes_images(folder):
            raise ValueError(f"{reference}: takes feature vectors, not images; use its folder from Python")
        embedder = embedders.load(folder)
        trained_on = embedders.extra(folder).get("config", {}).get("data", {})
    architecture = embedder.architecture
    side = architecture.image_size[0]
    ids, labels, images_NHWC = data.load_images(
        images,
        side,
        architecture.in_channels,
        trained_on.get("resize_to"),
        trained_on.get("keep_aspect", True),
    )
    batches = [range(i, min(i + BATCH, len(ids))) for i in range(0, len(ids), BATCH)]
    parts = [
        embedders.embed(embedder, images_NHWC[batch.start : batch.stop], batch_size=BATCH)
        for batch in follow(batches)
    ]
    data.write_embeddings(output, ids, labels, np.concatenate(parts))
    return len(ids), architecture.dim
