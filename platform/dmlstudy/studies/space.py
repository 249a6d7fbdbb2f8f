"""Search spaces: a YAML mapping of parameters to domains, with nested choices for conditional parameters.

A domain is one of::

    0.8                                                    a fixed value
    {float: [0.6, 1.4], log: false, default: 0.8}          a real number
    {int: [2, 10], step: 1, default: 5}                    an integer
    {choice: [adam, sgd], default: adam}                   one of several values
    {choice: {power: {q: {float: [0, 5], default: 1}},     one of several values, each with parameters
              constant: {}}, default: power}               that exist only under it
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from dmlstudy.records import Scalar


class Suggester(Protocol):
    """The part of an Optuna trial that a space needs."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int: ...
    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


@dataclass(frozen=True)
class Fixed:
    """A value that is not searched."""

    value: Scalar | None

    def sample(self, trial: Suggester, name: str) -> dict[str, Scalar | None]:
        return {_leaf(name): self.value}

    def defaults(self, name: str) -> dict[str, Scalar]:
        return {}

    def lines(self, name: str) -> list[str]:
        return [f"{name} = {self.value}"]


@dataclass(frozen=True)
class Float:
    """A real number in [low, high], searched on a log scale if ``log``."""

    low: float
    high: float
    default: float
    log: bool = False

    def sample(self, trial: Suggester, name: str) -> dict[str, Scalar | None]:
        return {_leaf(name): trial.suggest_float(name, self.low, self.high, log=self.log)}

    def defaults(self, name: str) -> dict[str, Scalar]:
        return {name: self.default}

    def lines(self, name: str) -> list[str]:
        scale = ", log" if self.log else ""
        return [f"{name} in [{self.low:g}, {self.high:g}]{scale}, default {self.default:g}"]


@dataclass(frozen=True)
class Int:
    """An integer in {low, low + step, ..., high}."""

    low: int
    high: int
    default: int
    step: int = 1
    log: bool = False

    def sample(self, trial: Suggester, name: str) -> dict[str, Scalar | None]:
        return {_leaf(name): trial.suggest_int(name, self.low, self.high, step=self.step, log=self.log)}

    def defaults(self, name: str) -> dict[str, Scalar]:
        return {name: self.default}

    def lines(self, name: str) -> list[str]:
        step = f", step {self.step}" if self.step != 1 else ""
        return [f"{name} in {{{self.low}..{self.high}}}{step}, default {self.default}"]


@dataclass(frozen=True)
class Choice:
    """One of several values; each may bring parameters of its own, which exist only where it is chosen."""

    options: Mapping[Scalar, Mapping[str, Domain]]
    default: Scalar

    def sample(self, trial: Suggester, name: str) -> dict[str, Scalar | None]:
        chosen = trial.suggest_categorical(name, list(self.options))
        return {_leaf(name): chosen} | sample(self.options[chosen], trial, _branch(name))

    def defaults(self, name: str) -> dict[str, Scalar]:
        return {name: self.default} | defaults(self.options[self.default], _branch(name))

    def lines(self, name: str) -> list[str]:
        shown = [f"{name} in {{{', '.join(map(str, self.options))}}}, default {self.default}"]
        for option, children in self.options.items():
            for child, domain in children.items():
                lines = domain.lines(child)
                shown += [f"    if {option}: {lines[0]}"] + [f"    {line}" for line in lines[1:]]
        return shown


Domain: TypeAlias = Fixed | Float | Int | Choice
Space: TypeAlias = Mapping[str, Domain]


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _branch(name: str) -> str:
    return name.rpartition(".")[0]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def sample(space: Space, trial: Suggester, prefix: str = "") -> dict[str, Scalar | None]:
    """Draw a value for each parameter that exists under the choices made; names are ``prefix.parameter``."""
    values: dict[str, Scalar | None] = {}
    for name, domain in space.items():
        values |= domain.sample(trial, _join(prefix, name))
    return values


def defaults(space: Space, prefix: str = "") -> dict[str, Scalar]:
    """The default point of the space: full names of searched parameters to values."""
    point: dict[str, Scalar] = {}
    for name, domain in space.items():
        point |= domain.defaults(_join(prefix, name))
    return point


def names(space: Space) -> set[str]:
    """Every parameter of the space, those under choices included."""
    found = set(space)
    for domain in space.values():
        if isinstance(domain, Choice):
            for children in domain.options.values():
                found |= names(children)
    return found


def replace(space: Space, name: str, domain: Domain) -> Space:
    """The space with ``name`` set to another domain, wherever it stands.

    Fixing a choice to one of its values keeps the parameters under that value and drops the others.
    Raises KeyError where the space has no such parameter, ValueError where the value is no option.
    """
    if name not in names(space):
        raise KeyError(name)
    replaced: dict[str, Domain] = {}
    for key, old in space.items():
        if key == name:
            replaced[key] = domain
            if isinstance(old, Choice) and isinstance(domain, Fixed):
                if domain.value is None or domain.value not in old.options:
                    raise ValueError(
                        f"{domain.value!r} is no option{nearest(str(domain.value), map(str, old.options))}"
                    )
                replaced |= old.options[domain.value]
        elif isinstance(old, Choice):
            options = {
                option: replace(children, name, domain) if name in names(children) else children
                for option, children in old.options.items()
            }
            replaced[key] = Choice(options, old.default)
        else:
            replaced[key] = old
    return replaced


def nearest(word: str, known: Any) -> str:
    """``; did you mean 'x'?`` or the list of what is known."""
    known = sorted(known)
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.55)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known)}"


def parse_space(value: object, path: str) -> Space:
    """Read a mapping of parameters to domains; a ValueError starts with the key's path."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: expected a mapping of parameters to domains, got {value!r}")
    space = {str(name): parse_domain(domain, f"{path}.{name}") for name, domain in value.items()}
    seen: set[str] = set()
    for name, domain in space.items():
        own = names({name: domain})
        if own & seen:
            raise ValueError(f"{path}: {min(own & seen)} stands in two places; rename one")
        seen |= own
    return space


def parse_domain(value: object, path: str) -> Domain:
    """Read one domain (see the top of this module); a ValueError starts with the key's path."""
    if not isinstance(value, Mapping):
        if value is None or isinstance(value, bool | int | float | str):
            return Fixed(value)
        raise ValueError(f"{path}: expected a value or a domain such as {{float: [0, 1]}}, got {value!r}")
    kinds = {"float": _parse_float, "int": _parse_int, "choice": _parse_choice}
    kind = next((key for key in kinds if key in value), None)
    if kind is None:
        key = next(iter(map(str, value)), "")
        raise ValueError(f"{path}: a domain has one of the keys float, int, choice{nearest(key, kinds)}")
    return kinds[kind](value, path)


def _no_other_keys(value: Mapping[Any, Any], allowed: Collection[str], path: str) -> None:
    for key in value:
        if key not in allowed:
            raise ValueError(f"{path}.{key}: unknown key{nearest(str(key), allowed)}")


def _bounds(value: Mapping[Any, Any], kind: str, path: str) -> tuple[Any, Any]:
    bounds = value[kind]
    if not isinstance(bounds, list | tuple) or len(bounds) != 2 or not all(_is_number(b) for b in bounds):
        raise ValueError(f"{path}.{kind}: expected [low, high], two numbers, got {bounds!r}")
    low, high = bounds
    if not isinstance(value.get("log", False), bool):
        raise ValueError(f"{path}.log: expected true or false, got {value['log']!r}")
    if low > high:
        raise ValueError(f"{path}.{kind}: low {low} is above high {high}; swap them")
    if value.get("log") and low <= 0:
        raise ValueError(f"{path}.{kind}: a log scale needs low > 0, got {low}")
    return low, high


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _default(value: Mapping[Any, Any], low: Any, high: Any, path: str) -> Any:
    default = value.get("default", low)
    if not _is_number(default) or not low <= default <= high:
        raise ValueError(f"{path}.default: {default!r} is outside [{low}, {high}]")
    return default


def _parse_float(value: Mapping[Any, Any], path: str) -> Domain:
    _no_other_keys(value, ("float", "log", "default"), path)
    low, high = _bounds(value, "float", path)
    default = _default(value, low, high, path)
    return Float(float(low), float(high), float(default), bool(value.get("log", False)))


def _parse_int(value: Mapping[Any, Any], path: str) -> Domain:
    _no_other_keys(value, ("int", "log", "step", "default"), path)
    low, high = _bounds(value, "int", path)
    step = value.get("step", 1)
    default = _default(value, low, high, path)
    for key, number in (("int", low), ("int", high), ("step", step), ("default", default)):
        if not isinstance(number, int):
            raise ValueError(f"{path}.{key}: expected an integer, got {number!r}")
    if step < 1 or (high - low) % step or (default - low) % step:
        raise ValueError(f"{path}.step: {step} does not lead from {low} to {high} over the default {default}")
    log = bool(value.get("log", False))
    if log and step != 1:
        raise ValueError(f"{path}.step: a log scale has no step; leave one of them out")
    return Int(low, high, default, step, log)


def _parse_choice(value: Mapping[Any, Any], path: str) -> Domain:
    _no_other_keys(value, ("choice", "default"), path)
    choices = value["choice"]
    if isinstance(choices, Mapping):
        options = {key: parse_space(sub or {}, f"{path}.choice.{key}") for key, sub in choices.items()}
    elif isinstance(choices, list) and all(isinstance(c, bool | int | float | str) for c in choices):
        options = {key: {} for key in choices}
        for number, key in enumerate(choices):
            if key in choices[:number]:
                raise ValueError(f"{path}.choice: {key!r} equals another value; leave one of them out")
    else:
        raise ValueError(f"{path}.choice: expected a list of values or a mapping of values to parameters")
    if not options:
        raise ValueError(f"{path}.choice: is empty; give at least one value")
    seen: dict[str, Domain] = {}
    for option, children in options.items():
        for name, domain in children.items():
            if seen.setdefault(name, domain) != domain:
                raise ValueError(f"{path}.choice.{option}.{name}: has another domain under another option")
    default = value.get("default", next(iter(options)))
    if default not in list(options):
        raise ValueError(
            f"{path}.default: {default!r} is no option{nearest(str(default), map(str, options))}"
        )
    return Choice(options, default)
