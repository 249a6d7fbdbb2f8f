"""Where a stream of constraints comes from: labels, transitive closure, one pass over labels, a file, an iterator.

Constraints name rows of a feature matrix until their vectors are needed. A triplet is (anchor, positive, negative), a
pair (first, second) with a flag whether the two are similar; a pair is the same either way round. All draws are
without replacement and the same for the same generator. Shapes: T constraints, C points of a constraint (3 or 2),
B constraints of a block, N rows, D features, K excluded pairs; M rows sorted by their G groups (classes, or components
of similar rows), E boxes of constraints, R ranks of constraints.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dmlstudy.data.parquet import read_columns
from dmlstudy.online.learner import Constraints, Flags

Rows: TypeAlias = NDArray[np.int64]
Single: TypeAlias = tuple[ArrayLike, ArrayLike, ArrayLike]
"""One constraint of an iterator: (x_D, positive_D, negative_D), or (x_D, other_D, whether they are similar)."""

TRIPLET = ("anchor", "positive", "negative")
PAIR = ("first", "second", "similar")

LIMIT = 2**62
"""Where numbers of constraints must stay below, to be sure that an int64 holds them."""

TRIES = 2**22
"""Draws after which a search for constraints without excluded pairs ends, or 100 times those asked for if more."""


class IndexedConstraints(NamedTuple):
    """A stream of constraints as rows of a feature matrix, in the order they arrive."""

    index_TC: Rows
    is_similar_T: Flags | None = None

    def blocks(self, x_ND: NDArray[Any], size: int) -> Iterator[Constraints]:
        """The constraints' vectors in float64, ``size`` constraints at a time, the last block maybe fewer.

        Raises ValueError, at once, for no constraints, rows that ``x_ND`` does not have, or a size below 1.
        """
        _check_size(size)
        index_TC, is_similar_T = self.index_TC, self.is_similar_T
        if len(index_TC) == 0:
            raise ValueError("no constraints: the stream is empty")
        is_bad_T = ((index_TC < 0) | (index_TC >= len(x_ND))).any(axis=1)
        if is_bad_T.any():
            number = int(np.argmax(is_bad_T))
            raise ValueError(
                f"constraint {number} names the rows {index_TC[number].tolist()}; x has the rows 0 to"
                f" {len(x_ND) - 1}"
            )
        return (
            Constraints(
                np.asarray(x_ND[index_TC[start : start + size]], dtype=np.float64),
                None if is_similar_T is None else is_similar_T[start : start + size],
            )
            for start in range(0, len(index_TC), size)
        )


def sample_triplets(
    labels_N: ArrayLike, num: int, rng: np.random.Generator, exclude: ArrayLike | None = None
) -> IndexedConstraints:
    """``num`` different triplets, uniformly of all that labels allow: sum_c n_c (n_c - 1) (N - n_c) of them.

    So a class counts by its number of pairs, not of rows (our reading of "randomly sample"; OAHU, section 4.3.2).
    With ``exclude`` (K, 2) no triplet holds two rows that are one of these pairs. Class names do not matter.
    Raises ValueError for ``num`` below 1 or more than there are, and if too few are left by ``exclude``.
    """
    _check_num(num)
    groups = _classes(labels_N)
    if len(groups.size_G) < 2:
        raise ValueError("all labels are of one class; triplets need a second one for their negatives")
    if groups.size_G.max() < 2:
        raise ValueError("no class has two rows; triplets need an anchor and a positive of one class")
    end_G = groups.start_G + groups.size_G
    boxes = _triplets(groups, np.arange(len(end_G)), end_G, end_G[-1] - groups.size_G)
    return IndexedConstraints(_all_drawn(boxes, num, rng, _excluded(exclude), "triplets"))


def sample_pairs(
    labels_N: ArrayLike,
    num: int,
    rng: np.random.Generator,
    exclude: ArrayLike | None = None,
    similar_share: float = 0.5,
) -> IndexedConstraints:
    """``num`` different pairs in random order, round(num similar_share) of them similar; uniformly of either kind.

    Labels allow sum_c n_c (n_c - 1) / 2 similar pairs, all others are dissimilar. The paper does not say how many are
    similar; half is our choice. ``exclude`` as in ``sample_triplets``.
    Raises ValueError for ``num`` below 1, a share outside [0, 1], more than there are of a kind, and if too few are
    left by ``exclude``.
    """
    _check_num(num)
    _check_share(similar_share)
    groups = _classes(labels_N)
    num_similar = round(num * similar_share)
    if num_similar > 0 and groups.size_G.max() < 2:
        raise ValueError("no class has two rows, so no pair is similar; similar_share=0 asks for none")
    if num_similar < num and len(groups.size_G) < 2:
        raise ValueError(
            "all labels are of one class, so no pair is dissimilar; similar_share=1 asks for none"
        )
    end_G = groups.start_G + groups.size_G
    excluded = _excluded(exclude)
    similar = _all_drawn(_similar(groups), num_similar, rng, excluded, "similar pairs")
    boxes = _dissimilar(groups, np.arange(len(end_G)), end_G, end_G[-1] - end_G)
    return _mixed(similar, _all_drawn(boxes, num - num_similar, rng, excluded, "dissimilar pairs"), rng)


def close(
    seeds: IndexedConstraints,
    num: int,
    rng: np.random.Generator,
    exclude: ArrayLike | None = None,
    similar_share: float = 0.5,
) -> IndexedConstraints:
    """``num`` different constraints that the seeds imply and that are no seeds (OAHU, section 3.1, footnote 1).

    Similar to similar is similar, similar to dissimilar is dissimilar: rows linked by similar pairs are a component,
    and a dissimilar pair marks its two components as dissimilar. Implied are the triplets (a, p, n) with a, p != a in
    one component and n in one marked against it; the pairs within a component as similar, those across marked ones as
    dissimilar. Triplets are drawn uniformly. Of the pairs round(num similar_share) are similar, uniformly of either
    kind and in random order; where a kind has too few, the other makes up for it: for few seeds on many rows hardly a
    similar pair is implied, for many seeds hardly anything else than dissimilar ones (our choice). The implied are
    never listed, only counted. ``exclude`` as in ``sample_triplets``.
    Raises ValueError for ``num`` below 1, more than are implied, seeds that contradict each other, and if too few are
    left by ``exclude``.
    """
    _check_num(num)
    _check_share(similar_share)
    closures, excluded = _closures(seeds), _excluded(exclude)
    free = sum(each.num_free for each in closures)
    if free < num:
        raise ValueError(
            f"{len(seeds.index_TC)} seeds imply {free} further constraints; num={num} are asked for: ask for fewer,"
            " or give more seeds or such of fewer rows"
        )
    found = [_drawn(closures[0], num if len(closures) == 1 else round(num * similar_share), rng, excluded)]
    if len(closures) == 2:
        found.append(_drawn(closures[1], num - len(found[0]), rng, excluded))
        if len(found[0]) + len(found[1]) < num:
            found[0] = _drawn(closures[0], num - len(found[1]), rng, excluded)
    _check_left(sum(len(each) for each in found), num, "implied constraints")
    return IndexedConstraints(found[0]) if len(found) == 1 else _mixed(found[0], found[1], rng)


def count_implied(seeds: IndexedConstraints) -> int:
    """How many constraints ``close`` chooses from: those implied, less the seeds. Raises ValueError as ``close``."""
    return sum(each.num_free for each in _closures(seeds))


def stream_of(
    labels_N: ArrayLike,
    arity: Literal[2, 3],
    num_seeds: int = 5000,
    num_implied: int = 5000,
    *,
    rng: np.random.Generator,
    exclude: ArrayLike | None = None,
    similar_share: float = 0.5,
) -> IndexedConstraints:
    """Seeds, then constraints they imply, in the order of their creation (OAHU, sections 4.3.2 and 4.4.2).

    Triplets for arity 3, pairs for arity 2; the defaults are the paper's, which takes 25,000 of each for retrieval.
    Seeds are drawn by ``sample_triplets`` or ``sample_pairs``, the implied ones by ``close``; with ``num_implied=0``
    there are only seeds. A constraint that holds a pair of ``exclude`` (K, 2), either way round and between any two of
    its points, is discarded and drawn anew. Few pairs on many rows imply few others: 5,000 on 35,000 rows of ten
    classes some 1,300, so that the defaults are an error for pairs there, and num_seeds=7500, num_implied=2500 is not.
    Raises ValueError as the three functions do, and for excluded rows that labels do not have.
    """
    excluded, num_rows = _excluded(exclude), np.size(labels_N)
    if excluded is not None and excluded.base > num_rows:
        raise ValueError(f"exclude names row {excluded.base - 1}; there are labels for {num_rows} rows")
    if num_implied < 0:
        raise ValueError(f"num_implied={num_implied} must be at least 0")
    if arity == 3:
        seeds = sample_triplets(labels_N, num_seeds, rng, exclude)
    elif arity == 2:
        seeds = sample_pairs(labels_N, num_seeds, rng, exclude, similar_share)
    else:
        raise ValueError(f"arity={arity}: choose 3 for triplets or 2 for pairs")
    if num_implied == 0:
        return seeds
    implied = close(seeds, num_implied, rng, exclude, similar_share)
    return IndexedConstraints(
        np.concatenate([seeds.index_TC, implied.index_TC]),
        None
        if seeds.is_similar_T is None or implied.is_similar_T is None
        else np.concatenate([seeds.is_similar_T, implied.is_similar_T]),
    )


def one_pass_triplets(labels: Iterable[Hashable]) -> Iterator[tuple[int, int, int]]:
    """OPML's triplets (anchor, positive, negative) of rows, one for a row at most, as labels come (METHODS 6).

    Of each class its newest row is kept. A row of a class seen before, when there are two classes at least, is an
    anchor. If the row before it has its class, that row is the positive, and the negative is the newest row of the
    class that was seen first most recently, or of the one seen first before that if this is the anchor's own. Else the
    row before is the negative, and the positive is the newest row of the anchor's class. Memory O(classes).
    Raises ValueError at the end if there was no triplet.
    """
    newest: dict[Hashable, int] = {}
    created: list[Hashable] = []  # the last two classes
    previous: Hashable = None
    is_empty = True
    for row, label in enumerate(labels):
        if label not in newest:
            created = [*created[-1:], label]
        elif len(newest) >= 2:
            is_empty = False
            if previous == label:
                yield row, row - 1, newest[created[-1] if created[-1] != label else created[0]]
            else:
                yield row, newest[label], row - 1
        newest[label] = row
        previous = label
    if is_empty:
        raise ValueError("no triplet: labels need two classes, and a class that comes again after that")


def read_constraints(path: str | Path, num_rows: int | None = None) -> IndexedConstraints:
    """Constraints of a CSV file with a header line, or a Parquet file, in the order of its lines.

    Columns anchor, positive, negative are triplets; first, second, similar are pairs, similar being 0, 1, true or
    false. All others are row numbers from 0, below ``num_rows`` if that is given.
    Raises ValueError naming the file, and for a value that cannot be used also its line and column.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    columns = {name.strip(): column for name, column in read_columns(path).items()}
    kinds = [kind for kind in (TRIPLET, PAIR) if columns.keys() >= set(kind)]
    if len(kinds) != 1:
        raise ValueError(
            f"{path}: needs either the columns {', '.join(TRIPLET)} or {', '.join(PAIR)}; it has"
            f" {', '.join(columns) or 'none'}"
        )
    if len(columns[kinds[0][0]]) == 0:
        raise ValueError(f"{path}: no constraints below its header; write one on each line")
    names = kinds[0][: 3 if kinds[0] == TRIPLET else 2]
    index_TC = np.stack([_row_numbers(path, name, columns[name], num_rows) for name in names], axis=1)
    is_similar_T = None if kinds[0] == TRIPLET else _similar_flags(path, columns["similar"])
    return IndexedConstraints(index_TC, is_similar_T)


def read_lfw_pairs(path: str | Path, row_of: Mapping[tuple[str, int], int]) -> IndexedConstraints:
    """Pairs as Labeled Faces in the Wild lists them (pairs.txt of View 2, pairsDevTrain.txt and -DevTest of View 1).

    A line is 'name i j' of a similar pair, 'name i other j' of a dissimilar one; a first line of one or two numbers
    is their count. ``row_of`` gives the row of (name, number). Pairs are in the order of the lines: of View 2 300
    similar and 300 dissimilar ones for each of 10 folds. Their rows are what ``exclude`` of a stream takes, so that
    no constraint tells of a pair that is judged (OAHU, section 4.4.2).
    Raises ValueError naming the file and the line that cannot be read, or whose picture has no row.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    index_TC, is_similar_T = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if not words or (number == 1 and len(words) <= 2 and all(word.isdigit() for word in words)):
            continue
        ends = {3: (words[:2], [words[0], words[-1]]), 4: (words[:2], words[2:])}.get(len(words))
        if ends is None or not all(end[1].isdigit() for end in ends):
            raise ValueError(f"{path}, line {number}: {line!r} is neither 'name i j' nor 'name i other j'")
        pictures = [(name, int(of_name)) for name, of_name in ends]
        missing = [picture for picture in pictures if picture not in row_of]
        if missing:
            raise ValueError(f"{path}, line {number}: picture {missing[0][1]} of {missing[0][0]} has no row")
        index_TC.append([row_of[picture] for picture in pictures])
        is_similar_T.append(len(words) == 3)
    if not index_TC:
        raise ValueError(f"{path}: no pairs")
    return IndexedConstraints(np.array(index_TC, np.int64), np.array(is_similar_T))


def blocks(stream: Iterable[Single], size: int) -> Iterator[Constraints]:
    """The vectors of single constraints, ``size`` constraints at a time, the last block maybe fewer.

    A constraint is (x_D, positive_D, negative_D), or (x_D, other_D, similar) with similar true, false, 1 or 0. No
    more of the stream is taken than a block needs, so it may be endless.
    Raises ValueError for a size below 1; as blocks are taken, for an empty stream and what is no such constraint,
    naming its number.
    """
    _check_size(size)
    return _blocks(iter(stream), size)


def _blocks(stream: Iterator[Single], size: int) -> Iterator[Constraints]:
    num = 0
    while singles := list(itertools.islice(stream, size)):
        yield _block(singles, num)
        num += len(singles)
    if num == 0:
        raise ValueError("no constraints: the stream is empty")


def _block(singles: Sequence[Single], start: int) -> Constraints:
    """A block of the constraints that are number ``start`` and after in the stream; all must be like its first."""
    is_pair = len(singles[0]) == 3 and np.ndim(singles[0][2]) == 0
    shape = np.shape(singles[0][0])
    for number, single in enumerate(singles, start):
        shapes = [np.shape(each) for each in single]
        if len(shape) != 1 or shapes != [shape, shape, () if is_pair else shape]:
            raise ValueError(
                f"constraint {number} of the stream has parts of the shapes {', '.join(map(str, shapes))}; a triplet"
                " has three vectors of one length, a pair two and a flag, and all must be of one kind and length"
            )
        if is_pair and single[2] not in (0, 1):
            raise ValueError(
                f"constraint {number} of the stream: similar is {single[2]}, expected true or false"
            )
    x_BCD = np.array([single[:2] if is_pair else single for single in singles], dtype=np.float64)
    return Constraints(x_BCD, np.array([bool(single[2]) for single in singles]) if is_pair else None)


def _check_num(num: int) -> None:
    if num < 1:
        raise ValueError(f"num={num} must be at least 1: a stream has a constraint")


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size={size} must be at least 1: a block has a constraint")


def _check_share(similar_share: float) -> None:
    if not 0 <= similar_share <= 1:
        raise ValueError(f"similar_share={similar_share} must be in [0, 1]")


def _check_left(left: int, num: int, what: str) -> None:
    if left < num:
        raise ValueError(
            f"only {left} {what} hold no pair of exclude; num={num} are asked for: ask for fewer, or exclude fewer"
        )


class _Groups(NamedTuple):
    """Rows sorted by group: those of group g are row_M[start_G[g] : start_G[g] + size_G[g]]."""

    row_M: Rows
    start_G: Rows
    size_G: Rows


def _grouped(group_M: Rows) -> _Groups:
    size_G = np.bincount(group_M)
    return _Groups(np.argsort(group_M, kind="stable"), np.cumsum(size_G) - size_G, size_G)


def _classes(labels_N: ArrayLike) -> _Groups:
    """Rows by class; classes in the order they first come up, so that their names do not matter."""
    labels_N = np.asarray(labels_N)
    if labels_N.ndim != 1 or len(labels_N) == 0:
        raise ValueError(f"labels have the shape {labels_N.shape}, expected one label for each of the rows")
    _, first_G, class_N = np.unique(labels_N, return_index=True, return_inverse=True)
    return _grouped(np.argsort(np.argsort(first_G))[class_N])


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Constraints that are numbered, and found by their number, without a list of them.

    Box e holds what is made of the rows of one group and, if ``has_far``, one more row of those from row_M[far_E[e]]
    on, around the end. Its near parts, a row or with ``has_two`` two different ones, number width_E[e], the far rows
    height_E[e]; rank = far width + near after all boxes before. Two rows a, b of a group of s have the number
    near = ((b - a - 1) mod s) s + a: the first s (s - 1) / 2 are each unordered pair once, all s (s - 1) the ordered.
    """

    row_M: Rows
    start_E: Rows
    size_E: Rows
    far_E: Rows
    width_E: Rows
    height_E: Rows
    has_two: bool
    has_far: bool

    @cached_property
    def end_E(self) -> Rows:
        """The rank after a box's last. Raises ValueError for more than an int64 may number."""
        if (self.width_E.astype(np.float64) * self.height_E).sum() >= LIMIT:
            raise ValueError("these rows allow more than 2**62 constraints; draw from fewer rows")
        return np.cumsum(self.width_E * self.height_E)

    @property
    def total(self) -> int:
        return int(self.end_E[-1]) if len(self.end_E) else 0

    def at(self, rank_R: Rows) -> Rows:
        """The constraints of these ranks, (R, C)."""
        box_R = np.searchsorted(self.end_E, rank_R, side="right")
        start_R, size_R, width_R = self.start_E[box_R], self.size_E[box_R], self.width_E[box_R]
        far_R, near_R = divmod(rank_R - self.end_E[box_R] + width_R * self.height_E[box_R], width_R)
        offset_R, a_R = divmod(near_R, size_R)
        columns = [start_R + a_R]
        if self.has_two:
            columns.append(start_R + (a_R + 1 + offset_R) % size_R)
        if self.has_far:
            columns.append((self.far_E[box_R] + far_R) % len(self.row_M))
        return np.stack([self.row_M[column_R] for column_R in columns], axis=1)

    def ranks(self, box_R: Rows, near_R: Rows, far_R: Rows) -> Rows:
        """The ranks, sorted and each once, of constraints by their box and numbers of near part and far row."""
        width_R = self.width_E[box_R]
        return _distinct(self.end_E[box_R] - width_R * self.height_E[box_R] + far_R * width_R + near_R)


def _triplets(groups: _Groups, group_E: Rows, far_E: Rows, height_E: Rows) -> _Boxes:
    size_E = groups.size_G[group_E]
    return _Boxes(
        groups.row_M,
        groups.start_G[group_E],
        size_E,
        far_E,
        size_E * (size_E - 1),
        height_E,
        has_two=True,
        has_far=True,
    )


def _similar(groups: _Groups) -> _Boxes:
    size_G = groups.size_G
    width_G, one_G = size_G * (size_G - 1) // 2, np.ones_like(size_G)
    return _Boxes(
        groups.row_M, groups.start_G, size_G, groups.start_G, width_G, one_G, has_two=True, has_far=False
    )


def _dissimilar(groups: _Groups, group_E: Rows, far_E: Rows, height_E: Rows) -> _Boxes:
    size_E = groups.size_G[group_E]
    start_E = groups.start_G[group_E]
    return _Boxes(groups.row_M, start_E, size_E, far_E, size_E, height_E, has_two=False, has_far=True)


class _Choice(NamedTuple):
    """The constraints of some boxes but for those of the ranks taken, which are sorted and each there once."""

    boxes: _Boxes
    taken_R: Rows

    @property
    def num_free(self) -> int:
        return self.boxes.total - len(self.taken_R)


def _closures(seeds: IndexedConstraints) -> list[_Choice]:
    """What the seeds imply less the seeds: the triplets, or the similar and the dissimilar pairs."""
    index_TC, is_similar_T = np.asarray(seeds.index_TC), seeds.is_similar_T
    wanted = 3 if is_similar_T is None else 2
    if index_TC.ndim != 2 or index_TC.shape[1] != wanted:
        raise ValueError(
            f"seeds have the shape {index_TC.shape}; give triplets as (T, 3), or pairs as (T, 2) with is_similar_T"
        )
    if len(index_TC) == 0:
        raise ValueError("no seeds: nothing implies nothing")
    if is_similar_T is None:
        return [_closed_triplets(index_TC)]
    if np.shape(is_similar_T) != (len(index_TC),):
        raise ValueError(f"is_similar_T has the shape {np.shape(is_similar_T)}, expected ({len(index_TC)},)")
    return _closed_pairs(index_TC, np.asarray(is_similar_T, dtype=np.bool_))


def _closed_triplets(index_TC: Rows) -> _Choice:
    row_M, point_TC = _points(index_TC)
    components = _components(row_M, point_TC[:, :2], point_TC[:, ::2])
    groups = components.groups
    near_T, far_T = components.of_M[point_TC[:, 0]], components.of_M[point_TC[:, 2]]
    num = len(groups.size_G)
    key_E = _distinct(np.concatenate([near_T * num + far_T, far_T * num + near_T]))
    group_E, other_E = divmod(key_E, num)
    boxes = _triplets(groups, group_E, groups.start_G[other_E], groups.size_G[other_E])
    a_T, b_T, far_place_T = components.place_M[point_TC].T
    near_number_T = _ordered(a_T, b_T, groups.size_G[near_T])
    is_one_T = a_T != b_T  # a triplet that repeats its anchor is not among the implied
    box_T = np.searchsorted(key_E, near_T * num + far_T)
    return _Choice(boxes, boxes.ranks(box_T[is_one_T], near_number_T[is_one_T], far_place_T[is_one_T]))


def _closed_pairs(index_TC: Rows, is_similar_T: Flags) -> list[_Choice]:
    row_M, point_TC = _points(index_TC)
    components = _components(row_M, point_TC[is_similar_T], point_TC[~is_similar_T])
    groups = components.groups
    similar = _similar(groups)
    pair_TC = point_TC[is_similar_T & (point_TC[:, 0] != point_TC[:, 1])]
    group_T = components.of_M[pair_TC[:, 0]]
    (a_T, b_T), size_T = components.place_M[pair_TC].T, groups.size_G[group_T]
    near_T = np.minimum(_ordered(a_T, b_T, size_T), _ordered(b_T, a_T, size_T))
    taken_R = similar.ranks(group_T, near_T, np.zeros_like(near_T))
    pair_TC = point_TC[~is_similar_T]
    pair_TC = np.take_along_axis(pair_TC, np.argsort(components.of_M[pair_TC], axis=1), axis=1)
    num = len(groups.size_G)
    key_T = components.of_M[pair_TC] @ np.array([num, 1])
    key_E = _distinct(key_T)
    group_E, other_E = divmod(key_E, num)
    dissimilar = _dissimilar(groups, group_E, groups.start_G[other_E], groups.size_G[other_E])
    a_T, b_T = components.place_M[pair_TC].T
    return [
        _Choice(similar, taken_R),
        _Choice(dissimilar, dissimilar.ranks(np.searchsorted(key_E, key_T), a_T, b_T)),
    ]


def _distinct(values: Rows) -> Rows:
    """The different values, sorted: np.unique, which in NumPy 2.4 takes a hundred times as long for a million."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), dtype=np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]


def _ordered(a_R: Rows, b_R: Rows, size_R: Rows) -> Rows:
    """The number of an ordered pair of places in a group, as in ``_Boxes``."""
    return (b_R - a_R - 1) % size_R * size_R + a_R


class _Components(NamedTuple):
    """Components of points that similar pairs link, and of each point its component and its place in there."""

    groups: _Groups
    of_M: Rows
    place_M: Rows


def _points(index_TC: Rows) -> tuple[Rows, Rows]:
    """The rows that occur, sorted, and the constraints by places among them."""
    row_M = _distinct(index_TC.ravel())
    return row_M, np.searchsorted(row_M, index_TC)


def _components(row_M: Rows, similar_TC: Rows, dissimilar_TC: Rows) -> _Components:
    """The components of pairs of points. Raises ValueError naming two rows of one component that are dissimilar."""
    links = coo_array((np.ones(len(similar_TC)), tuple(similar_TC.T)), shape=(len(row_M), len(row_M)))
    of_M = connected_components(links, directed=False)[1].astype(np.int64)
    is_contradiction_T = of_M[dissimilar_TC[:, 0]] == of_M[dissimilar_TC[:, 1]]
    if is_contradiction_T.any():
        first, second = row_M[dissimilar_TC[np.argmax(is_contradiction_T)]].tolist()
        raise ValueError(
            f"seeds contradict each other: rows {first} and {second} are dissimilar by one of them, but others link"
            " them as similar; take out one or the others"
        )
    order_M, start_G, size_G = _grouped(of_M)
    place_M = np.empty_like(order_M)
    place_M[order_M] = np.arange(len(order_M)) - np.repeat(start_G, size_G)
    return _Components(_Groups(row_M[order_M], start_G, size_G), of_M, place_M)


class _Excluded(NamedTuple):
    """Pairs that no constraint may hold, as low base + high; all their rows are below the base."""

    key_K: Rows
    base: int

    def are_in(self, index_TC: Rows) -> Flags:
        """Whether two points of a constraint are such a pair."""
        is_in_T = np.zeros(len(index_TC), dtype=np.bool_)
        for first, second in itertools.combinations(index_TC.T, 2):
            low_T, high_T = np.minimum(first, second), np.maximum(first, second)
            is_in_T |= (high_T < self.base) & np.isin(low_T * self.base + high_T, self.key_K)
        return is_in_T


def _excluded(exclude: ArrayLike | None) -> _Excluded | None:
    if exclude is None or np.size(exclude) == 0:
        return None
    pair_K2 = np.asarray(exclude)
    if pair_K2.ndim != 2 or pair_K2.shape[1] != 2 or pair_K2.dtype.kind not in "iu" or pair_K2.min() < 0:
        raise ValueError(
            f"exclude is {pair_K2.dtype} of shape {pair_K2.shape}; give pairs of row numbers from 0 as (K, 2)"
        )
    base = int(pair_K2.max()) + 1
    return _Excluded(np.sort(pair_K2.astype(np.int64), axis=1) @ np.array([base, 1]), base)


def _all_drawn(
    boxes: _Boxes, num: int, rng: np.random.Generator, excluded: _Excluded | None, what: str
) -> Rows:
    """Draw of labels' boxes. Raises ValueError if there are not ``num``."""
    if boxes.total < num:
        raise ValueError(f"these labels allow {boxes.total} {what}; {num} are asked for")
    index_TC = _drawn(_Choice(boxes, np.empty(0, np.int64)), num, rng, excluded)
    _check_left(len(index_TC), num, what)
    return index_TC


def _drawn(choice: _Choice, num: int, rng: np.random.Generator, excluded: _Excluded | None) -> Rows:
    """Draw ``num`` constraints, or as many as there are, uniformly without replacement.

    Raises ValueError if after many draws still too few are without an excluded pair.
    """
    boxes, taken_R = choice
    found_TC = boxes.at(np.empty(0, np.int64))
    num_drawn = 0
    while (missing := num - len(found_TC)) > 0 and (num_free := boxes.total - len(taken_R)) > 0:
        if num_drawn > max(TRIES, 100 * num):
            raise ValueError(
                f"of {num_drawn} constraints drawn {len(found_TC)} hold no pair of exclude; {num} are asked for: ask"
                " for fewer, or exclude fewer"
            )
        # As many as were drawn before: twice as many in all, so that scarce ones take few rounds.
        drawn_R = rng.choice(num_free, size=min(num_free, max(missing, num_drawn)), replace=False)
        drawn_R = drawn_R + np.searchsorted(taken_R - np.arange(len(taken_R)), drawn_R, side="right")
        index_TC = boxes.at(drawn_R)
        if excluded is not None:
            index_TC = index_TC[~excluded.are_in(index_TC)]
        found_TC = np.concatenate([found_TC, index_TC[:missing]])
        num_drawn += len(drawn_R)
        if len(found_TC) < num:
            taken_R = _distinct(np.concatenate([taken_R, drawn_R]))
    return found_TC


def _mixed(similar_TC: Rows, dissimilar_TC: Rows, rng: np.random.Generator) -> IndexedConstraints:
    """Pairs of both kinds in random order."""
    order_T = rng.permutation(len(similar_TC) + len(dissimilar_TC))
    return IndexedConstraints(np.concatenate([similar_TC, dissimilar_TC])[order_T], order_T < len(similar_TC))


def _row_numbers(path: Path, name: str, column: Sequence[Any], num_rows: int | None) -> Rows:
    """A column of row numbers. Raises ValueError for the first that is none."""
    limit = np.iinfo(np.int64).max if num_rows is None else num_rows
    rows = []
    for line, value in enumerate(column):
        row = _number(value)
        if row is None or not 0 <= row < limit:
            wanted = "a row number from 0" + ("" if num_rows is None else f" to {num_rows - 1}")
            raise ValueError(
                f"{_place(path, line)}: {name} is {_shown(value)}; give {wanted}, or leave the constraint out"
            )
        rows.append(row)
    return np.array(rows, dtype=np.int64)


def _number(value: object) -> int | None:
    """The whole number a value of a table is, else None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        number = float(value) if isinstance(value, (float, str)) else None
    except ValueError:
        return None
    return int(number) if number is not None and number.is_integer() else None


def _similar_flags(path: Path, column: Sequence[Any]) -> Flags:
    meanings = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
    flags = [meanings.get(str(value).strip().lower()) for value in column]
    if None in flags:
        line = flags.index(None)
        raise ValueError(
            f"{_place(path, line)}: similar is {_shown(column[line])}; give 1 or true for similar, 0 or false for not"
        )
    return np.array(flags, dtype=np.bool_)


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)


def _place(path: Path, row: int) -> str:
    """Where a row of a table is in its file: of CSV the line from 1, the header and empty ones counted."""
    if path.suffix.lower() == ".parquet":
        return f"{path}, row {row}"
    with path.open(encoding="utf-8", errors="replace") as lines:
        filled = (number for number, line in enumerate(lines, 1) if line.strip("\r\n"))
        return f"{path}, line {next(itertools.islice(filled, row + 1, None))}"
