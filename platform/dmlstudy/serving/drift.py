"""The range that distances of queries to their nearest items should keep, and an exact test of whether they do.

The range is learned from n reference queries. Sorted, their distances are d_(1) <= ... <= d_(n); the range ends at
d_(j) with j = ceil(0.99 (n + 1)), at most n. Where m queries are drawn as the reference's were, the number Y of those
beyond it has, whatever the distribution of distances is,

    P(Y >= y) <= sum_{i=y}^{m} BetaBinomial(i; m, n + 1 - j, j)

with equality where no two distances are equal (exceedances: Gumbel, von Schelling 1950). That d_(j) is itself an
estimate is in it.

Window k is outside where this is at most 0.05 / (k (k + 1)): these sum up to 0.05, so the chance of a false alarm in
all windows ever is at most 5%, however they depend on each other.

Shapes: N reference queries, D embedding size, K items found, Q queries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from scipy.special import betaln

from dmlstudy.saved.items import of_files
from dmlstudy.serving.gallery import Gallery
from dmlstudy.serving.retrieve import own_items
from dmlstudy.serving.retriever import Retriever
from dmlstudy.text import counted

LEVELS = (0.1, 1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 99.9)
"""Percentages of the quantiles that are kept."""

RANGE = 0.99
"""The share of reference queries within the range."""

ALPHA = 0.05
"""The chance of a false alarm, in all windows ever."""

MOST_REFERENCES = 10_000
FEWEST_REFERENCES = 20
"""Fewer have no range: its end would be beyond next to nothing."""

MOST_MEASURED = 4_000_000_000
"""Distances that may be measured to learn a range; for galleries that are so large fewer items are asked, 1,000 at
least."""

MOST_OF_NEW_CLASSES = 2_000
"""Items that are asked as if their class were new."""

DEEPER = (2, 32, 512)
"""Items that are searched for one of another class, one number after the other."""

BATCH = 256


def _all_levels(found: dict[str, float]) -> dict[str, float]:
    if set(found) != {f"{level:g}" for level in LEVELS}:
        raise ValueError(f"has not the quantiles at {', '.join(f'{level:g}' for level in LEVELS)}%")
    return found


Distances: TypeAlias = NDArray[np.float64]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Quantiles: TypeAlias = Annotated[dict[str, Finite], AfterValidator(_all_levels)]


class NewClasses(BaseModel):
    """Nearest distances of queries of classes that the gallery lacks, and the share of them beyond the range.

    ``is_bound`` says that some are larger than told: all items that were looked at were of the query's own class.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    num: Annotated[int, Field(ge=1)]
    quantiles: Quantiles
    share_beyond: Annotated[float, Field(ge=0, le=1)]
    is_bound: bool = False


class DistanceRange(BaseModel):
    """The range of nearest distances, and what it was learned from: the gallery's own items, or queries."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    source: Literal["gallery", "queries"]
    num: Annotated[int, Field(ge=1)]
    quantiles: Quantiles
    upper: Finite
    new_classes: NewClasses | None = None

    @classmethod
    def of(
        cls, source: Literal["gallery", "queries"], distance_N: Distances, new_N: Distances, *, is_bound: bool
    ) -> DistanceRange:
        """The range of distances, and of those of new classes, of which there may be none."""
        upper = float(np.sort(distance_N)[_place(len(distance_N)) - 1])
        new = None
        if len(new_N):
            new = NewClasses(
                num=len(new_N),
                quantiles=quantiles(new_N),
                share_beyond=float((new_N > upper).mean()),
                is_bound=is_bound,
            )
        return cls(
            source=source,
            num=len(distance_N),
            quantiles=quantiles(distance_N),
            upper=upper,
            new_classes=new,
        )

    def chance(self, num_beyond: int, num: int) -> float:
        """The chance that so many, or more, of ``num`` queries lie beyond the range where they are as its own were.

        Two items of a gallery that are each other's nearest bring the same distance: the chance is the larger one of
        its items all counted, and half of them.
        """
        place = _place(self.num)
        shares = (1, 2) if self.source == "gallery" else (1,)
        return max(at_least(num_beyond, num, (self.num + 1 - place) / of, place / of) for of in shares)

    @property
    def lines(self) -> list[str]:
        """The range for people."""
        of = "items of the gallery to others" if self.source == "gallery" else "reference queries"
        low, high = self.quantiles["1"], self.upper
        told = [f"nearest distances of {self.num} {of}: {low:.4g} to {high:.4g} (1% to 99%)"]
        if self.new_classes is None:
            told.append("how far queries of new classes are is not known: there are no labels of such")
        else:
            new = self.new_classes
            told.append(
                f"of {counted(new.num, 'query', 'queries')} of new classes {'at least ' if new.is_bound else ''}"
                f"{new.share_beyond:.0%} are beyond it"
            )
        return told


def _place(num: int) -> int:
    """j: the rank, from 1, of the reference distance that ends the range."""
    return min(math.ceil(RANGE * (num + 1)), num)


def alpha_of(number: int) -> float:
    """The share of ``ALPHA`` that window ``number``, from 1, may spend: 0.05 / (k (k + 1))."""
    return ALPHA / (number * (number + 1))


def at_least(hits: int, num: int, a: float, b: float) -> float:
    """P(Y >= hits) of a beta-binomial Y of ``num`` trials: the sum of its masses, which keeps small ones exact."""
    i_H = np.arange(hits, num + 1, dtype=np.float64)
    log_H = (
        -math.log(num + 1) - betaln(num - i_H + 1, i_H + 1) + betaln(i_H + a, num - i_H + b) - betaln(a, b)
    )
    return min(1.0, float(np.exp(log_H).sum()))


def quantiles(distance_N: Distances) -> Quantiles:
    """The quantiles at ``LEVELS``, by the names of their percentages."""
    values = np.percentile(distance_N, LEVELS)
    return {f"{level:g}": float(value) for level, value in zip(LEVELS, values, strict=True)}


class _Nearest(NamedTuple):
    """Nearest distances of queries of classes in the gallery, and of those of classes that are not."""

    known_N: Distances
    new_N: Distances
    is_bound: bool = False


def learned(retriever: Retriever, reference: str | Path | None = None) -> DistanceRange:
    """The range of nearest distances in a gallery, as ``retriever`` searches it.

    Without a ``reference`` each item of a class with two items or more is asked, itself left out; and again with all
    of its class left out, as a new class would be.

    With one, anything that ``dmlstudy embed`` reads, its content is asked as queries are, each query's own item left
    out; those of classes that the gallery lacks are of new classes.

    Up to ``MOST_REFERENCES`` are asked, drawn by a fixed generator. Raises ValueError where the gallery's items cannot
    stand for queries, for too few of either, and as the reference's files do.
    """
    if reference is None:
        source: Literal["gallery", "queries"] = "gallery"
        found = _of_gallery(retriever)
    else:
        source, found = "queries", _of_queries(retriever, reference)
    known_N = found.known_N[np.isfinite(found.known_N)]
    if len(known_N) < FEWEST_REFERENCES:
        advice = (
            "give --watch-reference with queries of its classes"
            if reference is None
            else f"give {FEWEST_REFERENCES} at least"
        )
        where = (
            "the gallery's classes have"
            if reference is None
            else f"{reference}: of the gallery's classes has"
        )
        raise ValueError(
            f"--watch: {where} {counted(len(known_N), 'item', 'items')} with a neighbour, too few for a range; {advice}"
        )
    new_N = found.new_N[np.isfinite(found.new_N)]
    return DistanceRange.of(source, known_N, new_N, is_bound=found.is_bound)


def _of_gallery(retriever: Retriever) -> _Nearest:
    gallery = retriever.gallery
    _check_stands_for_queries(retriever)
    rows_N = _drawn(np.flatnonzero(_has_mates(gallery)), _most(len(gallery)))
    known_N, is_exact_N = _of_items(retriever, rows_N, [2], lambda own, place: place != own)
    known_N, labels = known_N[is_exact_N], gallery.labels
    if labels is None or len(set(labels)) < 2:
        return _Nearest(known_N, known_N[:0])
    new_N, is_exact_N = _of_items(
        retriever,
        _drawn(rows_N, MOST_OF_NEW_CLASSES),
        [min(k, len(gallery)) for k in DEEPER],
        lambda own, place: labels[place] != labels[own],
    )
    return _Nearest(known_N, new_N, not is_exact_N.all())


def _check_stands_for_queries(retriever: Retriever) -> None:
    """Raise ValueError where a gallery's items lie elsewhere than queries do."""
    advice = "give --watch-reference with queries as they should be"
    if retriever.space_map is not None or retriever.gallery.map is not None:
        raise ValueError(
            f"--watch: queries and items come to one space by a map, which puts them apart; {advice}"
        )
    if not retriever.model.is_symmetric:
        raise ValueError(f"--watch: the model embeds queries otherwise than items; {advice}")
    if retriever.gallery.as_queries(np.arange(1)) is None:
        raise ValueError(f"--watch: the gallery keeps no vectors beside its index; {advice}")


def _has_mates(gallery: Gallery) -> NDArray[np.bool_]:
    """True of each item whose class has another; of all where there are no labels."""
    if gallery.labels is None:
        return np.ones(len(gallery), np.bool_)
    count = Counter(gallery.labels)
    return np.fromiter((count[label] > 1 for label in gallery.labels), np.bool_, len(gallery))


def _most(num_items: int) -> int:
    return min(MOST_REFERENCES, max(1_000, MOST_MEASURED // max(num_items, 1)))


def _drawn(rows_N: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """So many of the rows, ascending; the same at each call."""
    if len(rows_N) <= most:
        return rows_N
    return np.sort(np.random.default_rng(0).choice(rows_N, most, replace=False))


def _of_items(
    retriever: Retriever,
    rows_N: NDArray[np.int64],
    depths: Sequence[int],
    is_other: Callable[[int, int], bool],
) -> tuple[Distances, NDArray[np.bool_]]:
    """Distances of items to the nearest that ``is_other``, and whether there was one so deep.

    Where there was none the distance is that of the last item found, a bound.
    """
    distance_N, is_exact_N = np.full(len(rows_N), np.inf), np.zeros(len(rows_N), np.bool_)
    for depth in depths:
        left = np.flatnonzero(~is_exact_N)
        for start in range(0, len(left), BATCH):
            part = left[start : start + BATCH]
            query_QD = retriever.gallery.as_queries(rows_N[part])
            assert query_QD is not None
            searched = retriever.gallery.search(query_QD, depth, among=retriever.among)
            for at, hits in zip(part.tolist(), _hits(*searched), strict=True):
                nearest = next((d for place, d in hits if is_other(int(rows_N[at]), place)), None)
                is_exact_N[at] = nearest is not None
                if nearest is not None:
                    distance_N[at] = nearest
                elif hits:
                    distance_N[at] = hits[-1][1]
    return distance_N, is_exact_N


def _hits(place_QK: NDArray[np.int64], distance_QK: NDArray[np.float32]) -> Iterator[list[tuple[int, float]]]:
    """Of each query the places that were found, and their distances, nearest first."""
    for place_K, distance_K in zip(place_QK.tolist(), distance_QK.tolist(), strict=True):
        yield [(place, distance) for place, distance in zip(place_K, distance_K, strict=True) if place >= 0]


def _of_queries(retriever: Retriever, reference: str | Path) -> _Nearest:
    gallery, inputs = retriever.gallery, of_files(retriever.model, reference)
    is_own = own_items(gallery, reference, inputs)
    drawn_N = _drawn(np.arange(len(inputs)), MOST_REFERENCES)
    distance_N = np.full(len(drawn_N), np.inf)
    for start in range(0, len(drawn_N), BATCH):
        rows_B = drawn_N[start : start + BATCH]
        runs = np.split(rows_B, np.flatnonzero(np.diff(rows_B) != 1) + 1)
        items_N = np.concatenate([inputs.read(range(int(run[0]), int(run[-1]) + 1)) for run in runs])
        searched = retriever.search(retriever.model.query(items_N)[0], 2)
        for at, (row, hits) in enumerate(zip(rows_B.tolist(), _hits(*searched), strict=True), start):
            distance_N[at] = next((d for place, d in hits if not is_own(row, place)), np.inf)
    if inputs.labels is None or gallery.labels is None:
        return _Nearest(distance_N, distance_N[:0])
    known, labels = set(gallery.labels), inputs.labels
    is_known_N = np.fromiter((str(labels[row]) in known for row in drawn_N.tolist()), np.bool_, len(drawn_N))
    return _Nearest(distance_N[is_known_N], distance_N[~is_known_N])
