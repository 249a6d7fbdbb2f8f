"""Samplers of OptunaHub from a folder of this machine: ``search.sampler: hub:NAME`` and ``search.registry: FOLDER``.

A registry is a folder of packages, as the folder ``package`` of the hub's repository. NAME is a package's path in it,
as ``samplers/auto_sampler``. Of a package with several samplers the class is named too, ``hub:samplers/a:Sampler``.

Its program runs in the driver with the rights of who starts the study.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from typing import Any

from optuna.samplers import BaseSampler

from dmlstudy.spec.study_file import HUB, SearchConfig, SpecError
from dmlstudy.text import first_line


def digest_of(search: SearchConfig) -> str:
    """The SHA-256 of the package's Python files, by which a resumed study knows that they are the same."""
    folder, _ = _place(search)
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(
            f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\0".encode() + file.read_bytes()
        )
    return found.hexdigest()


def made(search: SearchConfig, seed: int) -> BaseSampler:
    """The sampler with a seed; raises SpecError for one that is not there, cannot be imported or takes no seed."""
    cls = _class_of(search)
    settings: dict[str, Any] = {"seed": seed} if "seed" in inspect.signature(cls).parameters else {}
    if not settings and search.deterministic:
        raise SpecError(
            f"search.sampler: {search.sampler} takes no seed, so its studies would not repeat;"
            " set search.deterministic: false, or take another"
        )
    try:
        return cls(**settings)
    except Exception as error:
        raise SpecError(
            f"search.sampler: {search.sampler} cannot be made with a seed alone ({first_line(error)}); take another"
        ) from None


def _class_of(search: SearchConfig) -> type[BaseSampler]:
    folder, name = _place(search)
    return _imported(folder, search.registry or "", search.sampler, name)


def _place(search: SearchConfig) -> tuple[Path, str]:
    """The package's folder, and the class that is asked for, empty where it is the only one."""
    package, _, name = search.sampler.removeprefix(HUB).partition(":")
    folder = Path(search.registry or "") / package
    if not (folder / "__init__.py").is_file():
        raise SpecError(
            f"search.sampler: {search.sampler}: no package {folder}; search.registry names the folder that"
            " holds samplers/, as the folder package of a copy of the hub's repository"
        )
    return folder, name


@functools.cache
def _imported(folder: Path, registry: str, told: str, name: str) -> type[BaseSampler]:
    try:
        from optunahub import load_local_module
    except ImportError:
        raise SpecError(
            f"search.sampler: {told} needs the package optunahub; pip install 'dmlstudy[hub]'"
        ) from None
    try:
        module = load_local_module(folder.relative_to(registry).as_posix(), registry_root=registry)
    except Exception as error:
        raise SpecError(
            f"search.sampler: {told} cannot be imported ({first_line(error)}); see its requirements"
        ) from None
    there = {
        each: value
        for each, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, BaseSampler)
        and not value.__module__.startswith("optuna.")
    }
    if name not in there and (name or len(there) != 1):
        raise SpecError(
            f"search.sampler: {told}: name one of its samplers as {HUB}PACKAGE:CLASS ({', '.join(there) or 'none'})"
        )
    return there[name] if name else next(iter(there.values()))
