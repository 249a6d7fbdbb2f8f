"""A gallery to search: an index of embeddings with what each of its items is called, in one folder.

``index.faiss``    the index, with the model's fingerprint inside
``vectors.npy``    the embeddings themselves, in the items' order, read from disk as far as they are needed
``items.parquet``  id and label of each item
``gallery.json``   what it is of, written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dmlstudy import data, retrieval
from dmlstudy.retrieval import CodeIndex, EmbeddingIndex, Index, Tuning

FORMAT_VERSION = 1
INDEX, VECTORS, ITEMS, ABOUT = "index.faiss", "vectors.npy", "items.parquet", "gallery.json"

Kind: TypeAlias = Literal["flat", "ivf", "ivf_pq", "hnsw"]


@dataclass(frozen=True)
class Gallery:
    """An opened gallery; places are rows of ``vectors_MD``. ``source`` is what the embeddings were made of."""

    index: Index
    vectors_MD: NDArray[Any]
    ids: Sequence[str]
    labels: Sequence[str] | None
    model: str
    source: str

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_codes(self) -> bool:
        """Whether the items are codes, and distances bits."""
        return self.vectors_MD.dtype == np.int8

    def search(self, query_QD: NDArray[Any], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Places (-1 beyond those found) and distances of the k nearest, nearest first.

        Raises ValueError for queries of another size, and k below 1.
        """
        if query_QD.shape[1] != self.vectors_MD.shape[1]:
            raise ValueError(
                f"queries of size {query_QD.shape[1]}, the gallery's are of {self.vectors_MD.shape[1]}: use the model"
                " that it was made with, or make it anew"
            )
        queries = retrieval.pack_codes(query_QD) if self.has_codes else query_QD
        return self.index.search(queries, k)


def build(
    embeddings: str | Path, folder: str | Path, kind: Kind = "flat", tuning: Tuning | None = None
) -> Gallery:
    """Make a gallery of a file of embeddings; ``folder`` is new, and there whole or not at all.

    Raises ValueError for a folder that is there already, a file that is none of embeddings or says of no model, an
    index that its vectors are too few for, and 'ivf_pq' of codes.
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
    index = _index(kind, z_MD, about["model"], tuning)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        index.save(draft / INDEX)
        np.save(draft / VECTORS, z_MD)
        data.write_items(draft / ITEMS, ids, labels)
        described = {
            "format_version": FORMAT_VERSION,
            **about,
            "items": len(ids),
            "dim": z_MD.shape[1],
            "kind": kind,
        }
        (draft / ABOUT).write_text(json.dumps(described, indent=1) + "\n")
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return open_gallery(folder)


def open_gallery(folder: str | Path) -> Gallery:
    """Open a gallery. Raises ValueError naming the file that is missing, damaged or not understood."""
    folder = Path(folder)
    path = folder / ABOUT
    if not path.is_file():
        raise ValueError(f"{path}: no such file; is this a folder that `dmlstudy index` made?")
    try:
        about = json.loads(path.read_text())
        version, model, dim = about["format_version"], about["model"], about["dim"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not understood ({error}); make the gallery anew") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format {version}, this version reads {FORMAT_VERSION}; make the gallery anew"
        )
    try:
        vectors_MD = np.load(folder / VECTORS, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / VECTORS}: cannot be read ({error}); make the gallery anew") from None
    ids, labels = data.read_items(folder / ITEMS)
    if not len(ids) == len(vectors_MD) == about["items"] or vectors_MD.shape[1] != dim:
        raise ValueError(
            f"{folder}: {about['items']} items of size {dim}, but {len(ids)} names and vectors of shape"
            f" {vectors_MD.shape}; make the gallery anew"
        )
    kind = CodeIndex if vectors_MD.dtype == np.int8 else EmbeddingIndex
    metric = "hamming" if vectors_MD.dtype == np.int8 else "l2"
    try:
        index = kind.load(folder / INDEX, model_version=model, dim=dim, metric=metric)
    except FileNotFoundError:
        raise ValueError(f"{folder / INDEX}: no such file; make the gallery anew") from None
    return Gallery(index, vectors_MD, ids, labels, model, about.get("source", ""))


def _index(kind: Kind, z_MD: NDArray[Any], model: str, tuning: Tuning | None) -> Index:
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
    index = EmbeddingIndex(kind, z_MD.shape[1], model_version=model, tuning=tuning)
    return index.train(z_MD).add(z_MD, place_M)
