"""The ancestry of a trial's embedder, in records and in words; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel, ValidationError

from dmlstudy.records import Ancestor, StartConfig, TrialConfig
from dmlstudy.text import counted, reason

RANDOM = "random"
"""The start of an embedder whose weights were drawn."""

ARROW = " <- "
SHOWN = 12
"""Digits of a digest that people are shown."""

OF = " of "
"""Between a hub's name of weights and the backbone: ``default of resnet18``."""

TIMM = "timm:"
LOCAL = "timm:local-dir:"
"""Beginnings of timm's backbones, and of those that a folder describes."""


def lineage(config: TrialConfig, sha256: str | None = None) -> tuple[Ancestor, ...]:
    """The start and what that was trained from, nearest first; ``sha256`` is of what was loaded, if it is known."""
    if config.embedder.weights is None:
        return (Ancestor(source=RANDOM),)
    start = config.start or StartConfig(source=config.embedder.weights)
    first, *others = start.lineage
    return (first.model_copy(update={"sha256": first.sha256 or sha256 or ""}), *others)


def in_words(ancestors: Sequence[Ancestor]) -> str:
    """A lineage in one line: ``models:/birds/3 (SHA-256 0123456789ab) <- default of resnet18``."""
    return ARROW.join(
        f"{each.source} (SHA-256 {each.sha256[:SHOWN]})" if each.sha256 else each.source for each in ancestors
    )


def tags(config: TrialConfig) -> dict[str, str]:
    """Tags of a trial's run: what its embedder starts from, with the digest and what that has seen of the classes."""
    ancestors = lineage(config)
    seen = config.start.seen if config.start else ""
    found = {"start": in_words(ancestors), "start_sha256": ancestors[0].sha256, "start_seen": seen}
    return {name: text for name, text in found.items() if text}


class _KeptData(BaseModel):
    path: str | None = None


class _KeptStart(BaseModel):
    seen: str = ""


class _KeptConfig(BaseModel):
    data: _KeptData = _KeptData()
    start: _KeptStart | None = None


class KeptNotes(BaseModel):
    """Of the notes kept with a model those on its training and its ancestors; None is what an old one does not tell."""

    start: tuple[Ancestor, ...] | None = None
    trained_on: str = ""
    development_fingerprint: str = ""
    trained_classes: list[tuple[str, str]] | None = None
    num_trained_classes: int | None = None
    num_trained_images: int | None = None
    config: _KeptConfig = _KeptConfig()

    @property
    def seen(self) -> str:
        """The classes of its own study that its start had seen, in words; empty if none are known."""
        return self.config.start.seen if self.config.start else ""

    def trained_on_facts(self) -> dict[str, Any]:
        """The data that it was trained on itself, as the fields of an ``Ancestor``."""
        if self.num_trained_images == 0:
            return {"data": "nothing, it is kept as it started"}
        is_first = self.start is not None and [each.source for each in self.start] == [RANDOM]
        all_own = len(self.trained_classes) if is_first and self.trained_classes else None
        folder = PurePath(self.config.data.path).name if self.config.data.path else ""
        return {
            "data": ", ".join(each for each in (self.trained_on, folder) if each),
            "data_sha256": self.development_fingerprint,
            "num_images": self.num_trained_images,
            "num_classes": all_own if self.num_trained_classes is None else self.num_trained_classes,
        }


def kept(notes: Mapping[str, Any], name: str) -> KeptNotes:
    """The notes of the model ``name``. Raises ValueError, of one line, for those of another form."""
    try:
        return KeptNotes.model_validate(notes)
    except ValidationError as error:
        raise ValueError(
            f"{name}: its notes on what it was trained on are not understood ({reason(error)}); pull or save it again"
        ) from None


def told(notes: Mapping[str, Any]) -> KeptNotes:
    """The same, where notes of another form, which anyone may keep with a model of their own, tell nothing."""
    try:
        return KeptNotes.model_validate(notes)
    except ValidationError:
        return KeptNotes()


def without_folders(source: str) -> str:
    """A source as others may read it: of a path the last part, of another store or server no address."""
    if source.startswith("models:/"):
        model, _, elsewhere = source.partition("?")
        where = {"": "", "store": " of another store"}.get(elsewhere.partition("=")[0], " of another server")
        return f"{model}{where}"
    before, of, backbone = source.rpartition(OF)
    if of and backbone.startswith(LOCAL):
        return f"{before}{of}{LOCAL}{PurePath(backbone.removeprefix(LOCAL)).name}"
    return source if of and backbone.startswith(TIMM) else PurePath(source).name


def facts(ancestor: Ancestor) -> str:
    """The facts known of an ancestor beside its name and digest, in plain words; empty if nothing is.

    ``trained on image_folder, birds: 901 images of 5 classes, SHA-256 0123456789ab``.
    """
    if ancestor.entry:
        known = (
            ancestor.entry,
            counted(ancestor.num_classes, "class", "classes") if ancestor.num_classes else "",
            f"licence {ancestor.licence}" if ancestor.licence else "its library states no licence",
        )
        return ", ".join(each for each in known if each)
    if not ancestor.data:
        return ""
    sizes = (
        counted(ancestor.num_images, "image", "images") if ancestor.num_images else "",
        counted(ancestor.num_classes, "class", "classes") if ancestor.num_classes else "",
    )
    counts = OF.join(each for each in sizes if each)
    digest = f"SHA-256 {ancestor.data_sha256[:SHOWN]}" if ancestor.data_sha256 else ""
    shown = ", ".join(each for each in (counts, digest) if each)
    return f"trained on {ancestor.data}{': ' if shown else ''}{shown}"


def is_untold(ancestor: Ancestor) -> bool:
    """True if nothing tells the classes it was trained on: of files and hubs."""
    return ancestor.source != RANDOM and not ancestor.data


def as_facts(ancestors: Sequence[Ancestor]) -> list[dict[str, Any]]:
    """The lineage for programs and strangers: no folders, and under ``about`` what is known in words."""
    return [
        {
            **each.model_dump(exclude_defaults=True),
            "source": without_folders(each.source),
            **({"about": words} if (words := facts(each)) else {}),
        }
        for each in ancestors
    ]
