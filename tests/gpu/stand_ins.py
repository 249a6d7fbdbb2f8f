"""Stand-ins for packages that a machine with torch and torchvision alone lacks, so that dmlstudy can be imported there.

Two compute: records of pydantic, without its checks, and faiss's direct kernel of distances, as numpy sums it.
Of all others any name can be imported and called, and means nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

NAMES = ("faiss", "filelock", "pyarrow", "pydantic", "pydantic_core", "safetensors", "scipy")

PAIRS_AT_ONCE = 1 << 16


class Anything:
    """An object that answers to every use in an import: called, indexed, subclassed, in a union, as a decorator."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __call__(self, *_: object, **__: object) -> Anything:
        return Anything()

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, _: object) -> Anything:
        return Anything()

    def __or__(self, other: object) -> Anything:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Default(NamedTuple):
    """A field of a record."""

    default: Any


class BaseModel:
    """A record of annotated fields with defaults; nothing is checked."""

    model_fields: ClassVar[dict[str, Default]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: Default(vars(cls)[name]) for name in inspect.get_annotations(cls) if name in vars(cls)}
        cls.model_fields = cls.model_fields | own

    def __init__(self, **given: Any) -> None:
        defaults = {name: field.default for name, field in self.model_fields.items()}
        for name, value in (defaults | given).items():
            setattr(self, name, value)

    def model_copy(self, *, update: dict[str, Any]) -> BaseModel:
        return type(self)(**vars(self) | update)

    def model_dump(self, **_: object) -> dict[str, Any]:
        return {
            name: value.model_dump() if isinstance(value, BaseModel) else value
            for name, value in vars(self).items()
        }


def direct_kernel(
    dim: int, num: int, x: np.ndarray, row: np.ndarray, y: np.ndarray, item: np.ndarray, out: np.ndarray
) -> None:
    """sum_d (x_d - y_d)^2 of ``num`` pairs: faiss.pairwise_indexed_L2sqr."""
    for start in range(0, num, PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        offset = x[row[part]] - y[item[part]]
        out[part] = np.einsum("nd,nd->n", offset, offset)


CONTENTS: dict[str, dict[str, Any]] = {
    "pydantic": {"BaseModel": BaseModel, "ConfigDict": dict, "PositiveFloat": float, "PositiveInt": int},
    "faiss": {
        "omp_set_num_threads": lambda _: None,
        "swig_ptr": lambda array: array,
        "pairwise_indexed_L2sqr": direct_kernel,
        "get_num_gpus": lambda: 0,
    },
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages, and anything in them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.used: set[str] = set()

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self.used.add(spec.name.partition(".")[0])
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(CONTENTS.get(module.__name__, {}))


_FINDERS: list[_Finder] = []


def install(*, always: bool) -> None:
    """Stand in for what is not installed, or, ``always``, for all of ``NAMES``; before dmlstudy is imported."""
    finder = _Finder([name for name in NAMES if always or importlib.util.find_spec(name) is None])
    _FINDERS.append(finder)
    if always:
        sys.meta_path.insert(0, finder)
    else:
        sys.meta_path.append(finder)  # the last one to be asked


def used() -> list[str]:
    """Packages that something stands in for."""
    return sorted(name for finder in _FINDERS for name in finder.used)
