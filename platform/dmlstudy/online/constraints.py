"""Sources of a stream of constraints: labels, transitive closure, one pass over labels, an iterator.

Constraints name rows of a feature matrix until their vectors are needed. A triplet is (anchor, positive, negative),
a pair (first, second) with a flag whether the two are similar; a pair is the same either way round. A labelled point is
one row with its class.

All draws are without replacement and the same for the same generator. Shapes: T constraints, C points of a
constraint (3, 2 or 1), B constraints of a block, N rows, D features, K excluded pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmlstudy.online.enumeration import (
    Boxes,
    ClosedConstraints,
    Excluded,
    Rows,
    classes,
    closures,
    dissimilar_boxes,
    drawn,
    pairs_to_avoid,
    similar_boxes,
    triplet_boxes,
)
from dmlstudy.online.learner import Constraints, Flags, Labels

Single: TypeAlias = tuple[ArrayLike, ArrayLike, ArrayLike]
"""One constraint of an iterator: (x_D, positive_D, negative_D), or (x_D, other_D, whether they are similar)."""


class IndexedConstraints(NamedTuple):
    """A stream of constraints as rows of a feature matrix, in the order they arrive."""

    index_TC: Rows
    is_similar_T: Flags | None = None
    label_T: Labels | None = None

    def part(self, here: slice) -> IndexedConstraints:
        """Those at these places of the stream."""
        return IndexedConstraints(
            self.index_TC[here],
            None if self.is_similar_T is None else self.is_similar_T[here],
            None if self.label_T is None else self.label_T[here],
        )

    def blocks(self, x_ND: NDArray[Any], size: int) -> Iterator[Constraints]:
        """The constraints' vectors in float64, ``size`` constraints at a time, the last block maybe fewer.

        Raises ValueError, at once, for no constraints, rows that ``x_ND`` does not have, or a size below 1.
        """
        _check_size(size)
        index_TC = self.index_TC
        if len(index_TC) == 0:
            raise ValueError("no constraints: the stream is empty")
        is_bad_T = ((index_TC < 0) | (index_TC >= len(x_ND))).any(axis=1)
        if is_bad_T.any():
            number = int(np.argmax(is_bad_T))
            raise ValueError(
                f"constraint {number} names the rows {index_TC[number].tolist()}; x has the rows 0 to"
                f" {len(x_ND) - 1}"
            )
        parts = (self.part(slice(start, start + size)) for start in range(0, len(index_TC), size))
        return (
            Constraints(np.asarray(x_ND[part.index_TC], dtype=np.float64), part.is_similar_T, part.label_T)
            for part in parts
        )


def labelled_points(labels_N: ArrayLike, num: int, rng: np.random.Generator) -> IndexedConstraints:
    """``num`` different rows in random order, each with its class; all rows where there are fewer.

    Raises ValueError for ``num`` below 1 and for labels that are not one whole number for each row.
    """
    _check_num(num)
    labels_N = np.asarray(labels_N)
    if labels_N.ndim != 1 or not len(labels_N) or labels_N.dtype.kind not in "iu":
        raise ValueError(
            f"labels are {labels_N.dtype} of shape {labels_N.shape}; give one whole number for each of the rows"
        )
    row_T = rng.permutation(len(labels_N))[:num]
    return IndexedConstraints(row_T[:, None], label_T=labels_N[row_T].astype(np.int64))


def sample_triplets(
    labels_N: ArrayLike, num: int, rng: np.random.Generator, exclude: ArrayLike | None = None
) -> IndexedConstraints:
    """``num`` different triplets, uniformly of all that labels allow: sum_c n_c (n_c - 1) (N - n_c) of them.

    So a class counts by its number of pairs, not of rows (our reading of "randomly sample"; OAHU, section 4.3.2).
    With ``exclude`` (K, 2) no triplet holds two rows that are one of these pairs. Class names do not matter.
    Raises ValueError for ``num`` below 1 or more than there are, and if too few are left by ``exclude``.
    """
    _check_num(num)
    groups = classes(labels_N)
    if len(groups.size_G) < 2:
        raise ValueError("all labels are of one class; triplets need a second one for their negatives")
    if groups.size_G.max() < 2:
        raise ValueError("no class has two rows; triplets need an anchor and a positive of one class")
    end_G = groups.start_G + groups.size_G
    boxes = triplet_boxes(groups, np.arange(len(end_G)), end_G, end_G[-1] - groups.size_G)
    return IndexedConstraints(_all_drawn(boxes, num, rng, pairs_to_avoid(exclude), "triplets"))


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
    groups = classes(labels_N)
    num_similar = round(num * similar_share)
    if num_similar > 0 and groups.size_G.max() < 2:
        raise ValueError("no class has two rows, so no pair is similar; similar_share=0 asks for none")
    if num_similar < num and len(groups.size_G) < 2:
        raise ValueError(
            "all labels are of one class, so no pair is dissimilar; similar_share=1 asks for none"
        )
    end_G = groups.start_G + groups.size_G
    excluded = pairs_to_avoid(exclude)
    similar = _all_drawn(similar_boxes(groups), num_similar, rng, excluded, "similar pairs")
    boxes = dissimilar_boxes(groups, np.arange(len(end_G)), end_G, end_G[-1] - end_G)
    return _mixed(similar, _all_drawn(boxes, num - num_similar, rng, excluded, "dissimilar pairs"), rng)


def close(
    seeds: IndexedConstraints,
    num: int,
    rng: np.random.Generator,
    exclude: ArrayLike | None = None,
    similar_share: float = 0.5,
) -> IndexedConstraints:
    """``num`` different constraints that the seeds imply and that are no seeds (OAHU, section 3.1, footnote 1).

    Similar to similar is similar, similar to dissimilar is dissimilar: rows linked by similar pairs are a
    component, and a dissimilar pair marks its two components as dissimilar.

    Implied are the triplets (a, p, n) with a, p != a in one component and n in one marked against it; the pairs
    within a component as similar, those across marked ones as dissimilar. Triplets are drawn uniformly.

    Of the pairs round(num similar_share) are similar, uniformly of either kind and in random order; where a kind has
    too few, the other makes up for it: for few seeds on many rows hardly a similar pair is implied, for many seeds
    hardly anything else than dissimilar ones (our choice). The implied are never listed, only counted.

    ``exclude`` as in ``sample_triplets``. Raises ValueError for ``num`` below 1, more than are implied, seeds that
    contradict each other, and if too few are left by ``exclude``.
    """
    _check_num(num)
    _check_share(similar_share)
    choices, excluded = closures(seeds.index_TC, seeds.is_similar_T), pairs_to_avoid(exclude)
    free = sum(each.num_free for each in choices)
    if free < num:
        raise ValueError(
            f"{len(seeds.index_TC)} seeds imply {free} further constraints; num={num} are asked for: ask for fewer,"
            " or give more seeds or such of fewer rows"
        )
    found = [drawn(choices[0], num if len(choices) == 1 else round(num * similar_share), rng, excluded)]
    if len(choices) == 2:
        found.append(drawn(choices[1], num - len(found[0]), rng, excluded))
        if len(found[0]) + len(found[1]) < num:
            found[0] = drawn(choices[0], num - len(found[1]), rng, excluded)
    _check_left(sum(len(each) for each in found), num, "implied constraints")
    return IndexedConstraints(found[0]) if len(found) == 1 else _mixed(found[0], found[1], rng)


def count_implied(seeds: IndexedConstraints) -> int:
    """Number of constraints that ``close`` chooses from: the implied ones less the seeds. Raises as ``close``."""
    return sum(each.num_free for each in closures(seeds.index_TC, seeds.is_similar_T))


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
    Seeds are drawn by ``sample_triplets`` or ``sample_pairs``, the implied ones by ``close``; with
    ``num_implied=0`` there are only seeds.

    A constraint that holds a pair of ``exclude`` (K, 2), either way round and between any two of its points, is
    discarded and drawn anew.

    Few pairs on many rows imply few others: 5,000 on 35,000 rows of ten classes some 1,300, so that the defaults are
    an error for pairs there, and num_seeds=7500, num_implied=2500 is not.

    Raises ValueError as the three functions do, and for excluded rows that labels do not have.
    """
    excluded, num_rows = pairs_to_avoid(exclude), np.size(labels_N)
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
    """OPML's triplets (anchor, positive, negative) of rows, one for a row at most, as labels come.

    Of each class its newest row is kept. A row of a class seen before, when there are two classes at least, is an
    anchor.

    If the row before it has its class, that row is the positive, and the negative is the newest row of the
    class that was seen first most recently, or of the one seen first before that if this is the anchor's own.

    Else the row before is the negative, and the positive is the newest row of the anchor's class.

    Memory O(classes). Raises ValueError at the end if there was no triplet.
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


def _all_drawn(
    boxes: Boxes, num: int, rng: np.random.Generator, excluded: Excluded | None, what: str
) -> Rows:
    """Draw of labels' boxes. Raises ValueError if there are not ``num``."""
    if boxes.total < num:
        raise ValueError(f"these labels allow {boxes.total} {what}; {num} are asked for")
    index_TC = drawn(ClosedConstraints(boxes, np.empty(0, np.int64)), num, rng, excluded)
    _check_left(len(index_TC), num, what)
    return index_TC


def _mixed(similar_TC: Rows, dissimilar_TC: Rows, rng: np.random.Generator) -> IndexedConstraints:
    """Pairs of both kinds in random order."""
    order_T = rng.permutation(len(similar_TC) + len(dissimilar_TC))
    return IndexedConstraints(np.concatenate([similar_TC, dissimilar_TC])[order_T], order_T < len(similar_TC))
