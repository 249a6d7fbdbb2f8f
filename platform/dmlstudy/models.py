"""Models for Python: ``load`` opens a folder that was pulled, or a registered model by its name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmlstudy.saved import Model


def load(
    model: str | Path, *, store: str | Path | None = None, device: str = "auto", batch_size: int = 256
) -> Model:
    """A model that embeds arrays and files: a folder that was pulled, or NAME, NAME@ALIAS or NAME/VERSION of a store.

    ``store`` is by default DMLSTUDY_STORE, or the folder dmlstudy_store. ``device`` 'auto' is a GPU if there is one.
    Every file is checked against its SHA-256 first. Raises ValueError naming the file at fault, or the model that is
    not there.
    """
    from dmlstudy import saved

    if saved.is_model(model):
        opened = saved.Model.open(model, device=device, batch_size=batch_size)
        _ = opened.loaded  # what is wrong with it is told here, not where something is embedded
        return opened
    from dmlstudy.interface import store_at
    from dmlstudy.registry.models import fetched

    with fetched(store_at(store), str(model), device=device, batch_size=batch_size) as opened:
        return opened
