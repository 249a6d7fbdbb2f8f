"""Search spaces: a YAML mapping of parameters to domains, with nested choices for conditional parameters.

A domain is one of::

    0.8                                                    a fixed value
    {float: [0.6, 1.4], log: false, default: 0.8}          a real number
    {int: [2, 10], step: 1, default: 5}                    an integer
    {choice: [adam, sgd], default: adam}                   one of several values
    {choice: {power: {q: {float: [0, 5], default: 1}},     one of several values, each with parameters
              constant: {}}, default: power}               that exist only under it

One name means one parameter. It may stand under several options of a choice; where its domains differ there,
it is drawn as ``name@option``, a parameter of its own for each option, while its value is called ``name``.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

from dmlstudy.records import Scalar
from dmlstudy.text import nearest, shown


class Suggester(Protocol):
    """The part of an Optuna trial that a space needs."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int: ...
    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


@dataclass(frozen=True)
class Fixed:
    """A value that is not searched."""

    value: Scalar | None

    @property
    def edges(self) -> tuple[Scalar, ...]:
        return ()

    def draw(self, trial: Suggester, name: str) -> Scalar | None:
        return self.value

    def lines(self, name: str) -> list[str]:
        return [f"{name} = {self.value}"]


@dataclass(frozen=True)
class Float:
    """A real number in [low, high], searched on a log scale if ``log``."""

    low: float
    high: float
    default: float
    log: bool = False

    @property
    def edges(self) -> tuple[Scalar, ...]:
        return self.low, self.high

    @property
    def inner(self) -> float:
        """A number between the bounds that is no whole one."""
        return self.low + (self.high - self.low) / math.pi

    def draw(self, trial: Suggester, name: str) -> Scalar | None:
        return trial.suggest_float(name, self.low, self.high, log=self.log)

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

    @property
    def edges(self) -> tuple[Scalar, ...]:
        return self.low, self.high

    def draw(self, trial: Suggester, name: str) -> Scalar | None:
        return trial.suggest_int(name, self.low, self.high, step=self.step, log=self.log)

    def lines(self, name: str) -> list[str]:
        step = f", step {self.step}" if self.step != 1 else ""
        return [f"{name} in {{{self.low}..{self.high}}}{step}, default {self.default}"]


@dataclass(frozen=True)
class Choice:
    """One of several values; each may bring parameters of its own, which exist only where it is chosen."""

    options: Mapping[Scalar, Mapping[str, Domain]]
    default: Scalar

    @property
    def edges(self) -> tuple[Scalar, ...]:
        return tuple(self.options)

    def draw(self, trial: Suggester, name: str) -> Any:
        return trial.suggest_categorical(name, list(self.options))

    def lines(self, name: str) -> list[str]:
        shown = [f"{name} in {{{', '.join(map(str, self.options))}}}, default {self.default}"]
        for option, children in self.options.items():
            for child, domain in children.items():
                lines = domain.lines(child)
                shown += [f"    if {option}: {lines[0]}"] + [f"    {line}" for line in lines[1:]]
        return shown

    def suffixes(self, option: Scalar, outer: Mapping[str, str]) -> Mapping[str, str]:
        """Suffixes of names under an option, ``outer`` being the suffix they have anyway.

        A name gets ``@option`` where it stands under other options too, with another domain.
        """
        options: dict[str, set[Scalar]] = {}
        domains: dict[str, set[str]] = {}
        for key, children in self.options.items():
            for name, domain in _all(children):
                options.setdefault(name, set()).add(key)
                domains.setdefault(name, set()).add(repr(domain))
        return {
            name: outer.get(name, "") + f"@{option}" * (len(options[name]) > 1 and len(domains[name]) > 1)
            for name in domains
        }


Domain: TypeAlias = Fixed | Float | Int | Choice
Space: TypeAlias = Mapping[str, Domain]


def sample(space: Space, trial: Suggester, prefix: str = "") -> dict[str, Scalar | None]:
    """Draw a value for each parameter that exists under the choices made; names are ``prefix.parameter``."""
    return _sample(space, trial, prefix, {})


def _sample(
    space: Space, trial: Suggester, prefix: str, suffixes: Mapping[str, str]
) -> dict[str, Scalar | None]:
    values: dict[str, Scalar | None] = {}
    for name, domain in space.items():
        values[name] = chosen = domain.draw(trial, _drawn(prefix, name, suffixes))
        if isinstance(domain, Choice):
            assert chosen is not None
            values |= _sample(domain.options[chosen], trial, prefix, domain.suffixes(chosen, suffixes))
    return values


def defaults(space: Space, prefix: str = "") -> dict[str, Scalar]:
    """The default point of the space: the names that ``sample`` draws to values."""
    return _defaults(space, prefix, {})


def _defaults(space: Space, prefix: str, suffixes: Mapping[str, str]) -> dict[str, Scalar]:
    point: dict[str, Scalar] = {}
    for name, domain in space.items():
        if not isinstance(domain, Fixed):
            point[_drawn(prefix, name, suffixes)] = domain.default
        if isinstance(domain, Choice):
            inner = domain.suffixes(domain.default, suffixes)
            point |= _defaults(domain.options[domain.default], prefix, inner)
    return point


def drawn(space: Space, prefix: str = "") -> dict[str, Domain]:
    """Every name that ``sample`` can draw, with its domain."""
    return _all_drawn(space, prefix, {})


def _all_drawn(space: Space, prefix: str, suffixes: Mapping[str, str]) -> dict[str, Domain]:
    found: dict[str, Domain] = {}
    for name, domain in space.items():
        if not isinstance(domain, Fixed):
            found[_drawn(prefix, name, suffixes)] = domain
        if isinstance(domain, Choice):
            for option, children in domain.options.items():
                found |= _all_drawn(children, prefix, domain.suffixes(option, suffixes))
    return found


def corners(space: Space, prefix: str = "") -> list[dict[str, Scalar]]:
    """Changes to the default point that put one parameter at an edge of its domain, by the drawn names.

    A parameter that exists only under an option is at its edges with that option chosen, once for each
    option it stands under, and the option's other parameters at their defaults.
    """
    return _corners(space, prefix, {}, {}, lambda domain: domain.edges)


def inner_points(space: Space, prefix: str = "") -> list[dict[str, Scalar]]:
    """The same with one real parameter between its bounds, where a key of whole numbers has no value."""
    return _corners(
        space, prefix, {}, {}, lambda domain: (domain.inner,) if isinstance(domain, Float) else ()
    )


def _corners(
    space: Space,
    prefix: str,
    suffixes: Mapping[str, str],
    chosen: Mapping[str, Scalar],
    values_of: Callable[[Domain], tuple[Scalar, ...]],
) -> list[dict[str, Scalar]]:
    found: list[dict[str, Scalar]] = []
    for name, domain in space.items():
        drawn = _drawn(prefix, name, suffixes)
        if not isinstance(domain, Choice):
            found += [{**chosen, drawn: value} for value in values_of(domain)]
            continue
        for option, children in domain.options.items():
            inner = domain.suffixes(option, suffixes)
            here = {**chosen, drawn: option, **_defaults(children, prefix, inner)}
            found += [here] if option in values_of(domain) else []
            found += _corners(children, prefix, inner, here, values_of)
    return found


def _drawn(prefix: str, name: str, suffixes: Mapping[str, str]) -> str:
    """The name under which a value is drawn: one string for all trials."""
    return sys.intern((f"{prefix}.{name}" if prefix else name) + suffixes.get(name, ""))


def names(space: Space) -> set[str]:
    """Every parameter of the space, those under choices included."""
    return {name for name, _ in _all(space)}


def names_under_options(space: Space) -> set[str]:
    """``name@option`` for each option that a parameter stands under."""
    return {
        f"{name}@{option}"
        for _, domain in _all(space)
        if isinstance(domain, Choice)
        for option, children in domain.options.items()
        for name in names(children)
    }


def _all(space: Space) -> Iterator[tuple[str, Domain]]:
    for name, domain in space.items():
        yield name, domain
        if isinstance(domain, Choice):
            for children in domain.options.values():
                yield from _all(children)


def replace(space: Space, name: str, domain: Domain) -> Space:
    """The space with ``name`` set to another domain wherever it stands, ``name@option`` under that option only.

    Fixing a choice to one of its values keeps the parameters under that value and drops the others.
    Raises KeyError where the space has no such parameter, ValueError where the value is no option.
    """
    leaf, *under = name.split("@")
    if not _stands(space, leaf, under):
        raise KeyError(name)
    return _replaced(space, leaf, under, domain)


def _stands(space: Space, leaf: str, under: list[str]) -> bool:
    return any(
        (name == leaf and not under)
        or (
            isinstance(old, Choice)
            and any(_stands(sub, leaf, _below(option, under)) for option, sub in old.options.items())
        )
        for name, old in space.items()
    )


def _replaced(space: Space, leaf: str, under: list[str], domain: Domain) -> Space:
    replaced: dict[str, Domain] = {}
    for name, old in space.items():
        if name == leaf and not under:
            if isinstance(old, Choice) and isinstance(domain, Fixed) and domain.value not in old.options:
                domain = Fixed(as_number(domain.value))
            replaced[name] = domain
            if isinstance(old, Choice) and isinstance(domain, Fixed):
                if domain.value is None or domain.value not in old.options:
                    raise ValueError(
                        f"{shown(domain.value)} is no option{nearest(domain.value, map(str, old.options))}"
                    )
                replaced |= old.options[domain.value]
        elif isinstance(old, Choice):
            options = {
                option: _replaced(sub, leaf, _below(option, under), domain)
                for option, sub in old.options.items()
            }
            replaced[name] = Choice(options, old.default)
        else:
            replaced[name] = old
    return replaced


def _below(option: Scalar, under: list[str]) -> list[str]:
    """The options that are still to be met beneath this one."""
    return under[1:] if under[:1] == [str(option)] else under


def check_names(space: Space, path: str) -> None:
    """Raises ValueError where a name stands in two places that can exist at once."""
    seen: set[str] = set()
    for name, domain in space.items():
        below: set[str] = set()
        if isinstance(domain, Choice):
            for children in domain.options.values():
                check_names(children, path)
                below |= names(children)
        twice = ({name} & below) | (({name} | below) & seen)
        if twice:
            raise ValueError(f"{path}: {min(twice)} stands in two places; rename one")
        seen |= {name} | below


def parse_space(value: object, path: str) -> Space:
    """Read a mapping of parameters to domains; a ValueError starts with the key's path."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: expected a mapping of parameters to domains, got {shown(value)}")
    space = {str(name): parse_domain(domain, f"{path}.{name}") for name, domain in value.items()}
    check_names(space, path)
    return space


def parse_domain(value: object, path: str) -> Domain:
    """Read one domain (see the top of this module); a ValueError starts with the key's path."""
    if not isinstance(value, Mapping):
        if value is None or _is_scalar(value):
            return Fixed(value)
        raise ValueError(
            f"{path}: expected a value or a domain such as {{float: [0, 1]}}, got {shown(value)}"
        )
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
    given = value[kind]
    bounds = [as_number(bound) for bound in given] if isinstance(given, list | tuple) else []
    if len(bounds) != 2 or not all(_is_number(bound) for bound in bounds):
        raise ValueError(f"{path}.{kind}: expected [low, high], two numbers, got {shown(given)}")
    low, high = bounds
    if not isinstance(value.get("log", False), bool):
        raise ValueError(f"{path}.log: expected true or false, got {shown(value['log'])}")
    if low > high:
        raise ValueError(f"{path}.{kind}: low {low} is above high {high}; swap them")
    if value.get("log") and low <= 0:
        raise ValueError(f"{path}.{kind}: a log scale needs low > 0, got {low}")
    if not math.isfinite(float(high) - float(low)):
        raise ValueError(f"{path}.{kind}: {low} and {high} lie further apart than a number can say")
    return low, high


MAX_OPTIONS = 1000
"""Values of a choice."""

SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers that YAML 1.1 reads as text unless they have a dot and a sign, as ``1e-5``."""


def as_number(value: Any) -> Any:
    """The number, where a value is text such as ``1e-5``; any other value unchanged."""
    return float(value) if isinstance(value, str) and SCIENTIFIC.fullmatch(value) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_scalar(value)


LARGEST_INT = 2**53
"""Beyond, not every integer is a floating-point number."""


def _is_scalar(value: object) -> TypeGuard[Scalar]:
    """True for a value that a parameter can have; an infinite or huge number is none."""
    if isinstance(value, int):
        return abs(value) <= LARGEST_INT
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def _default(value: Mapping[Any, Any], low: Any, high: Any, path: str) -> Any:
    default = as_number(value.get("default", low))
    if not _is_number(default) or not low <= default <= high:
        raise ValueError(f"{path}.default: {shown(default)} is outside [{low}, {high}]")
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
        if not isinstance(number, int) or not _is_number(number):
            raise ValueError(f"{path}.{key}: expected an integer, got {shown(number)}")
    if step < 1 or (high - low) % step or (default - low) % step:
        raise ValueError(f"{path}.step: {step} does not lead from {low} to {high} over the default {default}")
    log = bool(value.get("log", False))
    if log and step != 1:
        raise ValueError(f"{path}.step: a log scale has no step; leave one of them out")
    return Int(low, high, default, step, log)


def _parse_choice(value: Mapping[Any, Any], path: str) -> Domain:
    _no_other_keys(value, ("choice", "default"), path)
    choices = value["choice"]
    if not isinstance(choices, Mapping | list):
        raise ValueError(f"{path}.choice: expected a list of values or a mapping of values to parameters")
    if len(choices) > MAX_OPTIONS:
        raise ValueError(f"{path}.choice: {len(choices)} values, and at most {MAX_OPTIONS} are; give fewer")
    if not all(map(_is_scalar, choices)):
        wrong = next(each for each in choices if not _is_scalar(each))
        raise ValueError(
            f"{path}.choice: expected a list of values or a mapping of values to parameters, got {shown(wrong)} in it"
        )
    if isinstance(choices, Mapping):
        options = {key: parse_space(sub or {}, f"{path}.choice.{key}") for key, sub in choices.items()}
    else:
        options = {key: {} for key in choices}
        for number, key in enumerate(choices):
            if key in choices[:number]:
                raise ValueError(f"{path}.choice: {shown(key)} equals another value; leave one of them out")
    if not options:
        raise ValueError(f"{path}.choice: is empty; give at least one value")
    default = value.get("default", next(iter(options)))
    if default not in list(options):
        raise ValueError(
            f"{path}.default: {shown(default)} is no option{nearest(default, map(str, options))}"
        )
    return Choice(options, default)
