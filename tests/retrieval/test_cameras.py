"""Cameras in rankings, CMC@k, re-identification's mAP and mINP, beside plain loops of float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dmlstudy import retrieval
from dmlstudy.retrieval import neighbours
from dmlstudy.retrieval.cameras import SameCamera

RNG = np.random.default_rng(0)
N = 160
LABELS_N = RNG.integers(0, 14, N)
LABELS_N[:20] = 0  # distractors, in the gallery alone
CAMERA_N = RNG.integers(0, 4, N)
CAMERA_N[::17] = -1
CAMERA_N[LABELS_N == 5] = 2  # no query of this class has a hit
Z_ND = (RNG.normal(size=(14, 6))[LABELS_N] + 1.2 * RNG.normal(size=(N, 6))).astype(np.float32)
Z_ND[30:34] = Z_ND[29]

ROLES: dict[str, tuple[Any, Any]] = {
    "one set": (None, None),
    "query and gallery": (np.arange(100, 160), np.arange(0, 100)),
    "some in both": (np.arange(60, 140), np.arange(0, 110)),
}


def plain(query: Any, gallery: Any, cameras: Any) -> dict[str, list[float]]:
    """Market-1501's evaluation: all distances of a query sorted, its class by its camera removed, then counted."""
    query = range(N) if query is None else query
    gallery = retrieval_order(range(N) if gallery is None else gallery)
    found: dict[str, list[float]] = {
        key: [] for key in ("cmc1", "cmc5", "cmc10", "map", "minp", "r1", "mapr")
    }
    for q in query:
        distances = [(math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(Z_ND[q], Z_ND[g], strict=True))), place)
                     for place, g in enumerate(gallery)]  # fmt: skip
        ranked = [gallery[place] for _, place in sorted(distances)]
        ranked = [
            g
            for g in ranked
            if g != q and not (cameras and LABELS_N[g] == LABELS_N[q] and CAMERA_N[g] == CAMERA_N[q] >= 0)
        ]
        hits = [rank for rank, g in enumerate(ranked, 1) if LABELS_N[g] == LABELS_N[q]]
        if cameras and not hits:
            continue  # as "this query has no valid gallery image" has it
        for k in (1, 5, 10):
            found[f"cmc{k}"].append(float(any(rank <= k for rank in hits)))
        found["map"].append(sum(n / rank for n, rank in enumerate(hits, 1)) / max(1, len(hits)))
        found["minp"].append(len(hits) / hits[-1] if hits else 0.0)
        within = [(n, rank) for n, rank in enumerate(hits, 1) if rank <= len(hits)]
        found["mapr"].append(sum(n / rank for n, rank in within) / max(1, len(hits)))
        found["r1"].append(float(bool(hits) and hits[0] <= 1))
    return found


def retrieval_order(gallery: Any) -> list[int]:
    gallery = list(gallery)
    return [gallery[place] for place in retrieval.tie_order(len(gallery))]


@pytest.mark.parametrize("small", [2048, 20])
@pytest.mark.parametrize("cameras", [True, False])
@pytest.mark.parametrize("roles", ROLES)
def test_metrics_are_those_of_plain_loops(
    roles: str, cameras: bool, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_SMALL_GALLERY", small)
    monkeypatch.setattr(neighbours, "_FEWEST_SAMPLED", small // 2)
    query, gallery = ROLES[roles]
    expected = {name: sum(values) / len(values) for name, values in plain(query, gallery, cameras).items()}
    asked: dict[str, Any] = {"query": query, "gallery": gallery, "camera_N": CAMERA_N if cameras else None}
    found = retrieval.compare(Z_ND, LABELS_N, {}, 1, (1,), reid=True, **asked)["none"]
    for name, own in [("cmc_at_1", "cmc1"), ("cmc_at_5", "cmc5"), ("cmc_at_10", "cmc10"), ("map", "map"),
                      ("minp", "minp"), ("recall_at_1", "r1"), ("map_at_r", "mapr")]:  # fmt: skip
        assert found[name] == pytest.approx(expected[own], abs=1e-12), name
    short = retrieval.compare(Z_ND, LABELS_N, {}, 1, (1,), **asked)["none"]
    assert short["map_at_r"] == found["map_at_r"]  # of rankings that are cut
    num_asked = len(plain(query, gallery, cameras)["map"])
    left_out = (N if query is None else len(query)) - num_asked
    assert found.get("num_queries_left_out") == (float(left_out) if cameras else None)
    if cameras and roles != "query and gallery":
        assert left_out > 0


@pytest.mark.parametrize("roles", ROLES)
def test_shares_of_queries_joined_are_the_whole(roles: str) -> None:
    query, gallery = ROLES[roles]
    how: dict[str, Any] = {
        "query": query,
        "gallery": gallery,
        "camera_N": CAMERA_N,
        "reid": True,
        "macro": True,
    }
    whole = retrieval.rank(Z_ND, LABELS_N, {}, 1, **how)
    for world in (2, 3):
        shares = [
            retrieval.rank(
                Z_ND,
                LABELS_N,
                {},
                1,
                share=lambda num, rank=rank, world=world: slice(
                    rank * num // world, (rank + 1) * num // world
                ),
                **how,
            )
            for rank in range(world)
        ]
        joined = retrieval.Ranked.joined(shares)
        assert joined.means() == whole.means()
        np.testing.assert_array_equal(joined.query_Q, whole.query_Q)
        for own, other in zip(
            joined.scores["none"].sums(LABELS_N[joined.query_Q]),
            whole.scores["none"].sums(LABELS_N[whole.query_Q]),
            strict=True,
        ):
            np.testing.assert_equal(own, other)


def test_without_known_cameras_nothing_changes() -> None:
    none_N = np.full(N, -1)
    plain_scores = retrieval.compare(Z_ND, LABELS_N + 100, {}, 1, full_map=True)["none"]
    found = retrieval.compare(Z_ND, LABELS_N + 100, {}, 1, full_map=True, camera_N=none_N)["none"]
    assert found.pop("num_queries_left_out") == 0
    times = "ms_per_query"
    assert {k: v for k, v in found.items() if k != times} == {
        k: v for k, v in plain_scores.items() if k != times
    }


def test_reranking_sees_what_is_left_and_keeps_it() -> None:
    encodings = retrieval.KReciprocal(Z_ND, 6, 2)
    seen: list[np.ndarray] = []

    def reranker(row_Q: np.ndarray, index_QK: np.ndarray) -> np.ndarray:
        seen.append(index_QK)
        is_own = (LABELS_N[index_QK] == LABELS_N[row_Q][:, None]) & (
            CAMERA_N[index_QK] == CAMERA_N[row_Q][:, None]
        )
        is_own &= (CAMERA_N[row_Q] >= 0)[:, None] & (index_QK >= 0)
        assert not is_own.any()
        return encodings.order(row_Q, index_QK, 12)

    found = retrieval.compare(Z_ND, LABELS_N, {"again": reranker}, 12, camera_N=CAMERA_N, reid=True)
    assert seen
    assert found["again"]["num_queries_left_out"] == found["none"]["num_queries_left_out"]
    assert found["again"]["minp"] > 0


def test_queries_and_groups_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="no query has a gallery item of its class by another camera"):
        retrieval.compare(Z_ND, LABELS_N, {}, 1, camera_N=np.zeros(N, np.int64))
    with pytest.raises(ValueError, match="3 cameras for 160 labels"):
        retrieval.compare(Z_ND, LABELS_N, {}, 1, camera_N=np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="label sets have no identity"):
        SameCamera.of(np.zeros((4, 1), np.uint8), np.zeros(4, np.int64), np.arange(2), np.arange(4))


def test_inverse_negative_penalty_of_three_queries() -> None:
    ranked_QK = np.array([[1, 0, 1, 0], [2, 2, 0, 0], [0, 0, 0, 0]])
    label_Q, num_Q = np.array([1, 2, 3]), np.array([2, 2, 0])
    assert retrieval.inverse_negative_penalty(ranked_QK, label_Q, num_Q).tolist() == [2 / 3, 1.0, 0.0]
    with pytest.raises(ValueError, match="the inverse negative penalty needs the full ranking"):
        retrieval.inverse_negative_penalty(ranked_QK, label_Q, num_Q + 1)


def test_hits_by_another_camera_are_counted_from_labels_alone() -> None:
    for query, gallery in ROLES.values():
        asked = range(N) if query is None else query
        items = list(range(N) if gallery is None else gallery)
        expected = [
            sum(
                g != q and LABELS_N[g] == LABELS_N[q] and not (CAMERA_N[g] == CAMERA_N[q] >= 0) for g in items
            )
            for q in asked
        ]
        found_Q = retrieval.num_relevant_elsewhere(LABELS_N, CAMERA_N, query, gallery)
        assert found_Q.tolist() == expected
