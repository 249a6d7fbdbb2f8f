"""Saved models, whatever their kind: ``load`` opens one for Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmlstudy.models.loaded import LoadedModel


def load(
    model: str | Path, *, store: str | Path | None = None, device: str = "auto", batch_size: int = 256
) -> LoadedModel:
    """A model that embeds arrays and files: a folder that was pulled, or NAME, NAME@ALIAS or NAME/VERSION of a store.

    ``store`` is by default DMLSTUDY_STORE, or the folder dmlstudy_store. ``device`` 'auto' is a GPU if there is one.
    Every file is checked against its SHA-256 first. Raises ValueError naming the file at fault, or the model that is
    not there.
    """
    from dmlstudy.models import saved
    from dmlstudy.models.loaded import LoadedModel

    if saved.is_model(model):
        return LoadedModel(model, device, batch_size)
    import dmlstudy

    # Names are the registry's, two floors above: the package's root, which is above all floors, hands its folder down.
    with dmlstudy._registered(str(model), store) as folder:
        loaded = LoadedModel(folder, device, batch_size)
    loaded.name = str(model)
    return loaded
