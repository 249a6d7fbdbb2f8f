"""A gallery to search: an index of embeddings with what each of its items is called, in one folder.

``index.faiss``    the index, which faiss opens too; its numbers are rows of the other two
``vectors.npy``    the embeddings, in the items' order, read from disk as needed
``items.parquet``  id and label of each item; labels are texts, or null where none is known
``gallery.json``   what it is of, with the SHA-256 of the other files, written last
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dmlstudy import data, retrieval
from dmlstudy.files import put_in_place, sha256, written_whole
from dmlstudy.retrieval import CodeIndex, EmbeddingIndex, Index, Tuning
from dmlstudy.text import reason

FORMAT_VERSION = 2
UNSEALED = 1
"""The format of galleries whose files have no digests."""

INDEX, VECTORS, ITEMS, ABOUT = "index.faiss", "vectors.npy", "items.parquet", "gallery.json"
FILES = (INDEX, VECTORS, ITEMS)
"""The files that have a digest."""

IndexKind: TypeAlias = Literal["flat", "ivf", "ivf_pq", "hnsw"]


class About(BaseModel):
    """A gallery's description; fields added by later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format_version: int
    model: str
    source: str = ""
    items: Annotated[int, Field(ge=1)]
    dim: Annotated[int, Field(ge=1)]
    kind: str = ""
    curvature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    files: dict[str, str] = {}


@dataclass(frozen=True)
class Gallery:
    """An opened gallery; places are rows of ``vectors_MD``. ``source`` is what the embeddings were made of.

    ``note`` is what is to be said of it, if anything. With a ``curvature`` the vectors are points of that ball; they
    are searched by hyperbolic distance, exactly, and the index only numbers them.
    """

    index: Index
    vectors_MD: NDArray[Any]
    ids: Sequence[str]
    labels: Sequence[str] | None
    model: str
    source: str
    note: str = ""
    curvature: float | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_codes(self) -> bool:
        """True if the items are codes and distances are bits."""
        return self.vectors_MD.dtype == np.int8

    def search(self, query_QD: NDArray[Any], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Places (-1 beyond those found) and distances of the k nearest, nearest first.

        Raises ValueError for queries of another size, k below 1, and points outside a ball.
        """
        if query_QD.shape[1] != self.vectors_MD.shape[1]:
            raise ValueError(
                f"queries of size {query_QD.shape[1]}, the gallery's are of {self.vectors_MD.shape[1]}: use the model"
                " that it was made with, or make it anew"
            )
        if self.curvature is not None:
            return retrieval.retrieve(query_QD, self.vectors_MD, k, curvature=self.curvature)
        queries = retrieval.pack_codes(query_QD) if self.has_codes else query_QD
        return self.index.search(queries, k)


def build(
    embeddings: str | Path, folder: str | Path, kind: IndexKind = "flat", tuning: Tuning | None = None
) -> Gallery:
    """Make a gallery of a file of embeddings; ``folder`` is new, and there whole or not at all.

    Raises ValueError for a folder that is there already, a file that is none of embeddings or says of no model, an
    index that its vectors are too few for, 'ivf_pq' of codes, and another kind than 'flat' of points of a ball.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder}: exists already; name a new folder")
    if not folder.parent.is_dir():
        raise ValueError(f"{folder.parent}: no such folder; make it or name another place")
    ids, labels, z_MD = data.read_embeddings(embeddings)
    about = data.embeddings_origin(embeddings)
    if not about.get("model"):
        raise ValueError(f"{embeddings}: does not say which model made it; make it with `dmlstudy embed`")
    curvature = float(about["curvature"]) if "curvature" in about else None
    if curvature is not None and kind != "flat":
        raise ValueError(
            f"{kind} is by Euclidean distance, and {embeddings} holds points of a ball, which are searched one by one;"
            " choose flat"
        )
    index = _index(kind, z_MD, about["model"], tuning)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # what a killed call has left
    draft.mkdir()
    try:
        index.save(draft / INDEX)
        with written_whole(draft / VECTORS) as file:
            np.save(file, z_MD)
        data.write_items(draft / ITEMS, ids, labels)
        described = About(
            format_version=FORMAT_VERSION,
            model=about["model"],
            source=about.get("source", ""),
            items=len(ids),
            dim=z_MD.shape[1],
            kind=kind,
            curvature=curvature,
            files={name: sha256(draft / name) for name in FILES},
        )
        with written_whole(draft / ABOUT) as file:
            file.write(described.model_dump_json(indent=1).encode() + b"\n")
        _take_place(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return _read(folder, described, "cpu")


def _take_place(draft: Path, folder: Path) -> None:
    """Give a folder its name. Raises ValueError where another has taken it meanwhile."""
    try:
        put_in_place(draft, folder)
    except OSError:
        if not folder.exists():
            raise
        raise ValueError(f"{folder}: exists already; name a new folder") from None


def open_gallery(folder: str | Path, *, device: str = "auto") -> Gallery:
    """Open a gallery, each of its files checked by its digest; its index is put on ``device``, if it has a form there.

    A gallery of the format before has no digests, and says so in its note. Raises ValueError naming the file that is
    missing, altered, damaged or not understood.
    """
    folder = Path(folder)
    about = _about(folder / ABOUT)
    for name in FILES:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: no such file; make the gallery anew")
        if about.format_version != UNSEALED and sha256(folder / name) != about.files.get(name):
            raise ValueError(
                f"{folder / name}: altered since the gallery was made, by its SHA-256 in {ABOUT}; make the gallery anew"
            )
    return _read(folder, about, device)


def _read(folder: Path, about: About, device: str) -> Gallery:
    """The gallery in a folder whose files are those that it was made of. Raises ValueError as ``open_gallery``."""
    note = ""
    if about.format_version == UNSEALED:
        note = f"{folder}: made by an earlier version, without digests of its files; `dmlstudy index` makes it anew"
    try:
        vectors_MD = np.load(folder / VECTORS, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a header that was changed may be an error of Python's own parser
        raise ValueError(
            f"{folder / VECTORS}: cannot be read ({reason(error)}); make the gallery anew"
        ) from None
    try:
        ids, labels = data.read_items(folder / ITEMS)
    except KeyError as error:
        raise ValueError(f"{folder / ITEMS}: has no column {error}; make the gallery anew") from None
    except ValueError as error:
        raise ValueError(reason(error)) from None
    if vectors_MD.ndim != 2 or vectors_MD.dtype not in (np.int8, np.float32):
        raise ValueError(
            f"{folder / VECTORS}: {vectors_MD.dtype} of shape {vectors_MD.shape}, expected rows of float32, or of int8"
            " for codes; make the gallery anew"
        )
    if not len(ids) == len(vectors_MD) == about.items or vectors_MD.shape[1] != about.dim:
        raise ValueError(
            f"{folder}: {about.items} items of size {about.dim}, but {len(ids)} names and vectors of shape"
            f" {vectors_MD.shape}; make the gallery anew"
        )
    is_code = vectors_MD.dtype == np.int8
    kind = CodeIndex if is_code else EmbeddingIndex
    metric = "hamming" if is_code else "l2"
    place = re.sub("^(cuda|gpu)", "auto", device)  # what has no form on a GPU stays on the CPU
    index = kind.load(folder / INDEX, model_version=about.model, dim=about.dim, metric=metric, device=place)
    if not index.has_ids_below(about.items):
        raise ValueError(f"{folder / INDEX}: numbers items that are not there; make the gallery anew")
    return Gallery(index, vectors_MD, ids, labels, about.model, about.source, note, about.curvature)


def _about(path: Path) -> About:
    """A gallery's description. Raises ValueError for a file that is missing or not understood."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; is this a folder that `dmlstudy index` made?")
    try:
        content = json.loads(path.read_text())
        version = content["format_version"]
        if version in (UNSEALED, FORMAT_VERSION):
            return About.model_validate(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: not understood ({reason(error)}); make the gallery anew") from None
    raise ValueError(
        f"{path}: format {version!r}, this version reads {FORMAT_VERSION}; make the gallery anew"
    )


def _index(kind: IndexKind, z_MD: NDArray[Any], model: str, tuning: Tuning | None) -> Index:
    place_M = np.arange(len(z_MD))
    if z_MD.dtype == np.int8:
        if kind == "ivf_pq":
            raise ValueError("ivf_pq is for embeddings; choose flat, ivf or hnsw for codes")
        packed_MP = retrieval.pack_codes(z_MD)
        return (
            CodeIndex(kind, z_MD.shape[1], model_version=model, tuning=tuning)
            .train(packed_MP)
            .add(packed_MP, place_M)
        )
    index = EmbeddingIndex(kind, z_MD.shape[1], model_version=model, tuning=tuning, device="cpu")
    return index.train(z_MD).add(z_MD, place_M)
