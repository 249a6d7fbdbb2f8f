"""The range of nearest distances: an exact test, few false alarms in all windows ever, new classes found."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import betabinom, binom

from dmlstudy import retrieval
from dmlstudy.retrieval import EmbeddingIndex
from dmlstudy.saved import Model
from dmlstudy.serving import drift
from dmlstudy.serving.drift import DistanceRange, alpha_of, at_least, learned
from dmlstudy.serving.gallery import Gallery, build, open_gallery
from dmlstudy.serving.retriever import Retriever

from .conftest import X, embedder
from .test_gallery import embedded

NOTHING = np.empty(0)


def of_queries(distance_N: np.ndarray) -> DistanceRange:
    return DistanceRange.of("queries", distance_N, NOTHING, is_bound=False)


def exceedances(n: int, j: int, m: int, y: int) -> Fraction:
    """P(Y >= y), counted: the orders of n references and m queries in which y or more are beyond the j-th reference."""
    ways = sum(math.comb(m - i + j - 1, m - i) * math.comb(i + n - j, i) for i in range(y, m + 1))
    return Fraction(ways, math.comb(n + m, m))


@pytest.mark.parametrize(("n", "m"), [(20, 5), (99, 7), (150, 40), (1000, 3)])
def test_the_chance_is_that_of_all_orders(n: int, m: int) -> None:
    learned_range = of_queries(np.arange(n, dtype=float))
    j = min(math.ceil(0.99 * (n + 1)), n)
    assert learned_range.upper == j - 1
    for y in range(m + 1):
        assert learned_range.chance(y, m) == pytest.approx(float(exceedances(n, j, m, y)), rel=1e-9)
        half = DistanceRange.of("gallery", np.arange(n, dtype=float), NOTHING, is_bound=False).chance(y, m)
        wider = betabinom.sf(y - 1, m, (n + 1 - j) / 2, j / 2)
        assert half == pytest.approx(max(learned_range.chance(y, m), wider), rel=1e-6)


def test_the_chance_holds_in_every_order_of_few() -> None:
    """Of all orders of 5 references and 3 queries, so many have y queries beyond the largest reference."""
    orders = list(itertools.permutations(range(8)))
    for y in range(4):
        hits = sum(sum(q > max(order[:5]) for q in order[5:]) >= y for order in orders)
        assert at_least(y, 3, 1, 5) == pytest.approx(hits / len(orders), rel=1e-12)


def test_small_chances_are_exact() -> None:
    """As one minus a sum they would be lost in rounding."""
    assert at_least(1000, 1000, 101, 9900) < 1e-300
    assert 0 < at_least(60, 1000, 101, 9900) < 1e-16
    assert at_least(0, 1000, 101, 9900) == pytest.approx(1, abs=1e-9)


def test_equal_distances_make_the_test_milder() -> None:
    """Of codes many distances are equal; those equal to the range's end are within it."""
    rng = np.random.default_rng(3)
    coarse = of_queries(rng.integers(0, 5, 500).astype(float))
    assert coarse.upper == 4
    assert coarse.chance(0, 100) == 1


def test_what_may_be_spent_is_five_percent() -> None:
    assert sum(alpha_of(k) for k in range(1, 100_000)) == pytest.approx(0.05, rel=1e-4)


def test_false_alarms_in_whole_lives() -> None:
    """300 servers with windows of the reference's own kind: each window at 5% would alarm many of them."""
    rng = np.random.default_rng(0)
    lives, windows, size, num = 300, 40, 200, 300
    alarmed = naive = 0
    for _ in range(lives):
        own = of_queries(rng.exponential(size=num))
        beyond = (rng.exponential(size=(windows, size)) > own.upper).sum(axis=1).tolist()
        alarmed += any(own.chance(y, size) <= alpha_of(k) for k, y in enumerate(beyond, 1))
        naive += any(binom.sf(y - 1, size, 0.01) <= 0.05 for y in beyond)
    assert alarmed <= 0.05 * lives
    assert naive > 0.3 * lives


class World:
    """Classes as clouds around points: a gallery of some, and queries of these and of others."""

    def __init__(self, seed: int, num_items: int = 8) -> None:
        self.rng = np.random.default_rng(seed)
        self.centre_CD = self.rng.normal(size=(120, 12))
        label_M = np.repeat(np.arange(60), num_items)
        z_MD = self.of(label_M)
        index = EmbeddingIndex("flat", 12, model_version="m", device="cpu").add(z_MD, np.arange(len(z_MD)))
        labels = [str(each) for each in label_M.tolist()]
        self.gallery = Gallery(index, z_MD, [str(n) for n in range(len(z_MD))], labels, "m", "")

    def of(self, label_N: np.ndarray) -> np.ndarray:
        spread = 0.35 * self.rng.normal(size=(len(label_N), 12))
        return np.asarray(self.centre_CD[label_N] + spread, np.float32)

    def queries(self, num: int, share_new: float) -> np.ndarray:
        """Nearest distances of queries, a share of them of classes that the gallery lacks."""
        known_N, new_N = self.rng.integers(0, 60, num), self.rng.integers(60, 120, num)
        label_N = np.where(self.rng.random(num) < share_new, new_N, known_N)
        return self.gallery.search(self.of(label_N), 1)[1][:, 0].astype(np.float64)

    def learned(self) -> DistanceRange:
        model = types.SimpleNamespace(is_symmetric=True)
        retriever: Any = types.SimpleNamespace(gallery=self.gallery, model=model, space_map=None, among=100)
        return learned(retriever)


def first_alarm(world: World, own: DistanceRange, share_new: float, windows: Sequence[int]) -> int | None:
    for k in windows:
        distance_Q = world.queries(200, share_new)
        if own.chance(int((distance_Q > own.upper).sum()), 200) <= alpha_of(k):
            return k
    return None


def test_a_gallery_s_own_items_stand_for_queries_and_new_classes_are_found() -> None:
    """25 servers: 20 windows of known classes alarm none; then a tenth of the queries is of new classes."""
    false, found = 0, []
    for seed in range(25):
        world = World(seed)
        own = world.learned()
        false += first_alarm(world, own, 0, range(1, 21)) is not None
        found.append(first_alarm(world, own, 0.1, range(21, 26)))
        assert own.new_classes is not None
        told = own.new_classes.share_beyond
        assert told == pytest.approx((world.queries(2000, 1.0) > own.upper).mean(), abs=0.1)
    assert false <= 1
    assert None not in found
    assert np.mean(np.array(found) == 21) > 0.8


def test_items_without_a_mate_are_not_asked_and_few_have_no_range() -> None:
    with pytest.raises(
        ValueError, match="have 0 items with a neighbour, too few for a range; give --watch-ref"
    ):
        World(0, num_items=1).learned()


def test_a_class_that_fills_all_that_is_looked_at_gives_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = World(1).learned().new_classes
    monkeypatch.setattr(drift, "DEEPER", (2, 4))
    bound = World(1).learned().new_classes
    assert exact is not None
    assert bound is not None
    assert (exact.is_bound, bound.is_bound) == (False, True)
    assert bound.share_beyond < exact.share_beyond


def nearest_by_loops(z_ND: np.ndarray, curvature: float | None) -> list[float]:
    found = []
    for own, z_D in enumerate(z_ND.astype(np.float64)):
        others = [other for n, other in enumerate(z_ND.astype(np.float64)) if n != own]
        if z_ND.dtype == np.int8:
            found.append(min(float((z_D != other).sum()) for other in others))
        elif curvature is not None:
            apart = retrieval.hyperbolic_distances(
                np.tile(z_D, (len(others), 1)), np.array(others), curvature
            )
            found.append(float(np.min(apart)))
        else:
            found.append(min(float(np.linalg.norm(z_D - other)) for other in others))
    return found


@pytest.mark.parametrize("kind", ["plain", "codes", "ball"])
def test_nearest_distances_are_those_of_plain_loops(
    kind: str, models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path
) -> None:
    folder = models.get(kind, tmp_path / "ball")
    if kind == "ball":
        embedder(folder, space="ball", curvature=2.0, clip_radius=3.0)
    gallery = build(
        embedded(folder, vectors if kind == "codes" else pictures, tmp_path), tmp_path / "gallery"
    )
    model = Model.open(folder)
    found = learned(Retriever(model, gallery))
    expected = nearest_by_loops(np.asarray(gallery.vectors_MD), model.curvature)
    assert found.num == 30
    assert found.upper == pytest.approx(max(expected), abs=1e-5)
    for level, value in found.quantiles.items():
        assert value == pytest.approx(np.percentile(expected, float(level)), abs=1e-5)
    assert found.new_classes is not None


@pytest.mark.parametrize(
    ("size", "bits", "beside"),
    [
        (4, 32, "float"),
        (4, 8, "float"),
        (None, 8, "int8"),
        (4, 8, "none"),
        (None, 8, "none"),
        (4, 1, "float"),
    ],
)
def test_items_of_short_galleries_are_asked_as_their_vectors_would_be(
    size: int | None, bits: int, beside: str, models: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    z = embedded(models["plain"], pictures, tmp_path)
    gallery = build(z, tmp_path / "gallery", size=size, bits=bits, beside=beside)  # type: ignore[arg-type]
    whole_ND = np.asarray(build(z, tmp_path / "whole").vectors_MD)
    asked_ND = gallery.as_queries(np.arange(30))
    assert asked_ND is not None
    found, expected = gallery.search(asked_ND, 2), gallery.search(whole_ND, 2)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-6)
    assert learned(Retriever(Model.open(models["plain"]), gallery)).num == 30


def test_where_items_cannot_stand_for_queries_a_reference_is_asked_for(
    models: dict[str, Path], pictures: Path, vectors: Path, tmp_path: Path
) -> None:
    z = embedded(models["plain"], pictures, tmp_path)
    build(z, tmp_path / "bits", size=4, bits=1, beside="none")
    bits = Retriever(Model.open(models["plain"]), open_gallery(tmp_path / "bits"))
    with pytest.raises(ValueError, match="keeps no vectors beside its index; give --watch-reference"):
        learned(bits)
    assert learned(bits, pictures).num == 30
    embedded(models["learner"], vectors, tmp_path)
    build(tmp_path / "z.parquet", tmp_path / "online")
    learner = Retriever(Model.open(models["learner"]), open_gallery(tmp_path / "online"))
    with pytest.raises(ValueError, match="embeds queries otherwise than items; give --watch-reference"):
        learned(learner)
    assert learned(learner, vectors).num == 30


def test_a_reference_of_queries_leaves_each_one_s_own_item_out_and_tells_new_classes(
    models: dict[str, Path], vectors: Path, tmp_path: Path
) -> None:
    embedded(models["codes"], vectors, tmp_path)
    gallery = build(tmp_path / "z.parquet", tmp_path / "gallery")
    retriever = Retriever(Model.open(models["codes"]), gallery)
    assert learned(retriever, vectors).quantiles == learned(retriever).quantiles
    other = tmp_path / "other.npz"
    np.savez(other, x=np.concatenate([X, -X[:5]]), y=np.array([*(np.arange(30) % 3), *[7] * 5]))
    found = learned(retriever, other)
    assert found.quantiles["99.9"] == 0  # the same vectors from another file are no own items
    assert found.new_classes is not None
    assert (found.num, found.new_classes.num, found.new_classes.share_beyond) == (30, 5, 1)
    np.savez(other, x=X[:5])
    with pytest.raises(
        ValueError, match=r"other\.npz: of the gallery's classes has 5 items .*give 20 at least"
    ):
        learned(retriever, other)
