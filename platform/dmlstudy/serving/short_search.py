"""Galleries of short vectors: searched by the leading part and few bits, then put in order by larger vectors.

What the short forms are is defined in ``retrieval.short_forms``.

Shapes: Q queries, M items, D size of the model's embeddings, E of the short form, S of the vectors beside, K results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dmlstudy.metric_names import Bits, ShortForm
from dmlstudy.retrieval import CodeIndex, EmbeddingIndex, Index, Tuning, short_forms
from dmlstudy.saved import Model

Floats: TypeAlias = NDArray[np.floating[Any]]
Beside: TypeAlias = Literal["float", "int8", "none"]
BESIDES: tuple[Beside, ...] = get_args(Beside)

TILE = 1 << 14
"""Vectors made short at once."""

_UNIT = 1e-3
"""By how much the norm of a vector that is to be cut may differ from 1."""

_TRAINED_WITH = 256
"""Vectors for each cell that an index learns from."""


class FormRecord(BaseModel):
    """A form as files have it: the size of the leading part, null for the whole, and bits of a number."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    size: int | None = Field(default=None, ge=1)
    bits: Literal[32, 8, 1] = 32

    @property
    def form(self) -> ShortForm:
        return ShortForm(self.size, self.bits)


class Short(NamedTuple):
    """The form of a file's vectors, of embeddings of ``whole`` numbers."""

    form: ShortForm
    whole: int

    @property
    def size(self) -> int:
        return self.form.size or self.whole

    @property
    def is_whole(self) -> bool:
        """True of embeddings as the model makes them."""
        return self.form == ShortForm(None, 32)

    @property
    def num_bytes(self) -> int:
        """Bytes of a vector."""
        return self.form.num_bytes(self.whole)

    def __str__(self) -> str:
        return f"{self.size} x {self.form.bits} bit"

    @classmethod
    def of_origin(cls, origin: dict[str, str], dim: int) -> Short:
        """The form that a file of embeddings of ``dim`` columns says of itself. Raises ValueError for what is none."""
        if "bits" not in origin:
            return cls(ShortForm(None, 32), dim)
        try:
            size = int(origin["size"]) if "size" in origin else None
            short = cls(ShortForm(size, bits_of(int(origin["bits"]))), int(origin["whole"]))
        except (KeyError, ValueError):
            raise ValueError("says of a form that is not understood; embed anew") from None
        columns = short.size if short.form.bits != 1 else -(-short.size // 8)
        if columns != dim:
            raise ValueError(f"says of {short}, but has {dim} columns; embed anew")
        return short

    def origin(self) -> dict[str, str]:
        """The same for the file; nothing of whole embeddings."""
        if self.is_whole:
            return {}
        size = {} if self.form.size is None else {"size": str(self.form.size)}
        return {**size, "bits": str(self.form.bits), "whole": str(self.whole)}


def check_beside(text: str) -> Beside:
    """The vectors that are kept beside short ones. Raises ValueError for anything else."""
    known: dict[str, Beside] = {each: each for each in BESIDES}
    if text not in known:
        raise ValueError(f"--beside {text}: choose from {', '.join(known)}")
    return known[text]


def bits_of(bits: int) -> Bits:
    """Bits of a number. Raises ValueError for others than 32, 8 and 1."""
    if bits not in get_args(Bits):
        raise ValueError(f"--bits {bits}: choose from 32, 8, 1")
    return cast(Bits, bits)


def wanted(size: int | None, bits: int, whole: int, uncut: str = "") -> Short:
    """The form that is asked for of embeddings of ``whole`` numbers; ``uncut`` says why there can be none.

    The size of the whole is the whole. Raises ValueError for a size beyond it, other bits, and where there is none.
    """
    form = ShortForm(None if size == whole else size, bits_of(bits))
    if form.size is not None and not 1 <= form.size < whole:
        raise ValueError(f"--size {size}: the embeddings have {whole} numbers; give a size from 1 to {whole}")
    short = Short(form, whole)
    if not short.is_whole and uncut:
        raise ValueError(f"--size and --bits: {uncut}, which have no short form; leave both out")
    return short


def wanted_of(model: Model, size: int | None, bits: int) -> Short | None:
    """The form that is asked for of a model's embeddings; None of whole ones. Raises ValueError as ``wanted``."""
    if size is None and bits_of(bits) == 32:
        return None
    if model.uncut:
        raise ValueError(f"--size and --bits: {model.uncut}, which have no short form; leave both out")
    whole = model.dim
    if whole is None:
        raise ValueError(f"--size and --bits: {model.name} has no example to tell its size; save it with one")
    short = wanted(size, bits, whole)
    return None if short.is_whole else short


def check_unit(z_ND: NDArray[Any], first: int, source: object) -> None:
    """Raise ValueError naming the first vector whose norm is not 1, which has no short form."""
    norm_N = np.linalg.norm(z_ND.astype(np.float64), axis=1)
    is_bad_N = ~(np.abs(norm_N - 1) <= _UNIT)
    if is_bad_N.any():
        row = int(np.argmax(is_bad_N))
        raise ValueError(
            f"{source}: vector {first + row} has norm {norm_N[row]:g}; short forms are of unit vectors, leave --size"
            " and --bits out"
        )


@dataclass(frozen=True)
class ShortSearch:
    """The short vectors of a gallery, and larger ones ``beside`` that put what is found in order; None: none are.

    ``engine`` is an index or, of 8 bits, the vectors (M, E) with their squared norms.
    """

    short: Short
    engine: Index | tuple[NDArray[np.int8], NDArray[np.int32]]
    beside: Short | None = None
    beside_MS: NDArray[Any] | None = None

    def search(self, query_QD: Floats, k: int, among: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Places (-1 beyond those found) and distances of the k nearest, nearest first, ties by place.

        ``among`` are found by the short form, where larger vectors put them in order: then distances are of these.
        Raises ValueError for queries of another size, and k or ``among`` below 1.
        """
        if query_QD.shape[1] != self.short.whole:
            raise ValueError(
                f"queries of size {query_QD.shape[1]}, the gallery's are short forms of {self.short.whole}: use the"
                " model that it was made with, or make it anew"
            )
        query_QD = np.asarray(query_QD, np.float32)
        if self.beside_MS is None:
            return self._nearest(query_QD, k)
        place_QK, _ = self._nearest(query_QD, max(k, among))
        return self._again(query_QD, place_QK, k)

    def as_queries(self, place_N: NDArray[np.int64]) -> Floats | None:
        """Items as queries, (N, D), zeros behind the numbers that are kept; None where an index alone has them."""
        if self.beside is not None and self.beside_MS is not None:
            form, kept_NS = self.beside, np.asarray(self.beside_MS[place_N])
        elif isinstance(self.engine, tuple):
            form, kept_NS = self.short, np.asarray(self.engine[0][place_N])
        else:
            return None
        query_ND = np.zeros((len(place_N), self.short.whole), np.float32)
        query_ND[:, : form.size] = _as_unit(kept_NS, form)
        return query_ND

    def _nearest(self, query_QD: Floats, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        query = short_forms.kept(query_QD, *self.short.form)
        if isinstance(self.engine, tuple):
            return short_forms.nearest_of_8_bits(query, *self.engine, k)
        if isinstance(self.engine, CodeIndex):
            is_flat = self.engine.identity.kind == "flat"
            place_QK, bits_QK = (self.engine.nearest if is_flat else self.engine.search)(query, k)
            return place_QK, (2 * np.sqrt(bits_QK / np.float64(self.short.size))).astype(np.float32)
        return self.engine.search(query, k)

    def _again(
        self, query_QD: Floats, place_QK: NDArray[np.int64], k: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k nearest of these places by the vectors beside; sums are of double precision."""
        assert self.beside is not None
        assert self.beside_MS is not None
        asked_QS = _as_unit(short_forms.kept(query_QD, *self.beside.form), self.beside)
        again_QK = np.full((len(place_QK), k), -1, np.int64)
        distance_QK = np.full((len(place_QK), k), np.inf, np.float32)
        for row, place_K in enumerate(place_QK):
            found_K = np.sort(place_K[place_K >= 0])
            found_KS = _as_unit(np.asarray(self.beside_MS[found_K]), self.beside).astype(np.float64)
            apart_K = np.sqrt(((found_KS - asked_QS[row].astype(np.float64)) ** 2).sum(axis=1))
            order_K = np.argsort(apart_K, kind="stable")[:k]
            again_QK[row, : len(order_K)] = found_K[order_K]
            distance_QK[row, : len(order_K)] = apart_K[order_K]
        return again_QK, distance_QK


def _as_unit(kept_NS: NDArray[Any], beside: Short) -> Floats:
    return short_forms.unit(kept_NS.astype(np.float64)) if beside.form.bits == 8 else kept_NS


def tiles(z_MD: NDArray[Any], short: Short, source: object) -> Iterator[NDArray[Any]]:
    """Unit vectors in a short form, a tile at a time. Raises ValueError for vectors of another norm."""
    for start in range(0, len(z_MD), TILE):
        part_ND = np.asarray(z_MD[start : start + TILE])
        check_unit(part_ND, start, source)
        yield short_forms.kept(part_ND, *short.form)


def index_of(
    kept: Iterator[NDArray[Any]],
    sample: NDArray[Any],
    short: Short,
    kind: str,
    model: str,
    tuning: Tuning | None,
) -> Index:
    """An index of vectors in a short form of 32 bits or 1; ``sample`` is what it learns its cells from."""
    index: Index
    if short.form.bits == 1:
        if kind == "ivf_pq":
            raise ValueError("ivf_pq is for numbers of 32 bits; choose flat, ivf or hnsw for 1 bit")
        index = CodeIndex(kind, short.size, model_version=model, tuning=tuning)  # type: ignore[arg-type]
    else:
        index = EmbeddingIndex(
            kind,  # type: ignore[arg-type]
            short.size,
            model_version=model,
            tuning=tuning,
            device="cpu",
        )
    if kind.startswith("ivf"):
        index.train(sample)
    start = 0
    for part in kept:
        index.add(part, np.arange(start, start + len(part)))
        start += len(part)
    return index


def tuning_for(num_items: int, tuning: Tuning | None) -> Tuning:
    """The tuning with as many cells as an index of so many items has by itself: it learns from a part of them."""
    tuning = tuning or Tuning()
    if tuning.num_cells is not None:
        return tuning
    return dataclasses.replace(tuning, num_cells=max(1, round(4 * math.sqrt(num_items))))


def sample_rows(num_items: int, tuning: Tuning) -> NDArray[np.int64]:
    """The items that an index learns its cells from, ascending; the same at each call."""
    num = min(num_items, _TRAINED_WITH * max(tuning.num_cells or 1, 256))
    if num == num_items:
        return np.arange(num_items)
    return np.sort(np.random.default_rng(0).choice(num_items, num, replace=False))


def check_engine(engine: NDArray[Any], num_items: int, short: Short, path: object) -> None:
    """Raise ValueError where the vectors of 8 bits in a file are not those of the gallery."""
    if engine.dtype != np.int8 or engine.shape != (num_items, short.size):
        raise ValueError(
            f"{path}: {engine.dtype} of shape {engine.shape}, expected int8 of ({num_items}, {short.size}); make the"
            " gallery anew"
        )
