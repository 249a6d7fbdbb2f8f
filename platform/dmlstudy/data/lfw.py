"""Labeled Faces in the Wild: faces as vectors of attributes, and the pairs by which verification is judged.

Shapes: N faces, D features, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy.data.images import Indices, Labels

ATTRIBUTES = "lfw_attributes.txt"
DEV_TRAIN, DEV_TEST, TEN_FOLDS = "pairsDevTrain.txt", "pairsDevTest.txt", "pairs.txt"

EXPECTED_PAIRS: Mapping[str, int] = {DEV_TRAIN: 2200, DEV_TEST: 1000, TEN_FOLDS: 6000}
"""Pairs in each list, half of them of one person."""

Face = tuple[str, int]
"""A person's name with underscores for spaces, and the number of the picture."""


class FacePairs(NamedTuple):
    """Rows of faces two by two, and whether the two are of one person."""

    index_P2: Indices
    is_similar_P: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class LFW:
    """Faces, the person of each, and View 1 and View 2 of the protocol.

    View 1 is for development: thresholds and parameters are chosen on ``view1_train`` and judged by ``view1_test``.
    View 2 is for the report: ten folds, each judged by what the other nine say.

    Persons are known in training (the unrestricted setting), so constraints may be drawn from ``labels_N``, except
    for the pairs in ``held_out_K2``. ``num_left_out`` pairs name a face that has no features.
    """

    x_ND: NDArray[np.float32]
    labels_N: Labels
    class_names: tuple[str, ...]
    number_N: Indices
    view1_train: FacePairs
    view1_test: FacePairs
    view2: tuple[FacePairs, ...]
    num_left_out: int

    @property
    def held_out_K2(self) -> Indices:
        """All pairs of both views, of which no constraint may hold one."""
        return np.concatenate([each.index_P2 for each in (self.view1_train, self.view1_test, *self.view2)])

    @property
    def pictures(self) -> list[str]:
        """Each face's picture below the archive's folder ``lfw``, for features of one's own in ``x_ND``."""
        names = [self.class_names[label] for label in self.labels_N.tolist()]
        return [
            f"{name}/{name}_{number:04d}.jpg"
            for name, number in zip(names, self.number_N.tolist(), strict=True)
        ]


def load_lfw(path: str | Path, *, expected: Mapping[str, int] | None = EXPECTED_PAIRS) -> LFW:
    """Load the 73 attributes of each face (Kumar et al. 2009) and the lists of pairs from one folder.

    It holds ``lfw_attributes.txt``, ``pairsDevTrain.txt``, ``pairsDevTest.txt`` and ``pairs.txt`` as published.
    Some faces have no attributes; pairs with one of these are left out and counted. Raises ValueError naming the
    file and line for what is missing or cannot be read, and where a list has another number of pairs than
    ``expected`` (None: any).
    """
    folder = Path(path)
    faces, x_ND = _attributes(folder / ATTRIBUTES)
    row_of = {face: row for row, face in enumerate(faces)}
    names = sorted({name for name, _ in faces})
    label_of = {name: label for label, name in enumerate(names)}
    found: list[FacePairs] = []
    num_left_out = 0
    for name in (DEV_TRAIN, DEV_TEST, TEN_FOLDS):
        folds = _folds(folder / name)
        num_pairs = sum(map(len, folds))
        if expected is not None and num_pairs != expected[name]:
            raise ValueError(
                f"{folder / name}: {num_pairs} pairs, expected {expected[name]}; get the file again"
            )
        for fold in folds:
            pairs = _rows(fold, row_of)
            if len(np.unique(pairs.is_similar_P)) < 2:
                raise ValueError(f"{folder / name}: no pairs of both kinds whose faces are in {ATTRIBUTES}")
            num_left_out += len(fold) - len(pairs.index_P2)
            found.append(pairs)
    return LFW(
        x_ND,
        np.array([label_of[name] for name, _ in faces], dtype=np.int64),
        tuple(names),
        np.array([number for _, number in faces], dtype=np.int64),
        found[0],
        found[1],
        tuple(found[2:]),
        num_left_out,
    )


def _attributes(path: Path) -> tuple[list[Face], NDArray[np.float32]]:
    """Faces and their attributes: a line has a name, a number and the values, with tabs between; # begins a comment."""
    faces: list[Face] = []
    rows: list[list[float]] = []
    for line, parts in _lines(path):
        if parts[0].startswith("#"):
            continue
        try:
            face = parts[0].strip().replace(" ", "_"), int(parts[1])
            values = [float(each) for each in parts[2:]]
        except (IndexError, ValueError):
            raise ValueError(
                f"{path}, line {line}: expected a name, a number and attributes, with tabs between"
            ) from None
        if not values or (rows and len(values) != len(rows[0])) or not np.isfinite(values).all():
            wanted = f"{len(rows[0])} finite" if rows else "finite"
            raise ValueError(f"{path}, line {line}: {len(values)} attributes, expected {wanted}")
        faces.append(face)
        rows.append(values)
    if not faces:
        raise ValueError(f"{path}: no faces in it")
    if len(set(faces)) < len(faces):
        raise ValueError(f"{path}: a face stands in two lines; leave one out")
    return faces, np.array(rows, dtype=np.float32)


def _folds(path: Path) -> list[list[tuple[Face, Face]]]:
    """The pairs of each fold: of one with n pairs of either kind, n lines of one person and then n of two.

    The first line has n, or the number of folds and n.
    """
    lines = _lines(path)
    _, head = next(lines, (0, ["nothing"]))
    if len(head) not in (1, 2) or not all(each.strip().isdigit() for each in head):
        raise ValueError(
            f"{path}, line 1: expected how many pairs there are of either kind, got {' '.join(head)!r}"
        )
    num_folds, num = int(head[0]) if len(head) == 2 else 1, int(head[-1])
    pairs: list[tuple[Face, Face]] = []
    for line, parts in lines:
        is_one_person = len(pairs) % (2 * num) < num if num else False
        try:
            name, number, *other = (each.strip() for each in parts)
            if len(other) != (1 if is_one_person else 2):
                raise ValueError
            second = (name, int(other[0])) if is_one_person else (other[0], int(other[1]))
            pairs.append(((name, int(number)), second))
        except ValueError:
            wanted = "name, number, number" if is_one_person else "name, number, name, number"
            raise ValueError(f"{path}, line {line}: expected {wanted}, got {' '.join(parts)!r}") from None
    if len(pairs) != 2 * num * num_folds or not pairs:
        raise ValueError(f"{path}: {len(pairs)} pairs, but its first line says {2 * num * num_folds}")
    return [pairs[start : start + 2 * num] for start in range(0, len(pairs), 2 * num)]


def _rows(pairs: Sequence[tuple[Face, Face]], row_of: Mapping[Face, int]) -> FacePairs:
    """The pairs both of whose faces have a row."""
    known = [(a, b) for a, b in pairs if a in row_of and b in row_of]
    index_P2 = np.array([(row_of[a], row_of[b]) for a, b in known], dtype=np.int64).reshape(-1, 2)
    return FacePairs(index_P2, np.array([a[0] == b[0] for a, b in known], dtype=np.bool_))


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Numbers and fields of the lines that are not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; LFW needs {ATTRIBUTES}, {DEV_TRAIN}, {DEV_TEST}, {TEN_FOLDS}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    yield from (
        (number, line.rstrip().split("\t"))
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    )
