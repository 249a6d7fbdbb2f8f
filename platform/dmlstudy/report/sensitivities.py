"""The part of a page on what matters: each parameter's importance and sensitivity in all families, and a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dmlstudy.html import Html, element, joined
from dmlstudy.records import Record
from dmlstudy.report import words
from dmlstudy.report.page import Plot, paragraph, table
from dmlstudy.search.history import Searched
from dmlstudy.search.sensitivity import Influence, Sensitivity, influences
from dmlstudy.text import counted
from dmlstudy.trials import Status

MOST_NAMED = 5
"""Parameters of a kind that the sentence names; the others are counted."""

SHOWN = {
    Influence.MATTERS: "● ",
    Influence.DOES_NOT: "○ ",
    Influence.OPEN: "? ",
}
"""Marks beside the numbers, so that nothing is told by type or colour alone."""


class ParameterEffect(Record):
    """A parameter in one family: a row of the facts.

    ``change``, ``low`` and ``high`` are in units of the objective; without a band they and ``importance`` are None.
    """

    family: str
    parameter: str
    importance: float | None
    influence: Influence
    change: float | None
    low: float | None
    high: float | None
    why: str
    """The reason why there is no band; empty where there is one."""
    num_finished: int
    num_pruned: int


class _Told(NamedTuple):
    """A parameter in one family, as far as it is known."""

    family: Searched
    name: str
    sensitivity: Sensitivity
    influence: Influence
    importance: float | None

    @property
    def strength(self) -> tuple[float, float]:
        return self.sensitivity.low, self.sensitivity.high


def _told(family: Searched) -> Iterator[_Told]:
    """Each parameter of a family that has trials enough to be asked about."""
    unknown = Sensitivity(untold="no two trials with different scores")
    known = {each.name: each.sensitivity or unknown for each in family.parameters}
    answers = influences(known)
    for each in family.parameters:
        yield _Told(family, each.name, known[each.name], answers[each.name], each.importance)


def effects(families: Sequence[Searched]) -> list[ParameterEffect]:
    """A row for each parameter of each family, as values."""
    return [
        ParameterEffect(
            family=family.family,
            parameter=each.name,
            importance=each.importance,
            influence=each.influence,
            **{
                name: None if each.sensitivity.untold else getattr(each.sensitivity, name)
                for name in ("change", "low", "high")
            },
            why=each.sensitivity.untold,
            num_finished=len(family.of(Status.FINISHED)),
            num_pruned=len(family.of(Status.PRUNED)),
        )
        for family in families
        for each in _told(family)
    ]


def sentence(families: Sequence[Searched], objective: str) -> str:
    """One sentence on what matters, what does not and what cannot be told; empty where nothing was searched."""
    of_name: dict[str, list[_Told]] = {}
    for family in sorted(families, key=lambda each: each.family):  # of equals the same one, whoever asks
        for each in _told(family):
            of_name.setdefault(each.name, []).append(each)
    if not of_name:
        return ""
    is_one = len(families) == 1
    groups: dict[Influence, list[list[_Told]]] = {influence: [] for influence in Influence}
    for own in of_name.values():
        kind = next(kind for kind in Influence if any(each.influence == kind for each in own))
        groups[kind].append(own)
    for found in groups.values():
        found.sort(key=lambda own: (_clearest(own).strength, own[0].name), reverse=True)
    pieces = []
    if strong := groups[Influence.MATTERS]:
        pieces.append(f"what matters is {_listed([_strong(own, objective, is_one) for own in strong])}")
    if weak := groups[Influence.DOES_NOT]:
        said = _listed([_weak(own, is_one) for own in weak])
        pieces.append(f"beside it {said} {'does' if len(weak) == 1 else 'do'} not")
    if unclear := groups[Influence.OPEN]:
        said = _listed([f"{own[0].name} ({_clearest(own).sensitivity})" for own in unclear])
        pieces.append(f"of {said} these trials cannot tell")
    if few := groups[Influence.TOO_FEW]:
        nearest = [min(own, key=lambda each: each.sensitivity.num_lacking) for own in few]
        said = _listed([f"{each.name} ({each.sensitivity.untold}{_where(each, is_one)})" for each in nearest])
        alone = f"{_trials_of(families)} too few to tell what matters:"
        pieces.append(f"{'nothing is known of' if pieces else alone} {said}")
    whole = "; ".join(pieces)
    return f"{whole[0].upper()}{whole[1:]}."


def _trials_of(families: Sequence[Searched]) -> str:
    """The trials that say what matters, those that were stopped too, with the verb."""
    finished, stopped = (
        sum(len(family.of(status)) for family in families) for status in (Status.FINISHED, Status.PRUNED)
    )
    if stopped:
        return f"{finished} finished and {stopped} stopped trials are"
    return counted(finished, "finished trial is", "finished trials are")


def _where(told: _Told, is_one: bool) -> str:
    """The family that has so many of the trials needed, where there are several."""
    return "" if is_one or not told.sensitivity.num_lacking else f" in {told.family.family}"


def _clearest(own: Sequence[_Told]) -> _Told:
    """Of a parameter's families the one in which it is seen to move the most."""
    return max(own, key=lambda each: (each.influence == Influence.MATTERS, each.strength))


def _strong(own: Sequence[_Told], objective: str, is_one: bool) -> str:
    best = _clearest(own)
    num = sum(each.influence == Influence.MATTERS for each in own)
    where = "" if is_one else f"in {num} of {counted(len(own), 'family', 'families')}, most in "
    if not is_one:
        where += f"{best.family.family}: "
    return f"{best.name} ({where}moves {objective} by {best.sensitivity})"


def _weak(own: Sequence[_Told], is_one: bool) -> str:
    closed = [each for each in own if each.influence == Influence.DOES_NOT]
    widest = max(closed, key=lambda each: each.sensitivity.high)
    where = "" if is_one else f"in {len(closed)} of {counted(len(own), 'family', 'families')}, at most "
    return f"{widest.name} ({where}{widest.sensitivity})"


def _listed(said: Sequence[str]) -> str:
    """``a, b and c``; of many the first and the number of the others."""
    rest = len(said) - MOST_NAMED
    if rest > 1:
        said = [*said[:MOST_NAMED], f"{rest} others"]
    return " and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said)


def parts(families: Sequence[Searched], objective: str) -> list[str | Plot]:
    """The part of the page: the sentence, and a table of parameters by families; empty where nothing was searched.

    Where nothing is known of any parameter there is no table.
    """
    said = sentence(families, objective)
    if not said:
        return []
    own = [family for family in families if family.parameters]
    if all(each.sensitivity.untold and each.importance is None for family in own for each in _told(family)):
        return [element("h3", "What matters"), paragraph(said)]
    cells = {(each.family.family, each.name): _cell(each) for family in own for each in _told(family)}
    names = {each.name: 0.0 for family in own for each in family.parameters}
    for family in own:
        for each in _told(family):
            names[each.name] = max(names[each.name], each.sensitivity.low + 1e-6 * (each.importance or 0.0))
    rows = [
        [name, *(cells.get((family.family, name), "–") for family in own)]
        for name in sorted(names, key=lambda name: (-names[name], name))
    ]
    caption = (
        f"How far validation {objective} moves over the values that were tried of each parameter, with a band that"
        " holds for a family’s parameters at once with 95%, and its importance (PED-ANOVA), of few trials a hint."
        " ● matters; ○ does not, beside the strongest; ? these trials cannot tell."
    )
    limits = (
        "From all scored trials of a family; those stopped early count with what they might have scored."
        " A parameter is a parabola here, beside the others: how two act together, and sharp edges, widen the band."
        " Where a sampler has looked in one corner only, this is about that corner."
    )
    return [
        element("h3", "What matters"),
        paragraph(said),
        table(caption, ["parameter", *(family.family for family in own)], rows),
        paragraph(limits, kind="quiet"),
    ]


def _cell(each: _Told) -> Html:
    importance = "" if each.importance is None else f"importance {each.importance:.2f}"
    if each.sensitivity.untold:
        return joined([each.sensitivity.untold, element("span", importance, class_="interval")])
    shown = words.two_lines(f"{each.sensitivity}")
    strength = element("b", shown) if each.influence == Influence.MATTERS else shown
    return joined([SHOWN[each.influence], strength, element("span", importance, class_="interval")])
