"""Keys that earlier versions wrote in study files, search spaces, overrides and assignments.

They are read under their present names, with one line that says so. Fingerprints and Optuna's storage keep the earlier
names, so that a study of an earlier version is resumed with the fingerprint and the points it began with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from dmlstudy.records import EARLIER_KEYS, earlier_key, present_key
from dmlstudy.spec.space import Choice, Domain, Space

EARLIER_DEFAULTS: tuple[Mapping[str, object], ...] = (
    {"sampler": "tpe"},
    {"sampler": "tpe", "scheduler": "halving"},
)
"""Defaults of ``search`` in earlier versions, the latest first; a study that began by them keeps them."""


class Renaming:
    """Present names in place of earlier ones; ``name`` maps a key, ``section.parameter``, to another."""

    def __init__(self, name: Callable[[str], str] = present_key) -> None:
        self._name = name
        self._found: dict[str, str] = {}

    @property
    def notes(self) -> list[str]:
        """One line on the earlier keys that were read, or none."""
        if not self._found:
            return []
        place, key = next(iter(self._found.items()))
        num = len(self._found)
        among = f" (one of {num} such keys)" if num > 1 else ""
        return [f"{place}: this key is called {key} now and is read as that; rename it{among}"]

    def study(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """A study file's mapping. Raises ValueError where a parameter has both names."""
        study = self.sections(raw)
        if isinstance(families := raw.get("families"), Mapping):
            study["families"] = {name: self._family(str(name), entry) for name, entry in families.items()}
        return study

    def sections(self, raw: Mapping[str, Any], place: str = "") -> dict[str, Any]:
        """Sections of a study or a search space, at ``place``. Raises ValueError where a parameter has both names."""
        renamed = {key.partition(".")[0] for key in EARLIER_KEYS}
        return {
            name: self._parameters(own, f"{name}.", place) if name in renamed else own
            for name, own in raw.items()
        }

    def assignment(self, key: str) -> str:
        """The key of an assignment, such as ``batch.KEY.default`` or ``families.NAME.override.batch.KEY``."""
        head, override, full_name = key.partition(".override.")
        if not key.startswith("families."):
            head, override, full_name = "", "", key
        for name in EARLIER_KEYS:
            if re.match(rf"{re.escape(name)}([.@]|$)", full_name):
                self._found[key] = self._name(name)
                return head + override + self._name(name) + full_name.removeprefix(name)
        return key

    def _family(self, name: str, entry: Any) -> Any:
        if not isinstance(entry, Mapping) or "override" not in entry:
            return entry
        return {**entry, "override": self._parameters(entry["override"], "", f"families.{name}.override.")}

    def _parameters(self, parameters: Any, prefix: str, place: str) -> Any:
        """Parameters whose full names begin with ``prefix``, those under options included."""
        if not isinstance(parameters, Mapping):
            return parameters
        renamed: dict[Any, Any] = {}
        for name, domain in parameters.items():
            full_name = f"{prefix}{name}"
            key = self._name(full_name)
            if key != full_name:
                self._found[f"{place}{full_name}"] = key
                if key.removeprefix(prefix) in parameters:
                    raise ValueError(
                        f"{place}{full_name}: stands there beside {key}, its name now; leave it out"
                    )
            section = full_name.partition(".")[0]
            renamed[name if key == full_name else key.removeprefix(prefix)] = self._domain(
                domain, f"{section}.", place
            )
        return renamed

    def _domain(self, domain: Any, prefix: str, place: str) -> Any:
        if not isinstance(domain, Mapping) or not isinstance(domain.get("choice"), Mapping):
            return domain
        options = domain["choice"].items()
        return {
            **domain,
            "choice": {option: self._parameters(below, prefix, place) for option, below in options},
        }


def with_earlier_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A study file's mapping under the names that its fingerprint keeps."""
    return Renaming(earlier_key).study(raw)


def stored(space: Space, prefix: str = "") -> Space:
    """A family's space under the names that fingerprints and Optuna's storage keep."""
    return {
        earlier_key(f"{prefix}{name}").removeprefix(prefix): _stored(
            domain, prefix or f"{name.partition('.')[0]}."
        )
        for name, domain in space.items()
    }


def _stored(domain: Domain, prefix: str) -> Domain:
    if not isinstance(domain, Choice):
        return domain
    return Choice({option: stored(below, prefix) for option, below in domain.options.items()}, domain.default)
