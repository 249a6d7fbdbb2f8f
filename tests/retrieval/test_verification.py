"""Errors over all pairs: hand values, plain loops in float64, and no array that grows with the pairs."""

from __future__ import annotations

import math
import tracemalloc
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dmlstudy.retrieval import pairs as sweeps
from dmlstudy.retrieval.open_set import HALVINGS, halved, open_set
from dmlstudy.retrieval.pairs import OrderStatistics, Pairs, count_by_class
from dmlstudy.retrieval.verification import (
    fewest_impostors,
    is_measurable,
    opis,
    opis_grid,
    thresholds,
    verify,
)

X_Z = np.array(
    [(1, 0, 0), (0.8, 0.6, 0), (0.6, 0, 0.8), (0, 0.6, 0.8), (0, 0.96, -0.28), (-0.6, 0.8, 0)], np.float32
)
X_Y = np.array([0, 0, 0, 1, 1, 2])


def clustered(
    sizes: list[int], dim: int = 8, seed: int = 0, spread: float = 0.9
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Unit vectors around their classes' centres, in random order; labels with gaps."""
    rng = np.random.default_rng(seed)
    labels_N = rng.permutation(np.repeat(3 * np.arange(len(sizes)) + 5, sizes))
    centre_CD = rng.normal(size=(3 * len(sizes) + 5, dim))
    z_ND = centre_CD[labels_N] + spread * rng.normal(size=(len(labels_N), dim))
    z_ND /= np.linalg.norm(z_ND, axis=1, keepdims=True)
    return z_ND.astype(np.float32), labels_N


Pair = tuple[float, Any, Any]


def listed(
    z_ND: NDArray[Any],
    labels_N: NDArray[np.int64],
    query: NDArray[np.int64] | None = None,
    gallery: NDArray[np.int64] | None = None,
) -> list[Pair]:
    """(score, label, label) of every pair, by plain loops."""
    if query is None or gallery is None:
        places = list(combinations(range(len(z_ND)), 2))
    else:
        both = {(min(q, g), max(q, g)) for q in query.tolist() for g in gallery.tolist() if q != g}
        places = sorted(both)
    return [(float(z_ND[i] @ z_ND[j]), labels_N[i], labels_N[j]) for i, j in places]


def split(found: list[Pair]) -> tuple[list[float], list[float]]:
    """Scores of genuine pairs and of impostors."""
    return [s for s, a, b in found if a == b], [s for s, a, b in found if a != b]


def plain_threshold(impostors: list[float], rate: float) -> float:
    """The impostor that is the largest one not accepted."""
    return sorted(impostors, reverse=True)[math.floor(round(rate * len(impostors), 9))]


def plain_eer(genuine: list[float], impostors: list[float]) -> float:
    best = (math.inf, math.inf)
    for theta in {*genuine, *impostors}:
        fmr = sum(s >= theta for s in impostors) / len(impostors)
        fnmr = sum(s < theta for s in genuine) / len(genuine)
        best = min(best, (round(abs(fmr - fnmr), 12), (fmr + fnmr) / 2))
    return best[1]


def test_hand_values_of_six_vectors() -> None:
    pairs = Pairs(X_Z, X_Y)
    assert (pairs.num_genuine, pairs.num_impostors) == (4, 11)
    assert pairs.genuine_C.tolist() == [3, 1, 0]
    assert pairs.impostors_C.tolist() == [9, 8, 5]
    found = OrderStatistics(pairs, [0.2], with_equal_errors=True)
    cut = found.cuts[0.2]
    assert cut.theta > 0.576
    assert (cut.num_impostors / 11, 1 - cut.num_genuine / 4) == (2 / 11, 0.5)
    assert found.equal_errors == pytest.approx(0.3068181818, abs=1e-10)
    grid = opis_grid(1 - 0.8**2 / 2, 1 - 1.2**2 / 2)[::-1]
    counts = count_by_class(pairs, grid)
    assert opis(pairs, counts.accepted_TC, counts.rejected_TC) == pytest.approx(0.1139216672, abs=1e-10)


@pytest.mark.parametrize(
    "sizes",
    [[30, 1, 7, 2, 12, 25], [2] * 40, [60, 60], [1, 1, 1, 90]],
    ids=["unequal", "pairs", "two classes", "one large"],
)
def test_the_same_as_plain_loops(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of other sizes too: rows and columns that end in the middle."""
    z_ND, labels_N = clustered(sizes)
    genuine, impostors = split(listed(z_ND, labels_N))
    for tile in (1024, 17):
        monkeypatch.setattr(sweeps, "_TILE", tile)
        pairs = Pairs(z_ND, labels_N)
        assert (pairs.num_genuine, pairs.num_impostors) == (len(genuine), len(impostors))
        rates = [rate for rate in (0.3, 0.1, 0.05, 0.01) if is_measurable(rate, len(impostors))]
        found = OrderStatistics(pairs, rates, with_equal_errors=True)
        for rate in rates:
            theta = plain_threshold(impostors, rate)
            assert found.cuts[rate].theta == pytest.approx(theta, abs=1e-6)
            assert found.cuts[rate].num_impostors == math.floor(round(rate * len(impostors), 9))
            assert abs(found.cuts[rate].num_genuine - sum(s > theta for s in genuine)) <= 1
        assert found.equal_errors == pytest.approx(plain_eer(genuine, impostors), abs=2 / len(genuine))


def test_scores_that_are_exact_give_exact_errors() -> None:
    """Vectors of few bits have exact products in float32, ties, zeros of both signs and negative scores."""
    rng = np.random.default_rng(3)
    z_ND = (rng.integers(-2, 3, (90, 4)) / 4).astype(np.float32)
    labels_N = rng.integers(0, 9, 90)
    genuine, impostors = split(listed(z_ND, labels_N))
    found = OrderStatistics(Pairs(z_ND, labels_N), [0.1, 0.02], with_equal_errors=True)
    for rate, cut in found.cuts.items():
        theta = plain_threshold(impostors, rate)
        assert cut.theta == np.nextafter(np.float32(theta), np.float32(np.inf))
        assert cut.num_impostors == sum(s > theta for s in impostors) <= rate * len(impostors)
        assert cut.num_genuine == sum(s > theta for s in genuine)
    assert found.equal_errors == pytest.approx(plain_eer(genuine, impostors), abs=1e-15)
    theta_T, impostors_T, genuine_T = found.curve()
    for theta, num_impostors, num_genuine in zip(theta_T, impostors_T, genuine_T, strict=True):
        assert num_impostors == sum(s >= theta for s in impostors)
        assert num_genuine == sum(s >= theta for s in genuine)


@pytest.mark.parametrize("overlap", [0, 12])
def test_queries_and_a_gallery(overlap: int) -> None:
    """Items on both sides make each pair once, and none with themselves."""
    z_ND, labels_N = clustered([9, 14, 3, 20, 11], seed=1)
    rng = np.random.default_rng(2)
    order = rng.permutation(len(z_ND))
    query, gallery = order[: 25 + overlap], order[25:]
    found = listed(z_ND, labels_N, query, gallery)
    genuine, impostors = split(found)
    pairs = Pairs(z_ND, labels_N, query, gallery)
    assert (pairs.num_genuine, pairs.num_impostors) == (len(genuine), len(impostors))
    for place, unit in enumerate(pairs.unit_C):
        assert pairs.genuine_C[place] == sum(a == b == unit for _, a, b in found)
        assert pairs.impostors_C[place] == sum((a == unit) != (b == unit) for _, a, b in found)
    theta = sorted(impostors)[-len(impostors) // 10] + 1e-4
    counts = count_by_class(pairs, [theta, 2.0], most_class_pairs=5)
    for place, unit in enumerate(pairs.unit_C):
        assert counts.accepted_TC[0, place] == sum(
            s >= theta for s, a, b in found if (a == unit) != (b == unit)
        )
        assert counts.rejected_TC[0, place] == sum(s < theta for s, a, b in found if a == b == unit)
    assert counts.accepted_TC[1].sum() == 0
    assert counts.rejected_TC[1].tolist() == pairs.genuine_C.tolist()
    held = {(min(a, b), max(a, b)) for s, a, b in found if a != b and s >= theta}
    assert counts.class_pairs_T.tolist() == [min(5, len(held)), 0]


def test_every_metric_against_plain_loops() -> None:
    z_ND, labels_N = clustered([12, 5, 20, 9, 1, 30, 7, 16, 2, 11, 14, 8], seed=5)
    found = listed(z_ND, labels_N)
    genuine, impostors = split(found)
    metrics = verify(Pairs(z_ND, labels_N), {0.1: 0.42}).metrics
    assert metrics["num_genuine_pairs"] == len(genuine)
    assert metrics["num_impostor_pairs"] == len(impostors)
    at = plain_threshold(impostors, 1e-2)
    own = {c: [s for s, a, b in found if a == b == c] for c in set(labels_N.tolist())}
    others = {c: [s for s, a, b in found if (a == c) != (b == c)] for c in own}
    fnmr_of = [np.mean([s <= at for s in own[c]]) for c in own if own[c]]
    fmr_of = [np.mean([s > at for s in others[c]]) for c in own]
    once = 1.5 / len(genuine)
    assert metrics["fnmr_at_fmr_1e-2"] == pytest.approx(np.mean([s <= at for s in genuine]), abs=once)
    assert metrics["macro_fnmr_at_fmr_1e-2"] == pytest.approx(np.mean(fnmr_of), abs=1e-9)
    assert metrics["worst_fnmr_at_fmr_1e-2"] == pytest.approx(np.mean(sorted(fnmr_of)[-2:]), abs=1e-9)
    # the largest impostor that is not accepted may differ from its plain score by rounding
    assert metrics["worst_fmr_at_fmr_1e-2"] == pytest.approx(np.mean(sorted(fmr_of)[-2:]), abs=2e-3)
    assert metrics["fmr_at_tau_1e-1"] == pytest.approx(np.mean([s >= 0.42 for s in impostors]), abs=1e-9)
    assert metrics["fnmr_at_tau_1e-1"] == pytest.approx(np.mean([s < 0.42 for s in genuine]), abs=1e-9)
    ends = [math.sqrt(2 - 2 * plain_threshold(impostors, rate)) for rate in (1e-2, 1e-1)]
    squares = []
    for d in np.linspace(*ends, 101):
        use = []
        for c in (c for c in own if own[c]):
            a = np.mean([math.sqrt(2 - 2 * s) <= d for s in own[c]])
            b = np.mean([math.sqrt(2 - 2 * s) > d for s in others[c]])
            use.append(2 * a * b / (a + b) if a + b else 0.0)
        squares.append((np.array(use) - np.mean(use)) ** 2)
    assert metrics["opis"] == pytest.approx(np.mean(squares), rel=2e-3)


def test_what_has_too_few_pairs_is_left_out() -> None:
    z_ND, labels_N = clustered([20, 20, 20])  # 1,200 impostors
    metrics = verify(Pairs(z_ND, labels_N)).metrics
    assert {name for name in metrics if "fnmr_at" in name} >= {"fnmr_at_fmr_1e-2"}
    assert not [name for name in metrics if name.endswith(("1e-3", "1e-4"))]
    assert thresholds(Pairs(z_ND, labels_N), [1e-2, 1e-3]).keys() == {1e-2}
    assert (fewest_impostors(1e-3), fewest_impostors(0.3)) == (10_000, 34)
    assert is_measurable(1e-3, 10_000)
    assert not is_measurable(1e-3, 9_999)
    for sizes in ([5], [1, 1, 1]):  # no impostor, no genuine pair
        few = verify(Pairs(*clustered(sizes)))
        assert set(few.metrics) == {"num_genuine_pairs", "num_impostor_pairs"}
        assert (few.curve, few.told) == ([], None)


def test_what_cannot_be_compared_is_refused() -> None:
    z_ND, labels_N = clustered([3, 3])
    with pytest.raises(ValueError, match="labels of shape"):
        Pairs(z_ND, labels_N[:-1])
    with pytest.raises(ValueError, match="at least 1 of each"):
        Pairs(z_ND, labels_N, query=np.arange(0))
    z_ND[2, 1] = np.nan
    with pytest.raises(ValueError, match="embedding 2 is not finite"):
        Pairs(z_ND, labels_N)


@pytest.mark.parametrize(("num", "dim"), [(10, 128), (25, 128), (100, 128)])
def test_collapsed_embeddings_have_errors_too(num: int, dim: int) -> None:
    """All scores are equal, wherever a pair stands in a tile: nothing can be told apart."""
    for seed in range(8):
        z_D = np.random.default_rng(seed).normal(size=dim)
        z_ND = np.tile((z_D / np.linalg.norm(z_D)).astype(np.float32), (num, 1))
        metrics = verify(Pairs(z_ND, np.sort(np.arange(num) % 3))).metrics
        assert metrics["eer"] == 0.5
        assert num < 100 or (metrics["fnmr_at_fmr_1e-2"], metrics["opis"]) == (1, 0)


def test_equal_scores_are_equal_in_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of 24 bits, whose cosines no float holds: pairs of as many equal bits are let through together."""
    rng = np.random.default_rng(0)
    bits_ND = rng.choice([-1, 1], (400, 24))
    labels_N = np.repeat(np.arange(40), 10)
    bits_ND = np.where(rng.random((400, 24)) < 0.25, bits_ND, rng.choice([-1, 1], (40, 24))[labels_N])
    z_ND = (bits_ND / np.sqrt(24)).astype(np.float32)
    genuine, impostors = split(listed(bits_ND, labels_N))
    rejected = sum(s <= plain_threshold(impostors, 1e-2) for s in genuine) / len(genuine)
    found = []
    for tile, order in ((1024, labels_N), (1024, rng.permutation(40)[labels_N]), (37, labels_N)):
        monkeypatch.setattr(sweeps, "_TILE", tile)
        found.append(verify(Pairs(z_ND, order)).metrics)
    for metrics in found:
        assert metrics["fnmr_at_fmr_1e-2"] == rejected
        assert metrics["eer"] == pytest.approx(plain_eer(genuine, impostors), abs=1e-12)
        assert metrics == pytest.approx(found[0], abs=1e-12)


def test_no_array_grows_with_the_pairs() -> None:
    """16 times the pairs take hardly more: counts of bits, tiles and classes are all there is."""

    def peak(num_classes: int) -> int:
        z_ND, labels_N = clustered([6] * num_classes, dim=4)
        tracemalloc.start()
        verify(Pairs(z_ND, labels_N), {1e-3: 0.9})
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few = peak(350)  # 2,100 items, 3 tiles a side, 2.2 million pairs
    many = peak(1400)  # 35 million pairs: 140 MB as float32
    assert many < 1.5 * few
    assert many < 100e6


def plain_open_set(
    z_ND: NDArray[np.float32], labels_N: NDArray[np.int64]
) -> list[tuple[list[float], list[bool], list[float]]]:
    found = []
    for halving in range(HALVINGS):
        is_known_N, is_first_N = halved(labels_N, halving)
        enrolled = [i for i in range(len(z_ND)) if is_known_N[i] and is_first_N[i]]
        known, right, unknown = [], [], []
        for i in sorted(set(range(len(z_ND))) - set(enrolled)):
            scores = {j: float(z_ND[i].astype(np.float64) @ z_ND[j].astype(np.float64)) for j in enrolled}
            best = max(scores, key=lambda j: scores[j])
            if is_known_N[i]:
                known.append(scores[best])
                right.append(bool(labels_N[best] == labels_N[i]))
            else:
                unknown.append(scores[best])
        found.append((known, right, unknown))
    return found


def test_rejection_of_the_unknown_against_plain_loops() -> None:
    z_ND, labels_N = clustered([14, 9, 30, 1, 22, 17, 40, 6, 25, 12, 33], seed=7)
    auroc, fpr, identified = [], [], []
    for known, right, unknown in plain_open_set(z_ND, labels_N):
        auroc.append(np.mean([(k > u) + (k == u) / 2 for k in known for u in unknown]))
        least = sorted(known, reverse=True)[math.ceil(0.95 * len(known)) - 1]
        fpr.append(np.mean([u >= least for u in unknown]))
        beyond = sorted(unknown, reverse=True)[len(unknown) // 10]
        identified.append(np.mean([r and k > beyond for k, r in zip(known, right, strict=True)]))
    found = open_set(z_ND, labels_N)
    assert found["unknown_auroc"] == pytest.approx(np.mean(auroc), abs=1e-6)
    assert found["unknown_fpr_at_tpr_95"] == pytest.approx(np.mean(fpr), abs=1e-9)
    assert "dir_at_far_1e-1" not in found  # some halvings have fewer than 100 unknown queries
    twice = open_set(np.repeat(z_ND, 2, axis=0), np.repeat(labels_N, 2))
    assert 0 < twice["dir_at_far_1e-1"] <= 1
    assert "dir_at_far_1e-2" not in twice


def test_right_and_above_all_but_a_tenth_of_the_unknown() -> None:
    z_ND, labels_N = clustered([40] * 8, seed=9)
    expected = []
    for known, right, unknown in plain_open_set(z_ND, labels_N):
        beyond = sorted(unknown, reverse=True)[len(unknown) // 10]
        expected.append(np.mean([r and k > beyond for k, r in zip(known, right, strict=True)]))
    assert open_set(z_ND, labels_N)["dir_at_far_1e-1"] == pytest.approx(np.mean(expected), abs=1e-9)


def test_classes_are_halved_for_all_models_alike() -> None:
    labels_N = clustered([4, 7, 1, 10, 5])[1]
    halvings = [halved(labels_N, number) for number in range(HALVINGS)]
    assert len({known_N.tobytes() for known_N, _ in halvings}) > 1
    for number, (is_known_N, is_first_N) in enumerate(halvings):
        again = halved(labels_N, number)
        assert (is_known_N == again[0]).all()
        assert (is_first_N == again[1]).all()
        assert len(set(labels_N[is_known_N])) == 3
        for label in set(labels_N.tolist()):
            own = labels_N == label
            assert len(set(is_known_N[own])) == 1
            assert is_first_N[own].sum() == -(-own.sum() // 2)


def test_a_gallery_of_its_own_is_what_is_enrolled() -> None:
    z_ND, labels_N = clustered([20] * 6, seed=8, spread=0.01)
    order = np.random.default_rng(0).permutation(len(z_ND))
    found = open_set(z_ND, labels_N, order[:60], order[60:])
    assert found["unknown_auroc"] > 0.99
    assert open_set(z_ND, labels_N, order[:60], order[:0]) == {}
    assert open_set(*clustered([8])) == {}  # no unknown class
    assert open_set(*clustered([1, 1, 1])) == {}  # nobody is known
