"""dmlstudy: Ray-distributed hyperparameter studies for deep metric learning."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``__version__``, as the installed package says; looked up when it is asked for."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib.metadata

    try:
        return importlib.metadata.version("dmlstudy")
    except importlib.metadata.PackageNotFoundError:  # code that a job brought along, installed nowhere
        return "unknown"
