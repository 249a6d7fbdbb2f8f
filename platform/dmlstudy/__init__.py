"""dmlstudy: Ray-distributed hyperparameter studies for deep metric learning.

From Python: ``init``, ``run`` and ``load`` a study, ``losses.build`` a loss, ``distributed.across_ranks`` for data
parallel training, ``models.load``, ``embed``, ``index``, ``retrieve`` and ``serve`` a model. Each is imported on first
use, so that importing the package is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmlstudy import distributed as distributed
    from dmlstudy import losses as losses
    from dmlstudy import models as models
    from dmlstudy.interface import Study as Study
    from dmlstudy.interface import init as init
    from dmlstudy.interface import load as load
    from dmlstudy.interface import run as run

__all__ = ["Study", "distributed", "init", "load", "losses", "models", "run"]

_OF_INTERFACE = ("Study", "init", "load", "run")
_ROOMS = ("distributed", "losses", "models")


def __getattr__(name: str) -> Any:
    """The interface, the rooms that belong to it, and ``__version__``, as the installed package says."""
    import importlib

    if name in (*_OF_INTERFACE, *_ROOMS):
        _silence_advice_on_widgets()
    if name in _OF_INTERFACE:
        return getattr(importlib.import_module("dmlstudy.interface"), name)
    if name in _ROOMS:
        return importlib.import_module(f"dmlstudy.{name}")
    if name == "__version__":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("dmlstudy")
    except importlib.metadata.PackageNotFoundError:  # code that a job brought along, installed nowhere
        return "unknown"


def _silence_advice_on_widgets() -> None:
    """Keep Ray and tqdm from asking a notebook's reader to install widgets: progress here is lines of text."""
    import importlib
    import logging
    import sys
    import warnings

    if "ipykernel" not in sys.modules:
        return
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        importlib.import_module("tqdm.auto")
