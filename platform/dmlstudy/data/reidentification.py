"""Layouts of re-identification: pictures of persons and vehicles by several cameras, with queries and a gallery.

A layout is one function ``(folder, expected) -> Parts``, as in ``layouts``; where a picture's name has its camera is in
``cameras.RULES``. Counts: as published, and as their readers in torchreid and fastreid find them.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from dmlstudy.data.layouts import Expected, Parts, checked
from dmlstudy.data.pictures import Files, by_name, joined

DISTRACTORS = "distractors"
"""The class of gallery pictures that show nobody: of no query, so always wrong."""

JUNK = -1
"""The identity of pictures that are neither right nor wrong, such as a part of a person."""

Named = list[tuple[Path, str]]


def market1501(folder: Path, expected: Expected) -> Parts:
    """Market-1501 (Zheng et al. 2015): ``bounding_box_train/``, ``query/``, ``bounding_box_test/``.

    A name is ``0002_c1s1_000451_03.jpg``, identity and camera. Gallery pictures of -1 are junk and left out; those of
    0000 are distractors.
    """
    root = _root(
        "market1501", folder, ("bounding_box_train", "query", "bounding_box_test"), "Market-1501-v15.09.15"
    )
    name = re.compile(r"(-?\d+)_c\d")
    train, query, gallery = (
        _named("market1501", root / place, name)
        for place in ("bounding_box_train", "query", "bounding_box_test")
    )
    kept = [(path, identity) for path, identity in gallery if int(identity) != JUNK]
    shown = [(path, identity if int(identity) else DISTRACTORS) for path, identity in kept]
    junk = len(gallery) - len(kept)
    lines = (f"left out: {junk} junk picture{'s' * (junk > 1)} of the gallery (identity -1)",) if junk else ()
    return _parts("market1501", train, query, shown, expected, lines)


def veri776(folder: Path, expected: Expected) -> Parts:
    """VeRi-776 (Liu et al. 2016): ``image_train/``, ``image_query/``, ``image_test/``.

    A name is ``0001_c001_00016450_0.jpg``, vehicle and camera.
    """
    root = _root("veri776", folder, ("image_train", "image_query", "image_test"), "VeRi")
    name = re.compile(r"(\d+)_c\d{3}")
    train, query, gallery = (
        _named("veri776", root / place, name) for place in ("image_train", "image_query", "image_test")
    )
    return _parts("veri776", train, query, gallery, expected)


def msmt17(folder: Path, expected: Expected) -> Parts:
    """MSMT17 (Wei et al. 2018): ``list_train.txt``, ``list_val.txt``, ``list_query.txt``, ``list_gallery.txt``.

    They stand beside ``train/`` and ``test/``, or ``mask_train_v2/`` and ``mask_test_v2/``. A line is
    ``0000/0000_000_01_0303morning_0015_0.jpg 0``, picture and identity, which is counted anew for testing. Training and
    validation pictures, of the same persons, are development.
    """
    lists = tuple(f"list_{part}.txt" for part in ("train", "val", "query", "gallery"))
    root = _root("msmt17", folder, lists, "MSMT17_V1", "MSMT17_V2", "MSMT17")
    pictures = next(
        (
            pair
            for pair in (("train", "test"), ("mask_train_v2", "mask_test_v2"))
            if (root / pair[0]).is_dir()
        ),
        None,
    )
    if pictures is None or not (root / pictures[1]).is_dir():
        raise ValueError(
            f"data.path: {root} has lists of msmt17 without train/ and test/; unpack the archive again"
        )
    train, val, query, gallery = (
        _listed(root / name, root / pictures[place], side)
        for name, place, side in zip(lists, (0, 0, 1, 1), ("train", "train", "test", "test"), strict=True)
    )
    return _parts("msmt17", train + val, query, gallery, expected)


def _root(name: str, folder: Path, marks: tuple[str, ...], *places: str) -> Path:
    found = next(
        (
            root
            for root in (folder, *(folder / place for place in places))
            if all((root / m).exists() for m in marks)
        ),
        None,
    )
    if found is None:
        raise ValueError(
            f"data.path: {folder} has no layout of {name} that is known; it needs {', '.join(marks)}, here or in"
            f" {' or '.join(places)}"
        )
    return found


def _named(name: str, folder: Path, identity: re.Pattern[str]) -> Named:
    """The pictures of a folder, with the identity that each name begins with."""
    rows = []
    for path in sorted(folder.glob("*.jpg")):
        if path.name.startswith("."):
            continue
        match = identity.match(path.name)
        if match is None:
            raise ValueError(
                f"{path}: no name of {name}, which begins with identity and camera; take the picture away"
            )
        rows.append((path, match[1]))
    return rows


def _listed(file: Path, pictures: Path, side: str) -> Named:
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        path, _, identity = line.strip().rpartition(" ")
        if not path or not identity.isdigit():
            raise ValueError(f"{file}, line {number}: {line.strip()[:60]!r} is no picture with an identity")
        rows.append((pictures / path, f"{side} {int(identity):04}"))
    return rows


def _parts(
    name: str, train: Named, query: Named, gallery: Named, expected: Expected, left_out: tuple[str, ...] = ()
) -> Parts:
    for path, _ in (*train, *query, *gallery):
        if not path.is_file():
            raise ValueError(
                f"{path}: {name} lists this picture, which is not there; unpack the archive again"
            )
    development, asked, ranked = (
        by_name(Files([path for path, _ in rows]), [identity for _, identity in rows])
        for rows in (train, query, gallery)
    )
    test = joined(asked, ranked)
    is_query_N = np.arange(len(test.labels_N)) < len(query)
    found = Parts(development, test, np.flatnonzero(is_query_N), np.flatnonzero(~is_query_N), left_out)
    return checked(name, found, expected)
