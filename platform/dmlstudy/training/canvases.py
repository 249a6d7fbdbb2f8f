"""The canvases of a trial's pictures, made ready on all ranks."""

from __future__ import annotations

from dmlstudy import data, distributed
from dmlstudy.data import Features, LabelledImages
from dmlstudy.records import DataConfig
from dmlstudy.training.interface import TrialFailed


def prepare(images: LabelledImages | Features, config: DataConfig) -> None:
    """Have the pictures' canvases made and mapped, where ``data.canvas`` asks for them; all ranks must call this.

    Raises TrialFailed on every rank where any has no room for them.
    """
    if config.canvas == "none":
        return
    error = ""
    try:
        data.prepare(images)
    except ValueError as found:
        error = str(found)
    if distributed.any_rank(bool(error)):
        raise TrialFailed(error or "data.canvas: another worker could not make it; its log says why")
