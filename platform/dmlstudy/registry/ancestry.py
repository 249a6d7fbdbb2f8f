"""The ancestry of a registered model: as a section of its card, in a line, and as tags of its version."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from dmlstudy.records import Ancestor
from dmlstudy.registry.markdown import code
from dmlstudy.registry.tracking import MOST_IN_A_TAG
from dmlstudy.training.lineage import RANDOM, SHOWN, KeptNotes, facts, in_words, is_untold, without_folders

START = "start"
"""A version's tag with the lineage in words, as a trial's run has it."""

RECORDS = "mlflow.dmlstudy.ancestry"
"""A version's tag with the lineage as JSON, nearest first; MLflow's page shows no tag of this prefix."""

SEEN = "start_seen"
"""A version's tag that says what its start had seen of its study's classes."""

RANDOM_WEIGHTS = "random weights"


def tags(notes: KeptNotes) -> dict[str, str]:
    """The tags of a version by its model's notes; of a lineage too long for a tag the facts go, then the oldest."""
    if not notes.start:
        return {}
    ancestors: Sequence[Ancestor] = notes.start
    if len(_json(ancestors)) > MOST_IN_A_TAG:
        ancestors = [Ancestor(source=each.source, sha256=each.sha256) for each in ancestors]
    while len(_json(ancestors)) > MOST_IN_A_TAG and len(ancestors) > 1:
        ancestors = ancestors[:-1]
    words = in_words(ancestors)[:MOST_IN_A_TAG]
    return {START: words, RECORDS: _json(ancestors)} | ({SEEN: notes.seen} if notes.seen else {})


def _json(ancestors: Sequence[Ancestor]) -> str:
    return json.dumps([each.model_dump(exclude_defaults=True) for each in ancestors])


def of_tags(given: Mapping[str, str]) -> tuple[Ancestor, ...]:
    """The lineage of a version's tags; empty for versions of old, and for models that start from no weights."""
    return tuple(Ancestor.model_validate(each) for each in json.loads(given.get(RECORDS, "[]")))


def line(ancestors: Sequence[Ancestor]) -> str:
    """``models:/birds/3, from default of resnet18``, without folders and digests, for the command line."""
    return ", from ".join(_named(each) for each in ancestors)


def markdown_line(ancestors: Sequence[Ancestor]) -> str:
    """The same as Markdown, with users' names as code."""
    return ", from ".join(
        RANDOM_WEIGHTS if each.source == RANDOM else code(without_folders(each.source)) for each in ancestors
    )


def section(notes: KeptNotes | None) -> list[str]:
    """The part of a card that tells the ancestors in order; nothing of a model that has none."""
    if notes is None or not notes.start or notes.start[0].source == RANDOM:
        return []
    ancestors = notes.start
    last = len(ancestors)
    order = "" if last == 1 else ", number 1 from number 2" + (", and so on" if last > 2 else "")
    return [
        "## Ancestry",
        "",
        f"The training of this model began with the weights of number 1{order}.",
        "",
        *(f"{number}. {_item(each)}" for number, each in enumerate(ancestors, start=1)),
        "",
        *_on_classes(notes),
    ]


def _item(ancestor: Ancestor) -> str:
    if ancestor.source == RANDOM:
        return RANDOM_WEIGHTS
    digest = f"SHA-256 of its weights {ancestor.sha256[:SHOWN]}" if ancestor.sha256 else "digest not known"
    known = facts(ancestor)
    parts = [code(without_folders(ancestor.source)), digest, *([code(known)] if known else [])]
    return "; ".join([*parts, *([code(ancestor.url)] if ancestor.url else [])])


def _on_classes(notes: KeptNotes) -> list[str]:
    """Lines on the classes of the study that the ancestors had seen, as far as it is known."""
    lines = []
    if notes.seen:
        lines.append(f"* classes seen before: number 1, itself or by an ancestor, {notes.seen}")
    untold = [number for number, each in enumerate(notes.start or (), start=1) if is_untold(each)]
    if untold:
        which = ", ".join(map(str, untold))
        lines.append(
            f"* not known: what number {which} was trained on; classes of the test may have been among it"
        )
    elif not notes.seen:
        lines.append("* classes seen before: none of this study's, by their names and their images")
    return [*lines, ""]


def licence_line(notes: KeptNotes | None) -> str:
    """The licence of data and weights, as far as it is known."""
    stated = [
        f"number {number}: {code(each.licence)}"
        for number, each in enumerate((notes and notes.start) or (), start=1)
        if each.licence
    ]
    if not stated:
        return "that of the data and of pretrained weights holds; none is noted here"
    return (
        f"that of the data and of pretrained weights holds; stated of weights, by their library ({', '.join(stated)}"
        " under Ancestry); none of the data"
    )


def _named(ancestor: Ancestor) -> str:
    return RANDOM_WEIGHTS if ancestor.source == RANDOM else without_folders(ancestor.source)
