"""Classes that a model was trained on, kept with it as digests, and compared with those of another study.

A class is known by two digests: of its name, and of the contents of all its images. Of the same name may be another
class of another set; of the same contents it is the same. Digests, for names may be people's.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from dmlstudy.data.images import LabelledImages

DIGITS = 16
"""Hexadecimal digits of each digest that are kept."""

Known: TypeAlias = Sequence[Sequence[str]]
"""(digest of the name, digest of the contents) of each class, sorted."""


def of_images(images: LabelledImages) -> list[list[str]]:
    """The classes that have an image among these."""
    contents: dict[int, list[bytes]] = defaultdict(list)
    for label, content in zip(images.labels_N.tolist(), images.content_hashes(), strict=True):
        contents[label].append(content)
    return sorted(
        [_digest(images.class_names[label].encode()), _digest(b"".join(sorted(own)))]
        for label, own in contents.items()
    )


def joined(*many: Iterable[Sequence[str]]) -> list[list[str]]:
    """The classes of several models, each once."""
    return [list(each) for each in sorted({tuple(each) for known in many for each in known})]


def told(known: Known, development: Known, test: Known) -> str:
    """The classes of a study that a model trained on ``known`` has seen, in words; empty if none."""
    test_shared, own_shared = (_shared(known, side) for side in (test, development))
    parts = []
    if test_shared.num:
        parts.append(f"{test_shared} test classes, so test scores are not of unseen classes")
    if own_shared.num:
        parts.append(f"{own_shared} development classes, so validation scores are of classes it knows")
    return f"was trained on {'; and on '.join(parts)}" if parts else ""


def in_both(images: LabelledImages, others: LabelledImages) -> str:
    """The classes of ``others`` that are among those of ``images``, in words; empty if none."""
    shared = _shared(of_images(images), of_images(others))
    return f"{shared.num} of the {shared.num_all} classes{shared.how}" if shared.num else ""


class _Shared(NamedTuple):
    """Classes of a side that are known, by their images or, of the others, by their names."""

    num_same: int
    num_named: int
    num_all: int

    @property
    def num(self) -> int:
        return self.num_same + self.num_named

    @property
    def how(self) -> str:
        """A remark on classes that are known by their names alone; empty if none are."""
        if not self.num_named:
            return ""
        return " (by their names)" if not self.num_same else f" ({self.num_named} by their names)"

    def __str__(self) -> str:
        return f"{self.num} of the {self.num_all}{self.how}"


def _shared(known: Known, side: Known) -> _Shared:
    names, contents = ({each[place] for each in known} for place in (0, 1))
    same = sum(content in contents for _, content in side)
    named = sum(name in names and content not in contents for name, content in side)
    return _Shared(same, named, len(side))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]
