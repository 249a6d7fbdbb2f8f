"""A gallery to search: an index of embeddings with what each of its items is called, in one folder.

``index.faiss``    the index, which faiss opens too; its numbers are rows of the others
``vectors.npy``    the embeddings, in the items' order, read from disk as needed
``items.parquet``  id and label of each item; labels are texts, or null where none is known
``gallery.json``   what it is of, with the SHA-256 of the other files, written last

A gallery of short vectors (``short_search``) is searched by these: ``index.faiss`` holds them, or of 8 bits
``short.npy``, and ``vectors.npy`` is what puts in order what they find, if it is there.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dmlstudy import data, retrieval
from dmlstudy.data import embedding_files
from dmlstudy.files import draft_folder, put_in_place, sha256, written_whole
from dmlstudy.metric_names import ShortForm
from dmlstudy.retrieval import CodeIndex, EmbeddingIndex, Index, Tuning, short_forms
from dmlstudy.serving import short_search
from dmlstudy.serving.short_search import Beside, FormRecord, Short, ShortSearch
from dmlstudy.text import reason

FORMAT_VERSION = 3
PLAIN = 2
"""The format of galleries of whole vectors as a model made them, which versions before short vectors read too."""
UNSEALED = 1
"""The format of galleries whose files have no digests."""

INDEX, VECTORS, ITEMS, ABOUT = "index.faiss", "vectors.npy", "items.parquet", "gallery.json"
SHORT = "short.npy"
FILES = (INDEX, VECTORS, ITEMS)
"""The files of a gallery of whole vectors that have a digest."""

IndexKind: TypeAlias = Literal["flat", "ivf", "ivf_pq", "hnsw"]


class MapRecord(BaseModel):
    """The map by which a gallery's vectors came into its model's space, and the model that had made them."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    digest: str
    kind: str = ""
    made_by: str


class About(BaseModel):
    """A gallery's description; fields added by later versions are ignored.

    ``model`` is the fingerprint of the model in whose space the vectors are, ``dim`` their numbers. Of short vectors
    ``whole`` is the size of that model's embeddings, and ``beside`` the form of the vectors in ``vectors.npy``.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format_version: int
    model: str
    source: str = ""
    items: Annotated[int, Field(ge=1)]
    dim: Annotated[int, Field(ge=1)]
    kind: str = ""
    curvature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    files: dict[str, str] = {}
    bytes_per_vector: int | None = None
    short: FormRecord | None = None
    whole: Annotated[int, Field(ge=1)] | None = None
    beside: FormRecord | None = None
    map: MapRecord | None = None

    @property
    def form(self) -> Short:
        """The form that the gallery is searched by."""
        if self.short is None:
            return Short(ShortForm(None, 32), self.dim)
        return Short(self.short.form, self.whole or self.dim)

    @property
    def needed(self) -> tuple[str, ...]:
        """The files that must be there, each with a digest."""
        if self.short is None:
            return FILES
        search = SHORT if self.short.bits == 8 else INDEX
        return (search, ITEMS) if self.beside is None else (search, VECTORS, ITEMS)


@dataclass(frozen=True)
class Gallery:
    """An opened gallery; places are rows of ``vectors_MD``. ``source`` is what the embeddings were made of.

    ``note`` is what is to be said of it, if anything. With a ``curvature`` the vectors are points of that ball; they
    are searched by hyperbolic distance, exactly, and the index only numbers them.

    Of ``short`` vectors ``vectors_MD`` are those kept beside, of no columns where there are none; ``index`` is None of
    8 bits. ``map`` tells the map that vectors went through.
    """

    index: Index | None
    vectors_MD: NDArray[Any]
    ids: Sequence[str]
    labels: Sequence[str] | None
    model: str
    source: str
    note: str = ""
    curvature: float | None = None
    short: ShortSearch | None = None
    map: MapRecord | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_codes(self) -> bool:
        """True if the items are codes and distances are bits."""
        return self.short is None and self.vectors_MD.dtype == np.int8

    @property
    def dim(self) -> int:
        """Numbers of a vector that is searched by."""
        return self.vectors_MD.shape[1] if self.short is None else self.short.short.size

    @property
    def is_exact(self) -> bool:
        """True if distances are those of embeddings as the model makes them."""
        own = None if self.short is None else self.short.beside
        return self.map is None and (self.short is None or (own is not None and own.is_whole))

    @property
    def facts(self) -> dict[str, Any]:
        """The gallery for programs: its items, the form that it is searched by, and bytes of a vector."""
        found: dict[str, Any] = {"items": len(self), "dim": self.dim, "model": self.model}
        if self.short is None:
            num_bits = 1 if self.has_codes else 32
            found |= {"bits": num_bits, "bytes_per_vector": -(-self.dim * num_bits // 8)}
        else:
            beside = self.short.beside
            found |= {
                "bits": self.short.short.form.bits,
                "whole": self.short.short.whole,
                "bytes_per_vector": self.short.short.num_bytes,
                "beside": None if beside is None else str(beside),
                "bytes_beside": 0 if beside is None else beside.num_bytes,
            }
        return {**found, "map": None if self.map is None else self.map.model_dump()}

    @property
    def line(self) -> str:
        """The same for people."""
        facts = self.facts
        said = f"{len(self)} items, {self.dim} x {facts['bits']} bit: {facts['bytes_per_vector']} bytes for each vector"
        if self.short is not None:
            beside = self.short.beside
            said += (
                f" (whole: {4 * self.short.short.whole}), ranked by these alone"
                if beside is None
                else f", ranked again by {beside} beside, {beside.num_bytes} bytes on disk"
            )
        if self.map is not None:
            said += f"; mapped ({self.map.kind}, map {self.map.digest[:12]}) from {self.map.made_by[:12]}"
        return said

    def as_queries(self, place_N: NDArray[np.int64]) -> NDArray[Any] | None:
        """Items as queries that ``search`` takes, (N, D); None where the vectors are in an index alone.

        Of short vectors the numbers that were left out are zeros: no search looks at them.
        """
        if self.short is None:
            return np.asarray(self.vectors_MD[place_N])
        return self.short.as_queries(place_N)

    def search(
        self, query_QD: NDArray[Any], k: int, *, among: int = 100
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Places (-1 beyond those found) and distances of the k nearest, nearest first.

        Of short vectors ``among`` are found by these, where others beside put them in order.

        Raises ValueError for queries of another size, k below 1, and points outside a ball.
        """
        if self.short is not None:
            return self.short.search(query_QD, k, min(among, len(self)))
        if query_QD.shape[1] != self.vectors_MD.shape[1]:
            raise ValueError(
                f"queries of size {query_QD.shape[1]}, the gallery's are of {self.vectors_MD.shape[1]}: use the model"
                " that it was made with, or make it anew"
            )
        if self.curvature is not None:
            return retrieval.retrieve(query_QD, self.vectors_MD, k, curvature=self.curvature)
        assert self.index is not None
        queries = retrieval.pack_codes(query_QD) if self.has_codes else query_QD
        return self.index.search(queries, k)


def build(
    embeddings: str | Path,
    folder: str | Path,
    kind: IndexKind = "flat",
    tuning: Tuning | None = None,
    *,
    size: int | None = None,
    bits: int | None = None,
    beside: Beside | None = None,
) -> Gallery:
    """Make a gallery of a file of embeddings; ``folder`` is new, and there whole or not at all.

    ``size`` and ``bits`` make a gallery of short vectors, by default as the file has them. ``beside``, by default
    'float', are the file's vectors, which put in order what these find: as they are, of 8 bits, or none. Memory is that
    of the index: vectors pass through it in batches.

    Raises ValueError for a folder that is there already, a file that is none of embeddings or says of no model, an
    index that its vectors are too few for, 'ivf_pq' of codes, another kind than 'flat' of points of a ball and of 8
    bits, and a form that the file's vectors have not.
    """
    folder = Path(folder)
    check_new(folder)
    head = embedding_files.read_head(embeddings)
    origin = data.embeddings_origin(embeddings)
    if not origin.get("model"):
        raise ValueError(f"{embeddings}: does not say which model made it; make it with `dmlstudy embed`")
    if head.num_items == 0:
        raise ValueError(f"{embeddings}: holds no items")
    curvature = float(origin["curvature"]) if "curvature" in origin else None
    if curvature is not None and kind != "flat":
        raise ValueError(
            f"{kind} is by Euclidean distance, and {embeddings} holds points of a ball, which are searched one by one;"
            " choose flat"
        )
    plan = _Plan.of(embeddings, head, origin, size, bits, beside, kind)
    with draft_folder(folder) as draft:
        described = _write(draft, embeddings, head, plan, kind, tuning, origin)
        with written_whole(draft / ABOUT) as file:
            file.write(described.model_dump_json(indent=1).encode() + b"\n")
        _take_place(draft, folder)
    return _read(folder, described, "cpu")


def check_new(folder: Path) -> None:
    """Raise ValueError where a gallery's folder cannot be made."""
    if folder.exists():
        raise ValueError(f"{folder}: exists already; name a new folder")
    if not folder.parent.is_dir():
        raise ValueError(f"{folder.parent}: no such folder; make it or name another place")


@dataclass(frozen=True)
class _Plan:
    """The forms of a gallery: the file's own, the one that is searched by, and that of the vectors beside."""

    own: Short
    form: Short
    beside: Short | None
    is_plain: bool

    @classmethod
    def of(
        cls,
        embeddings: str | Path,
        head: embedding_files.EmbeddingsHead,
        origin: dict[str, str],
        size: int | None,
        bits: int | None,
        beside: Beside | None,
        kind: IndexKind,
    ) -> _Plan:
        """Raises ValueError for a form that the file's vectors have not, and for what does not go together."""
        try:
            own = Short.of_origin(origin, head.dim)
        except ValueError as error:
            raise ValueError(f"{embeddings}: {error}") from None
        form = own
        if size is not None or bits is not None:
            uncut = origin.get("uncut", "")
            if "curvature" in origin:
                uncut = "embeddings are points of a ball"
            elif own.is_whole and head.dtype == np.int8:
                uncut = "embeddings are codes"
            form = _further(embeddings, own, size, bits, uncut)
        if form.is_whole:
            if beside not in (None, "none"):
                raise ValueError(
                    f"--beside {beside}: nothing is kept beside whole vectors; give --size or --bits"
                )
            return cls(own, form, None, "map" not in origin)
        if form.form.bits == 8 and kind != "flat":
            raise ValueError(
                f"--kind {kind}: vectors of 8 bits are searched one by one; choose flat, or --bits 1"
            )
        kept = {
            "float": ShortForm(own.form.size, own.form.bits),
            "int8": ShortForm(own.form.size, 8),
            "none": None,
        }[beside or "float"]
        if own.form.bits != 32 and beside not in (None, "none"):
            raise ValueError(f"--beside {beside}: {embeddings} holds {own}, and nothing larger; leave it out")
        is_larger = kept is not None and kept != form.form and own.form.bits == 32
        return cls(own, form, Short(kept, own.whole) if kept is not None and is_larger else None, False)

    def local(self, form: Short) -> Short:
        """A form as one of the file's vectors."""
        size = None if form.size == self.own.size else form.size
        return Short(ShortForm(size, form.form.bits), self.own.size)


def _further(embeddings: str | Path, own: Short, size: int | None, bits: int | None, uncut: str) -> Short:
    """The form that is asked for of vectors which have a form of their own."""
    if own.form.bits != 32:
        asked = (own.size if size is None else size, own.form.bits if bits is None else bits)
        if asked != (own.size, own.form.bits):
            raise ValueError(
                f"{embeddings}: holds {own}, of which no other form can be made; embed anew, or leave --size and --bits"
                " out"
            )
        return own
    found = short_search.wanted(size or own.size, bits or 32, own.whole, uncut)
    if found.size > own.size:
        raise ValueError(f"--size {size}: {embeddings} holds {own}; give a size up to {own.size}")
    return found


def _write(
    draft: Path,
    embeddings: str | Path,
    head: embedding_files.EmbeddingsHead,
    plan: _Plan,
    kind: IndexKind,
    tuning: Tuning | None,
    origin: dict[str, str],
) -> About:
    """Write the files of a gallery but its description, which is given back; vectors go through in batches."""
    model, form = origin["model"], plan.form
    whole = draft / (VECTORS if form.is_whole or plan.beside == plan.own else f"all-{VECTORS}")
    embedding_files.write_item_batches(draft / ITEMS, embedding_files.read_item_batches(embeddings))
    vectors = embedding_files.read_vector_batches(embeddings)
    _write_rows(whole, (head.num_items, head.dim), head.dtype, vectors)
    z_MD = np.load(whole, mmap_mode="r")
    if form.is_whole:
        _index(kind, z_MD, model, tuning).save(draft / INDEX)
    elif form.form.bits == 8:
        kept = (
            iter([z_MD])
            if plan.own.form.bits == 8
            else short_search.tiles(z_MD, plan.local(form), embeddings)
        )
        _write_rows(draft / SHORT, (head.num_items, form.size), np.dtype(np.int8), kept)
    else:
        _short_index(z_MD, plan, kind, model, tuning, embeddings).save(draft / INDEX)
    if plan.beside not in (None, plan.own):
        beside = plan.local(plan.beside)
        dtype = np.dtype(np.int8 if beside.form.bits == 8 else np.float32)
        vectors = embedding_files.read_vector_batches(embeddings)
        shortened = (short_forms.kept(z_ND, *beside.form) for z_ND in vectors)
        _write_rows(draft / VECTORS, (head.num_items, beside.size), dtype, shortened)
    del z_MD
    if whole.name != VECTORS:
        whole.unlink()
    described = About(
        format_version=PLAIN if plan.is_plain else FORMAT_VERSION,
        model=model,
        source=origin.get("source", ""),
        items=head.num_items,
        dim=form.size if not form.is_whole else head.dim,
        kind=kind,
        curvature=float(origin["curvature"]) if "curvature" in origin else None,
        bytes_per_vector=-(-head.dim // 8) if form.is_whole and head.dtype == np.int8 else form.num_bytes,
        short=None if form.is_whole else FormRecord(size=form.form.size, bits=form.form.bits),
        whole=None if form.is_whole else form.whole,
        beside=None
        if plan.beside is None
        else FormRecord(size=plan.beside.form.size, bits=plan.beside.form.bits),
        map=_map_of(origin),
    )
    return described.model_copy(update={"files": {name: sha256(draft / name) for name in described.needed}})


def _map_of(origin: dict[str, str]) -> MapRecord | None:
    if "map" not in origin:
        return None
    return MapRecord(
        digest=origin["map"], kind=origin.get("map_kind", ""), made_by=origin.get("mapped_from", "")
    )


def _write_rows(
    path: Path, shape: tuple[int, int], dtype: np.dtype[Any], parts: Iterable[NDArray[Any]]
) -> None:
    """Write rows, a part at a time, as NumPy's own file, which is mapped into memory later."""
    head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with written_whole(path) as file:
        np.lib.format.write_array_header_1_0(file, head)
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype).tobytes())


def _short_index(
    z_MD: NDArray[Any], plan: _Plan, kind: IndexKind, model: str, tuning: Tuning | None, source: str | Path
) -> Index:
    """An index of vectors in the form that they are searched by, of 32 bits or 1."""
    local = plan.local(plan.form)
    tuning = short_search.tuning_for(len(z_MD), tuning)
    sampled = (
        np.asarray(z_MD[short_search.sample_rows(len(z_MD), tuning)]) if kind.startswith("ivf") else z_MD[:1]
    )
    if plan.own == plan.form:  # as the file has them
        starts = range(0, len(z_MD), short_search.TILE)
        kept = (np.asarray(z_MD[start : start + short_search.TILE]) for start in starts)
        return short_search.index_of(kept, sampled, plan.form, kind, model, tuning)
    sample = short_forms.kept(sampled, *local.form)
    return short_search.index_of(
        short_search.tiles(z_MD, local, source), sample, plan.form, kind, model, tuning
    )


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
    for name in about.needed:
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
        ids, labels = data.read_items(folder / ITEMS)
    except KeyError as error:
        raise ValueError(f"{folder / ITEMS}: has no column {error}; make the gallery anew") from None
    except ValueError as error:
        raise ValueError(reason(error)) from None
    if about.short is not None and len(ids) != about.items:
        raise ValueError(
            f"{folder}: {about.items} items of size {about.dim}, but {len(ids)} names; make the gallery anew"
        )
    opened = Gallery(
        None, np.empty((about.items, 0), np.float32), ids, labels, about.model, about.source, note, about.curvature,
        map=about.map,
    )  # fmt: skip
    place = re.sub("^(cuda|gpu)", "auto", device)  # what has no form on a GPU stays on the CPU
    if about.short is not None:
        return _read_short(folder, about, opened, place)
    vectors_MD = _mapped_rows(folder / VECTORS)
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
    index = _load_index(folder, about, "hamming" if is_code else "l2", place)
    return dataclasses.replace(opened, index=index, vectors_MD=vectors_MD)


def _read_short(folder: Path, about: About, opened: Gallery, place: str) -> Gallery:
    """The gallery of short vectors in a folder."""
    form = about.form
    if form.size != about.dim:
        raise ValueError(
            f"{folder / ABOUT}: {about.dim} numbers, but of the form {form}; make the gallery anew"
        )
    index: Index | None = None
    if form.form.bits == 8:
        q_ME = _mapped_rows(folder / SHORT)
        short_search.check_engine(q_ME, about.items, form, folder / SHORT)
        engine: Any = (q_ME, short_forms.squared_norms(q_ME))
    else:
        engine = index = _load_index(folder, about, "hamming" if form.form.bits == 1 else "l2", place)
    if about.beside is None:
        return dataclasses.replace(opened, index=index, short=ShortSearch(form, engine))
    beside = Short(about.beside.form, form.whole)
    vectors_MS = _mapped_rows(folder / VECTORS)
    expected = np.int8 if beside.form.bits == 8 else np.float32
    if vectors_MS.shape != (about.items, beside.size) or vectors_MS.dtype != expected:
        raise ValueError(
            f"{folder / VECTORS}: {vectors_MS.dtype} of shape {vectors_MS.shape}, expected {about.items} of {beside};"
            " make the gallery anew"
        )
    search = ShortSearch(form, engine, beside, vectors_MS)
    return dataclasses.replace(opened, index=index, vectors_MD=vectors_MS, short=search)


def _load_index(folder: Path, about: About, metric: str, place: str) -> Index:
    """The index of a gallery. Raises ValueError for one of another gallery."""
    kind: type[Index] = CodeIndex if metric == "hamming" else EmbeddingIndex
    index = kind.load(folder / INDEX, model_version=about.model, dim=about.dim, metric=metric, device=place)
    if not index.has_ids_below(about.items) or len(index) != about.items:
        raise ValueError(f"{folder / INDEX}: numbers items that are not there; make the gallery anew")
    return index


def _mapped_rows(path: Path) -> NDArray[Any]:
    """The array in NumPy's own file, mapped into memory. Raises ValueError for a file that is none."""
    try:
        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a header that was changed may be an error of Python's own parser
        raise ValueError(f"{path}: cannot be read ({reason(error)}); make the gallery anew") from None
    return found


def read_about(folder: str | Path) -> About:
    """A gallery's description, whose files are not verified. Raises ValueError as ``open_gallery``."""
    return _about(Path(folder) / ABOUT)


def _about(path: Path) -> About:
    """A gallery's description. Raises ValueError for a file that is missing or not understood."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; is this a folder that `dmlstudy index` made?")
    try:
        content = json.loads(path.read_text())
        version = content["format_version"]
        if version in (UNSEALED, PLAIN, FORMAT_VERSION):
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
