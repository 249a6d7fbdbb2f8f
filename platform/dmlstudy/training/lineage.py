"""The ancestry of a trial's embedder, in records and in words; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from dmlstudy.records import Ancestor, StartConfig, TrialConfig

RANDOM = "random"
"""The start of an embedder whose weights were drawn."""

ARROW = " <- "
SHOWN = 12
"""Digits of a digest that people are shown."""


def lineage(config: TrialConfig, sha256: str | None = None) -> tuple[Ancestor, ...]:
    """The start and what that was trained from, nearest first; ``sha256`` is of what was loaded, if it is known."""
    if config.embedder.weights is None:
        return (Ancestor(source=RANDOM),)
    start = config.start or StartConfig(source=config.embedder.weights)
    first, *others = start.lineage
    return (Ancestor(source=first.source, sha256=first.sha256 or sha256 or ""), *others)


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
