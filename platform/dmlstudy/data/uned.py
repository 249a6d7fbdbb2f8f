"""UnED, the Universal Embeddings Dataset (Ypsilantis et al. 2023): its info files, of one domain or several.

``info_files/<domain>/<split>.json`` is a list of ``{"path": "cars/car_ims/000001.jpg", "class_id": 3}``, and paths are
below ``images/`` beside ``info_files/``, as the authors' own reader has them. A ``class_id`` may be a list of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dmlstudy.data.layouts import Expected, Parts
from dmlstudy.data.pictures import Files, by_name
from dmlstudy.files import read_json

NUM_IMAGES: Mapping[str, Mapping[str, int]] = {
    "cars": {"train": 6346, "val": 1708, "test": 8131},
    "sop": {"train": 48942, "val": 10609, "test": 60502},
    "inshop": {"train": 20897, "val": 4982, "test": 14218, "index": 12612},
    "inat": {"train": 273929, "val": 51917, "test": 136093},
    "food2k": {"train": 472349, "val": 49323, "test": 9979},
    "rp2k": {"train": 188724, "val": 17185, "test": 10931},
}
"""Pictures of each domain's splits, as the authors count them; the classes of the splits are different ones."""

SEEN = ("met", "gldv2")
"""Domains whose galleries have classes of training: those of Met are its training pictures themselves."""


class LabelledPath(NamedTuple):
    """A picture of an info file."""

    path: Path
    label: str


def uned(folder: Path, expected: Expected | None = None) -> Parts:
    """The domains of ``info_files/`` in the folder, together, or one where the folder is ``info_files/<domain>``.

    Training and validation pictures are development, test pictures queries, and ``index`` is the gallery, or the test
    pictures themselves where a domain has none. All domains' galleries are one. A class is called by domain, split and
    number. Pictures of several classes are left out, and so are the domains of ``SEEN``.

    ``expected`` has other counts than ``NUM_IMAGES``, by ``<domain> <split>``. Raises ValueError naming the file for
    what is missing, damaged, or of another count.
    """
    is_one = folder.parent.name == "info_files"
    info = folder.parent if is_one else folder / "info_files"
    images = info.parent / "images"
    if not info.is_dir() or not images.is_dir():
        raise ValueError(
            f"data.path: {folder} needs info_files/ and images/ of UnED in it, or names info_files/DOMAIN"
        )
    names = (
        [folder.name] if is_one else sorted(each.name for each in info.iterdir() if each.name in NUM_IMAGES)
    )
    if not names or not set(names) <= set(NUM_IMAGES):
        raise ValueError(
            f"data.path: {folder} has none of the domains {', '.join(NUM_IMAGES)}; {' and '.join(SEEN)} are not taken,"
            " for their galleries have classes of training"
        )
    lines = (
        [] if is_one or not (seen := [name for name in SEEN if (info / name).is_dir()]) else [_on_seen(seen)]
    )
    development: list[LabelledPath] = []
    queries: list[LabelledPath] = []
    galleries: list[LabelledPath] = []
    both: list[LabelledPath] = []
    num_left_out = 0
    for name in names:
        splits = ("train", "val", "test", *(["index"] if (info / name / "index.json").is_file() else []))
        of_split = {
            split: _entries(info / name / f"{split}.json", images, name, split, expected) for split in splits
        }
        num_left_out += sum(num for _, num in of_split.values())
        development += of_split["train"][0] + of_split["val"][0]
        if "index" in of_split:
            queries += of_split["test"][0]
            galleries += of_split["index"][0]
        else:
            both += of_split["test"][0]
    if num_left_out:
        lines.append(f"left out: {num_left_out} picture{'s' * (num_left_out > 1)} of several classes")
    test = queries + both + galleries
    num_asked, first_found = len(queries) + len(both), len(queries)
    roles = (np.arange(num_asked), np.arange(first_found, len(test))) if galleries else (None, None)
    sides = [
        by_name(Files([each.path for each in side]), [each.label for each in side])
        for side in (development, test)
    ]
    return Parts(sides[0], sides[1], roles[0], roles[1], tuple(lines))


def _on_seen(names: Sequence[str]) -> str:
    return f"left out: {' and '.join(names)}, whose galleries have classes of training"


def _entries(
    file: Path, images: Path, domain: str, split: str, expected: Expected | None
) -> tuple[list[LabelledPath], int]:
    """The pictures of one class each, and the number of those with several."""
    content = _read(file)
    own = f"{domain} {split}"
    wanted = (
        NUM_IMAGES[domain].get(split)
        if expected is None
        else expected[own].images
        if own in expected
        else None
    )
    if wanted is not None and len(content) != wanted:
        raise ValueError(
            f"{file}: {len(content)} pictures, UnED has {wanted} there; get the info files again"
        )
    side = "test" if split == "index" else split
    entries = []
    for row, each in enumerate(content):
        path = each.get("path") if isinstance(each, dict) else None
        labels = each.get("class_id") if isinstance(each, dict) else None
        numbers = labels if isinstance(labels, list) else [labels]
        is_sound = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
        if not isinstance(path, str) or not numbers or not is_sound:
            raise ValueError(
                f"{file}, entry {row}: needs a path and a class_id, a number; get the info files again"
            )
        if len(numbers) == 1:
            entries.append(LabelledPath(_existing(file, row, images, path), f"{domain} {side} {numbers[0]}"))
    return entries, len(content) - len(entries)


def _existing(file: Path, row: int, images: Path, path: str) -> Path:
    """The picture's file; names of RP2K may have been unpacked with #U5c0f for a letter."""
    escaped = "".join(letter if ord(letter) < 128 else f"#U{ord(letter):04x}" for letter in path)
    found = next((place for place in (images / path, images / escaped) if place.is_file()), None)
    if found is None:
        raise ValueError(
            f"{file}, entry {row}: no file {images / path}; unpack the domain's pictures into images/"
        )
    return found


def _read(file: Path) -> list[Any]:
    content = read_json(file, "get the info files of UnED", "get the info files again")
    if not isinstance(content, list) or not content:
        raise ValueError(f"{file}: no list of pictures; get the info files again")
    return content
