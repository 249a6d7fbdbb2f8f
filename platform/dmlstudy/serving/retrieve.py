"""Answer query files from a gallery: a table of the nearest items, and a contact sheet of their pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from dmlstudy.data import Inputs
from dmlstudy.data.inputs import ARRAYS, TABLES
from dmlstudy.records import Record
from dmlstudy.saved.items import of_files
from dmlstudy.serving.contact_sheet import Shown, write_sheet
from dmlstudy.serving.gallery import Gallery
from dmlstudy.serving.retriever import Found, Retriever
from dmlstudy.text import counted

BATCH = 256


class Hit(Record):
    """An item found for a query; ``rank`` from 1, ``place`` in the gallery.

    ``distance`` is as the index measures it; ``score`` is larger for what is nearer (``search.Measure``). ``label`` is
    None where none is known, ``accept`` where there is no threshold.
    """

    query: str
    rank: int
    place: int
    id: str
    label: str | None
    distance: float
    score: float
    accept: bool | None = None

    def as_json(self) -> str:
        """The hit for programs, in a line; without a threshold it is neither accepted nor rejected."""
        return self.model_dump_json(exclude={"accept"} if self.accept is None else None)


def retrieve(
    retriever: Retriever, queries: Inputs, k: int, *, is_own: Callable[[int, int], bool] | None = None
) -> list[list[Hit]]:
    """The k best items of each query, without those that ``is_own`` (of the query's number and the item's place).

    Raises ValueError as the retriever and the queries' files do.
    """
    parts = [range(start, min(start + BATCH, len(queries))) for start in range(0, len(queries), BATCH)]
    more = 0 if is_own is None else 1
    found = [each for part in parts for each in retriever(queries.read(part), k + more)]
    if is_own is not None:
        found = [_others(each, functools.partial(is_own, query), k) for query, each in enumerate(found)]
    return [_hits(retriever, name, each) for name, each in zip(queries.ids, found, strict=True)]


def _others(found: Found, is_own: Callable[[int], bool], k: int) -> Found:
    kept = [number for number, place in enumerate(found.place_K.tolist()) if not is_own(place)][:k]
    return found._replace(place_K=found.place_K[kept], distance_K=found.distance_K[kept])


def own_items(gallery: Gallery, source: str | Path, queries: Inputs) -> Callable[[int, int], bool]:
    """True if an item is the query itself: the same file or, from one source that is no folder, the same id."""
    root, own_root = _folder(Path(gallery.source)), _folder(Path(source))
    if root is None or own_root is None:
        is_same_source = Path(gallery.source).absolute() == Path(source).absolute()
        return lambda query, place: is_same_source and gallery.ids[place] == queries.ids[query]
    return lambda query, place: root / gallery.ids[place] == own_root / queries.ids[query]


def _folder(source: Path) -> Path | None:
    """The folder of the files that ids name; None if the source is one file with many items."""
    if source.is_dir():
        return source.resolve()
    return None if source.suffix.lower() in (*ARRAYS, *TABLES) else source.resolve().parent


def write_contact_sheet(
    path: str | Path, retriever: Retriever, queries: Inputs, hits: Sequence[Sequence[Hit]]
) -> None:
    """Write the hits of each query as pictures, seen as the model sees them.

    A hit is marked right or wrong where labels of both are known. Raises ValueError for a model of vectors, and where
    what the gallery was made of is not there any more.
    """
    if retriever.model.takes.image_size is None:
        raise ValueError("the model takes vectors, of which there are no pictures; leave --sheet out")
    gallery = retriever.gallery
    items = of_files(retriever.model, gallery.source)
    row_of = _rows(items.ids, gallery.ids)
    if row_of is None:
        raise ValueError(
            f"{gallery.source}: holds other items than the gallery was made of; make the gallery anew"
        )
    rows = []
    for number, (name, own) in enumerate(zip(queries.ids, hits, strict=True)):
        label = None if queries.labels is None else queries.labels[number]
        shown = [
            Shown(
                items.read(range(row_of[hit.place], row_of[hit.place] + 1))[0],
                f"{hit.rank}. {hit.id} ({hit.distance:.3f})",
                None if label is None or hit.label is None else hit.label == label,
            )
            for hit in own
        ]
        rows.append((Shown(queries.read(range(number, number + 1))[0], name), shown))
    write_sheet(path, f"Nearest items of {counted(len(queries), 'query', 'queries')}", rows)


def _rows(there: Sequence[str], gallery: Sequence[str]) -> Sequence[int] | None:
    """The rows of a gallery's items among those found, some of which may have been left out; None if any is missing."""
    if list(there) == list(gallery):
        return range(len(gallery))
    row_of = {name: row for row, name in enumerate(there)}
    if len(row_of) < len(there) or not row_of.keys() >= set(gallery):
        return None
    return [row_of[name] for name in gallery]


def _hits(retriever: Retriever, query: str, found: Found) -> list[Hit]:
    gallery = retriever.gallery
    score_K = retriever.measure.score_of(found.distance_K)
    accept_K = [None] * len(score_K) if retriever.acceptance is None else retriever.acceptance.each(score_K)
    ranked = zip(found.place_K.tolist(), found.distance_K.tolist(), score_K.tolist(), accept_K, strict=True)
    return [
        Hit(
            query=query,
            rank=rank,
            place=place,
            id=gallery.ids[place],
            label=None if gallery.labels is None else gallery.labels[place],
            distance=distance,
            score=score,
            accept=accept,
        )
        for rank, (place, distance, score, accept) in enumerate(ranked, 1)
    ]
