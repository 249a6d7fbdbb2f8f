"""Re-ranking of the first n results of every query; results beyond them keep their places.

A reranker takes a query's results in one order and returns them in another. All sorts are stable, so equal values keep
their former order.

Results are places in the gallery (or in z); the ids given to an index must be these places. Where an index found fewer
than K, a row ends in -1, and these entries stay where they are.

Shapes: Q queries, M gallery items, N items, K results, n of them re-ranked, D embedding size or bits, P bytes
of a packed code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from dmlstudy.heartbeat import beat
from dmlstudy.retrieval.cameras import SameCamera
from dmlstudy.retrieval.codes import Codes
from dmlstudy.retrieval.metrics import (
    Denominator,
    Labels,
    Scores,
    count_relevant,
    num_ranks,
    tie_order,
)
from dmlstudy.retrieval.neighbours import Floats, Ints, checked, in_gallery, in_itself

Reranker: TypeAlias = Callable[[Ints, Ints], Ints]
"""(row_Q, index_QK) -> the same items of index_QK in another order; -1 is no item, and stays at its row's end."""

_CELLS_PER_CHUNK = 1 << 22  # coordinates gathered at once


def by_structure(query_QD: Floats, omega_QD: Floats, gallery_MD: Floats, index_QK: Ints, n: int) -> Ints:
    """Order the first n by d_ij^2 = sum_d omega_i^(d) (z_i^(d) - z_j^(d))^2, omega the query's (NASA Eq. 3).

    The distance is not symmetric, and the gallery's omega is never used.
    Raises ValueError for n < 1, an omega that is negative or no number, unequal shapes, and results with a negative
    place other than -1 at the end of a row.
    """
    _check_weights(omega_QD, len(query_QD), query_QD.shape[1])

    def measured(rows: slice, first_Qn: Ints) -> NDArray[np.floating]:
        offset_QnD = gallery_MD[first_Qn] - query_QD[rows, None]
        return np.asarray(np.einsum("qnd,qnd,qd->qn", offset_QnD, offset_QnD, omega_QD[rows]))

    return _reordered(index_QK, n, query_QD.shape[1], measured)


def by_weighted_hamming(query_QP: Codes, omega_QD: Floats, gallery_MP: Codes, index_QK: Ints, n: int) -> Ints:
    """Order the first n by d(z_i, z_j) = sum_d omega_i^(d) [z_i^(d) != z_j^(d)], omega the query's (NASA Eq. 7).

    Codes are packed in bytes; D, the number of bits, is omega's. Raises ValueError as ``by_structure``.
    """
    num_bits = omega_QD.shape[-1]
    _check_weights(omega_QD, len(query_QP), num_bits)
    if -(-num_bits // 8) != query_QP.shape[1] or query_QP.shape[1] != gallery_MP.shape[1]:
        raise ValueError(
            f"{num_bits} weights, queries of {query_QP.shape[1]} bytes, gallery of {gallery_MP.shape[1]}: "
            "a weight for each bit is needed"
        )

    def measured(rows: slice, first_Qn: Ints) -> NDArray[np.floating]:
        differs_QnP = gallery_MP[first_Qn] ^ query_QP[rows, None]
        differs_QnD = np.unpackbits(differs_QnP, axis=2, count=num_bits)
        # einsum over float64: equal sets of differing bits must tie exactly
        return np.asarray(np.einsum("qnd,qd->qn", differs_QnD, omega_QD[rows].astype(np.float64)))

    return _reordered(index_QK, n, num_bits, measured)


class KReciprocal:
    """Orders the first n by (1 - weight) d_J + weight d, with k-reciprocal encodings (Zhong et al. 2017, Eq. 3-12).

    ``z_ND`` holds queries and gallery together. d is the squared distance over the row's largest. R(i, k) are the j
    that are among the k nearest of i (i the first of them) and have i among theirs.

    R*(i) adds to R(i, k1) the R(j, k1/2) of each j in R(i, k1) of which more than two thirds lie in R(i, k1).
    V_i is exp(-d_ij) on R*(i), scaled to sum 1, then the mean of V over the k2 first of i; d_J = 1 - sum
    min(V_i, V_j) / sum max(V_i, V_j).

    The encodings are computed with the first order, from neighbours found on the ``device``. Memory: O(N k1^2) at most,
    never N^2. Raises ValueError for k1 < 2, k2 < 1 and a weight outside [0, 1].
    """

    def __init__(
        self,
        z_ND: Floats,
        k1: int = 20,
        k2: int = 6,
        weight: float = 0.3,
        device: torch.device | None = None,
    ) -> None:
        if k1 < 2 or k2 < 1 or not 0 <= weight <= 1:
            raise ValueError(
                f"k1 = {k1}, k2 = {k2}, weight = {weight}: needs k1 >= 2, k2 >= 1 and 0 <= weight <= 1"
            )
        self.z_ND = z_ND
        self.k1, self.k2, self.weight, self.device = k1, k2, weight, device

    def order(self, row_Q: Ints, index_QK: Ints, n: int) -> Ints:
        """The results ``index_QK`` of the queries ``row_Q``, both places in z, with the first n in another order.

        Raises ValueError for n < 1, and results with a negative place other than -1 at the end of a row.
        """
        encoded_NN, largest_N = self._prepared

        def measured(rows: slice, first_Qn: Ints) -> NDArray[np.floating]:
            part_Q = row_Q[rows]
            offset_QnD = self.z_ND[first_Qn] - self.z_ND[part_Q][:, None]
            distance_Qn = np.einsum("qnd,qnd->qn", offset_QnD, offset_QnD) / largest_N[part_Q, None]
            jaccard_Qn = np.ones_like(distance_Qn, dtype=np.float64)
            dense_N = np.zeros(len(self.z_ND))
            for q, row in enumerate(part_Q):
                own = slice(encoded_NN.indptr[row], encoded_NN.indptr[row + 1])
                dense_N[encoded_NN.indices[own]] = encoded_NN.data[own]
                others = encoded_NN[first_Qn[q]]
                least = np.minimum(others.data, dense_N[others.indices])
                place = np.repeat(np.arange(others.shape[0]), np.diff(others.indptr))
                shared_n = np.bincount(place, least, others.shape[0])
                jaccard_Qn[q] = 1 - shared_n / (2 - shared_n)
                dense_N[encoded_NN.indices[own]] = 0
            return np.asarray((1 - self.weight) * jaccard_Qn + self.weight * distance_Qn)

        return _reordered(index_QK, n, self.z_ND.shape[1], measured)

    @cached_property
    def _prepared(self) -> tuple[sparse.csr_array, Floats]:
        """The encodings V, and each row's largest squared distance."""
        parts = in_itself(self.z_ND, max(self.k1, self.k2), device=self.device)
        others_NK = np.concatenate([part.index_QK for part in parts])
        near_NK = np.column_stack([np.arange(len(self.z_ND)), others_NK])
        largest_N = _largest_squared_distances(self.z_ND)
        encoded_NN = _encodings(self.z_ND, near_NK, largest_N, self.k1)
        if self.k2 > 1:
            expanded = near_NK[:, : self.k2]
            shares = np.full(expanded.size, 1 / expanded.shape[1])
            starts = np.arange(0, expanded.size + 1, expanded.shape[1])
            mean_NN = sparse.csr_array((shares, expanded.ravel(), starts), shape=encoded_NN.shape)
            encoded_NN = mean_NN @ encoded_NN
        return encoded_NN, largest_N


class Ranked(NamedTuple):
    """Rankings of the same queries: without re-ranking ('none') and by each reranker."""

    scores: dict[str, Scores]
    ms_per_query: dict[str, float]
    query_Q: Ints
    """The queries' places among the embeddings, in the order of the scores."""
    num_left_out: int | None = None
    """Queries that are not asked, for no item of their class is by another camera; None without cameras."""

    @classmethod
    def joined(cls, of_shares: Sequence[Ranked]) -> Ranked:
        """Rankings of consecutive shares of the queries as one; its times are means over all queries."""
        query_Q = np.concatenate([each.query_Q for each in of_shares])
        names = of_shares[0].scores
        scores = {name: Scores.joined([each.scores[name] for each in of_shares]) for name in names}
        ms = {name: sum(each.ms_per_query[name] * len(each.query_Q) for each in of_shares) for name in names}
        times = {name: ms[name] / len(query_Q) for name in names}
        return cls(scores, times, query_Q, of_shares[0].num_left_out)

    def means(self, name: str = "none") -> dict[str, float]:
        """The means of one ranking's scores, with the number of queries that are left out where there are cameras."""
        left_out = {} if self.num_left_out is None else {"num_queries_left_out": float(self.num_left_out)}
        return self.scores[name].means() | left_out


def compare(
    z_ND: Floats,
    labels_N: Labels,
    rerankers: Mapping[str, Reranker],
    n: int,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    *,
    query: Ints | None = None,
    gallery: Ints | None = None,
    map_at: Sequence[tuple[int, Denominator]] = (),
    full_map: bool = False,
    macro: bool = False,
    reid: bool = False,
    camera_N: Ints | None = None,
) -> dict[str, dict[str, float]]:
    """The means of ``rank``'s scores, and ``ms_per_query`` beside them; arguments and errors as there."""
    ranked = rank(
        z_ND,
        labels_N,
        rerankers,
        n,
        recall_at,
        query=query,
        gallery=gallery,
        map_at=map_at,
        full_map=full_map,
        macro=macro,
        reid=reid,
        camera_N=camera_N,
    )
    return {name: ranked.means(name) | {"ms_per_query": ranked.ms_per_query[name]} for name in ranked.scores}


def rank(
    z_ND: Floats,
    labels_N: Labels,
    rerankers: Mapping[str, Reranker],
    n: int,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    *,
    query: Ints | None = None,
    gallery: Ints | None = None,
    map_at: Sequence[tuple[int, Denominator]] = (),
    full_map: bool = False,
    macro: bool = False,
    reid: bool = False,
    camera_N: Ints | None = None,
    curvature: float | None = None,
    device: torch.device | None = None,
    share: Callable[[int], slice] | None = None,
) -> Ranked:
    """The metrics of ``evaluate`` without re-ranking ('none') and with each reranker, in one search.

    ``curvature`` and ``device`` are as for ``retrieve``. Of so many queries those of a ``share`` are ranked, by default
    all; whoever ranks the others joins them (``Ranked.joined``), and finds what one call does, digit for digit.

    ``query`` and ``gallery`` are places in z; without them each item is both. A query that is in the gallery is left
    out of its own ranking; equally near items stand in ``tie_order``. A reranker is given places in z as well.
    ``ms_per_query`` is the wall time of the search for 'none', and what the reranker adds for the others.

    With ``camera_N`` a query's own class by its own camera is in none of its rankings, and a query whose class no
    other camera has is not asked. A camera below 0 is unknown.

    A ranking holds max(n, largest R_q, recall_at, map_at) items, if there are as many; the whole gallery with
    ``full_map`` or ``reid``, in parts of bounded memory. Raises ValueError for a reranker called 'none' and one that
    gives other items than it was given, and where cameras leave no query.
    """
    if "none" in rerankers:
        raise ValueError("a reranker cannot be called 'none': that is the ranking without one")
    z_ND, is_one_set = checked("gallery", z_ND), query is None and gallery is None
    gallery = np.arange(len(z_ND)) if gallery is None else gallery
    gallery = gallery[tie_order(len(gallery))]
    if query is None:
        query = gallery if is_one_set else np.arange(len(z_ND))
    place_N = np.full(len(z_ND), -1, np.int64)
    place_N[gallery] = np.arange(len(gallery))
    num_relevant_Q = count_relevant(labels_N[query], labels_N[gallery], place_N[query])
    same: SameCamera | None = None
    num_left_out: int | None = None
    if camera_N is not None:
        same = SameCamera.of(labels_N, camera_N, query, gallery)
        num_relevant_Q = num_relevant_Q - same.num_Q
        is_asked_Q = num_relevant_Q > 0
        num_left_out = int((~is_asked_Q).sum())
        if not is_asked_Q.any():
            raise ValueError("cameras: no query has a gallery item of its class by another camera")
        is_one_set = is_one_set and not num_left_out
        query, num_relevant_Q, same = query[is_asked_Q], num_relevant_Q[is_asked_Q], same.part(is_asked_Q)
    full_map = full_map or reid
    k = len(gallery) if full_map else max(n, num_ranks(num_relevant_Q, recall_at, map_at))
    depth = k if same is None else k + same.most
    own = slice(0, len(query)) if share is None else share(len(query))
    has_all = own == slice(0, len(query))
    query, num_relevant_Q = query[own], num_relevant_Q[own]
    same = None if same is None else same.part(own)
    parts = (
        in_itself(z_ND[gallery], depth, curvature=curvature, device=device)
        if is_one_set and has_all
        else in_gallery(z_ND[query], z_ND[gallery], depth, place_N[query], curvature=curvature, device=device)
    )
    names = ("none", *rerankers)
    scores = {
        name: Scores(labels_N[query], labels_N, num_relevant_Q, recall_at, map_at, full_map, macro, reid)
        for name in names
    }
    seconds = dict.fromkeys(names, 0.0)
    started = time.perf_counter()
    for row_Q, found_QK, _ in parts:
        index_QK = found_QK if same is None else same.left_out(row_Q, found_QK, k)
        first_QK = np.where(index_QK < 0, -1, gallery[index_QK])
        seconds["none"] += time.perf_counter() - started
        scores["none"].add(row_Q, first_QK)
        for name, reranker in rerankers.items():
            started = time.perf_counter()
            again_QK = reranker(query[row_Q], first_QK)
            seconds[name] += time.perf_counter() - started
            if not _same_items(first_QK, again_QK):
                raise ValueError(f"reranker {name!r} gave other items than those it was given")
            scores[name].add(row_Q, again_QK)
        started = time.perf_counter()
    times = {name: 1e3 * seconds[name] / max(1, len(query)) for name in names}
    return Ranked(scores, times, query, num_left_out)


def _same_items(first_QK: Ints, again_QK: Ints) -> bool:
    """True if each row still has its items; only the columns that differ are sorted, few of a long ranking."""
    if first_QK.shape != again_QK.shape:
        return False
    changed = np.flatnonzero((first_QK != again_QK).any(axis=0))
    return np.array_equal(np.sort(first_QK[:, changed], axis=1), np.sort(again_QK[:, changed], axis=1))


def _reordered(
    index_QK: Ints, n: int, width: int, measured: Callable[[slice, Ints], NDArray[np.floating]]
) -> Ints:
    if n < 1:
        raise ValueError(f"re-ranking of the first {n}: needs at least 1")
    is_none_QK = index_QK < 0
    if (index_QK < -1).any() or (is_none_QK[:, :-1] & ~is_none_QK[:, 1:]).any():
        raise ValueError("results hold a negative place: only -1 may be there, behind the last item of a row")
    n = min(n, index_QK.shape[1])
    reordered_QK = index_QK.copy()
    rows_at_once = max(1, _CELLS_PER_CHUNK // max(1, n * width))
    for start in range(0, len(index_QK), rows_at_once):
        beat()
        rows = slice(start, min(start + rows_at_once, len(index_QK)))
        first_Qn = index_QK[rows, :n]
        distance_Qn = measured(rows, np.maximum(first_Qn, 0))
        distance_Qn = np.where(is_none_QK[rows, :n], np.nan, distance_Qn)  # NaN is sorted behind all numbers
        order_Qn = np.argsort(distance_Qn, axis=1, kind="stable")
        reordered_QK[rows, :n] = np.take_along_axis(first_Qn, order_Qn, axis=1)
    return reordered_QK


def _check_weights(omega_QD: Floats, num_queries: int, dim: int) -> None:
    if omega_QD.shape != (num_queries, dim):
        raise ValueError(f"structure embeddings {omega_QD.shape}: each of {num_queries} queries needs {dim}")
    if not (omega_QD >= 0).all():
        raise ValueError("a structure embedding is negative or no number: its activation must be at least 0")


def _largest_squared_distances(z_ND: Floats) -> Floats:
    """max_j ||z_i - z_j||^2 of each item (1 where all are equal)."""
    half_N = (z_ND.astype(np.float64) ** 2).sum(axis=1).astype(np.float32)
    largest_N = np.empty(len(z_ND), np.float32)
    for start in range(0, len(z_ND), 1024):
        beat()
        rows = slice(start, start + 1024)
        least = np.full(len(half_N[rows]), -np.inf, np.float32)
        for column in range(0, len(z_ND), 8192):
            columns = slice(column, column + 8192)
            distance = half_N[rows, None] + half_N[None, columns] - 2 * (z_ND[rows] @ z_ND[columns].T)
            least = np.maximum(least, distance.max(axis=1))
        largest_N[rows] = least
    return np.where(largest_N > 0, largest_N, np.float32(1))


def _encodings(z_ND: Floats, near_NK: Ints, largest_N: Floats, k1: int) -> sparse.csr_array:
    """V before its mean over neighbours, one sparse row per item."""
    whole = _reciprocal(near_NK, k1)
    half = _reciprocal(near_NK, round(k1 / 2))
    members: list[Ints] = []
    for i in range(len(z_ND)):
        beat()
        own = whole[i]
        kept = [own]
        for j in own.tolist():
            other = half[j]
            if len(np.intersect1d(other, own, assume_unique=True)) > 2 / 3 * len(other):
                kept.append(other)
        members.append(np.unique(np.concatenate(kept)))
    count_N = np.array([len(member) for member in members])
    row_H, item_H = np.repeat(np.arange(len(z_ND)), count_N), np.concatenate(members)
    distance_H = np.empty(len(row_H))
    for start in range(0, len(row_H), 1 << 14):
        part = slice(start, start + (1 << 14))
        distance_H[part] = ((z_ND[row_H[part]] - z_ND[item_H[part]]) ** 2).sum(axis=1)
    value_H = np.exp(-distance_H / largest_N[row_H])
    value_H /= np.bincount(row_H, value_H)[row_H]
    return sparse.csr_array(
        (value_H, item_H, np.concatenate([[0], np.cumsum(count_N)])), shape=2 * (len(z_ND),)
    )


def _reciprocal(near_NK: Ints, k: int) -> list[Ints]:
    """R(i, k) of every item, ascending; the first k + 1 are used, because the item itself is the first."""
    near = near_NK[:, : k + 1]
    num_items, width = near.shape
    row_H, item_H = np.repeat(np.arange(num_items), width), near.ravel()
    forward = row_H * num_items + item_H
    mutual_H = np.sort(forward[np.isin(forward, item_H * num_items + row_H)])
    bounds = np.searchsorted(mutual_H // num_items, np.arange(1, num_items))
    return [part % num_items for part in np.split(mutual_H, bounds)]
