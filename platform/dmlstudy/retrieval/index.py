"""Indexes for serving: one interface over faiss, in memory or in one file, on one GPU where there is one.

An ``EmbeddingIndex`` holds float vectors, a ``CodeIndex`` binary codes packed in bytes; both are trained, added to,
searched, saved and loaded alike. For numbers that must be exact, ties included, use ``retrieve``: an index
leaves the order of ties to faiss.

Results can be re-ranked (``by_structure``, ``by_weighted_hamming``) if the ids given to the index are the vectors'
places in the gallery.

Shapes: N, Q vectors, D embedding size, P bytes of a code,
K neighbours.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args

import faiss
import numpy as np
from numpy.typing import NDArray

from dmlstudy.files import written_whole
from dmlstudy.retrieval import index_file
from dmlstudy.retrieval.codes import Codes
from dmlstudy.retrieval.neighbours import Floats, Ints

EmbeddingKind: TypeAlias = Literal["flat", "ivf", "ivf_pq", "hnsw"]
CodeKind: TypeAlias = Literal["flat", "ivf", "hnsw"]
Metric: TypeAlias = Literal["l2", "inner_product"]

_ROWS_AT_ONCE = 1 << 14  # vectors added, or queries searched, at once
_HITS_AT_ONCE = 1 << 23  # neighbours found at once
_MEANS_PER_CELL = 256  # training vectors per cell: faiss's own recommendation
_CODE_WORDS = 256  # of each code book of product quantisation: a byte's
# What faiss has on a GPU: neighbours or probes of one search (its GPU_MAX_SELECTION_K), kernels by size of code, and
# the size up to which look-up tables of float32 fit into 48 KiB, a block's shared memory.
_MOST_ON_GPU = 2048
_CODE_BYTES_ON_GPU = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)
_CODE_BYTES_IN_FLOAT32 = 48


@dataclass(frozen=True)
class Identity:
    """The properties that an index shares with whoever asks it: ``dim`` is D, or the number of bits of a code."""

    model_version: str
    dim: int
    metric: str
    kind: str


@dataclass(frozen=True)
class Tuning:
    """Speed against recall. ``num_cells`` of an IVF index, by default 4 sqrt(vectors it was trained with);
    ``num_probes`` of them are searched; ``code_bytes`` of a vector under product quantisation (must divide D);
    ``num_links`` of a vector in HNSW's graph, ``build_effort`` and ``search_effort`` its candidate lists.
    """

    num_cells: int | None = None
    num_probes: int = 16
    code_bytes: int = 16
    num_links: int = 32
    build_effort: int = 80
    search_effort: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None and name == "num_cells":
                continue
            if type(value) is not int or not 1 <= value < 1 << 31:
                raise ValueError(f"{name} = {value!r}: needs at least 1")


class Index(ABC):
    """Vectors with int64 ids, searched by their nearest; see the module."""

    _is_binary: ClassVar[bool] = False

    def __init__(self, identity: Identity, tuning: Tuning) -> None:
        self.identity = identity
        self.tuning = tuning
        self._gpu: int | None = None
        self._engine: Any = None
        self._id_N: Ints = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._id_N)

    @property
    def is_trained(self) -> bool:
        return self._engine is not None

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """The device of the vectors, now or once there are any."""
        return "cpu" if self._gpu is None else "gpu"

    def has_ids_below(self, count: int) -> bool:
        """True if all ids lie in 0..count-1, as places in a list of ``count`` items do."""
        return len(self) == 0 or bool(self._id_N.min() >= 0 and self._id_N.max() < count)

    def train(self, vectors: NDArray[Any], *, seed: int = 0) -> Self:
        """Learn cells (and code books) from a sample; flat and HNSW indexes need none, but may be asked.

        Raises ValueError where the sample is smaller than the cells, for 'ivf_pq' also below the 256 words of a code
        book, and once the index holds vectors.
        """
        vectors = self._checked(vectors)
        if len(self):
            raise ValueError("the index holds vectors; train a new one")
        num_cells = self.tuning.num_cells or max(1, round(4 * math.sqrt(len(vectors))))
        has_words = self.identity.kind == "ivf_pq"
        least = max(num_cells, _CODE_WORDS) if has_words else num_cells
        if len(vectors) < least and self.identity.kind.startswith("ivf"):
            means = f"{num_cells} cells" + (f" and code books of {_CODE_WORDS} words" if has_words else "")
            raise ValueError(f"{len(vectors)} training vectors for {means}: needs {least} at least")
        if len(vectors) > _MEANS_PER_CELL * least:
            chosen = np.random.default_rng(seed).choice(len(vectors), _MEANS_PER_CELL * least, replace=False)
            vectors = vectors[np.sort(chosen)]
        self._engine = self._trained(vectors, num_cells, seed)
        return self

    def add(self, vectors: NDArray[Any], ids: Ints) -> Self:
        """Add vectors, in batches, under ids that no other vector has.

        An add that is interrupted between two batches leaves a usable index with the whole batches before. One
        interrupted within a batch may leave vectors without an id, and the index then refuses to be used.

        Raises ValueError for an untrained IVF index, ids that are not integers or not new, bad vectors, and an index
        that has vectors without an id.
        """
        self._check_whole()
        vectors, ids = self._checked(vectors), np.asarray(ids)
        if ids.shape != (len(vectors),) or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"{len(vectors)} vectors, ids {ids.dtype}{list(ids.shape)}: needs one integer each"
            )
        id_N = ids.astype(np.int64)
        if len(np.unique(id_N)) < len(id_N) or np.isin(id_N, self._id_N).any():
            raise ValueError("an id is given twice, or already in the index")
        if not self.is_trained:
            if self.identity.kind.startswith("ivf"):
                raise ValueError(f"an {self.identity.kind} index needs train() before add()")
            self._engine = self._trained(vectors[:0], 1, 0)
        num_before = len(self)
        all_ids = np.concatenate([self._id_N, id_N])
        for start in range(0, len(vectors), _ROWS_AT_ONCE):
            after = min(start + _ROWS_AT_ONCE, len(vectors))
            self._engine.add(vectors[start:after])
            self._id_N = all_ids[: num_before + after]
        return self

    def search(self, queries: NDArray[Any], k: int, *, effort: int | None = None) -> tuple[Ints, Floats]:
        """Return id_QK (int64) and distance_QK (float32), nearest first; -1 and inf where fewer were found.

        Distances: ``l2`` is Euclidean, ``inner_product`` is 1 - q.g, a code's is in bits. ``effort`` stands for
        num_probes or search_effort in this one search. Queries are searched in batches. Raises ValueError for bad
        queries, k or effort below 1, or on a GPU above 2048, and an index that is empty or has vectors without an id.
        """
        self._check_whole()
        queries = self._checked(queries)
        if k < 1 or len(self) == 0:
            raise ValueError(f"k = {k} neighbours of {len(self)} vectors; needs k >= 1 and a vector to find")
        if effort is not None and effort < 1:
            raise ValueError(f"effort = {effort}: needs at least 1")
        found_K = min(k, len(self))
        if self._gpu is not None:
            num_probes = effort or self.tuning.num_probes if self.identity.kind.startswith("ivf") else 1
            for name, asked in (("k", found_K), ("effort", num_probes)):
                if asked > _MOST_ON_GPU:
                    raise ValueError(
                        f"{name} = {asked}: a GPU takes {_MOST_ON_GPU} at most; ask for less, or build or load the "
                        "index with device='cpu'"
                    )
        self._set_effort(effort)
        id_QK = np.full((len(queries), k), -1, np.int64)
        distance_QK = np.full((len(queries), k), np.inf, np.float32)
        rows_at_once = max(1, min(_ROWS_AT_ONCE, _HITS_AT_ONCE // found_K))
        for start in range(0, len(queries), rows_at_once):
            rows = slice(start, start + rows_at_once)
            score_QK, place_QK = self._engine.search(queries[rows], found_K)
            is_found_QK = place_QK >= 0
            id_QK[rows, :found_K] = np.where(is_found_QK, self._id_N[place_QK], -1)
            distance_QK[rows, :found_K] = np.where(is_found_QK, self._distance(score_QK), np.inf)
        return id_QK, distance_QK

    def save(self, path: str | Path) -> None:
        """Write the index to one file, whole or not at all, also where the machine loses power.

        faiss itself opens the file (``index_file``). Raises ValueError for an index without vectors, or with some
        without an id.
        """
        self._check_whole()
        if len(self) == 0:
            raise ValueError("an index without vectors cannot be saved")
        path = Path(path)
        head = {"identity": asdict(self.identity), "tuning": asdict(self.tuning), "num_vectors": len(self)}
        engine = self._engine if self._gpu is None else faiss.index_gpu_to_cpu(self._engine)
        with written_whole(path) as file:
            index_file.write(file, head, engine, self._id_N)

    @classmethod
    def load(
        cls, path: str | Path, *, model_version: str, dim: int, metric: str, device: str = "auto"
    ) -> Self:
        """The index in a file, for the model, size and metric with which it will be asked.

        Raises ValueError for another model's index, a damaged, half-written or dishonest file and a GPU that is not
        there; FileNotFoundError where there is no file.
        """
        path = Path(path)
        with path.open("rb") as file:
            head = index_file.read_head(file, path)
            identity, tuning = _described(head, path)
            wanted = {"model_version": model_version, "dim": dim, "metric": metric}
            for name, value in wanted.items():
                if getattr(identity, name) != value:
                    raise ValueError(
                        f"{path} has {name} {getattr(identity, name)!r}, asked for is {value!r}: "
                        "build the index anew, or use the model it was built with"
                    )
            index = cls._from_identity(identity, tuning, device)
            content = index_file.read(file, path, head, is_binary=cls._is_binary)
        index._check_engine(content.engine, path)
        index._id_N = content.id_N
        index._engine = index._placed(content.engine)
        return index

    @classmethod
    @abstractmethod
    def _from_identity(cls, identity: Identity, tuning: Tuning, device: str) -> Self: ...

    @abstractmethod
    def _checked(self, vectors: NDArray[Any]) -> NDArray[Any]: ...

    @abstractmethod
    def _trained(self, vectors: NDArray[Any], num_cells: int, seed: int) -> Any: ...

    @abstractmethod
    def _distance(self, score_QK: NDArray[Any]) -> NDArray[Any]: ...

    @abstractmethod
    def _check_engine(self, engine: Any, path: Path) -> None: ...

    def _placed(self, engine: Any) -> Any:
        """The engine where the index is to be."""
        return engine

    def _check_whole(self) -> None:
        """Raise ValueError where the engine has another number of vectors than of ids."""
        if self._engine is None:
            return
        if self._engine.ntotal != len(self):
            raise ValueError(
                f"the index holds {self._engine.ntotal} vectors and {len(self)} ids: an add() was broken off; build it "
                "anew, or load the last file saved"
            )

    def _set_effort(self, effort: int | None) -> None:
        if self.identity.kind.startswith("ivf"):
            num_probes = effort or self.tuning.num_probes
            if self._gpu is not None:
                faiss.GpuParameterSpace().set_index_parameter(self._engine, "nprobe", num_probes)
            else:
                self._engine.nprobe = num_probes
        elif self.identity.kind == "hnsw":
            self._engine.hnsw.efSearch = effort or self.tuning.search_effort


class EmbeddingIndex(Index):
    """Float vectors of size ``dim``: 'flat' (exact), 'ivf', 'ivf_pq' or 'hnsw', by 'l2' or 'inner_product'.

    An inner product ranks unit vectors only, as L2 would; others are refused. ``device='auto'`` takes the first GPU,
    'auto:1' the second, for every index that faiss has there, and otherwise the CPU. 'gpu' or 'gpu:1' insists: a
    ValueError names what faiss lacks there ('hnsw', more than 2048 probes, some sizes of ``code_bytes``).

    Above 48 ``code_bytes`` a GPU looks distances up in float16, which ends at 65504: scale embeddings of large
    norm down, or take 'cpu'. ``.device`` says where the index is.
    """

    def __init__(
        self,
        kind: EmbeddingKind,
        dim: int,
        *,
        model_version: str,
        metric: Metric = "l2",
        tuning: Tuning | None = None,
        device: str = "auto",
    ) -> None:
        if kind not in _EMBEDDING_ENGINES:
            raise ValueError(f"index {kind!r}: choose from {', '.join(_EMBEDDING_ENGINES)}")
        if metric not in get_args(Metric):
            raise ValueError(f"metric {metric!r}: choose from {', '.join(get_args(Metric))}")
        tuning = tuning or Tuning()
        if kind == "ivf_pq" and dim % tuning.code_bytes:
            raise ValueError(f"code_bytes = {tuning.code_bytes} does not divide dim = {dim}")
        super().__init__(Identity(model_version, dim, metric, kind), tuning)
        self._gpu = _gpu(device, kind, tuning)

    @classmethod
    def _from_identity(cls, identity: Identity, tuning: Tuning, device: str) -> Self:
        return cls(
            identity.kind,  # type: ignore[arg-type]
            identity.dim,
            model_version=identity.model_version,
            metric=identity.metric,  # type: ignore[arg-type]
            tuning=tuning,
            device=device,
        )

    def _checked(self, vectors: NDArray[Any]) -> Floats:
        vectors = np.asarray(vectors)
        if vectors.ndim != 2 or vectors.shape[1] != self.identity.dim:
            raise ValueError(f"vectors have shape {vectors.shape}, the index dim {self.identity.dim}")
        for start in range(0, len(vectors), _ROWS_AT_ONCE):
            part = vectors[start : start + _ROWS_AT_ONCE]
            norm_N = np.linalg.norm(part.astype(np.float32), axis=1)
            is_bad_N = ~np.isfinite(norm_N)
            if self.identity.metric == "inner_product":
                is_bad_N |= np.abs(norm_N - 1) > 1e-3
            if is_bad_N.any():
                row = int(np.argmax(is_bad_N))
                raise ValueError(
                    f"vector {start + row} has norm {norm_N[row]:g}: "
                    + ("normalise to 1, or take metric l2" if np.isfinite(norm_N[row]) else "not finite")
                )
        return np.ascontiguousarray(vectors, dtype=np.float32)

    def _trained(self, vectors: NDArray[Any], num_cells: int, seed: int) -> Any:
        metric = faiss.METRIC_L2 if self.identity.metric == "l2" else faiss.METRIC_INNER_PRODUCT
        engine = _EMBEDDING_ENGINES[self.identity.kind](self.identity.dim, metric, num_cells, self.tuning)
        if self.identity.kind.startswith("ivf"):
            engine.cp.seed = seed
            engine.cp.min_points_per_centroid = 1
            if self.identity.kind == "ivf_pq":
                engine.pq.cp.seed = seed
                engine.pq.cp.min_points_per_centroid = 1
            engine.train(vectors)
        return self._placed(engine)

    def _distance(self, score_QK: NDArray[Any]) -> NDArray[Any]:
        if self.identity.metric == "inner_product":
            return 1 - score_QK
        return np.asarray(np.sqrt(np.maximum(score_QK, 0)))

    def _check_engine(self, engine: Any, path: Path) -> None:
        metric = faiss.METRIC_L2 if self.identity.metric == "l2" else faiss.METRIC_INNER_PRODUCT
        index_file.check(engine, path, kind=self.identity.kind, dim=self.identity.dim, metric=metric)

    def _placed(self, engine: Any) -> Any:
        if self._gpu is None:
            return engine
        if self.identity.kind.startswith("ivf"):
            engine.nprobe = 1  # a file's may be beyond what a GPU takes; each search sets its own
        options = faiss.GpuClonerOptions()
        options.useFloat16 = (
            self.identity.kind == "ivf_pq" and self.tuning.code_bytes > _CODE_BYTES_IN_FLOAT32
        )
        return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), self._gpu, engine, options)


class CodeIndex(Index):
    """Binary codes of ``num_bits``, packed in bytes by ``pack_codes``, by Hamming distance: 'flat' (exact), 'ivf',
    'hnsw'. On the CPU only.
    """

    _is_binary = True

    def __init__(
        self, kind: CodeKind, num_bits: int, *, model_version: str, tuning: Tuning | None = None
    ) -> None:
        if kind not in _CODE_ENGINES:
            raise ValueError(f"index {kind!r}: choose from {', '.join(_CODE_ENGINES)}")
        super().__init__(Identity(model_version, num_bits, "hamming", kind), tuning or Tuning())

    @classmethod
    def _from_identity(cls, identity: Identity, tuning: Tuning, device: str) -> Self:
        if device == "gpu":
            raise ValueError("an index of codes has no GPU form: take device cpu")
        kind: Any = identity.kind
        return cls(kind, identity.dim, model_version=identity.model_version, tuning=tuning)

    def _checked(self, vectors: NDArray[Any]) -> Codes:
        num_bytes = -(-self.identity.dim // 8)
        if vectors.ndim != 2 or vectors.dtype != np.uint8 or vectors.shape[1] != num_bytes:
            raise ValueError(
                f"codes are {vectors.dtype}{list(vectors.shape)}, expected uint8 of {num_bytes} bytes: pack_codes"
            )
        return np.ascontiguousarray(vectors)

    def _trained(self, vectors: NDArray[Any], num_cells: int, seed: int) -> Any:
        num_bits = 8 * -(-self.identity.dim // 8)
        engine = _CODE_ENGINES[self.identity.kind](num_bits, num_cells, self.tuning)
        if self.identity.kind == "ivf":
            engine.cp.seed = seed
            engine.cp.min_points_per_centroid = 1
            engine.train(vectors)
        return engine

    def nearest(self, queries: Codes, k: int) -> tuple[Ints, Floats]:
        """As ``search``, of a flat index with ties by id: all codes as near as the k-th are found, then the first k.

        Raises ValueError as ``search``, and for an index of another kind.
        """
        if self.identity.kind != "flat":
            raise ValueError(f"an index of the kind {self.identity.kind} does not find all ties; take flat")
        id_QK, distance_QK = self.search(queries, k)
        found_K = min(k, len(self))
        for row, query in enumerate(self._checked(queries)):
            _, bits_H, place_H = self._engine.range_search(
                query[None], int(distance_QK[row, found_K - 1]) + 1
            )
            id_H = self._id_N[place_H]
            order_K = np.lexsort((id_H, bits_H))[:found_K]
            id_QK[row, :found_K], distance_QK[row, :found_K] = id_H[order_K], bits_H[order_K]
        return id_QK, distance_QK

    def _distance(self, score_QK: NDArray[Any]) -> NDArray[Any]:
        return score_QK.astype(np.float32)

    def _check_engine(self, engine: Any, path: Path) -> None:
        num_bits = 8 * -(-self.identity.dim // 8)
        index_file.check(engine, path, kind=self.identity.kind, dim=num_bits, metric=None)


def _ivf(dim: int, metric: int, num_cells: int, tuning: Tuning) -> Any:
    engine = faiss.IndexIVFFlat(_owned(faiss.IndexFlat(dim, metric)), dim, num_cells, metric)
    engine.own_fields = True
    return engine


def _ivf_pq(dim: int, metric: int, num_cells: int, tuning: Tuning) -> Any:
    engine = faiss.IndexIVFPQ(
        _owned(faiss.IndexFlat(dim, metric)), dim, num_cells, tuning.code_bytes, 8, metric
    )
    engine.own_fields = True
    return engine


def _hnsw(dim: int, metric: int, num_cells: int, tuning: Tuning) -> Any:
    engine = faiss.IndexHNSWFlat(dim, tuning.num_links, metric)
    engine.hnsw.efConstruction = tuning.build_effort
    return engine


def _code_ivf(num_bits: int, num_cells: int, tuning: Tuning) -> Any:
    engine = faiss.IndexBinaryIVF(_owned(faiss.IndexBinaryFlat(num_bits)), num_bits, num_cells)
    engine.own_fields = True
    return engine


def _code_hnsw(num_bits: int, num_cells: int, tuning: Tuning) -> Any:
    engine = faiss.IndexBinaryHNSW(num_bits, tuning.num_links)
    engine.hnsw.efConstruction = tuning.build_effort
    return engine


_EMBEDDING_ENGINES: dict[str, Callable[[int, int, int, Tuning], Any]] = {
    "flat": lambda dim, metric, num_cells, tuning: faiss.IndexFlat(dim, metric),
    "ivf": _ivf,
    "ivf_pq": _ivf_pq,
    "hnsw": _hnsw,
}
_CODE_ENGINES: dict[str, Callable[[int, int, Tuning], Any]] = {
    "flat": lambda num_bits, num_cells, tuning: faiss.IndexBinaryFlat(num_bits),
    "ivf": _code_ivf,
    "hnsw": _code_hnsw,
}


def _owned(quantiser: Any) -> Any:
    """The quantiser, handed over to the index that is made with it."""
    quantiser.this.disown()
    return quantiser


def _gpu(device: str, kind: str, tuning: Tuning) -> int | None:
    """The number of the GPU that an index is put on; None for the CPU."""
    asked = re.fullmatch(r"cpu|(auto|gpu|cuda)(?::([0-9]{1,3}))?", device)
    if asked is None:
        raise ValueError(f"device {device!r}: choose from auto, cpu, gpu (or cuda) and, of several, gpu:1")
    if device == "cpu":
        return None
    there = faiss.get_num_gpus() if hasattr(faiss, "index_cpu_to_gpu") else 0
    number = int(asked[2] or 0)
    hindrance = _why_not_on_gpu(kind, tuning) if there else "faiss sees no GPU; take device cpu or auto"
    if there and number >= there:
        hindrance = f"faiss sees {there} GPU, numbered from 0; take device gpu:0 or cpu"
    if asked[1] != "auto" and hindrance:
        raise ValueError(f"device {device}: {hindrance}")
    return None if hindrance else number


def _why_not_on_gpu(kind: str, tuning: Tuning) -> str:
    """The reason that keeps an index off a GPU, and the fix; empty if there is none."""
    if kind == "hnsw":
        return "hnsw has no GPU form: take device cpu"
    if kind.startswith("ivf") and tuning.num_probes > _MOST_ON_GPU:
        return f"num_probes = {tuning.num_probes}: {_MOST_ON_GPU} at most, or take device cpu"
    if kind == "ivf_pq" and tuning.code_bytes not in _CODE_BYTES_ON_GPU:
        sizes = ", ".join(map(str, _CODE_BYTES_ON_GPU))
        return f"code_bytes = {tuning.code_bytes}: choose from {sizes}, or take device cpu"
    return ""


def _described(head: Mapping[str, Any], path: Path) -> tuple[Identity, Tuning]:
    """Identity and tuning as a file has them. Raises ValueError for what is neither."""
    try:
        identity, tuning = Identity(**head["identity"]), Tuning(**head["tuning"])
        texts = (identity.model_version, identity.metric, identity.kind)
        if not all(isinstance(each, str) for each in texts):
            raise TypeError("identity")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its header is not understood ({error}): build it anew") from None
    return identity, tuning
