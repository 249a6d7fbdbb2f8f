"""Scores of retrieval whose queries the ranks share: those of one process, to the last digit."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from support.gloo_pool import GlooPool
from support.verdict_trials import verdict_trial

from dmlstudy import distributed, retrieval
from dmlstudy.records import LossConfig, RetrievalConfig, TrialConfig
from dmlstudy.training.retrieval_scores import Embedded, retrieval_scores
from dmlstudy.training.scores import Scored
from dmlstudy.training.short_vectors import short_vector_scores

pytestmark = pytest.mark.timeout(300)

RNG = np.random.default_rng(0)
DIM = 8


def unit(z_ND: np.ndarray) -> np.ndarray:
    return (z_ND / np.linalg.norm(z_ND, axis=1, keepdims=True)).astype(np.float32)


LABELS_N = np.repeat(np.arange(19), 10)
Z_ND = unit(RNG.normal(size=(190, DIM)) + 2 * RNG.normal(size=(19, DIM))[LABELS_N])
Z_ND[40:44] = Z_ND[39]
CAMERA_N = np.where(LABELS_N % 7 == 6, 1, np.arange(190) % 3)  # some classes are by one camera alone
OMEGA_ND = RNG.uniform(0.5, 1.5, Z_ND.shape).astype(np.float32)
IN_BALL_ND = (Z_ND * RNG.uniform(0.1, 0.9, (190, 1))).astype(np.float32)

QUERIES = {
    "one set": (None, None),
    "queries and a gallery": (np.arange(0, 131, 2), np.arange(1, 190, 2)),
    "some queries in the gallery": (np.arange(0, 90), np.arange(60, 190)),
    "fewer queries than ranks": (np.array([15]), np.arange(18, 190)),
}


def config(**changes: Any) -> TrialConfig:
    plain = verdict_trial("red").model_dump()
    return TrialConfig.model_validate(
        plain
        | {"embedder": plain["embedder"] | {"dim": DIM}, "recall_at": (1, 4), "map_at": (5,)}
        | {"macro": True}
        | changes
    )


HOW: dict[str, tuple[Embedded, TrialConfig]] = {
    "plain": (Embedded(Z_ND), config()),
    "whole rankings": (Embedded(Z_ND), config(full_map=True)),
    "verification": (Embedded(Z_ND), config(verification=True, fmr=1e-2)),
    "cameras": (Embedded(Z_ND), config(reid=True)),
    "in a ball": (Embedded(IN_BALL_ND), config(embedder={"dim": DIM, "space": "ball"})),
    "short vectors": (Embedded(Z_ND), config(short_vectors=(4,))),
    "structure": (
        Embedded(Z_ND, OMEGA_ND),
        config(
            retrieval=RetrievalConfig(rerank="structure", first=6).model_dump(),
            regularizer=LossConfig(name="structure").model_dump(),
        ),
    ),
    "k-reciprocal": (
        Embedded(Z_ND),
        config(retrieval=RetrievalConfig(rerank="k_reciprocal", first=12, k1=6, k2=3).model_dump()),
    ),
}


def scored(how: str, queries: str, small_gallery: int) -> tuple[Scored, Scored, int]:
    """What this rank is told, and the queries that it ranked itself."""
    module = sys.modules["dmlstudy.retrieval.neighbours"]
    before, module._SMALL_GALLERY = module._SMALL_GALLERY, small_gallery
    num_ranked, whole = 0, retrieval.rank

    def counted(*args: Any, **kwargs: Any) -> retrieval.Ranked:
        nonlocal num_ranked
        ranked = whole(*args, **kwargs)
        num_ranked += len(ranked.query_Q)
        return ranked

    retrieval.rank = counted
    try:
        embedded, own = HOW[how]
        rest = LABELS_N, *QUERIES[queries], own
        camera_N = CAMERA_N if how == "cameras" else None
        plain = retrieval_scores(embedded, *rest, camera_N=camera_N, by_class=True)
        return without_times(plain), short_vector_scores(embedded.z_ND, *rest, camera_N=camera_N), num_ranked
    finally:
        retrieval.rank, module._SMALL_GALLERY = whole, before


def without_times(found: Scored) -> Scored:
    assert all(value > 0 for name, value in found.metrics.items() if name.endswith("ms_per_query"))
    metrics = {name: value for name, value in found.metrics.items() if not name.endswith("ms_per_query")}
    return found._replace(metrics=metrics)


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("how", HOW)
def test_every_rank_has_the_scores_of_one_process(pool: GlooPool, how: str, queries: str) -> None:
    small = 50 if how == "plain" else 2048
    *expected, num_queries = scored(how, queries, small)
    for world_size in (2, 3):
        found = pool.run(world_size, scored, how, queries, small)
        assert [list(told) for *told, _ in found] == [expected] * world_size
        of_ranks = [num for *_, num in found]
        num_forms = 6 if how == "short vectors" else 1
        assert sum(of_ranks) == num_queries
        assert max(of_ranks) - min(of_ranks) <= num_forms


def told_to_each(failing: int | None) -> Any:
    rank = distributed.rank()

    def compute() -> tuple[int, float]:
        if rank == failing:
            raise MemoryError("no room")
        return rank, 1 / 3

    try:
        return distributed.computed_by_each(compute)
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def test_each_ranks_result_is_told_to_all(pool: GlooPool) -> None:
    assert pool.run(3, told_to_each, None) == [[(0, 1 / 3), (1, 1 / 3), (2, 1 / 3)]] * 3
    assert told_to_each(None) == [(0, 1 / 3)]


def test_a_rank_that_fails_fails_all(pool: GlooPool) -> None:
    words = "RuntimeError: rank 1: MemoryError: no room"
    assert pool.run(3, told_to_each, 1) == [words, "MemoryError: no room", words]
    assert told_to_each(0) == "MemoryError: no room"
