"""``--set key=value``: a study file with some of its values replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dmlstudy.spec import yaml_file
from dmlstudy.text import nearest, shown


def assigned(
    raw: Mapping[str, Any],
    assignments: Sequence[str] | Mapping[str, Any],
    known: Collection[str],
    present: Callable[[str], str] = str,
) -> dict[str, Any]:
    """The study ``raw`` after ``key=value`` for each assignment; ``known`` are the keys of its top.

    ``present`` gives the present name of a key that an earlier version may have known under another.

    From Python the assignments are a mapping of keys to values.

    A key is dotted: ``training.epochs``, ``families.NAME.override.loss.margin``. A value is YAML. Raises ValueError for
    what is no assignment, an unknown key of the top and an unknown family; all else is the study's to check.
    """
    study = copy.deepcopy(dict(raw))
    if isinstance(assignments, Mapping):
        for key, value in assignments.items():
            try:
                _assign(study, present(key), copy.deepcopy(value), known)
            except ValueError as error:
                raise ValueError(str(error).replace("--set ", "overrides: ", 1)) from None
        return study
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        key = key.strip()
        if not sign or not key or not all(key.split(".")):
            raise ValueError(f"--set {shown(assignment)}: expected key=value, as in --set training.epochs=1")
        _assign(study, present(key), yaml_file.value(text, f"--set {key}"), known)
    return study


def _assign(study: dict[str, Any], key: str, value: object, known: Collection[str]) -> None:
    top, _, rest = key.partition(".")
    if top not in known:
        raise ValueError(f"--set {key}: unknown key{nearest(top, known)}")
    if not rest:
        study[top] = value
        return
    section = _section(study, top, key)
    if top != "families":
        _put(section, rest, value, key)
        return
    name = _longest(rest, section) or rest.partition(".")[0]
    leaf = rest[len(name) + 1 :]
    if name not in section and leaf not in ("", "space"):
        raise ValueError(f"--set {key}: no family {shown(name)}{nearest(name, map(str, section))}")
    if not leaf:
        section[name] = value
        return
    family = _section(section, name, key)
    if leaf.startswith("override."):
        _put(_section(family, "override", key), leaf.removeprefix("override."), value, key)
    else:
        family[leaf] = value


def _section(within: dict[str, Any], name: str, key: str) -> dict[str, Any]:
    """The mapping ``name``, created if missing."""
    section = within.get(name)
    if section is None:
        section = within[name] = {}
    if not isinstance(section, dict):
        raise ValueError(f"--set {key}: {name} is {shown(section)}, which has no keys; set {name} itself")
    return section


def _put(section: dict[str, Any], key: str, value: object, whole: str) -> None:
    """Set a key of a section; a key below an existing domain, such as ``lr.default``, is set in it."""
    name = _longest(key, section)
    if name is None or name == key:
        section[key] = value
    elif isinstance(section[name], dict):
        _put(section[name], key[len(name) + 1 :], value, whole)
    else:
        raise ValueError(
            f"--set {whole}: {name} is {shown(section[name])}, which has no keys; set {name} itself"
        )


def _longest(key: str, known: Mapping[Any, Any]) -> str | None:
    """The longest of the known names that the dotted key begins with; names may have dots themselves."""
    names = [name for name in map(str, known) if key == name or key.startswith(f"{name}.")]
    return max(names, key=len, default=None)
