"""Rejection of the unknown: does a gallery know an item's class, by the score of its best match?

Classes are halved by fixed draws. Of the known half some items are in the gallery; all others are asked, known and
unknown alike. A query's score is the cosine with its nearest gallery item.

Shapes: N items, D embedding size, C classes, K known queries, U unknown ones.
"""

from __future__ import annotations

import statistics
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlstudy.metric_names import rate_name
from dmlstudy.retrieval.metrics import count_relevant, tie_order
from dmlstudy.retrieval.neighbours import Floats, Ints, in_gallery
from dmlstudy.retrieval.verification import is_measurable

HALVINGS = 5
FAR = (1e-1, 1e-2)
"""Shares of unknown queries that are let through, at most."""
TPR = 0.95
"""The share of known queries that are let through, at least."""


class Asked(NamedTuple):
    """The answers of one halving: best scores, and of known queries whether that item is of their class."""

    known_K: NDArray[np.float64]
    is_right_K: NDArray[np.bool_]
    unknown_U: NDArray[np.float64]


def open_set(
    z_ND: Floats, labels_N: Ints, query: Ints | None = None, gallery: Ints | None = None
) -> dict[str, float]:
    """The mean over five halvings of the classes.

    ``dir_at_far_1e-1``, ``dir_at_far_1e-2``  known queries whose nearest item is right and scores theta or more; theta
    lies just above the unknown score of which a share f of unknown ones lies above
    ``unknown_auroc``                         the chance that a known query scores above an unknown one; ties count half
    ``unknown_fpr_at_tpr_95``                 unknown queries let through where 95% of the known ones are

    Without ``query`` and ``gallery`` half of a known class's items, rounded up, are enrolled and the others asked. With
    them the gallery's items of known classes are enrolled and all queries asked; those whose class is not in it are
    unknown.

    Empty where a halving has no known query, no unknown one or no gallery; a rate f with f U < 10 in any is left out.
    """
    found = []
    for halving in range(HALVINGS):
        asked = _asked(z_ND, labels_N, query, gallery, halving)
        if asked is None or not len(asked.known_K) or not len(asked.unknown_U):
            return {}
        found.append(_scores(asked))
    return {
        name: statistics.fmean(each[name] for each in found)
        for name in found[0]
        if all(name in f for f in found)
    }


def halved(labels_N: Ints, halving: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Of each item whether its class is known, and whether it is among the first half of its class, rounded up.

    Drawn by the number of the halving and the labels alone, so all models are asked the same.
    """
    generator = np.random.default_rng([halving, 0x0D15])
    unit_C, class_N, size_C = np.unique(labels_N, return_inverse=True, return_counts=True)
    is_known_C = np.zeros(len(unit_C), bool)
    is_known_C[generator.permutation(len(unit_C))[: -(-len(unit_C) // 2)]] = True
    order_N = np.lexsort((generator.permutation(len(labels_N)), class_N))
    rank_N = np.empty(len(labels_N), np.int64)
    rank_N[order_N] = np.arange(len(labels_N)) - (np.cumsum(size_C) - size_C)[class_N[order_N]]
    return is_known_C[class_N], rank_N < -(-size_C // 2)[class_N]


def _asked(
    z_ND: Floats, labels_N: Ints, query: Ints | None, gallery: Ints | None, halving: int
) -> Asked | None:
    is_known_N, is_first_N = halved(labels_N, halving)
    everything = np.arange(len(z_ND))
    if query is None and gallery is None:
        enrolled, asked = everything[is_known_N & is_first_N], everything[~(is_known_N & is_first_N)]
    else:
        gallery = everything if gallery is None else gallery
        enrolled, asked = gallery[is_known_N[gallery]], everything if query is None else query
    place_N = np.full(len(z_ND), -1, np.int64)
    enrolled = enrolled[tie_order(len(enrolled))]
    place_N[enrolled] = np.arange(len(enrolled))
    self_index = place_N[asked]
    # The known part of a gallery may hold nothing, or nothing but the query itself.
    if len(enrolled) <= (self_index >= 0).any():
        return None
    near = list(in_gallery(z_ND[asked], z_ND[enrolled], 1, self_index)) if len(asked) else []
    if not near:
        return None
    item_A = enrolled[np.concatenate([part.index_QK[:, 0] for part in near])]
    score_A = 1 - np.concatenate([part.distance_QK[:, 0] for part in near]).astype(np.float64) ** 2 / 2
    is_known_A = count_relevant(labels_N[asked], labels_N[enrolled], self_index) > 0
    is_right_A = labels_N[item_A] == labels_N[asked]
    return Asked(score_A[is_known_A], is_right_A[is_known_A], score_A[~is_known_A])


def _scores(asked: Asked) -> dict[str, float]:
    known_K, is_right_K, unknown_U = asked
    rising_U = np.sort(unknown_U)
    below_K = np.searchsorted(rising_U, known_K, "left")
    not_above_K = np.searchsorted(rising_U, known_K, "right")
    kept = np.sort(known_K)[len(known_K) - -(-int(95 * len(known_K)) // 100)]
    found = {
        "unknown_auroc": float((below_K + not_above_K).mean()) / 2 / len(unknown_U),
        "unknown_fpr_at_tpr_95": float((unknown_U >= kept).mean()),
    }
    for rate in FAR:
        if is_measurable(rate, len(unknown_U)):
            allowed = int(Fraction(repr(rate)) * len(unknown_U))
            beyond = rising_U[len(unknown_U) - 1 - allowed]
            found[f"dir_at_far_{rate_name(rate)}"] = float((is_right_K & (known_K > beyond)).mean())
    return found
