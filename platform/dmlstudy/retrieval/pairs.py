"""All pairs of a test set by tiles: their scores, which of them are genuine, and exact order statistics of both kinds.

A pair's score is the cosine of its embeddings, computed in float64 and rounded to float32. So pairs that are equally
near have equal scores: products in float32 differ in their last bits with their place in a tile.

A pair is genuine if both items are of one class, an impostor else. Pairs are unordered; an item is no pair with itself.
With queries and a gallery each query makes a pair with each gallery item, once where both are on both sides.

No pair is stored. Order statistics come from the scores' bits, made to sort as the scores do: one sweep counts the
upper 16 bits, a second the lower 16 of those wanted. Every sweep computes the same tiles, so a pair has one score.

Shapes: N items, D embedding size, C classes ascending, B rows and M columns of one tile, T thresholds ascending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dmlstudy.retrieval.neighbours import Floats, Ints, checked
from dmlstudy.retrieval.threads import as_many_as_torch_has

Flags: TypeAlias = NDArray[np.bool_]
R = TypeVar("R")

_TILE = 1024  # rows and columns: 4 MiB of scores
_HALF = 1 << 16  # values of either half of a score's bits
_SIGN = np.uint32(0x80000000)


class PairTile(NamedTuple):
    """The scores of some rows with some columns.

    ``genuine_BM`` and ``impostor_BM`` are None where there is no such pair, or where all are.
    """

    score_BM: Floats
    class_B: Ints
    class_M: Ints
    genuine_BM: Flags | None
    """None: there is none."""
    impostor_BM: Flags | None
    """None: all are."""

    def genuine(self) -> Floats:
        """The scores of genuine pairs."""
        return self.score_BM[:0].ravel() if self.genuine_BM is None else self.score_BM[self.genuine_BM]

    def impostors(self) -> Floats:
        """The scores of impostors."""
        return self.score_BM.ravel() if self.impostor_BM is None else self.score_BM[self.impostor_BM]


class Pairs:
    """The pairs of a set with itself, or of its places ``query`` and ``gallery``; one of the two alone stands for all.

    Raises ValueError for embeddings that are not finite, other than one label an item, and a side without items.
    """

    def __init__(
        self, z_ND: Floats, labels_N: Ints, query: Ints | None = None, gallery: Ints | None = None
    ) -> None:
        z_ND = checked("gallery", z_ND)
        if labels_N.shape != (len(z_ND),):
            raise ValueError(f"{len(z_ND)} embeddings, labels of shape {labels_N.shape}: needs one for each")
        everything = np.arange(len(z_ND))
        rows, columns = (everything if side is None else np.asarray(side) for side in (query, gallery))
        if not len(rows) or not len(columns):
            raise ValueError(
                f"{len(rows)} queries and {len(columns)} gallery items: needs at least 1 of each"
            )
        self._z_ND = z_ND
        self.unit_C, self._class_N = np.unique(labels_N, return_inverse=True)
        """The classes' labels, ascending."""
        # In the order of their classes a tile has few of them, and genuine pairs are in few tiles.
        self._rows, self._columns = (
            side[np.argsort(self._class_N[side], kind="stable")] for side in (rows, columns)
        )
        self._is_one_set = np.array_equal(self._rows, self._columns)
        on_both_N = np.zeros(len(z_ND), bool)
        on_both_N[rows] = True
        self._on_both_N = np.zeros(len(z_ND), bool)
        self._on_both_N[columns] = on_both_N[columns]
        q_C, g_C, both_C = (
            np.bincount(self._class_N[side], minlength=len(self.unit_C))
            for side in (rows, columns, np.flatnonzero(self._on_both_N))
        )
        self.genuine_C: Ints = q_C * g_C - both_C - both_C * (both_C - 1) // 2
        """Genuine pairs of each class."""
        self.impostors_C: Ints = (
            q_C * (g_C.sum() - g_C) + g_C * (q_C.sum() - q_C) - both_C * (both_C.sum() - both_C)
        )
        """Impostors with an item of each class."""

    @property
    def num_genuine(self) -> int:
        return int(self.genuine_C.sum())

    @property
    def num_impostors(self) -> int:
        return int(self.impostors_C.sum()) // 2

    def sweep(self, found_in: Callable[[PairTile], R]) -> Iterator[R]:
        """A function of each tile, in the tiles' order; computed by as many threads as torch has."""

        def of_place(place: tuple[int, int]) -> R:
            return found_in(self._tile(*place))

        with as_many_as_torch_has() as threads:
            yield from threads.map(of_place, self._places())

    def _places(self) -> Iterator[tuple[int, int]]:
        for row in range(0, len(self._rows), _TILE):
            for column in range(row if self._is_one_set else 0, len(self._columns), _TILE):
                yield row, column

    def _tile(self, row: int, column: int) -> PairTile:
        row_B, column_M = self._rows[row : row + _TILE], self._columns[column : column + _TILE]
        score_BM = _products(self._z_ND[row_B], self._z_ND[column_M])
        class_B, class_M = self._class_N[row_B], self._class_N[column_M]
        left_out_BM = self._left_out(row, column, row_B, column_M)
        if class_B[0] > class_M[-1] or class_M[0] > class_B[-1]:
            return PairTile(score_BM, class_B, class_M, None, None if left_out_BM is None else ~left_out_BM)
        genuine_BM = class_B[:, None] == class_M
        impostor_BM = ~genuine_BM
        if left_out_BM is not None:
            genuine_BM &= ~left_out_BM
            impostor_BM &= ~left_out_BM
        return PairTile(score_BM, class_B, class_M, genuine_BM, impostor_BM)

    def _left_out(self, row: int, column: int, row_B: Ints, column_M: Ints) -> Flags | None:
        """Items with themselves, and pairs that stand here a second time; None: there are none."""
        if self._is_one_set:
            return None if row != column else np.tri(len(row_B), len(column_M), dtype=bool)
        both_B, both_M = self._on_both_N[row_B], self._on_both_N[column_M]
        if not both_B.any() or not both_M.any():
            return None
        return both_B[:, None] & both_M & (row_B[:, None] >= column_M)


class Cut(NamedTuple):
    """A threshold with the numbers of pairs that it lets through: those with a score of at least ``theta``."""

    theta: float
    num_impostors: int
    num_genuine: int


class OrderStatistics:
    """Thresholds of ``pairs`` for wanted rates of accepted impostors, and where both errors are equal, in two sweeps.

    With k = floor(rate N-) the threshold lies just above the (k + 1)-th largest impostor, so at most k are accepted.
    """

    def __init__(self, pairs: Pairs, rates: Sequence[float], *, with_equal_errors: bool = False) -> None:
        self._pairs = pairs
        self._upper = _Counts(1)
        for genuine, impostors in pairs.sweep(
            lambda tile: (_upper(tile.genuine()), _upper(tile.impostors()))
        ):
            self._upper.genuine_WH[0] += genuine
            self._upper.impostors_WH[0] += impostors
        above_H = _from_here_on(self._upper.impostors_WH[0])  # impostors in this bin and those above
        allowed = {rate: int(Fraction(repr(rate)) * pairs.num_impostors) for rate in rates}
        bin_of = {rate: int(np.flatnonzero(above_H > num)[-1]) for rate, num in allowed.items()}
        at_balance = self._bins_at_balance() if with_equal_errors else []
        self._wanted = np.unique([*bin_of.values(), *at_balance]).astype(np.int64)
        self._lower = self._count_lower()
        self.cuts = {rate: self._cut(bin_of[rate], num) for rate, num in allowed.items()}
        """By rate."""
        self.equal_errors = self._equal_errors(at_balance) if with_equal_errors else None
        """(FMR + FNMR) / 2 at the observed score where the two differ least; of several the smallest."""

    def curve(self) -> tuple[NDArray[np.float64], Ints, Ints]:
        """Thresholds ascending, impostors and genuine pairs accepted at each: one for each upper half that occurs."""
        genuine_H, impostors_H = self._upper.genuine_WH[0], self._upper.impostors_WH[0]
        there = np.flatnonzero(genuine_H + impostors_H)
        theta = _floats(there.astype(np.uint32) << np.uint32(16)).astype(np.float64)
        return theta, _from_here_on(impostors_H)[there], _from_here_on(genuine_H)[there]

    def _bins_at_balance(self) -> list[int]:
        """The last bin at whose least score FMR >= FNMR, and the next one that is not empty."""
        there, apart = self._apart(self._upper.genuine_WH[0], self._upper.impostors_WH[0], 0, 0)
        last = int(np.flatnonzero(apart >= 0)[-1])
        return [int(each) for each in there[last : last + 2]]

    def _apart(
        self, genuine_H: Ints, impostors_H: Ints, num_above: int, genuine_above: int
    ) -> tuple[Ints, Ints]:
        """Bins that are not empty, and (FMR - FNMR) N+ N- at the least score of each."""
        pairs = self._pairs
        there = np.flatnonzero(genuine_H + impostors_H)
        accepted = _from_here_on(impostors_H)[there] + num_above
        rejected = pairs.num_genuine - _from_here_on(genuine_H)[there] - genuine_above
        return there, accepted * pairs.num_genuine - rejected * pairs.num_impostors

    def _count_lower(self) -> _Counts:
        """The lower halves of scores in the wanted bins."""
        counts = _Counts(len(self._wanted))
        place_H = np.full(_HALF, -1, np.int64)
        place_H[self._wanted] = np.arange(len(self._wanted)) * _HALF

        is_wanted_H = place_H >= 0

        def found_in(tile: PairTile) -> tuple[Ints, Ints]:
            genuine, impostors = tile.genuine(), tile.impostors()
            return _wanted(genuine, place_H, is_wanted_H), _wanted(impostors, place_H, is_wanted_H)

        for genuine, impostors in self._pairs.sweep(found_in):
            np.add.at(counts.genuine_WH.reshape(-1), genuine, 1)
            np.add.at(counts.impostors_WH.reshape(-1), impostors, 1)
        return counts

    def _above(self, place: int) -> tuple[int, int]:
        """Impostors and genuine pairs in bins above this one."""
        return int(self._upper.impostors_WH[0, place + 1 :].sum()), int(
            self._upper.genuine_WH[0, place + 1 :].sum()
        )

    def _of_bin(self, place: int) -> tuple[Ints, Ints]:
        """Genuine pairs and impostors in a wanted bin by their lower half."""
        row = int(np.searchsorted(self._wanted, place))
        return self._lower.genuine_WH[row], self._lower.impostors_WH[row]

    def _cut(self, place: int, num_allowed: int) -> Cut:
        above, genuine_above = self._above(place)
        genuine_H, impostors_H = self._of_bin(place)
        lower = int(np.flatnonzero(_from_here_on(impostors_H) + above > num_allowed)[-1])
        score = _floats(np.array([(place << 16) | lower], np.uint32))
        return Cut(
            float(np.nextafter(score, np.float32(np.inf))[0]),
            above + int(impostors_H[lower + 1 :].sum()),
            genuine_above + int(genuine_H[lower + 1 :].sum()),
        )

    def _equal_errors(self, bins: Sequence[int]) -> float:
        pairs = self._pairs
        best = (float("inf"), float("inf"))
        for place in bins:
            above, genuine_above = self._above(place)
            genuine_H, impostors_H = self._of_bin(place)
            there, apart = self._apart(genuine_H, impostors_H, above, genuine_above)
            accepted = (_from_here_on(impostors_H)[there] + above) / pairs.num_impostors
            rejected = (
                pairs.num_genuine - _from_here_on(genuine_H)[there] - genuine_above
            ) / pairs.num_genuine
            best = min(best, *zip(np.abs(apart).tolist(), ((accepted + rejected) / 2).tolist(), strict=True))
        return best[1]


class ClassCounts(NamedTuple):
    """Pairs of each class that thresholds accept or reject."""

    accepted_TC: Ints
    """Impostors with an item of the class, at or above the threshold."""
    rejected_TC: Ints
    """Genuine pairs of the class below it."""
    class_pairs_T: Ints
    """Different pairs of classes among accepted impostors; counting stops at ``most_class_pairs``."""


def count_by_class(
    pairs: Pairs, theta_T: Sequence[float] | NDArray[np.float64], most_class_pairs: int = 0
) -> ClassCounts:
    """The pairs that thresholds, ascending, accept and reject, by class, in one sweep; memory O(C T)."""
    least_T = _least_scores(theta_T)
    assert (np.diff(least_T) >= 0).all()
    num_classes, width = len(pairs.unit_C), len(least_T) + 1
    genuine_CW = np.zeros((num_classes, width), np.int64)
    impostors_CW = np.zeros((num_classes, width), np.int64)
    seen: list[set[int]] = [set() for _ in least_T]

    def found_in(tile: PairTile) -> tuple[PairTile, Ints, Ints, Ints | None, Ints]:
        # Only impostors above the lowest threshold, few, are looked at one by one.
        accepted_BM = tile.score_BM >= least_T[0]
        if tile.impostor_BM is not None:
            accepted_BM &= tile.impostor_BM
        accepted = np.flatnonzero(accepted_BM)
        row, column = np.divmod(accepted, len(tile.class_M))
        above_I = np.searchsorted(least_T, tile.score_BM.reshape(-1)[accepted], "right")
        of_rows = tile.class_B[row] * width + above_I
        of_columns = tile.class_M[column] * width + above_I
        of_genuine = None
        if tile.genuine_BM is not None:
            row_G = np.flatnonzero(tile.genuine_BM) // len(tile.class_M)
            above_G = np.searchsorted(least_T, tile.genuine(), "right")
            of_genuine = tile.class_B[row_G] * width + above_G
        return tile, of_rows, of_columns, of_genuine, above_I

    for tile, of_rows, of_columns, of_genuine, above_I in pairs.sweep(found_in):
        _add(impostors_CW, of_rows, tile.class_B)
        _add(impostors_CW, of_columns, tile.class_M)
        if of_genuine is not None:
            _add(genuine_CW, of_genuine, tile.class_B)
        for place, own in enumerate(seen):
            if len(own) < most_class_pairs:
                accepted = above_I > place
                first, second = of_rows[accepted] // width, of_columns[accepted] // width
                both = np.unique(np.minimum(first, second) * num_classes + np.maximum(first, second))
                own.update(both[:most_class_pairs].tolist())
    accepted_CW = _from_here_on(impostors_CW)[:, 1:]
    not_rejected_CW = _from_here_on(genuine_CW)[:, 1:]
    return ClassCounts(
        np.ascontiguousarray(accepted_CW.T),
        np.ascontiguousarray((pairs.genuine_C[:, None] - not_rejected_CW).T),
        np.array([min(len(own), most_class_pairs) for own in seen], np.int64),
    )


class _Counts:
    """Genuine pairs and impostors by half of their bits, for each of W bins."""

    def __init__(self, num_bins: int) -> None:
        self.genuine_WH = np.zeros((num_bins, _HALF), np.int64)
        self.impostors_WH = np.zeros((num_bins, _HALF), np.int64)


def _products(z_BD: Floats, z_MD: Floats) -> Floats:
    """The cosines as float32: of pairs that are equally near, the same number in whatever tile and place."""
    score_BM = z_BD.astype(np.float64) @ z_MD.astype(np.float64).T
    rounded_BM = score_BM.astype(np.float32)
    rounded_BM += 0.0  # of two zeros there is one
    return rounded_BM


def _from_here_on(count_H: Ints) -> Ints:
    """The sum of each entry and all after it, along the last axis."""
    return np.cumsum(count_H[..., ::-1], axis=-1)[..., ::-1]


def _bits(score: Floats) -> NDArray[np.uint32]:
    """The scores' bits, made to sort as the scores do."""
    bits = score.view(np.uint32)
    flipped = (score.view(np.int32) >> 31).view(np.uint32)  # all bits of a negative number, none of another
    flipped |= _SIGN
    flipped ^= bits
    return flipped


def _floats(bits: NDArray[np.uint32]) -> Floats:
    """The inverse of ``_bits``."""
    return np.where(bits & _SIGN, bits ^ _SIGN, ~bits).view(np.float32)


def _upper(score: Floats) -> Ints:
    return np.bincount(_bits(score) >> np.uint32(16), minlength=_HALF)


def _wanted(score: Floats, place_H: Ints, is_wanted_H: Flags) -> Ints:
    """Of each score in a wanted bin, the bin's place and the lower half, as one number."""
    bits = _bits(score)
    bits = bits[np.flatnonzero(is_wanted_H[bits >> np.uint32(16)])]
    return np.asarray(place_H[bits >> np.uint32(16)] + (bits & np.uint32(0xFFFF)))


def _least_scores(theta_T: Sequence[float] | NDArray[np.float64]) -> Floats:
    """The least float32 that reaches each threshold."""
    exact_T = np.asarray(theta_T, np.float64)
    rounded_T = exact_T.astype(np.float32)
    return np.where(rounded_T < exact_T, np.nextafter(rounded_T, np.float32(np.inf)), rounded_T)


def _add(count_CW: Ints, cell: Ints, class_B: Ints) -> None:
    """Count cells, numbered class by class; ``class_B``, ascending, are the only ones they may be of."""
    width = count_CW.shape[1]
    first, after = int(class_B[0]), int(class_B[-1]) + 1
    counted = np.bincount(cell - first * width, minlength=(after - first) * width)
    count_CW[first:after] += counted.reshape(after - first, width)
