"""Parameters of a loss that have no effect, because the chosen weighting, miner or mode does not use them.

They are refused where a study file is read and where a loss is built from Python. Studies of earlier versions may have
them and are still resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dmlstudy.text import shown


class Switch(NamedTuple):
    """A parameter whose options decide which others are used; names may be joined by '+'."""

    default: str
    uses: Mapping[str, tuple[str, ...]]


SWITCHES: dict[str, dict[str, Switch]] = {
    "pair_weighting": {
        "weighting": Switch(
            "exponential", {"constant": (), "power": ("p", "q"), "exponential": ("alpha", "beta")}
        ),
        "mining": Switch("threshold", {"threshold": (), "margin": ("epsilon",), "batch_hard": ()}),
    },
    "triplet_weighting": {
        "weighting": Switch("exponential", {"constant": (), "power": ("p",), "exponential": ("alpha",)}),
        "mining": Switch(
            "all",
            {
                "all": (),
                "semi_hard": (),
                "batch_hard": (),
                "margin": ("epsilon",),
                "threshold": ("positive_margin", "negative_margin"),
            },
        ),
    },
    "sup_ap": {
        "offset_mode": Switch("continuous", {"continuous": (), "fixed": ("offset",)}),
    },
    "recall_at_k": {
        "k_temperature_mode": Switch("fixed", {"fixed": ("k_temperature",), "k": ()}),
    },
    "subcenter_arcface": {
        "margin_by": Switch(
            "fixed",
            {
                "fixed": ("margin",),
                "class_size": ("lowest_margin", "highest_margin", "exponent"),
                "power": ("lowest_margin", "added_margin", "exponent"),
            },
        ),
    },
    "graph_consistency": {
        "sigma_mode": Switch("fixed", {"fixed": ("sigma",), "median": ()}),
    },
}
"""Losses and regularisers of which not every option uses every parameter."""


class Unused(NamedTuple):
    """A parameter with its value, the ``switch`` that decides on it, what that is set to, and what would use it."""

    name: str
    value: object
    switch: str
    chosen: object
    users: tuple[str, ...]


def unused(loss: str, params: Mapping[str, object]) -> Iterator[Unused]:
    """The given parameters of a loss or regulariser that its other parameters leave without effect.

    An object that stands where a name could uses no parameter. An unknown name is ignored here: building the loss
    reports it.
    """
    for name, switch in SWITCHES.get(loss, {}).items():
        chosen = params.get(name, switch.default)
        names = chosen.split("+") if isinstance(chosen, str) else []
        if not set(names) <= switch.uses.keys():
            continue
        used = {parameter for each in names for parameter in switch.uses[each]}
        for parameter in dict.fromkeys(own for uses in switch.uses.values() for own in uses):
            if parameter in params and parameter not in used:
                users = tuple(each for each, own in switch.uses.items() if parameter in own)
                yield Unused(parameter, params[parameter], name, chosen, users)


def check_used(role: str, loss: str, params: Mapping[str, object]) -> None:
    """Raise ValueError for the first parameter without effect, with its value and the fix."""
    for name, value, switch, chosen, users in unused(loss, params):
        raise ValueError(
            f"{role} {loss!r}: {name}={shown(value)} is not used by {switch}={shown(chosen)}; leave it out, or set"
            f" {switch} to {' or '.join(map(repr, users))}"
        )
