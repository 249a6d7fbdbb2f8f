"""Old galleries taken into a new model's space by a map, without their pictures, in batches.

Shapes: B items of a batch, D size of the old model's embeddings, E of the new one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy import data
from dmlstudy.data import embedding_files
from dmlstudy.data.embedding_files import BATCH, ItemBatch
from dmlstudy.files import draft_folder
from dmlstudy.saved import Model
from dmlstudy.saved.space_map import SpaceMap
from dmlstudy.serving import gallery as galleries
from dmlstudy.serving.embed import EmbedResult
from dmlstudy.serving.gallery import IndexKind

Follow = Callable[[Iterable[NDArray[Any]], int], Iterable[NDArray[Any]]]
"""Passes batches of vectors on as they come, of so many, to show progress."""


class OldVectors(NamedTuple):
    """The vectors of an old gallery, or of a file of embeddings, with the items' names and the origin of both."""

    num_items: int
    dim: int
    items: Callable[[], Iterator[ItemBatch]]
    vectors: Callable[[], Iterator[NDArray[Any]]]
    origin: dict[str, str]
    left_out: list[tuple[str, str]]
    kind: IndexKind = "flat"
    """The kind of index that the gallery has."""


def old_vectors(path: str | Path) -> OldVectors:
    """The vectors in a gallery's folder, or in a file that ``dmlstudy embed`` wrote.

    Raises ValueError naming what is missing, altered or neither, and for vectors that are not whole: of those there is
    no map.
    """
    path = Path(path)
    if path.is_dir():
        return _of_gallery(path)
    head = embedding_files.read_head(path)
    origin = data.embeddings_origin(path)
    if not origin.get("model"):
        raise ValueError(f"{path}: does not say which model made it; make it with `dmlstudy embed`")
    if "bits" in origin or head.dtype != np.float32:
        raise ValueError(f"{path}: holds short vectors or codes; a map is of whole embeddings, embed anew")
    return OldVectors(
        head.num_items,
        head.dim,
        lambda: embedding_files.read_item_batches(path),
        lambda: embedding_files.read_vector_batches(path),
        origin,
        data.embeddings_left_out(path),
    )


def _of_gallery(folder: Path) -> OldVectors:
    opened, about = galleries.open_gallery(folder, device="cpu"), galleries.read_about(folder)
    is_whole = opened.short is None or (opened.short.beside is not None and opened.short.beside.is_whole)
    if opened.has_codes or not is_whole:
        raise ValueError(
            f"{folder}: holds short vectors or codes alone; a map is of whole embeddings, embed anew"
        )
    vectors_MD = opened.vectors_MD
    origin = {"model": opened.model, "source": opened.source}
    if opened.map is not None:
        origin |= {"map": opened.map.digest, "map_kind": opened.map.kind, "mapped_from": opened.map.made_by}
    if opened.curvature is not None:
        origin["curvature"] = repr(opened.curvature)
    return OldVectors(
        len(opened),
        vectors_MD.shape[1],
        lambda: embedding_files.read_item_batches(folder / galleries.ITEMS),
        lambda: (np.asarray(vectors_MD[at : at + BATCH]) for at in range(0, len(vectors_MD), BATCH)),
        origin,
        [],
        about.kind or "flat",  # type: ignore[arg-type]
    )


def map_into(
    model: Model,
    old: str | Path,
    output: str | Path,
    space_map: SpaceMap,
    follow: Follow = lambda each, _: each,
) -> EmbedResult:
    """Write the vectors of an old gallery, or of a file of embeddings, as they lie in the space of ``model``.

    An ``output`` called ``.parquet`` is a file of embeddings, any other a gallery's folder with an index of the old
    one's kind. Either is there whole or not at all, and names the map by its digest. Memory is that of a batch, with a
    gallery also of its index.

    Raises ValueError for an output that may not be written, a map to another model's space, vectors of another model
    than the map's, vectors that went through a map already, and as ``old_vectors``.
    """
    output = Path(output)
    is_file = output.suffix.lower() == ".parquet"
    if is_file:
        data.check_table_output(output, "a file of embeddings", data.EMBEDDING_COLUMNS, read=[old])
    else:
        galleries.check_new(output)
    if space_map.target != model.fingerprint:
        raise ValueError(
            f"the map leads to another model's space ({space_map.target[:12]}, this is {model.fingerprint[:12]}); name"
            " a map to this model's"
        )
    found = old_vectors(old)
    if found.origin["model"] != space_map.source:
        raise ValueError(
            f"{old}: made by another model ({found.origin['model'][:12]}) than the map is from"
            f" ({space_map.source[:12]}); name a map from that one"
        )
    if "map" in found.origin:
        raise ValueError(
            f"{old}: went through a map already, and errors would add up; map what it was made of"
        )
    if found.dim != space_map.described.source_dim:
        raise ValueError(
            f"{old}: vectors of size {found.dim}, the map takes {space_map.described.source_dim}"
        )
    origin = {
        "model": model.fingerprint,
        "source": found.origin.get("source", ""),
        "map": space_map.digest,
        "map_kind": space_map.described.kind,
        "mapped_from": space_map.source,
    }
    if model.uncut:
        origin["uncut"] = model.uncut
    num_batches = -(-found.num_items // BATCH)

    def write(path: Path) -> int:
        mapped = (space_map(z_BD) for z_BD in follow(found.vectors(), num_batches))
        return embedding_files.write_batches(path, found.items(), mapped, origin, found.left_out)

    dim = space_map.described.target_dim
    num_items = write(output) if is_file else _as_gallery(write, output, found.kind)
    return EmbedResult(num_items, dim, found.left_out, 32, 4 * dim, dim)


def _as_gallery(write: Callable[[Path], int], folder: Path, kind: IndexKind) -> int:
    """Make a gallery of the file that is written beside it for the time being."""
    with draft_folder(folder.with_name(f"{folder.name}.mapped")) as held:
        num_items = write(held / "mapped.parquet")
        galleries.build(held / "mapped.parquet", folder, kind)
    return num_items
