"""Search by example: a query's nearest items of a gallery, put in a better order where the model has one.

Shapes: Q queries, M items, D embedding size, K results, l = 0..L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from dmlstudy import retrieval
from dmlstudy.saved import Model
from dmlstudy.saved.space_map import SpaceMap
from dmlstudy.serving.acceptance import Acceptance
from dmlstudy.serving.gallery import Gallery

Floats: TypeAlias = NDArray[np.floating[Any]]
Places: TypeAlias = NDArray[np.int64]
Rerank: TypeAlias = Literal["auto", "none", "structure", "layers"]
RERANKS: tuple[Rerank, ...] = get_args(Rerank)


class Found(NamedTuple):
    """The k items of a query, best first: places in the gallery, and their distances in the index.

    ``nearest`` is the least distance that the index found, in whatever order the items stand; inf where it found none.
    """

    place_K: Places
    distance_K: NDArray[np.float32]
    nearest: float = math.inf


class Layers(NamedTuple):
    """An embedding that is [sqrt(alpha^0) f^0, ..., sqrt(alpha^L) f^L]: the layers' sizes and weights."""

    sizes: Sequence[int]
    alpha_L: Floats


class Measure(NamedTuple):
    """The distance of two items, in words, and its conversion to a similarity; nearer items score higher."""

    distance: str
    score: str
    score_of: Callable[[NDArray[np.float32]], NDArray[np.float64]]


def _measure(is_unit: bool, num_bits: int | None, curvature: float | None) -> Measure:
    if num_bits is not None:
        return Measure(
            "bits that differ",
            "cosine, 1 - 2 distance / bits",
            lambda d_K: 1 - 2 * d_K / np.float64(num_bits),
        )
    if is_unit:
        return Measure(
            "euclidean", "cosine, 1 - distance^2 / 2", lambda d_K: 1 - d_K.astype(np.float64) ** 2 / 2
        )
    name = "euclidean" if curvature is None else f"hyperbolic, curvature {curvature:g}"
    return Measure(name, "1 / (1 + distance)", lambda d_K: 1 / (1 + d_K.astype(np.float64)))


class Retriever:
    """A model with a gallery that it made.

    ``rerank`` puts the first ``among`` of the index in another order: 'structure' by the query's structure
    embedding (NASA Eq. 3, of codes Eq. 7), 'layers' by the layers' similarities (OAHU, section 3.6); 'auto' does
    what the model has a head for, 'none' leaves them. ``accept_at`` replaces the model's threshold.

    With a ``space_map`` queries go through it into the space of the gallery's model. Neither they nor short vectors are
    put in an order of the model's heads. The model's threshold is of its own embeddings: where distances are of others
    it does not hold, which ``notes`` say.

    Raises ValueError for the gallery of another model, a map that does not lead from this model to it, another name,
    an order that the model has no head for, ``among`` below 1, and an ``accept_at`` that is no number.
    """

    def __init__(
        self,
        model: Model,
        gallery: Gallery,
        *,
        rerank: str = "auto",
        among: int = 100,
        accept_at: float | None = None,
        space_map: SpaceMap | None = None,
    ) -> None:
        _check_fits(model, gallery, space_map)
        if model.curvature != gallery.curvature:
            raise ValueError(
                f"the gallery is searched by another distance than its model's (curvature {gallery.curvature}, the"
                f" model's is {model.curvature}); embed and index the items anew"
            )
        if rerank not in RERANKS:
            raise ValueError(f"rerank={rerank!r}: choose from {', '.join(RERANKS)}")
        if among < 1:
            raise ValueError(f"among={among} must be at least 1")
        self.model, self.gallery, self.among = model, gallery, among
        self.space_map = space_map
        self.notes: list[str] = []
        """Lines on what is otherwise with this gallery than with the model's own whole vectors."""
        is_own = space_map is None and gallery.is_exact
        self.acceptance = Acceptance.of(model, accept_at) if is_own or accept_at is not None else None
        """The threshold of matches, None where there is none; it is of scores, whatever order they stand in."""
        if not is_own and accept_at is None and model.threshold is not None:
            self.notes.append(
                "the model's threshold is of its own whole embeddings, which this gallery's scores are not of; nothing"
                " is accepted or rejected without --accept-at"
            )
        num_bits = gallery.vectors_MD.shape[1] if gallery.has_codes else None
        is_unit = model.gives_unit_vectors if space_map is None else space_map.described.is_unit
        self.measure = _measure(is_unit, num_bits, model.curvature)
        is_plain = space_map is None and gallery.short is None and gallery.map is None
        if not is_plain and rerank not in ("auto", "none"):
            raise ValueError(
                f"rerank={rerank!r}: the order is of the model's own whole embeddings, and the gallery has mapped or"
                " short ones; set none"
            )
        if not is_plain:
            rerank = "none"
        has: dict[Rerank, bool] = {"structure": model.has_structure, "layers": model.layers is not None}
        own_order: Rerank = next((name for name in has if has[name]), "none")
        self.rerank: Rerank = own_order if rerank == "auto" else cast(Rerank, rerank)
        if not has.get(self.rerank, True):
            raise ValueError(f"rerank={self.rerank!r}: the model has no head for it; set none")
        self._layers = None if model.layers is None else Layers(*model.layers)

    def __call__(self, queries: NDArray[Any], k: int) -> list[Found]:
        """The k best items of each query. Raises ValueError for k < 1, and for queries that the model does not take."""
        return self.nearest(*self.model.query(queries), k)

    def nearest(self, query_QD: Floats, omega_QD: NDArray[np.float32] | None, k: int) -> list[Found]:
        """The k best items of queries that the model's ``query`` has embedded. Raises ValueError for k < 1."""
        if k < 1:
            raise ValueError(f"k={k} must be at least 1")
        if self.space_map is not None:
            query_QD = self.space_map(query_QD)
        among = k if self.rerank == "none" else max(k, self.among)
        place_QK, distance_QK = self._searched(query_QD, among)
        nearest_Q = np.where(place_QK[:, 0] >= 0, distance_QK[:, 0], np.inf).tolist()
        if self.rerank != "none":
            order_QK = self._order(query_QD, omega_QD, place_QK)
            distance_QK = _follow(distance_QK, place_QK, order_QK)
            place_QK = order_QK
        return [
            Found(place_K[:k][place_K[:k] >= 0], distance_K[:k][place_K[:k] >= 0], nearest)
            for place_K, distance_K, nearest in zip(place_QK, distance_QK, nearest_Q, strict=True)
        ]

    def search(self, query_QD: Floats, k: int) -> tuple[Places, NDArray[np.float32]]:
        """Places and distances as the index finds them, of queries that the model's ``query`` has embedded."""
        return self._searched(query_QD if self.space_map is None else self.space_map(query_QD), k)

    def _searched(self, query_QD: Floats, k: int) -> tuple[Places, NDArray[np.float32]]:
        return self.gallery.search(query_QD, min(k, len(self.gallery)), among=self.among)

    def _order(self, query_QD: Floats, omega_QD: NDArray[np.float32] | None, place_QK: Places) -> Places:
        """The same places in another order; of the vectors only those found are read."""
        own_R, local_QK = np.unique(place_QK, return_inverse=True)
        local_QK = local_QK.reshape(place_QK.shape)
        if own_R[0] == -1:
            own_R, local_QK = own_R[1:], local_QK - 1
        found_RD = np.asarray(self.gallery.vectors_MD[own_R])
        n = place_QK.shape[1]
        if self.rerank == "layers":
            assert self._layers is not None
            again_QK = by_layers(query_QD, found_RD, local_QK, self._layers)
        elif self.gallery.has_codes:
            assert omega_QD is not None
            packed = retrieval.pack_codes(query_QD), retrieval.pack_codes(found_RD)
            again_QK = retrieval.by_weighted_hamming(packed[0], omega_QD, packed[1], local_QK, n)
        else:
            assert omega_QD is not None
            again_QK = retrieval.by_structure(query_QD, omega_QD, found_RD, local_QK, n)
        return np.where(again_QK < 0, -1, own_R[again_QK])


def _check_fits(model: Model, gallery: Gallery, space_map: SpaceMap | None) -> None:
    """Raise ValueError where a gallery is of another space than the one that queries of the model come to."""
    if space_map is not None and space_map.source != model.fingerprint:
        raise ValueError(
            f"the map leads from another model's space ({space_map.source[:12]}, this is {model.fingerprint[:12]});"
            " name a map from this model's, or use that model"
        )
    if space_map is not None and space_map.target != gallery.model:
        raise ValueError(
            f"the map leads to another model's space ({space_map.target[:12]}) than the gallery's"
            f" ({gallery.model[:12]}); name a map to that one"
        )
    if space_map is None and model.fingerprint != gallery.model:
        raise ValueError(
            f"the gallery was made by another model ({gallery.model[:12]}, this is {model.fingerprint[:12]}); use"
            " that one, give --map with a map from this model's space to that one's, or embed and index the items anew"
        )


def by_layers(query_QD: Floats, gallery_RD: Floats, place_QK: Places, layers: Layers) -> Places:
    """Order results by the largest similarity that a layer gives them (OAHU Eq. 23, 27).

    S = alpha^l exp(-(D^l - d_min) / (d_max - d_min)), with the least and the largest D^l among the results, alpha^l
    where these are equal. Ties stay as they are; -1 stands at the end.
    """
    is_found_QK = place_QK >= 0
    best_QK = np.full(place_QK.shape, -np.inf)
    start = 0
    for size, alpha in zip(layers.sizes, layers.alpha_L.tolist(), strict=True):
        part = slice(start, start + size)
        start += size
        if alpha <= 0:
            continue
        apart_QKE = gallery_RD[place_QK, part] - query_QD[:, None, part]
        distance_QK = np.sqrt(np.einsum("qke,qke->qk", apart_QKE, apart_QKE))
        nearest_Q1 = np.where(is_found_QK, distance_QK, np.inf).min(axis=1, keepdims=True)
        farthest_Q1 = np.where(is_found_QK, distance_QK, -np.inf).max(axis=1, keepdims=True)
        spread_Q1 = farthest_Q1 - nearest_Q1
        scaled_QK = (distance_QK - nearest_Q1) / np.where(spread_Q1 > 0, spread_Q1, 1)
        best_QK = np.maximum(best_QK, alpha * np.exp(-scaled_QK))
    order_QK = np.argsort(np.where(is_found_QK, -best_QK, np.inf), axis=1, kind="stable")
    return np.take_along_axis(place_QK, order_QK, 1)


def _follow(distance_QK: NDArray[np.float32], place_QK: Places, again_QK: Places) -> NDArray[np.float32]:
    """The distances of the same places in their new order."""
    old_QK, new_QK = np.argsort(place_QK, axis=1, kind="stable"), np.argsort(again_QK, axis=1, kind="stable")
    moved_QK = np.empty_like(distance_QK)
    np.put_along_axis(moved_QK, new_QK, np.take_along_axis(distance_QK, old_QK, 1), 1)
    return moved_QK
