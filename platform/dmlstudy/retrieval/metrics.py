"""Retrieval metrics: pure functions of ranked labels, one value per query.

rel_q(k) = 1 if the k-th result has the query's label; R_q = number of relevant items in the gallery;
P_q(k) = (1/k) sum_{i<=k} rel_q(i). A query with R_q = 0 counts as 0. The reported metric is the mean over
queries (micro), or where so named the unweighted mean over the classes of their queries' means (macro).

Labels are int64, one per item; or label sets, packed by ``pack_labels`` to bytes, of which two are relevant to
each other if they share a label.

Shapes: Q queries, M gallery items, K ranks, N items of a set that is both query
and gallery, D embedding size, L labels, P bytes of a packed label set (P absent: one label).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from dmlstudy.retrieval.neighbours import Floats, Ints, checked, in_gallery, in_itself

Values: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64] | NDArray[np.uint8]
Denominator: TypeAlias = Literal["found", "relevant", "reachable"]

_CELLS_PER_CHUNK = 1 << 24  # label sets compared at once

CMC_AT = (1, 5, 10)
"""Ranks at which papers on re-identification report the cumulative matching characteristic."""


def pack_labels(has_NL: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Label sets (does item n have label l?) as packed bytes, of shape (N, ceil(L / 8))."""
    return np.packbits(np.asarray(has_NL, dtype=bool), axis=1)


def count_relevant(label_Q: Labels, label_M: Labels, self_index: Ints | None = None) -> Ints:
    """R_q: how many gallery items are relevant to each query, itself (at ``self_index``, or -1) left out."""
    _check_labels(label_Q, label_M)
    if label_Q.ndim == 1:
        class_C, size_C = np.unique(label_M, return_counts=True)
        place_Q = np.minimum(np.searchsorted(class_C, label_Q), len(class_C) - 1)
        count_Q = np.where(class_C[place_Q] == label_Q, size_C[place_Q], 0)
    else:
        count_Q = np.zeros(len(label_Q), np.int64)
        rows_at_once = max(1, _CELLS_PER_CHUNK // max(1, label_M.size))
        for start in range(0, len(label_Q), rows_at_once):
            part_QP = label_Q[start : start + rows_at_once]
            count_Q[start : start + rows_at_once] = _relevance(label_M[None], part_QP).sum(axis=1)
    if self_index is None:
        return count_Q.astype(np.int64)
    in_gallery_Q = self_index >= 0
    of_self_Q1 = _relevance(label_M[np.maximum(self_index, 0)][:, None], label_Q)
    return (count_Q - (of_self_Q1[:, 0] & in_gallery_Q)).astype(np.int64)


def recall_at_k(ranked_QK: Labels, label_Q: Labels, k: int) -> Values:
    """R@k of each query = [any rel_q(i) = 1, i <= k]; k beyond the ranking means the whole ranking."""
    return _Hits.of(ranked_QK, label_Q).recall_at(k)


def r_precision(ranked_QK: Labels, label_Q: Labels, num_relevant_Q: Ints) -> Values:
    """R-precision of each query = P_q(R_q); NASA's P@N.

    Raises ValueError if the ranking is shorter than the largest R_q.
    """
    return _Hits.of(ranked_QK, label_Q).r_precision(num_relevant_Q)


def map_at_r(ranked_QK: Labels, label_Q: Labels, num_relevant_Q: Ints) -> Values:
    """MAP@R of each query = (1/R_q) sum_{k<=R_q} P_q(k) rel_q(k); never above R-precision.

    Raises ValueError if the ranking is shorter than the largest R_q.
    """
    return _Hits.of(ranked_QK, label_Q).map_at_r(num_relevant_Q)


def mean_average_precision(ranked_QK: Labels, label_Q: Labels, num_relevant_Q: Ints) -> Values:
    """AP of each query over a full ranking = (1/R_q) sum_k P_q(k) rel_q(k).

    Raises ValueError if the ranking leaves out a relevant item, for then it is not full.
    """
    return _Hits.of(ranked_QK, label_Q).map(num_relevant_Q)


def inverse_negative_penalty(ranked_QK: Labels, label_Q: Labels, num_relevant_Q: Ints) -> Values:
    """INP of each query over a full ranking = R_q / (rank of its last relevant item); 0 of a query with R_q = 0.

    Its mean is mINP (Ye et al. 2021, Eq. 1): 1 if every match stands before all else, low if one is hard to find.
    Raises ValueError if the ranking leaves out a relevant item.
    """
    return _Hits.of(ranked_QK, label_Q).inverse_negative_penalty(num_relevant_Q)


def map_at_k(
    ranked_QK: Labels, label_Q: Labels, num_relevant_Q: Ints, k: int, denominator: Denominator
) -> Values:
    """MAP@k of each query = (1/N_q) sum_{i<=k} P_q(i) rel_q(i), 0 without a hit; the denominator has a name.

    'found': N_q = the relevant items among the first k (GreedyHash, SSDH, DeepHash; never below the others);
    'relevant': N_q = R_q; 'reachable': N_q = min(R_q, k). To drop queries without a hit (TBH), take the mean over
    ``recall_at_k(...) > 0``. k beyond the gallery means the whole gallery.

    Raises ValueError for k < 1, an unknown name, and a ranking shorter than k that leaves out a relevant item.
    """
    return _Hits.of(ranked_QK, label_Q).map_at(k, denominator, num_relevant_Q)


class _Hits(NamedTuple):
    """The relevant items of some rankings, query by query: all that any metric needs. H hits."""

    row_H: Ints
    place_H: Ints
    """From 0."""
    precision_H: Values
    """P_q at the hit: its number among its query's hits over its rank."""
    num_queries: int
    num_ranks: int

    @classmethod
    def of(cls, ranked_QK: Labels, label_Q: Labels) -> Self:
        row_H, place_H = np.nonzero(_relevance(ranked_QK, label_Q))
        num_queries, num_ranks = ranked_QK.shape[:2]
        first_Q = np.searchsorted(row_H, np.arange(num_queries))
        number_H = np.arange(1, len(row_H) + 1) - first_Q[row_H]
        return cls(row_H, place_H, number_H / (place_H + 1), num_queries, num_ranks)

    def recall_at(self, k: int) -> Values:
        if k < 1:
            raise ValueError(f"recall at {k}: k must be at least 1")
        return np.asarray(self._count(self.place_H < k) > 0, dtype=np.float64)

    def r_precision(self, num_relevant_Q: Ints) -> Values:
        return self._count(self._is_within_r(num_relevant_Q)) / np.maximum(num_relevant_Q, 1)

    def map_at_r(self, num_relevant_Q: Ints) -> Values:
        return self._precisions(self._is_within_r(num_relevant_Q)) / np.maximum(num_relevant_Q, 1)

    def map(self, num_relevant_Q: Ints) -> Values:
        self._check_full("mean average precision", num_relevant_Q)
        return self._precisions(self.place_H >= 0) / np.maximum(num_relevant_Q, 1)

    def inverse_negative_penalty(self, num_relevant_Q: Ints) -> Values:
        self._check_full("the inverse negative penalty", num_relevant_Q)
        last_Q = np.ones(self.num_queries)
        np.maximum.at(last_Q, self.row_H, self.place_H + 1.0)
        return np.asarray(num_relevant_Q / last_Q, dtype=np.float64)

    def _check_full(self, metric: str, num_relevant_Q: Ints) -> None:
        if (self._count(self.place_H >= 0) != num_relevant_Q).any():
            raise ValueError(f"{metric} needs the full ranking: a relevant item is not in it")

    def map_at(self, k: int, denominator: Denominator, num_relevant_Q: Ints) -> Values:
        if k < 1:
            raise ValueError(f"MAP@{k}: k must be at least 1")
        is_found_H = self.place_H < k
        num_found_Q = self._count(is_found_H)
        if self.num_ranks < k and (num_found_Q != num_relevant_Q).any():
            raise ValueError(f"MAP@{k}: the ranking holds {self.num_ranks}; retrieve more")
        if denominator == "found":
            among_Q = num_found_Q
        elif denominator == "relevant":
            among_Q = num_relevant_Q
        elif denominator == "reachable":
            among_Q = np.minimum(num_relevant_Q, k)
        else:
            raise ValueError(f"denominator {denominator!r}: choose from {', '.join(get_args(Denominator))}")
        return self._precisions(is_found_H) / np.maximum(among_Q, 1)

    def _is_within_r(self, num_relevant_Q: Ints) -> NDArray[np.bool_]:
        largest = int(num_relevant_Q.max(initial=0))
        if self.num_ranks < largest:
            raise ValueError(
                f"a query has {largest} relevant items, the ranking holds {self.num_ranks}; retrieve more"
            )
        return np.asarray(self.place_H < num_relevant_Q[self.row_H])

    def _count(self, of_H: NDArray[np.bool_]) -> Ints:
        return np.asarray(np.bincount(self.row_H[of_H], minlength=self.num_queries), dtype=np.int64)

    def _precisions(self, of_H: NDArray[np.bool_]) -> Values:
        """Each query's sum of P_q(k) rel_q(k) over some of its hits."""
        found_Q = np.bincount(self.row_H[of_H], self.precision_H[of_H], self.num_queries)
        return np.asarray(found_Q, dtype=np.float64)


def micro_mean(value_Q: Values, keep_Q: NDArray[np.bool_] | None = None) -> float:
    """The mean over queries, or over those to keep; 0 over none."""
    kept_Q = value_Q if keep_Q is None else value_Q[keep_Q]
    return float(kept_Q.mean()) if len(kept_Q) else 0.0


def macro_mean(value_Q: Values, label_Q: Labels, keep_Q: NDArray[np.bool_] | None = None) -> float:
    """The unweighted mean over classes of the means of their queries, or of those to keep; 0 over none.

    Raises ValueError for label sets: their classes overlap.
    """
    if label_Q.ndim != 1:
        raise ValueError("a macro mean needs one label per query; label sets have only the micro mean")
    keep_Q = np.ones(len(value_Q), bool) if keep_Q is None else keep_Q
    if not keep_Q.any():
        return 0.0
    _, class_Q, size_C = np.unique(label_Q[keep_Q], return_inverse=True, return_counts=True)
    return float((np.bincount(class_Q, value_Q[keep_Q]) / size_C).mean())


def _check_labels(*labels: Labels) -> None:
    # float32 would merge ids beyond 2^24
    for label_N in labels:
        if not np.issubdtype(label_N.dtype, np.integer):
            raise ValueError(f"labels of type {label_N.dtype}: pass integers, or sets by pack_labels")
    if len({label_N.ndim for label_N in labels}) > 1:
        raise ValueError("queries and gallery must both have one label each, or both have label sets")


def _relevance(ranked_QK: Labels, label_Q: Labels) -> NDArray[np.bool_]:
    _check_labels(ranked_QK, label_Q[:, None])
    if label_Q.ndim == 1:
        return np.asarray(ranked_QK == label_Q[:, None])
    return np.asarray((ranked_QK & label_Q[:, None]).any(axis=-1))


def tie_order(num_items: int) -> Ints:
    """The order in which equally near items stand: random, and always the same for as many items.

    Data often lie sorted by class. Where a collapsed model makes items equal, their own order would otherwise count
    as a ranking: of ten classes of one size, with all items equal, it has a full MAP of 0.21, not of 0.10.
    """
    return np.random.default_rng(num_items).permutation(num_items)


def evaluate(
    z_ND: Floats,
    labels_N: Labels,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    *,
    map_at: Sequence[tuple[int, Denominator]] = (),
    full_map: bool = False,
    macro: bool = False,
    curvature: float | None = None,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Score a set that is both query and gallery, each query left out of its own ranking.

    Returns ``recall_at_<k>`` for each k (clamped to the gallery), ``r_precision``, ``map_at_r`` and
    ``num_queries_without_positive``: the queries alone in their class, which count as 0. On request also
    ``map_at_<k>_of_<denominator>``, ``map`` (of the whole ranking: Q x M sorted) and all of them once more as
    ``macro_<metric>``.

    Equally near items stand in ``tie_order``; ``curvature`` and ``device`` are as for ``retrieve``. Raises ValueError
    for fewer than 2 items, and for embeddings that are not finite.
    """
    if len(labels_N) != len(z_ND) or len(z_ND) < 2:
        raise ValueError(f"{len(z_ND)} embeddings, {len(labels_N)} labels: needs as many, and at least 2")
    order_N = tie_order(len(z_ND))
    z_ND, labels_N = checked("gallery", z_ND)[order_N], labels_N[order_N]
    num_relevant_N = count_relevant(labels_N, labels_N, np.arange(len(z_ND)))
    k = len(z_ND) if full_map else num_ranks(num_relevant_N, recall_at, map_at)
    parts = in_itself(z_ND, k, curvature=curvature, device=device)
    rankings = ((part.row_Q, part.index_QK) for part in parts)
    return score(rankings, labels_N, labels_N, num_relevant_N, recall_at, map_at, full_map, macro)


def gallery_scores(
    query_QD: Floats,
    label_Q: Labels,
    gallery_MD: Floats,
    label_M: Labels,
    recall_at: Sequence[int] = (1, 10, 20, 30),
    *,
    self_index: Ints | None = None,
    map_at: Sequence[tuple[int, Denominator]] = (),
    full_map: bool = False,
    macro: bool = False,
    curvature: float | None = None,
    device: torch.device | None = None,
) -> Scores:
    """Score queries against a separate gallery (In-Shop); ``means()`` of what it returns has the keys of ``evaluate``.

    ``self_index`` is as for ``retrieve``: where a query is in the gallery too. The rest is as for ``evaluate``. Raises
    ValueError for unequal numbers of embeddings and labels, no queries, and embeddings that are not finite.
    """
    for side, z, labels in (("queries", query_QD, label_Q), ("gallery items", gallery_MD, label_M)):
        if len(z) != len(labels) or len(z) == 0:
            raise ValueError(f"{len(z)} {side}, {len(labels)} labels: needs as many, and at least 1")
    num_relevant_Q = count_relevant(label_Q, label_M, self_index)
    k = len(gallery_MD) if full_map else num_ranks(num_relevant_Q, recall_at, map_at)
    order_M = tie_order(len(gallery_MD))
    if self_index is not None:
        self_index = np.where(self_index >= 0, np.argsort(order_M)[self_index], -1)
    gallery_MD = checked("gallery", gallery_MD)[order_M]
    parts = in_gallery(query_QD, gallery_MD, k, self_index, curvature=curvature, device=device)
    scores = Scores(label_Q, label_M[order_M], num_relevant_Q, recall_at, map_at, full_map, macro)
    for part in parts:
        scores.add(part.row_Q, part.index_QK)
    return scores


def score(
    rankings: Iterable[tuple[Ints, Ints]],
    label_Q: Labels,
    label_M: Labels,
    num_relevant_Q: Ints,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    map_at: Sequence[tuple[int, Denominator]] = (),
    full_map: bool = False,
    macro: bool = False,
) -> dict[str, float]:
    """The metrics of ``evaluate`` for rankings made elsewhere, as parts (row_Q, index_QK), rows ascending.

    A -1 stands for no item, and is relevant to nothing. Raises ValueError for a ranking too short for a metric.
    """
    scores = Scores(label_Q, label_M, num_relevant_Q, recall_at, map_at, full_map, macro)
    for row_Q, index_QK in rankings:
        scores.add(row_Q, index_QK)
    return scores.means()


class UnitSums(NamedTuple):
    """Sums of metrics over the queries of each unit, a class or a single query; units ascending, U of them."""

    unit_U: Ints
    count_U: Ints
    """Queries of the unit."""
    sums: dict[str, Values]
    """Sums of shape (U,) by metric; over the count that is the unit's mean."""


class Scores:
    """The metrics of ``evaluate``, of rankings that come part by part; arguments as of ``score``.

    With ``reid``, which needs whole rankings, there are ``map``, ``cmc_at_<k>`` for ``CMC_AT`` and ``minp`` as well.
    """

    def __init__(
        self,
        label_Q: Labels,
        label_M: Labels,
        num_relevant_Q: Ints,
        recall_at: Sequence[int] = (1, 2, 4, 8),
        map_at: Sequence[tuple[int, Denominator]] = (),
        full_map: bool = False,
        macro: bool = False,
        reid: bool = False,
    ) -> None:
        self._label_Q, self._label_M, self._num_relevant_Q = label_Q, label_M, num_relevant_Q
        self._recall_at, self._map_at, self._macro = recall_at, map_at, macro
        self._full_map, self._reid = full_map or reid, reid
        self._parts: list[dict[str, Values]] = []

    @classmethod
    def joined(cls, of_shares: Sequence[Scores]) -> Scores:
        """The scores of consecutive queries, asked the same metrics, as one."""
        first = of_shares[0]
        label_Q = np.concatenate([each._label_Q for each in of_shares])
        num_relevant_Q = np.concatenate([each._num_relevant_Q for each in of_shares])
        asked = first._recall_at, first._map_at, first._full_map, first._macro, first._reid
        whole = cls(label_Q, first._label_M, num_relevant_Q, *asked)
        whole._parts = [part for each in of_shares for part in each._parts]
        return whole

    def add(self, row_Q: Ints, index_QK: Ints) -> None:
        """The next part, rows ascending. Raises ValueError for a ranking too short for a metric."""
        ranked_QK, label_Q = self._label_M[index_QK], self._label_Q[row_Q]
        row, rank = np.nonzero(index_QK < 0)
        ranked_QK[row, rank] = ~label_Q[row]  # equal to no label of the query's, and shares none with its set
        num_relevant_Q = self._num_relevant_Q[row_Q]
        hits = _Hits.of(ranked_QK, label_Q)
        values = {f"recall_at_{n}": hits.recall_at(n) for n in self._recall_at}
        values["map_at_r"] = hits.map_at_r(num_relevant_Q)
        values["r_precision"] = hits.r_precision(num_relevant_Q)
        for n, denominator in self._map_at:
            values[f"map_at_{n}_of_{denominator}"] = hits.map_at(n, denominator, num_relevant_Q)
        if self._full_map:
            values["map"] = hits.map(num_relevant_Q)
        if self._reid:
            values |= {f"cmc_at_{n}": hits.recall_at(n) for n in CMC_AT}
            values["minp"] = hits.inverse_negative_penalty(num_relevant_Q)
        self._parts.append(values)

    def means(self) -> dict[str, float]:
        """Each metric's mean over all queries."""
        all_values = self._values()
        means = {key: micro_mean(value_Q) for key, value_Q in all_values.items()}
        if self._macro:
            each = {key: macro_mean(value_Q, self._label_Q) for key, value_Q in all_values.items()}
            means |= {f"macro_{key}": mean for key, mean in each.items()}
        return means | {"num_queries_without_positive": float((self._num_relevant_Q == 0).sum())}

    def sums(self, unit_Q: Ints) -> UnitSums:
        """Each metric's sums over the queries of each unit; ``unit_Q`` says which unit a query is of."""
        unit_U, place_Q, count_U = np.unique(unit_Q, return_inverse=True, return_counts=True)
        sums = {
            key: np.bincount(place_Q, value_Q, len(unit_U)).astype(np.float64)
            for key, value_Q in self._values().items()
        }
        return UnitSums(unit_U.astype(np.int64), count_U.astype(np.int64), sums)

    def _values(self) -> dict[str, Values]:
        return {key: np.concatenate([part[key] for part in self._parts]) for key in self._parts[0]}


def num_ranks(
    num_relevant_Q: Ints, recall_at: Sequence[int], map_at: Sequence[tuple[int, Denominator]] = ()
) -> int:
    """The length of ranking that these metrics need, MAP@R and R-precision with them."""
    return max(1, int(num_relevant_Q.max()), *recall_at, *(n for n, _ in map_at))
