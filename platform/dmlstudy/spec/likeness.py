"""Paired families: one that takes another's points, so that the two differ in nothing but what their spaces say.

``families.X.like: Y``: trial n of X has the values of trial n of Y for every parameter that both search, and X's own
parameters are drawn beside them. With ``fix: best`` X begins when Y's search has ended, at Y's best configuration.

Two parameters are the same if they have one name. ``name@option`` is also the ``name`` of a family that has this
option fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmlstudy.records import Scalar, present_key
from dmlstudy.spec import space as spaces
from dmlstudy.spec.space import Choice, Domain, Fixed, Float, Int
from dmlstudy.text import nearest

if TYPE_CHECKING:
    from dmlstudy.spec.study_file import Family, FamilyEntry, SearchConfig


@dataclass(frozen=True)
class Likeness:
    """The parameters that a family takes from another, its leader: names are as drawn, ``<family>/<full name>``."""

    leader: str
    is_best: bool
    """Only the leader's best point is taken, once its search has ended."""
    shared: Mapping[str, tuple[str, ...]]
    """The follower's parameters to the leader's; of several names a point has at most one."""
    own: tuple[str, ...]
    """The follower's parameters that the leader does not search."""

    @property
    def points(self) -> str:
        """The leader's points that the follower takes, in words."""
        return "best configuration" if self.is_best else "points, trial by trial"

    def given(self, point: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """The follower's values at a point of the leader, which need not have all."""
        return {
            name: point[theirs] for name, names in self.shared.items() for theirs in names if theirs in point
        }


def likenesses(
    entries: Mapping[str, FamilyEntry], families: Mapping[str, Family], search: SearchConfig
) -> dict[str, Likeness]:
    """The followers among the families, each after its leader; raises ValueError for those that cannot be paired."""
    followers = {name: entry.like for name, entry in entries.items() if entry.like is not None}
    for name, entry in entries.items():
        _check_entry(name, entry, entries, search)
    found: dict[str, Likeness] = {}
    while len(found) < len(followers):
        ready = [
            name
            for name, leader in followers.items()
            if name not in found and (leader not in followers or leader in found)
        ]
        if not ready:
            circle = next(name for name in followers if name not in found)
            raise ValueError(
                f"families.{circle}.like: {followers[circle]}: it is in turn like {circle}, or like one that is; one"
                " family must be searched by itself: leave its like out"
            )
        for name in ready:
            leader = followers[name]
            shared = _shared(families[name], families[leader])
            own = tuple(each for each in _drawn(families[name]) if each not in shared)
            found[name] = Likeness(leader, entries[name].fix == "best", shared, own)
    return found


def _check_entry(
    name: str, entry: FamilyEntry, entries: Mapping[str, FamilyEntry], search: SearchConfig
) -> None:
    key = f"families.{name}"
    if entry.like is None:
        if entry.fix is not None:
            raise ValueError(
                f"{key}.fix: {entry.fix}: says which points of another family are taken; name it by like"
            )
        return
    if entry.like not in entries:
        raise ValueError(
            f"{key}.like: no family {entry.like!r} in this study{nearest(entry.like, entries, listed=True)}"
        )
    if search.families == "adaptive":
        raise ValueError(
            f"{key}.like: {entry.like}: with search.families: adaptive families have no trials of their own"
            " that another could take the points of; set search.families: equal"
        )
    budget = next((each for each in ("wall_time", "device_hours") if getattr(search, each) is not None), None)
    if entry.fix and budget:
        raise ValueError(
            f"{key}.fix: {entry.fix}: begins when {entry.like}'s search has ended, for which search.{budget} may"
            " leave no time; leave it out, search.trials_per_family is the budget"
        )


def searched_by_both(one: Family, other: Family) -> list[str]:
    """The parameters that both families search, by their names in a trial's parameters."""
    return list(dict.fromkeys(_short(drawn).partition("@")[0] for drawn in _shared(one, other)))


def describe(name: str, likeness: Likeness, families: Mapping[str, Family]) -> list[str]:
    """Lines for people: what a follower takes, what is its own, and in what else the two families differ."""
    leader = likeness.leader
    taken = ", ".join(_short(each) for each in likeness.shared) or "nothing"
    own = ", ".join(_short(each) for each in likeness.own)
    lines = [
        f"like {leader}: takes its {likeness.points}: {taken}",
        f"    searches of its own: {own}" if own else "    searches nothing of its own",
    ]
    mine, theirs = families[name].space, families[leader].space
    differing = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)]
    lines += [
        f"    differs: {key} {_said(mine.get(key))}; {leader}: {_said(theirs.get(key))}" for key in differing
    ]
    return lines if differing else [*lines, f"    differs in nothing from {leader}"]


def _said(domain: Domain | None) -> str:
    if domain is None:
        return "absent"
    return str(domain.value) if isinstance(domain, Fixed) else domain.lines("")[0].strip()


def _short(drawn: str) -> str:
    name, at, option = drawn.partition("/")[2].partition("@")
    return present_key(name) + at + option


def _drawn(family: Family) -> dict[str, Domain]:
    found: dict[str, Domain] = {}
    for section, space in family.sections().items():
        found |= spaces.drawn(space, f"{family.name}/{section}")
    return found


def _shared(follower: Family, leader: Family) -> dict[str, tuple[str, ...]]:
    """The follower's drawn names to the leader's of the same parameter.

    Raises ValueError where the follower's domain does not hold what the leader may draw.
    """
    theirs = _drawn(leader)
    shared: dict[str, tuple[str, ...]] = {}
    for name, domain in _drawn(follower).items():
        same = tuple(other for other in theirs if _is_same(name, follower, other, leader))
        for other in same:
            if not _holds_all(domain, theirs[other]):
                raise ValueError(
                    f"families.{follower.name}.like: {_short(other)} of {leader.name} is"
                    f" {_said(theirs[other])}, which {follower.name}'s, {_said(domain)}, does not hold; give both"
                    " the same domain"
                )
        if same:
            shared[name] = same
    return shared


def _is_same(name: str, family: Family, other: str, others: Family) -> bool:
    mine, theirs = name.partition("/")[2].split("@"), other.partition("/")[2].split("@")
    if mine[0] != theirs[0]:
        return False
    section = mine[0].partition(".")[0]
    return set(mine[1:]) <= {*theirs[1:], *_fixed(others, section)} and set(theirs[1:]) <= {
        *mine[1:],
        *_fixed(family, section),
    }


def _fixed(family: Family, section: str) -> set[str]:
    """The values that are fixed in a section: options that a parameter's name need not tell."""
    return {
        str(domain.value)
        for name, domain in family.stored.items()
        if isinstance(domain, Fixed) and name.partition(".")[0] == section
    }


def _holds_all(domain: Domain, other: Domain) -> bool:
    """True if each value of the other domain is one of this domain too."""
    if isinstance(other, Choice):
        return all(_holds(domain, value) for value in other.options)
    if isinstance(other, Float):
        return isinstance(domain, Float) and domain.low <= other.low and other.high <= domain.high
    assert isinstance(other, Int)
    if isinstance(domain, Choice):
        return len(range(other.low, other.high + 1, other.step)) <= len(domain.options) and all(
            value in domain.options for value in range(other.low, other.high + 1, other.step)
        )
    is_on_grid = not isinstance(domain, Int) or other.low == other.high or other.step % domain.step == 0
    return is_on_grid and _holds(domain, other.low) and _holds(domain, other.high)


def _holds(domain: Domain, value: Scalar) -> bool:
    if isinstance(domain, Choice):
        return value in domain.options
    if isinstance(value, str) or isinstance(domain, Fixed):
        return False
    if not domain.low <= value <= domain.high:
        return False
    return isinstance(domain, Float) or (isinstance(value, int) and (value - domain.low) % domain.step == 0)
