"""Constraints that are counted, numbered and drawn without ever being listed: of labels, and of a transitive closure.

Shapes: T constraints, C points of a constraint, N rows, M rows sorted by their G groups (classes, or components of
similar rows), E boxes of constraints, R ranks of constraints, K excluded pairs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dmlstudy.online.learner import Flags

Rows: TypeAlias = NDArray[np.int64]

LIMIT = 2**62
"""The bound below which a number of constraints surely fits an int64."""

TRIES = 2**22
"""Draws after which a search for constraints without excluded pairs ends, or 100 times those asked for if more."""


class Groups(NamedTuple):
    """Rows sorted by group: those of group g are row_M[start_G[g] : start_G[g] + size_G[g]]."""

    row_M: Rows
    start_G: Rows
    size_G: Rows


def grouped(group_M: Rows) -> Groups:
    size_G = np.bincount(group_M)
    return Groups(np.argsort(group_M, kind="stable"), np.cumsum(size_G) - size_G, size_G)


def classes(labels_N: ArrayLike) -> Groups:
    """Rows by class; classes in the order they first come up, so that their names do not matter."""
    labels_N = np.asarray(labels_N)
    if labels_N.ndim != 1 or len(labels_N) == 0:
        raise ValueError(f"labels have the shape {labels_N.shape}, expected one label for each of the rows")
    _, first_G, class_N = np.unique(labels_N, return_index=True, return_inverse=True)
    return grouped(np.argsort(np.argsort(first_G))[class_N])


@dataclass(frozen=True, eq=False)
class Boxes:
    """Constraints that are numbered, and found by their number, without a list of them.

    Box e holds what is made of the rows of one group and, if ``has_far``, one more row of those from row_M[far_E[e]]
    on, around the end. Its near parts, a row or with ``has_two`` two different ones, number width_E[e], the far rows
    height_E[e]; rank = far width + near after all boxes before.

    Two rows a, b of a group of s have the number near = ((b - a - 1) mod s) s + a: the first s (s - 1) / 2 are each
    unordered pair once, all s (s - 1) the ordered.
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


def triplet_boxes(groups: Groups, group_E: Rows, far_E: Rows, height_E: Rows) -> Boxes:
    size_E = groups.size_G[group_E]
    return Boxes(
        groups.row_M,
        groups.start_G[group_E],
        size_E,
        far_E,
        size_E * (size_E - 1),
        height_E,
        has_two=True,
        has_far=True,
    )


def similar_boxes(groups: Groups) -> Boxes:
    size_G = groups.size_G
    width_G, one_G = size_G * (size_G - 1) // 2, np.ones_like(size_G)
    return Boxes(
        groups.row_M, groups.start_G, size_G, groups.start_G, width_G, one_G, has_two=True, has_far=False
    )


def dissimilar_boxes(groups: Groups, group_E: Rows, far_E: Rows, height_E: Rows) -> Boxes:
    size_E = groups.size_G[group_E]
    start_E = groups.start_G[group_E]
    return Boxes(groups.row_M, start_E, size_E, far_E, size_E, height_E, has_two=False, has_far=True)


class ClosedConstraints(NamedTuple):
    """The constraints of some boxes but for those of the ranks taken, which are sorted and each there once."""

    boxes: Boxes
    taken_R: Rows

    @property
    def num_free(self) -> int:
        return self.boxes.total - len(self.taken_R)


def closures(index_TC: Rows, is_similar_T: Flags | None) -> list[ClosedConstraints]:
    """Constraints that the seeds imply, less the seeds: the triplets, or the similar and the dissimilar pairs."""
    index_TC = np.asarray(index_TC)
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


def _closed_triplets(index_TC: Rows) -> ClosedConstraints:
    row_M, point_TC = _points(index_TC)
    components = _components(row_M, point_TC[:, :2], point_TC[:, ::2])
    groups = components.groups
    near_T, far_T = components.of_M[point_TC[:, 0]], components.of_M[point_TC[:, 2]]
    num = len(groups.size_G)
    key_E = _distinct(np.concatenate([near_T * num + far_T, far_T * num + near_T]))
    group_E, other_E = divmod(key_E, num)
    boxes = triplet_boxes(groups, group_E, groups.start_G[other_E], groups.size_G[other_E])
    a_T, b_T, far_place_T = components.place_M[point_TC].T
    near_number_T = _ordered(a_T, b_T, groups.size_G[near_T])
    is_one_T = a_T != b_T  # a triplet that repeats its anchor is not among the implied
    box_T = np.searchsorted(key_E, near_T * num + far_T)
    return ClosedConstraints(
        boxes, boxes.ranks(box_T[is_one_T], near_number_T[is_one_T], far_place_T[is_one_T])
    )


def _closed_pairs(index_TC: Rows, is_similar_T: Flags) -> list[ClosedConstraints]:
    row_M, point_TC = _points(index_TC)
    components = _components(row_M, point_TC[is_similar_T], point_TC[~is_similar_T])
    groups = components.groups
    similar = similar_boxes(groups)
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
    dissimilar = dissimilar_boxes(groups, group_E, groups.start_G[other_E], groups.size_G[other_E])
    a_T, b_T = components.place_M[pair_TC].T
    return [
        ClosedConstraints(similar, taken_R),
        ClosedConstraints(dissimilar, dissimilar.ranks(np.searchsorted(key_E, key_T), a_T, b_T)),
    ]


def _distinct(values: Rows) -> Rows:
    """The different values, sorted: np.unique, which in NumPy 2.4 takes a hundred times as long for a million."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), dtype=np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]


def _ordered(a_R: Rows, b_R: Rows, size_R: Rows) -> Rows:
    """The number of an ordered pair of places in a group, as in ``Boxes``."""
    return (b_R - a_R - 1) % size_R * size_R + a_R


class _Components(NamedTuple):
    """Components of points that similar pairs link, and of each point its component and its place in there."""

    groups: Groups
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
    order_M, start_G, size_G = grouped(of_M)
    place_M = np.empty_like(order_M)
    place_M[order_M] = np.arange(len(order_M)) - np.repeat(start_G, size_G)
    return _Components(Groups(row_M[order_M], start_G, size_G), of_M, place_M)


class Excluded(NamedTuple):
    """Pairs that no constraint may hold, as low base + high; all their rows are below the base."""

    key_K: Rows
    base: int

    def are_in(self, index_TC: Rows) -> Flags:
        """True if two points of a constraint are such a pair."""
        is_in_T = np.zeros(len(index_TC), dtype=np.bool_)
        for first, second in itertools.combinations(index_TC.T, 2):
            low_T, high_T = np.minimum(first, second), np.maximum(first, second)
            is_in_T |= (high_T < self.base) & np.isin(low_T * self.base + high_T, self.key_K)
        return is_in_T


def pairs_to_avoid(exclude: ArrayLike | None) -> Excluded | None:
    if exclude is None or np.size(exclude) == 0:
        return None
    pair_K2 = np.asarray(exclude)
    if pair_K2.ndim != 2 or pair_K2.shape[1] != 2 or pair_K2.dtype.kind not in "iu" or pair_K2.min() < 0:
        raise ValueError(
            f"exclude is {pair_K2.dtype} of shape {pair_K2.shape}; give pairs of row numbers from 0 as (K, 2)"
        )
    base = int(pair_K2.max()) + 1
    return Excluded(np.sort(pair_K2.astype(np.int64), axis=1) @ np.array([base, 1]), base)


def drawn(choice: ClosedConstraints, num: int, rng: np.random.Generator, excluded: Excluded | None) -> Rows:
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
